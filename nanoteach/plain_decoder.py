"""Stage 8. A step from token ids to sampled tokens in plain PyTorch, where the kernels can't run.

It takes the place of `FusedDecoder` on a CPU, so that everything around the kernels is the same
there: buffers, padding, promises, the loop that is one step ahead. It is slow.

Knows: a step's inputs, and the decoder of stage 1. Does not know: kernels, graphs.
"""

import torch
from torch import Tensor

from nanoteach.model import Decoder
from nanoteach.sampler import MASK, race
from nanoteach.step_inputs import StepInputs
from nanoteach.tiled_attention import TiledAttention, TiledMetadata


class PlainDecoder:
    """See `FusedDecoder`."""

    def __init__(self, model: Decoder, pool: TiledAttention, max_num_seqs: int) -> None:
        self.model, self.config, self.pool = model, model.config, pool
        self.sampled = torch.zeros(max_num_seqs, dtype=torch.int32, device=model.device)

    @torch.inference_mode()
    def run(self, step: StepInputs) -> Tensor:
        """See `FusedDecoder.run`."""
        promised = self.sampled[(-1 - step.input_ids).clamp(min=0)]
        input_ids = torch.where(step.input_ids < 0, promised, step.input_ids)
        # A step of decodes needs no more than their lengths; its other tables are left empty.
        lengths = step.decode_lens if step.decodes_only else step.seq_lens
        starts = torch.arange(len(input_ids) + 1) if step.decodes_only else step.query_starts
        metadata = TiledMetadata(
            [], [], step.slots, step.tables, lengths, step.decode_lens, starts, step.tile_seqs,
            step.tile_starts, step.tile_rows, step.splits,
        )  # fmt: skip
        hidden = self.model.forward(input_ids, step.positions, self.pool, metadata)
        if not step.decodes_only:
            hidden = hidden.index_select(0, step.logit_indices)
        seeds, positions = step.seeds.long() & MASK, step.sample_positions.long()
        logits = self.model.logits(hidden)
        self.sampled[: len(hidden)] = self.race(logits, step.temperatures, seeds, positions)
        return hidden

    def race(
        self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
    ) -> Tensor:
        """See `FusedDecoder.race`."""
        return race(logits, temperatures, seeds, positions)
