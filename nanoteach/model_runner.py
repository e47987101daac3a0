"""Stage 4. From a decided step to tensors, through the model, to tokens.

Knows: how the new tokens of many requests become one packed batch. Does not know: why these.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from nanoteach.model import Decoder
from nanoteach.paged_attention import PagedAttention
from nanoteach.sampler import MASK, Draw, sample
from nanoteach.scheduler import Scheduled
from nanoteach.sequence import Sequence


@dataclass(frozen=True)
class PackedBatch:
    """The new tokens of all requests, one request after the other, without padding.

    input_ids, positions: `[num_tokens]`; cu_seqlens: `[num_requests + 1]`, request i has the tokens
    `cu_seqlens[i]` to `cu_seqlens[i + 1] - 1`; logit_indices: the last token of each request that
    samples in this step.
    """

    input_ids: list[int]
    positions: list[int]
    cu_seqlens: list[int]
    logit_indices: list[int]


def pack(scheduled: list[Scheduled]) -> PackedBatch:
    """Lay out a step's new tokens."""
    input_ids: list[int] = []
    positions: list[int] = []
    for seq, num_new in scheduled:
        start = seq.num_computed_tokens
        input_ids += seq.token_ids[start : start + num_new]
        positions += range(start, start + num_new)
    cu_seqlens = list(accumulate((num_new for _, num_new in scheduled), initial=0))
    logit_indices = [
        end - 1 for part, end in zip(scheduled, cu_seqlens[1:], strict=True) if part.gives_token
    ]
    return PackedBatch(input_ids, positions, cu_seqlens, logit_indices)


def draw(seq: Sequence) -> Draw:
    """How the request's next token is drawn."""
    return Draw(seq.params.temperature, (seq.params.seed or 0) & MASK, len(seq.token_ids))


def choose(logits: Tensor, seqs: list[Sequence]) -> list[int]:
    """The next token of each request, from scores `[requests, vocab_size]`."""
    tokens: list[int] = sample(logits, [draw(seq) for seq in seqs]).tolist()
    return tokens


class ModelRunner:
    """Runs a step on the model's device. `choose`: how tokens are chosen; stage 9 has another."""

    def __init__(
        self,
        model: Decoder,
        attention: PagedAttention,
        choose: Callable[[Tensor, list[Sequence]], list[int]] = choose,
    ) -> None:
        self.model = model
        self.attention = attention
        self.choose = choose

    @torch.inference_mode()
    def execute(self, scheduled: list[Scheduled]) -> list[int | None]:
        """The next token of each request, or None for one whose tokens are not all computed yet."""
        device, batch = self.model.device, pack(scheduled)
        metadata = self.attention.plan(
            query_lens=[num_new for _, num_new in scheduled],
            seq_lens=[seq.num_computed_tokens + num_new for seq, num_new in scheduled],
            block_tables=[seq.block_table for seq, _ in scheduled],
        )
        hidden = self.model.forward(
            torch.tensor(batch.input_ids, device=device),
            torch.tensor(batch.positions, device=device),
            self.attention,
            metadata,
        )
        if not batch.logit_indices:
            return [None] * len(scheduled)
        last = hidden.index_select(0, torch.tensor(batch.logit_indices, device=device))
        seqs = [part.seq for part in scheduled if part.gives_token]
        tokens = iter(self.choose(self.model.logits(last), seqs))
        return [next(tokens) if part.gives_token else None for part in scheduled]
