"""Stage 1. From a model folder to a decoder: config, weights, tokenizer.

Knows: the names of tensors in a Hugging Face checkpoint, and how they are fused here. Does not
know: where the folder comes from (hub.py does).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from nanoteach.config import ModelConfig
from nanoteach.model import TORCH_OPS, Decoder, LayerWeights, Ops, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Read = Callable[[str], Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype by name. "auto", as None, leaves the choice. Raises ValueError on any other."""
    if dtype in (None, "auto"):
        return None
    found = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ValueError(f"dtype is {dtype!r}; it can be auto, {', '.join(DTYPES)}")
    assert isinstance(found, torch.dtype)
    return found


def load_model(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    ops: Ops = TORCH_OPS,
    max_model_len: int | None = None,
) -> Decoder:
    """Read a model folder. `dtype` None keeps the checkpoint's.

    Raises ValueError on a model that this decoder can't run, or whose files don't fit its config.
    """
    config = ModelConfig.from_folder(folder)
    files = checkpoint_files(Path(folder))
    used: set[str] = set()

    def read(name: str) -> Tensor:
        if name not in files:
            raise ValueError(f"the checkpoint in {folder} has no tensor {name!r}")
        used.add(name)
        return files[name](name).to(device=device, dtype=dtype)

    weights = read_weights(config, read)
    # A bias or a norm left out would change the results: better no model than a wrong one.
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    left = [name for name in files.keys() - used - ignored if not name.endswith(".inv_freq")]
    if left:
        raise ValueError(
            f"the checkpoint in {folder} has {len(left)} tensors beyond its config, such as "
            f" {sorted(left)[0]!r}"
        )
    return Decoder(config, weights, ops, max_model_len)


def checkpoint_files(folder: Path) -> dict[str, Callable[[str], Tensor]]:
    """For each tensor of the checkpoint, what reads it: one file, or shards with an index."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    readers: dict[str, Callable[[str], Tensor]] = {}
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: weights must be in safetensors files")
        file = safe_open(folder / name, framework="pt")
        readers.update(dict.fromkeys(file.keys(), file.get_tensor))
    return readers


def read_weights(config: ModelConfig, read: Read) -> Weights:
    """All weights, with q, k, v and gate, up fused as `LayerWeights` says."""
    embedding = read("model.embed_tokens.weight")
    return Weights(
        embedding=embedding,
        layers=[read_layer(config, read, f"model.layers.{i}.") for i in range(config.num_layers)],
        norm=read("model.norm.weight"),
        lm_head=embedding if config.tie_word_embeddings else read("lm_head.weight"),
    )


def read_layer(config: ModelConfig, read: Read, prefix: str) -> LayerWeights:
    """One layer's weights."""
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = [f"{attention}{name}_proj" for name in "qkv"]
    qk_norm = None
    if config.qk_norm:
        q_norm, k_norm = read(attention + "q_norm.weight"), read(attention + "k_norm.weight")
        heads = (q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1))
        qk_norm = torch.cat(heads)
    return LayerWeights(
        input_norm=read(prefix + "input_layernorm.weight"),
        qkv=torch.cat([read(name + ".weight") for name in qkv]),
        qkv_bias=torch.cat([read(name + ".bias") for name in qkv]) if config.qkv_bias else None,
        qk_norm=qk_norm,
        output=read(attention + "o_proj.weight"),
        output_bias=read(attention + "o_proj.bias") if config.output_bias else None,
        post_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=torch.cat([read(mlp + "gate_proj.weight"), read(mlp + "up_proj.weight")]),
        down=read(mlp + "down_proj.weight"),
    )


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder, chat template included."""
    from transformers import AutoTokenizer  # takes a second to import, so only where it is needed

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return tokenizer


def eos_token_ids(folder: str | Path) -> tuple[int, ...]:
    """The tokens that end a text, from generation_config.json or, failing that, config.json."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        raw: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        eos = raw.get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()
