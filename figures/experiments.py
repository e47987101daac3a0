"""What draw.py makes of the experiments: figures, predictions, and the tables of notes/reality.md.

Knows: the recordings' names, and what is said of them. Does not know: how a picture is drawn.
"""

import json
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from watched import by_watched_steps

from nanoteach.bench.cases import EXPERIMENTS
from nanoteach.bench.causes import MISS, cause_of
from nanoteach.bench.recording import FEW, MANY, PROMPTS, Judged, Recording
from nanoteach.bench.table import Row, number
from nanoteach.course import pictures_11
from nanoteach.course.pictures_11 import EXPERIMENT_PICTURES, Evidence
from nanoteach.results import RESULTS, recorded

HERE = Path(__file__).parent
FILES = ("experiments_h200", "engines_h200", "dram_h200")
PREDICTIONS = RESULTS / "predictions_h200.json"
DIGITS = 6
"""Of a prediction. It is added up in one order, so they are the same everywhere."""


def rounded(value: float) -> float:
    """To DIGITS digits."""
    return float(f"{value:.{DIGITS}g}")


class Experiments:
    """The recordings, and both predictions of every point."""

    def __init__(self) -> None:
        recording = Recording.of(*FILES[:2])
        assert recording is not None
        self.recording = recording
        self.model = recording.calibrated()
        self.judged = [
            row._replace(bound=rounded(row.bound), calibrated=rounded(row.calibrated))
            for row in recording.judge(self.model)
        ]
        self.watched = by_watched_steps(recording, self.model)
        self.gpu_alone = by_watched_steps(recording, self.model, host=False)
        self.host_alone = by_watched_steps(recording, self.model, gpu=False)
        self.evidence = Evidence(recording, self.judged)
        there = (RESULTS / f"{FILES[2]}.json").is_file()
        self.dram = [Row(**row) for row in recorded(FILES[2])["rows"]] if there else []

    def predictions(self) -> str:
        """All predictions as a file: what the calibrated model is, and each point."""
        rows = [
            row._asdict()
            | {"cause": cause_of(row, self.recording), "watched": self.by_watched(row)}
            | {"gpu alone": self.said(self.gpu_alone, row)}
            | {"host alone": self.said(self.host_alone, row)}
            for row in self.judged
        ]
        return json.dumps(
            {
                "command": "python figures/draw.py",
                "fitted on": [FEW, MANY, PROMPTS],
                "overhead": rounded(self.model.overhead),
                "read_bandwidth": rounded(self.model.hardware.read_bandwidth),
                "flops": rounded(self.model.hardware.flops),
                "rows": rows,
            },
            indent=1,
        ) + "\n"  # fmt: skip

    def by_watched(self, row: Judged) -> float | None:
        """What both hands say of this point; None where its engine's steps were not watched."""
        return self.said(self.watched, row)

    def said(self, by: dict[tuple[str, str], float], row: Judged) -> float | None:
        """The number for this point, in so many digits."""
        value = by.get((row.case, row.metric))
        return None if value is None else rounded(value)

    def near(self, by: dict[tuple[str, str], float], row: Judged) -> bool:
        """Whether there is a number that comes within MISS."""
        value = self.said(by, row)
        return value is not None and abs(value / row.measured - 1) <= MISS

    def open(self, row: Judged) -> bool:
        """Whether both hands together do not account for it either."""
        return self.by_watched(row) is not None and not self.near(self.watched, row)

    def figures(self, svg: Callable[[Any], str]) -> dict[Path, str]:
        """Every figure whose experiment was recorded."""
        made = {name: draw(self.evidence) for name, draw in EXPERIMENT_PICTURES.items()}
        made["errors"] = pictures_11.errors(self.judged)
        if self.dram:
            made["dram"] = pictures_11.dram(self.dram)
        return {HERE / "experiments" / f"{name}.svg": svg(figure) for name, figure in made.items()}

    # --- tables --------------------------------------------------------------------------------

    def ratio(self, metric: str, slow: str, fast: str) -> tuple[float, float, float]:
        """Two medians, and how many times the first is the second."""
        a, b = (self.recording.median(case, metric) for case in (slow, fast))
        return a, b, a / b

    def claims(self) -> str:
        """What README says, in the numbers of the files."""
        machine, best = self.recording.found["environment"], self.recording.found["settings"]
        lines = [
            f"`bash benchmarks/experiments_gpu.sh DIR` on one {machine['gpu']} (driver "
            f"{machine['driver']}, torch {machine['torch']}), {machine['date']}: random weights of "
            f"Qwen3-0.6B's shape, {self.recording.found['repeats']} runs of each case, medians; "
            f"pool {best['engine']['num_blocks']:,} blocks, {best['engine']['num_graphs']} graphs.",
            "",
            f"- The calibrated model has {1e6 * self.model.overhead:.0f} µs a step, "
            f"{self.model.hardware.read_bandwidth / 1e9:,.0f} GB/s and "
            f"{self.model.hardware.flops / 1e12:.0f} TFLOP/s, from three points. " + self.within(),
        ]
        if self.dram:
            moved = [row for row in self.dram if row.metric == "moved"]
            errors = [row.median / row.bound - 1 for row in moved if row.bound]
            sizes = [row.workload.split()[-1] for row in moved]
            lines.append(
                f"- DRAM bytes of a decode step, counted by the hardware at batch "
                f"{', '.join(sizes)}: {', '.join(f'{error:+.1%}' for error in errors)} against "
                "W + B · KV(T)."
            )
        lines += self.chunked() + self.prefix()
        return "\n".join(lines)

    def within(self) -> str:
        """How many points both predictions hit."""
        graphs = [row for row in self.judged if not row.fitted and not self.launched(row)]
        near = [row for row in graphs if abs(row.error) <= MISS]
        bound = [row for row in graphs if abs(row.bound_error) <= MISS]
        missed = [row for row in graphs if cause_of(row, self.recording)]
        still = sum(self.open(row) for row in missed)
        in_all = sum(self.near(self.watched, row) for row in graphs)
        others = len(graphs) - len(near)
        whose = f"Each of the other {others} has"
        if len(missed) < others:
            whose = f"{len(missed)} of the other {others} have"
        come = f"all of them come within {MISS:.0%}"
        if still:
            come = f"{len(missed) - still} of them come within {MISS:.0%}, {still} stay open"
        gpu, host = (
            sum(self.near(by, row) for row in graphs) for by in (self.gpu_alone, self.host_alone)
        )
        return (
            f"Of the {len(graphs)} others on stage 8, {len(near)} are within {MISS:.0%} (the "
            f"bound: {len(bound)}). {whose} a measured cause. On a clock on which the GPU takes "
            f"as long as in the watched steps, and the host as long as it did in these very runs, "
            f"{come} ({in_all} of the {len(graphs)} in all; with the GPU's times alone {gpu}, with "
            f"the host's alone {host})."
        )

    def launched(self, row: Judged) -> bool:
        """Whether the point is of an engine without graphs."""
        return row.experiment in ("kv_cache", "backends") or row.case.startswith("no graphs")

    def chunked(self) -> list[str]:
        """Budgets and waits."""
        lines = []
        for loop, words in (("plain loop", "in the plain loop"), ("decodes first", "a step ahead")):
            pair = f"{loop}, unlimited", f"{loop}, 256"
            if all(self.recording.measured(case, "ITL max") for case in pair):
                slow, fast, times = self.ratio("ITL max", *pair)
                more = ""
                if all(self.recording.measured(case, "two tokens") for case in pair):
                    two = self.ratio("two tokens", *pair)
                    more = f"; for two tokens in a row {1e3 * two[0]:.1f} and {1e3 * two[1]:.1f} ms"
                lines.append(
                    f"- Six prompts of 2,048 tokens come while 16 requests decode ({words}): the "
                    f"longest gap is {1e3 * slow:.1f} ms without a limit and {1e3 * fast:.1f} ms "
                    f"at a budget of 256, {times:.1f} times less{more}."
                )
        return lines

    def prefix(self) -> list[str]:
        """A beginning that 32 requests share."""
        pair = "prefix caching off", "prefix caching on"
        if not all(self.recording.measured(case, "TTFT") for case in pair):
            return []
        workload = self.recording.workload(pair[0])
        decoded = sum(workload.output_lens) - len(workload.prompts)
        tokens = [self.recording.median(case, "computed") - decoded for case in pair]
        slow, fast, times = self.ratio("TTFT", *pair)
        return [
            f"- 32 requests that share 1,024 tokens compute {tokens[1]:,.0f} prompt tokens "
            f"instead of {tokens[0]:,.0f} with prefix caching, {tokens[0] / tokens[1]:.1f} times "
            f"fewer, and their median TTFT is {1e3 * fast:.1f} ms instead of {1e3 * slow:.1f}, "
            f"{times:.1f} times less."
        ]

    def all_rows(self) -> str:
        """Every number that was measured, with both predictions, as Markdown."""
        predicted = {(row.case, row.metric): row for row in self.judged}
        lines: list[str] = []
        for experiment, rows in self.by_experiment().items():
            lines += ["", f"### {experiment}", ""]
            lines += [
                "| | measure | median | least to most | bound | error | calibrated | error |",
                "|---|---|--:|--:|--:|--:|--:|--:|",
            ]
            for row in rows:
                judged = predicted.get((row.workload, row.metric))
                lines.append(
                    f"| {row.workload} | {row.metric}, {row.unit} | {cells(row, judged)} |"
                )
            lines += self.why(experiment)
        return "\n".join(lines).strip()

    def by_experiment(self) -> dict[str, list[Row]]:
        """The rows, under the name of what they belong to."""
        size = self.recording.model.vocab_size, self.recording.found["small"]
        owner = {case.name: name for name, make in EXPERIMENTS.items() for case in make(*size)}
        grouped: dict[str, list[Row]] = {}
        for row in [*self.recording.rows.values(), *self.dram]:
            name = owner.get(row.workload)
            if name is None:
                starts = {"blocks": "paged", "rows": "paged", "DRAM": "dram", "kernels": "kernels"}
                starts |= {"a chain": "kernels", "the layers": "gemm", "a square": "gemm"}
                name = next((n for s, n in starts.items() if row.workload.startswith(s)), "not run")
            grouped.setdefault(name, []).append(row)
        return grouped

    def why(self, experiment: str) -> list[str]:
        """The causes of this experiment's misses, and what stays unresolved."""
        missed = [r for r in self.judged if r.experiment == experiment and abs(r.error) > MISS]
        causes = Counter(cause_of(row, self.recording) for row in missed)
        lines = []
        for cause, count in causes.items():
            points = [
                f"{r.case} ({r.metric})" for r in missed if cause_of(r, self.recording) == cause
            ]
            some = ", ".join(points[:3]) + (f" and {count - 3} more" if count > 3 else "")
            what = f"{cause}." if cause else "unresolved: no measurement of ours explains it."
            lines += ["", f"Missed by more than {MISS:.0%}: {some}. {what[0].upper()}{what[1:]}"]
        return lines + self.still_open(missed)

    def still_open(self, missed: list[Judged]) -> list[str]:
        """Which of these misses remain where every step takes as long as the nearest watched."""
        tested = [row for row in missed if self.by_watched(row) is not None]
        left = []
        for row in filter(self.open, tested):
            error = self.watched[row.case, row.metric] / row.measured - 1
            left.append(f"{row.case} ({row.metric}, {error:+.0%})")
        if not tested:
            return []
        words = f"{len(left)} stay open: {', '.join(left)}." if left else "none stays open."
        own = "On the clock with both hands"
        return ["", f"{own}, of these {len(tested)}, {words}"]


def cells(row: Row, judged: Judged | None) -> str:
    """The last six columns."""
    if not row.samples:
        return f"none | {row.note} | | | |"
    low, high = number(min(row.samples)), number(max(row.samples))
    spread = "" if low == high else f"{low} to {high}"
    parts = [number(statistics.median(row.samples)), spread]
    if row.bound is None:
        return " | ".join([*parts, "", "", "", ""])
    error = f"{row.bound / row.median - 1:+.0%}" if row.median else ""
    parts += [number(row.bound), error]
    if judged is None:
        return " | ".join([*parts, "", ""])
    mark = "fitted" if judged.fitted else f"{judged.error:+.0%}"
    return " | ".join([*parts, number(judged.calibrated), mark])


def missing() -> list[str]:
    """Recordings that are not there."""
    return [name for name in FILES if not (RESULTS / f"{name}.json").is_file()]
