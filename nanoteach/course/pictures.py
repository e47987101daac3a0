"""Pictures that carry an idea, each drawn from something that really ran.

First come runs, then what a picture needs from one, then the drawing. A `Run` has the real
scheduler, block manager and step loop; only the model is pretended, and time is simulated. What
draws takes data and returns a figure, so a trace of any other engine can be drawn as well.

Knows: matplotlib. Does not know: notebooks, widgets.
"""

import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeVar, cast

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from nanoteach.block_manager import BlockManager, BlockOwner, blocks_needed
from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.config import ModelConfig
from nanoteach.cost_model import SHAPES, Cost, VirtualClock, Work, step_cost
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
        self.core.prepare(token_ids, params)
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
        self.device = torch.device("cpu")
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
    row_len = row_len or max(r.prompt_len + r.max_tokens for r in requests)
    counter = CounterModel(row_len)
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
    look("prefix hit: two blocks are there", hit, "B", lambda m: True)
    chunked = traced_run(
        [Request(9, 3)], scheduler=ChunkedPrefillScheduler, max_num_batched_tokens=4
    )
    look("chunk: four of what is missing", chunked, "A", lambda m: m.num_computed == 4)
    tight = traced_run([Request(8, 6), Request(9, 4)], block_size=4, num_blocks=5)
    look(
        "preempted: all again, outputs too", tight, "B", lambda m: m.num_tokens > 9 > m.num_computed
    )
    return found


# --- drawing ------------------------------------------------------------------------------------

# Okabe and Ito's colours, which differ for everybody.
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"
RED = "#D55E00"  # waste and waiting, and nothing else
PALE, LINE, TEXT = "#E6E9EC", "#9AA3AB", "#30363B"
REQUESTS = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#8C6D46")
HATCHED = {"hatch": "////", "edgecolor": LINE, "lw": 0}  # held, and empty or idle
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "text.color": TEXT, "axes.labelcolor": TEXT, "axes.edgecolor": LINE, "xtick.color": TEXT,
    "ytick.color": TEXT, "axes.spines.top": False, "axes.spines.right": False,
    "hatch.linewidth": 0.6, "hatch.color": LINE,
}  # fmt: skip
WIDTH = 9.5  # inches, about a notebook's column
DPI = 100

Drawing = TypeVar("Drawing", bound=Callable[..., "Picture"])


class Picture(Figure):
    """A figure that a notebook shows by itself, without pyplot, which would show it twice."""

    def png(self) -> bytes:
        """The picture as a file. The same data give the same bytes."""
        out = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            if layout := self.get_layout_engine():
                layout.execute(self)
                self.set_layout_engine("none")  # a second layout may differ by a pixel
            self.savefig(out, format="png", metadata={"Software": None})
        return out.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


def drawing(function: Drawing) -> Drawing:
    """Decorator: draw in the course's style, whatever the notebook has set."""
    return matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE})(function)


def canvas(height: float) -> Picture:
    """An empty picture as wide as a notebook."""
    return Picture(figsize=(WIDTH, height), dpi=DPI, layout="constrained")


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each request, in the order in which they are named; they come round again."""
    return {name: REQUESTS[i % len(REQUESTS)] for i, name in enumerate(dict.fromkeys(names))}


def ink(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 120 else "white"


def box(
    axes: Axes, x: float, y: float, width: float, height: float, face: str, **more: Any
) -> None:
    """A rectangle."""
    # As an artist, for speed: axes have their limits from elsewhere, and make room for words only.
    axes.add_artist(Rectangle((x, y), width, height, facecolor=face, in_layout=False, **more))


def say(axes: Axes, x: float, y: float, text: str, colour: str = TEXT, **more: Any) -> None:
    """Text: small, and to the right of its place unless `more` says otherwise."""
    axes.text(x, y, text, **{"color": colour, "fontsize": 8, "va": "center", **more})


def centred(axes: Axes, x: float, y: float, text: str, colour: str = TEXT, **more: Any) -> None:
    """Text around its place."""
    say(axes, x, y, text, colour, ha="center", **more)


def bare(axes: Axes, width: tuple[float, float], height: tuple[float, float]) -> None:
    """No frame, no ticks: a sheet that spans from left to right, and from bottom to top."""
    axes.set_axis_off()
    axes.set_xlim(*width)
    axes.set_ylim(*height)


def lanes(axes: Axes, names: SequenceOf[str]) -> None:
    """A line for each name, from the top, and no frame at the left."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)


