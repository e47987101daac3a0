"""Stage 7. The backend `triton`: the pool of stage 3, and the kernels of triton_attention.py.

Knows: a step's tables as tensors. Does not know: how attention is computed.
"""

from dataclasses import dataclass
from itertools import accumulate, takewhile

import torch
import triton
from torch import Tensor

from nanoteach.block_manager import slot_mapping
from nanoteach.config import ModelConfig
from nanoteach.model import AttentionMetadata
from nanoteach.paged_attention import PagedAttention
from nanoteach.triton_attention import chunk_attention, decode_attention

TILE_ROWS = 128
MAX_SPLITS = 32


@dataclass(frozen=True)
class TritonMetadata(AttentionMetadata):
    """A step's tables, int32, for `decode_attention` and `chunk_attention`. Decodes come first.

    decode_lens: `[num_decodes]`; splits: of a decode's history.
    """

    slot_mapping: Tensor
    tables: Tensor
    lengths: Tensor
    decode_lens: Tensor
    query_starts: Tensor
    tile_seqs: Tensor
    tile_starts: Tensor
    splits: int


def choose_splits(num_seqs: int, num_kv_heads: int, longest: int) -> int:
    """Into how many parts a decode's history is cut: enough programs to fill a GPU, 4 an SM."""
    splits = 1
    while (
        splits < MAX_SPLITS
        and num_seqs * num_kv_heads * splits * 2 <= 528
        and splits * 64 < longest
    ):
        splits *= 2
    return splits


def tile_tokens(config: ModelConfig) -> int:
    """New tokens in one tile: its rows are these times the query heads of a K/V head."""
    return TILE_ROWS // int(triton.next_power_of_2(config.num_heads // config.num_kv_heads))


def tiles_of(query_lens: list[int], first_seq: int, tile_tokens: int) -> list[tuple[int, int]]:
    """(sequence, its first new token) of every tile of `tile_tokens` new tokens."""
    return [
        (seq, start)
        for seq, query_len in enumerate(query_lens, first_seq)
        for start in range(0, query_len, tile_tokens)
    ]


class TritonAttention(PagedAttention):
    """Attention that reads K and V where they lie: nothing is gathered, whatever the step mixes."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, num_blocks, block_size, dtype, device)
        self.tile_tokens = tile_tokens(config)

    def plan(  # type: ignore[override]
        self, query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]]
    ) -> TritonMetadata:
        """See `PagedAttention.plan`."""
        device, widest = self.k.device, max(map(len, block_tables))
        num_decodes = len(list(takewhile(lambda new: new == 1, query_lens)))
        slots = [
            slot
            for table, new, n in zip(block_tables, query_lens, seq_lens, strict=True)
            for slot in slot_mapping(table, self.block_size, n - new, n)
        ]
        tiles = tiles_of(query_lens[num_decodes:], num_decodes, self.tile_tokens)

        def int32(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return TritonMetadata(
            query_lens,
            seq_lens,
            slot_mapping=torch.tensor(slots, device=device),
            tables=int32([table + [0] * (widest - len(table)) for table in block_tables]),
            lengths=int32(seq_lens),
            decode_lens=int32(seq_lens[:num_decodes]),
            query_starts=int32([0, *accumulate(query_lens)]),
            tile_seqs=int32([seq for seq, _ in tiles]),
            tile_starts=int32([start for _, start in tiles]),
            splits=choose_splits(num_decodes, self.k.shape[-2], max(seq_lens)),
        )

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        assert isinstance(metadata, TritonMetadata)
        self.store(layer, k, v, metadata.slot_mapping)
        q, m = q.contiguous(), metadata
        out = torch.empty_like(q)
        n, splits = len(m.decode_lens), m.splits
        k_pool, v_pool = self.k[layer], self.v[layer]
        if n:
            rows = (n, q.shape[1], splits)
            workspace = (
                q.new_empty((*rows, q.shape[2]), dtype=torch.float32),
                q.new_empty(rows, dtype=torch.float32),
            )
            decode_attention(
                q[:n], k_pool, v_pool, m.tables, m.decode_lens, out[:n], splits, workspace
            )
        if len(m.tile_seqs):
            chunk_attention(
                q, k_pool, v_pool, m.tables, m.query_starts, m.lengths, m.tile_seqs,
                m.tile_starts, out, block_m=TILE_ROWS,
            )  # fmt: skip
        return out
