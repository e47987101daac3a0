"""Are the named causes enough? What was measured of steps, put in the model's place.

A cause says where the time of one watched step went. If that were nearly all, a run would come out
about right in which every step misses the calibrated model on the GPU by as much as the nearest
watched step of its kind, and in which the host takes as long as it took in that very turn of the
driver, the loop that adds requests and steps the engine. So the schedulers run once more on a clock
with these two hands.

- The host works first in a turn, and then it may wait: for the step before, or, in the plain loop,
  for the one that it has just launched.
- A step with a graph begins when the host has launched it and the step before is over.
- A step without one is launched kernel by kernel while the GPU works, and nobody has recorded when
  the first launch came. It may begin with the host's turn, and lasts at least as long as that.

What it can't tell: the host's turns are those of the runs that are judged, so they predict nothing.
Most watched steps are of the experiments' own kinds. Pauses inside a step do not count, since the
GPU is not busy in them. One watched step stands for all of decodes and parts of prompts.

Knows: the watched steps, the host's turns, the calibrated model. Does not know: which points are
missed.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nanoteach.bench.calibrated import Calibrated
from nanoteach.bench.causes import nearest_prompts
from nanoteach.bench.kernels import BATCHES, HISTORY, MIXED, PROMPTS
from nanoteach.bench.recording import Recording
from nanoteach.bench.serving import simulate
from nanoteach.bench.workloads import METRICS, StepLog
from nanoteach.cost_model import Work, step_cost
from nanoteach.step_inputs import MIXED_SIZES

SMALL = 1024
"""Up to so many tokens, a step of decodes and prompts counts as like the one that was watched."""


class WatchedSteps:
    """By how many seconds each watched step missed the calibrated model on the GPU."""

    def __init__(self, found: Recording, model: Calibrated) -> None:
        self.found, self.model = found, model
        self.decodes = {n: self.excess(f"batch {n}", [Work(1, HISTORY + 50)] * n) for n in BATCHES}
        self.prompts = {
            (n, length): self.excess(f"prompts {n} x {length:,}", [Work(length, 0)] * n)
            for n, length in PROMPTS
        }
        decodes, part = MIXED[0], MIXED[1] - MIXED[0]
        work = [Work(1, 150)] * decodes + [Work(part, 1000, False)]
        self.mixed = self.excess(f"{decodes} decodes and {part} of a prompt", work)

    def expected(self, work: Sequence[Work]) -> float:
        """The calibrated model's seconds."""
        return self.model.seconds(step_cost(self.found.model, work, self.found.bytes_per_value))

    def excess(self, name: str, work: Sequence[Work]) -> float:
        """Seconds for which a watched step kept the GPU busy, beyond the model's."""
        return self.found.median(f"kernels, {name}", "GPU busy") / 1e6 - self.expected(work)

    def seconds(self, work: Sequence[Work]) -> float:
        """The model's, and the excess of the watched step that is most like it."""
        return self.expected(work) + self.nearest(work)

    def nearest(self, work: Sequence[Work]) -> float:
        """The excess of the watched step of this kind whose size is closest."""
        tokens = sum(part.num_new for part in work)
        decodes = sum(part.num_new == 1 for part in work)
        if decodes == len(work):
            size = min(self.decodes, key=lambda n: abs(math.log(n / tokens)))
            return self.decodes[size]
        if decodes and tokens <= SMALL:
            return self.mixed
        return self.prompts[nearest_prompts(len(work), tokens)]


class HandClock:
    """Time that passes only when somebody waits."""

    label = "watched steps"

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        """See `Clock`."""
        return self.time

    def tick(self, work: Sequence[Work]) -> None:
        """See `Clock`."""

    def wait_until(self, t: float) -> None:
        """See `Clock`."""
        self.time = max(self.time, t)


class WatchedLog(StepLog):
    """A run on a clock that the host's recorded turns and the watched steps move on.

    host: seconds of each turn, in order.
    """

    def __init__(self, steps: WatchedSteps, host: Sequence[float]) -> None:
        super().__init__(HandClock())
        self.watched, self.turns = steps, iter(host)
        self.turn_start = self.gpu_free = 0.0
        self.launches: deque[tuple[float, float]] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """See `StepLog.turn`. The host works first, then it may wait."""
        self.turn_start = self.now()
        self.wait_until(self.turn_start + next(self.turns))
        yield

    def launched(self) -> None:
        """See `StepLog.launched`."""
        self.launches.append((self.turn_start, self.now()))

    def tick(self, work: Sequence[Work]) -> None:
        """A step is over when the GPU is done with it."""
        begun, launched = self.launches.popleft()
        if sum(part.num_new for part in work) <= MIXED_SIZES[-1]:
            start = max(self.gpu_free, launched)
            self.gpu_free = start + self.watched.seconds(work)
        else:  # without a graph, the GPU works while the host still launches
            start = max(self.gpu_free, begun)
            self.gpu_free = max(start + self.watched.seconds(work), launched)
        self.wait_until(self.gpu_free)
        super().tick(work)


class ExpectedSteps(WatchedSteps):
    """In the watched steps' place: every step takes what the model says."""

    def nearest(self, work: Sequence[Work]) -> float:
        """No excess."""
        return 0.0


def by_watched_steps(
    found: Recording, model: Calibrated, gpu: bool = True, host: bool = True
) -> dict[tuple[str, str], float]:
    """By case and metric, what they say; of the engine alone whose steps were watched.

    gpu, host: whether the hand is on the clock. Without its own the GPU goes by the model, and the
    host takes no time.
    """
    steps = (WatchedSteps if gpu else ExpectedSteps)(found, model)
    said = dict[tuple[str, str], float]()
    for _, case in found.cases():
        if case.engine in ("best", "stage 8"):
            config, overlapped = found.engine(case)
            log = WatchedLog(steps, [host * us / 1e6 for us in found.host[case.name]])
            times = simulate(case, found.model, config, log, overlapped)
            if next(log.turns, None) is not None or log.launches:
                raise ValueError(f"{case.name} had more turns than this schedule: record it anew")
            for metric in case.workload.metrics:
                said[case.name, metric] = METRICS[metric][1](case.workload, times)
    return said