@drawing
def naive_triangle(naive: SequenceOf[Step], cached: SequenceOf[Step]) -> Picture:
    """The tokens that each step computes, without a cache and with one. One request in each."""
    figure = canvas(3.4)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    titles = ("naive: everything again", "with a KV cache: only what is new")
    for axes, steps, title in zip(panels, (naive, cached), titles, strict=True):
        known = first = again = 0
        for x, step in enumerate(steps, 1):
            (work,) = step.work
            stop = work.num_computed + work.num_new
            known = max(known, work.num_computed)
            parts = ((0, work.num_computed, PALE), (work.num_computed, known, RED))
            for low, high, colour in (*parts, (known, stop, BLUE)):
                box(axes, x - 0.5, low, 1, high - low, colour, edgecolor="white", lw=0.3)
            again += known - work.num_computed
            first += stop - known
            known = stop
        lines = [(f"{first:,} tokens computed for the first time", BLUE)]
        if again:
            lines.append((f"{again:,} computed again, for nothing", RED))
        else:
            lines.append(("their K/V are read, not computed", "#6B747B"))
        for i, (line, colour) in enumerate(lines):
            y = 0.95 - 0.08 * i
            say(axes, 0.03, y, line, colour, fontsize=9, weight="bold", transform=axes.transAxes)
        axes.set_title(title)
        axes.set_xlabel("step, one output token each")
    longest = max(step.work[0].num_computed + step.work[0].num_new for step in naive)
    panels[0].set_xlim(0.5, len(naive) + 0.5)
    panels[0].set_ylim(0, 1.35 * longest)
    panels[0].set_ylabel("position in the text")
    return figure


@drawing
def reservation_and_pages(
    rows: SequenceOf[Mapping[str, Held]],
    pages: SequenceOf[Mapping[str, Held]],
    at: int | None = None,
    titles: tuple[str, str] = ("rows reserved to the longest", "pages taken as needed"),
) -> Picture:
    """Memory for K/V in two runs: above at step `at` (half-way if left out), below over time."""
    at = min(len(rows), len(pages)) // 2 if at is None else at
    names = list(dict.fromkeys((*rows[at], *pages[at])))
    colours = colours_of(name for moment in (*rows, *pages) for name in moment)
    widest = max(h.held for moment in (rows[at], pages[at]) for h in moment.values())
    most = max(sum(h.held for h in moment.values()) for moment in (*rows, *pages))
    figure = canvas(5.0)
    panels = figure.subplots(2, 2, sharex="row", sharey="row")
    for column, (history, title) in enumerate(zip((rows, pages), titles, strict=True)):
        now, over_time = panels[0][column], panels[1][column]
        for name, (filled, held, piece) in history[at].items():
            y = names.index(name)
            box(now, 0, y - 0.38, held, 0.76, PALE, **HATCHED)
            box(now, 0, y - 0.38, filled, 0.76, colours[name])
            now.vlines(range(0, held + 1, piece), y - 0.38, y + 0.38, color=TEXT, lw=0.8)
            say(now, held, y, f"  {filled} of {held}")
        now.set_title(f"{title}: step {at + 1}")
        now.set_xlabel("tokens")

        filled_at = [sum(h.filled for h in moment.values()) for moment in history]
        held_at = [sum(h.held for h in moment.values()) for moment in history]
        steps = range(1, len(history) + 1)
        over_time.fill_between(steps, filled_at, color=BLUE, lw=0)
        over_time.fill_between(steps, filled_at, held_at, facecolor=PALE, **HATCHED)
        over_time.plot(steps, held_at, color=TEXT, lw=0.8)
        share = sum(filled_at) / sum(held_at)
        over_time.set_title(f"all steps: {share:.0%} of what is held is filled", weight="normal")
        over_time.set_xlabel("step")
        if column == 0:
            x = 0.6 * len(rows)
            y = filled_at[int(x)]
            white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            centred(over_time, x, y / 2, "filled", "white", fontsize=9, weight="bold")
            centred(over_time, x, (y + held_at[int(x)]) / 2, "held, empty", fontsize=9, bbox=white)
    panels[0][0].set_xlim(0, widest * 1.22)
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].set_ylim(len(names) - 0.5, -0.5)
    panels[1][0].set_ylim(0, most * 1.05)
    panels[1][0].set_ylabel("tokens, all requests")
    return figure


