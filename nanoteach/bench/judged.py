"""Stage 11. An engine that says where its own time went: the bench around a run.

It generates as the engine in it does, and afterwards holds what notebook 11 does by hand: how long
each part of a step ran, what could be gained from each, and the overhead and the bandwidth that two
of its own steps give.

Knows: ranges, two predictions. Does not know: what to do about it.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from nanoteach.bench.calibrated import Point, line_through, possible_gains
from nanoteach.bench.kernels import covered_us
from nanoteach.bench.profiling import named_ranges
from nanoteach.bench.workloads import StepLog
from nanoteach.cost_model import WallClock, Work, step_cost
from nanoteach.stages import Parts, build_engine
from nanoteach.types import SamplingParams


class CostLog(StepLog):
    """A clock that also keeps what each step cost, and how long it took."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.clock or WallClock())
        self.model = parts.model
        self.points: list[Point] = []
        self.before = self.now()

    def tick(self, work: SequenceOf[Work]) -> None:
        """See `Clock`."""
        super().tick(work)
        cost = step_cost(self.model.config, work, self.model.dtype.itemsize)
        now = self.now()
        if all(part.num_new == 1 for part in work):
            self.points.append(Point(cost, now - self.before))
        self.before = now


class JudgedEngine:
    """Has `generate`. After it, `told` says where the time went, in a few lines."""

    def __init__(self, parts: Parts) -> None:
        self.log = CostLog(parts)
        self.core = build_engine(replace(parts, clock=self.log))
        self.told = "Nothing has run yet."

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[list[int]]:
        """See `Generator.generate`."""
        self.log.points.clear()
        with named_ranges(self.core) as ranges:
            outputs = self.core.generate(prompts, params)
        gains = possible_gains(ranges.seconds, {})
        best = max(gains, key=lambda part: gains[part])
        busy = sum(covered_us(ranges.events).values())
        lines = [f"{busy / 1e6:.3f} s inside the engine's parts, most of it in: {best}"]
        few, many = (f(self.log.points, key=lambda p: p.cost.bytes) for f in (min, max))
        if few.cost.bytes < many.cost.bytes and few.seconds < many.seconds:
            overhead, bandwidth = line_through(few, many)
            lines.append(
                f"its decode steps ({self.log.label}): {1e6 * overhead + 0:.0f} µs of overhead, "
                f"{bandwidth / 1e9:,.0f} GB/s"
            )
        self.told = "\n".join(lines)
        return outputs
