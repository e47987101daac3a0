"""Runs for the pictures, and what a picture needs from one.

A `Run` has the real scheduler, block manager and step loop; only the model is pretended, and time
is simulated. What a picture shows is read from a run's trace, its clock or its pools, and a trace
of any other engine can be read as well.

Knows: every stage. Does not know: matplotlib, notebooks, widgets.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from nanoteach.block_manager import BlockManager, BlockOwner, blocks_needed
from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.config import ModelConfig
from nanoteach.cost_model import SHAPES, VirtualClock, Work
from nanoteach.engine_core import EngineCore
from nanoteach.hardware import Hardware, hardware_named
from nanoteach.kv_cache import BatchCache, ContiguousKVCache, StaticBatchGenerator
from nanoteach.model import Decoder
from nanoteach.model_runner import ModelRunner, PackedBatch, pack
from nanoteach.naive import NaiveGenerator
from nanoteach.paged_attention import PagedAttention, PagedBatchCache
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.scheduler import Scheduled, Scheduler
from nanoteach.sequence import Sequence
from nanoteach.types import SamplingParams, Trace

QWEN3 = SHAPES["qwen3-0.6b"]

# --- runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A request for a run: its prompt, as token ids or as how many, and when it arrives.

    Prompts given by their length have nothing in common. `name` is a letter if left out.
    """

    prompt: int | SequenceOf[int]
    max_tokens: int
    arrival: float = 0.0
    name: str = ""

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self.prompt if isinstance(self.prompt, int) else len(self.prompt)

    def token_ids(self, index: int, vocab_size: int) -> list[int]:
        """The prompt; `index` tells apart those that are given by their length."""
        if isinstance(self.prompt, int):
            return [(1000 + 4099 * index + i) % vocab_size for i in range(self.prompt)]
        return list(self.prompt)


def letter(index: int) -> str:
    """A, B, ... Z, A1, B1, ..."""
    round_number, i = divmod(index, 26)
    return chr(ord("A") + i) + (str(round_number) if round_number else "")


class Step(NamedTuple):
    """One step of a run: from when to when, and what each request did in it."""

    start: float
    end: float
    work: tuple[Work, ...]
    names: tuple[str, ...] = ()

    @property
    def num_new(self) -> int:
        """Tokens computed."""
        return sum(work.num_new for work in self.work)


@dataclass(eq=False)
class RecordingClock(VirtualClock):
    """A virtual clock that remembers every step; hand it to a stage as its clock.

    `watch` is called in each step, when its K/V are stored, and what it returns is kept in `seen`.
    """

    watch: Callable[[], Any] = lambda: None
    steps: list[Step] = field(default_factory=list, init=False)
    seen: list[Any] = field(default_factory=list, init=False)

    def tick(self, work: SequenceOf[Work]) -> None:
        """See `VirtualClock.tick`."""
        start = self.now()
        super().tick(work)
        self.steps.append(Step(start, self.now(), tuple(work)))
        self.seen.append(self.watch())


def named_steps(clock: RecordingClock, trace: Trace) -> list[Step]:
    """A clock's steps with the names of the requests, from the trace of the same run."""
    return [
        step._replace(names=tuple(event.data))
        for step, event in zip(clock.steps, trace.of_kind("step"), strict=True)
    ]


class Moment(NamedTuple):
    """A request as a step finds it, and how many of its tokens the step computes."""

    name: str
    num_prompt: int
    num_tokens: int
    num_computed: int
    num_new: int


class CounterRunner(ModelRunner):
    """Takes the model's place in a run: packs each step as it should, and counts up for tokens."""

    def __init__(self, config: ModelConfig) -> None:
        self.model = cast(Decoder, SimpleNamespace(config=config))
        self.count = 0
        self.batches: list[PackedBatch] = []
        self.moments: list[list[Moment]] = []

    def execute(self, scheduled: list[Scheduled]) -> list[int | None]:
        """See `ModelRunner.execute`."""
        self.batches.append(pack(scheduled))
        self.moments.append(
            [
                Moment(
                    s.request_id, s.num_prompt_tokens, len(s.token_ids), s.num_computed_tokens, n
                )
                for s, n in scheduled
            ]
        )
        return [self.next_token() if part.gives_token else None for part in scheduled]

    def next_token(self) -> int:
        """One more than last time."""
        self.count += 1
        return self.count % self.model.config.vocab_size