@drawing
def slot_occupancy(static: SequenceOf[Stay], continuous: SequenceOf[Stay]) -> Picture:
    """Who is in which slot at each step, in static batches and with continuous batching."""
    figure = canvas(4.2)
    panels = figure.subplots(2, 1, sharex=True)
    colours = colours_of(sorted({stay.name for stay in (*static, *continuous)}))
    last = max(stay.last for stay in (*static, *continuous))
    titles = ("static batches", "continuous batching")
    for axes, stays, title in zip(panels, (static, continuous), titles, strict=True):
        for name, slot, first, end, working in stays:
            box(axes, first - 1, slot - 0.4, end - first + 1, 0.8, PALE, **HATCHED)
            for start, stop in stretches(working):
                box(axes, start - 1, slot - 0.4, stop - start + 1, 0.8, colours[name])
            axes.vlines(end, slot - 0.4, slot + 0.4, color="white", lw=1.5)
            # The letter and the number go where they have room.
            wide = [start for start, stop in stretches(working) if stop - start > last / 20]
            text, x = f"{name}  {len(working)}", (wide or [first])[0] + 0.2
            say(axes, x, slot, text, ink(colours[name]), weight="bold")
        end = max(stay.last for stay in stays)
        axes.axvline(end, color=TEXT, lw=1)
        used = f"slots in use {share_working(stays):.0%} of the time"
        axes.set_title(f"{title}: done after {end} steps, {used}")
        lanes(axes, [f"slot {i}" for i in range(1 + max(stay.slot for stay in stays))])
    panels[1].set_xlim(0, last * 1.01)
    key = "letter: request, number: its steps; hatched: it holds the slot and gets nothing done"
    panels[1].set_xlabel(f"step   ({key})")
    return figure


