"""`--profile DIR`: some steps with named ranges, as traces for Perfetto, and where the time went.

A range is the time inside one function of the engine, less that of the ranges inside it. The
functions are wrapped for the time of the profile and are left alone otherwise, so it costs nothing
when nobody looks. Open a file at https://ui.perfetto.dev: the ranges lie over torch's own events
and, on a GPU, over the kernels.

    scheduling    which requests compute how many tokens
    preparation   tensors from that: ids, positions, slots, block tables
    model         the decoder; with CUDA graphs the launch of one, which holds the sampling too
    sampling      scores and the next tokens, where they are no part of a graph
    waiting       for the GPU (stage 8)
    commit        tokens are booked, ends are found, blocks are given back

Knows: which function is which part of a step. Does not know: what should be fast.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nanoteach.bench.cases import Case
from nanoteach.bench.kernels import Event, covered_us, drop
from nanoteach.engine_core import EngineCore
from nanoteach.sequence import Sequence

RANGES = ("scheduling", "preparation", "model", "sampling", "waiting", "commit")
STEPS = 20


class Ranges:
    """Seconds of each range, without those of the ranges inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(RANGES, 0.0)
        self.inside: list[float] = []  # of every open range, what the ranges in it have taken
        self.events: list[Event] = []  # every range that is not inside another

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a range of this name."""

        def ranged(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            self.inside.append(0.0)
            try:
                with record_function(name):
                    return function(*args, **kwargs)
            finally:
                lasted = time.perf_counter() - begin
                self.seconds[name] += lasted - self.inside.pop()
                if self.inside:
                    self.inside[-1] += lasted
                else:
                    event = {"name": name, "start_us": 1e6 * begin, "us": 1e6 * lasted}
                    self.events.append(event)

        return ranged


class RangedGraph:
    """A recorded step whose replay is a range."""

    def __init__(self, ranges: Ranges, recorded: Any) -> None:
        self.replay = ranges.around("model", recorded.replay)


def places(core: EngineCore) -> list[tuple[Any, str, str]]:
    """(object, its function, range) for everything that this engine calls in a step."""
    from nanoteach.cuda_graphs import PendingTokens

    runner: Any = core.runner
    found: list[tuple[Any, str, str]] = [
        (core.scheduler, "schedule", "scheduling"),
        (runner.model, "forward", "model"),
        (runner.model, "logits", "sampling"),
        (PendingTokens, "result", "waiting"),
    ]
    if hasattr(runner, "launch"):
        found += [(runner, "launch", "preparation"), (runner.decoder, "run", "model")]
        if hasattr(runner.decoder, "race"):
            found.append((runner.decoder, "race", "sampling"))
    else:
        found += [(runner, "execute", "preparation"), (runner, "choose", "sampling")]
    if hasattr(core, "settle"):
        return [*found, (core, "settle", "commit")]
    return [*found, (core.scheduler, "commit", "commit")]


@contextmanager
def named_ranges(core: EngineCore) -> Iterator[Ranges]:
    """Every step inside the block has its ranges."""
    ranges, runner = Ranges(), core.runner
    with ExitStack() as after:
        for owner, name, kind in places(core):
            own, before = name in vars(owner), getattr(owner, name)
            setattr(owner, name, ranges.around(kind, before))
            if own:
                after.callback(setattr, owner, name, before)
            else:
                after.callback(delattr, owner, name)
        if graphs := getattr(runner, "graphs", None):
            ranged = {k: (b, RangedGraph(ranges, graph)) for k, (b, graph) in graphs.items()}
            runner.graphs = ranged  # type: ignore[attr-defined]
            after.callback(setattr, runner, "graphs", graphs)
        yield ranges


class Profile(NamedTuple):
    """Where some steps spent their time: seconds of all of them together.

    kernels: for how long the GPU ran, by class of kernel; empty without one.
    """

    case: str
    steps: int
    wall: float
    ranges: dict[str, float]
    kernels: dict[str, float]

    def __str__(self) -> str:
        each = 1e6 / self.steps
        rest = self.wall - sum(self.ranges.values())
        lines = [
            f"{self.case}, {self.steps} steps with a profiler: {each * self.wall:,.0f} µs each"
        ]
        for part, seconds in (*self.ranges.items(), ("the loop itself", rest)):
            lines.append(f"  {part:16} {each * seconds:9,.0f} µs  {seconds / self.wall:4.0%}")
        for kind, seconds in self.kernels.items():
            words = f"GPU: {kind}"
            lines.append(f"  {words:16} {each * seconds:9,.0f} µs  {seconds / self.wall:4.0%}")
        return "\n".join(lines)


def profile_steps(core: EngineCore, case: Case, path: Path) -> Profile:
    """Serve the case up to STEPS steps after its last request came; write the trace."""
    workload, seqs = case.workload, list[Sequence]()
    requests = list(zip(workload.prompts, workload.params, strict=True))
    for i, (prompt, params) in enumerate(requests):
        if i == workload.early:
            while not all(len(seq.token_times) >= workload.after for seq in seqs):
                core.step()
        seqs.append(core.add_request(f"profile-{i}", prompt, params))
    on_gpu = core.runner.model.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    steps = 0
    with named_ranges(core) as ranges, profile(activities=activities) as seen:
        begin = time.perf_counter()
        while steps < STEPS and core.has_unfinished_requests():
            core.step()
            steps += 1
        if on_gpu:
            torch.cuda.synchronize()
        wall = time.perf_counter() - begin
    drop(core, seqs)
    path.parent.mkdir(parents=True, exist_ok=True)
    seen.export_chrome_trace(str(path))
    kernels = sorted(
        (event.time_range.start, event.time_range.elapsed_us(), event.name)
        for event in seen.events()
        if event.device_type.name == "CUDA" and event.name not in RANGES
    )
    events = [{"name": name, "start_us": start, "us": us} for start, us, name in kernels]
    covered = {kind: us / 1e6 for kind, us in covered_us(events).items()} if events else {}
    return Profile(case.name, steps, wall, ranges.seconds, covered)
