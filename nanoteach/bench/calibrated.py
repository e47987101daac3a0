"""The second prediction: the cost model with the rates that this engine reaches, and an overhead.

    seconds of a step = overhead + max(FLOPs / reached FLOP/s, bytes / reached bytes/s)

Two decode steps, of few requests and of many, give the overhead and the bandwidth; one step of
prompts gives the FLOP rate. Everything else is predicted, and judged. It is a `VirtualClock` like
any other, so it holds for whole runs: waiting, chunks, preemptions and all.

The overhead is no fudge: bench/kernels.py finds its time again, in the kernels and between the
steps. What the kernels wait for in it is another question.

Knows: three measured points, result files. Does not know: why a point is missed.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nanoteach.config import ModelConfig
from nanoteach.cost_model import Clock, Cost, VirtualClock
from nanoteach.hardware import Hardware


class Point(NamedTuple):
    """A step whose time is known."""

    cost: Cost
    seconds: float


@dataclass(frozen=True)
class Calibrated:
    """Rates that are reached, in the place of the ceilings, and seconds a step beside them."""

    hardware: Hardware
    overhead: float

    def seconds(self, cost: Cost) -> float:
        """Of one step."""
        return self.overhead + cost.seconds(self.hardware)

    def clock(self, model: ModelConfig, bytes_per_value: int) -> Clock:
        """A virtual clock that goes by it."""
        return VirtualClock(model, self.hardware, bytes_per_value, self.overhead)


def line_through(few: Point, many: Point) -> tuple[float, float]:
    """Seconds of overhead, and bytes/s, of the line through two steps that bytes limit.

    `many` moves more bytes than `few`.
    """
    bandwidth = (many.cost.bytes - few.cost.bytes) / (many.seconds - few.seconds)
    return few.seconds - few.cost.bytes / bandwidth, bandwidth


def fit(ceilings: Hardware, few: Point, many: Point, prompts: Point) -> Calibrated:
    """From two decode steps, which bytes limit, and a step of prompts, which FLOPs limit.

    Raises ValueError where more bytes took no more time, or where nothing is left for an overhead.
    """
    if many.seconds <= few.seconds or many.cost.bytes <= few.cost.bytes:
        raise ValueError("the step of many requests must move more bytes, and take longer")
    overhead, bandwidth = line_through(few, many)
    if overhead < 0 or overhead >= prompts.seconds:
        raise ValueError(f"these points leave {overhead:.2g} s a step for overhead: take others")
    flops = prompts.cost.flops / (prompts.seconds - overhead)
    reached = dataclasses.replace(
        ceilings, name=f"{ceilings.name}, calibrated", flops=flops, read_bandwidth=bandwidth
    )
    return Calibrated(reached, overhead)


def possible_gains(seconds: Mapping[str, float], bounds: Mapping[str, float]) -> dict[str, float]:
    """How many times as fast a step would be at most, if one of its parts took only its bound.

    seconds: of each part of a step, one after the other; bounds: the least that a part can take, 0
    where it is not named. (Amdahl, 1967.)
    """
    whole = sum(seconds.values())
    return {
        part: whole / (whole - max(0.0, taken - bounds.get(part, 0.0)))
        for part, taken in seconds.items()
    }