def stretches(numbers: SequenceOf[int]) -> list[tuple[int, int]]:
    """Runs of numbers that follow one another, each as its first and last."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1] = runs[-1][0], n
        else:
            runs.append((n, n))
    return runs


@drawing
def packed_prefill(cu_seqlens: SequenceOf[int], names: SequenceOf[str] | None = None) -> Picture:
    """A packed batch of prompts, its boundaries, and what attention computes of it."""
    names = list(names or [letter(i) for i in range(len(cu_seqlens) - 1)])
    colours, total = colours_of(names), cu_seqlens[-1]
    sizes = [stop - start for start, stop in pairwise(cu_seqlens)]
    figure = canvas(4.9)
    places: Any = [["strip", "strip"], ["square", "bars"]]
    panels: dict[str, Axes] = figure.subplot_mosaic(places, height_ratios=(1, 4.2))
    strip, square, bars = panels["strip"], panels["square"], panels["bars"]

    bare(strip, (-4, total + 4), (-1.3, 1))
    strip.set_title(f"one packed batch of {total} tokens, no padding")
    bare(bars, (0, total**2), (-0.9, 1.8))
    bars.set_title("pairs of query and key")
    box(square, 0, 0, total, total, PALE)
    pairs = 0
    for name, start, size in zip(names, cu_seqlens, sizes, strict=False):
        stop, colour = start + size, colours[name]
        box(strip, start, 0, size, 1, colour, edgecolor="white")
        text = f"{name}: positions 0 to {size - 1}" if size > total / 5 else name
        centred(strip, start + size / 2, 0.5, text, ink(colour), fontsize=9)
        box(square, start, start, size, size, "white", edgecolor=colour, lw=1)
        square.fill([start, stop, start], [start, stop, stop], color=colour)
        say(square, stop + 6, start + size / 2, f"{size}²", fontsize=9, weight="bold")
        box(bars, pairs, 0.75, size**2, 0.5, colour, edgecolor="white")
        pairs += size**2
    for edge in cu_seqlens:
        centred(strip, edge, -0.3, str(edge))
    say(strip, 0, -0.9, "cu_seqlens: where each request starts, and where the last one ends")

    square.set_title("who attends to whom")
    say(square, total * 0.97, total * 0.1, "never computed:\nother requests", ha="right")
    square.set(xlim=(0, total), ylim=(total, 0), aspect="equal", xlabel="key", ylabel="query")
    square.set_xticks(list(cu_seqlens))
    square.set_yticks(list(cu_seqlens))

    box(bars, 0, -0.25, total**2, 0.5, PALE)
    sums = " + ".join(f"{size}²" for size in sizes)
    say(bars, 0, 1.38, f"{sums} = {pairs:,}", fontsize=9, weight="bold")
    say(bars, 0, 0.38, f"{total}² = {total**2:,}, {total**2 / pairs:.2f} times as many", fontsize=9)
    say(bars, 0, -0.45, "The causal mask halves both.")
    return figure


@drawing
def prefix_tree(
    nodes: SequenceOf[Node], words: Callable[[SequenceOf[int]], str] | None = None
) -> Picture:
    """Cached blocks, each beside the one before it; `words` says what a block's tokens are."""
    words = words or (lambda token_ids: f"{token_ids[0]} … {token_ids[-1]}")
    places = tree_places(nodes)
    columns = max([4, *(1 + x for x, _ in places.values())])
    rows = 1 + max((y for _, y in places.values()), default=0)
    figure = canvas(0.75 + 0.72 * rows)
    axes = figure.subplots()
    bare(axes, (-0.02, columns), (rows - 0.55, -0.55))
    for node in nodes:
        x, y = places[node.block]
        if node.parent in places:
            px, py = places[node.parent]
            axes.plot([px + 0.86, px + 0.93, px + 0.93, x], [py, py, y, y], color=LINE, zorder=0)
        held = node.ref_count > 0
        face = GREEN if node.ref_count > 1 else BLUE if held else PALE
        box(axes, x, y - 0.36, 0.86, 0.72, face, edgecolor=LINE, ls="-" if held else "--")
        state = f"free, place {node.place} in line"
        if held:
            state = f"held by {node.ref_count}: {', '.join(node.holders)}"
        colour = ink(face) if held else "#596066"
        say(axes, x + 0.03, y - 0.21, f"block {node.block}", colour, weight="bold")
        for dy, text in ((0.01, words(node.token_ids)), (0.23, state)):
            room = 112 // columns
            text = text if len(text) <= room else text[: room - 1] + "…"
            say(axes, x + 0.03, y + dy, text, colour)
    if not nodes:
        say(axes, 0, 0, "nothing is cached yet", fontsize=9)
    key = (
        "green: shared, blue: held once, pale: free but still cached (the lowest place goes first)"
    )
    axes.set_title(f"cached blocks   {key}", weight="normal", fontsize=9)
    return figure


def tree_places(nodes: SequenceOf[Node]) -> dict[int, tuple[int, float]]:
    """For each block its column (blocks before it) and its row, half-way between its children."""
    known = {node.block for node in nodes}
    children: dict[int | None, list[int]] = {}
    for node in nodes:
        children.setdefault(node.parent if node.parent in known else None, []).append(node.block)
    places: dict[int, tuple[int, float]] = {}
    leaves = count()

    def place(block: int, column: int) -> float:
        under = [place(child, column + 1) for child in children.get(block, [])]
        row = (under[0] + under[-1]) / 2 if under else float(next(leaves))
        places[block] = column, row
        return row

    for root in children.get(None, []):
        place(root, 0)
    return places


