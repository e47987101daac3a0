"""Stage 9. Filters and logprobs after a step of stage 8, on the device, without waiting for it.

The recorded step is as it was: it takes the best token of every request, or draws one from all.
For requests that ask for more, what follows the last layer is done again: the scores of those rows
are computed, filtered and drawn from, and the new tokens take the place of the step's own before
anybody reads them, the next step among them.

What is done with the scores is some 40 launches, which, for one request, take the host longer than
the device. So it is a graph, too, or rather one for each of a few numbers of rows. Requests go
through in slices.

Nothing here may ask the device for a value, as `.item()` or an index of bools does: that would
wait for the step. Inputs come from pinned memory and results go to it, in two copies that take
turns (see `StepBuffer`).

Knows: rows of a step. Does not know: what the step was, how it ran.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanoteach.cuda_graphs import Record, Recorded
from nanoteach.sampling_filters import Rules, Scores, columns, pick, read
from nanoteach.sequence import Sequence
from nanoteach.step_inputs import bucket, sizes_up_to
from nanoteach.types import MAX_LOGPROBS, Logprob, SamplingParams

if TYPE_CHECKING:
    from nanoteach.fused_decoder import FusedDecoder
    from nanoteach.plain_decoder import PlainDecoder

SIZES = (1, 4, 16, 32)
"""Rows that a graph is recorded for. What lies around for a row is many times its scores."""
SLICE = SIZES[-1]


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
        # What the graphs read: a slice of these numbers, and its rows of the last layer.
        self.sizes = sizes_up_to(SIZES, min(SLICE, max_num_seqs))
        self.slice_whole = torch.zeros(4, SLICE, dtype=torch.int64, device=self.device)
        self.slice_others = torch.zeros(2, SLICE, device=self.device)
        shape = (SLICE, decoder.config.hidden_size)
        self.hidden = torch.zeros(shape, dtype=decoder.model.dtype, device=self.device)
        self.recorded: dict[int, Recorded[tuple[Tensor, Scores]]] = {}

    def run(self, size: int) -> tuple[Tensor, Scores]:
        """The tokens of the first rows of the slice, int32 `[size]`, and their scores."""
        logits = self.decoder.model.logits(self.hidden[:size])
        rules = Rules(*self.slice_whole[1:, :size], *self.slice_others[:, :size])
        tokens, scores = pick(logits, rules, self.decoder.race)
        return tokens.int(), scores

    def capture(self, record: Record) -> None:
        """Record `run` for every size, the largest first."""
        for size in reversed(self.sizes):
            self.recorded[size] = record(partial(self.run, size))

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
        whole_there, others_there = (
            host[turn].to(self.device, non_blocking=True) for host in (self.whole, self.others)
        )
        counts = [seq.params.logprobs for seq in seqs]
        wanted = any(count is not None for count in counts)
        for start in range(0, len(rows), SLICE):
            part = slice(start, min(start + SLICE, len(rows)))
            count = part.stop - start
            self.slice_whole[:, :count].copy_(whole_there[:, part])
            self.slice_others[:, :count].copy_(others_there[:, part])
            places = self.slice_whole[0, :count]
            torch.index_select(hidden, 0, places, out=self.hidden[:count])
            recorded = self.recorded.get(bucket(self.sizes, count) or 0)
            tokens, scores = recorded.replay() if recorded else self.run(count)
            self.decoder.sampled.index_copy_(0, places, tokens[:count])
            if wanted:
                for host, column in zip(self.scores[turn], scores, strict=True):
                    host[part].copy_(column[:count], non_blocking=True)
        if not wanted:
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
