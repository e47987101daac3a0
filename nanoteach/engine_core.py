"""Stage 4. The loop: schedule, execute, commit.

Which scheduler, block manager and runner it drives is decided outside, and that is all in which
the stages from 4 on differ.

Knows: requests as token ids. Does not know: text.
"""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from nanoteach.block_manager import blocks_needed
from nanoteach.cost_model import Clock, WallClock, Work
from nanoteach.model import Decoder
from nanoteach.scheduler import Scheduled, Scheduler
from nanoteach.sequence import Sequence
from nanoteach.types import (
    EngineStats,
    SamplingParams,
    TooLong,
    Trace,
    params_of_tokens,
    prepare_request,
    require_plain,
)


class Runner(Protocol):
    """What runs a step: `ModelRunner`, or a later stage's."""

    model: Decoder

    def execute(self, scheduled: list[Scheduled]) -> list[int | None]:
        """The next token of each request, or None for one whose tokens are not all computed yet.

        Logprobs that a request asks for are added to it here.
        """
        ...


@dataclass(frozen=True)
class Limits:
    """What a core can serve. filters: whether it has those of stage 9."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    filters: bool

    def settle(self, prompt: SequenceOf[int], params: SamplingParams) -> SamplingParams:
        """A request's parameters, complete. Raises ValueError if it could never be served.

        Without max_tokens a request may go on for as long as the model and the pool let it.
        """
        open_end = params.max_tokens is None
        if not self.filters:
            require_plain(params)
        params = prepare_request(prompt, params, self.vocab_size, self.max_model_len)
        most = params.max_tokens
        assert most is not None
        # The last token that is sampled is never computed, so it needs no place.
        if open_end:
            most = min(most, max(1, self.num_blocks * self.block_size - len(prompt) + 1))
            params = replace(params, max_tokens=most)
        needed = blocks_needed(len(prompt) + most - 1, self.block_size)
        if needed > self.num_blocks:
            raise TooLong(
                f"{len(prompt)} prompt tokens and max_tokens = {most} need "
                f"{needed} blocks, and the whole pool has {self.num_blocks}: shorten the "
                "prompt, lower max_tokens, or give the engine a larger pool "
                "(kv_cache_memory_bytes or num_gpu_blocks_override)"
            )
        return params


class EngineCore:
    """Continuous batching over one model. `filters`: its runner has those of stage 9."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        max_model_len: int,
        eos_token_ids: SequenceOf[int] = (),
        clock: Clock | None = None,
        trace: Trace | None = None,
        filters: bool = False,
    ) -> None:
        if scheduler.chunk(max_model_len, scheduler.max_num_batched_tokens) == 0:
            raise ValueError(
                f"max_num_batched_tokens = {scheduler.max_num_batched_tokens} must be at least "
                f"max_model_len = {max_model_len}: this scheduler computes a prompt in one step, "
                "so a longer one would wait for ever"
            )
        self.scheduler = scheduler
        self.runner = runner
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.clock = clock or WallClock()
        self.trace = trace
        manager, vocab_size = scheduler.block_manager, runner.model.config.vocab_size
        self.limits = Limits(
            vocab_size, max_model_len, manager.block_size, manager.num_blocks, filters
        )
        self.sequences: dict[str, Sequence] = {}  # all that wait or run
        self.failed: list[str] = []  # the requests that ran in the last step, if it raised
        self.num_computed_tokens = 0
        self.batch_sizes: Counter[int] = Counter()  # how many steps had how many requests

    def prepare(self, request_id: str, prompt: SequenceOf[int], params: SamplingParams) -> Sequence:
        """A request, not queued yet. Raises ValueError if it could never be served."""
        if request_id in self.sequences:
            raise ValueError(f"request id {request_id!r} is in use: give each request its own")
        params = self.limits.settle(prompt, params)
        return Sequence(request_id, list(prompt), params, arrival_time=self.clock.now())

    def queue(self, seq: Sequence) -> None:
        """Let a prepared request wait for its turn."""
        self.sequences[seq.request_id] = seq
        self.scheduler.add(seq)

    def add_request(
        self, request_id: str, prompt: SequenceOf[int], params: SamplingParams | None = None
    ) -> Sequence:
        """Queue a request. Raises ValueError, and queues nothing, if it can't be served."""
        seq = self.prepare(request_id, prompt, params or SamplingParams())
        self.queue(seq)
        return seq

    def abort_request(self, request_id: str, reason: str = "abort") -> None:
        """End a request now. One that is not there (any more) is none of our business."""
        seq = self.sequences.pop(request_id, None)
        if seq:
            self.scheduler.retire(seq, reason)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self.sequences)

    def step(self) -> list[Sequence]:
        """One step. Returns the requests that got a token, finished ones among them.

        All or nothing: after a fault or Ctrl-C inside it, which is raised again, all requests have
        the tokens that they had before, hold no blocks and wait. `failed` says who was in it.
        """
        self.failed = []
        if not self.sequences:
            return []
        before = dict(self.sequences)
        num_tokens = [len(seq.token_ids) for seq in before.values()]
        try:
            return self.run_step()
        except BaseException:
            self.failed = [seq.request_id for seq in self.scheduler.running]
            self.sequences = before
            for seq, n in zip(before.values(), num_tokens, strict=True):
                num_output = n - seq.num_prompt_tokens
                del seq.token_ids[n:], seq.token_times[num_output:], seq.logprobs[num_output:]
            self.scheduler.take_back(before.values())
            raise

    def run_step(self) -> list[Sequence]:
        """Schedule, execute, commit."""
        if self.trace:
            self.trace.step += 1
            self.trace.time = self.clock.now()
        scheduled = self.scheduler.schedule()
        if not scheduled:
            raise RuntimeError("the scheduler found nothing to do while requests wait")
        # Single tokens first, by length: attention takes those of about one length together.
        scheduled.sort(key=lambda part: (part.num_new > 1, part.seq.num_computed_tokens))
        tokens = self.runner.execute(scheduled)
        work = [
            Work(num_new, seq.num_computed_tokens, token is not None)
            for (seq, num_new), token in zip(scheduled, tokens, strict=True)
        ]
        self.clock.tick(work)
        self.num_computed_tokens += sum(part.num_new for part in scheduled)
        self.batch_sizes[len(scheduled)] += 1
        if self.trace:
            self.trace.add("step", data={seq.request_id: num_new for seq, num_new in scheduled})
            self.trace.time = self.clock.now()
        self.scheduler.commit(scheduled, tokens, self.eos_token_ids, self.clock.now())
        changed = [
            seq for (seq, _), token in zip(scheduled, tokens, strict=True) if token is not None
        ]
        for seq in changed:
            if seq.finish_reason:
                del self.sequences[seq.request_id]
        return changed

    @property
    def alive(self) -> bool:
        """Whether it can go on. In a process of its own (stage 10) it may have died."""
        return True

    @property
    def has_news(self) -> bool:
        """Whether a step is done already, so that `step` will not wait: there alone."""
        return False

    def wake(self) -> None:
        """Let a `step` that waits for news return: there alone. Any thread may call this."""

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[list[int]]:
        """The tokens generated after each prompt (prompts are token ids), all served together."""
        each = params_of_tokens(params, len(prompts))
        names = (f"generate-{i}" for i in count())
        free = (name for name in names if name not in self.sequences)
        seqs = [
            self.prepare(next(free), prompt, p) for prompt, p in zip(prompts, each, strict=True)
        ]
        for seq in seqs:  # all of them, or, if one can't be served, none
            self.queue(seq)
        try:
            while not all(seq.finish_reason for seq in seqs):
                self.step()
        finally:
            for seq in seqs:
                self.abort_request(seq.request_id)
        return [seq.output_token_ids for seq in seqs]

    def stats(self) -> EngineStats:
        """Counts of blocks, requests and tokens."""
        scheduler = self.scheduler
        manager = scheduler.block_manager
        return EngineStats(
            num_blocks=manager.num_blocks,
            num_used_blocks=manager.num_blocks - manager.num_free,
            num_free_blocks=manager.num_free,
            num_cached_blocks=manager.num_reusable,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            num_computed_tokens=self.num_computed_tokens,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            prefix_hit_rate=scheduler.num_prefix_hits / max(1, scheduler.num_prefix_queries),
            batch_sizes=dict(self.batch_sizes),
        )

    def check(self) -> list[str]:
        """What is wrong inside, in words; empty when all is well."""
        queued = {seq.request_id for seq in [*self.scheduler.running, *self.scheduler.waiting]}
        problems = [f"{request_id} is lost" for request_id in self.sequences.keys() - queued]
        problems += [f"{request_id} is left over" for request_id in queued - self.sequences.keys()]
        return problems + self.scheduler.check()
