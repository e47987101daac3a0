"""Notebook 06, answered. `python solutions/06_chunked_prefill.py` checks every answer."""

from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.cost_model import SHAPES, Work, step_cost
from nanoteach.course import exercise
from nanoteach.hardware import hardware_named
from nanoteach.scheduler import Scheduled

# What it misses or what is left, whichever is less. Stage 4 took all or nothing, and so its budget
# had to hold the longest request. Common wrong turns: the step's whole budget in the place of what
# is left of it, and chunks of whole blocks: a block may be filled in two steps.


@exercise("nanoteach.chunked_prefill.ChunkedPrefillScheduler.chunk")
def chunk(self, num_missing: int, budget: int) -> int:
    """How much of a waiting request's tokens a step takes on: what the budget allows."""
    return min(num_missing, budget)


# Two passes over the same list. The first gives every decode its token, the second gives prompts
# what they miss, oldest first, as far as the budget lasts. Common wrong turns: one pass, oldest
# first, in which an old prompt takes the decodes' tokens (the stall is back); a budget that only
# the prompts use up, so that a step is over it; and even shares, which make everybody's prompt
# late where one of them could be done.


@exercise("nanoteach.chunked_prefill.split_budget")
def split_budget(missing: list[int], budget: int) -> list[int]:
    """Tokens granted to each running request, given how many it is missing, oldest first."""
    grants = [0] * len(missing)
    for i, num_missing in enumerate(missing):
        if num_missing == 1 and budget > 0:
            grants[i] = 1
            budget -= 1
    for i, num_missing in enumerate(missing):
        if num_missing > 1:
            grants[i] = min(num_missing, budget)
            budget -= grants[i]
    return grants


# The running requests first, then new ones, out of one budget. Common wrong turns: `admit` before
# `continue_running`, which schedules a new request twice; `admit` with the whole budget; and no
# `begin_step`, which is seen only when a step fails. After a preemption there is no block for a
# newcomer, so one need not look; an `admit` that looks finds nobody who fits, and is right as well.


@exercise("nanoteach.chunked_prefill.ChunkedPrefillScheduler.schedule")
def schedule(self) -> list[Scheduled]:
    """The next step: the running requests' missing tokens, then new requests, in one budget."""
    self.block_manager.begin_step()
    budget = self.max_num_batched_tokens
    missing = [seq.num_missing_tokens for seq in self.running]
    grants = split_budget(missing, budget)
    num_running = len(self.running)
    scheduled = self.continue_running(grants)
    if len(self.running) == num_running:  # nobody was preempted
        scheduled += self.admit(budget - sum(grants))
    return scheduled


# The capstone: one policy that scores higher than the package's with any fixed budget. What is
# bounded is the time of a step, by the cost model, and not its tokens: with many decodes or deep in
# a long prompt a chunk is smaller, and when little else goes on it is larger. Play it with the
# largest budget: `capstone.score(OnTime, capstone.MOST_TOKENS)`.


class OnTime(ChunkedPrefillScheduler):
    """The largest chunk with which a step keeps under 1.25 ms, before overhead."""

    def schedule(self) -> list[Scheduled]:
        """See `Scheduler.schedule`."""
        most = self.max_num_batched_tokens
        decodes = [
            Work(1, seq.num_computed_tokens) for seq in self.running if seq.num_missing_tokens == 1
        ]
        reading = [seq.num_computed_tokens for seq in self.running if seq.num_missing_tokens > 1]
        history = reading[0] if reading else 0
        size = 1024
        while size > 128 and self.seconds([*decodes, Work(size, history)]) > 0.00125:
            size -= 64
        self.max_num_batched_tokens = min(most, len(decodes) + size)
        try:
            return super().schedule()
        finally:
            self.max_num_batched_tokens = most

    def seconds(self, work: list[Work]) -> float:
        """The bound of a step on the machine that we play on."""
        return step_cost(SHAPES["qwen3-0.6b"], work).seconds(hardware_named("h200"))
