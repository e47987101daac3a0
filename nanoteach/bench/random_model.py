"""A model with random weights: as fast as a trained one of its shape, and nothing to download.

Knows: shapes. Does not know: checkpoints, tokenizers. What it says is noise, so it proves nothing.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nanoteach import cost_model
from nanoteach.config import ModelConfig
from nanoteach.loader import read_weights
from nanoteach.model import Decoder

SHAPES: Mapping[str, ModelConfig] = {
    **cost_model.SHAPES,
    "toy": ModelConfig(
        family="qwen3", vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=2,
        num_heads=2, num_kv_heads=1, head_dim=64, max_position=8192, rms_norm_eps=1e-6,
        rope_theta=1e6, qk_norm=True, tie_word_embeddings=True,
    ),
}  # fmt: skip


def random_model(
    shape: str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
    seed: int = 0,
) -> Decoder:
    """A decoder of this shape, made on the device: norms are 1, all else is drawn (std 0.02).

    Raises ValueError, which lists SHAPES, for a shape that is not there.
    """
    if shape not in SHAPES:
        raise ValueError(f"no shape is named {shape!r}; these are: {', '.join(SHAPES)}")
    config = SHAPES[shape]
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (config.vocab_size, hidden), "lm_head": (config.vocab_size, hidden),
        "q_proj": (config.q_size, hidden), "k_proj": (config.kv_size, hidden),
        "v_proj": (config.kv_size, hidden), "o_proj": (hidden, config.q_size),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
        "q_norm": (head,), "k_norm": (head,), "norm": (hidden,),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str) -> Tensor:  # in the place of reading: model.layers.0.self_attn.q_proj.bias
        part, kind = name.split(".")[-2:]
        if part.endswith("norm"):
            return torch.ones(sizes[part], device=device, dtype=dtype)
        size = sizes[part][:1] if kind == "bias" else sizes[part]
        return torch.empty(size, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)

    return Decoder(config, read_weights(config, draw), max_model_len=max_model_len)
