"""Result files of `nanoteach bench`, read back: what ran, what came, and both predictions of it.

The cases are made anew from their names, so a prediction is of the very same requests.

Knows: result files, how to simulate a case. Does not know: engines, devices.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from nanoteach.bench.calibrated import Calibrated, Point, fit
from nanoteach.bench.cases import EXPERIMENTS, Case
from nanoteach.bench.serving import simulate
from nanoteach.bench.table import Row
from nanoteach.bench.workloads import METRICS, StepLog, Workload
from nanoteach.config import EngineConfig, ModelConfig, option_names
from nanoteach.cost_model import Work, step_cost
from nanoteach.hardware import Hardware
from nanoteach.results import RESULTS, recorded

FEW, MANY = "batch 1 x (1,024 + 256)", "batch 128 x (1,024 + 256)"
PROMPTS = "prefill 16 x 1,024"
TIMED = ("tok/s", "s")


class Judged(NamedTuple):
    """A number, both predictions of it, and whether the model was fitted on it."""

    experiment: str
    case: str
    metric: str
    unit: str
    measured: float
    bound: float
    calibrated: float
    fitted: bool

    @property
    def error(self) -> float:
        """The calibrated prediction's, as a share: -0.1 is 10% too few."""
        return self.calibrated / self.measured - 1

    @property
    def bound_error(self) -> float:
        """The bound's, likewise."""
        return self.bound / self.measured - 1


def predictions(name: str = "predictions_h200") -> list[Judged]:
    """Both predictions of every point, as `make figures` has written them down."""
    rows = recorded(name)["rows"]
    return [Judged(*(row[field] for field in Judged._fields)) for row in rows]


class Recording:
    """A result file of `nanoteach bench`, and what its cases were."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found
        self.model = ModelConfig(**found["config"])
        self.hardware = Hardware(**found["hardware"])
        self.host: dict[str, list[int]] = found.get("host", {})
        self.bytes_per_value = 2 if found["dtype"] == "bfloat16" else 4
        self.rows: dict[tuple[str, str], Row] = {
            (row["workload"], row["metric"]): Row(**row) for row in found["rows"]
        }

    @classmethod
    def of(cls, *names: str) -> "Recording | None":
        """Result files of one machine as one; those that are not there are left out."""
        files = [recorded(name) for name in names if (RESULTS / f"{name}.json").is_file()]
        if not files:
            return None
        whole = dict(files[0])
        for key in ("settings", "data", "profiles", "host"):
            whole[key] = {k: v for file in reversed(files) for k, v in file.get(key, {}).items()}
        whole["rows"] = [row for file in files for row in file["rows"]]
        return cls(whole)

    def measured(self, name: str, metric: str) -> bool:
        """Whether there is a number."""
        row = self.rows.get((name, metric))
        return row is not None and bool(row.samples)

    def median(self, name: str, metric: str) -> float:
        """Of a row's samples. Raises KeyError where there is no such row."""
        return self.rows[name, metric].median

    def cases(self) -> Iterator[tuple[str, Case]]:
        """(experiment, case) of everything that was measured."""
        for name, make in EXPERIMENTS.items():
            for case in make(self.model.vocab_size, self.found["small"]):
                if self.measured(case.name, case.workload.metrics[0]):
                    yield name, case

    def workload(self, name: str) -> Workload:
        """By the name of its case. Raises ValueError where that was not measured."""
        for _, case in self.cases():
            if case.name == name:
                return case.workload
        raise ValueError(f"{name!r} was not measured")

    def engine(self, case: Case) -> tuple[EngineConfig, bool]:
        """The options of the case's engine, with its pool; and whether it is one step ahead."""
        settings = self.found["settings"]
        told = settings.get(f"engine {case.engine}") or settings["engine"]
        options = {name: told[name] for name in option_names(EngineConfig) if name in told}
        options["num_gpu_blocks_override"] = told.get("num_blocks")
        return EngineConfig(**options), told.get("runner") == "GraphRunner"

    def decode_point(self, name: str) -> Point:
        """An average decode step of requests that are all alike."""
        workload = self.workload(name)
        batch, out = len(workload.prompts), workload.output_lens[0]
        work = [Work(1, len(workload.prompts[0]) + out // 2)] * batch
        seconds = batch / self.median(name, "decode steps")
        return Point(step_cost(self.model, work, self.bytes_per_value), seconds)

    def prompt_point(self, name: str) -> Point:
        """A step of prompts alone."""
        workload = self.workload(name)
        work = [Work(len(prompt), 0) for prompt in workload.prompts]
        seconds = sum(map(len, workload.prompts)) / self.median(name, "prompt")
        return Point(step_cost(self.model, work, self.bytes_per_value), seconds)

    def calibrated(self, few: str = FEW, many: str = MANY, prompts: str = PROMPTS) -> Calibrated:
        """Fitted on three of its points."""
        points = self.decode_point(few), self.decode_point(many), self.prompt_point(prompts)
        return fit(self.hardware, *points)

    def judge(self, by: Calibrated) -> list[Judged]:
        """Every speed and every time, beside both predictions."""
        rows = []
        fitted = {(FEW, "decode steps"), (MANY, "decode steps"), (PROMPTS, "prompt")}
        for experiment, case in self.cases():
            config, overlapped = self.engine(case)
            log = StepLog(by.clock(self.model, self.bytes_per_value))
            times = simulate(case, self.model, config, log, overlapped)
            for metric in case.workload.metrics:
                unit, value = METRICS[metric]
                key = case.name, metric
                if unit in TIMED and self.measured(*key) and (bound := self.rows[key].bound):
                    rows.append(
                        Judged(
                            experiment, *key, unit, self.median(*key), bound,
                            value(case.workload, times), key in fitted,
                        )
                    )  # fmt: skip
        return rows