@drawing
def step_timeline(
    panels: Mapping[str, SequenceOf[Step]], label: str = "simulated, H200", mark: str | None = None
) -> Picture:
    """Runs under one another on one time axis: prompts, decodes, the longest wait for a token.

    `label` says whose time it is (a clock's `label`); `mark` names the request whose wait to show,
    that of the longest wait if left out.
    """
    names = list(dict.fromkeys(n for steps in panels.values() for s in steps for n in s.names))
    figure = canvas(0.7 + len(panels) * (0.75 + 0.24 * len(names)))
    sheets = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    end = 1e3 * max(steps[-1].end for steps in panels.values())
    for axes, (title, steps) in zip(sheets, panels.items(), strict=True):
        for step in steps:
            start, width = 1e3 * step.start, 1e3 * (step.end - step.start)
            for name, work in zip(step.names, step.work, strict=True):
                y, face = names.index(name), BLUE if work.num_new == 1 else ORANGE
                box(axes, start, y - 0.36, width, 0.72, face, edgecolor="white", lw=0.4)
                if work.num_new > 1 and width > 0.035 * end:
                    centred(axes, start + width / 2, y, f"{work.num_new:,}", ink(face))
        axes.set_title(f"{title}: all done after {1e3 * steps[-1].end:.1f} ms")
        gap = longest_gap(steps, mark)
        if gap:
            y = names.index(gap.name)
            ends = [1e3 * gap.start, 1e3 * gap.end]
            axes.plot(ends, [y, y], color=RED, lw=2.2, marker="|", markersize=10)
            wait = f"longest wait between two tokens: {1e3 * gap.seconds:.2f} ms"
            axes.set_title(wait, loc="right", color=RED)
        lanes(axes, names)
    sheets[-1].set_xlim(0, end * 1.01)
    key = "orange: prompt tokens, with their number, blue: one token"
    sheets[-1].set_xlabel(f"milliseconds ({label})   {key}")
    return figure


@drawing
def block_tables(pool: Pool, highlight: str | None = None, title: str = "") -> Picture:
    """The pool as a grid of blocks, and the tables that lead into it; one request stands out."""
    colours, columns = colours_of(sorted(pool.tables)), 8
    rows = max(blocks_needed(pool.num_blocks, columns), len(pool.tables), 2)
    widest = max([columns - 2, *map(len, pool.tables.values())])
    figure = canvas(0.75 + 0.46 * rows)
    grid, tables = figure.subplots(1, 2, width_ratios=(1, 1.25))
    bare(grid, (-0.1, columns + 0.1), (rows, -0.1))
    bare(tables, (-0.8 - 0.1 * max(map(len, pool.tables), default=0), widest + 3.2), (rows, -0.1))
    followed = highlight in pool.tables

    def cell(axes: Axes, x: float, y: float, block: int, owner: str | None) -> str:
        strong = followed and owner == highlight
        faint = followed and owner is not None and highlight not in pool.owners(block)
        face = colours[owner] if owner else PALE if block in pool.cached else "#FFFFFF"
        edge = {"edgecolor": TEXT, "lw": 1.8} if strong else {"edgecolor": LINE, "lw": 0.8}
        box(axes, x + 0.04, y + 0.06, 0.92, 0.88, face, alpha=0.35 if faint else 1, **edge)
        colour = TEXT if faint else ink(face)
        weight = "bold" if strong else "normal"
        centred(axes, x + 0.5, y + 0.5, str(block), colour, fontsize=9, weight=weight)
        return colour

    for block in range(pool.num_blocks):
        x, y, owners = block % columns, block // columns, pool.owners(block)
        colour = cell(grid, x, y, block, highlight if highlight in owners else (*owners, None)[0])
        if len(owners) > 1:
            say(grid, x + 0.9, y + 0.22, f"×{len(owners)}", colour, ha="right")
    head = f"{title}: " if title else ""
    grid.set_title(f"{head}{len(pool.free)} of {pool.num_blocks} blocks free", fontsize=9)

    for y, (name, table) in enumerate(pool.tables.items()):
        weight = "bold" if name == highlight else "normal"
        say(tables, -0.15, y + 0.5, name, ha="right", fontsize=9, weight=weight)
        computed, size = pool.computed[name], pool.block_size
        for i, block in enumerate(table):
            cell(tables, i, y, block, name)
            filled = min(max(computed - i * size, 0), size)
            box(tables, i + 0.04, y + 0.84, 0.92 * filled / size, 0.1, TEXT)
        room = f"{computed} of {len(table) * size} tokens"
        say(tables, len(table) + 0.15, y + 0.5, room, weight=weight)
    key = f"dark edge: places filled of {pool.block_size}"
    tables.set_title(f"tables, in the order of the text ({key})", weight="normal", fontsize=9)
    if not pool.tables:
        say(tables, 0, 0.5, "nobody runs", fontsize=9)
    return figure


