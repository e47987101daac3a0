"""The pictures of notebook 11, and of the README: every experiment, with what was predicted.

Everywhere blue is measured (the median, and a line from the least to the most), a grey tick is the
bound, and an orange diamond is the calibrated model.

Knows: matplotlib, recordings. Does not know: engines.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any

from matplotlib.axes import Axes

from nanoteach.bench.kernels import CLASSES
from nanoteach.bench.recording import Judged, Recording
from nanoteach.bench.table import Row, number
from nanoteach.bench.workloads import COUNTS
from nanoteach.cost_model import Work, step_cost
from nanoteach.course.pictures import (
    BLUE,
    GREEN,
    LINE,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SKY,
    TEXT,
    Picture,
    canvas,
    drawing,
    say,
)

CONTAMINATED = 10  # percent of the time in steps with prompts


@dataclass
class Evidence:
    """A recording, and the predictions that were made of it; by case and metric."""

    recording: Recording
    judged: SequenceOf[Judged]

    def __post_init__(self) -> None:
        self.predicted = {(row.case, row.metric): row for row in self.judged}

    def row(self, case: str, metric: str) -> Row | None:
        """The row, if it has a number."""
        row = self.recording.rows.get((case, metric))
        return row if row and row.samples else None

    def calibrated(self, case: str, metric: str) -> float | None:
        """What the calibrated model says; None where it was not asked."""
        judged = self.predicted.get((case, metric))
        return judged.calibrated if judged else None

    def named(self, start: str, metric: str) -> list[Row]:
        """All rows of a metric whose case begins like this, in order."""
        return [
            row
            for (case, name), row in self.recording.rows.items()
            if case.startswith(start) and name == metric and row.samples
        ]

    @property
    def gpu(self) -> str:
        """What it was recorded on."""
        return str(self.recording.found["environment"].get("gpu", "a CPU"))


def bars(
    axes: Axes, found: Evidence, names: dict[str, str], metric: str, title: str, scale: float = 1
) -> None:
    """A panel with a bar for each case; `names` says how each is called here."""
    axes.set_title(title)
    labels, values, widest = list[str](), list[float](), 0.0
    for case, label in names.items():
        row = found.row(case, metric)
        if row is None:
            continue
        y, value = len(labels), row.median * scale
        labels.append(label)
        values.append(value)
        axes.barh(y, value, color=BLUE, height=0.62)
        axes.plot([min(row.samples) * scale, max(row.samples) * scale], [y, y], color=TEXT, lw=1)
        marks = [(row.bound if metric not in COUNTS else None, "|", LINE, 16)]
        marks.append((found.calibrated(case, metric), "D", ORANGE, 6))
        for mark, shape, colour, size in marks:
            if mark:
                axes.plot(mark * scale, y, shape, color=colour, ms=size, mew=2.5 if size > 9 else 1)
                widest = max(widest, mark * scale)
        widest = max(widest, value)
    for y, value in enumerate(values):  # over the bar's end, or from its beginning if it is short
        x, side = (value, "right") if value > 0.3 * widest else (0.0, "left")
        say(axes, x, y - 0.42, number(value), BLUE, ha=side, weight="bold")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.75)
    axes.set_xlim(0, widest * 1.06 or 1)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)


def key(figure: Picture, text: str = "", measured: str = "blue", bound: str = "grey tick") -> None:
    """What the marks mean, over the picture. measured, bound: what shows them in this one."""
    marks = f"{measured}: measured · {bound}: bound · orange diamond: calibrated model"
    figure.suptitle(f"{text + '; ' if text else ''}{marks}", x=0.01, ha="left", fontsize=8.5)


def curve(
    axes: Axes, xs: SequenceOf[float], rows: SequenceOf[Row], found: Evidence, label: str = "",
    colour: str = BLUE, scale: Callable[[float], float] | None = None, bound: str = "-",
) -> None:  # fmt: skip
    """Measured points with their spread, bounds as a grey line, the calibrated model in orange.

    bound: the style of the grey line, where there are several; the diamonds of others than "-" are
    hollow.
    """
    f = scale or (lambda value: value)
    middle = [f(row.median) for row in rows]
    spread = [[f(row.median) - f(min(row.samples)) for row in rows],
              [f(max(row.samples)) - f(row.median) for row in rows]]  # fmt: skip
    bounds = [(x, f(row.bound)) for x, row in zip(xs, rows, strict=True) if row.bound]
    models = [found.calibrated(row.workload, row.metric) for row in rows]
    points = [(x, f(model)) for x, model in zip(xs, models, strict=True) if model]
    if bounds:
        name = f"bound, {label}" if label else None
        axes.plot(*zip(*bounds, strict=True), bound, color=LINE, lw=1.5, label=name)
    if points:
        filled = ORANGE if bound == "-" else "white"
        axes.plot(*zip(*points, strict=True), "D--", color=ORANGE, ms=5, lw=0.8, mfc=filled)
    axes.errorbar(xs, middle, yerr=spread, fmt="o-", color=colour, ms=6, lw=1.2, label=label)


@drawing
def prefill(found: Evidence) -> Picture:
    """A: TFLOP/s of cold prompts beside what the layers' products reach alone, and a square one."""
    figure = canvas(3.4)
    axes = figure.subplots()
    model, shapes = found.recording.model, found.named("prefill", "prompt")
    styles = [("prefill 1 x", "one prompt", BLUE), ("prefill", "several prompts", PURPLE)]
    seen, labelled = set[str](), set[int]()
    for start, label, colour in styles:
        rows = [row for row in shapes if row.workload.startswith(start)]
        rows = [row for row in rows if row.workload not in seen]
        seen |= {row.workload for row in rows}
        tokens, flops = [], []
        for row in rows:
            count, length = (int(n.replace(",", "")) for n in row.workload.split()[1::2])
            tokens.append(count * length)
            flops.append(step_cost(model, [Work(length, 0)] * count).flops)
        for x, work, row in zip(tokens, flops, rows, strict=True):
            rate = work / x / 1e12
            axes.errorbar(
                x, row.median * rate, fmt="o", color=colour, ms=7,
                yerr=[[(row.median - min(row.samples)) * rate],
                      [(max(row.samples) - row.median) * rate]],
            )  # fmt: skip
            if predicted := found.calibrated(row.workload, "prompt"):
                axes.plot(x, predicted * rate, "D", color=ORANGE, ms=5)
            what = row.workload.removeprefix("prefill ").replace(" x ", "×")
            if x in labelled:  # another has as many tokens: its label stands under it
                say(axes, x * 0.92, row.median * rate + 12, what, colour, ha="right")
            else:
                say(axes, x, row.median * rate - 38, what, colour, ha="center")
            labelled.add(x)
        axes.plot([], [], "o", color=colour, label=label)
    products = found.named("the layers' products", "rate")
    if products:
        sizes = [int(row.workload.split()[-2].replace(",", "")) for row in products]
        rates = [row.median for row in products]
        axes.plot(sizes, rates, "s-", color=GREEN, ms=4, lw=1, label="the layers' products alone")
    ceiling = found.recording.hardware.flops / 1e12
    square = found.row("a square product", "rate")
    now = f"; in this run {square.median:.0f}" if square else ""
    words = f"bound: a square product, {ceiling:.0f} by itself{now}"
    axes.axhline(ceiling, color=LINE, lw=1.5, label=words)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, ceiling * 1.08)
    axes.set_ylabel("TFLOP/s")
    axes.set_xlabel("tokens in the step")
    ticks = [256, 512, 1024, 2048, 4096, 16_384]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set_title("A · cold prompts: arithmetic that is reached (orange: calibrated model)")
    return figure


