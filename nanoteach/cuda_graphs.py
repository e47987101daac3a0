"""Stage 8. Steps recorded once as CUDA graphs, and replayed with new inputs.

A decode step of a small model is some 200 launches of a few microseconds each, and a launch costs
the host more than that. A CUDA graph is launched as a whole. It replays the same kernels on the
same addresses, so a step's inputs are copied into the buffers that the graph was recorded with,
and its size is one of a few: a step that is smaller is padded. Padding has no slot in the pool and
a length of 0, so it touches no request's memory.

Two kinds of graphs: decodes only, by the number of requests; and mixed steps (decodes and prompt
chunks), by the number of tokens. A step larger than all of them takes longer than its launches.

Knows: buffers, sizes, when a result is on the host. Does not know: why these requests.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nanoteach.block_manager import blocks_needed
from nanoteach.fused_decoder import FusedDecoder, StepInputs
from nanoteach.scheduler import Scheduled
from nanoteach.triton_backend import choose_splits, tile_tokens, tiles_of

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512)
MIXED_SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
MIXED_SPLITS = 4
"""Splits of a decode's history beside prompt chunks, where the GPU has other work as well."""


class StepBuffer:
    """The inputs of steps of one size: one buffer on the device, and two on the host.

    Two, since a step is prepared while the copy of the one before may still be waiting its turn.
    """

    def __init__(
        self, tokens: int, decodes: int, seqs: int, tiles: int, samples: int, tables: Tensor,
        splits: int,
    ) -> None:  # fmt: skip
        sizes = {
            "input_ids": tokens, "positions": tokens, "slots": tokens, "decode_lens": decodes,
            "seq_lens": seqs, "query_starts": seqs + 1, "tile_seqs": tiles, "tile_starts": tiles,
            "logit_indices": samples, "sample_positions": samples, "seeds": samples,
            "temperatures": samples,
        }  # fmt: skip
        # Each begins at 16 bytes: Triton compiles anew for pointers that are aligned differently.
        padded = [-(-size // 4) * 4 for size in sizes.values()]
        starts = dict(zip(sizes, np.cumsum([0, *padded]).tolist(), strict=False))
        total, cuda = sum(padded), tables.is_cuda
        self.device = torch.zeros(total, dtype=torch.int32, device=tables.device)
        self.hosts = [torch.zeros(total, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]

        def cut(flat: Tensor) -> dict[str, Tensor]:
            return {name: flat[starts[name] : starts[name] + size] for name, size in sizes.items()}

        views = cut(self.device)
        views["temperatures"] = views["temperatures"].view(torch.float32)
        self.inputs = StepInputs(**views, tables=tables, splits=splits)
        self.inputs.slots.fill_(-1)  # a graph is recorded by a run, which must store nothing
        self.views = [{k: v.numpy() for k, v in cut(host).items()} for host in self.hosts]

    def send(self, turn: int) -> StepInputs:
        """Copy what was filled to the device, in one piece, without waiting for it."""
        self.device.copy_(self.hosts[turn], non_blocking=True)
        return self.inputs


@dataclass
class PendingTokens:
    """A step that has been launched. `result` waits for it."""

    gives_token: list[bool]
    host: Tensor
    done: torch.cuda.Event | None

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
        decoder: FusedDecoder,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int = MIXED_SIZES[-1],
    ) -> None:
        self.decoder = decoder
        self.model = decoder.model
        pool = decoder.pool
        self.block_size = pool.block_size
        self.device = pool.k.device
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.tile_tokens = tile_tokens(self.model.config)
        width = blocks_needed(max_model_len, self.block_size)
        self.tables = torch.zeros(max_num_seqs, width, dtype=torch.int32, device=self.device)
        cuda = self.device.type == "cuda"
        self.host_tables = [
            torch.zeros(max_num_seqs, width, dtype=torch.int32, pin_memory=cuda) for _ in range(2)
        ]
        self.sent_tables: list[list[tuple[list[int] | None, int]]] = [
            [(None, 0)] * max_num_seqs for _ in range(2)
        ]
        self.turn = 0
        self.events: list[torch.cuda.Event | None] = [None, None]
        self.tokens = [
            torch.zeros(max_num_seqs, dtype=torch.int32, pin_memory=cuda) for _ in range(2)
        ]
        self.decode_sizes = sizes_up_to(DECODE_SIZES, max_num_seqs)
        self.mixed_sizes = sizes_up_to(MIXED_SIZES, min(max_num_batched_tokens, MIXED_SIZES[-1]))
        self.graphs: dict[tuple[str, int], tuple[StepBuffer, torch.cuda.CUDAGraph | None]] = {}

    # --- recording -----------------------------------------------------------------------------

    def capture(self, progress: bool = True) -> None:
        """Record the graphs, the largest first, so that the smaller ones fit into its memory."""
        memory, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        sizes = [("mixed", size) for size in reversed(self.mixed_sizes)]
        sizes += [("decode", size) for size in reversed(self.decode_sizes)]
        for kind, size in tqdm(
            sizes, desc="Recording CUDA graphs", disable=None if progress else True
        ):
            buffer = self.buffer(kind, size)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compiles the kernels, and lets libraries set up
                self.decoder.run(buffer.inputs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=stream):
                self.decoder.run(buffer.inputs)
            self.graphs[kind, size] = buffer, graph

    def buffer(self, kind: str, size: int) -> StepBuffer:
        """Buffers for decode steps of `size` requests, or mixed steps of `size` tokens."""
        kv_heads = self.decoder.config.num_kv_heads
        if kind == "decode":
            splits = choose_splits(size, kv_heads, self.max_model_len)
            return StepBuffer(size, size, 0, 0, size, self.tables, splits)
        seqs = min(size, self.max_num_seqs)
        tiles = size // self.tile_tokens + seqs
        return StepBuffer(size, seqs, seqs, tiles, seqs, self.tables, MIXED_SPLITS)

    def exact_buffer(self, scheduled: list[Scheduled]) -> StepBuffer:
        """Buffers for one step that no graph was recorded for."""
        num_new = [n for _, n in scheduled]
        if max(num_new) == 1:
            return self.buffer("decode", len(num_new))
        tiles = len(tiles_of([n for n in num_new if n > 1], 0, self.tile_tokens))
        return StepBuffer(
            sum(num_new), num_new.count(1), len(num_new), tiles, len(num_new), self.tables,
            MIXED_SPLITS,
        )  # fmt: skip

    # --- running -------------------------------------------------------------------------------

    def execute(self, scheduled: list[Scheduled]) -> list[int | None]:
        """See `ModelRunner.execute`."""
        return self.launch(scheduled).result()

    @torch.inference_mode()
    def launch(self, scheduled: list[Scheduled]) -> PendingTokens:
        """Start a step. Decodes come first in it. Its inputs may be promises (see embed.py)."""
        num_tokens = sum(num_new for _, num_new in scheduled)
        kind = "decode" if num_tokens == len(scheduled) else "mixed"
        sizes = self.decode_sizes if kind == "decode" else self.mixed_sizes
        place = bisect_left(sizes, num_tokens)
        recorded = self.graphs.get((kind, sizes[place])) if place < len(sizes) else None
        buffer, graph = recorded or (self.exact_buffer(scheduled), None)
        turn = self.turn = 1 - self.turn
        last_use = self.events[turn]
        if last_use:  # two steps ago: it is over, unless that step's tokens were never asked for
            last_use.synchronize()
        try:
            self.fill(buffer.views[turn], scheduled)
            self.send_tables([seq.block_table for seq, _ in scheduled])
            inputs = buffer.send(turn)
            if graph:
                graph.replay()
            else:
                self.decoder.run(inputs)
            self.tokens[turn].copy_(self.decoder.sampled, non_blocking=True)
        finally:
            if self.device.type == "cuda":
                self.events[turn] = torch.cuda.Event()
                self.events[turn].record()  # type: ignore[union-attr]
        gives_token = [part.gives_token for part in scheduled]
        return PendingTokens(gives_token, self.tokens[turn], self.events[turn])

    def fill(self, to: dict[str, np.ndarray], scheduled: list[Scheduled]) -> None:
        """Write a step's numbers into arrays, padding the rest.

        Every request samples, in the order of the step; of one that has more of its prompt to go
        the sample is not used. So a sample's place is known from the step alone.
        """
        size = self.block_size
        num_decodes = sum(num_new == 1 for _, num_new in scheduled)
        decodes, chunks = scheduled[:num_decodes], scheduled[num_decodes:]
        starts = [seq.num_computed_tokens for seq, _ in decodes]
        ids = [seq.token_ids[start] for (seq, _), start in zip(decodes, starts, strict=True)]
        slots = [
            seq.block_table[start // size] * size + start % size
            for (seq, _), start in zip(decodes, starts, strict=True)
        ]
        put(to["input_ids"], ids, 0)
        put(to["positions"], starts, 0)
        put(to["slots"], slots, -1)
        put(to["decode_lens"], [start + 1 for start in starts], 0)
        ends = list(range(1, num_decodes + 1))
        if chunks:
            tiles = tiles_of([num_new for _, num_new in chunks], num_decodes, self.tile_tokens)
            end = num_decodes
            for seq, num_new in chunks:
                start, begin, end = seq.num_computed_tokens, end, end + num_new
                positions = np.arange(start, start + num_new)
                blocks = np.array(seq.block_table)[positions // size]
                to["input_ids"][begin:end] = seq.token_ids[start : start + num_new]
                to["positions"][begin:end] = positions
                to["slots"][begin:end] = blocks * size + positions % size
                ends.append(end)
            put(to["seq_lens"], [seq.num_computed_tokens + n for seq, n in scheduled], 0)
            put(to["query_starts"], [0, *ends], end)
            put(to["tile_seqs"], [row for row, _ in tiles], -1)
            put(to["tile_starts"], [first for _, first in tiles], 0)
        put(to["logit_indices"], [end - 1 for end in ends], 0)
        put(to["sample_positions"], [len(seq.token_ids) for seq, _ in scheduled], 0)
        put(to["seeds"], [], 0)  # a seed for each request comes with the sampling stage
        temperatures = to["temperatures"].view(np.float32)
        put(temperatures, [seq.params.temperature for seq, _ in scheduled], 0)

    def send_tables(self, tables: list[list[int]]) -> None:
        """Bring the device's block tables up to these. Only rows that changed are written."""
        sent, host = self.sent_tables[self.turn], self.host_tables[self.turn].numpy()
        for i, table in enumerate(tables):
            known, length = sent[i]
            if known is not table:
                length = 0
            if length < len(table):
                host[i, length : len(table)] = table[length:]
                sent[i] = (table, len(table))
        count = len(tables)
        self.tables[:count].copy_(self.host_tables[self.turn][:count], non_blocking=True)


def sizes_up_to(sizes: tuple[int, ...], largest: int) -> list[int]:
    """Those below `largest`, and `largest`."""
    return [size for size in sizes if size < largest] + [largest]


def put(array: np.ndarray, values: list[int] | list[float], padding: int) -> None:
    """Fill an array with values, and what is left of it with padding."""
    array[: len(values)] = values
    array[len(values) :] = padding
