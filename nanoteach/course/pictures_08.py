"""Notebook 08's pictures, its widget, and the recorded runs that it reads.

Recorded runs are the files of `figures/results`.

Knows: those files; matplotlib. Does not know: engines.
"""

import statistics
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from nanoteach.course.pictures import (
    BLUE,
    GREEN,
    HATCHED,
    LINE,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SKY,
    Picture,
    box,
    canvas,
    centred,
    drawing,
    ink,
    lanes,
    say,
)
from nanoteach.course.widgets import Control, Panel

# --- one step -----------------------------------------------------------------------------------

KINDS = {
    "product": ("a matrix product", BLUE),
    "attention": ("attention", GREEN),
    "copy": ("a copy to or from the host", PURPLE),
    "other": ("something between them", ORANGE),
}


def kind_of(kernel: str) -> str:
    """What a kernel is for, told by its name."""
    name = kernel.lower()
    if any(word in name for word in ("linear", "nvjet", "gemm", "gemv", "cublas", "lm_head")):
        return "product"
    if any(word in name for word in ("attention", "decode_kernel", "combine_kernel")):
        return "attention"
    return "copy" if name.startswith("memcpy") else "other"


@drawing
def step_kernels(steps: Mapping[str, Mapping[str, Any]], close: float = 400.0) -> Picture:
    """One step's kernels on the GPU: all of it, and `close` microseconds from its middle."""
    figure = canvas(1.1 + 1.0 * len(steps))
    panels: Any = figure.subplots(1, 2, sharey=True)
    ends = [step["events"][-1]["start_us"] + step["events"][-1]["us"] for step in steps.values()]
    for y, (step, end) in enumerate(zip(steps.values(), ends, strict=True)):
        for axes, first, last in (
            (panels[0], 0.0, end),
            (panels[1], (end - close) / 2, (end + close) / 2),
        ):
            box(axes, 0, y - 0.3, last - first, 0.6, PALE, **HATCHED)
            for kind, (_, colour) in KINDS.items():
                spans = [
                    (max(e["start_us"], first) - first, e["us"])
                    for e in step["events"]
                    if kind_of(e["name"]) == kind and first <= e["start_us"] < last
                ]
                axes.broken_barh(spans, (y - 0.3, 0.6), facecolors=colour, lw=0)
        say(panels[0], end, y, f"  {step['launches']:,} launches")
    panels[0].set_title("one step")
    panels[0].set_xlim(0, 1.3 * max(ends))
    panels[1].set_title(f"{close:.0f} µs from the middle of each")
    panels[1].set_xlim(0, close)
    for axes in panels:
        axes.set_xlabel("µs, on the GPU   (hatched: no kernel runs)")
        lanes(axes, list(steps))
    for words, colour in KINDS.values():
        panels[0].plot([], [], color=colour, lw=6, label=words)
    panels[0].legend(loc="lower right", fontsize=7, frameon=False)
    return figure


def summary(step: Mapping[str, Any]) -> tuple[int, float, float]:
    """Launches, microseconds in which a kernel runs, and microseconds of the whole step."""
    busy = reached = 0.0
    for e in step["events"]:  # sorted; kernels may overlap
        start, end = e["start_us"], e["start_us"] + e["us"]
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return step["launches"], busy, statistics.median(step["wall_us"])


# --- the two loops ------------------------------------------------------------------------------


class Span(NamedTuple):
    """Something that takes from `start` to `end`, in microseconds, for step `step`."""

    what: str
    step: int
    start: float
    end: float


COMMIT = 0.25
"""The part of the host's work that needs the step's tokens. The rest comes before it is launched.

An assumption of the picture, which says so."""


