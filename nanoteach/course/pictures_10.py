"""The pictures of notebook 10: a stream in time, a server's metrics, latency against load.

Knows: matplotlib, times, the levels of a load test. Does not know: servers.
"""

import heapq
import random
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.lines import Line2D

from nanoteach.bench.serve import Level, knee
from nanoteach.course.pictures import (
    BLUE,
    GREEN,
    LINE,
    ORANGE,
    PALE,
    PURPLE,
    TEXT,
    Picture,
    canvas,
    drawing,
    lanes,
    say,
)
from nanoteach.results import recorded

STYLES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"))

Loads = Mapping[str, Mapping[str, Any]]
"""Load tests by name: what `LoadTest.result` gives."""


def within(load: Mapping[str, Any], ttft_limit: float) -> dict[str, Any]:
    """A load test as another limit for the first token would have judged it."""
    limits = {**load["limits"], "ttft": ttft_limit}
    levels = [{**level, "goodput": goodput(level["samples"], limits)} for level in load["levels"]]
    found = knee([Level(**level) for level in levels], ttft_limit)
    return {**load, "limits": limits, "levels": levels, "knee": found}


def goodput(samples: Mapping[str, SequenceOf[float]], limits: Mapping[str, float]) -> float:
    """Requests a second that met both limits, from the first arrival to the last token."""
    good = sum(
        ttft <= limits["ttft"] and (e2e - ttft) / max(1, tokens - 1) <= limits["itl"]
        for ttft, e2e, tokens in zip(
            samples["ttft"], samples["e2e"], samples["tokens"], strict=True
        )
    )
    return good / max(due + e2e for due, e2e in zip(samples["due"], samples["e2e"], strict=True))


def recorded_loads(ttft_limit: float) -> dict[str, dict[str, Any]]:
    """The load tests of a GPU: two budgets, and the larger one in a single process."""
    return {
        name: within(recorded(f"load_h200_{file}"), ttft_limit)
        for name, file in (
            ("steps of up to 8,192 tokens", "8192"),
            ("up to 512", "512"),
            ("up to 8,192, all in one process", "one_process"),
        )
    }


@drawing
def waiting(times: SequenceOf[float], total: float) -> Picture:
    """When the pieces of an answer came, in ms: streamed, and all at once."""
    figure = canvas(1.5)
    axes = figure.subplots()
    lanes(axes, ["streamed", "at once"])
    axes.plot([1e3 * t for t in times], [0] * len(times), "|", color=BLUE, ms=14, mew=2)
    axes.plot([1e3 * total], [1], "|", color=ORANGE, ms=14, mew=2)
    say(axes, 1e3 * times[0], -0.45, "first token", ha="left")
    axes.set_xlim(0, 1.08e3 * total)
    axes.set_xlabel("ms after the question")
    return figure


@drawing
def over_time(samples: SequenceOf[Mapping[str, float]], arrivals: SequenceOf[float]) -> Picture:
    """What /metrics said, again and again; arrivals: requests a second, and when each began."""
    figure = canvas(3.4)
    upper, lower = figure.subplots(2, 1, sharex=True)
    seconds = [sample["seconds"] for sample in samples]
    for name, colour, label in (
        ("num_requests_running", BLUE, "running"),
        ("num_requests_waiting", ORANGE, "waiting"),
    ):
        upper.step(seconds, [s[name] for s in samples], color=colour, label=label, where="post")
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": 8}
    upper.legend(frameon=False, **beside)
    upper.set_ylabel("requests")
    for name, colour, label in (
        ("kv_cache_usage_perc", PURPLE, "KV blocks held"),
        ("hit_rate", GREEN, "prefix tokens found"),
    ):
        lower.step(seconds, [s[name] for s in samples], color=colour, label=label, where="post")
    lower.set_ylim(0, 1)
    lower.set_ylabel("share")
    lower.legend(frameon=False, **beside)
    lower.set_xlabel("seconds")
    for when in arrivals:
        upper.axvline(when, color=LINE, lw=0.6, ls=":")
        lower.axvline(when, color=LINE, lw=0.6, ls=":")
    return figure


