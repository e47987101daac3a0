"""What a model is made of, and how an engine is set up.

Knows: the fields of a Hugging Face `config.json` that change the computation, and every option of
the engine. Does not know: tensors, devices, or how anything is computed.
"""

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

FAMILIES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
}
SUPPORTED = (
    "Qwen3 (Qwen3ForCausalLM), Qwen2 and Qwen2.5 (Qwen2ForCausalLM), Llama (LlamaForCausalLM)"
)

BACKENDS = ("auto", "sdpa", "triton", "flash_attn")
LEFT_OUT = ("min_p", "n", "presence_penalty", "frequency_penalty", "repetition_penalty")

Options = TypeVar("Options")


def reject_unknown_options(cls: type[Options]) -> type[Options]:
    """Class decorator: an unknown keyword raises a ValueError that suggests the nearest option."""
    names = option_names(cls)
    plain_init: Callable[..., None] = cls.__init__

    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, kwargs, names)
        plain_init(self, *args, **kwargs)

    checked_init.__wrapped__ = plain_init  # type: ignore[attr-defined]  # keeps inspect.signature
    cls.__init__ = checked_init  # type: ignore[method-assign]
    return cls


def option_names(cls: type) -> tuple[str, ...]:
    """The keywords that a dataclass takes."""
    return tuple(field.name for field in dataclasses.fields(cls) if field.init)


def refuse_unknown(owner: str, given: Iterable[str], names: SequenceOf[str]) -> None:
    """Raise ValueError on a keyword that is none of `names`, with the nearest of them."""
    for name in given:
        if name in LEFT_OUT:
            raise ValueError(
                f"{owner} has no option {name!r}: of vLLM's sampling there are temperature, top_k, "
                "top_p, seed and logprobs"
            )
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"options are {', '.join(names)}"
            raise ValueError(f"{owner} has no option {name!r}: {hint}")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the rotary frequencies for contexts beyond the trained one."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Everything that the FLOPs, the bytes and the code depend on."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    tie_word_embeddings: bool = False

    @property
    def q_size(self) -> int:
        """Width of all query heads together, `num_heads * head_dim`."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, `num_kv_heads * head_dim`."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read `config.json` from a Hugging Face model folder."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"{folder} is no model folder: it has no config.json")
        return cls.from_dict(json.loads(path.read_text()))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Translate a Hugging Face config. Raises ValueError on what this decoder does not do."""
        architecture = (raw.get("architectures") or ["none"])[0]
        family = FAMILIES.get(architecture)
        if family is None:
            raise ValueError(
                f"architecture {architecture} is not supported; these are: {SUPPORTED}"
            )

        # transformers 5 writes one dict `rope_parameters` where 4 wrote two fields.
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        _check_supported(architecture, raw, rope)
        bias = bool(raw.get("attention_bias", False))
        hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
        head_dim = raw.get("head_dim") or (128 if family == "qwen3" else hidden_size // num_heads)
        return cls(
            family=family,
            vocab_size=raw["vocab_size"],
            hidden_size=hidden_size,
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=raw.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            max_position=raw.get("max_position_embeddings", 2048 if family == "llama" else 32768),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope_scaling=_llama3_scaling(rope),
            qk_norm=family == "qwen3",
            qkv_bias=True if family == "qwen2" else bias,
            output_bias=False if family == "qwen2" else bias,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        )


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _llama3_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    if _rope_type(rope) == "default":
        return None
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(rope["original_max_position_embeddings"]),
    )


def _check_supported(architecture: str, raw: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Refuse a config whose fields ask for a computation that this decoder does not have."""
    layer_types = set(raw.get("layer_types") or ["full_attention"])
    problems = {
        "hidden_act": ("silu", raw.get("hidden_act", "silu") == "silu"),
        "rope_parameters.rope_type": (
            "default or llama3",
            _rope_type(rope) in ("default", "llama3"),
        ),
        "use_sliding_window": ("false", not raw.get("use_sliding_window", False)),
        "layer_types": ("full_attention", layer_types == {"full_attention"}),
        "mlp_bias": ("false", not raw.get("mlp_bias", False)),
        "quantization_config": ("absent", raw.get("quantization_config") is None),
        "partial_rotary_factor": (
            "1",
            rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1)) in (1, None),
        ),
    }
    for field, (supported, ok) in problems.items():
        if not ok:
            name = field.removeprefix("rope_parameters.")
            value = _rope_type(rope) if name == "rope_type" else rope.get(name, raw.get(name))
            raise ValueError(
                f"{architecture} with {field} = {value!r} is not supported; "
                f"supported is {field}: {supported}, in {SUPPORTED}"
            )


@reject_unknown_options
@dataclass(frozen=True)
class EngineConfig:
    """The engine's options, under vLLM's names.

    `num_gpu_blocks_override` fixes the number of blocks in the KV pool (on any device);
    otherwise `kv_cache_memory_bytes` sizes it; otherwise `gpu_memory_utilization` of the GPU's
    memory, or 1 GiB on a CPU. `attention_backend`: `sdpa` runs anywhere; `triton`, our own kernels,
    wants an NVIDIA GPU and is what `auto` takes there; `flash_attn`, the library, wants one too,
    blocks of a multiple of 256, and float16 or bfloat16. `enforce_eager`: record no CUDA graphs.
    """

    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    attention_backend: str = "auto"
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            check_positive(name, getattr(self, name))
        for name in ("max_model_len", "num_gpu_blocks_override", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(
                f"gpu_memory_utilization is a share of the GPU's memory, over 0 and at most 1, "
                f"not {share!r}"
            )
        check_flag("enable_prefix_caching", self.enable_prefix_caching)
        check_flag("enforce_eager", self.enforce_eager)
        if self.attention_backend not in BACKENDS:
            raise ValueError(
                f"attention_backend is one of {', '.join(BACKENDS)}, not {self.attention_backend!r}"
            )


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is True or False, not {value!r}")


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
