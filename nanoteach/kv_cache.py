"""Stage 2. Keep every token's keys and values, and compute only what is new.

A row of the cache belongs to one request and is reserved up to the longest length that the request
could reach. A batch of rows starts together and ends together, when its longest request is done.

Knows: rows, how to append to them and attend over them, the static batch. Does not know: pages,
queues.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoteach.config import ModelConfig
from nanoteach.cost_model import Clock, WallClock, Work
from nanoteach.model import AttentionMetadata, Decoder, causal_attention
from nanoteach.sampler import greedy
from nanoteach.types import SamplingParams, prepare_batch


def decode_mask(seq_lens: list[int], width: int) -> Tensor:
    """True where row i has a token: `[rows, width]`.

    A decode step has one query a row, the newest token, which sees its whole row. (SDPA's
    `is_causal` would be wrong here: with one query it sees key 0 alone.)
    """
    return torch.arange(width) < torch.tensor(seq_lens)[:, None]


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One new token a row: q `[rows, num_heads, head_dim]`.

    k and v `[rows, longest, num_kv_heads, head_dim]`, mask `[rows, longest]`. The query heads that
    share a K/V head stand where SDPA expects the queries, so K/V are read once and never copied.
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    out = F.scaled_dot_product_attention(
        q.reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask[:, None, None, :],
    )
    return out.reshape(rows, num_heads, head_dim)


@dataclass(frozen=True)
class ContiguousMetadata(AttentionMetadata):
    """Where the new tokens go, and what a decode step may see.

    slot_mapping: `[num_tokens]`, row * row length + position; mask: `[rows, longest]`.
    """

    slot_mapping: Tensor
    mask: Tensor


class BatchCache(Protocol):
    """What a static batch asks of its cache: plan a step, attend in it, let go at the end."""

    def fits(self, lengths: list[int]) -> bool:
        """Whether requests that grow to these lengths can be a batch."""
        ...

    def plan(self, query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
        """Find room for the step's new tokens: row i grows to `seq_lens[i]`."""
        ...

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        ...

    def release(self) -> None:
        """Forget every row."""
        ...


class ContiguousKVCache:
    """K/V of `rows` requests, each with room for `row_len` tokens, used or not."""

    def __init__(
        self, config: ModelConfig, rows: int, row_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows = rows
        self.row_len = row_len
        shape = (config.num_layers, rows * row_len, config.num_kv_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def fits(self, lengths: list[int]) -> bool:
        """See `BatchCache.fits`. A row is a row, however short its request."""
        return len(lengths) <= self.rows and max(lengths) <= self.row_len

    def plan(self, query_lens: list[int], seq_lens: list[int]) -> ContiguousMetadata:
        """See `BatchCache.plan`."""
        slots = [
            row * self.row_len + position
            for row, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True))
            for position in range(length - new, length)
        ]
        device = self.k.device
        return ContiguousMetadata(
            query_lens,
            seq_lens,
            slot_mapping=torch.tensor(slots, device=device),
            mask=decode_mask(seq_lens, max(seq_lens)).to(device),
        )

    def append(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Write the new tokens' K/V `[num_tokens, num_kv_heads, head_dim]` to their slots."""
        self.k[layer].index_copy_(0, slot_mapping, k)
        self.v[layer].index_copy_(0, slot_mapping, v)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        assert isinstance(metadata, ContiguousMetadata)
        self.append(layer, k, v, metadata.slot_mapping)
        seq_lens = metadata.seq_lens
        keys, values = (x[layer].unflatten(0, (-1, self.row_len)) for x in (self.k, self.v))
        if len(seq_lens) == len(q):  # one new token a row: all rows at once
            rows, longest = metadata.mask.shape
            return decode_attention(
                q, keys[:rows, :longest], values[:rows, :longest], metadata.mask
            )
        parts = zip(q.split(metadata.query_lens), keys, values, seq_lens, strict=False)
        return torch.cat([causal_attention(qi, ki[:n], vi[:n]) for qi, ki, vi, n in parts])

    def release(self) -> None:
        """Nothing to do: rows are overwritten by the next batch."""


class StaticBatchGenerator:
    """Batches of up to `max_num_seqs` requests, each batch from start to end before the next."""

    def __init__(
        self,
        model: Decoder,
        cache: BatchCache,
        max_num_seqs: int,
        eos_token_ids: SequenceOf[int] = (),
        clock: Clock | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len or model.max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.clock = clock or WallClock()

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[list[int]]:
        """The tokens generated after each prompt (prompts are token ids)."""
        vocab_size = self.model.config.vocab_size
        settled = prepare_batch(prompts, params, vocab_size, self.max_model_len)
        batches = self.batches(prompts, settled)
        return list(chain(*(self.generate_batch(prompts[b], settled[b]) for b in batches)))

    def batches(
        self, prompts: SequenceOf[SequenceOf[int]], params: SequenceOf[SamplingParams]
    ) -> list[slice]:
        """Cut the requests, in their order, into batches that the cache can hold to the end."""
        cuts, lengths = [0], list[int]()
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            # The last token that is sampled is never computed, so it needs no place.
            length = len(prompt) + (p.max_tokens or 1) - 1
            if not self.cache.fits([length]):
                raise ValueError(
                    f"{len(prompt)} prompt tokens and max_tokens = {p.max_tokens} do not fit into "
                    "the KV cache: shorten the prompt, lower max_tokens, or enlarge the cache"
                )
            if len(lengths) == self.max_num_seqs or not self.cache.fits([*lengths, length]):
                cuts.append(i)
                lengths = []
            lengths.append(length)
        return [slice(a, b) for a, b in pairwise([*cuts, len(prompts)])]

    def generate_batch(
        self, prompts: SequenceOf[SequenceOf[int]], params: SequenceOf[SamplingParams]
    ) -> list[list[int]]:
        """One batch: the prompts in one packed step, then a token a row until all are done.

        A row that is done stays as it is: its last token is computed again in every step, for
        nothing.
        """
        rows = [list(prompt) for prompt in prompts]
        outputs: list[list[int]] = [[] for _ in prompts]
        running = set(range(len(rows)))
        try:
            query_lens = [len(row) for row in rows]
            while running:
                tokens = self.step(rows, query_lens)
                for i in sorted(running):
                    outputs[i].append(tokens[i])
                    if params[i].finish_reason(tokens[i], len(outputs[i]), self.eos_token_ids):
                        running.remove(i)
                    else:
                        rows[i].append(tokens[i])
                query_lens = [1] * len(rows)
        finally:
            self.cache.release()
        return outputs

    @torch.inference_mode()
    def step(self, rows: list[list[int]], query_lens: list[int]) -> list[int]:
        """The next token of every row, from its last `query_lens[i]` tokens and its cache."""
        device, seq_lens = self.model.device, [len(row) for row in rows]
        spans = [range(n - new, n) for new, n in zip(query_lens, seq_lens, strict=True)]
        hidden = self.model.forward(
            torch.tensor(
                [row[i] for row, span in zip(rows, spans, strict=True) for i in span], device=device
            ),
            torch.tensor([i for span in spans for i in span], device=device),
            self.cache,
            self.cache.plan(query_lens, seq_lens),
        )
        last = torch.tensor(query_lens, device=device).cumsum(0) - 1
        tokens: list[int] = greedy(self.model.logits(hidden.index_select(0, last))).tolist()
        self.clock.tick([Work(len(span), span.start) for span in spans])
        return tokens
