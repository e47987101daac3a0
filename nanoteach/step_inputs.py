"""Stage 8. A step's inputs in buffers of fixed places and sizes, as a recorded graph needs them.

A graph replays the same kernels on the same addresses. So a step's inputs are written into the
buffers that the graph was recorded with, and its size is one of a few: a step that is smaller is
padded. Padding has no slot in the pool and a length of 0, so it touches no request's memory.

Knows: sizes, padding, where each number of a step belongs. Does not know: kernels, graphs.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nanoteach.sampler import MASK
from nanoteach.scheduler import Scheduled
from nanoteach.sequence import Sequence
from nanoteach.tiled_attention import tiles_of

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512)
MIXED_SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096)
FEW_SEQS = 32
"""A mixed step has room for as many requests as tokens, or, where that is enough, for so many: the
LM head, sampling and the programs of those that are not there take 0.3 ms (H200)."""
MIXED_SPLITS = 4
"""Splits of a decode's history beside prompt chunks, where the GPU has other work as well."""


def sizes_up_to(sizes: tuple[int, ...], largest: int) -> list[int]:
    """Those below `largest`, and `largest`."""
    return [size for size in sizes if size < largest] + [largest]


def bucket(sizes: list[int], num: int) -> int | None:
    """The smallest of the sizes that holds `num`; None where none does. `sizes` is sorted."""
    place = bisect_left(sizes, num)
    return sizes[place] if place < len(sizes) else None


@dataclass(frozen=True)
class StepInputs:
    """A step in tensors, int32 all of them but temperatures. Decodes come first.

    input_ids, positions, slots: `[num_tokens]`; a slot of -1 is padding.
    tables: `[num_seqs, most blocks]`. decode_lens: of each sequence with one new token, all its
    tokens, `[most decodes]`; 0 for padding and for others.
    seq_lens, query_starts, tile_seqs, tile_starts: see `chunk_attention`; empty in a step of
    decodes only.
    logit_indices: tokens that are followed by a sample, `[num_samples]`; sample_positions, seeds
    and temperatures are those of the samples.
    tile_rows: rows of queries in a tile. splits: into how many parts a decode's history is cut.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    decode_lens: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    tile_seqs: Tensor
    tile_starts: Tensor
    logit_indices: Tensor
    sample_positions: Tensor
    seeds: Tensor
    temperatures: Tensor
    tables: Tensor
    tile_rows: int
    splits: int

    @property
    def decodes_only(self) -> bool:
        """Whether every token is a sequence of its own, and so is sampled after."""
        return len(self.tile_seqs) == 0


def step_sizes(tokens: int, decodes: int, seqs: int, tiles: int) -> dict[str, int]:
    """How long each of a step's inputs is. `seqs` and `tiles` are 0 in one of decodes only."""
    samples = seqs or decodes
    return {
        "input_ids": tokens, "positions": tokens, "slots": tokens, "decode_lens": decodes,
        "seq_lens": seqs, "query_starts": seqs + 1, "tile_seqs": tiles, "tile_starts": tiles,
        "logit_indices": samples, "sample_positions": samples, "seeds": samples,
        "temperatures": samples,
    }  # fmt: skip


class StepBuffer:
    """The inputs of steps of one size: one buffer on the device, and two on the host.

    Two, since a step is prepared while the copy of the one before may still be waiting its turn.
    """

    def __init__(
        self, tokens: int, decodes: int, seqs: int, tiles: int, tables: Tensor, tile_rows: int,
        splits: int,
    ) -> None:  # fmt: skip
        sizes = step_sizes(tokens, decodes, seqs, tiles)
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
        self.inputs = StepInputs(**views, tables=tables, tile_rows=tile_rows, splits=splits)
        self.inputs.slots.fill_(-1)  # a graph is recorded by a run, which must store nothing
        self.views = [{k: v.numpy() for k, v in cut(host).items()} for host in self.hosts]

    def send(self, turn: int) -> None:
        """Copy what was filled to the device, in one piece, without waiting for it."""
        self.device.copy_(self.hosts[turn], non_blocking=True)

    def cut(
        self, tokens: int, decodes: int, seqs: int, tiles: int, tile_rows: int, splits: int
    ) -> StepInputs:
        """The inputs of a step without padding."""
        sizes = step_sizes(tokens, decodes, seqs, tiles)
        views = {name: getattr(self.inputs, name)[:size] for name, size in sizes.items()}
        return replace(self.inputs, **views, tile_rows=tile_rows, splits=splits)


