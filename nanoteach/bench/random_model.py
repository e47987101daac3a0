"""A model with random weights: as fast as a trained one of its shape, and nothing to download.

Knows: shapes. Does not know: what its tokens mean. What it says is noise, so it proves nothing.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanoteach import cost_model
from nanoteach.config import ModelConfig
from nanoteach.hub import TINY
from nanoteach.loader import Read, read_weights
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
    config = shape_named(shape)
    weights = read_weights(config, drawer(config, torch.device(device), dtype, seed))
    return Decoder(config, weights, max_model_len=max_model_len)


@contextmanager
def random_folder(shape: str, seed: int = 0) -> Iterator[Path]:
    """The same as a model folder, in bfloat16, while the context lasts; with the tokenizer of tiny.

    The tokenizer knows few of the tokens, and the others have no text. There is no end token.
    """
    config = shape_named(shape)
    tensors: dict[str, Tensor] = {}
    draw = drawer(config, torch.device("cpu"), torch.bfloat16, seed)

    def keep(name: str) -> Tensor:
        tensors[name] = draw(name)
        return tensors[name]

    read_weights(config, keep)
    written = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(written))
        save_file(tensors, folder / "model.safetensors")
        for file in TINY.glob("tokenizer*.json"):
            shutil.copy(file, folder)
        yield folder


def shape_named(shape: str) -> ModelConfig:
    """One of SHAPES. Raises ValueError, which lists them, for another."""
    if shape not in SHAPES:
        raise ValueError(f"no shape is named {shape!r}; these are: {', '.join(SHAPES)}")
    return SHAPES[shape]


def drawer(config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int) -> Read:
    """What draws a tensor by its name in a checkpoint, in the place of reading it."""
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

    def draw(name: str) -> Tensor:  # such as model.layers.0.self_attn.q_proj.bias
        part, kind = name.split(".")[-2:]
        if part.endswith("norm"):
            return torch.ones(sizes[part], device=device, dtype=dtype)
        size = sizes[part][:1] if kind == "bias" else sizes[part]
        return torch.empty(size, device=device, dtype=dtype).normal_(0, 0.02, generator=generator)

    return draw
