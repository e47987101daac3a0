"""Checks of notebook 04: packing a step, who comes in, who leaves, who gives way."""

import copy
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

from nanoteach.block_manager import BlockManager, BlockOwner
from nanoteach.course.checking import Wrong, case, check, expect_equal
from nanoteach.model_runner import PackedBatch
from nanoteach.scheduler import Scheduled, Scheduler
from nanoteach.sequence import Sequence, Status
from nanoteach.types import SamplingParams, Trace


def request(name: str, num_prompt: int, num_outputs: int = 0, num_computed: int = 0) -> Sequence:
    """A request whose tokens say where they stand: A's are 100, 101, ..., B's 200, 201, ..."""
    first = 100 * (1 + ord(name) - ord("A"))
    seq = Sequence(name, list(range(first, first + num_prompt)), SamplingParams())
    seq.token_ids += range(first + num_prompt, first + num_prompt + num_outputs)
    seq.num_computed_tokens = num_computed
    return seq


def names(seqs: Iterable[Sequence]) -> list[str]:
    """Who they are."""
    return [seq.request_id for seq in seqs]


# --- packing ------------------------------------------------------------------------------------


@check("nanoteach.model_runner.pack", "A step's ragged requests as one packed batch", (4, 5, 6))
def check_pack(pack: Callable[[list[Scheduled]], PackedBatch]) -> None:
    """Laid out token by token: each packed token is a pair of a request and a place in it."""
    prompts = [Scheduled(request("A", 5), 5), Scheduled(request("B", 3), 3)]
    decodes = [
        Scheduled(request("A", 4, 3, num_computed=6), 1),
        Scheduled(request("B", 2, 1, num_computed=2), 1),
    ]
    piece = Scheduled(request("C", 6, num_computed=2), 3)
    again = Scheduled(request("D", 4, 3), 7)
    for name, scheduled in (
        ("two whole prompts", prompts),
        ("two decodes", decodes),
        ("a prompt, a decode and a piece of a prompt", [prompts[0], decodes[0], piece]),
        ("a preempted request beside a decode", [decodes[1], again]),
        ("one piece of a prompt alone", [piece]),
    ):
        case(name)
        given = copy.deepcopy(scheduled)
        got = pack(list(given))
        expect_equal(
            f"{name}: num_computed_tokens of the requests, afterwards",
            [part.seq.num_computed_tokens for part in scheduled],
            [part.seq.num_computed_tokens for part in given],
            "Change no request: commit counts what was computed, after the step.",
        )  # fmt: skip
        check_packed(name, scheduled, got)


