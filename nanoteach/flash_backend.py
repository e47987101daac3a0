"""Stage 7. The backend `flash_attn`: the pool of stage 3, and the library flash-attn's kernels.

Knows: a step's tables as the library takes them. Does not know: how attention is computed, or
whether this model and this machine suit the library (stages.py asks before it builds one).
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from nanoteach.model import AttentionMetadata
from nanoteach.paged_attention import PagedAttention, count_decodes, padded


@dataclass(frozen=True)
class FlashMetadata(AttentionMetadata):
    """A step's tables and lengths, int32. Decodes come first, then chunks.

    decode_tables: `[num_decodes, most blocks]`; decode_lens: `[num_decodes]`;
    chunk_tables: `[num_chunks, most blocks]`, or None where no chunk has a history;
    query_starts, key_starts: `[num_chunks + 1]`, where each chunk's new tokens and its whole
    sequence begin, counted from the first chunk; longest_query, longest_key: the most of each.
    """

    slot_mapping: Tensor
    decode_tables: Tensor
    decode_lens: Tensor
    chunk_tables: Tensor | None
    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int


class FlashAttention(PagedAttention):
    """Attention by the library: one call for the decodes, one for the chunks."""

    def plan(  # type: ignore[override]
        self, query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]]
    ) -> FlashMetadata:
        """See `PagedAttention.plan`."""
        tables, num_decodes = self.tables_in_use(block_tables, seq_lens), count_decodes(query_lens)
        int32 = partial(torch.tensor, dtype=torch.int32, device=self.k.device)
        news, lens = query_lens[num_decodes:], seq_lens[num_decodes:]
        return FlashMetadata(
            query_lens,
            seq_lens,
            slot_mapping=self.slots(query_lens, seq_lens, block_tables),
            # Two tables: a long prompt must not widen that of the decodes, whose histories the
            # library cuts into parts by its width.
            decode_tables=int32(padded(tables[:num_decodes])),
            decode_lens=int32(seq_lens[:num_decodes]),
            chunk_tables=None if news == lens else int32(padded(tables[num_decodes:])),
            query_starts=int32([0, *accumulate(news)]),
            key_starts=int32([0, *accumulate(lens)]),
            longest_query=max(news, default=0),
            longest_key=max(lens, default=0),
        )

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        assert isinstance(metadata, FlashMetadata)
        self.store(layer, k, v, metadata.slot_mapping)
        m, n = metadata, len(metadata.decode_lens)
        outs: list[Tensor] = []
        k_pool, v_pool = self.k[layer], self.v[layer]
        if n:
            out = flash_attn_with_kvcache(
                q[:n, None], k_pool, v_pool, cache_seqlens=m.decode_lens,
                block_table=m.decode_tables, causal=True,
            )  # fmt: skip
            outs.append(out[:, 0])
        if n < len(q):
            # Without a history, all the keys are among the step's own: no need for the pool.
            keys, values = (k[n:], v[n:]) if m.chunk_tables is None else (k_pool, v_pool)
            # Where a chunk has fewer queries than keys, `causal` lines up the last of each.
            out = flash_attn_varlen_func(
                q[n:], keys, values, m.query_starts, m.key_starts, m.longest_query,
                m.longest_key, causal=True, block_table=m.chunk_tables,
            )  # fmt: skip
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs)
