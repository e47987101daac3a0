"""A workload through an engine, real or simulated, with everything that was counted on the way.

The driver adds requests when they are due and steps the engine. A simulation is the same driver and
the same scheduler on a virtual clock: only the model is missing, and each step takes as long as the
cost model says. So what it predicts holds for this schedule, waiting and all.

Knows: engines from outside, clocks. Does not know: why these requests; see cases.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from nanoteach.bench.cases import Case
from nanoteach.bench.workloads import Served, StepLog, Times, Workload
from nanoteach.block_manager import BlockManager
from nanoteach.config import EngineConfig, ModelConfig
from nanoteach.cost_model import Work
from nanoteach.engine_core import EngineCore
from nanoteach.overlapped import OverlappedEngineCore
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.scheduler import Scheduled, Scheduler
from nanoteach.stages import Generator

AMPLE = 2**16  # blocks


class Refused(Exception):
    """A run whose precondition failed: its time is that of another workload."""


def fresh_scheduler(
    case: Case, num_blocks: int, config: EngineConfig, trace: Any = None
) -> Scheduler:
    """The case's scheduler over an empty pool: no run finds what another has left.

    Raises ValueError where the case asks for more than the engine has.
    """
    wanted = {
        "num_blocks": (case.num_blocks, num_blocks, "num_gpu_blocks_override"),
        "max_num_seqs": (case.max_num_seqs, config.max_num_seqs, "max_num_seqs"),
        "budget": (case.budget, config.max_num_batched_tokens, "max_num_batched_tokens"),
    }
    for asked, there, option in wanted.values():
        if asked is not None and asked > there:
            raise ValueError(f"needs {option} of {asked:,} or more, not {there:,}")
    blocks, seats, budget = (
        there if asked is None else asked for asked, there, _ in wanted.values()
    )
    manager_class = PrefixCachingBlockManager if case.prefix_caching else BlockManager
    return case.scheduler(manager_class(blocks, config.block_size, trace), seats, budget, trace)


def serve(engine: Generator, workload: Workload, log: StepLog) -> Times:
    """Everything the workload has, from the first request to the last token."""
    log.begin()
    if not isinstance(engine, EngineCore):
        start = log.now()
        outputs = engine.generate(workload.prompts, workload.params)
        check_lengths(workload, [len(output) for output in outputs])
        return Times(start, log.now(), log.steps, [], sum(step.tokens for step in log.steps))
    if getattr(engine, "flight", None):
        raise Refused("a step of the run before is still in flight")
    before, start = engine.num_computed_tokens, log.now()
    requests = list(zip(workload.prompts, workload.params, strict=True))
    seqs, early = [], workload.early
    for i in range(early):
        with log.turn():
            seqs.append(engine.add_request(str(i), *requests[i]))
    while engine.has_unfinished_requests():
        due = len(seqs) < len(requests)
        if due and all(len(seq.token_times) >= workload.after for seq in seqs):
            for i in range(early, len(requests)):
                with log.turn():
                    seqs.append(engine.add_request(str(i), *requests[i]))
        with log.turn():
            engine.step()
    end, scheduler = log.now(), engine.scheduler
    check_lengths(workload, [seq.num_output_tokens for seq in seqs])
    return Times(
        start,
        end,
        log.steps,
        [Served(seq.arrival_time, seq.token_times) for seq in seqs],
        engine.num_computed_tokens - before,
        scheduler.num_prefix_queries,
        scheduler.num_prefix_hits,
        scheduler.num_preemptions,
        log.host,
    )


@contextmanager
def waits_counted(log: StepLog) -> Iterator[None]:
    """Inside the block, stage 8's waits for the device are added to `log.waited`."""
    from nanoteach.cuda_graphs import PendingTokens

    result = PendingTokens.result

    def timed(pending: PendingTokens) -> list[int | None]:
        start = log.now()
        tokens = result(pending)
        log.waited += log.now() - start
        return tokens

    PendingTokens.result = timed  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        PendingTokens.result = result  # type: ignore[method-assign]


def check_lengths(workload: Workload, lengths: list[int]) -> None:
    """Raise Refused where outputs have other lengths than were asked for."""
    if lengths != workload.output_lens:
        raise Refused(
            f"{sum(lengths)} output tokens came, and {sum(workload.output_lens)} were due"
        )


def check_counts(case: Case, times: Times) -> None:
    """Raise Refused on a run that was not what its case says."""
    if times.preemptions and not case.preempts:
        raise Refused(
            f"{times.preemptions} preemptions, so tokens were computed twice: give a larger pool, "
            "or lower --max-num-seqs"
        )
    if times.hits and not case.prefix_caching:
        raise Refused(f"{times.hits} prompt tokens came from a prefix cache")
    clean = times.requests and not times.preemptions
    if clean and times.computed + times.hits != case.workload.computed:
        raise Refused(
            f"{times.computed:,} tokens were computed, and {case.workload.computed:,} were due"
        )


@dataclass
class NoTokens:
    """What a simulated step gives: token 0 for everybody who samples."""

    gives_token: list[bool]
    logprobs = dict  # nobody asks for any

    def result(self) -> list[int | None]:
        """See `PendingTokens.result`."""
        return [0 if gives else None for gives in self.gives_token]


class NoModel:
    """In a runner's place: computes nothing."""

    def __init__(self, config: ModelConfig, log: StepLog | None = None) -> None:
        self.model: Any = SimpleNamespace(config=config)
        self.log = log

    def launch(self, scheduled: list[Scheduled]) -> NoTokens:
        """See `GraphRunner.launch`."""
        if self.log:
            self.log.launched()
        return NoTokens([part.gives_token for part in scheduled])

    def execute(self, scheduled: list[Scheduled]) -> list[int | None]:
        """See `Runner.execute`."""
        return self.launch(scheduled).result()


def loop_of(case: Case, engine: EngineCore) -> EngineCore:
    """The engine that the case asks for: as it is, or its runner in the plain loop."""
    if not case.plain_loop:
        return engine
    return EngineCore(
        engine.scheduler, engine.runner, engine.max_model_len, engine.eos_token_ids, engine.clock
    )


def simulate(
    case: Case, model: ModelConfig, config: EngineConfig, log: StepLog, overlapped: bool
) -> Times:
    """The case on a log's clock, without an engine. `overlapped`: stage 8's loop, or stage 4's."""
    if case.engine in ("stage 1", "stage 2"):
        return alone(case.workload, log, cached=case.engine == "stage 2")
    scheduler = fresh_scheduler(case, config.num_gpu_blocks_override or AMPLE, config)
    core = OverlappedEngineCore if overlapped and not case.plain_loop else EngineCore
    runner: Any = NoModel(model, log)
    longest = config.max_model_len or model.max_position
    return serve(core(scheduler, runner, longest, clock=log), case.workload, log)


def alone(workload: Workload, log: StepLog, cached: bool) -> Times:
    """Stages 1 and 2 with a request at a time, which is all that is asked of them here."""
    start, total = log.now(), 0
    for prompt, output_len in zip(workload.prompts, workload.output_lens, strict=True):
        computed = 0
        for length in range(len(prompt), len(prompt) + output_len):
            log.tick([Work(length - computed, computed)])
            total += length - computed
            computed = length if cached else 0
    return Times(start, log.now(), log.steps, [], total)