class Run:
    """An engine core on a virtual clock, driven step by step or to its end.

    `pools[i]` is the block pool during step `steps[i]`; `sequences` has every request there was.
    `max_model_len` is the longest request's if left out.
    """

    def __init__(
        self,
        requests: Iterable[Request] = (),
        *,
        scheduler: type[Scheduler] = Scheduler,
        manager: type[BlockManager] = BlockManager,
        num_blocks: int = 4096,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 16_384,
        max_model_len: int | None = None,
        hardware: str | Hardware = "h200",
        config: ModelConfig = QWEN3,
        overhead: float = 0.0,
    ) -> None:
        requests = list(requests)
        longest = max((r.prompt_len + r.max_tokens for r in requests), default=4096)
        machine = hardware_named(hardware) if isinstance(hardware, str) else hardware
        self.trace = Trace()
        self.clock = RecordingClock(config, machine, overhead=overhead, watch=self.pool)
        self.manager = manager(num_blocks, block_size, self.trace)
        self.runner = CounterRunner(config)
        self.core = EngineCore(
            scheduler(self.manager, max_num_seqs, max_num_batched_tokens, self.trace),
            self.runner,
            max_model_len or longest,
            clock=self.clock,
            trace=self.trace,
        )
        self.sequences: dict[str, Sequence] = {}
        self.num_requests = 0
        self.coming: list[tuple[float, str, list[int], SamplingParams]] = []
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> str:
        """Let a request come at its arrival, or now if that is past. Returns its name."""
        name = request.name or letter(self.num_requests)
        token_ids = request.token_ids(self.num_requests, self.clock.config.vocab_size)
        params = SamplingParams(max_tokens=request.max_tokens)
        self.core.prepare(name, token_ids, params)
        self.num_requests += 1
        self.coming.append((request.arrival, name, token_ids, params))
        self.coming.sort(key=lambda coming: coming[0])
        return name

    def step(self) -> bool:
        """Take in who has come, waiting for somebody if there is nothing to do, and do one step.

        False when all is done.
        """
        if self.coming and not self.core.has_unfinished_requests():
            self.clock.wait_until(self.coming[0][0])
        while self.coming and self.coming[0][0] <= self.clock.now():
            _, name, token_ids, params = self.coming.pop(0)
            self.sequences[name] = self.core.add_request(name, token_ids, params)
        self.core.step()
        return bool(self.coming) or self.core.has_unfinished_requests()

    def finish(self) -> "Run":
        """Step until all is done."""
        while self.step():
            pass
        return self

    def abort(self, name: str) -> None:
        """End a request now."""
        self.coming = [coming for coming in self.coming if coming[1] != name]
        self.core.abort_request(name)

    @property
    def steps(self) -> list[Step]:
        """What was done so far."""
        return named_steps(self.clock, self.trace)

    @property
    def pools(self) -> "list[Pool]":
        """The block pool during each step."""
        return self.clock.seen

    def pool(self) -> "Pool":
        """The block pool now."""
        # In a step its K/V are stored before it is committed.
        in_step = len(self.runner.moments) > len(self.clock.seen)
        new = {m.name: m.num_new for m in self.runner.moments[-1]} if in_step else {}
        running = self.core.scheduler.running
        computed = {s.request_id: s.num_computed_tokens + new.get(s.request_id, 0) for s in running}
        return pool_of(self.manager, running, computed)


def traced_run(requests: Iterable[Request], **options: Any) -> Run:
    """A `Run` of these requests to the end; `options` are `Run`'s own."""
    return Run(requests, **options).finish()


