"""Checks of notebook 11: a timeline read, a line through two steps, what could be gained."""

import copy
from collections.abc import Callable
from typing import Any

from nanoteach.bench.calibrated import Point
from nanoteach.bench.kernels import CLASSES, class_of
from nanoteach.cost_model import Cost
from nanoteach.course.checking import case, check, expect_equal

ATTENTION, PRODUCT, NORM, COPY = (
    "decode_kernel", "nvjet_sm90_tst_64x8", "rms_norm_kernel", "Memcpy DtoH (Device -> Pinned)",
)  # fmt: skip


def _events(*parts: tuple[str, float, float]) -> list[dict[str, Any]]:
    """Events from (name, start, length)."""
    return [{"name": name, "start_us": start, "us": us} for name, start, us in parts]


def _walked(events: list[dict[str, Any]], step: float = 0.5) -> dict[str, float]:
    """By looking at every moment: the running kernel that began first has it."""
    found = dict.fromkeys((*CLASSES, "rest"), 0.0)
    last = max((e["start_us"] + e["us"] for e in events), default=0.0)
    for i in range(round(last / step)):
        moment = (i + 0.5) * step
        running = [e for e in events if e["start_us"] < moment < e["start_us"] + e["us"]]
        if running:
            found[class_of(running[0]["name"])] += step
    return found


def _by_class(events: list[dict[str, Any]], lasted: Callable[[int], float]) -> dict[str, float]:
    found = dict.fromkeys((*CLASSES, "rest"), 0.0)
    for i, event in enumerate(events):
        found[class_of(event["name"])] += lasted(i)
    return found


def _expect_each(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], right: dict[str, float],
    likely: list[tuple[Any, str]], if_raised: str | None = None,
) -> None:  # fmt: skip
    """As `expect`, for a dict of numbers: to 5 digits, and whatever the order of its keys."""
    case(name, if_raised)
    got = function(*copy.deepcopy(args))
    if not isinstance(got, dict) or got.keys() != right.keys():
        expect_equal(name, right, got, likely)
    same = [(wrong, words) for wrong, words in likely if isinstance(wrong, dict)]
    values = [([w[k] for k in right], words) for w, words in same if w.keys() == right.keys()]
    expect_equal(
        f"{name}: {', '.join(right)}", list(right.values()), [got[k] for k in right], values
    )


@check("nanoteach.bench.kernels.covered_us", "A timeline, read", stages=(11,))
def check_covered_us(covered_us: Callable[..., dict[str, float]]) -> None:
    """Counted moment by moment."""
    for name, parts in (
        ("two kernels one after the other", [(PRODUCT, 0, 4), (ATTENTION, 4, 3)]),
        ("the second begins while the first runs", [(PRODUCT, 0, 4), (ATTENTION, 3, 4)]),
        ("a gap between two", [(PRODUCT, 0, 2), (PRODUCT, 5, 2), (COPY, 9, 1)]),
        ("one inside another, and one after both",
         [(PRODUCT, 0, 8), (NORM, 2, 1), (ATTENTION, 6, 4)]),
        ("three at once", [(PRODUCT, 0, 6), (NORM, 1, 4), (ATTENTION, 3, 9), (NORM, 12, 1)]),
        ("nothing at all", []),
    ):  # fmt: skip
        events = _events(*parts)
        right = _walked(events)
        stops = [e["start_us"] + e["us"] for e in events]
        starts = [e["start_us"] for e in events] + [None]

        def between(i: int, stops: Any = stops, starts: Any = starts) -> float:
            return float((stops[i] if starts[i + 1] is None else starts[i + 1]) - starts[i])

        def after_last(i: int, stops: Any = stops, starts: Any = starts) -> float:
            last = stops[i - 1] if i else float("-inf")
            return max(0.0, float(stops[i] - max(starts[i], last)))

        def unclamped(i: int, stops: Any = stops, starts: Any = starts) -> float:
            last = max(stops[:i], default=float("-inf"))
            return float(stops[i] - max(starts[i], last))

        def from_last(i: int, stops: Any = stops) -> float:
            return max(0.0, float(stops[i] - max(stops[:i], default=0.0)))

        likely = [
            (_by_class(events, lambda i, events=events: events[i]["us"]),  # type: ignore[misc]
             "Two that run at once share their time: it must count once, for the first of them."),
            (_by_class(events, between),
             "From one start to the next is not how long a kernel runs: there may be gaps."),
            (_by_class(events, unclamped),
             "A kernel that ends inside another adds nothing, and takes nothing away: 0 at least."),
            (_by_class(events, after_last),
             "Look at the latest end so far, not at the end of the event before: that may lie "
             "inside an older one that still runs."),
            (_by_class(events, from_last),
             "In a gap nobody runs: a kernel that begins behind the latest end counts from its own "
             "start."),
            ({kind: right[kind] for kind in CLASSES}, "`rest` is in the result, too, also with 0."),
            ({kind: us for kind, us in right.items() if us},
             "Every class of CLASSES is in the result, and `rest`, also with 0."),
            (sum(right.values()), "By class: a dict from the class to its microseconds."),
        ]  # fmt: skip
        _expect_each(name, covered_us, (events,), right, likely)