@drawing
def context(found: Evidence) -> Picture:
    """B: decode speed of one request over its context."""
    figure = canvas(3.0)
    axes = figure.subplots()
    rows = [r for r in found.named("context", "decode") if r.workload.endswith("+ 1,024")]
    xs = [int(row.workload.split()[1].replace(",", "")) for row in rows]
    curve(axes, xs, rows, found)
    axes.set_ylim(0)
    axes.set_xlabel("tokens of the prompt; 1,024 are generated")
    axes.set_ylabel("tokens/s")
    axes.set_title("B · one request, over its context")
    key(figure, bound="grey line")
    return figure


def batch_of(row: Row) -> int:
    """How many requests a case of `batch` has."""
    return int(row.workload.split()[1])


@drawing
def batch(found: Evidence) -> Picture:
    """C: speed over the batch, of whole runs and of decode steps; where prompts come into it."""
    figure = canvas(3.6)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    steps, whole = found.named("batch", "decode steps"), found.named("batch", "output")
    xs = [batch_of(row) for row in steps]
    curve(left, xs, steps, found, "decode steps")
    left.plot(xs, [row.median for row in whole], "o:", color=PURPLE, ms=5, label="whole runs")
    left.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="tokens/s")
    left.set_xticks(xs, [str(x) for x in xs])
    speeds = (1000, 2000, 5000, 10_000, 20_000)
    left.set_yticks(speeds, [f"{speed:,}" for speed in speeds])
    left.minorticks_off()
    left.legend(frameon=False, fontsize=8, loc="lower right")
    left.set_title("C · over the batch: 1,024 tokens in, 256 out")
    shares = found.named("batch", "time with prompts")
    colours = [RED if row.median >= CONTAMINATED else BLUE for row in shares]
    right.bar(range(len(shares)), [row.median for row in shares], color=colours, width=0.7)
    for x, row in enumerate(shares):
        say(right, x, row.median + 1, f"{row.median:.0f}", TEXT, ha="center")
    first = next((batch_of(row) for row in shares if row.median >= CONTAMINATED), None)
    right.set_xticks(range(len(shares)), [str(batch_of(row)) for row in shares])
    right.set_ylim(0, max((row.median for row in shares), default=1) * 1.12)
    right.set_title("% of time in prompts' steps")
    said = f"from {first} on a whole run is no decode speed" if first else ""
    right.set_xlabel(f"requests at once\n{said}")
    key(figure, measured="blue and purple", bound="grey line")
    return figure


