"""Stage 8. The decoder of stage 1 in few kernels: six a layer for one token, ten for many.

The arithmetic is the same; what changes is how often a value goes to memory and back, and how many
launches that takes. With very few tokens a matrix product is limited by reading its weights, and
our own (`thin_linear`) reads them faster than cuBLAS; with more, cuBLAS wins.

Knows: the order of the kernels. Does not know: requests, blocks, graphs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoteach.kernels.embed import embed
from nanoteach.kernels.rms_norm import add_rms_norm
from nanoteach.kernels.rope_attention import rope_attention
from nanoteach.kernels.rope_store import rope_store
from nanoteach.kernels.sample import lm_head_and_sample, sample
from nanoteach.kernels.silu_and_mul import silu_and_mul
from nanoteach.kernels.thin_linear import few_linear, thin_linear
from nanoteach.model import Decoder, LayerWeights, rope_table
from nanoteach.paged_attention import PagedAttention
from nanoteach.step_inputs import StepInputs
from nanoteach.tiled_attention import MAX_SPLITS
from nanoteach.triton_attention import chunk_attention, decode_attention
from nanoteach.triton_launch import has_dependent_launch

THIN = 8
"""Most tokens for which our own products beat cuBLAS's."""
FUSED = 4
"""Most tokens for which one kernel for rotary, store and attention beats two."""
CHUNK_SPLITS, SPLIT_STEP = 2, 512
"""Into how many parts a chunk's history is cut, in steps of up to so many tokens: a few tiles after
a long history are too few programs to fill a GPU. 240 tokens after 2,640, and 16 decodes: 2.5 ms a
step in two parts, 3.4 in one, 2.3 in four; after 480 tokens 1.8, 1.9 and 2.0 (H200)."""
ONE = {"qkv": (2, 2), "output": (4, 4), "gate_up": (4, 2), "down": (4, 4)}
FEW = {"qkv": (16, 8), "output": (8, 4), "gate_up": (16, 8), "down": (8, 4)}
"""Rows of the weight a program, and warps: the fastest of those tried, in the chain (H200)."""


