"""One decoder for the Qwen3, Qwen2 and Llama families, over packed tokens.

Every tensor of activations is `[num_tokens, ...]`: the new tokens of all requests of a step, one
after the other, with no padding. Only attention needs to know which token belongs to whom, so it
is handed in, and so are the other operations (`Ops`) that a later stage can do faster.

Knows: the arithmetic of a transformer layer. Does not know: where K/V live, batches, sampling.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoteach.config import ModelConfig


@dataclass(frozen=True)
class AttentionMetadata:
    """Which of the packed tokens belong to whom. Backends extend it with where K/V live.

    query_lens: new tokens of each sequence, in packed order.
    seq_lens: tokens of each sequence once this step is done (history and new tokens).
    """

    query_lens: list[int]
    seq_lens: list[int]


class AttentionBackend(Protocol):
    """Stores the new tokens' K/V, then attends. Sequences never see each other."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """q `[num_tokens, num_heads, head_dim]`, k and v `[num_tokens, num_kv_heads, head_dim]`.

        Returns a tensor of q's shape.
        """
        ...


@dataclass(frozen=True)
class Ops:
    """The operations of a layer that are neither matrix products nor attention."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Products that read the same input are fused into one matrix.

    qkv: `[q_size + 2 * kv_size, hidden]`; gate_up: `[2 * intermediate, hidden]`;
    qk_norm: `[num_heads + num_kv_heads, head_dim]`, one row for each head of q and k.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """All weights. A tied model has `lm_head is embedding`."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    lm_head: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of x to a mean square of 1, then by `weight` (Zhang and Sennrich, 2019)."""
    x32 = x.float()
    scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (x32 * scale).to(x.dtype) * weight


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians that each pair of dimensions turns by at each position, `[head_dim / 2]`.

    Rotary embedding: Su et al., 2021. With Llama 3's scaling, slow pairs (long wavelengths) are
    slowed further by `factor`, fast ones stay, and those between are blended.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rope_table(config: ModelConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, each `[num_positions, 1, head_dim / 2]`."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = (positions[:, None] * rope_frequencies(config))[:, None, :]
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn dimension i of `[num_tokens, heads, head_dim]` with dimension i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU: silu of the first half times the second (Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


TORCH_OPS = Ops(rms_norm=rms_norm, rotary=apply_rotary, silu_and_mul=silu_and_mul)


def kv_head_map(num_heads: int, num_kv_heads: int) -> list[int]:
    """The K/V head that each query head reads: neighbours share (GQA, Ainslie et al., 2023)."""
    group = num_heads // num_kv_heads
    return [head // group for head in range(num_heads)]


def causal_mask(query_len: int, seq_len: int) -> Tensor:
    """True where query i, the token at `seq_len - query_len + i`, sees key j: `[queries, keys]`."""
    return torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence's attention: q holds its last tokens, k and v all of them.

    q `[query_len, num_heads, head_dim]`, k and v `[seq_len, num_kv_heads, head_dim]`.
    """
    query_len, num_heads, _ = q.shape
    seq_len, num_kv_heads, _ = k.shape
    heads = torch.tensor(kv_head_map(num_heads, num_kv_heads), device=k.device)
    q, k, v = (
        x.transpose(0, 1)[None] for x in (q, k.index_select(1, heads), v.index_select(1, heads))
    )
    if query_len == seq_len:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:  # is_causal would line up the first query with the first key, not the last with the last
        mask = causal_mask(query_len, seq_len).to(q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out[0].transpose(0, 1)


class Decoder:
    """The transformer. `forward` gives hidden states, `logits` turns some of them into scores."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops = TORCH_OPS,
        max_model_len: int | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.max_model_len = max_model_len or config.max_position
        if self.max_model_len > config.max_position:
            raise ValueError(
                f"max_model_len = {max_model_len} is over {config.max_position}, the longest that "
                "this model's positions go"
            )
        cos, sin = rope_table(config, self.max_model_len)
        self.cos, self.sin = cos.to(weights.norm), sin.to(weights.norm)

    @property
    def device(self) -> torch.device:
        """Where the weights are, and the inputs must be."""
        return self.weights.norm.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype, and that of K/V."""
        return self.weights.norm.dtype

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Hidden states `[num_tokens, hidden]` of token ids and positions `[num_tokens]`."""
        config, ops = self.config, self.ops
        eps, num_heads, num_kv_heads = config.rms_norm_eps, config.num_heads, config.num_kv_heads
        num_tokens = input_ids.shape[0]
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        hidden = F.embedding(input_ids, self.weights.embedding)
        for layer, w in enumerate(self.weights.layers):
            x = ops.rms_norm(hidden, w.input_norm, eps)
            qkv = F.linear(x, w.qkv, w.qkv_bias).view(num_tokens, -1, config.head_dim)
            qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
            if w.qk_norm is not None:
                qk = ops.rms_norm(qk, w.qk_norm, eps)
            q, k = ops.rotary(qk, cos, sin).split((num_heads, num_kv_heads), dim=1)
            attended = attention.attend(layer, q, k, v, metadata).reshape(num_tokens, -1)
            hidden = hidden + F.linear(attended, w.output, w.output_bias)

            x = ops.rms_norm(hidden, w.post_norm, eps)
            hidden = hidden + F.linear(ops.silu_and_mul(F.linear(x, w.gate_up)), w.down)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores `[rows, vocab_size]` of the next token after each of the given hidden states."""
        x = self.ops.rms_norm(hidden, self.weights.norm, self.config.rms_norm_eps)
        return F.linear(x, self.weights.lm_head)