@drawing
def nano(found: Evidence) -> Picture:
    """nano-vLLM's bench beside both predictions."""
    figure = canvas(1.4)
    axes = figure.subplots()
    names = {row.workload: row.workload for row in found.named("nano", "output")}
    bars(axes, found, names, "output", "nano-vLLM's bench: output tokens/s")
    key(figure)
    return figure


@drawing
def static(found: Evidence) -> Picture:
    """Static batches against continuous batching."""
    figure = canvas(2.2)
    names = {"static batches": "static", "continuous batching": "continuous"}
    panels = figure.subplots(1, 4, sharey=True)
    shown = (("output", "output tokens/s"), ("steps", "steps"),
             ("rows", "requests in a step, of 16"), ("TTFT", "median TTFT, s"))  # fmt: skip
    for axes, (metric, title) in zip(panels, shown, strict=True):
        bars(axes, found, names, metric, title)
    key(figure, "64 requests, 16 seats")
    return figure


@drawing
def packed(found: Evidence) -> Picture:
    """Prompts in one step against one in each, over their length."""
    figure = canvas(3.2)
    left, right = figure.subplots(1, 2)
    for words, colour, style in (("packed", BLUE, "-"), ("one by one", RED, ":")):
        for axes, metric, scale in ((left, "prompt", 1e-3), (right, "TTFT", 1e3)):
            rows = found.named(words, metric)
            xs = [int(row.workload.split()[-1].replace(",", "")) for row in rows]
            curve(axes, xs, rows, found, words, colour, partial(mul, scale), style)
            axes.set(xscale="log", yscale="log", xlabel="tokens of each of 16 prompts")
            axes.set_xticks(xs, [str(x) for x in xs])
            axes.minorticks_off()
    left.set_title("thousand prompt tokens/s")
    right.set_title("median TTFT, ms")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    key(figure, "hollow: one by one", measured="blue and red", bound="grey line")
    return figure


