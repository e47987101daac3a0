"""Checks of notebook 06: one budget a step. Worked out by hand, or handed out token by token."""

from collections.abc import Callable

from nanoteach.block_manager import BlockManager
from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.course.checking import Wrong, case, check, expect, expect_equal
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.scheduler import Scheduled
from nanoteach.sequence import Sequence
from nanoteach.types import SamplingParams


@check(
    "nanoteach.chunked_prefill.ChunkedPrefillScheduler.chunk", "A chunk of a prompt", stages=(6,)
)
def check_chunk(chunk: Callable[..., int]) -> None:
    """Counted: one token after the other, while the prompt misses one and the budget has one."""
    scheduler = ChunkedPrefillScheduler(BlockManager(8, 4), 4, max_num_batched_tokens=10)
    for missing, budget in ((20, 7), (5, 8), (8, 8), (3, 1), (9, 0)):
        right = 0
        while right < missing and right < budget:
            right += 1
        expect(
            f"{missing} tokens missing, {budget} left in the step's budget",
            scheduler.chunk, missing, budget, to_be=right,
            likely=[
                (min(missing, 10), "`budget` is what is left of this step; self."
                 "max_num_batched_tokens is what it began with."),
                (missing if missing <= budget else 0,
                 "That is stage 4's rule, all or nothing. A chunk may be a part of the prompt."),
                (budget, "It can't take more tokens than it is missing."),
                (missing, "It can't take more tokens than the budget has."),
                (budget // 4 * 4, "A chunk need not fill whole blocks: any number of tokens will "
                 "do."),
                (missing - budget, "This is what is left for later steps."),
            ],
        )  # fmt: skip


@check("nanoteach.chunked_prefill.split_budget", "The budget, split", stages=(6,))
def check_split_budget(split_budget: Callable[[list[int], int], list[int]]) -> None:
    """Handed out token by token, decodes first."""
    for missing, budget in (
        ([1, 9, 1], 8),
        ([9, 1, 1], 8),
        ([1, 1, 1, 1], 2),
        ([1, 1, 9], 1),
        ([4, 1, 3], 20),
        ([6, 1, 7], 11),
        ([2, 1, 1, 30], 40),
        ([1, 5, 8, 1], 9),
        ([], 5),
    ):
        right = [0] * len(missing)
        left = budget
        order = [i for i, n in enumerate(missing) if n == 1]
        order += [i for i, n in enumerate(missing) if n > 1]
        for i in order:
            while right[i] < missing[i] and left:
                right[i] += 1
                left -= 1

        def words(
            got: object, missing: list[int] = missing, budget: int = budget,
            right: list[int] = right, order: list[int] = order,
        ) -> str | None:  # fmt: skip
            return wrong_split(got, missing, budget, right, order)

        expect(
            f"missing {missing}, a budget of {budget}",
            split_budget, missing, budget, to_be=right, likely=words,
        )  # fmt: skip


def wrong_split(
    got: object, missing: list[int], budget: int, right: list[int], order: list[int]
) -> str | None:
    """What a wrong split says about its rule."""
    if not isinstance(got, (list, tuple)):
        return "Return a list, with one number for each request."
    if len(got) != len(missing):
        return "One number for each request, in their order; 0 for one that gets nothing."
    if any(n < 0 for n in got):
        return "The budget went below zero: nobody gets less than 0 tokens."
    if any(n > m for n, m in zip(got, missing, strict=True)):
        return "Somebody gets more tokens than are missing."
    if sum(got) > budget:
        return f"Together {sum(got)} tokens, over the budget: a decode's token counts as well."
    decodes = [i for i, n in enumerate(missing) if n == 1]
    if sum(got[i] for i in decodes) < sum(right[i] for i in decodes):
        return (
            "A decode goes without its token, though the budget had one. First every decode, "
            "then the prompts, whatever their age."
        )
    if any(got[i] != right[i] for i in decodes):
        return "Among the decodes the oldest come first, and the list is oldest first."
    if sum(got) < sum(right):
        return (
            "Some budget is left over, and somebody still misses tokens: a prompt may get a part "
            "of what it misses, and more than one prompt may get some."
        )
    return "Among the prompts the oldest takes what it can, and the next what is left."


# --- schedule -----------------------------------------------------------------------------------


def request(name: str, num_tokens: int) -> Sequence:
    """A request whose tokens nobody else has."""
    first = 1000 * ord(name)
    return Sequence(name, list(range(first, first + num_tokens)), SamplingParams(max_tokens=50))


def build(
    budget: int, manager: BlockManager | None = None, max_num_seqs: int = 8
) -> ChunkedPrefillScheduler:
    """A scheduler with enough blocks of 4 tokens, unless a manager is given."""
    return ChunkedPrefillScheduler(manager or BlockManager(64, 4), max_num_seqs, budget)


