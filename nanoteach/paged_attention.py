"""Stage 3. K/V in a pool of blocks, and attention that finds them through block tables.

Knows: the pool's tensors, gathering a history out of its blocks. Does not know: who gets a block.
"""

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
    config: ModelConfig, engine: EngineConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """How many blocks the KV pool gets. Raises ValueError where not even one fits."""
    if engine.num_gpu_blocks_override:
        return engine.num_gpu_blocks_override
    memory = engine.kv_cache_memory_bytes or 2**30
    if not engine.kv_cache_memory_bytes and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = int(free - (1 - engine.gpu_memory_utilization) * total)
    block_bytes = kv_bytes_per_token(config, dtype.itemsize) * engine.block_size
    if memory < block_bytes:
        raise ValueError(
            f"the KV pool has {max(memory, 0)} bytes, and one block of {engine.block_size} tokens "
            f"takes {block_bytes}: raise kv_cache_memory_bytes or gpu_memory_utilization"
        )
    # More than this could never be used.
    longest = min(engine.max_model_len or config.max_position, config.max_position)
    most = engine.max_num_seqs * blocks_needed(longest, engine.block_size)
    return min(memory // block_bytes, most)


@dataclass(frozen=True)
class PagedMetadata(AttentionMetadata):
    """Where the K/V of each sequence live.

    slot_mapping: `[num_tokens]`, where each new token's K/V go.
    num_decodes: sequences with one new token at the front; they are attended together.
    decode_blocks: `[num_decodes, most blocks]`, padded with block 0, which `decode_mask` hides.
    chunk_blocks: for each of the others its blocks, `[blocks]`.
    """

    slot_mapping: Tensor
    num_decodes: int
    decode_blocks: Tensor
    decode_mask: Tensor
    chunk_blocks: list[Tensor]


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
        self.block_size = block_size
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def plan(
        self, query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]]
    ) -> PagedMetadata:
        """Turn tables into tensors, once a step, for all layers."""
        size, device = self.block_size, self.k.device
        num_decodes = len(list(takewhile(lambda new: new == 1, query_lens)))
        slots = [
            slot
            for table, new, n in zip(block_tables, query_lens, seq_lens, strict=True)
            for slot in slot_mapping(table, size, n - new, n)
        ]
        # A table may be longer than its sequence: only the blocks in use are read.
        tables = [t[: blocks_needed(n, size)] for t, n in zip(block_tables, seq_lens, strict=True)]
        widest = max(map(len, tables[:num_decodes]), default=0)
        padded = [table + [0] * (widest - len(table)) for table in tables[:num_decodes]]
        return PagedMetadata(
            query_lens,
            seq_lens,
            slot_mapping=torch.tensor(slots, device=device),
            num_decodes=num_decodes,
            decode_blocks=torch.tensor(padded, device=device),
            decode_mask=decode_mask(seq_lens[:num_decodes], widest * size).to(device),
            chunk_blocks=[torch.tensor(table, device=device) for table in tables[num_decodes:]],
        )

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write the new tokens' K/V `[num_tokens, num_kv_heads, head_dim]` to their slots."""
        self.k[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.v[layer].flatten(0, 1).index_copy_(0, slots, v)

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of whole blocks, in the table's order: `[..., tokens, num_kv_heads, head_dim]`.

        Whole blocks, since copying a few long runs is faster than many short ones.
        """
        shape = (*blocks.shape[:-1], blocks.shape[-1] * self.block_size, *self.k.shape[-2:])
        k, v = (
            pool[layer].flatten(1).index_select(0, blocks.flatten()).view(shape)
            for pool in (self.k, self.v)
        )
        return k, v

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        assert isinstance(metadata, PagedMetadata)
        self.store(layer, k, v, metadata.slot_mapping)
        outs, n = [], metadata.num_decodes
        if n:
            keys, values = self.gather(layer, metadata.decode_blocks)
            outs.append(decode_attention(q[:n], keys, values, metadata.decode_mask))
        chunks = zip(q[n:].split(metadata.query_lens[n:]), metadata.chunk_blocks, metadata.seq_lens[n:], strict=True)
        for chunk, blocks, seq_len in chunks:
            keys, values = self.gather(layer, blocks)
            outs.append(causal_attention(chunk, keys[:seq_len], values[:seq_len]))
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
