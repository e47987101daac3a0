"""Notebook 04, answered. `python solutions/04_continuous_batching.py` checks every answer."""

from nanoteach.course import exercise
from nanoteach.model_runner import PackedBatch
from nanoteach.scheduler import Scheduled
from nanoteach.sequence import Sequence

# One pass over the requests. Tokens and positions are the same range, which begins where the
# computed tokens end: so a prompt, a decode and a piece of a prompt need no case of their own.
# Common wrong turns: positions that count on through the batch, or begin at 0 in a decode; a
# cu_seqlens without its leading 0; and logits for everybody, though a piece of a prompt samples
# nothing.


@exercise("nanoteach.model_runner.pack")
def pack(scheduled: list[Scheduled]) -> PackedBatch:
    """Lay out a step's new tokens."""
    batch = PackedBatch(input_ids=[], positions=[], cu_seqlens=[0], logit_indices=[])
    for part in scheduled:
        start = part.seq.num_computed_tokens
        stop = start + part.num_new
        batch.input_ids.extend(part.seq.token_ids[start:stop])
        batch.positions.extend(range(start, stop))
        batch.cu_seqlens.append(len(batch.input_ids))
        if part.gives_token:
            batch.logit_indices.append(len(batch.input_ids) - 1)
    return batch


# Slots, then tokens, then blocks; the first who does not fit ends it. Common wrong turns: a budget
# that never gets smaller; going on to the next in the queue, so that a large request may wait for
# ever; counting tokens before the prefix is matched; leaving blocks of a match with a request that
# stays outside; and plain tuples in the result, where others ask for `part.num_new`.


@exercise("nanoteach.scheduler.Scheduler.admit")
def admit(self, budget: int) -> list[Scheduled]:
    """Move requests from the queue to the running ones while slots, tokens and blocks last."""
    scheduled = []
    while self.waiting and len(self.running) < self.max_num_seqs:
        seq = self.waiting[0]
        seq.num_computed_tokens = self.block_manager.match_prefix(seq)
        if self.trace and seq.block_table:
            self.trace.add("hit", seq.request_id, list(seq.block_table))
        num_new = self.chunk(seq.num_missing_tokens, budget)
        fits = num_new > 0 and self.block_manager.allocate(seq, len(seq.token_ids))
        if not fits:
            self.release(seq)
            break
        self.waiting.popleft()
        self.running.append(seq)
        seq.status = Status.RUNNING
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
        self.num_prefix_queries += len(seq.token_ids)
        self.num_prefix_hits += seq.num_computed_tokens
        self.publish_prompt(seq, num_new)
        scheduled.append(Scheduled(seq, num_new))
        budget -= num_new
    return scheduled


# The status says in which list the request is, so it is read before it is changed. Common wrong
# turns: thinking of running requests alone, while a user may leave before their turn; a new list
# in the place of the deque; and keeping the blocks, which nobody notices until the pool is empty
# and everybody waits.


@exercise("nanoteach.scheduler.Scheduler.retire")
def retire(self, seq: Sequence, reason: str) -> None:
    """A request is over, done or aborted: its slot and blocks are free at once."""
    if seq.status is Status.RUNNING:
        self.running.remove(seq)
    else:
        self.waiting.remove(seq)
    self.release(seq)
    seq.status = Status.FINISHED
    seq.finish_reason = reason
    if self.trace:
        self.trace.add("finished", seq.request_id, reason)


# `admit` appends, so the last of the running ones came in last. Common wrong turns: the oldest,
# which may then be set aside again and again, so that nobody is sure to end; the one with the most
# blocks, which is often the oldest; and the latest arrival time, which says nothing where many
# requests arrive at once.


@exercise("nanoteach.scheduler.Scheduler.choose_victim")
def choose_victim(self) -> Sequence:
    """The last one let in: so the oldest always gets on."""
    return self.running[-1]