@drawing
def roofline(
    config: ModelConfig,
    hardware: Hardware,
    points: Mapping[str, SequenceOf[Work]],
    measured: Mapping[str, float] | None = None,
    contexts: SequenceOf[int] = (128, 1024, 8192),
    here: tuple[int, int] | None = None,
) -> Picture:
    """What limits a step: its FLOPs for each byte, and tokens/s of decodes against their number.

    points: steps by their label; measured: seconds that some of these really took; here: a batch
    size and a context to mark on the right.
    """
    figure = canvas(3.9)
    roof, decoding = figure.subplots(1, 2)
    costs = {label: step_cost(config, work) for label, work in points.items()}
    bandwidth, peak = hardware.read_bandwidth / 1e12, hardware.flops / 1e12
    ridge = peak / bandwidth
    low = min([1.0, *map(intensity, costs.values())]) / 2
    high = max([ridge, *map(intensity, costs.values())]) * 6
    roof.loglog([low, ridge, high], [bandwidth * low, peak, peak], color=TEXT, lw=1.5)
    roof.axvline(ridge, color=LINE, lw=0.8, ls=":")
    say(roof, ridge * 1.12, bandwidth * low * 1.4, f"{ridge:.0f} FLOPs\nfor each byte")
    for label, cost in costs.items():
        x, y = intensity(cost), cost.flops / cost.seconds(hardware) / 1e12
        under = cost.limit(hardware) == "memory"
        roof.plot(x, y, "o", color=BLUE if under else ORANGE, ms=7)
        beside(roof, x, y, label, (9, -7) if under else (-4, 9))
        if measured and label in measured:
            real = cost.flops / measured[label] / 1e12
            roof.plot([x, x], [y, real], color=RED, lw=1)
            roof.plot(x, real, "x", color=RED, ms=7)
            beside(roof, x, real, "measured", (9, 0), RED)
    reals = [costs[label].flops / seconds / 1e12 for label, seconds in (measured or {}).items()]
    roof.set(xlim=(low, high), ylim=(min([bandwidth * low, *reals]) / 1.5, peak * 3.5))
    roof.set_title(f"{hardware.name}: the roof")
    roof.set_xlabel("FLOPs for each byte moved   (blue: memory limits, orange: computing)")
    roof.set_ylabel("TFLOP/s, at most")

    batches = [2**i for i in range(11)]
    for context in contexts:
        decodes = [decode_speed(config, hardware, batch, context) for batch in batches]
        decoding.loglog(batches, [speed for speed, _ in decodes], color=BLUE, lw=1.5)
        computing = [i for i, (_, limit) in enumerate(decodes) if limit == "compute"]
        orange = [decodes[i][0] for i in computing]
        decoding.loglog([batches[i] for i in computing], orange, color=ORANGE, lw=3)
        say(decoding, batches[-1] * 1.15, decodes[-1][0], f"context\n{context:,}")
    if here:
        speed, limit = decode_speed(config, hardware, *here)
        decoding.plot(here[0], speed, "o", color=BLUE if limit == "memory" else ORANGE, ms=8)
        beside(decoding, here[0], speed, f"{number(speed)} tokens/s", (9, -9), weight="bold")
    decoding.set_xlim(0.8, batches[-1] * 4)
    decoding.set_xticks(batches[::2], [str(batch) for batch in batches[::2]])
    decoding.minorticks_off()
    decoding.set_title("decoding: tokens/s, at most")
    decoding.set_xlabel("requests in the batch")
    return figure


