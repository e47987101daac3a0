"""The pictures of notebook 07: copies of a history, softmax tile by tile, a kernel against bytes.

Knows: matplotlib, and the result file of the kernel. Does not know: engines.
"""

import math
import statistics
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from nanoteach.course.pictures import (
    BLUE,
    GREEN,
    ORANGE,
    PALE,
    RED,
    TEXT,
    Picture,
    canvas,
    drawing,
    say,
)
from nanoteach.results import recorded


class Timing(NamedTuple):
    """One layer's attention for `batch` decodes of `history` tokens: median µs; bytes of K/V."""

    batch: int
    history: int
    kernel: float
    gather: float
    num_bytes: int


def recorded_timings() -> list[Timing]:
    """What was measured on a GPU; see bench/attention.py."""
    return [
        Timing(
            row["batch"],
            row["history"],
            statistics.median(row["kernel_us"]),
            statistics.median(row["gather_us"]),
            row["bytes"],
        )
        for row in recorded("attention_h200")["rows"]
    ]


@drawing
def copies(stored: SequenceOf[int], copied: SequenceOf[int]) -> Picture:
    """Tokens whose K/V each step stores, and on top of them those whose K/V it copies together."""
    figure = canvas(2.9)
    axes = figure.subplots()
    steps = range(1, len(stored) + 1)
    axes.bar(steps, stored, width=1.0, color=BLUE, lw=0)
    axes.bar(steps, copied, bottom=stored, width=1.0, color=RED, lw=0)
    top = max(map(sum, zip(stored, copied, strict=True)))
    say(axes, 1, 0.93 * top, f"{sum(stored):,} tokens stored, each once", BLUE, weight="bold")
    words = f"{sum(copied):,} tokens copied, the same ones again and again"
    say(axes, 1, 0.80 * top, words, RED, weight="bold")
    axes.set_xlim(0, len(stored) + 1)
    axes.set_title("one request, one layer: K/V that a step stores, and on top K/V that it copies")
    axes.set_xlabel("step, one output token each")
    axes.set_ylabel("tokens")
    return figure


@drawing
def against_bytes(
    timings: SequenceOf[Timing], bounds: Mapping[tuple[int, int], tuple[float, float]]
) -> Picture:
    """Measured µs as dots, and as lines what the bytes take: kernel and gather, a panel a batch.

    bounds: for each (batch, history) the µs of the kernel and of the gather, by bytes alone.
    """
    batches = sorted({t.batch for t in timings})
    figure = canvas(3.3)
    sheets = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for axes, batch in zip(sheets, batches, strict=True):
        rows = sorted((t for t in timings if t.batch == batch), key=lambda t: t.history)
        histories = [t.history for t in rows]
        for index, colour, name in ((1, RED, "gather"), (0, BLUE, "kernel")):
            measured = [t.gather if index else t.kernel for t in rows]
            line = [bounds[t.batch, t.history][index] for t in rows]
            axes.loglog(histories, line, color=colour, lw=1.2)
            axes.loglog(histories, measured, "o", color=colour, ms=5)
            if batch == batches[0]:
                say(axes, histories[0] * 0.9, measured[0] * 1.7, name, colour, weight="bold")
        axes.set_xlim(histories[0] / 1.5, histories[-1] * 1.5)
        axes.set_xticks([histories[0], histories[2], histories[-1]])
        axes.set_xticklabels([f"{h:,}" for h in (histories[0], histories[2], histories[-1])])
        axes.minorticks_off()
        axes.set_title(f"{batch} decode{'s' if batch > 1 else ''}")
        axes.set_xlabel("tokens of history")
    sheets[0].set_ylabel("µs, one layer")
    figure.suptitle(
        "dots: recorded on an H200; lines: what the bytes take", x=0.01, ha="left", fontsize=9
    )
    return figure


@dataclass
class SoftmaxSteps:
    """A query's scores, read tile by tile, and what a running softmax knows after each tile.

    `tiles` are read so far, each of `size` keys; in which `order` the scores come.
    """

    scores: SequenceOf[float] = field(default_factory=lambda: [math.sin(i) for i in range(32)])
    tiles: int = 2
    size: int = 8
    order: str = "as in the text"

    orders = ("as in the text", "largest first", "largest last")

    @property
    def coming(self) -> list[float]:
        """The scores in the order in which they are read."""
        if self.order == "as in the text":
            return list(self.scores)
        return sorted(self.scores, reverse=self.order == "largest first")

    def after(self, tiles: int) -> tuple[float, float, float]:
        """The largest score, the sum of exponentials, and the last scaling, after some tiles."""
        largest, total, rescale = -math.inf, 0.0, 1.0
        for i in range(tiles):
            tile = self.coming[i * self.size : (i + 1) * self.size]
            if not tile:
                break
            new = max(largest, *tile)
            rescale = math.exp(largest - new)
            total = total * rescale + sum(math.exp(score - new) for score in tile)
            largest = new
        return largest, total, rescale

    @drawing
    def picture(self) -> Picture:
        """See `Explorer.picture`."""
        figure = canvas(3.9)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.3, 1))
        scores, read = self.coming, min(self.tiles * self.size, len(self.scores))
        latest = max(0, read - 1) // self.size * self.size if read else 0
        faces = [PALE if i >= read else ORANGE if i >= latest else BLUE for i in range(len(scores))]
        floor = min(scores) - 0.5
        above.bar(range(len(scores)), [s - floor for s in scores], bottom=floor, color=faces)
        for number in range(-(-read // self.size)):
            start, largest = number * self.size, self.after(number + 1)[0]
            end = min(start + self.size, len(scores))
            above.hlines(largest, start - 0.5, end - 0.5, color=TEXT, lw=2)
        above.set_title("scores: blue is read, orange is the newest tile; line: the largest so far")
        largest, total, _ = self.after(self.tiles)
        weights = [math.exp(s - largest) if i < read else 0.0 for i, s in enumerate(scores)]
        below.bar(range(len(scores)), weights, color=GREEN)
        if read:
            words = f"they add up to {total:.3f}"
            say(below, len(scores) - 0.5, 1.05, words, ha="right", weight="bold")
        below.set_ylim(0, 1.2)
        below.set_title("exp(score - largest so far)")
        below.set_xlabel("key, in the order in which it is read")
        for start in range(0, len(scores), self.size):
            for axes in (above, below):
                axes.axvline(start - 0.5, color=TEXT, lw=0.4, ls=":")
        below.set_xlim(-0.5, len(scores) - 0.5)
        return figure

    def text(self) -> str:
        """See `Explorer.text`."""
        count = -(-len(self.scores) // self.size)
        tiles = min(self.tiles, count)
        largest, total, rescale = self.after(tiles)
        whole = self.after(count)
        if not tiles:
            return f"Nothing is read yet. There are {count} tiles of {self.size} keys."
        known = [self.after(number)[0] for number in range(1, count + 1)]
        rises = sum(later > earlier for earlier, later in pairwise(known))
        return (
            f"After the first tile a larger score comes in {rises} of {count - 1} tiles.\n"
            f"After {tiles} of {count} tiles: largest {largest:.3f}, total {total:.4f}. When the "
            f"newest came, the sum before it was multiplied by {rescale:.4f}.\n"
            f"After all of them: largest {whole[0]:.3f}, total {whole[1]:.4f}, in any order."
        )
