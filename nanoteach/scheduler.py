"""Stage 4. Which requests compute how many tokens in the next step.

Prompts first: as long as waiting requests fit, a step computes whole prompts; otherwise it decodes
one token of every running request. A request leaves as soon as it is done and another takes its
place (continuous batching: Orca, Yu et al., 2022). When blocks run out, the newest running request
is preempted: it gives its blocks back and will compute its tokens again later.

Knows: queues, budgets, when blocks run out. Does not know: tensors, the model, text.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from nanoteach.block_manager import BlockManager
from nanoteach.sequence import Sequence, Status
from nanoteach.types import Trace


class Scheduled(NamedTuple):
    """One request's part of a step: compute the next `num_new` of its tokens."""

    seq: Sequence
    num_new: int

    @property
    def gives_token(self) -> bool:
        """Whether all its tokens are computed after the step, so that it samples the next."""
        return self.num_new == self.seq.num_missing_tokens


class Scheduler:
    """`schedule` decides a step, `commit` books its outcome."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        trace: Trace | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.trace = trace
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens looked up, and found, when requests were admitted
        self.num_prefix_hits = 0

    def add(self, seq: Sequence) -> None:
        """Put a new request at the end of the queue."""
        self.waiting.append(seq)

    def schedule(self) -> list[Scheduled]:
        """The next step: waiting prompts if any fits, else one token of every running request."""
        self.block_manager.begin_step()
        budget = self.max_num_batched_tokens
        return self.admit(budget) or self.continue_running([1] * min(len(self.running), budget))

    def admit(self, budget: int) -> list[Scheduled]:
        """Move requests from the queue to the running ones while slots, tokens and blocks last."""
        scheduled: list[Scheduled] = []
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            # The prefix first: only what it leaves missing counts against the budget.
            seq.num_computed_tokens = self.block_manager.match_prefix(seq)
            if self.trace and seq.block_table:
                self.trace.add("hit", seq.request_id, list(seq.block_table))
            num_new = self.chunk(seq.num_missing_tokens, budget)
            if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
                self.release(seq)
                break
            self.running.append(self.waiting.popleft())
            seq.status = Status.RUNNING
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = seq.num_computed_tokens
            self.num_prefix_queries += len(seq.token_ids)
            self.num_prefix_hits += seq.num_computed_tokens
            self.publish_prompt(seq, num_new)
            scheduled.append(Scheduled(seq, num_new))
            budget -= num_new
        return scheduled

    def chunk(self, num_missing: int, budget: int) -> int:
        """How much of a waiting request's tokens a step takes on: here all of them or nothing."""
        return num_missing if num_missing <= budget else 0

    def continue_running(self, grants: list[int]) -> list[Scheduled]:
        """Let running requests, oldest first, compute `grants[i]` tokens each, if blocks last."""
        scheduled = []
        for seq, num_new in zip(list(self.running), grants, strict=False):
            # A newer request may have been preempted by now, to make room for an older one.
            if num_new and seq.status is Status.RUNNING and self.make_room(seq, num_new):
                if seq.num_computed_tokens < seq.num_prompt_tokens:
                    self.publish_prompt(seq, num_new)
                scheduled.append(Scheduled(seq, num_new))
        return scheduled

    def publish_prompt(self, seq: Sequence, num_new: int) -> None:
        """Offer the prompt blocks that this step fills, so that its other requests share them."""
        start = seq.num_computed_tokens
        stop = min(start + num_new, seq.num_prompt_tokens)
        self.block_manager.publish(seq, start, max(start, stop))

    def make_room(self, seq: Sequence, num_new: int) -> bool:
        """Get blocks for the request's next tokens; False if it was preempted itself."""
        while not self.block_manager.allocate(seq, seq.num_computed_tokens + num_new):
            victim = self.choose_victim()
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def choose_victim(self) -> Sequence:
        """The last one let in: so the oldest always gets on."""
        return self.running[-1]

    def preempt(self, seq: Sequence) -> None:
        """Take a running request's blocks and put it at the front of the queue."""
        self.running.remove(seq)
        self.release(seq)
        seq.status = Status.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1
        if self.trace:
            self.trace.add("preempted", seq.request_id)

    def release(self, seq: Sequence) -> None:
        """Let go of the request's blocks, and with them of what was computed."""
        self.block_manager.free(seq)
        seq.num_computed_tokens = 0

    def commit(
        self,
        scheduled: list[Scheduled],
        tokens: list[int | None],
        eos_token_ids: SequenceOf[int],
        now: float,
    ) -> None:
        """Book a step that has run: its K/V are written, and `tokens` were sampled."""
        publish = self.block_manager.publish
        for (seq, num_new), token in zip(scheduled, tokens, strict=True):
            start = seq.num_computed_tokens
            seq.num_computed_tokens = stop = start + num_new
            publish(seq, start, stop)
            if token is not None:
                seq.token_ids.append(token)
                seq.token_times.append(now)
                reason = seq.params.finish_reason(token, seq.num_output_tokens, eos_token_ids)
                if reason:
                    self.retire(seq, reason)

    def retire(self, seq: Sequence, reason: str) -> None:
        """A request is over, done or aborted: its slot and blocks are free at once."""
        self.release(seq)
        (self.running if seq.status is Status.RUNNING else self.waiting).remove(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        if self.trace:
            self.trace.add("finished", seq.request_id, reason)

    def take_back(self, seqs: Iterable[Sequence] | None = None) -> None:
        """A step has failed: everybody who was running goes back to the queue, in order.

        seqs: all requests, the oldest first, where one may have been lost between the queues.
        """
        self.block_manager.take_back()
        self.block_manager.reset()
        self.waiting = deque([*self.running, *self.waiting] if seqs is None else seqs)
        self.running = []
        for seq in self.waiting:
            if self.trace and seq.block_table:
                self.trace.add("freed", seq.request_id, seq.block_table)
            seq.status, seq.finish_reason = Status.WAITING, None
            seq.block_table, seq.block_hashes = [], []
            seq.num_computed_tokens = 0

    def check(self) -> list[str]:
        """What is wrong with the queues; empty when all is well."""
        problems = []
        for seqs, status in ((self.waiting, Status.WAITING), (self.running, Status.RUNNING)):
            for seq in seqs:
                if seq.status is not status:
                    problems.append(f"{seq.request_id} is {seq.status} among the {status} ones")
        for seq in self.waiting:
            if seq.block_table or seq.num_computed_tokens:
                problems.append(f"{seq.request_id} waits and yet holds blocks")
        for seq in self.running:
            room = len(seq.block_table) * self.block_manager.block_size
            if not seq.num_computed_tokens < len(seq.token_ids):
                problems.append(f"{seq.request_id} runs and has nothing to compute")
            if room < seq.num_computed_tokens:
                problems.append(f"{seq.request_id} computed more tokens than its blocks hold")
        if len(self.running) > self.max_num_seqs:
            problems.append(f"{len(self.running)} requests run, over {self.max_num_seqs}")
        return problems + self.block_manager.check([*self.running, *self.waiting])