def fill(
    to: dict[str, np.ndarray], scheduled: list[Scheduled], block_size: int, tile_tokens: int
) -> None:
    """Write a step's numbers into arrays, padding the rest.

    Every request samples, in the order of the step; of one that has more of its prompt to go
    the sample is not used. So a sample's place is known from the step alone.
    """
    num_decodes = sum(num_new == 1 for _, num_new in scheduled)
    decodes, chunks = scheduled[:num_decodes], scheduled[num_decodes:]
    fill_decodes(to, [seq for seq, _ in decodes], block_size)
    ends = list(range(1, num_decodes + 1))
    if chunks:
        tiles = tiles_of([num_new for _, num_new in chunks], num_decodes, tile_tokens)
        end = num_decodes
        for seq, num_new in chunks:
            start, begin, end = seq.num_computed_tokens, end, end + num_new
            positions = np.arange(start, start + num_new)
            blocks = np.array(seq.block_table)[positions // block_size]
            ids = seq.token_ids[start : start + num_new]
            to["input_ids"][begin:end] = np.fromiter(ids, np.int32, num_new)  # twice as fast
            to["positions"][begin:end] = positions
            to["slots"][begin:end] = blocks * block_size + positions % block_size
            ends.append(end)
        pad(to["seq_lens"], [seq.num_computed_tokens + n for seq, n in scheduled], 0)
        pad(to["query_starts"], [0, *ends], end)
        pad(to["tile_seqs"], [row for row, _ in tiles], -1)
        pad(to["tile_starts"], [first for _, first in tiles], 0)
    pad(to["logit_indices"], [end - 1 for end in ends], 0)
    # As model_runner's `draw` has it, by columns: a call for each of 256 requests takes 0.1 ms.
    pad(to["sample_positions"], [len(seq.token_ids) for seq, _ in scheduled], 0)
    seeds = [(seq.params.seed or 0) & MASK for seq, _ in scheduled]
    pad(to["seeds"].view(np.uint32), seeds, 0)
    temperatures = to["temperatures"].view(np.float32)
    pad(temperatures, [seq.params.temperature for seq, _ in scheduled], 0)


def fill_decodes(to: dict[str, np.ndarray], decodes: list[Sequence], block_size: int) -> None:
    """Write the next token of each request, its position, slot and length; pad what is left.

    Padding has token 0, position 0, slot -1 and length 0.
    """
    starts = [seq.num_computed_tokens for seq in decodes]
    slots = [
        seq.block_table[start // block_size] * block_size + start % block_size
        for seq, start in zip(decodes, starts, strict=True)
    ]
    ids = [seq.token_ids[start] for seq, start in zip(decodes, starts, strict=True)]
    pad(to["input_ids"], ids, 0)
    pad(to["positions"], starts, 0)
    pad(to["slots"], slots, -1)
    pad(to["decode_lens"], [start + 1 for start in starts], 0)


def pad(array: np.ndarray, values: list[int] | list[float], padding: int) -> None:
    """Fill an array with values, and what is left of it with padding."""
    array[: len(values)] = values
    array[len(values) :] = padding


class BlockTables:
    """All requests' block tables, int32 `[max_num_seqs, most blocks]`, one row for each of a step.

    tables: on the device. On the host there are two copies, which take turns (see `StepBuffer`).
    """

    def __init__(self, max_num_seqs: int, width: int, device: torch.device) -> None:
        self.tables = torch.zeros(max_num_seqs, width, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self.hosts = [
            torch.zeros(max_num_seqs, width, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self.known: list[list[tuple[list[int] | None, int]]] = [
            [(None, 0)] * max_num_seqs for _ in range(2)
        ]

    def send(self, turn: int, tables: list[list[int]]) -> None:
        """Bring the device's rows up to these tables. On the host only what is new is written."""
        known, host = self.known[turn], self.hosts[turn].numpy()
        for row, table in enumerate(tables):
            held, length = known[row]
            if held is not table:  # another request's, or that of one which came back
                length = 0
            if length < len(table):
                host[row, length : len(table)] = table[length:]
                known[row] = (table, len(table))
        count = len(tables)
        self.tables[:count].copy_(self.hosts[turn][:count], non_blocking=True)
