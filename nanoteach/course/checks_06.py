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
        name = f"{missing} tokens missing, {budget} left in the step's budget"
        expect(
            name, scheduler.chunk, missing, budget, to_be=right,
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
        expect_whole(name, right, scheduler.chunk(missing, budget))


def expect_whole(name: str, right: object, *numbers: object) -> None:
    """Raise Wrong if one of the numbers, though it is the right one, is no `int`."""
    if odd := [n for n in numbers if type(n) is not int]:
        words = f"Tokens are counted: give an int, not a {type(odd[0]).__name__}."
        raise Wrong(name, right, repr(odd[0]), words)


@check("nanoteach.chunked_prefill.split_budget", "The budget, split", stages=(6,))
def check_split_budget(split_budget: Callable[[list[int], int], list[int]]) -> None:
    """Handed out token by token, decodes first."""
    for missing, budget in (
        ([1, 30, 1, 9], 36),  # the text's own
        ([1, 9, 1], 8),
        ([9, 1, 1], 2),
        ([1, 30, 9], 10),
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

        name = f"missing {missing}, a budget of {budget}"
        expect(name, split_budget, missing, budget, to_be=right, likely=words)
        expect_whole(name, right, *split_budget(list(missing), budget))


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
        for order_of in (sorted(missing), sorted(missing, reverse=True)):
            if all(n <= m for n, m in zip(got, order_of, strict=True)):
                return "The answer is in the order of `missing`: don't sort it."
        return "Somebody gets more tokens than are missing."
    decodes = [i for i, n in enumerate(missing) if n == 1]
    if sum(got) > budget and len(decodes) == len(missing):
        return f"Only {budget} are left: the oldest {budget} get one each, and the others 0."
    if sum(got) > budget:
        return f"Together {sum(got)} tokens, over the budget: a decode's token counts as well."
    if sum(got[i] for i in decodes) < sum(right[i] for i in decodes):
        if any(got[i] for i in range(len(missing)) if i not in decodes):
            return (
                "A prompt takes a token that a decode needs. First every decode, then the "
                "prompts, whatever their age."
            )
        return "A decode goes without its token, though the budget has one."
    if any(got[i] != right[i] for i in decodes):
        return "Among the decodes the oldest come first, and the list is oldest first."
    if sum(got) < sum(right):
        return (
            "Some budget is left over, and somebody still misses tokens: a prompt may get a part "
            "of what it misses, and more than one prompt may get some."
        )
    return "The older prompt comes first: it takes what it can, and the next gets what is left."


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


def step(name: str, scheduler: ChunkedPrefillScheduler) -> dict[str, int]:
    """Schedule and commit one step, the case `name`: who computes how many tokens."""
    case(name)
    scheduled = scheduler.schedule()
    if not isinstance(scheduled, list) or not all(isinstance(p, Scheduled) for p in scheduled):
        raise Wrong(
            name, "a list of Scheduled", repr(scheduled)[:120],
            "`continue_running` and `admit` return such lists: put them together.",
        )  # fmt: skip
    parts = {part.seq.request_id: part.num_new for part in scheduled}
    tokens: list[int | None] = [7 if part.gives_token else None for part in scheduled]
    if len(parts) < len(scheduled):
        raise Wrong(name, "each request once", str([p.seq.request_id for p in scheduled]),
                    "Who is admitted is a running request from then on: let the running ones "
                    "continue first.")  # fmt: skip
    if gone := [part.seq.request_id for part in scheduled if part.seq not in scheduler.running]:
        raise Wrong(
            name, "running requests alone", f"{gone[0]}, which was preempted",
            "`continue_running` may take the blocks of the newest: call it before `admit`.",
        )  # fmt: skip
    if less := [(who, n) for who, n in parts.items() if n < 1]:
        raise Wrong(
            name, "at least 1 token for each", f"{less[0][0]} {less[0][1]}",
            "`admit` got a negative budget: take off what was granted, not what is missing.",
        )  # fmt: skip
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
    expect_equal(
        name, {"A": 3}, step(name, scheduler), "Nobody runs yet: `admit` takes in who waits."
    )

    scheduler.add(request("B", 12))
    name = "budget 8: A decodes, B comes with 12 tokens"
    expect_equal(
        name, {"A": 1, "B": 7}, step(name, scheduler),
        [
            ({"A": 1}, "There is budget left for those who wait: `admit` them too."),
            ({"B": 8}, "Only the new one gets on, and A waits: both belong into one step."),
            ({"A": 1, "B": 8}, "9 tokens, over the budget: `admit` gets what the running ones "
             "left over."),
        ],
    )  # fmt: skip

    scheduler.add(request("C", 9))
    name = "budget 8: A decodes, B misses 5 tokens, C comes with 9"
    expect_equal(
        name, {"A": 1, "B": 5, "C": 2}, step(name, scheduler),
        [
            ({"A": 1, "B": 1, "C": 6}, "B is in mid-prompt: what it gets is `split_budget`'s to "
             "say, and not 1."),
            ({"A": 1, "B": 5}, "Two tokens of the budget are left, and C waits."),
            ({"C": 8}, "Only the new one gets on, and the others wait."),
            ({"A": 1, "B": 5, "C": 8}, "14 tokens, over the budget."),
            ({"A": 1, "B": 5, "C": 3}, "9 tokens, over the budget: A's token counts as well."),
            ({"A": 1, "B": 5, "C": 6}, "12 tokens, over the budget: subtract tokens, not "
             "requests."),
            ({"A": 1, "B": 5, "C": 7}, "13 tokens, over the budget: B's chunk counts as well."),
        ],
    )  # fmt: skip
    name = "the step after it"
    expect_equal(name, {"A": 1, "B": 1, "C": 6}, step(name, scheduler),
                 "A and B decode; C gets the rest of the budget.")  # fmt: skip

    scheduler = build(budget=8)
    scheduler.add(request("A", 38))
    name = "budget 8, A has 38 tokens: the first step"
    expect_equal(name, {"A": 8}, step(name, scheduler))
    scheduler.add(request("B", 5))
    name = "budget 8: A misses 30 tokens of its prompt, B waits"
    expect_equal(name, {"A": 8}, step(name, scheduler), "A takes the whole budget.")

    # Blocks run out. 4 blocks of 4. A has 7 tokens and 2 blocks, B the same. Both decode up to 8
    # computed tokens; for the ninth A needs a third block. B, the newest, has to go.
    scheduler = build(budget=16, manager=BlockManager(4, 4))
    for letter in "AB":
        scheduler.add(request(letter, 7))
    name = "4 blocks of 4 tokens, A and B have 7 tokens each"
    expect_equal(name, {"A": 7, "B": 7}, step(name, scheduler))
    name = "both decode"
    expect_equal(name, {"A": 1, "B": 1}, step(name, scheduler))
    scheduler.add(request("C", 2))
    name = "A needs a block, there is none, B is preempted and is first in the queue"
    expect_equal(
        name, {"A": 1}, step(name, scheduler),
        "B has given its blocks back and waits. It gets nothing in this step, and nobody after it "
        "in the queue may overtake it.",
    )  # fmt: skip
    waiting = [seq.request_id for seq in scheduler.waiting]
    expect_equal("the queue after it", ["B", "C"], waiting)

    # The same with 5 blocks. One is free, C would take it, and A needs it.
    scheduler = build(budget=16, manager=BlockManager(5, 4))
    for letter in "AB":
        scheduler.add(request(letter, 7))
    name = "5 blocks of 4 tokens, A and B have 7 tokens each"
    expect_equal(name, {"A": 7, "B": 7}, step(name, scheduler))
    name = "both decode, and fill two blocks each"
    expect_equal(name, {"A": 1, "B": 1}, step(name, scheduler))
    scheduler.add(request("C", 2))
    name = "A and B need a block each, one is free, and C waits"
    expect_equal(name, {"A": 1}, step(name, scheduler), "A takes the last block; B is preempted.")

    # A step fails: only what that step published is withdrawn.
    manager = PrefixCachingBlockManager(16, 4)
    scheduler = build(budget=8, manager=manager)
    scheduler.add(request("A", 6))
    name = "a prefix cache: A's first step fills one block"
    expect_equal(name, {"A": 6}, step(name, scheduler))
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
