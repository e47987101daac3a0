"""Stage 7. Attention tile by tile: the score matrix of a long history never exists.

Softmax needs the largest score and the sum of all exponentials, so it seems to need all scores at
once. It does not (online softmax, Milakov & Gimelshein, 2018; FlashAttention, Dao et al., 2022).
Read the keys in tiles, and keep three things for each row: the largest score so far, the sum of
exponentials measured from it, and the weighted sum of V. When a tile brings a larger score, the two
sums are scaled down to it. Two halves of a history can be done apart and added up in the same way
(split-KV: Flash-Decoding, Dao et al., 2023).

Here it is in plain PyTorch, the programs of triton_attention.py one after the other: to be read,
and to run where there is no GPU. It is slow.

Knows: how the work of a step is cut, and what each piece computes. Does not know: Triton, GPUs.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from nanoteach.config import ModelConfig
from nanoteach.model import AttentionMetadata
from nanoteach.paged_attention import PagedAttention, count_decodes, padded

TILE_KEYS = 64
"""Tokens of the history in one tile."""
TILE_ROWS = 128
"""Rows of queries in one tile of a prompt: new tokens times the query heads of a K/V head."""
SMALL_TILE_ROWS, SMALL_STEP = 64, 1024
"""The rows in steps of up to so many tokens: large tiles would be too few programs to fill a GPU.
240 tokens after 1,800, and 16 decodes: 3.4 ms a step in small tiles, 4.1 in large ones (H200)."""
MAX_SPLITS = 32


class Running(NamedTuple):
    """What is known of a softmax after some of its scores, for each row.

    largest, total: `[..., rows]`; weighted: `[..., rows, head_dim]`.
    """

    largest: Tensor
    total: Tensor
    weighted: Tensor


def attend_tile(running: Running, scores: Tensor, values: Tensor) -> Running:
    """The running softmax, one tile further.

    scores: `[..., rows, keys]`, -inf where a row must not look; values: `[..., keys, head_dim]`.
    """
    largest = torch.maximum(running.largest, scores.amax(-1))
    rescale = torch.exp(running.largest - largest)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    return Running(
        largest,
        running.total * rescale + weights.sum(-1),
        running.weighted * rescale.unsqueeze(-1) + weights @ values,
    )


def combine(outs: Tensor, log_sums: Tensor) -> Tensor:
    """One result from those of several splits.

    outs: each split's own softmax-weighted V, `[splits, ..., rows, head_dim]`; log_sums: the
    logarithm of each split's sum of exponentials, `[splits, ..., rows]`, -inf for an empty one.
    """
    weights = torch.softmax(log_sums, dim=0)
    return (outs * weights.unsqueeze(-1)).sum(0)


def choose_splits(num_seqs: int, num_kv_heads: int, longest: int) -> int:
    """Into how many parts a decode's history is cut: enough programs to fill a GPU, 4 an SM."""
    splits = 1
    while (
        splits < MAX_SPLITS
        and num_seqs * num_kv_heads * splits * 2 <= 528
        and splits * TILE_KEYS < longest
    ):
        splits *= 2
    return splits


def tile_rows(num_tokens: int) -> int:
    """Rows of queries in one tile of a prompt, in a step of `num_tokens` new tokens."""
    return SMALL_TILE_ROWS if num_tokens <= SMALL_STEP else TILE_ROWS


def tile_tokens(config: ModelConfig, rows: int = TILE_ROWS) -> int:
    """New tokens in one tile: its rows are these times the query heads of a K/V head."""
    group = config.num_heads // config.num_kv_heads
    return rows // (1 << (group - 1).bit_length())  # the next power of two


def tiles_of(query_lens: list[int], first_seq: int, tile_tokens: int) -> list[tuple[int, int]]:
    """(sequence, its first new token) of every tile of `tile_tokens` new tokens."""
    return [
        (seq, start)
        for seq, query_len in enumerate(query_lens, first_seq)
        for start in range(0, query_len, tile_tokens)
    ]


@dataclass(frozen=True)
class TiledMetadata(AttentionMetadata):
    """A step's tables, int32. Decodes come first.

    slot_mapping: `[num_tokens]`, where each new token's K/V go; tables: `[num_seqs, most blocks]`;
    lengths: `[num_seqs]`, the new tokens among them; decode_lens: `[num_decodes]`, the first of
    these; query_starts: `[num_seqs + 1]`; tile_seqs, tile_starts: `[tiles]`, see `tiles_of`;
    tile_rows: of each tile; splits: of a decode's history.
    """

    slot_mapping: Tensor
    tables: Tensor
    lengths: Tensor
    decode_lens: Tensor
    query_starts: Tensor
    tile_seqs: Tensor
    tile_starts: Tensor
    tile_rows: int
    splits: int


