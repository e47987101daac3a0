"""The pictures of notebook 09: distributions as they are, as they are filtered, and as drawn.

Knows: matplotlib, and rows of scores. Does not know: engines.
"""

import math
import statistics
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from nanoteach.course.pictures import (
    BLUE,
    GREEN,
    LINE,
    ORANGE,
    PALE,
    TEXT,
    Picture,
    canvas,
    drawing,
    lanes,
    say,
)
from nanoteach.results import recorded
from nanoteach.sampling_filters import Rules, filter_ranked


class Cost(NamedTuple):
    """The median time of a recorded decode step, in ms."""

    batch: int
    wish: str
    step_ms: float


def recorded_costs(result: str = "sampling_h200") -> list[Cost]:
    """What was measured on a GPU, by the name of the result file; see bench/sampling.py."""
    return [
        Cost(row["batch"], row["wish"], statistics.median(row["step_ms"]))
        for row in recorded(result)["rows"]
    ]


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """What tokens are drawn with, `[vocab_size]`: probabilities after temperature and filters."""
    ranked, order = logits.sort(descending=True, stable=True)
    none = torch.zeros(1, dtype=torch.int64)
    rules = Rules(
        none, none, torch.tensor([top_k]), torch.tensor([temperature]), torch.tensor([top_p])
    )
    left = filter_ranked(ranked.unsqueeze(0), rules)[0] / temperature
    return torch.empty_like(left).scatter_(0, order, left.softmax(-1))


@drawing
def temperatures(logits: Tensor, words: SequenceOf[str], heats: SequenceOf[float]) -> Picture:
    """The best tokens' probabilities at several temperatures, and what all the others have."""
    figure = canvas(2.7)
    sheets = figure.subplots(1, len(heats), sharey=True, squeeze=False)[0]
    best = logits.argsort(descending=True)[:8].tolist()
    for axes, heat in zip(sheets, heats, strict=True):
        probabilities = (logits / heat).softmax(-1)
        rest = 1 - float(probabilities[best].sum())
        shares = [*probabilities[best].tolist(), rest]
        colours = [BLUE] * len(best) + [ORANGE]
        axes.bar(range(len(shares)), shares, color=colours)
        say(axes, len(best), rest + 0.04, f"{rest:.1%}", TEXT, ha="center")
        axes.set_xticks(range(len(shares)), [*(words[i] for i in best), "others"], rotation=90)
        axes.set_title(f"temperature {heat:g}")
    sheets[0].set_ylim(0, 1)
    sheets[0].set_ylabel("probability")
    return figure


@drawing
def race_lanes(rates: Mapping[str, float], times: Mapping[str, SequenceOf[float]]) -> Picture:
    """Arrival times of some tokens in several races; the first of each race has a ring."""
    figure = canvas(2.6)
    axes = figure.subplots()
    names = list(rates)
    races = len(next(iter(times.values())))
    symbols, shades = ("o", "s", "^", "D"), (BLUE, ORANGE, GREEN, TEXT)
    for race in range(races):
        winner = min(names, key=lambda name: times[name][race])
        for lane, name in enumerate(names):
            marker, colour, at = symbols[race % 4], shades[race % 4], times[name][race]
            axes.plot([at], [lane], marker, color=colour, ms=6, alpha=0.8)
            if name == winner:
                axes.plot([at], [lane], "o", mfc="none", mec=colour, ms=14, mew=1.5)
        axes.plot([], [], symbols[race % 4], color=shades[race % 4], label=f"race {race + 1}")
    lanes(axes, [f"{name}  {rate:.3f}" for name, rate in rates.items()])
    axes.set_xscale("log")
    axes.set_xlabel("arrival time; the token's rate is its probability, beside its name")
    axes.set_title("an exponential race: who arrives first is drawn")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False)
    return figure


@drawing
def compared(
    words: SequenceOf[str],
    panels: Mapping[str, tuple[SequenceOf[float], SequenceOf[int]]],
) -> Picture:
    """Probabilities as bars, and the share of the draws as dots, with twice their standard error.

    panels: for each title the probabilities of the words, and how often each was drawn. The last
    word stands for all tokens that have no bar of their own.
    """
    figure = canvas(2.8)
    sheets = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, (expected, found)) in zip(sheets, panels.items(), strict=True):
        count, places = sum(found), range(len(words))
        axes.bar(places, expected, color=PALE, edgecolor=LINE, lw=0.6)
        shares = [n / count for n in found]
        errors = [2 * math.sqrt(p * (1 - p) / count) for p in expected]
        axes.errorbar(places, shares, yerr=errors, fmt="o", color=BLUE, ms=4, lw=1)
        axes.set_xticks(places, words, rotation=90)
        axes.set_title(title)
    sheets[0].set_ylabel("bar: probability; dot: draws")
    return figure


@dataclass
class SamplingExplorer:
    """One distribution behind three knobs: temperature, top_k (0: off), top_p (1: off)."""

    logits: Tensor = field(default_factory=lambda: torch.tensor([3.0, 2.0, 1.5, 1.0, 0.0, -1.0]))
    words: SequenceOf[str] = ("a", "b", "c", "d", "e", "f")
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def probabilities(self) -> Tensor:
        """What a token is drawn with."""
        return filtered(self.logits, self.temperature, self.top_k, self.top_p)

    @drawing
    def picture(self) -> Picture:
        """See `Explorer.picture`."""
        figure = canvas(3.2)
        axes = figure.subplots()
        best = self.logits.argsort(descending=True, stable=True)[:16].tolist()
        before = (self.logits / self.temperature).softmax(-1)
        places, drawn = range(len(best)), self.probabilities
        axes.bar([x - 0.2 for x in places], before[best].tolist(), width=0.4, color=PALE,
                 edgecolor=LINE, lw=0.6, label="at this temperature")  # fmt: skip
        axes.bar([x + 0.2 for x in places], drawn[best].tolist(), width=0.4, color=BLUE,
                 label="after the filters")  # fmt: skip
        axes.set_xticks(places, [self.words[i] for i in best], rotation=90)
        axes.set_ylim(0, 1)
        axes.set_ylabel("probability")
        axes.set_title(f"the {len(best)} best of {len(self.logits):,} tokens")
        axes.legend(frameon=False, fontsize=8)
        return figure

    def text(self) -> str:
        """See `Explorer.text`."""
        drawn = self.probabilities
        kept = drawn > 0
        share = float((self.logits / self.temperature).softmax(-1)[kept].sum())
        entropy = -float((drawn[kept] * drawn[kept].log()).sum())
        many = "1 token is" if kept.sum() == 1 else f"{int(kept.sum()):,} tokens are"
        return (
            f"{many} left, which had {share:.1%} of the probability between them.\n"
            f"Drawing from them is like drawing from {math.exp(entropy):.1f} equal ones."
        )
