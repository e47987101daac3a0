"""Random histories of block managers and schedulers, checked after every step.

The block managers are compared with a model that a page can hold: a list of free blocks, a set of
tables, and what is written where. The schedulers run the whole engine core over `ShadowRunner`,
which writes and reads slots as attention would, and fails at the first that holds something else.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
from fakes import Fault, expected_tokens, fake_core
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanoteach.block_manager import BlockManager, blocks_needed
from nanoteach.chunked_prefill import ChunkedPrefillScheduler, split_budget
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.scheduler import Scheduler
from nanoteach.sequence import Sequence, Status
from nanoteach.types import SamplingParams

MACHINE = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)

SALTS = st.sampled_from([None, None, "blue"])
# Few tokens and few beginnings, so that prompts share prefixes of every length.
BEGINNINGS = st.sampled_from([[1, 1, 1, 1, 1, 1], [1, 1, 2, 1, 1, 1], [2]])
PROMPTS = st.builds(
    lambda beginning, length, end: [*beginning[:length], *end],
    BEGINNINGS,
    st.integers(0, 6),
    st.lists(st.integers(1, 2), min_size=1, max_size=3),
)

Name = tuple[str | None, tuple[int, ...]]
"""What a full block is known by: the salt, and all tokens up to its end."""


class BlockManagerMachine(RuleBasedStateMachine):
    """A block manager beside a model of it.

    free: the blocks nobody holds, the next to be handed out first. tables: each owner's blocks.
    names: for each name the block that bears it. written: what each block really holds.
    """

    manager_class: type[BlockManager] = BlockManager
    shares = False

    @initialize(num_blocks=st.integers(1, 6), block_size=st.integers(1, 3))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.manager = self.manager_class(num_blocks, block_size)
        self.block_size = block_size
        self.start()

    def start(self) -> None:
        """Nobody holds anything, and nothing is known."""
        self.free = list(range(self.manager.num_blocks))
        self.owners: list[Sequence] = []
        self.tables: dict[Sequence, list[int]] = {}
        self.names: dict[Name, int] = {}
        self.written: dict[int, Name] = {}

    # --- the model -----------------------------------------------------------------------------

    def name(self, seq: Sequence, index: int) -> Name:
        """The name of the owner's block number `index`."""
        return seq.params.cache_salt, tuple(seq.token_ids[: (index + 1) * self.block_size])

    def take(self) -> int:
        """Hand out the next free block; its name, if it had one, is forgotten."""
        block = self.free.pop(0)
        self.names = {name: b for name, b in self.names.items() if b != block}
        self.written.pop(block, None)
        return block

    def let_go(self, seq: Sequence) -> None:
        """Free an owner's blocks, the last one first."""
        for block in reversed(self.tables.pop(seq)):
            if not any(block in table for table in self.tables.values()):
                self.put_free(block)

    def put_free(self, block: int) -> None:
        """Where blocks have names, one without is the next to be used."""
        kept = not self.shares or block in self.names.values()
        self.free.insert(len(self.free) if kept else 0, block)

    # --- what can happen -----------------------------------------------------------------------

    @rule(prompt=PROMPTS, salt=SALTS)
    def arrive(self, prompt: list[int], salt: str | None) -> None:
        """A new owner takes what is there of its beginning."""
        seq = Sequence(f"r{len(self.owners)}", prompt, SamplingParams(cache_salt=salt))
        expected = []
        for index in range((len(prompt) - 1) // self.block_size):
            block = self.names.get(self.name(seq, index))
            if block is None:
                break
            expected.append(block)
        found = self.manager.match_prefix(seq)
        assert seq.block_table == expected
        assert found == len(expected) * self.block_size
        assert found < len(prompt), "all of the prompt was matched: nothing is left to compute"
        for index, block in enumerate(seq.block_table):
            assert self.written[block] == self.name(seq, index), "another request's tokens"
        self.free = [block for block in self.free if block not in expected]
        self.tables[seq] = expected
        seq.num_computed_tokens = found
        self.owners.append(seq)

    @rule(data=st.data(), published_first=st.booleans(), fails=st.booleans())
    @precondition(lambda self: self.owners)
    def step(self, data: st.DataObject, published_first: bool, fails: bool) -> None:
        """Some owners grow and compute. After one that fails, what it published is not found."""
        self.manager.begin_step()
        names, todo = dict(self.names), []
        for seq in data.draw(
            st.lists(st.sampled_from(self.owners), min_size=1, unique_by=id), "who"
        ):
            start = seq.num_computed_tokens
            missing = len(seq.token_ids) - start
            stop = start + data.draw(st.just(missing) | st.integers(0, missing), "tokens")
            if self.grow(seq, stop):
                todo.append((seq, start, stop))
                if published_first:
                    self.publish(seq, start, stop)
        if fails:
            self.names = {n: b for n, b in self.names.items() if names.get(n) == b}
            self.manager.take_back()
            while self.owners and not data.draw(st.booleans(), "torn"):
                self.leave(self.owners[-1])
            self.reset()
            return
        for seq, start, stop in todo:
            for index in range(start // self.block_size, stop // self.block_size):
                self.written[seq.block_table[index]] = self.name(seq, index)
            self.publish(seq, start, stop)
            seq.num_computed_tokens = stop

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocate, here and in the model: all or nothing."""
        missing = blocks_needed(num_tokens, self.block_size) - len(self.tables[seq])
        fits = missing <= len(self.free)
        if fits:
            self.tables[seq] = self.tables[seq] + [self.take() for _ in range(missing)]
        assert self.manager.allocate(seq, num_tokens) is fits
        return fits

    def publish(self, seq: Sequence, start: int, stop: int) -> None:
        """Publish, here and in the model: the first block of a name keeps it."""
        self.manager.publish(seq, start, stop)
        if self.shares:
            for index in range(start // self.block_size, stop // self.block_size):
                self.names.setdefault(self.name(seq, index), self.tables[seq][index])

    @rule(data=st.data(), token=st.integers(1, 2))
    @precondition(lambda self: self.owners)
    def generate(self, data: st.DataObject, token: int) -> None:
        """An owner gets one more token."""
        data.draw(st.sampled_from(self.owners), "who").token_ids.append(token)

    @rule(data=st.data())
    @precondition(lambda self: self.owners)
    def finish(self, data: st.DataObject) -> None:
        """An owner leaves."""
        self.leave(data.draw(st.sampled_from(self.owners), "who"))

    def reset(self) -> None:
        """Whoever holds something loses it. Blocks that were written can still be found."""
        self.manager.reset()
        for seq in self.owners:
            seq.block_table = []
        self.owners, self.tables = [], {}
        for block in range(self.manager.num_blocks):
            if block not in self.free:
                self.put_free(block)

    def leave(self, seq: Sequence) -> None:
        self.owners.remove(seq)
        self.let_go(seq)
        self.manager.free(seq)
        assert seq.block_table == []

    # --- what must hold ------------------------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.manager.check(self.owners) == []
        assert [seq.block_table for seq in self.owners] == list(self.tables.values())
        assert list(self.manager.free_blocks) == self.free, "free blocks, or their order"
        held = Counter(block for table in self.tables.values() for block in table)
        assert sum(held.values()) == len(held) or self.shares, "two owners of one block"
        assert len(held) + self.manager.num_free == self.manager.num_blocks
        if isinstance(self.manager, PrefixCachingBlockManager):
            assert self.manager.name_of.keys() == set(self.names.values())

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            while self.owners:
                self.leave(self.owners[0])
            assert self.manager.num_free == self.manager.num_blocks
            assert self.manager.check([]) == []


class PrefixCacheMachine(BlockManagerMachine):
    """The same with blocks that are shared by name."""

    manager_class = PrefixCachingBlockManager
    shares = True


@pytest.mark.parametrize("machine", [BlockManagerMachine, PrefixCacheMachine])
def test_block_manager(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=MACHINE)


# --- schedulers -------------------------------------------------------------------------------

MAX_MODEL_LEN = 14


class Clumsy:
    """Mixed into a block manager: `fault_in` calls of `take_free_block` from now, it raises."""

    fault_in = 0

    def take_free_block(self) -> int:
        self.fault_in -= 1
        if self.fault_in == 0:
            raise Fault("no block for you")
        return super().take_free_block()  # type: ignore[misc,no-any-return]


class ClumsyManager(Clumsy, BlockManager):
    """A plain block manager in which a fault can be planted."""


class ClumsyPrefixManager(Clumsy, PrefixCachingBlockManager):
    """One with prefix caching."""


@dataclass
class Expectation:
    """What a request will have to show: its tokens, and the step at which it is over at last."""

    seq: Sequence
    tokens: list[int]
    deadline: int
    num_cached: int | None = None


class SchedulerMachine(RuleBasedStateMachine):
    """An engine core without a model: arrivals, aborts, steps, and faults inside a step."""

    scheduler_class: type[Scheduler] = Scheduler
    manager_class: type[BlockManager] = ClumsyManager

    @initialize(
        block_size=st.integers(1, 4),
        spare_blocks=st.integers(0, 5),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 9),
    )
    def build(self, block_size: int, spare_blocks: int, max_num_seqs: int, budget: int) -> None:
        chunks = self.scheduler_class is ChunkedPrefillScheduler
        self.budget = budget if chunks else MAX_MODEL_LEN + budget
        self.core, self.runner = fake_core(
            self.scheduler_class,
            self.manager_class,
            # The smallest pool holds one request of full length and nothing else.
            num_blocks=blocks_needed(MAX_MODEL_LEN - 1, block_size) + spare_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            budget=self.budget,
            max_model_len=MAX_MODEL_LEN,
        )
        self.scheduler = self.core.scheduler
        self.manager = self.scheduler.block_manager
        self.requests: dict[str, Expectation] = {}
        """All that are not over, the oldest first."""
        self.steps = 0
        self.ids = itertools.count()

    # --- what can happen -----------------------------------------------------------------------

    @rule(prompt=PROMPTS, max_tokens=st.none() | st.integers(1, 8), salt=SALTS, eos=st.booleans())
    def arrive(
        self, prompt: list[int], max_tokens: int | None, salt: str | None, eos: bool
    ) -> None:
        max_tokens = min(max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - len(prompt))
        params = SamplingParams(max_tokens, ignore_eos=not eos, cache_salt=salt)
        name = f"r{next(self.ids)}"
        seq = self.core.add_request(name, prompt, params)
        self.requests[name] = Expectation(seq, expected_tokens(prompt, params), 0)
        self.set_deadlines()

    def set_deadlines(self) -> None:
        """When each request is over at the latest.

        Chunked prefill: a step computes at least one token of the oldest request, which is never
        preempted. It may have lost all it had by the time it is the oldest, so it needs at most as
        many steps from then on as it has tokens to compute (all but the last). It becomes the
        oldest once those before it are over, whoever arrives later.

        Prefill first: an admission gives its request a token, and so does a decode. So every step
        gives one, and all are over after as many steps as there are tokens to come. Later arrivals
        do count.
        """
        deadline = self.steps
        for request in self.requests.values():
            seq = request.seq
            if self.scheduler_class is ChunkedPrefillScheduler:
                deadline += seq.num_prompt_tokens + len(request.tokens) - 1
                request.deadline = max(request.deadline, deadline)
        if self.scheduler_class is Scheduler:
            left = sum(len(r.tokens) - r.seq.num_output_tokens for r in self.requests.values())
            for request in self.requests.values():
                request.deadline = self.steps + left

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.requests)), "who")
        self.core.abort_request(name)
        seq = self.requests.pop(name).seq
        assert seq.status is Status.FINISHED
        assert seq.finish_reason == "abort"
        assert seq.block_table == []
        assert name not in self.core.sequences

    @rule()
    @precondition(lambda self: self.requests)
    def step(self) -> None:
        running, waiting = list(self.scheduler.running), list(self.scheduler.waiting)
        decodes = [seq for seq in running if seq.num_missing_tokens == 1]
        num_tokens = {seq: len(seq.token_ids) for seq in [*running, *waiting]}
        num_preemptions = self.scheduler.num_preemptions

        changed = self.core.step()
        self.steps += 1
        computed = self.runner.last_step

        assert computed, "an empty step"
        assert sum(computed.values()) <= self.budget
        grown = {seq: len(seq.token_ids) - n for seq, n in num_tokens.items()}
        assert {seq: int(seq in changed) for seq in grown} == grown

        preempted = [seq for seq in running if seq.status is Status.WAITING]
        assert len(preempted) == self.scheduler.num_preemptions - num_preemptions
        assert preempted == running[len(running) - len(preempted) :], "not the newest"
        if preempted:
            assert not {seq.request_id for seq in waiting} & computed.keys(), "admitted beside"
        if running:
            assert running[0] not in preempted, "the oldest was preempted"
        if self.scheduler_class is ChunkedPrefillScheduler:
            self.check_chunked(running, decodes, preempted)

        for seq in changed:
            if seq.finish_reason:
                request = self.requests.pop(seq.request_id)
                assert seq.output_token_ids == request.tokens
                assert self.steps <= request.deadline
                assert seq.block_table == []

    def check_chunked(
        self, running: list[Sequence], decodes: list[Sequence], preempted: list[Sequence]
    ) -> None:
        """What only the second scheduler promises."""
        computed = self.runner.last_step
        if running:
            assert running[0].request_id in computed, "the oldest must get on in every step"
        if len(running) <= self.budget:
            for seq in decodes:
                assert seq in preempted or computed.get(seq.request_id) == 1, "a decode that waits"
        unfinished = [seq for seq in self.scheduler.running if seq.num_missing_tokens > 1]
        assert unfinished in ([], self.scheduler.running[-1:]), "only the newest is mid-prompt"

    @rule(after=st.integers(0, 6))
    @precondition(lambda self: self.requests)
    def fault(self, after: int) -> None:
        """The runner fails (0), or the block manager at the block number `after` of the step."""
        if after:
            self.manager.fault_in = after  # type: ignore[attr-defined]
        else:
            self.runner.fault = Fault("out of memory")
        outputs = {seq: list(seq.token_ids) for seq in self.core.sequences.values()}
        try:
            self.step()
        except Fault:
            self.runner.holders = {}
            assert not self.scheduler.running
            assert {seq: seq.token_ids for seq in self.core.sequences.values()} == outputs
            assert self.manager.num_free == self.manager.num_blocks
            self.set_deadlines()
        self.manager.fault_in = 0  # type: ignore[attr-defined]

    # --- what must hold ------------------------------------------------------------------------

    @invariant()
    def books_are_in_order(self) -> None:
        if not hasattr(self, "core"):
            return
        assert self.core.check() == []
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        # Nobody overtakes: who runs came before who waits, and both are in order of arrival, the
        # preempted ones included, since they go to the front.
        assert [seq.request_id for seq in queued] == list(self.requests)
        first = [int(name[1:]) for name in self.runner.first_seen]
        assert first == sorted(first), "first admitted out of turn"
        for request in self.requests.values():
            seq = request.seq
            assert seq.output_token_ids == request.tokens[: seq.num_output_tokens]
            # The last sampled token has no K/V.
            assert seq.num_computed_tokens < len(seq.token_ids)
            assert self.steps < request.deadline, f"{seq.request_id} starves"

    @invariant()
    def cached_tokens_are_told_once(self) -> None:
        """`num_cached_tokens` speaks of the first admission, whatever happens later."""
        for request in self.requests.values() if hasattr(self, "core") else ():
            if request.num_cached is None and request.seq.request_id in self.runner.first_seen:
                request.num_cached = request.seq.num_cached_tokens
            if request.num_cached is not None:
                assert request.seq.num_cached_tokens == request.num_cached

    def teardown(self) -> None:
        """Whatever happened: the rest ends in time and with the right tokens, and all is free."""
        if hasattr(self, "core"):
            while self.requests:
                self.step()
                self.books_are_in_order()
            assert not self.core.has_unfinished_requests()
            assert self.core.step() == []
            assert self.manager.num_free == self.manager.num_blocks
            assert self.core.check() == []


class SchedulerWithPrefixes(SchedulerMachine):
    manager_class = ClumsyPrefixManager


class ChunkedMachine(SchedulerMachine):
    scheduler_class = ChunkedPrefillScheduler


class ChunkedWithPrefixes(SchedulerMachine):
    scheduler_class = ChunkedPrefillScheduler
    manager_class = ClumsyPrefixManager


MACHINES = [SchedulerMachine, SchedulerWithPrefixes, ChunkedMachine, ChunkedWithPrefixes]


@pytest.mark.parametrize("machine", MACHINES)
def test_scheduler(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=MACHINE)


def test_a_chunk_publishes_the_blocks_that_it_fills_and_no_more() -> None:
    core, _ = fake_core(
        ChunkedPrefillScheduler, PrefixCachingBlockManager, num_blocks=4, block_size=4,
        max_num_seqs=1, budget=7, max_model_len=MAX_MODEL_LEN,
    )  # fmt: skip
    core.add_request("r0", [1] * 8, SamplingParams(1))
    manager = core.scheduler.block_manager
    assert isinstance(manager, PrefixCachingBlockManager)
    for num_computed, num_cached in ((7, 1), (8, 2)):
        core.step()
        assert (core.num_computed_tokens, manager.num_cached) == (num_computed, num_cached)


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(1, 40))
@settings(derandomize=True)
def test_split_budget(missing: list[int], budget: int) -> None:
    """All that is asked for, or all there is; decodes before prompts, the oldest first of each."""
    grants = split_budget(missing, budget)
    assert all(0 <= grant <= wanted for grant, wanted in zip(grants, missing, strict=True))
    assert sum(grants) == min(budget, sum(missing))
    for decodes in (True, False):
        kind = [(m - g, g) for g, m in zip(grants, missing, strict=True) if (m == 1) is decodes]
        for (short, _), (_, newer) in itertools.pairwise(kind):
            assert not (short and newer), "a newer one was served before an older one"
    if any(g for g, m in zip(grants, missing, strict=True) if m > 1):
        assert all(g for g, m in zip(grants, missing, strict=True) if m == 1)
