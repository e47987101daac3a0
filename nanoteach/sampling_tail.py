"""Stage 9. Filters and logprobs after a step of stage 8, on the device, without waiting for it.

The recorded step is as it was: it takes the best token of every request, or draws one from all.
For requests that ask for more, what follows the last layer is done again: the scores of those rows
are computed, filtered and drawn from, and the new tokens take the place of the step's own before
anybody reads them, the next step among them.

Nothing here may ask the device for a value, as `.item()` or an index of bools does: that would
wait for the step. Inputs come from pinned memory and results go to it, in two copies that take
turns (see `StepBuffer`).

Knows: rows of a step. Does not know: what the step was, how it ran.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanoteach.sampling_filters import Rules, Scores, columns, pick, read
from nanoteach.sequence import Sequence
from nanoteach.types import MAX_LOGPROBS, Logprob, SamplingParams

if TYPE_CHECKING:
    from nanoteach.fused_decoder import FusedDecoder
    from nanoteach.plain_decoder import PlainDecoder

SLICE = 32
"""Rows at a time. What lies around for a row is many times its scores."""


class SamplingTail:
    """Has a place for every request of a step."""

    def __init__(self, decoder: "FusedDecoder | PlainDecoder", max_num_seqs: int) -> None:
        self.decoder, self.device = decoder, decoder.model.device
        best = min(MAX_LOGPROBS, decoder.config.vocab_size)

        def two(*shape: int, dtype: torch.dtype) -> list[Tensor]:
            pinned = self.device.type == "cuda"
            return [torch.zeros(shape, dtype=dtype, pin_memory=pinned) for _ in range(2)]

        self.whole = two(4, max_num_seqs, dtype=torch.int64)  # rows, then as `columns` has them
        self.others = two(2, max_num_seqs, dtype=torch.float32)
        scores = [
            two(max_num_seqs, 1 + best, dtype=dtype)
            for dtype in (torch.int64, torch.int64, torch.float32)
        ]
        self.scores = [Scores(*turn) for turn in zip(*scores, strict=True)]

    def launch(
        self, turn: int, hidden: Tensor, parts: list[tuple[int, Sequence]]
    ) -> Callable[[], dict[int, dict[int, Logprob]]]:
        """Choose the tokens of some rows of a step anew. The result reads their logprobs, by row.

        hidden: after the last layer, `[num_samples, hidden_size]`. It may be called when the step
        is done and before the turn comes again.
        """
        rows, seqs = [row for row, _ in parts], [seq for _, seq in parts]
        whole, others = columns(seqs)
        self.whole[turn][:, : len(rows)] = torch.tensor([rows, *whole])
        self.others[turn][:, : len(rows)] = torch.tensor(others)
        on_device = [
            host[turn].to(self.device, non_blocking=True) for host in (self.whole, self.others)
        ]
        for start in range(0, len(rows), SLICE):
            stop = min(start + SLICE, len(rows))
            (places, *first), rest = (numbers[:, start:stop] for numbers in on_device)
            logits = self.decoder.model.logits(hidden.index_select(0, places))
            tokens, scores = pick(logits, Rules(*first, *rest), self.decoder.race)
            self.decoder.sampled.index_copy_(0, places, tokens.int())
            for host, column in zip(self.scores[turn], scores, strict=True):
                host[start:stop].copy_(column, non_blocking=True)
        counts = [seq.params.logprobs for seq in seqs]
        if all(count is None for count in counts):
            return dict
        found = Scores(*(host[: len(rows)] for host in self.scores[turn]))

        def logprobs() -> dict[int, dict[int, Logprob]]:
            told = zip(rows, read(found, counts), strict=True)
            return {row: values for row, values in told if values is not None}

        return logprobs

    def try_out(self, hidden: Tensor) -> None:
        """The largest that there can be: its memory is measured by that."""
        params = SamplingParams(temperature=1.0, top_p=0.5, logprobs=MAX_LOGPROBS)
        self.launch(0, hidden, [(row, Sequence("", [0], params)) for row in range(len(hidden))])