@check("nanoteach.bench.calibrated.line_through", "Overhead and bandwidth", stages=(11,))
def check_line_through(line_through: Callable[[Point, Point], tuple[float, float]]) -> None:
    """The two points are made from the line."""
    for overhead, bandwidth, few, many in (
        (1.0, 2e9, 10**9, 3 * 10**9),
        (3e-4, 3.5e12, 1_309_655_040, 16_000_000_000),
        (0.0, 4e12, 10**9, 9 * 10**9),
    ):
        points = [Point(Cost(7, n), overhead + n / bandwidth) for n in (few, many)]
        (_, t1), (_, t2) = points
        slope = (t2 - t1) / (many - few)
        likely = [
            ((bandwidth, overhead), "The overhead comes first."),
            ((1e6 * overhead, bandwidth), "The overhead in seconds."),
            ((overhead, bandwidth / 1e9), "The bandwidth in bytes a second."),
            ((1e6 * overhead, bandwidth / 1e9), "In seconds, and in bytes a second."),
            ((overhead, slope), "That is seconds a byte. The bandwidth is bytes a second."),
            ((t1, bandwidth), "The first step has bytes of its own: take their time off."),
            ((t1 - few / (many / t2), many / t2),
             "Not the bytes over the seconds of one step: the overhead is in those seconds."),
            ((0.0, few / t1), "Not the bytes over the seconds of one step: the overhead is in "
             "those seconds. The difference of two steps has none."),
            ((t2 - few / bandwidth, bandwidth), "Take a step's own bytes off its own seconds."),
        ]  # fmt: skip
        name = f"{few:,} bytes in {t1:.4g} s, {many:,} bytes in {t2:.4g} s"
        case(name)
        got = line_through(*points)
        if isinstance(got, (list, tuple)) and len(got) == 2 and overhead == 0.0:
            # What is left of 0 by rounding is no mistake.
            got = (0.0 if abs(got[0]) < 1e-9 * t2 + 1e-12 else got[0], got[1])
        expect_equal(name, (overhead, bandwidth), got, likely)


@check("nanoteach.bench.calibrated.possible_gains", "What could be gained", stages=(11,))
def check_possible_gains(possible_gains: Callable[..., dict[str, float]]) -> None:
    """Each part by itself: the step is added up anew with the part at its bound."""
    for name, seconds, bounds in (
        ("3 parts, 2 bounds", {"a": 6.0, "b": 3.0, "c": 1.0}, {"a": 2.0, "c": 0.5}),
        ("a part that is faster than its bound", {"a": 4.0, "b": 2.0}, {"a": 5.0, "b": 1.0}),
        ("no bounds", {"products": 0.5, "attention": 0.3, "idle": 0.2}, {}),
        ("a bound of something that is not there", {"a": 2.0, "b": 3.0}, {"b": 1.0, "z": 9.0}),
    ):
        whole = sum(seconds.values())
        least = {k: min(v, bounds.get(k, 0.0)) for k, v in seconds.items()}
        right = {k: whole / (sum(seconds.values()) - v + least[k]) for k, v in seconds.items()}
        part = "So much faster is the part. How much faster is the whole step?"
        likely = [
            *(({k: v / least[k] if least[k] else other for k, v in seconds.items()}, part)
              for other in (0.0, 1.0)),
            ({k: v - 1 for k, v in right.items()}, "Times as fast: no faster is 1, and not 0."),
            ({k: (v - least[k]) / whole for k, v in seconds.items()},
             "That is the share that is saved. How many times as fast is what is left?"),
            ({k: whole / (whole - v) for k, v in seconds.items()},
             "A part never takes less than its bound: only what is above it can be saved."),
            ({k: whole / (whole - v + bounds.get(k, 0.0)) for k, v in seconds.items()},
             "A part that is at its bound, or under it, gains nothing: 1, and not less."),
            ({k: 1 / right[k] for k in right}, "Times as fast, not times as long: turn it over."),
            ({k: whole - v + least[k] for k, v in seconds.items()},
             "That is how long the step would take. How many times as fast is it?"),
            ({k: right[k] for k in right if k in bounds},
             "A part without a bound could be gone altogether: its bound is 0."),
        ]  # fmt: skip
        raised = "Is it at a part without a bound? Its bound is 0."
        _expect_each(name, possible_gains, (seconds, bounds), right, likely, raised)
