"""Notebook 06, answered. `python solutions/06_chunked_prefill.py` checks every answer."""

from nanoteach.course import exercise
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
# `continue_running`, which schedules a new request twice; `admit` with the whole budget; and
# admitting after a preemption: the victim stands at the front of the queue, so it would come back
# at once and take the blocks that it has just given up.


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