@drawing
def paged(found: Evidence) -> Picture:
    """Slots held as histories grow, and what a request wastes by block size. Counts."""
    figure = canvas(3.4)
    left, right = figure.subplots(1, 2)
    data = found.recording.found["data"]["paged"]
    steps = range(len(data["tokens"]))
    for name, colour, words in (
        ("reserved", RED, f"rows of {data['longest']:,}"), ("256", ORANGE, "blocks of 256"),
        ("16", SKY, "blocks of 16"),
    ):  # fmt: skip
        left.plot(steps, [n / 1000 for n in data["held"][name]], color=colour, lw=1.5, label=words)
    left.fill_between(steps, [n / 1000 for n in data["tokens"]], color=BLUE, lw=0, label="filled")
    left.set(xlabel="step", ylabel="thousand slots", xlim=(0, len(data["tokens"])))
    left.set_ylim(0)
    left.legend(frameon=False, fontsize=8)
    left.set_title("slots held by all requests, and filled")
    rows = found.named("blocks of", "wasted by a request")
    rows = [row for row in rows if row.median and row.bound]
    xs = [int(row.workload.split()[-1]) for row in rows]
    right.plot(xs, [row.bound for row in rows], color=LINE, lw=1.5)
    right.plot(xs, [row.median for row in rows], "o", color=BLUE)
    (reserved,) = found.named("rows of", "wasted by a request")
    right.axhline(reserved.median, color=RED, lw=1)
    words = f"rows of {data['longest']:,}: {reserved.median:,.0f}"
    say(right, xs[0], reserved.median * 0.75, words, RED)
    right.set(xscale="log", yscale="log", xlabel="block size")
    right.set_xticks(xs, [str(x) for x in xs])
    right.minorticks_off()
    right.set_title("slots that a request wastes; grey: (block - 1) / 2")
    return figure


@drawing
def prefix(found: Evidence) -> Picture:
    """A prefix that 32 requests share, and pools that hold the prefixes in use or don't."""
    figure = canvas(3.4)
    places: Any = [["computed", "pools"], ["ttft", "pools"]]
    panels = figure.subplot_mosaic(places)
    names = {"prefix caching off": "off", "prefix caching on": "on"}
    title = "32 requests share 1,024 tokens: tokens computed"
    bars(panels["computed"], found, names, "computed", title)
    bars(panels["ttft"], found, names, "TTFT", "median TTFT, ms", 1000)
    axes, mixed = panels["pools"], "mixed reuse, "
    rates = [r for r in found.named(mixed, "hit rate") if r.workload.endswith("blocks")]
    pools = [int(r.workload.split()[-2].replace(",", "")) for r in rates]
    axes.plot(pools, [row.median for row in rates], "o-", color=BLUE)
    axes.plot(pools, [row.bound or 0 for row in rates], "D", color=ORANGE, ms=4)
    for pool, rate in zip(pools, rates, strict=True):
        wait = found.row(rate.workload, "TTFT")
        words = f"{rate.median:.0f}%" + (f", {1000 * wait.median:.0f} ms" if wait else "")
        say(axes, pool + 20, rate.median - 6, words, BLUE)
    axes.set(ylim=(0, 115), xlabel="blocks in the pool", ylabel="% of prompt tokens found")
    axes.set_xlim(min(pools, default=0) - 120, max(pools, default=1) + 380)
    axes.axvline(1024, color=LINE, lw=1)
    say(axes, 1034, 8, "all 16 prefixes", LINE)
    axes.set_title("96 requests, 16 prefixes: hit rate, median TTFT", fontsize=9)
    key(figure)
    return figure


