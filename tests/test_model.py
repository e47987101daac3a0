"""The decoder computes what transformers computes, and refuses what it can't compute."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    CONFIGS,
    MAX_MODEL_LEN,
    MODELS,
    RANDOM_MODELS,
    SHAPE,
    model_folder,
    save_random_model,
    workload,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoteach.config import EngineConfig, ModelConfig, RopeScaling
from nanoteach.loader import eos_token_ids, load_model
from nanoteach.model import AttentionMetadata, Decoder
from nanoteach.naive import CausalAttention
from nanoteach.paged_attention import PagedAttention
from nanoteach.reference import HFModel, judge_logits, open_model
from nanoteach.stages import Parts, build_chunked
from nanoteach.types import SamplingParams

# --- logits --------------------------------------------------------------------------------------


@torch.inference_mode()
def their_logits(model: HFModel, tokens: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@torch.inference_mode()
def our_logits(model: Decoder, tokens: list[int]) -> Tensor:
    """All tokens at once."""
    n = len(tokens)
    metadata = AttentionMetadata(query_lens=[n], seq_lens=[n])
    ids, positions = torch.tensor(tokens), torch.arange(n)
    return model.logits(model.forward(ids, positions, CausalAttention(), metadata))


@torch.inference_mode()
def paged_logits(model: Decoder, tokens: list[int], parts: list[int]) -> Tensor:
    """In parts of the given lengths, K/V in blocks of 16 that lie in the pool in no order."""
    num_blocks = -(-len(tokens) // 16)
    attention = PagedAttention(model.config, num_blocks, 16, model.dtype, model.device)
    generator = torch.Generator().manual_seed(0)
    table: list[int] = torch.randperm(num_blocks, generator=generator).tolist()
    logits, start = [], 0
    for new in parts:
        ids, positions = torch.tensor(tokens[start : start + new]), torch.arange(start, start + new)
        metadata = attention.plan([new], [start + new], [table])
        logits.append(model.logits(model.forward(ids, positions, attention, metadata)))
        start += new
    return torch.cat(logits)


def text(name: str) -> list[int]:
    """420 tokens: the longest prompts of the workload, one after the other."""
    prompts = sorted(workload(name).prompts, key=len, reverse=True)
    return (prompts[0] + prompts[1])[:MAX_MODEL_LEN]


PARTS = [1, 100, *[1] * 20, 16, 200, *[1] * 83]


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_are_those_of_transformers(name: str) -> None:
    tokens, model = text(name), workload(name).model
    assert model.dtype == torch.float32 and sum(PARTS) == len(tokens) == MAX_MODEL_LEN
    expected = their_logits(open_model(model_folder(name)), tokens)
    assert expected.std() > 1  # the tolerance is small beside it
    torch.testing.assert_close(our_logits(model, tokens), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(paged_logits(model, tokens, PARTS), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_left_in_float32_is_rounding(name: str) -> None:
    """Against float64, our float32 is no worse than that of transformers, and our float64 agrees.

    (As in transformers, norms and rotary angles are float32 even there.)
    """
    tokens, folder = text(name), model_folder(name)
    exact = their_logits(open_model(folder, torch.float64), tokens)
    theirs = their_logits(open_model(folder), tokens)
    for parts in ([len(tokens)], PARTS):
        judgement = judge_logits(paged_logits(workload(name).model, tokens, parts), theirs, exact)
        assert judgement.ok, str(judgement)
        ours_64 = paged_logits(load_model(folder, dtype=torch.float64), tokens, parts)
        torch.testing.assert_close(ours_64, exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_as_good_as_that_of_transformers(name: str) -> None:
    """On the tokens that our own engine generates in bfloat16, however the prompt is computed."""
    folder, prompt = model_folder(name), text(name)[:80]
    model = load_model(folder, dtype=torch.bfloat16)
    config = EngineConfig(max_num_batched_tokens=32, max_model_len=240, num_gpu_blocks_override=15)
    engine = build_chunked(Parts(model, config))
    [output] = engine.generate([prompt], SamplingParams(max_tokens=160, ignore_eos=True))
    tokens = prompt + output[:-1]
    exact = their_logits(open_model(folder), tokens)[-160:]
    theirs = their_logits(open_model(folder, torch.bfloat16), tokens)[-160:]
    ours = paged_logits(model, tokens, [32, 32, 16, *[1] * 159])[-160:]
    assert theirs.dtype == ours.dtype == torch.bfloat16
    judgement = judge_logits(ours, theirs, exact, output)
    assert judgement.ok, str(judgement)


def test_the_judge_finds_a_large_error_and_an_unexplained_token() -> None:
    exact = torch.tensor([[5.0, 4.0, 0.0], [5.0, 4.0, 0.0]])
    theirs = exact + 0.1
    assert judge_logits(exact + 0.149, theirs, exact).ok
    assert not judge_logits(exact + 0.151, theirs, exact).ok
    # Position 1 chose token 1, whose score is 1 below the best, with an error of 0.1.
    judgement = judge_logits(exact + 0.1, theirs, exact, tokens=[0, 1])
    assert (judgement.num_differing, judgement.unexplained, judgement.ok) == (1, [1], False)
    explained = judge_logits(
        exact + torch.tensor([0.0, 0.5, -0.5]), exact + 1, torch.tensor([[5.0, 4.6, 0]] * 2), [0, 1]
    )
    assert (explained.num_differing, explained.unexplained) == (1, [])


# --- configs -------------------------------------------------------------------------------------

LLAMA = {"architectures": ["LlamaForCausalLM"], **CONFIGS["llama"]}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], **CONFIGS["qwen2"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], **CONFIGS["qwen3"]}


def without(raw: dict[str, Any], *fields: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in fields} | changes


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_both_ways_to_write_scaled_frequencies_are_read(kind: str) -> None:
    new = ModelConfig.from_dict(LLAMA)
    scaling = without(LLAMA["rope_parameters"], "rope_theta", "rope_type", **{kind: "llama3"})
    old = without(LLAMA, "rope_parameters", rope_theta=500_000.0, rope_scaling=scaling)
    assert ModelConfig.from_dict(old) == new
    assert new.rope_theta == 500_000.0
    assert new.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


def test_both_ways_to_write_plain_frequencies_are_read() -> None:
    new = ModelConfig.from_dict(QWEN3)
    old = without(QWEN3, "rope_parameters", rope_theta=1_000_000.0, rope_scaling=None)
    assert ModelConfig.from_dict(old) == new
    assert (new.rope_theta, new.rope_scaling) == (1_000_000.0, None)


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_a_config_of_transformers_4_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    """With its own loader, so that the translation matters to what is computed."""
    folder = Path(shutil.copytree(model_folder(name), tmp_path / name))
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    (folder / "config.json").write_text(json.dumps(raw))
    tokens = text(name)
    assert torch.equal(
        our_logits(load_model(folder), tokens), our_logits(workload(name).model, tokens)
    )


def test_families_have_their_own_biases_norms_and_head_dim() -> None:
    def parts(raw: dict[str, Any]) -> tuple[bool, bool, bool, int]:
        config = ModelConfig.from_dict(raw)
        return config.qkv_bias, config.output_bias, config.qk_norm, config.head_dim

    assert parts(QWEN2) == (True, False, False, 64 // 8)
    assert parts(QWEN3) == (False, False, True, 16)
    assert parts(LLAMA) == (True, True, False, 32)
    assert parts(without(QWEN3, "head_dim")) == (False, False, True, 128)
    assert parts(without(LLAMA, "head_dim", "attention_bias")) == (False, False, False, 64 // 8)


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_fields_left_out_mean_what_transformers_takes_them_for(name: str) -> None:
    """The defaults of the family's own config class."""
    import transformers

    raw = {"qwen2": QWEN2, "qwen3": QWEN3, "llama": LLAMA}[name]
    architecture = raw["architectures"][0]
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    theirs = config_class()
    required = {
        field: SHAPE[field]
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    } | {"num_attention_heads": 8, "num_key_value_heads": 2}
    ours = ModelConfig.from_dict({"architectures": [architecture], **required})
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position == theirs.max_position_embeddings


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen3MoeForCausalLM", None])
def test_another_architecture_is_refused_by_name(architecture: str | None) -> None:
    raw = without(LLAMA, "architectures", architectures=[architecture] if architecture else None)
    with pytest.raises(ValueError, match=architecture or "none") as caught:
        ModelConfig.from_dict(raw)
    for supported in ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"):
        assert supported in str(caught.value)


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default", **changes}}