def loop_spans(host: float, device: float, overlapped: bool, steps: int = 8) -> list[Span]:
    """A loop's spans: the host prepares, waits and commits; the device runs."""
    spans, now, free = list[Span](), 0.0, 0.0
    ends: list[float] = []

    def work(what: str, step: int, seconds: float) -> None:
        nonlocal now
        spans.append(Span(what, step, now, now + seconds))
        now += seconds

    def settle(step: int) -> None:
        nonlocal now
        now = max(now, ends[step])
        work("commit", step, COMMIT * host)

    for step in range(steps):
        work("prepare", step, (1 - COMMIT) * host)
        start = max(now, free)
        free = start + device
        spans.append(Span("run", step, start, free))
        ends.append(free)
        if not overlapped:
            settle(step)
        elif step:
            settle(step - 1)
    if overlapped:
        settle(steps - 1)
    return spans


def period(spans: SequenceOf[Span]) -> tuple[float, float]:
    """Microseconds from one step's start on the device to the next one's, and idle ones of them."""
    a, b = [span for span in spans if span.what == "run"][-2:]
    return b.start - a.start, b.start - a.end


@drawing
def two_loops(host: float, device: float) -> Picture:
    """The plain loop and the overlapped one, on the host and on the GPU."""
    figure = canvas(3.6)
    panels: Any = figure.subplots(2, 1, sharex=True)
    stop = 4.6 * (host + device)
    for axes, overlapped in zip(panels, (False, True), strict=True):
        spans = loop_spans(host, device, overlapped, 40)
        every, idle = period(spans)
        draw_loop(axes, [s for s in spans if s.start < stop], stop)
        name = "overlapped: commit comes one step late" if overlapped else "plain"
        axes.set_title(f"{name}: a step every {every:,.0f} µs, the GPU idle {idle / every:.0%}")
    panels[1].set_xlim(0, stop)
    panels[1].set_xlabel("µs   (the number is the step's; red: the GPU has nothing to do)")
    return figure


def draw_loop(axes: Axes, spans: SequenceOf[Span], stop: float) -> None:
    """One loop in two lanes."""
    colours = {"prepare": SKY, "commit": ORANGE, "run": BLUE}
    before = 0.0
    for what, step, start, end in spans:
        y, width = float(what == "run"), min(end, stop) - start
        if what == "run":
            if start > before:
                box(axes, before, 0.7, start - before, 0.6, "white", edgecolor=RED, lw=1)
            before = end
        box(axes, start, y - 0.3, width, 0.6, colours[what], edgecolor="white", lw=0.8)
        if width > stop / 30:
            centred(axes, start + width / 2, y, str(step), ink(colours[what]), weight="bold")
    for what, words in (("prepare", "schedule, fill, launch"), ("commit", "commit")):
        axes.plot([], [], color=colours[what], lw=6, label=words)
    axes.plot([], [], color=BLUE, lw=6, label="the step")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False)
    axes.axhline(0.5, color=LINE, lw=0.5)
    lanes(axes, ["host", "GPU"])


@dataclass
class OverlapExplorer:
    """How long the host and the GPU take for a step, in microseconds, and which loop it is."""

    host: int = 250
    device: int = 600

    @property
    def periods(self) -> tuple[float, float]:
        """Microseconds a step: plain, overlapped."""
        plain, ahead = (
            period(loop_spans(self.host, self.device, overlapped, 40))[0]
            for overlapped in (False, True)
        )
        return plain, ahead

    def picture(self) -> Picture:
        """See `Explorer.picture`."""
        return two_loops(self.host, self.device)

    def text(self) -> str:
        """See `Explorer.text`."""
        plain, ahead = self.periods
        limit = "the GPU" if self.device >= self.host else "the host"
        return (
            f"Plain: {plain:,.0f} µs a step. Overlapped: {ahead:,.0f} µs, {plain / ahead:.2f} times"
            f" as fast; {limit} sets the pace.\n(Drawn from the two numbers alone; that a quarter "
            "of the host's work must wait for the tokens is assumed.)"
        )


def overlap() -> Panel:
    """Turn the host's and the GPU's time for a step, and see who waits for whom."""
    times = [50, 100, 150, 250, 400, 600, 900, 1400, 2000]
    return Panel(
        OverlapExplorer(),
        Control("slider", "host", "host, µs a step", times),
        Control("slider", "device", "GPU, µs a step", times),
    )