@drawing
def chunked(found: Evidence) -> Picture:
    """Six long prompts among 16 decodes: waits inside the window, first tokens, speed."""
    figure = canvas(6.2)
    names = {
        case: case.replace(" first, ", " first,\n").replace("loop, ", "loop,\n")
        for case in dict.fromkeys(row.workload for row in found.named("", "window"))
    }
    panels = figure.subplots(2, 4, sharey=True)
    for axes, (metric, title, scale) in zip(
        panels.flat,
        (
            ("ITL max", "longest ITL, ms", 1000.0), ("two tokens", "two tokens, ms", 1000.0),
            ("ITL p50", "ITL p50, ms", 1000.0), ("ITL p50 outside", "ITL p50 outside, ms", 1000.0),
            ("TTFT", "TTFT of the six, ms", 1000.0), ("window", "window, ms", 1000.0),
            ("output", "output tokens/s", 1.0), ("largest step", "largest step, tokens", 1.0),
        ),
        strict=True,
    ):  # fmt: skip
        bars(axes, found, names, metric, title, scale)
    key(figure, "16 decode, six prompts of 2,048 come")
    return figure


@drawing
def preemption(found: Evidence) -> Picture:
    """What too small a pool costs."""
    figure = canvas(2.6)
    names = {
        row.workload: row.workload.removeprefix("pool of ")
        for row in found.named("pool of", "output")
    }
    panels = figure.subplots(1, 4, sharey=True)
    for axes, (metric, title) in zip(
        panels,
        (("output", "output tokens/s"), ("preemptions", "preemptions"),
         ("computed", "tokens computed"), ("steps", "steps")),
        strict=True,
    ):  # fmt: skip
        bars(axes, found, names, metric, title)
    key(figure, "32 requests of 512 + 256")
    return figure


def pairs(found: Evidence, metric: str, starts: tuple[str, str], title: str) -> Picture:
    """Two bars for every size, on a logarithmic scale: with and without."""
    figure = canvas(3.0)
    axes = figure.subplots()
    cases = [case for case, name in found.recording.rows if name == metric]
    cases = [case for case in cases if case.split(", ", 1)[0] in starts]
    labels = list(dict.fromkeys(case.split(", ", 1)[1] for case in cases))
    least = min(
        (min(row.samples) for case in cases if (row := found.row(case, metric))), default=1.0
    )
    edge = least / 3  # of the axis: left of all samples there is room for a number in each bar
    for case in cases:
        start, label = case.split(", ", 1)
        y = labels.index(label) + (0.19 if start == starts[1] else -0.19)
        row = found.row(case, metric)
        if row is None:
            say(axes, edge, y, " refused", BLUE if start == starts[0] else RED)
            continue
        axes.barh(y, row.median, height=0.36, color=RED if start == starts[1] else BLUE)
        axes.plot([min(row.samples), max(row.samples)], [y, y], color=TEXT, lw=1)
        if row.bound:
            axes.plot(row.bound, y, "|", color=LINE, ms=12, mew=2.5)
        if model := found.calibrated(row.workload, metric):
            axes.plot(model, y, "D", color=ORANGE, ms=5)
        say(axes, edge, y, f" {number(row.median)}", "white")
    axes.set_xscale("log")
    axes.set_xlim(left=edge)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    for start, colour in zip(starts, (BLUE, RED), strict=True):
        axes.barh(0, 0, color=colour, label=start)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_title(f"{title} (logarithmic)")
    key(figure, measured="blue and red")
    return figure


@drawing
def kv_cache(found: Evidence) -> Picture:
    """One request with a KV cache and without."""
    return pairs(found, "decode", ("KV cache", "no cache"), "decode tokens/s, one request")


@drawing
def graphs(found: Evidence) -> Picture:
    """Decode steps as graphs and kernel by kernel."""
    return pairs(found, "decode steps", ("graphs", "no graphs"), "tokens/s of decode steps")


