"""Stage 8. Steps recorded once as CUDA graphs, and replayed with new inputs.

A decode step of a small model is some 200 launches of a few microseconds each, and a launch costs
the host more than that. A CUDA graph is launched as a whole, with its inputs in the buffers of
step_inputs.py.

Three kinds of graphs: decodes only, by the number of requests; and mixed steps (decodes and prompt
chunks) of few requests or of any number, by the number of tokens. A step larger than all of them
takes longer than its launches, and runs without a graph and without padding.

Knows: which graph serves a step, when a result is on the host. Does not know: why these requests.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from nanoteach.block_manager import blocks_needed
from nanoteach.scheduler import Scheduled
from nanoteach.sequence import Sequence
from nanoteach.step_inputs import (
    DECODE_SIZES,
    FEW_SEQS,
    MIXED_SIZES,
    MIXED_SPLITS,
    BlockTables,
    StepBuffer,
    StepInputs,
    bucket,
    fill,
    sizes_up_to,
)
from nanoteach.tiled_attention import SMALL_TILE_ROWS, choose_splits, tile_rows, tile_tokens
from nanoteach.types import Logprob

if TYPE_CHECKING:
    from nanoteach.fused_decoder import FusedDecoder
    from nanoteach.plain_decoder import PlainDecoder


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Recorded(Protocol[T_co]):
    """Work that can be done again, on what its buffers hold by then."""

    def replay(self) -> T_co:
        """Do it. The result is in the same place every time."""
        ...


@dataclass
class Replay(Generic[T]):
    """A graph, and where in its memory its result lies."""

    graph: torch.cuda.CUDAGraph
    result: T

    def replay(self) -> T:
        """See `Recorded`."""
        self.graph.replay()
        return self.result


@dataclass
class Rerun(Generic[T]):
    """In place of a graph, where there are none: the work is done again as it was written."""

    replay: Callable[[], T]


class Record(Protocol):
    """Makes a recording of a function that works on buffers."""

    def __call__(self, run: Callable[[], T], /) -> Recorded[T]: ...


ReadLogprobs = Callable[[], dict[int, dict[int, Logprob]]]


class Tail(Protocol):
    """Chooses the tokens of requests anew that want more than a graph does: see stage 9."""

    def launch(self, turn: int, hidden: Tensor, parts: list[tuple[int, Sequence]]) -> ReadLogprobs:
        """Do it for these rows of a step, without waiting."""
        ...

    def try_out(self, hidden: Tensor) -> None:
        """Take the most memory that it ever takes."""
        ...

    def capture(self, record: Record) -> None:
        """Record what it can."""
        ...


@dataclass
class PendingTokens:
    """A step that has been launched. `result` waits for it.

    logprobs: after that, those of the requests that asked for them, by their place in the step.
    """

    gives_token: list[bool]
    host: Tensor
    done: torch.cuda.Event | None
    logprobs: ReadLogprobs = dict

    def result(self) -> list[int | None]:
        """The next token of each request, or None for one that has more of its prompt to go."""
        if self.done:
            self.done.synchronize()
        tokens = self.host[: len(self.gives_token)].tolist()
        return [
            token if gives else None for token, gives in zip(tokens, self.gives_token, strict=True)
        ]


class GraphRunner:
    """Runs steps on a GPU: `execute` as `ModelRunner` has it, and `launch`, which does not wait."""

    def __init__(
        self,
        decoder: "FusedDecoder | PlainDecoder",
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int = MIXED_SIZES[-1],
        tail: Tail | None = None,
    ) -> None:
        self.decoder, self.tail = decoder, tail
        self.model = decoder.model
        pool = decoder.pool
        self.block_size = pool.block_size
        self.device = pool.k.device
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        width = blocks_needed(max_model_len, self.block_size)
        self.tables = BlockTables(max_num_seqs, width, self.device)
        self.turn, pinned = 0, self.device.type == "cuda"
        self.events: list[torch.cuda.Event | None] = [None, None]
        self.tokens = [
            torch.zeros(max_num_seqs, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self.decode_sizes = sizes_up_to(DECODE_SIZES, max_num_seqs)
        self.mixed_sizes = sizes_up_to(MIXED_SIZES, min(max_num_batched_tokens, MIXED_SIZES[-1]))
        self.largest = self.buffer("mixed", max_num_batched_tokens, SMALL_TILE_ROWS)
        self.graphs: dict[tuple[str, int], tuple[StepBuffer, Recorded[Tensor]]] = {}
        self.capture_seconds, self.graph_bytes = 0.0, 0

    # --- recording -----------------------------------------------------------------------------

    def peak_memory(self) -> int:
        """Bytes that the largest step needs besides weights and pool: found out by running it."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        hidden = self.decoder.run(self.largest.inputs)
        if self.tail:
            self.tail.try_out(hidden)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        return peak

    def capture(self, progress: bool = True) -> None:
        """Record the graphs, the largest first, so that the smaller ones fit into its memory."""
        sizes = [("mixed", size) for size in reversed(self.mixed_sizes)]
        if self.max_num_seqs > FEW_SEQS:
            sizes += [("few", size) for _, size in sizes]
        sizes += [("decode", size) for size in reversed(self.decode_sizes)]
        record: Record = Rerun
        if self.device.type == "cuda":
            memory, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            record = partial(record_graph, memory, stream)
        start, free = time.perf_counter(), self.free_bytes()
        bar = tqdm(sizes, desc="Recording CUDA graphs", disable=None if progress else True)
        for kind, size in bar:
            buffer = self.buffer(kind, size)
            self.graphs[kind, size] = buffer, record(partial(self.decoder.run, buffer.inputs))
            self.graph_bytes = free - self.free_bytes()
            bar.set_postfix_str(f"{self.graph_bytes / 2**20:.0f} MiB")
        if self.tail:
            self.tail.capture(record)
            self.graph_bytes = free - self.free_bytes()
        self.capture_seconds = time.perf_counter() - start

    def free_bytes(self) -> int:
        """Of the device's memory, as far as it is counted: 0 on a CPU."""
        return torch.cuda.mem_get_info()[0] if self.device.type == "cuda" else 0

    def buffer(self, kind: str, size: int, rows: int | None = None) -> StepBuffer:
        """Buffers for decode steps of `size` requests, or mixed steps of `size` tokens.

        rows: of the smallest tiles that may come, if they are not those of this size.
        """
        kv_heads = self.decoder.config.num_kv_heads
        if kind == "decode":
            splits = choose_splits(size, kv_heads, self.max_model_len)
            return StepBuffer(size, size, 0, 0, self.tables.tables, 0, splits)
        seqs = min(size, self.max_num_seqs, FEW_SEQS if kind == "few" else size)
        rows = rows or tile_rows(size)
        tiles = size // tile_tokens(self.model.config, rows) + seqs
        return StepBuffer(size, seqs, seqs, tiles, self.tables.tables, rows, MIXED_SPLITS)

    def exact_inputs(self, scheduled: list[Scheduled]) -> StepInputs:
        """The inputs of a step that no graph was recorded for."""
        num_new = [n for _, n in scheduled]
        decodes, chunks = num_new.count(1), [n for n in num_new if n > 1]
        if not chunks:
            splits = choose_splits(decodes, self.decoder.config.num_kv_heads, self.max_model_len)
            return self.largest.cut(decodes, decodes, 0, 0, 0, splits)
        rows = tile_rows(sum(num_new))
        tiles = sum(-(-n // tile_tokens(self.model.config, rows)) for n in chunks)
        return self.largest.cut(sum(num_new), decodes, len(num_new), tiles, rows, MIXED_SPLITS)

    # --- running -------------------------------------------------------------------------------

    def execute(self, scheduled: list[Scheduled]) -> list[int | None]:
        """See `ModelRunner.execute`."""
        pending = self.launch(scheduled)
        tokens = pending.result()
        for row, logprobs in pending.logprobs().items():
            scheduled[row].seq.logprobs.append(logprobs)
        return tokens

    @torch.inference_mode()
    def launch(self, scheduled: list[Scheduled]) -> PendingTokens:
        """Start a step. Decodes come first in it. Its inputs may be promises (see embed.py)."""
        gives_token = [part.gives_token for part in scheduled]
        num_tokens = sum(num_new for _, num_new in scheduled)
        kind = "few" if len(scheduled) <= FEW_SEQS < self.max_num_seqs else "mixed"
        kind = "decode" if num_tokens == len(scheduled) else kind
        sizes = self.decode_sizes if kind == "decode" else self.mixed_sizes
        size = bucket(sizes, num_tokens)
        recorded = self.graphs.get((kind, size)) if size else None
        buffer, graph = recorded or (self.largest, None)
        turn = self.turn = 1 - self.turn
        last_use = self.events[turn]
        if last_use:  # two steps ago: it is over, unless that step's tokens were never asked for
            last_use.synchronize()
        try:
            rows = buffer.inputs.tile_rows if graph else tile_rows(num_tokens)
            tile = tile_tokens(self.model.config, rows)
            fill(buffer.views[turn], scheduled, self.block_size, tile)
            self.tables.send(turn, [seq.block_table for seq, _ in scheduled])
            buffer.send(turn)
            hidden = graph.replay() if graph else self.decoder.run(self.exact_inputs(scheduled))
            logprobs: ReadLogprobs = dict
            if self.tail and (wanting := wanting_more(scheduled, gives_token)):
                logprobs = self.tail.launch(turn, hidden, wanting)
            self.tokens[turn].copy_(self.decoder.sampled, non_blocking=True)
        finally:
            if self.device.type == "cuda":
                self.events[turn] = torch.cuda.Event()
                self.events[turn].record()  # type: ignore[union-attr]
        return PendingTokens(gives_token, self.tokens[turn], self.events[turn], logprobs)


def record_graph(memory: Any, stream: torch.cuda.Stream, run: Callable[[], T]) -> Replay[T]:
    """Run it, which compiles its kernels and lets libraries set up, and record it as a graph.

    memory: the pool of the graphs, which take turns in it.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, stream=stream):
        result = run()
    return Replay(graph, result)


def wanting_more(scheduled: list[Scheduled], gives_token: list[bool]) -> list[tuple[int, Sequence]]:
    """The requests of a step whose token is not chosen as its graph does, with their places."""
    rows = [row for row, (seq, _) in enumerate(scheduled) if not seq.params.is_plain]
    return [(row, scheduled[row].seq) for row in rows if gives_token[row]]