@drawing
def latency_against_load(loads: Loads) -> Picture:
    """Times to the first token, gaps and rates at every load, with the knee of each test marked."""
    figure = canvas(3.4)
    first, gap, rate = figure.subplots(1, 3)
    top = max(level["rate"] for load in loads.values() for level in load["levels"])
    keys: list[Line2D] = []
    for (name, load), (colour, marker) in zip(loads.items(), STYLES, strict=False):
        more: dict[str, Any] = {"color": colour, "marker": marker, "ms": 4}
        levels = load["levels"]
        rates = [level["rate"] for level in levels]
        for axes, key in ((first, "ttft"), (gap, "itl")):
            for share, style in (("p50", ":"), ("p99", "-")):
                times = [1e3 * level[key].get(share, float("nan")) for level in levels]
                axes.plot(rates, times, style, **more)
        for key, style in (("completed", "-"), ("goodput", ":")):
            rate.plot(rates, [level[key] for level in levels], style, **more)
        first.axhline(1e3 * load["limits"]["ttft"], color=LINE, lw=0.8, ls="--")
        if knee := load["knee"]:
            for axes in (first, gap, rate):
                axes.axvline(knee, color=colour, lw=1, alpha=0.5)
            say(first, knee, 0.98, f"knee {knee:g}", colour, weight="bold", rotation=90,
                transform=first.get_xaxis_transform(), ha="right", va="top")  # fmt: skip
        keys.append(Line2D([], [], label=name, **more))
    rate.plot([0, top], [0, top], color=LINE, lw=0.8, ls="--")
    for axes, title, solid, dotted, dashed in (
        (first, "first token, ms", "p99", "p50", "the limit"),
        (gap, "between pieces, ms", "p99", "p50", None),
        (rate, "requests a second", "completed", "within limits", "all that arrive"),
    ):
        axes.set_title(title, pad=20)
        axes.set_xlabel("requests a second that arrive")
        if axes is not rate:
            axes.set_yscale("log")
        styles = ((TEXT, "-", solid), (TEXT, ":", dotted), (LINE, "--", dashed))
        axes.legend(
            handles=[Line2D([], [], color=c, ls=s, label=label) for c, s, label in styles if label],
            loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=3, frameon=False, fontsize=8,
            handlelength=1.6, handletextpad=0.4, columnspacing=0.8, borderpad=0.2,
        )  # fmt: skip
    first.set_ylim(top=5 * first.get_ylim()[1])  # room for the knees' names above all lines
    figure.legend(
        handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=8
    )
    return figure


class Line(NamedTuple):
    """What became of a simulated queue: waits of those let in, its length over time, refusals."""

    waits: list[float]
    lengths: list[tuple[float, int]]
    refused: int

    def wait(self, share: float) -> float:
        """The seconds that this share of those let in waits at most: 0.5 is the median."""
        return sorted(self.waits)[int(share * len(self.waits))]

    @property
    def refused_share(self) -> float:
        """Of all that came."""
        return self.refused / (self.refused + len(self.waits))


def queue(rate: float, places: int, seconds: float, room: int | None, count: int = 2000) -> Line:
    """Poisson arrivals at a server with some places; an answer takes an exponential time.

    rate: arrivals a second; seconds: an answer's mean time; room: how many may wait, None for any.
    """
    rng = random.Random(0)
    now, waits, lengths, refused = 0.0, list[float](), [(0.0, 0)], 0
    free = [0.0] * places  # when each place is free again
    begins: list[float] = []  # of those who wait
    for _ in range(count):
        now += rng.expovariate(rate)
        while begins and begins[0] <= now:
            lengths.append((heapq.heappop(begins), len(begins)))
        if room is not None and len(begins) >= room and free[0] > now:
            refused += 1
            continue
        begin = max(now, heapq.heappop(free))
        waits.append(begin - now)
        if begin > now:
            heapq.heappush(begins, begin)
            lengths.append((now, len(begins)))
        heapq.heappush(free, begin + rng.expovariate(1 / seconds))
    return Line(waits, lengths, refused)


@dataclass
class QueueExplorer:
    """A server with 8 places and answers of a second on average: what does a queue do?"""

    rate: float = 6.0
    room: int = 0
    """How many may wait; 0: any number."""
    places: int = 8
    seconds: float = 1.0

    @property
    def line(self) -> Line:
        """What becomes of 2,000 requests."""
        return queue(self.rate, self.places, self.seconds, self.room or None)

    @drawing
    def picture(self) -> Picture:
        """See `Explorer.picture`."""
        figure = canvas(2.6)
        left, right = figure.subplots(1, 2, width_ratios=(2, 1))
        line = self.line
        times, lengths = zip(*line.lengths, strict=True)
        left.step(times, lengths, where="post", color=BLUE, lw=1)
        left.set_xlabel("seconds")
        left.set_ylabel("requests that wait")
        left.set_ylim(bottom=0)
        right.hist(line.waits, bins=30, color=PALE, edgecolor=BLUE)
        right.set_yscale("log")
        right.set_xlabel("seconds before the first step")
        right.set_ylabel("requests")
        right.set_title(f"{line.refused:,} refused")
        return figure

    def text(self) -> str:
        """See `Explorer.text`."""
        line = self.line
        capacity = self.places / self.seconds
        return (
            f"{self.rate:g} requests a second arrive, and {capacity:g} can be answered: "
            f"{self.rate / capacity:.0%} of it.\n"
            f"The median waits {line.wait(0.5):.2f} s, one of a hundred over "
            f"{line.wait(0.99):.2f} s. {line.refused_share:.0%} are refused."
        )