@drawing
def backends(found: Evidence) -> Picture:
    """Attention by our kernel and by the gather, all else in plain PyTorch."""
    return pairs(found, "decode steps", ("kernel", "gather"), "tokens/s of decode steps")


@drawing
def kernels(found: Evidence) -> Picture:
    """The kernels of a decode step by class, each beside what its bytes take."""
    figure = canvas(3.2)
    steps = found.named("kernels, batch", "GPU busy")
    panels = figure.subplots(1, len(steps), squeeze=False)[0]
    kinds = [*CLASSES, "rest", "GPU idle"]
    colours = dict(zip(kinds, (GREEN, BLUE, PURPLE, SKY, ORANGE, PALE), strict=True))
    for axes, step in zip(panels, steps, strict=True):
        for x, kind in enumerate(kinds):
            row = found.row(step.workload, kind)
            if row is None:
                continue
            axes.bar(x, row.median, color=colours[kind], width=0.8)
            say(axes, x, row.median, f"{row.median:,.0f}", ha="center", va="bottom", fontsize=7)
            if row.bound:
                axes.plot([x - 0.45, x + 0.45], [row.bound, row.bound], color=TEXT, lw=2)
        whole = found.row(step.workload, "step")
        axes.set_title(f"{step.workload.split()[-1]}: {whole.median if whole else 0:,.0f} µs")
        axes.set_xticks(range(len(kinds)), kinds, rotation=90)
        axes.spines["left"].set_visible(False)
        axes.set_yticks([])
    figure.suptitle(
        "a decode step by class of kernel, µs, for 1 to 256 requests; black: what the bytes take",
        x=0.01, ha="left", fontsize=9,
    )  # fmt: skip
    return figure


@drawing
def dram(rows: SequenceOf[Row]) -> Picture:
    """Bytes that the GPU's counters saw in one decode step, beside the model's count."""
    figure = canvas(2.2)
    names = list(dict.fromkeys(row.workload for row in rows))
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        own = [row for row in rows if row.workload == name]
        for y, row in enumerate(own):
            axes.barh(y, row.median, color=BLUE, height=0.6)
            axes.plot(row.bound or 0, y, "|", color=ORANGE, ms=22, mew=2.5)
            error = row.median / row.bound - 1 if row.bound else math.nan
            say(axes, 0, y - 0.43, f" {row.median:.3f} GB, {error:+.1%}", TEXT)
        axes.set_yticks(range(len(own)), [row.metric for row in own])
        axes.set_ylim(len(own) - 0.5, -0.75)
        axes.set_title(name.removeprefix("DRAM, "))
    figure.suptitle("blue: counted by the hardware; orange: W + B · KV(T), and its two parts",
                    x=0.01, ha="left", fontsize=9)  # fmt: skip
    return figure


@drawing
def errors(judged: SequenceOf[Judged]) -> Picture:
    """Both predictions over what was measured, for every point."""
    names = list(dict.fromkeys(row.experiment for row in judged))
    figure = canvas(0.9 + 0.32 * len(names))
    axes = figure.subplots()
    axes.axvspan(1 / 1.25, 1.25, color=PALE)
    axes.axvline(1, color=TEXT, lw=0.8)
    for row in judged:
        y = names.index(row.experiment)
        for value, shape, colour, dy in (
            (row.bound, "|", LINE, -0.18),
            (row.calibrated, "D", ORANGE, 0.18),
        ):
            faster = value / row.measured if row.unit == "tok/s" else row.measured / value
            axes.plot(faster, y + dy, shape, color=colour, ms=7 if shape == "|" else 4, mew=1.5)
        if row.fitted:
            axes.plot(faster, y + dy, "o", ms=10, mew=1.2, mfc="none", mec=TEXT, zorder=5)
    axes.set_xscale("log")
    ticks = (0.5, 0.8, 1, 1.25, 2, 4, 8, 16, 32, 64, 128)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("predicted to be so many times as fast as measured")
    axes.set_title("every point: grey the bound, orange the calibrated model (ringed: fitted on)")
    return figure