class FusedDecoder:
    """Runs a step from token ids to sampled tokens, all of it on the device."""

    def __init__(self, model: Decoder, pool: PagedAttention, max_num_seqs: int) -> None:
        self.model, self.config, self.weights = model, model.config, model.weights
        self.pool = pool
        # `few_linear` norms a row that is one chunk of 1,024 at most.
        self.thin = THIN if model.config.hidden_size <= 1024 else 1
        device = model.device
        cos, sin = rope_table(model.config, model.max_model_len)
        self.cos, self.sin = cos.squeeze(1).to(device), sin.squeeze(1).to(device)
        self.sampled = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.pdl = device.type == "cuda" and has_dependent_launch()
        # For the splits of decodes, and after them in the same layer for those of chunks.
        parts = max(max_num_seqs * MAX_SPLITS, SPLIT_STEP * CHUNK_SPLITS)
        rows = (parts, model.config.num_heads)
        self.partial = torch.empty(*rows, model.config.head_dim, device=device)
        self.partial_lse = torch.empty(rows, device=device)

    def run(self, step: StepInputs) -> Tensor:
        """One step; its tokens are in `sampled` afterwards.

        What is returned comes from the last layer for each sample, `[num_samples, hidden_size]`.
        """
        num_tokens = len(step.input_ids)
        thin = step.decodes_only and num_tokens <= self.thin
        hidden = self.thin_layers(step) if thin else self.layers(step)
        if not step.decodes_only:
            hidden = hidden.index_select(0, step.logit_indices)
        w, eps, out = self.weights, self.config.rms_norm_eps, self.sampled[: len(hidden)]
        race = (step.seeds, step.sample_positions, step.temperatures, out)
        if len(hidden) == 1:
            lm_head_and_sample(hidden, w.lm_head, w.norm, eps, *race, self.pdl)
        else:
            x = add_rms_norm(hidden, None, w.norm, eps, self.pdl)
            sample(F.linear(x, w.lm_head), *race, self.pdl)
        return hidden

    def race(
        self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
    ) -> Tensor:
        """As `sampler.race`, without waiting for anything: tokens, int32 `[rows]`."""
        tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        sample(logits, seeds.int(), positions.int(), temperatures, tokens)
        return tokens

    def thin_layers(self, step: StepInputs) -> Tensor:
        """Few tokens: each product in one kernel with what comes before and after it."""
        eps, pdl = self.config.rms_norm_eps, self.pdl
        linear, shape = (thin_linear, ONE) if len(step.input_ids) == 1 else (few_linear, FEW)
        hidden = embed(step.input_ids, self.sampled, self.weights.embedding, pdl)
        for layer, w in enumerate(self.weights.layers):
            qkv = linear(
                hidden, w.qkv, w.qkv_bias, shape["qkv"], norm=w.input_norm, eps=eps, pdl=pdl
            )
            x = self.attend(layer, w, qkv, step)
            hidden = linear(x, w.output, w.output_bias, shape["output"], residual=hidden, pdl=pdl)
            x = linear(
                hidden, w.gate_up, None, shape["gate_up"], norm=w.post_norm, eps=eps, silu=True,
                pdl=pdl,
            )  # fmt: skip
            hidden = linear(x, w.down, None, shape["down"], residual=hidden, pdl=pdl)
        return hidden

    def layers(self, step: StepInputs) -> Tensor:
        """Many tokens: cuBLAS, and between its products one kernel each."""
        eps, pdl = self.config.rms_norm_eps, self.pdl
        hidden = embed(step.input_ids, self.sampled, self.weights.embedding, pdl)
        x = add_rms_norm(hidden, None, self.weights.layers[0].input_norm, eps, pdl)
        for layer, w in enumerate(self.weights.layers):
            attended = self.attend(layer, w, F.linear(x, w.qkv, w.qkv_bias), step)
            x = F.linear(attended, w.output, w.output_bias)
            x = add_rms_norm(x, hidden, w.post_norm, eps, pdl)
            x = F.linear(silu_and_mul(F.linear(x, w.gate_up), pdl), w.down)
            if layer + 1 < len(self.weights.layers):
                x = add_rms_norm(x, hidden, self.weights.layers[layer + 1].input_norm, eps, pdl)
        return hidden.add_(x)

    def attend(self, layer: int, w: LayerWeights, qkv: Tensor, step: StepInputs) -> Tensor:
        """Attention `[num_tokens, num_heads * head_dim]` from the rows of the QKV product."""
        k_pool, v_pool, n = self.pool.k[layer], self.pool.v[layer], len(step.decode_lens)
        out = qkv.new_empty(len(qkv), self.config.num_heads, self.config.head_dim)
        workspace = (self.partial, self.partial_lse)
        if step.decodes_only and n <= FUSED:
            rope_attention(
                qkv, w.qk_norm, self.cos, self.sin, k_pool, v_pool, step.tables, step.decode_lens,
                step.slots, out, self.config.rms_norm_eps, step.splits, workspace, self.pdl,
            )  # fmt: skip
            return out.flatten(1)
        q = rope_store(
            qkv, w.qk_norm, step.positions, step.slots, self.cos, self.sin, k_pool, v_pool,
            self.config.num_heads, self.config.rms_norm_eps, self.pdl,
        )  # fmt: skip
        if n:
            decode_attention(
                q[:n], k_pool, v_pool, step.tables, step.decode_lens, out[:n], step.splits,
                workspace, self.pdl,
            )  # fmt: skip
        if not step.decodes_only:
            splits = CHUNK_SPLITS if len(q) <= SPLIT_STEP else 1
            chunk_attention(
                q, k_pool, v_pool, step.tables, step.query_starts, step.seq_lens, step.tile_seqs,
                step.tile_starts, out, splits, workspace, block_m=step.tile_rows,
            )  # fmt: skip
        return out.flatten(1)