def check_packed(name: str, scheduled: list[Scheduled], got: PackedBatch) -> None:
    """Field by field."""
    if not isinstance(got, PackedBatch):
        hint = "Your function returned None: is a `return` missing?" if got is None else None
        raise Wrong(name, "a PackedBatch of four lists", got, hint)
    places = [
        (part, seq.num_computed_tokens + i) for part in scheduled for i in range(part.num_new)
        for seq in [part.seq]
    ]  # fmt: skip
    token_ids = [part.seq.token_ids[position] for part, position in places]
    positions = [position for _, position in places]
    sizes = [part.num_new for part in scheduled]
    boundaries = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    lengths = [part.seq.num_computed_tokens + part.num_new for part in scheduled]
    sampling = [
        len(part.seq.token_ids) == end for part, end in zip(scheduled, lengths, strict=True)
    ]
    indices = [end - 1 for end, yes in zip(boundaries[1:], sampling, strict=True) if yes]

    from_zero = [token for part in scheduled for token in part.seq.token_ids[: part.num_new]]
    from_end = [token for part in scheduled for token in part.seq.token_ids[-part.num_new :]]
    missing = [
        token for part in scheduled for token in part.seq.token_ids[part.seq.num_computed_tokens :]
    ]
    expect_equal(
        f"{name}: input_ids", token_ids, got.input_ids,
        [
            ([token for part in scheduled for token in part.seq.token_ids],
             "These are all tokens. Those that are computed have their K/V: pack the new ones."),
            (from_zero, "The new tokens begin where num_computed_tokens ends, not at 0."),
            (missing, "These are all that are missing. Only num_new of them are for this step."),
            (from_end, "A piece of a prompt is the next num_new tokens, not the last ones."),
        ],
    )  # fmt: skip
    expect_equal(
        f"{name}: positions", positions, got.positions,
        [
            (list(range(len(positions))),
             "A position is a place in the token's own request, not in the packed batch."),
            ([i for size in sizes for i in range(size)],
             "A decode's token stands after its whole history: begin at num_computed_tokens."),
            ([position + 1 for position in positions], "Positions begin at 0."),
        ],
    )  # fmt: skip
    expect_equal(
        f"{name}: cu_seqlens", boundaries, got.cu_seqlens,
        [
            (boundaries[1:], "It begins with 0: one more entry than there are requests."),
            (boundaries[:-1], "It ends with the number of packed tokens."),
            (sizes, "These are lengths. Add them up, one after the other."),
            ([sum(lengths[:i]) for i in range(len(lengths) + 1)],
             "Only new tokens are packed: add up num_new, not the lengths of the histories."),
        ],
    )  # fmt: skip
    expect_equal(
        f"{name}: logit_indices", indices, got.logit_indices,
        [
            ([end - 1 for end in boundaries[1:]],
             "A request with tokens still missing samples nothing: see gives_token."),
            ([i + 1 for i in indices], "A request's last token stands one before its end."),
            ([n - 1 for n, yes in zip(sizes, sampling, strict=True) if yes],
             "These count from each request's own start. Count in the packed batch."),
            ([i for i, yes in enumerate(sampling) if yes],
             "These are numbers of requests. Which packed token is each one's last?"),
        ],
    )  # fmt: skip


# --- the scheduler ------------------------------------------------------------------------------


