"""Are the named causes enough? The watched steps' own times, put in the model's place.

A cause says where the time of one watched step went. If that were all, a run would come out right
in which every step misses the calibrated model by as much as the nearest watched step of its kind
did. Three more measurements go in, for what a step that is watched alone can't show: a prompt right
after another finds its host's part done; a step without a graph takes at least what it takes to
launch it; and the plain loop has the host's part after every step. Where a point does not come out
right, something happens that no measurement of ours shows.

Knows: the watched steps, the calibrated model. Does not know: which points are missed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanoteach.bench.calibrated import Calibrated
from nanoteach.bench.kernels import BATCHES, HISTORY, MIXED, PROMPTS
from nanoteach.bench.recording import Recording
from nanoteach.bench.serving import simulate
from nanoteach.bench.workloads import METRICS
from nanoteach.cost_model import VirtualClock, Work, step_cost
from nanoteach.step_inputs import MIXED_SIZES

SMALL = 1024
"""Up to so many tokens, a step of decodes and prompts counts as like the one that was watched."""


class WatchedSteps:
    """By how many seconds each watched step missed the calibrated model, by kind and size."""

    def __init__(self, found: Recording, model: Calibrated) -> None:
        self.found, self.model = found, model
        self.decodes = {n: self.excess(f"batch {n}", [Work(1, HISTORY + 50)] * n) for n in BATCHES}
        self.prompts = {
            n * length: self.excess(f"prompts {n} x {length:,}", [Work(length, 0)] * n)
            for n, length in PROMPTS
            if (n, length)
            != (4, 4096)  # as many tokens as 16 x 1,024, which the model is fitted on
        }
        self.idle = {
            n * length: found.median(f"kernels, prompts {n} x {length:,}", "GPU idle") / 1e6
            for n, length in PROMPTS
        }
        # What it takes to launch a step without a graph, whose kernels need less: of the two of
        # 4,096 tokens, the shorter.
        self.launches = min(
            4 * 1024 / found.median("prefill 4 x 1,024", "prompt"),
            found.median("packed, 16 x 256", "TTFT"),
        )
        # What the host takes between two steps of the plain loop, and hides in the other.
        plain, ahead = (
            found.median(f"{loop}, unlimited", "ITL p50 outside")
            for loop in ("plain loop", "decodes first")
        )
        self.host = plain - ahead
        decodes, part = MIXED[0], MIXED[1] - MIXED[0]
        work = [Work(1, 150)] * decodes + [Work(part, 1000, False)]
        self.mixed = self.excess(f"{decodes} decodes and {part} of a prompt", work)

    def excess(self, name: str, work: Sequence[Work]) -> float:
        """Seconds that this watched step took beyond the model's."""
        cost = step_cost(self.found.model, work, self.found.bytes_per_value)
        return self.found.median(f"kernels, {name}", "step") / 1e6 - self.model.seconds(cost)

    def nearest(self, work: Sequence[Work], follows: bool) -> float:
        """The excess of the watched step of this kind whose size is closest, as a ratio.

        follows: it comes right after another, so the host prepared it meanwhile.
        """
        tokens = sum(part.num_new for part in work)
        decodes = sum(part.num_new == 1 for part in work)
        if decodes and decodes < len(work) and tokens <= SMALL:
            return self.mixed
        sizes = self.decodes if decodes == len(work) else self.prompts
        size = min(sizes, key=lambda size: abs(math.log(size / tokens)))
        return sizes[size] - (self.idle[size] if follows and sizes is self.prompts else 0)


@dataclass(eq=False, kw_only=True)
class WatchedClock(VirtualClock):
    """The calibrated model's clock, with the excess of the nearest watched step in each.

    plain_loop: whether the host's part comes after each step, and not beside it.
    """

    steps: WatchedSteps
    plain_loop: bool = False
    last: float = -1.0
    """When the last step ended."""

    def tick(self, work: Sequence[Work]) -> None:
        """See `VirtualClock.tick`."""
        start = self.now()
        super().tick(work)
        self._now += self.steps.nearest(work, follows=start == self.last and not self.plain_loop)
        if sum(part.num_new for part in work) > MIXED_SIZES[-1]:
            self._now = max(self._now, start + self.steps.launches)
        if self.plain_loop:
            self._now += self.steps.host
        self.last = self.now()


def by_watched_steps(found: Recording, model: Calibrated) -> dict[tuple[str, str], float]:
    """By case and metric, what they say; of the engine alone whose steps were watched.

    Raises KeyError for a recording in which none were.
    """
    steps, said = WatchedSteps(found, model), dict[tuple[str, str], float]()
    for _, case in found.cases():
        if case.engine in ("best", "stage 8"):
            config, overlapped = found.engine(case)
            rates = found.model, model.hardware, found.bytes_per_value, model.overhead
            clock = WatchedClock(*rates, steps=steps, plain_loop=case.plain_loop)
            times = simulate(case, found.model, config, clock, overlapped)
            for metric in case.workload.metrics:
                said[case.name, metric] = METRICS[metric][1](case.workload, times)
    return said