class CounterModel:
    """Takes a decoder's place in the stages before the engine core: its scores name a counter."""

    def __init__(self, max_model_len: int) -> None:
        # Caches are made to its measure, so it is small.
        self.config = dataclasses.replace(
            QWEN3, vocab_size=4096, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1
        )
        self.max_model_len = max_model_len
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.count = 0

    def forward(self, input_ids: Tensor, *_: object) -> Tensor:
        """One value a token."""
        return torch.zeros(len(input_ids), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """The next number is the most likely token everywhere."""
        self.count += 1
        scores = torch.zeros(len(hidden), self.config.vocab_size)
        scores[:, self.count % self.config.vocab_size] = 1
        return scores


@dataclass(frozen=True)
class StaticRun:
    """A run of a stage before the engine core. `memory` is empty where nothing is cached."""

    steps: list[Step]
    memory: list[dict[str, "Held"]]


def static_run(
    requests: Iterable[Request],
    *,
    stage: Literal["naive", "rows", "pages"] = "rows",
    batch_size: int = 4,
    row_len: int | None = None,
    block_size: int = 16,
    hardware: str | Hardware = "h200",
    config: ModelConfig = QWEN3,
) -> StaticRun:
    """Run requests through stage 1 (naive), 2 (rows of `row_len` tokens) or 3 (pages).

    They are named by letters, in their order. `row_len` is the longest request's if left out.
    """
    requests = list(requests)
    longest = max(r.prompt_len + r.max_tokens for r in requests)
    row_len = row_len or longest
    # A row may be one short, since a last token needs no place.
    counter = CounterModel(max(row_len, longest))
    model = cast(Decoder, counter)
    machine = hardware_named(hardware) if isinstance(hardware, str) else hardware
    clock = RecordingClock(config, machine)
    blocks = batch_size * blocks_needed(row_len, block_size)
    manager = BlockManager(blocks, block_size)
    prompts = [r.token_ids(i, counter.config.vocab_size) for i, r in enumerate(requests)]
    params = [SamplingParams(max_tokens=r.max_tokens) for r in requests]
    if stage == "naive":
        NaiveGenerator(model, clock=clock).generate(prompts, params)
        return StaticRun(clock.steps, [])
    if stage == "pages":
        attention = PagedAttention(counter.config, blocks, block_size, torch.float32, model.device)
        paged = PagedBatchCache(manager, attention)
        clock.watch = lambda: [len(row.block_table) * block_size for row in paged.rows]
        cache: BatchCache = paged
    else:
        reserved = [row_len] * batch_size
        clock.watch = lambda: reserved
        cache = ContiguousKVCache(counter.config, batch_size, row_len, torch.float32, model.device)
    StaticBatchGenerator(model, cache, batch_size, clock=clock).generate(prompts, params)
    steps = static_names(clock.steps)
    memory = []
    for step, held in zip(steps, clock.seen, strict=True):
        idle = range(len(step.names), len(held))
        names = [*step.names, *(f"row {row}" for row in idle)]
        filled = [*(work.num_computed + work.num_new for work in step.work), *(0 for _ in idle)]
        pieces = [block_size] * len(held) if stage == "pages" else held
        memory.append(dict(zip(names, map(Held, filled, held, pieces), strict=True)))
    return StaticRun(steps, memory)


def static_names(steps: Iterable[Step]) -> list[Step]:
    """Letters for the rows of static batches: a batch starts where nothing is computed yet."""
    named, first, size = list[Step](), 0, 0
    for step in steps:
        if all(work.num_computed == 0 for work in step.work):
            first, size = first + size, len(step.work)
        named.append(step._replace(names=tuple(letter(first + row) for row in range(size))))
    return named


# --- what a picture needs -----------------------------------------------------------------------


class Held(NamedTuple):
    """Places for tokens that a request has: filled, held, and in pieces of what size."""

    filled: int
    held: int
    piece: int


def memory_of_pages(pools: Iterable["Pool"]) -> list[dict[str, Held]]:
    """What the requests of a `Run` hold in each step, from its `pools`. Sharing is not seen."""
    return [
        {
            name: Held(pool.computed[name], len(table) * pool.block_size, pool.block_size)
            for name, table in pool.tables.items()
        }
        for pool in pools
    ]


@dataclass(frozen=True)
class Pool:
    """A block pool at one moment.

    tables, computed: for each running request its blocks, and how many tokens in them are computed;
    free: in the order in which blocks will be handed out; cached: blocks with a name.
    """

    block_size: int
    tables: dict[str, list[int]]
    computed: dict[str, int]
    ref_counts: list[int]
    free: list[int]
    cached: frozenset[int] = frozenset()

    @property
    def num_blocks(self) -> int:
        """Blocks, held and free."""
        return len(self.ref_counts)

    def owners(self, block: int) -> list[str]:
        """Who holds a block."""
        return [name for name, table in self.tables.items() if block in table]


def pool_of(
    manager: BlockManager, owners: Iterable[BlockOwner], computed: Mapping[str, int]
) -> Pool:
    """A copy of what a block manager says; `computed` has each owner's computed tokens."""
    return Pool(
        manager.block_size,
        {owner.request_id: list(owner.block_table) for owner in owners},
        dict(computed),
        list(manager.ref_counts),
        list(manager.free_blocks),
        frozenset(getattr(manager, "name_of", ())),
    )


class Node(NamedTuple):
    """A cached block in the tree of prefixes.

    parent: the block with the tokens before; place: where it stands among the free blocks (0 is
    the next to be handed out), None while it is held.
    """

    block: int
    parent: int | None
    token_ids: tuple[int, ...]
    holders: tuple[str, ...]
    ref_count: int
    place: int | None


def prefix_nodes(manager: PrefixCachingBlockManager, sequences: Iterable[Sequence]) -> list[Node]:
    """The tree that the manager's names make, parents first.

    A name does not tell the tokens that it stands for, so this needs `sequences`: all requests
    that there were.
    """
    places = {block: place for place, block in enumerate(manager.free_blocks)}
    sequences = list(sequences)
    nodes: dict[int, Node] = {}
    for seq in sequences:
        parent = None
        for i, name in enumerate(seq.block_hashes):
            block = manager.block_of.get(name)
            if block is not None and block not in nodes:
                tokens = seq.token_ids[i * manager.block_size : (i + 1) * manager.block_size]
                holders = tuple(s.request_id for s in sequences if block in s.block_table)
                nodes[block] = Node(
                    block, parent, tuple(tokens), holders,
                    manager.ref_counts[block], places.get(block),
                )  # fmt: skip
            parent = block
    return list(nodes.values())


class Stay(NamedTuple):
    """A request in a slot: from its first to its last step, and in which of these it got on."""

    name: str
    slot: int
    first: int
    last: int
    working: tuple[int, ...]


def continuous_stays(trace: Trace) -> list[Stay]:
    """Who was in which slot, from an engine's trace. A request takes the lowest that is free."""
    slots: dict[str, int] = {}
    working: dict[str, list[int]] = {}
    stays = []
    for event in trace.events:
        name = event.request_id
        if event.kind == "step":
            for request in event.data:
                free = next(i for i in range(len(slots) + 1) if i not in slots.values())
                slots.setdefault(request, free)
                working.setdefault(request, []).append(event.step)
        elif event.kind in ("finished", "preempted") and name in slots:
            steps = working.pop(name)
            last = event.step - (event.kind == "preempted")
            stays.append(Stay(name, slots.pop(name), steps[0], last, tuple(steps)))
    stays += [Stay(n, slot, working[n][0], trace.step, tuple(working[n]))
              for n, slot in slots.items()]  # fmt: skip
    return sorted(stays, key=lambda stay: (stay.first, stay.slot))


def static_stays(steps: Iterable[Step], num_outputs: Iterable[int]) -> list[Stay]:
    """Who was in which row of static batches. `num_outputs`: each request's tokens, in order.

    A row gets on as long as its request wants more tokens; then it waits for the batch to end.
    """
    stays: dict[str, Stay] = {}
    for number, step in enumerate(steps, 1):
        for row, name in enumerate(step.names):
            stays.setdefault(name, Stay(name, row, number, number, ()))
            stays[name] = stays[name]._replace(last=number)
    return [
        stay._replace(working=tuple(range(stay.first, stay.first + wanted)))
        for stay, wanted in zip(stays.values(), num_outputs, strict=True)
    ]


def share_working(stays: SequenceOf[Stay]) -> float:
    """Of all slots in all steps, the share in which a request got on."""
    slots = 1 + max(stay.slot for stay in stays)
    return sum(len(stay.working) for stay in stays) / (slots * max(stay.last for stay in stays))


def token_times(steps: Iterable[Step]) -> dict[str, list[float]]:
    """When each request got its tokens."""
    times: dict[str, list[float]] = {}
    for step in steps:
        for name, work in zip(step.names, step.work, strict=True):
            times.setdefault(name, [])
            if work.needs_logits:
                times[name].append(step.end)
    return times


class Gap(NamedTuple):
    """The time between two tokens of a request."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it waited."""
        return self.end - self.start


def gaps(steps: Iterable[Step]) -> list[Gap]:
    """All inter-token times (ITL) of a run."""
    return [
        Gap(name, a, b) for name, times in token_times(steps).items() for a, b in pairwise(times)
    ]


def longest_gap(steps: Iterable[Step], name: str | None = None) -> Gap | None:
    """The first of the longest ones, of one request or of all; None if nobody got two tokens."""
    found = [gap for gap in gaps(steps) if name in (None, gap.name)]
    return max(found, key=lambda gap: round(gap.seconds, 9), default=None)


class Rung(NamedTuple):
    """A stage of the ladder: tokens/s as measured (None: not yet) and as predicted."""

    name: str
    measured: float | None
    predicted: float | None = None


def request_moments() -> dict[str, Moment]:
    """One request met in five ways, by the real schedulers."""
    found: dict[str, Moment] = {}

    def look(label: str, run: Run, name: str, match: Callable[[Moment], bool]) -> None:
        moments = (m for step in run.runner.moments for m in step if m.name == name)
        found[label] = next(moment for moment in moments if match(moment))

    plain = traced_run([Request(9, 3)], block_size=4)
    look("new: its whole prompt", plain, "A", lambda m: m.num_computed == 0)
    look("decode: its last token", plain, "A", lambda m: m.num_tokens == 11)
    twice = [Request(range(9), 1), Request(range(9), 1, arrival=1.0)]
    hit = traced_run(twice, block_size=4, manager=PrefixCachingBlockManager)
    look("prefix hit: two blocks of 4 are there", hit, "B", lambda m: True)
    chunked = traced_run(
        [Request(9, 3)], scheduler=ChunkedPrefillScheduler, max_num_batched_tokens=4
    )
    look("chunk: four of what is missing", chunked, "A", lambda m: m.num_computed == 4)
    tight = traced_run([Request(8, 6), Request(9, 4)], block_size=4, num_blocks=5)
    look(
        "preempted: all again, outputs too", tight, "B", lambda m: m.num_tokens > 9 > m.num_computed
    )
    return found