def step(scheduler: ChunkedPrefillScheduler) -> dict[str, int]:
    """Schedule and commit one step: who computes how many tokens."""
    scheduled = scheduler.schedule()
    if not isinstance(scheduled, list) or not all(isinstance(p, Scheduled) for p in scheduled):
        raise Wrong(
            "the result", "a list of Scheduled", repr(scheduled)[:120],
            "`continue_running` and `admit` return such lists: put them together.",
        )  # fmt: skip
    parts = {part.seq.request_id: part.num_new for part in scheduled}
    tokens: list[int | None] = [7 if part.gives_token else None for part in scheduled]
    if len(parts) < len(scheduled):
        raise Wrong("the result", "each request once", str([p.seq.request_id for p in scheduled]),
                    "Who is admitted is a running request from then on: let the running ones "
                    "continue first.")  # fmt: skip
    scheduler.commit(scheduled, tokens, (), now=0.0)
    return parts


@check(
    "nanoteach.chunked_prefill.ChunkedPrefillScheduler.schedule",
    "Decodes and chunks in one step",
    stages=(6,),
)
def check_schedule(schedule: Callable[..., list[Scheduled]]) -> None:
    """Three requests, step by step, worked out by hand; then blocks run out; then a step fails."""
    scheduler = build(budget=8)
    scheduler.add(request("A", 3))
    name = "budget 8, A has 3 tokens: the first step"
    case(name)
    expect_equal(name, {"A": 3}, step(scheduler), "Nobody runs yet: `admit` takes in who waits.")

    scheduler.add(request("B", 12))
    name = "budget 8: A decodes, B comes with 12 tokens"
    case(name)
    expect_equal(
        name, {"A": 1, "B": 7}, step(scheduler),
        [
            ({"A": 1}, "There is budget left for those who wait: `admit` them too."),
            ({"B": 8}, "Only the new one gets on, and A waits: both belong into one step."),
            ({"A": 1, "B": 8}, "9 tokens, over the budget: `admit` gets what the running ones "
             "left over."),
        ],
    )  # fmt: skip

    scheduler.add(request("C", 9))
    name = "budget 8: A decodes, B misses 5 tokens, C comes with 9"
    case(name)
    expect_equal(
        name, {"A": 1, "B": 5, "C": 2}, step(scheduler),
        [
            ({"A": 1, "B": 1, "C": 6}, "B is in mid-prompt: what it gets is `split_budget`'s to "
             "say, and not 1."),
            ({"A": 1, "B": 5}, "Two tokens of the budget are left, and C waits."),
            ({"C": 8}, "Only the new one gets on, and the others wait."),
            ({"A": 1, "B": 5, "C": 8}, "14 tokens, over the budget."),
            ({"A": 1, "B": 5, "C": 3}, "9 tokens, over the budget: A's token counts as well."),
            ({"A": 1, "B": 5, "C": 7}, "13 tokens, over the budget: B's chunk counts as well."),
        ],
    )  # fmt: skip
    expect_equal("the step after it", {"A": 1, "B": 1, "C": 6}, step(scheduler),
                 "A and B decode; C gets the rest of the budget.")  # fmt: skip

    # Blocks run out. 4 blocks of 4. A has 7 tokens and 2 blocks, B the same. Both decode up to 8
    # computed tokens; for the ninth A needs a third block. B, the newest, has to go.
    scheduler = build(budget=16, manager=BlockManager(4, 4))
    for letter in "AB":
        scheduler.add(request(letter, 7))
    name = "4 blocks of 4 tokens, A and B have 7 tokens each"
    case(name)
    expect_equal(name, {"A": 7, "B": 7}, step(scheduler))
    expect_equal(name, {"A": 1, "B": 1}, step(scheduler))
    scheduler.add(request("C", 2))
    name = "A needs a block, there is none, B is preempted and is first in the queue"
    case(name)
    got = step(scheduler)
    expect_equal(
        name, {"A": 1}, got,
        "B has given its blocks back and waits. It gets nothing in this step, and nobody after it "
        "in the queue may overtake it.",
    )  # fmt: skip
    waiting = [seq.request_id for seq in scheduler.waiting]
    expect_equal("the queue after it", ["B", "C"], waiting)

    # A step fails: only what that step published is withdrawn.
    manager = PrefixCachingBlockManager(16, 4)
    scheduler = build(budget=8, manager=manager)
    scheduler.add(request("A", 6))
    name = "a prefix cache: A's first step fills one block"
    case(name)
    expect_equal(name, {"A": 6}, step(scheduler))
    expect_equal("blocks with a name", 1, manager.num_cached)
    scheduler.add(request("B", 9))
    name = "B's first step fills one more, and fails: take_back"
    case(name)
    scheduler.schedule()
    scheduler.take_back()
    expect_equal(
        name + ". Blocks with a name", 1, manager.num_cached,
        [(0, "A's block, of a step that went well, lost its name: each step begins with the block "
          "manager's `begin_step`."), (2, "B's block still has its name.")],
    )  # fmt: skip
