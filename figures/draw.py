"""Draws every figure, and fills in README's tables, from the files in figures/results/.

    python figures/draw.py           write them
    python figures/draw.py --check   say what would change, and fail if anything would

The same results give the same bytes. Results that are older than the code they measured are listed.
"""

import argparse
import io
import json
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from experiments import PREDICTIONS, Experiments, missing

from nanoteach.bench.serve import KEEPS_UP
from nanoteach.course import pictures_10
from nanoteach.course.pictures import STYLE
from nanoteach.results import RESULTS, recorded, source_hash

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
REALITY = HERE.parent / "notes" / "reality.md"
MODELS = ("tiny", "smollm2-135m")
FIRST_TOKEN = 0.5
"""Seconds: the load tests' limit for 99 of 100 first tokens. At 1 every rate but one held."""
OURS, THEIRS, TEXT = "#2a6f97", "#b8bec6", "#3a3f45"


def speed(ladder: dict[str, Any], row: dict[str, Any]) -> float:
    """Output tokens/s of a row's median run."""
    return float(ladder["output_tokens"] / statistics.median(row["seconds"]))


def draw_ladders() -> str:
    """Tokens/s of every stage and of transformers, a panel for each model."""
    plt.rcParams.update({"svg.hashsalt": "nanoteach", "font.size": 10, "text.color": TEXT})
    size = (5.5 * len(MODELS), 3.4)
    figure, panels = plt.subplots(1, len(MODELS), figsize=size, layout="constrained", squeeze=False)
    for panel, model in zip(panels[0], MODELS, strict=True):
        ladder = recorded(f"ladder-{model}")
        rows = ladder["rows"]
        speeds = [speed(ladder, row) for row in rows]
        colours = [OURS if row["stage"] else THEIRS for row in rows]
        panel.barh(range(len(rows)), speeds, color=colours)
        for y, value in enumerate(speeds):
            panel.text(value, y, f" {value:,.0f}" if value >= 100 else f" {value:.1f}", va="center")
        panel.set_yticks(range(len(rows)), [row["name"] for row in rows])
        panel.invert_yaxis()
        panel.set_xlim(0, max(speeds) * 1.15)
        panel.set_title(f"{model}: output tokens/s")
        panel.spines[["top", "right", "bottom"]].set_visible(False)
        panel.tick_params(left=False, bottom=False, labelbottom=False, labelcolor=TEXT)
    return svg(figure)


def ladder_table(model: str) -> str:
    """A ladder as a Markdown table, with what it ran on."""
    ladder = recorded(f"ladder-{model}")
    machine = ladder["environment"]
    repeated = any(len(row["seconds"]) > 1 for row in ladder["rows"])
    spread = "Medians, with the slowest and fastest run" if repeated else "One run of each"
    lines = [
        f"`{ladder['command']}` on {machine['machine']}, {machine['cores']} cores, torch "
        f"{machine['torch']}, {machine['date']}: {ladder['requests']} requests, "
        f"{ladder['prompt_tokens']:,} prompt tokens, {ladder['output_tokens']:,} output tokens, "
        f"at most {ladder['width']} requests side by side. {spread}; the longest step is how long "
        "a request may wait for its next token.",
        "",
        "| | output tokens/s | runs | longest step | same tokens as transformers |",
        "|---|--:|--:|--:|---|",
    ]
    for row in ladder["rows"]:
        low, high = (ladder["output_tokens"] / pick(row["seconds"]) for pick in (max, min))
        steps = row["longest_steps"] if row["stage"] else []
        step = f"{1000 * statistics.median(steps):,.0f} ms" if steps else ""
        runs = f"{low:,.1f} to {high:,.1f}" if len(row["seconds"]) > 1 else "one"
        name, verdict = row["name"], row["verdict"]
        lines.append(f"| {name} | {speed(ladder, row):,.1f} | {runs} | {step} | {verdict} |")
    batches, last = ladder["rows"][1], ladder["rows"][-1]
    ratio = speed(ladder, last) / speed(ladder, batches)
    lines += ["", f"The last stage has {ratio:.2f} times the tokens/s of transformers' batches."]
    return "\n".join(lines)


