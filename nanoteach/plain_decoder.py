"""Stage 8. A step from token ids to sampled tokens in plain PyTorch, where the kernels can't run.

It takes the place of `FusedDecoder` on a CPU, so that everything around the kernels is the same
there: buffers, padding, promises, the loop that is one step ahead. It is slow.

Knows: a step's inputs, and the decoder of stage 1. Does not know: kernels, graphs.
"""

import torch

from nanoteach.model import Decoder
from nanoteach.sampler import MASK, Draw, sample
from nanoteach.step_inputs import StepInputs
from nanoteach.tiled_attention import TiledAttention, TiledMetadata


class PlainDecoder:
    """See `FusedDecoder`."""

    def __init__(self, model: Decoder, pool: TiledAttention, max_num_seqs: int) -> None:
        self.model, self.config, self.pool = model, model.config, pool
        self.sampled = torch.zeros(max_num_seqs, dtype=torch.int32, device=model.device)

    @torch.inference_mode()
    def run(self, step: StepInputs) -> None:
        """One step; its tokens are in `sampled` afterwards."""
        promised = self.sampled[(-1 - step.input_ids).clamp(min=0)]
        input_ids = torch.where(step.input_ids < 0, promised, step.input_ids)
        # A step of decodes needs no more than their lengths; its other tables are left empty.
        lengths = step.decode_lens if step.decodes_only else step.seq_lens
        starts = torch.arange(len(input_ids) + 1) if step.decodes_only else step.query_starts
        metadata = TiledMetadata(
            [], [], step.slots, step.tables, lengths, step.decode_lens, starts, step.tile_seqs,
            step.tile_starts, step.splits,
        )  # fmt: skip
        hidden = self.model.forward(input_ids, step.positions, self.pool, metadata)
        if not step.decodes_only:
            hidden = hidden.index_select(0, step.logit_indices)
        draws = [
            Draw(temperature, seed & MASK, position)
            for temperature, seed, position in zip(
                step.temperatures.tolist(),
                step.seeds.tolist(),
                step.sample_positions.tolist(),
                strict=True,
            )
        ]
        self.sampled[: len(hidden)] = sample(self.model.logits(hidden), draws)
