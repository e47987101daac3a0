"""Stage 6. One token budget a step: decodes first, prompts in chunks beside them.

Every request, whatever it is doing, has some tokens missing. A step hands out its budget over
these (Sarathi-Serve, Agrawal et al., 2024), so a long prompt never makes the others wait.

Knows: how the budget is split. The rest is the scheduler of stage 4.
"""

from nanoteach.scheduler import Scheduled, Scheduler


def split_budget(missing: list[int], budget: int) -> list[int]:
    """Tokens granted to each running request, given how many it is missing, oldest first.

    First every decode (one token missing) gets its token, then prompts get what they miss as far
    as the budget lasts.
    """
    if sum(missing) <= budget:  # most steps: nobody is cut short, and there is nothing to work out
        return list(missing)
    grants = [0] * len(missing)
    for decodes in (True, False):
        for i, num_missing in enumerate(missing):
            if (num_missing == 1) is decodes:
                grants[i] = min(num_missing, budget)
                budget -= grants[i]
    return grants


class ChunkedPrefillScheduler(Scheduler):
    """Decodes and prompt chunks in the same step, never more than the budget together."""

    def schedule(self) -> list[Scheduled]:
        """The next step: the running requests' missing tokens, then new requests, in one budget."""
        self.block_manager.begin_step()
        budget = self.max_num_batched_tokens
        grants = split_budget([seq.num_missing_tokens for seq in self.running], budget)
        scheduled = self.continue_running(grants)
        if len(self.running) < len(grants):  # somebody was preempted: no room for new ones
            return scheduled
        return scheduled + self.admit(budget - sum(grants))

    def chunk(self, num_missing: int, budget: int) -> int:
        """How much of a waiting request's tokens a step takes on: what the budget allows."""
        return min(num_missing, budget)