def draw_gpu_ladder() -> str:
    """Tokens/s of every stage on the GPU, on a logarithmic scale, with each step's gain."""
    rows = recorded("stages_h200")["rows"]
    speeds = [statistics.median(row["samples"]) for row in rows]
    plt.rcParams.update({"svg.hashsalt": "nanoteach", "font.size": 10, "text.color": TEXT})
    figure, panel = plt.subplots(figsize=(8, 3.2), layout="constrained")
    panel.barh(range(len(rows)), speeds, color=OURS)
    for y, value in enumerate(speeds):
        panel.text(value, y, f" {value:,.0f}" if value >= 100 else f" {value:.1f}", va="center")
    bound = rows[0]["bound"]
    panel.axvline(bound, color=THEIRS, linestyle="--")
    panel.text(bound, -0.7, f"bound {bound:,.0f} ", ha="right", va="center")
    panel.set_yticks(range(len(rows)), [row["workload"] for row in rows])
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.set_xlim(10, bound * 1.6)
    panel.set_title("Qwen3-0.6B's shape on an H200, bf16: output tokens/s (logarithmic)", pad=14)
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.tick_params(left=False, labelcolor=TEXT)
    return svg(figure)


def svg(figure: Any) -> str:
    """The figure as text, the same for the same data."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def course_svg(figure: Any) -> str:
    """A picture of the course, likewise."""
    with plt.rc_context({**matplotlib.rcParamsDefault, **STYLE, "svg.hashsalt": "nanoteach"}):
        return svg(figure)


def gpu_table() -> str:
    """Every workload on the GPU beside the peers and the bound, as a Markdown table."""
    found, peers = recorded("bench_h200"), recorded("peers")
    machine, engine = found["environment"], found["settings"]["engine"]
    names = list(peers["engines"])
    lines = [
        f"`{found['command']}` on one {machine['gpu']} (driver {machine['driver']}, torch "
        f"{machine['torch']}), {machine['date']}: random weights in {found['dtype']}, blocks of "
        f"{engine['block_size']}, {engine['num_graphs']} CUDA graphs, steps of up to "
        f"{engine['max_num_batched_tokens']:,} tokens; medians of {found['repeats']} runs. The "
        f"others: {peers['source']}. The bound is the cost model's, from bytes and FLOPs.",
        "",
        f"| | nanoteach | slowest and fastest run | {' | '.join(names)} | times vLLM | bound |",
        "|---|--:|--:|" + "--:|" * len(names) + "--:|--:|",
    ]
    for row in found["rows"]:
        theirs = [peers["engines"][n].get(f"{row['workload']}|{row['metric']}") for n in names]
        if None in theirs:
            continue
        middle, low, high = (f(row["samples"]) for f in (statistics.median, min, max))
        shown = " | ".join(f"{value:,}" for value in theirs)
        lines.append(
            f"| {row['workload']}, {row['metric']} {row['unit']} | {middle:,.0f} | "
            f"{low:,.0f} to {high:,.0f} | {shown} | {middle / theirs[0]:.2f} | "
            f"{row['bound']:,.0f} |"
        )
    started = recorded("startup_h200")
    first = started["rows"][0]["note"].removeprefix("the first in this process: ")
    graphs = next(row for row in started["rows"] if row["metric"] == "graphs")
    lines += [
        "",
        f"From an engine's construction to its first token, in a new process on a machine where "
        f"another had compiled the kernels, it takes {first} (`{started['command']}`); the graphs "
        f"take {graphs['samples'][0]:.0f} MiB.",
    ]
    return "\n".join(lines)


def load_claims() -> str:
    """What the load tests on the GPU came to."""
    loads = pictures_10.recorded_loads(FIRST_TOKEN)
    whole, _, single = loads.values()
    machine = whole["environment"]
    asked = recorded("load_h200_8192")["limits"]["ttft"]
    easier = pictures_10.recorded_loads(asked)
    lines = [
        f"`{whole['command']}` on one {machine['gpu']}, {machine['date']}, and the same with "
        f"other options: random weights of Qwen3-0.6B's shape, {whole['duration']:g} seconds of "
        "Poisson arrivals at each rate. The knee is the highest rate up to which 99 of 100 first "
        f"tokens came in time, and at least {KEEPS_UP:.0%} as many requests went out as came in. "
        f"In time is within {FIRST_TOKEN:g} s here, and the knees are {knees(loads)}; within the "
        f"command's {asked:g} s they would be {knees(easier)}.",
        "",
        "| | knee | requests a second | TTFT p50, ms | p99 | ITL p50, ms | p99 |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, load in loads.items():
        for level in load["levels"]:
            if level["rate"] in (32, 64):
                times = (1e3 * level[k][q] for k in ("ttft", "itl") for q in ("p50", "p99"))
                lines.append(
                    f"| {name} | {load['knee']:g} | {level['rate']:g} | "
                    + " | ".join(f"{time:,.1f}" for time in times)
                    + " |"
                )
    tried = (
        f"{name} at {listed(level['rate'] for level in load['levels'])}"
        for name, load in loads.items()
    )
    top = whole["levels"][-1]
    alone = next(level for level in single["levels"] if level["rate"] == top["rate"])
    lines += [
        "",
        f"Tried were {'; '.join(tried)} requests a second. The true knee may lie higher, up to the "
        "next rate that was tried.",
        "",
        f"With {top['offered']:.0f} requests a second, {top['completed']:.0f} are served with the "
        f"steps in a process of their own, and {alone['completed']:.0f} without.",
    ]
    return "\n".join(lines)


def knees(loads: pictures_10.Loads) -> str:
    """Of every load test, in words."""
    return listed(load["knee"] for load in loads.values())


def listed(rates: Iterable[float]) -> str:
    """Such as 4, 8 and 16."""
    *most, last = (f"{rate:g}" for rate in rates)
    return f"{', '.join(most)} and {last}"


def scheduler_line() -> str:
    """What deciding takes of a decode step, with what it ran on."""
    found = recorded("scheduler")
    machine, row = found["environment"], found["rows"][-1]
    low, middle, high = (1e6 * q for q in statistics.quantiles(row["seconds"], n=4))
    return (
        f"What deciding takes of a step: when {row['running']} requests decode, scheduler and "
        f"block manager together need {middle:,.0f} µs (half of the steps {low:,.0f} to "
        f"{high:,.0f}), the model not counted: `{found['command']}` on {machine['machine']}, "
        f"{machine['date']}. The budget that this project set itself is {row['budget_us']} µs: "
        "100, and 3 for each request."
    )


def fill(text: str, name: str, block: str) -> str:
    """Put a block between the marks that name it."""
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    filled, count = marks.subn(lambda m: m[1] + block + "\n" + m[2], text)
    if count != 1:
        raise SystemExit(f"there is no place for {name}")
    return filled


def outputs() -> dict[Path, str]:
    """Everything that is made from results."""
    readme = README.read_text()
    for model in MODELS:
        readme = fill(readme, f"ladder-{model}", ladder_table(model))
    readme = fill(readme, "scheduler", scheduler_line())
    readme = fill(readme, "gpu", gpu_table())
    readme = fill(readme, "load", load_claims())
    load = pictures_10.latency_against_load(pictures_10.recorded_loads(FIRST_TOKEN))
    made: dict[Path, str] = {}
    if not {"experiments_h200", "engines_h200"} & {*missing()}:
        experiments = Experiments()
        readme = fill(readme, "reality", experiments.claims())
        made = experiments.figures(course_svg) | {
            PREDICTIONS: experiments.predictions(),
            REALITY: fill(REALITY.read_text(), "reality", experiments.all_rows()),
        }
    return made | {
        HERE / "ladder.svg": draw_ladders(),
        HERE / "ladder_h200.svg": draw_gpu_ladder(),
        HERE / "load_h200.svg": course_svg(load),
        README: readme,
    }


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    for path in sorted(RESULTS.glob("*.json")):
        measured = json.loads(path.read_text()).get("environment")  # peers.json has none
        if measured and measured["sources"] != source_hash():
            print(f"{path.name} is older than the code")
    for name in missing():
        print(f"{name}.json is missing: its experiments are left out")
    changed = {
        path: text
        for path, text in outputs().items()
        if not path.is_file() or not same(path.read_text(), text)
    }
    for path, text in changed.items():
        print(f"{path.name} {'differs from its results' if check else 'written'}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return 1 if check and changed else 0


def same(old: str, new: str) -> bool:
    """Whether two files are equal; a figure of another matplotlib can't be told, and counts so."""
    version = f"Matplotlib v{matplotlib.__version__}"
    return old == new or (version in new and version not in old)


if __name__ == "__main__":
    sys.exit(main())