def beside(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    move: tuple[int, int],
    colour: str = TEXT,
    **more: Any,
) -> None:
    """Text some points away from its place."""
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "va": "center", **more}
    axes.annotate(text, (x, y), move, color=colour, **style)


def intensity(cost: Cost) -> float:
    """FLOPs for each byte."""
    return cost.flops / cost.bytes


def decode_speed(
    config: ModelConfig, hardware: Hardware, batch: int, context: int
) -> tuple[float, Literal["compute", "memory"]]:
    """Tokens/s, at most, of so many decodes with so many tokens each, and what limits them."""
    cost = step_cost(config, [Work(1, context - 1)] * batch)
    return batch / cost.seconds(hardware), cost.limit(hardware)


@drawing
def one_request(moments: Mapping[str, Moment]) -> Picture:
    """A request's tokens and how many are computed, in several situations; see sequence.py."""
    figure = canvas(0.7 + 0.5 * len(moments))
    axes = figure.subplots()
    longest = max(moment.num_tokens for moment in moments.values())
    bare(axes, (-7.6, longest + 5), (len(moments) + 0.05, -0.05))
    for y, (label, moment) in enumerate(moments.items()):
        say(axes, -0.3, y + 0.5, label, ha="right", fontsize=9)
        computed, stop = moment.num_computed, moment.num_computed + moment.num_new
        for i in range(moment.num_tokens):
            face = BLUE if i < computed else ORANGE if i < stop else "#FFFFFF"
            box(axes, i + 0.04, y + 0.12, 0.92, 0.76, face, edgecolor=LINE)
            kind = "p" if i < moment.num_prompt else "g"
            centred(axes, i + 0.5, y + 0.5, kind, ink(face), fontsize=9)
        text = f"{computed} computed + {moment.num_new} new"
        say(axes, moment.num_tokens + 0.3, y + 0.5, text)
    key = "blue: computed, orange: this step computes them, white: not yet"
    axes.set_title(f"{key}   (p: prompt, g: generated)", weight="normal", fontsize=9)
    return figure


class Rung(NamedTuple):
    """A stage of the ladder: tokens/s as measured (None: not yet) and as predicted."""

    name: str
    measured: float | None
    predicted: float | None = None


@drawing
def ladder(panels: Mapping[str, SequenceOf[Rung]]) -> Picture:
    """Tokens/s of the stages so far, a panel for each machine: bars measured, ticks predicted."""
    figure = canvas(0.8 + 0.36 * max(map(len, panels.values())))
    sheets = figure.subplots(1, len(panels), squeeze=False)[0]
    colours = [BLUE, *[SKY] * len(panels)]
    for axes, colour, (title, rungs) in zip(sheets, colours, panels.items(), strict=False):
        most = max((n or 0 for rung in rungs for n in rung[1:]), default=0) or 1
        for y, (_, measured, predicted) in enumerate(rungs):
            box(axes, 0, y - 0.3, measured or 0, 0.6, colour)
            text = "not measured" if measured is None else number(measured)
            if predicted is not None:
                axes.vlines(predicted, y - 0.4, y + 0.4, color=TEXT, lw=2)
                text += f"  (predicted {number(predicted)})"
            say(axes, max(measured or 0, predicted or 0) + 0.03 * most, y, text)
        lanes(axes, [rung.name for rung in rungs])
        axes.set_xlim(0, most * (2.1 if any(rung.predicted for rung in rungs) else 1.25))
        axes.set_title(f"tokens/s, {title}")
        axes.spines["bottom"].set_visible(False)
        axes.spines["left"].set_visible(True)
        axes.tick_params(bottom=False, labelbottom=False, labelsize=9)
    return figure


def number(value: float) -> str:
    """A number with about three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