@pytest.mark.parametrize(
    "change, field, value, supported",
    [
        ({"hidden_act": "gelu"}, "hidden_act", "gelu", "silu"),
        (rope(rope_type="yarn", factor=4.0), "rope_type", "yarn", "default or llama3"),
        ({"use_sliding_window": True}, "use_sliding_window", "True", "false"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types",
            "sliding_attention",
            "full_attention",
        ),
        ({"mlp_bias": True}, "mlp_bias", "True", "false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "bits", "absent"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5", "1"),
        (rope(partial_rotary_factor=0.25), "partial_rotary_factor", "0.25", "1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_decoder_does_not_do_is_refused(
    change: dict[str, Any], field: str, value: str, supported: str
) -> None:
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_dict({**LLAMA, **change})
    message = str(caught.value)
    assert "\n" not in message
    assert field in message and value in message and f"{field}: {supported}" in message
    assert "Qwen3" in message and "Llama" in message


def test_old_yarn_scaling_is_refused_too() -> None:
    raw = without(QWEN2, "rope_parameters", rope_scaling={"type": "yarn", "factor": 4.0})
    with pytest.raises(ValueError, match="yarn"):
        ModelConfig.from_dict(raw)


def test_fields_that_change_nothing_are_fine() -> None:
    harmless = {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
        "mlp_bias": False,
        "use_cache": True,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "quantization_config": None,
    }
    assert ModelConfig.from_dict({**LLAMA, **harmless}) == ModelConfig.from_dict(LLAMA)


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model(tmp_path)


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A copy of the random Qwen3, to break."""
    yield Path(shutil.copytree(model_folder("qwen3"), tmp_path / "model"))


def change_tensors(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Add tensors, or remove those that are given as None."""
    changed = load_file(folder / "model.safetensors") | changes
    tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    """The Llama of the exactness tests is in shards; in one file it is the same."""
    shards = model_folder("llama")
    assert (shards / "model.safetensors.index.json").is_file()
    assert len(list(shards.glob("model-*.safetensors"))) >= 2
    tensors = {k: v for path in shards.glob("*.safetensors") for k, v in load_file(path).items()}
    shutil.copy(shards / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = text("llama")
    assert torch.equal(
        our_logits(load_model(tmp_path), tokens), our_logits(load_model(shards), tokens)
    )


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    broken = Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))
    lost = sorted(broken.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=lost.name):
        load_model(broken)


def test_a_folder_without_weights_says_what_it_lacks(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load_model(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    name = "model.layers.1.self_attn.k_norm.weight"
    change_tensors(folder, {name: None})
    with pytest.raises(ValueError, match=name):
        load_model(folder)


def test_a_tensor_that_nobody_asked_for_is_an_error(folder: Path) -> None:
    """A bias that is left out would change every result."""
    name = "model.layers.0.self_attn.q_proj.bias"
    change_tensors(folder, {name: torch.ones(128)})
    with pytest.raises(ValueError, match=name):
        load_model(folder)


def test_frequencies_that_old_checkpoints_carry_are_left_alone(folder: Path) -> None:
    change_tensors(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load_model(folder)


def test_a_tied_model_has_one_matrix_and_ignores_a_second(folder: Path) -> None:
    change_tensors(folder, {"lm_head.weight": torch.zeros(512, 64)})
    weights = load_model(folder).weights
    assert weights.lm_head is weights.embedding
    tokens = text("qwen3")
    assert torch.equal(
        our_logits(load_model(folder), tokens), our_logits(workload("qwen3").model, tokens)
    )


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load_model(folder)
    change_tensors(folder, {"lm_head.weight": torch.ones(512, 64)})
    weights = load_model(folder).weights
    assert torch.equal(weights.lm_head, torch.ones(512, 64))


def test_head_dim_left_out_of_a_qwen3_is_128(tmp_path: Path) -> None:
    """And is what transformers makes of it, by the logits."""
    config = copy.deepcopy(CONFIGS["qwen3"])
    del config["head_dim"]
    save_random_model(tmp_path, "qwen3", config)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("head_dim", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model, tokens = load_model(tmp_path), text("qwen3")
    assert model.config.head_dim == 128
    expected = their_logits(open_model(tmp_path), tokens)
    torch.testing.assert_close(our_logits(model, tokens), expected, rtol=0, atol=1e-4)


def test_the_checkpoints_dtype_is_kept_unless_another_is_asked_for() -> None:
    assert load_model(model_folder("qwen3")).dtype == torch.float32
    assert load_model(model_folder("qwen3"), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_end_tokens_come_from_the_generation_config_or_the_config(folder: Path) -> None:
    assert eos_token_ids(folder) == tuple(SHAPE["eos_token_id"])
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert eos_token_ids(folder) == (9,)
    (folder / "generation_config.json").unlink()
    assert eos_token_ids(folder) == tuple(SHAPE["eos_token_id"])
    (folder / "config.json").write_text("{}")
    assert eos_token_ids(folder) == ()