class TiledAttention(PagedAttention):
    """Attention that reads K and V where they lie: nothing is gathered, whatever the step mixes."""

    def plan(  # type: ignore[override]
        self, query_lens: list[int], seq_lens: list[int], block_tables: list[list[int]]
    ) -> TiledMetadata:
        """See `PagedAttention.plan`."""
        int32 = partial(torch.tensor, dtype=torch.int32, device=self.k.device)
        num_decodes, rows = count_decodes(query_lens), tile_rows(sum(query_lens))
        tiles = tiles_of(query_lens[num_decodes:], num_decodes, tile_tokens(self.config, rows))
        return TiledMetadata(
            query_lens,
            seq_lens,
            slot_mapping=self.slots(query_lens, seq_lens, block_tables),
            tables=int32(padded(block_tables)),
            lengths=int32(seq_lens),
            decode_lens=int32(seq_lens[:num_decodes]),
            query_starts=int32([0, *accumulate(query_lens)]),
            tile_seqs=int32([seq for seq, _ in tiles]),
            tile_starts=int32([start for _, start in tiles]),
            tile_rows=rows,
            splits=choose_splits(num_decodes, self.k.shape[-2], max(seq_lens)),
        )

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        assert isinstance(metadata, TiledMetadata)
        out, m = torch.zeros_like(q), metadata
        real = m.slot_mapping >= 0  # what pads a step has no slot, no length and no sequence
        self.store(layer, k[real], v[real], m.slot_mapping[real].long())
        starts = m.query_starts.tolist()
        for seq, seq_len in enumerate(m.decode_lens.tolist()):
            if seq_len == 0:
                continue
            tiles = -(-seq_len // TILE_KEYS)
            width = -(-tiles // m.splits) * TILE_KEYS
            splits = [
                self.walk(layer, q[seq : seq + 1], m.tables[seq], seq_len - 1, begin, begin + width)
                for begin in range(0, seq_len, width)
            ]
            outs, log_sums = (torch.stack(part) for part in zip(*splits, strict=True))
            out[seq] = combine(outs, log_sums).view(q.shape[1:])
        for seq, first in zip(m.tile_seqs.tolist(), m.tile_starts.tolist(), strict=True):
            if seq < 0:
                continue
            begin = starts[seq] + first
            end = min(begin + tile_tokens(self.config, m.tile_rows), starts[seq + 1])
            position = int(m.lengths[seq]) - (starts[seq + 1] - begin)
            rows, _ = self.walk(
                layer, q[begin:end], m.tables[seq], position, 0, position + end - begin
            )
            heads = rows.unflatten(1, (end - begin, -1)).transpose(0, 1)  # tokens, K/V heads, group
            out[begin:end] = heads.flatten(1, 2)
        return out

    def walk(
        self, layer: int, q: Tensor, table: Tensor, position: int, begin: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """One program for each K/V head: some new tokens against the keys `begin` to `end - 1`.

        q: `[tokens, num_heads, head_dim]`, the first of them at `position`. Returns the result
        `[num_kv_heads, rows, head_dim]` and log sums; a row is a token and a head of the group.
        """
        num_kv_heads, head_dim = self.k.shape[-2:]
        tokens, end = len(q), min(end, position + len(q))
        rows = q.float().unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        positions = torch.arange(position, position + tokens, device=q.device)
        positions = positions.repeat_interleave(rows.shape[1] // tokens)
        shape = rows.shape[:2]
        running = Running(
            rows.new_full(shape, float("-inf")), rows.new_zeros(shape), torch.zeros_like(rows)
        )
        for start in range(begin, end, TILE_KEYS):
            keys_at = torch.arange(start, min(start + TILE_KEYS, end), device=q.device)
            places = table[keys_at // self.block_size] * self.block_size + keys_at % self.block_size
            keys, values = (
                pool[layer].flatten(0, 1).index_select(0, places).transpose(0, 1).float()
                for pool in (self.k, self.v)
            )
            scores = rows @ keys.transpose(1, 2) / head_dim**0.5
            scores = scores.masked_fill(keys_at > positions[:, None], float("-inf"))
            running = attend_tile(running, scores, values)
        out = (running.weighted / running.total.unsqueeze(-1)).to(q.dtype)
        return out, running.largest + running.total.log()
