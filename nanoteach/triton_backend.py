"""Stage 7. The backend `triton`: the tiles of tiled_attention.py, by the kernels of
triton_attention.py.

Knows: which kernel serves which part of a step. Does not know: how attention is computed.
"""

import torch
from torch import Tensor

from nanoteach.model import AttentionMetadata
from nanoteach.tiled_attention import TiledAttention, TiledMetadata
from nanoteach.triton_attention import chunk_attention, decode_attention


class TritonAttention(TiledAttention):
    """Two launches a layer: one for all decodes of the step, one for all chunks of prompts."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        assert isinstance(metadata, TiledMetadata)
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
                m.tile_starts, out, block_m=m.tile_rows,
            )  # fmt: skip
        return out
