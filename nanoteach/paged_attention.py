"""Stage 3. K/V in a pool of blocks, and attention that finds them through block tables.

Knows: the pool's tensors, gathering a history out of its blocks. Does not know: who gets a block.
"""

import math
import warnings
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from nanoteach.block_manager import BlockManager, blocks_needed, slot_mapping
from nanoteach.config import EngineConfig, ModelConfig
from nanoteach.cost_model import kv_bytes_per_token
from nanoteach.kv_cache import decode_attention, decode_mask
from nanoteach.model import AttentionMetadata, causal_attention


def pool_blocks(
    config: ModelConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    reserved: int = 0,
) -> int:
    """How many blocks the KV pool gets; on a GPU, `reserved` bytes of the memory are left alone.

    Raises ValueError where not even one fits, and warns where the longest request does not.
    """
    if engine.num_gpu_blocks_override:
        return engine.num_gpu_blocks_override
    memory = engine.kv_cache_memory_bytes or 2**30
    if not engine.kv_cache_memory_bytes and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = int(free - (1 - engine.gpu_memory_utilization) * total) - reserved
    block_bytes = kv_bytes_per_token(config, dtype.itemsize) * engine.block_size
    if memory < block_bytes:
        raise ValueError(
            f"the KV pool has {max(memory, 0)} bytes, and one block of {engine.block_size} tokens "
            f"takes {block_bytes}: raise kv_cache_memory_bytes or gpu_memory_utilization"
        )
    longest = engine.max_model_len or config.max_position
    needed = blocks_needed(max(1, longest - 1), engine.block_size)  # the last token has no K/V
    if memory // block_bytes < needed:
        warnings.warn(
            f"the KV pool holds {memory // block_bytes * engine.block_size} tokens, and a request "
            f"may have up to max_model_len = {longest}: longer ones than the pool are refused. "
            "Lower max_model_len, or raise kv_cache_memory_bytes or gpu_memory_utilization",
            stacklevel=2,
        )
    if device.type == "cuda" and engine.enable_prefix_caching:
        return memory // block_bytes  # what nobody runs on holds prefixes
    # Elsewhere no more than every slot at its longest: the memory is wanted for other things.
    return min(memory // block_bytes, engine.max_num_seqs * needed)


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one new token each and about as long as each other, attended together.

    blocks: `[rows * most blocks]`, row by row, padded with block 0; mask: `[rows, tokens]` hides
    the padding.
    """

    rows: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True)
class PagedMetadata(AttentionMetadata):
    """Where the K/V of each sequence live.

    slot_mapping: `[num_tokens]`, where each new token's K/V go.
    decode_groups: the sequences with one new token at the front of the step.
    chunk_blocks: for each of the others its blocks, `[blocks]`.
    """

    slot_mapping: Tensor
    decode_groups: list[DecodeGroup]
    chunk_blocks: list[Tensor]


def count_decodes(query_lens: list[int]) -> int:
    """How many sequences at the front of a step have one new token."""
    return len(list(takewhile(lambda new: new == 1, query_lens)))


def padded(tables: list[list[int]]) -> list[list[int]]:
    """Block tables, all as long as the longest. No length reaches the padding, block 0."""
    widest = max(map(len, tables), default=0)
    return [table + [0] * (widest - len(table)) for table in tables]


def group_by_length(lengths: list[int]) -> list[slice]:
    """Cut a list into runs in which the longest is at most twice the shortest.

    A group is padded to its longest member, so one long history among short ones must not set the
    size for all. Sorted lengths give the fewest groups.
    """
    groups: list[slice] = []
    start, low, high = 0, 0, 0
    for i, length in enumerate(lengths):
        low, high = min(low, length), max(high, length)
        if i == 0 or high > 2 * low:
            start, low, high = i, length, length
            groups.append(slice(i, i))
        groups[-1] = slice(start, i + 1)
    return groups


class PagedAttention:
    """The pool, and the backend `sdpa`: gather the history, then torch's attention. Any device."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self.block_size = config, block_size
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        try:
            self.k = torch.zeros(shape, dtype=dtype, device=device)
            self.v = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one, too
            gib = 2 * dtype.itemsize * math.prod(shape) / 2**30
            raise ValueError(
                f"there is no memory for a KV pool of {num_blocks} blocks, {gib:.1f} GiB: lower "
                "num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization"
            ) from error

    def plan(
        self, query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]]
    ) -> PagedMetadata:
        """Turn tables into tensors, once a step, for all layers."""
        tables, num_decodes = self.tables_in_use(block_tables, seq_lens), count_decodes(query_lens)
        groups = group_by_length([len(table) for table in tables[:num_decodes]])
        chunks = tables[num_decodes:]
        return PagedMetadata(
            query_lens,
            seq_lens,
            slot_mapping=self.slots(query_lens, seq_lens, block_tables),
            decode_groups=[self.decode_group(tables[g], seq_lens[g]) for g in groups],
            chunk_blocks=[torch.tensor(table, device=self.k.device) for table in chunks],
        )

    def slots(
        self, query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]]
    ) -> Tensor:
        """Where each new token's K/V go, `[num_tokens]`."""
        slots = [
            slot
            for table, new, n in zip(block_tables, query_lens, seq_lens, strict=True)
            for slot in slot_mapping(table, self.block_size, n - new, n)
        ]
        return torch.tensor(slots, device=self.k.device)

    def tables_in_use(self, block_tables: list[list[int]], seq_lens: list[int]) -> list[list[int]]:
        """A table may be longer than its sequence: only the blocks in use are read."""
        size = self.block_size
        return [t[: blocks_needed(n, size)] for t, n in zip(block_tables, seq_lens, strict=True)]

    def decode_group(self, tables: list[list[int]], seq_lens: list[int]) -> DecodeGroup:
        """Pad tables to the longest of them."""
        rows, device = padded(tables), self.k.device
        blocks = torch.tensor(rows, device=device).flatten()
        mask = decode_mask(seq_lens, len(rows[0]) * self.block_size)
        return DecodeGroup(len(tables), blocks, mask.to(device))

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write the new tokens' K/V `[num_tokens, num_kv_heads, head_dim]` to their slots."""
        self.k[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.v[layer].flatten(0, 1).index_copy_(0, slots, v)

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of whole blocks, in the order given: `[tokens, num_kv_heads, head_dim]` each.

        Whole blocks, since copying a few long runs is faster than many short ones.
        """
        shape = (-1, *self.k.shape[-2:])
        k = self.k[layer].flatten(1).index_select(0, blocks).view(shape)
        v = self.v[layer].flatten(1).index_select(0, blocks).view(shape)
        return k, v

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        assert isinstance(metadata, PagedMetadata)
        self.store(layer, k, v, metadata.slot_mapping)
        outs, start = [], 0
        for group in metadata.decode_groups:
            keys, values = (
                x.unflatten(0, (group.rows, -1)) for x in self.gather(layer, group.blocks)
            )
            outs.append(decode_attention(q[start : start + group.rows], keys, values, group.mask))
            start += group.rows
        first_chunk = len(metadata.seq_lens) - len(metadata.chunk_blocks)
        for i, blocks in enumerate(metadata.chunk_blocks, first_chunk):
            stop, seq_len = start + metadata.query_lens[i], metadata.seq_lens[i]
            keys, values = self.gather(layer, blocks)
            outs.append(causal_attention(q[start:stop], keys[:seq_len], values[:seq_len]))
            start = stop
        return outs[0] if len(outs) == 1 else torch.cat(outs)


@dataclass
class Row:
    """One request of a static batch."""

    request_id: str
    block_table: list[int] = field(default_factory=list)


class PagedBatchCache:
    """Stage 2's static batch on pages: rows take blocks as they grow, none is reserved."""

    def __init__(self, block_manager: BlockManager, attention: PagedAttention) -> None:
        self.block_manager = block_manager
        self.attention = attention
        self.rows: list[Row] = []

    def fits(self, lengths: list[int]) -> bool:
        """See `BatchCache.fits`. Only what a request uses counts."""
        manager = self.block_manager
        needed = sum(blocks_needed(length, manager.block_size) for length in lengths)
        return needed <= manager.num_blocks

    def plan(self, query_lens: list[int], seq_lens: list[int]) -> PagedMetadata:
        """See `BatchCache.plan`. Raises RuntimeError on a batch that does not fit."""
        while len(self.rows) < len(seq_lens):
            self.rows.append(Row(f"row {len(self.rows)}"))
        for row, length in zip(self.rows, seq_lens, strict=True):
            if not self.block_manager.allocate(row, length):
                raise RuntimeError("the pool is too small for a batch, and a batch can't wait")
        return self.attention.plan(query_lens, seq_lens, [row.block_table for row in self.rows])

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        return self.attention.attend(layer, q, k, v, metadata)

    def release(self) -> None:
        """Give every block back."""
        for row in self.rows:
            self.block_manager.free(row)
        self.rows = []