@drawing
def profiles(found: Evidence) -> Picture:
    """Where the host's time of a step went, by range, under the profiler."""
    recorded = found.recording.found["profiles"]
    figure = canvas(0.8 + 0.35 * len(recorded))
    axes = figure.subplots()
    names = ("scheduling", "preparation", "model", "sampling", "waiting", "commit")
    colours = dict(zip(names, (GREEN, ORANGE, BLUE, PURPLE, PALE, SKY), strict=True))
    for y, profile in enumerate(recorded.values()):
        left = 0.0
        for part in names:
            share = 100 * profile["ranges"].get(part, 0.0) / profile["wall"]
            axes.barh(y, share, left=left, color=colours[part], label=part if y == 0 else None)
            left += share
    axes.set_yticks(range(len(recorded)), [profile["case"] for profile in recorded.values()])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the time of 20 steps, with a profiler; white: between the ranges")
    axes.legend(frameon=False, fontsize=8, ncol=6, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


@dataclass
class CalibrationExplorer:
    """Decode speed over the batch: what was measured, and a model with two knobs.

    overhead: µs a step; bandwidth: % of what the memory gives.
    """

    found: Evidence
    overhead: int = 0
    bandwidth: int = 100

    @property
    def rows(self) -> list[Row]:
        """What was measured."""
        return self.found.named("batch", "decode steps")

    def speed(self, batch: int) -> float:
        """Tokens/s by the knobs, in the middle of a run of 1,024 + 256."""
        recording = self.found.recording
        cost = step_cost(recording.model, [Work(1, 1024 + 128)] * batch, recording.bytes_per_value)
        rate = recording.hardware.read_bandwidth * self.bandwidth / 100
        return batch / (self.overhead / 1e6 + cost.bytes / rate)

    @property
    def errors(self) -> dict[int, float]:
        """By batch, as shares: 0.1 is 10% too fast."""
        return {batch_of(row): self.speed(batch_of(row)) / row.median - 1 for row in self.rows}

    @drawing
    def picture(self) -> Picture:
        """See `Explorer.picture`."""
        figure = canvas(3.0)
        axes = figure.subplots()
        xs = [batch_of(row) for row in self.rows]
        axes.plot(xs, [row.median for row in self.rows], "o-", color=BLUE, ms=7)
        axes.plot(xs, [self.speed(x) for x in xs], "D--", color=ORANGE, ms=5)
        for x, error in self.errors.items():
            say(axes, x, self.speed(x) * 1.22, f"{error:+.0%}", ORANGE, ha="center")
        axes.set(xscale="log", yscale="log", xlabel="requests at once", ylabel="tokens/s")
        axes.set_xticks(xs, [str(x) for x in xs])
        axes.set_ylim(1000, 60_000)
        axes.minorticks_off()
        axes.set_title("decode steps: blue measured, orange the model with these knobs")
        return figure

    def text(self) -> str:
        """See `Explorer.text`."""
        batch, error = max(self.errors.items(), key=lambda item: abs(item[1]))
        return (
            f"{self.overhead} µs of overhead and {self.bandwidth}% of the bandwidth: the worst "
            f"miss is {error:+.0%}, at {batch} request{'s' if batch > 1 else ''}."
        )


EXPERIMENT_PICTURES: dict[str, Callable[[Evidence], Picture]] = {
    "prefill": prefill, "context": context, "batch": batch, "nano": nano, "static": static,
    "packed": packed, "paged": paged, "prefix": prefix, "chunked": chunked,
    "preemption": preemption, "kv_cache": kv_cache, "graphs": graphs, "backends": backends,
    "kernels": kernels, "profiles": profiles,
}  # fmt: skip
"""Each by the name of its experiment."""