class Remembering(BlockManager):
    """Has the first 8 tokens of B in two of its blocks, and notes what it is offered."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.offered: list[tuple[str, int, int]] = []

    def match_prefix(self, owner: BlockOwner) -> int:
        """See `BlockManager.match_prefix`."""
        if owner.request_id != "B":
            return 0
        self.allocate(owner, 8)
        return 8

    def publish(self, owner: BlockOwner, start: int, stop: int) -> None:
        """See `BlockManager.publish`."""
        self.offered.append((owner.request_id, start, stop))


def scheduler_with(
    waiting: SequenceOf[Sequence],
    running: SequenceOf[Sequence] = (),
    slots: int = 8,
    manager: BlockManager | None = None,
) -> Scheduler:
    """A scheduler in the middle of its work; blocks of 4 tokens."""
    scheduler = Scheduler(manager or BlockManager(64, 4), slots, 4096, Trace())
    for seq in running:
        assert scheduler.block_manager.allocate(seq, len(seq.token_ids))
        seq.status = Status.RUNNING
        scheduler.running.append(seq)
    scheduler.waiting.extend(waiting)
    return scheduler


def expect_sound(name: str, scheduler: Scheduler) -> None:
    """The queues are what they were made as, and the scheduler finds no fault with itself."""
    if not isinstance(scheduler.waiting, deque):
        hint = (
            "Take requests out of the deque that is there, and put no list in its place: "
            "admit needs popleft(), and preempt appendleft()."
        )
        got = f"a {type(scheduler.waiting).__name__}"
        raise Wrong(f"{name}: the type of self.waiting", "a deque", got, hint)
    problems = scheduler.check()
    if problems:
        raise Wrong(name, "sound queues and blocks", "; ".join(problems), None)


@check("nanoteach.scheduler.Scheduler.admit", "Who may come in", (4, 5, 6))
def check_admit(admit: Callable[[Scheduler, int], list[Scheduled]]) -> None:
    """Worked out by hand: blocks of 4 tokens; A has 5 tokens, B 9 and C 3."""

    def three() -> list[Sequence]:
        return [request("A", 5), request("B", 9), request("C", 3)]

    def run(
        name: str,
        scheduler: Scheduler,
        budget: int,
        right: list[tuple[str, int]],
        likely: list[tuple[Any, str]],
    ) -> None:
        case(name)
        before = names(scheduler.running)
        queue = names(scheduler.waiting)
        got = scheduler.admit(budget)
        if not isinstance(got, list):
            hint = "Your function returned None: is a `return` missing?" if got is None else None
            raise Wrong(name, "a list of Scheduled", got, hint)
        if bare := next((part for part in got if not isinstance(part, Scheduled)), None):
            hint = None
            if isinstance(bare, tuple):
                hint = "Put Scheduled(seq, num_new) into the list, not a bare tuple."
            raise Wrong(name, "a list of Scheduled", f"a list with a {type(bare).__name__}", hint)
        shown = [(part.seq.request_id, part.num_new) for part in got]
        expect_equal(name, right, shown, likely)
        came = [who for who, _ in right]
        expect_equal(
            f"{name}: who waits", [who for who in queue if who not in came],
            names(scheduler.waiting), "Who comes in leaves the queue; the others keep their order.",
        )  # fmt: skip
        expect_equal(
            f"{name}: who runs", before + came, names(scheduler.running),
            "Who comes in stands at the end of self.running.",
        )  # fmt: skip
        expect_equal(
            f"{name}: status of those who run", [Status.RUNNING] * len(scheduler.running),
            [seq.status for seq in scheduler.running],
            "A request that comes in gets the status Status.RUNNING.",
        )  # fmt: skip
        for seq in scheduler.running:
            expect_equal(
                f"{name}: blocks of {seq.request_id}, which has {len(seq.token_ids)} tokens",
                -(-len(seq.token_ids) // 4), len(seq.block_table),
                "Get blocks for all its tokens, prompt and outputs.",
            )  # fmt: skip
        for seq in scheduler.waiting:
            expect_equal(
                f"{name}: blocks held by {seq.request_id}, which waits", 0, len(seq.block_table),
                "Whoever does not come in must be released: match_prefix may have given it blocks.",
            )  # fmt: skip
        expect_sound(name, scheduler)

    all_three = [("A", 5), ("B", 9), ("C", 3)]
    run("an empty queue", scheduler_with([]), 100, [], [])
    run(
        "room for all three", scheduler_with(three()), 100, all_three,
        [(all_three[:1], "Let in as many as fit, not one a step."),
         (all_three[::-1], "The front of the queue is self.waiting[0]."),
         ([("A", 5)] * 3, "pop() takes out the last one: popleft() takes the first.")],
    )  # fmt: skip
    run(
        "A (5 tokens), B (9) and C (3) wait, and the budget is 10", scheduler_with(three()), 10,
        [("A", 5)],
        [(all_three, "Each request that comes in makes the budget smaller."),
         ([("A", 5), ("C", 3)], "Nobody overtakes: the first who does not fit ends it."),
         ([("A", 5), ("B", 5)], "A prompt comes in whole or not at all: self.chunk says how much."),
         ([("A", 5), ("B", 0)], "A chunk of 0 tokens means that the request does not come in.")],
    )  # fmt: skip
    run(
        "A (5 tokens), B (9) and C (3) wait, and the budget is 14", scheduler_with(three()), 14,
        all_three[:2],
        [([("A", 5)], "5 + 9 tokens fit into a budget of 14 exactly."),
         (all_three, "Each request that comes in makes the budget smaller.")],
    )  # fmt: skip
    run(
        "three slots, and D runs already",
        scheduler_with(three(), [request("D", 4, 1, 4)], slots=3), 100, all_three[:2],
        [(all_three, "At most max_num_seqs requests run, those who were there before among them."),
         (all_three[:1], "Two slots are free.")],
    )  # fmt: skip
    run(
        "no slot is free", scheduler_with(three(), [request("D", 4, 1, 4)], slots=1), 100, [],
        [(all_three[:1], "At most max_num_seqs requests run: look before you let one in.")],
    )  # fmt: skip
    run(
        "a pool of 4 blocks, where A needs 2, B 3 and C 1",
        scheduler_with(three(), manager=BlockManager(4, 4)), 100, [("A", 5)],
        [(all_three, "Nobody comes in without blocks: ask what allocate returned."),
         ([("A", 5), ("C", 3)], "Nobody overtakes: the first who does not fit ends it.")],
    )  # fmt: skip
    run(
        "E was preempted: 5 tokens of its prompt and 4 outputs",
        scheduler_with([request("E", 5, 4)]), 100, [("E", 9)],
        [([("E", 5)], "It computes its outputs again as well: all tokens that are missing."),
         ([("E", 1)], "It has outputs, and yet nothing of it is computed: all are missing.")],
    )  # fmt: skip
    name = "8 of B's 9 tokens are in the cache, and the budget is 6"
    first = (
        "Match the prefix first, and keep its answer in num_computed_tokens: only what that leaves "
        "missing counts."
    )
    manager = Remembering(64, 4)
    scheduler = scheduler_with(three(), manager=manager)
    run(
        name, scheduler, 6, [("A", 5), ("B", 1)],
        [([("A", 5)], first), ([("A", 5), ("B", 9)], first)],
    )  # fmt: skip
    expect_equal(
        f"{name}: what is offered to publish", [("A", 0, 5), ("B", 8, 9)], manager.offered,
        "Call self.publish_prompt(seq, num_new) for each request that comes in.",
    )  # fmt: skip
    run(
        "8 of B's 9 tokens are in the cache, and the budget is 5",
        scheduler_with(three(), manager=Remembering(64, 4)), 5, [("A", 5)],
        [([("A", 5), ("B", 1)], "Each request that comes in makes the budget smaller.")],
    )  # fmt: skip
    expect_equal(
        f"{name}: num_prefix_queries and num_prefix_hits", [5 + 9, 8],
        [scheduler.num_prefix_queries, scheduler.num_prefix_hits],
        "Copy in the bookkeeping for each request that comes in.",
    )  # fmt: skip
    expect_equal(
        f"{name}: num_cached_tokens of A and B", [0, 8],
        [seq.num_cached_tokens for seq in scheduler.running],
        "Copy in the bookkeeping for each request that comes in.",
    )  # fmt: skip


@check("nanoteach.scheduler.Scheduler.retire", "Who leaves", (4, 5, 6))
def check_retire(retire: Callable[[Scheduler, Sequence, str], None]) -> None:
    """A, B and C run, D and E wait; each of them is over once."""
    for who, reason, where in (
        ("B", "length", "runs"), ("A", "stop", "runs"), ("C", "abort", "runs"),
        ("D", "abort", "waits"), ("E", "abort", "waits"),
    ):  # fmt: skip
        running = [request(n, 4 + i, 1, 4 + i) for i, n in enumerate("ABC")]
        waiting = [request("D", 7), request("E", 2)]
        scheduler = scheduler_with(waiting, running)
        seq = next(seq for seq in [*running, *waiting] if seq.request_id == who)
        name = f"{who}, which {where}, is over"
        case(name)
        try:
            scheduler.retire(seq, reason)
        except ValueError as error:
            hint = (
                "It is in self.waiting: a request may be aborted before it ever ran."
                if where == "waits"
                else "It is in self.running. Did the status change before you looked at it?"
            )
            raise Wrong(
                name, "a request that leaves its list", f"ValueError: {error}", hint
            ) from None
        expect_equal(
            f"{name}: who runs", [n for n in "ABC" if n != who], names(scheduler.running),
            "It leaves its slot, and the others stay as they are.",
        )  # fmt: skip
        expect_equal(
            f"{name}: who waits", [n for n in "DE" if n != who], names(scheduler.waiting),
            "A request that waits can be over too; the others stay in the queue.",
        )  # fmt: skip
        expect_equal(
            f"{name}: its blocks", [], seq.block_table,
            "Its blocks must be free at once: self.release does that.",
        )  # fmt: skip
        expect_equal(
            f"{name}: its num_computed_tokens", 0, seq.num_computed_tokens,
            "Without blocks nothing of it is computed: self.release does both.",
        )  # fmt: skip
        expect_equal(
            f"{name}: its status", Status.FINISHED, seq.status,
            "Its status is Status.FINISHED from now on.",
        )  # fmt: skip
        expect_equal(
            f"{name}: its finish_reason", [reason], [seq.finish_reason],
            "Whoever asked wants to know why it ended: keep the reason.",
        )  # fmt: skip
        assert scheduler.trace is not None
        expect_equal(
            f"{name}: its events in the trace", [(who, reason)],
            [(event.request_id, event.data) for event in scheduler.trace.of_kind("finished")],
            'The trace gets one event: self.trace.add("finished", seq.request_id, reason).',
        )  # fmt: skip
        expect_sound(name, scheduler)
        scheduler.trace = None
        case(f"{name}, and nobody keeps a trace")
        other = (scheduler.running if where == "runs" else scheduler.waiting)[0]
        scheduler.retire(other, reason)
        expect_equal(current_name(other), Status.FINISHED, other.status)


def current_name(seq: Sequence) -> str:
    """A case of its own."""
    return f"{seq.request_id} is over, and nobody keeps a trace: its status"


@check("nanoteach.scheduler.Scheduler.choose_victim", "Whom to preempt", (4, 5, 6))
def check_choose_victim(choose_victim: Callable[[Scheduler], Sequence]) -> None:
    """The last one let in, in cases where it is neither the longest nor the shortest."""
    for name, sizes, arrivals in (
        ("one request runs", {"A": 9}, [0.0]),
        ("A, B and C came in, in this order", {"A": 7, "B": 12, "C": 9}, [1.0, 2.0, 3.0]),
        ("A, B and C came in, in this order, and all arrived at one moment",
         {"A": 7, "B": 12, "C": 9}, [1.0, 1.0, 1.0]),
        ("B came in last, and holds the most blocks", {"A": 8, "C": 5, "B": 13}, [1.0, 2.0, 3.0]),
    ):  # fmt: skip
        case(name)
        running = [request(n, size, 1, size) for n, size in sizes.items()]
        for seq, arrival in zip(running, arrivals, strict=True):
            seq.arrival_time = arrival
        scheduler = scheduler_with([request("Z", 3)], running)
        victim = scheduler.choose_victim()
        if not isinstance(victim, Sequence):
            hint = "Your function returned None: is a `return` missing?"
            raise Wrong(name, "one of self.running", victim, hint if victim is None else None)
        longest = max(running, key=lambda seq: len(seq.token_ids)).request_id
        shortest = min(running, key=lambda seq: len(seq.token_ids)).request_id
        likely = [
            ("Z", "Z waits and holds no blocks: choose among self.running."),
            (names(running)[0],
             "That is the first that was let in. It has waited longest, and if it can be set "
             "aside, nobody is sure to get on. (Equal arrival times say nothing.)"),
            (longest, "Not the one that frees most: the last one let in."),
            (shortest, "Not the one with the least to compute again: the last one let in."),
        ]  # fmt: skip
        expect_equal(name, names(running)[-1], victim.request_id, likely)
        expect_equal(
            f"{name}: who runs afterwards", list(sizes), names(scheduler.running),
            "Only choose: preempt takes the request out of self.running itself.",
        )  # fmt: skip
