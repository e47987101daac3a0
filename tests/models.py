"""The models and requests that the tests compare on, and what transformers says to them.

Three models have random weights: their texts are noise, but every token of it depends on all that
went before, and small weights, which would repeat one token whatever the cache holds, are avoided.
Between them they have all that sets the families apart. What is slow to make is kept in `.cache`,
under a name that is a hash of all that it depends on.
"""

import hashlib
import inspect
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock

from nanoteach import reference
from nanoteach.hub import resolve_model
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.model import Decoder
from nanoteach.reference import Reference, open_model, references
from nanoteach.types import SamplingParams

CACHE = Path(__file__).parents[1] / ".cache" / "tests"
VERSIONS = f"torch {torch.__version__}, transformers {transformers.__version__}"

RANDOM_MODELS = ("qwen2", "qwen3", "llama")
MODELS = ("tiny", *RANDOM_MODELS)

LONGEST_PROMPT, LONGEST_OUTPUT = 300, 120
MAX_MODEL_LEN = LONGEST_PROMPT + LONGEST_OUTPUT
NUM_REQUESTS = 64

# --- random models -----------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": [3, 77, 130, 201, 256, 333, 404, 511],
}

CONFIGS: dict[str, dict[str, Any]] = {
    # Biases on q, k and v; head_dim is what hidden_size leaves for each head.
    "qwen2": {
        **SHAPE,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    # QK-norm, a head_dim of its own, one matrix for embedding and head.
    "qwen3": {
        **SHAPE,
        "initializer_range": 0.5,  # tied, it tends to repeat what it reads
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    # Biases on q, k, v and o; scaled frequencies that matter from position 64 on; two shards.
    "llama": {
        **SHAPE,
        "head_dim": 32,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}
ARCHITECTURES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
# Seeds whose texts are lively, with no near-ties.
SEEDS = {"qwen2": 0, "qwen3": 3, "llama": 1}


def save_random_model(
    folder: Path, family: str, config: dict[str, Any], seed: int = 0, shard_size: str = "1GB"
) -> None:
    """Write a model folder whose norms and biases are random too, not the usual 1 and 0."""
    name = ARCHITECTURES[family]
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(config_class(**config))
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=shard_size)


def random_model(family: str) -> Path:
    """The folder of one of the three random models."""
    config, seed, shard_size = CONFIGS[family], SEEDS[family], "1GB"
    if family == "llama":
        shard_size = "400KB"
    key = digest(inspect.getsource(save_random_model), config, seed, shard_size, VERSIONS)
    return once(
        CACHE / f"{family}-{key}",
        lambda folder: save_random_model(folder, family, config, seed, shard_size),
    )


def model_folder(name: str) -> Path:
    """The folder of any model that the tests use."""
    return random_model(name) if name in RANDOM_MODELS else resolve_model(name, progress=False)


# --- requests ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Requests to one model, and what transformers makes of them."""

    model: Decoder
    eos_token_ids: tuple[int, ...]
    prompts: list[list[int]]
    params: list[SamplingParams]
    references: list[Reference]


def ragged_requests(stream: list[int]) -> tuple[list[list[int]], list[SamplingParams]]:
    """64 requests cut out of a stream of tokens, of very different lengths.

    Most are short. The ends are there: 1 and 300 tokens of prompt, each with 1 and 120 of output.
    """
    rng, tokens = random.Random(0), cycle(stream)

    def take(num_tokens: int) -> list[int]:
        return list(islice(tokens, num_tokens))

    def ragged(longest: int) -> int:
        return round(math.exp(rng.uniform(0, math.log(longest))))

    prompts = [take(n) for n in (LONGEST_PROMPT, LONGEST_PROMPT, 1, 1)]
    max_tokens = [LONGEST_OUTPUT, 1, LONGEST_OUTPUT, 1]
    # A family with one beginning: the beginning alone, and eleven that go on from it.
    beginning = take(100)
    prompts += [beginning + take(n) for n in (0, 1, 2, 11, 12, 13, 18, 18, 28, 29, 30, 60)]
    # Twins, whose last block of 1, 3 or 16 tokens is full.
    twin = take(48)
    prompts += [twin, list(twin)]
    # The same blocks after another history: at the start, and twice over.
    prompts += [beginning[48:96] + take(10), twin + twin + take(5)]
    prompts += [take(ragged(LONGEST_PROMPT)) for _ in range(NUM_REQUESTS - len(prompts))]
    max_tokens += [ragged(LONGEST_OUTPUT) for _ in range(NUM_REQUESTS - len(max_tokens))]
    params = [
        SamplingParams(
            max_tokens=n,
            ignore_eos=i % 3 == 0,
            stop_token_ids=stream[i : i + 4] if i % 8 == 5 else (),
        )
        for i, n in enumerate(max_tokens)
    ]
    # Those who ask first are not the longest.
    order = rng.sample(range(NUM_REQUESTS), NUM_REQUESTS)
    return [prompts[i] for i in order], [params[i] for i in order]


def text_stream(folder: Path) -> list[int]:
    """Thousands of tokens of plain sentences."""
    rng = random.Random(0)
    people = "Anna", "The old baker", "My sister", "A small dog", "The teacher", "Tom", "Nobody"
    deeds = "found", "carried", "wanted", "painted", "forgot", "gave away", "looked for", "kept"
    things = "a red boat", "the key", "three apples", "a letter", "some bread", "the map", "a drum"
    places = "in the garden", "near the river", "on Monday", "before the rain came", "at school"
    tokenizer = load_tokenizer(folder)
    stream: list[int] = []
    for _ in range(800):
        sentence = " ".join(rng.choice(words) for words in (people, deeds, things, places))
        stream += tokenizer.encode(sentence + ". ", add_special_tokens=False)
    return stream


@cache
def workload(name: str) -> Workload:
    """The 64 requests to one of `MODELS`."""
    folder = model_folder(name)
    if name in RANDOM_MODELS:
        rng = random.Random(0)
        stream = [rng.randrange(SHAPE["vocab_size"]) for _ in range(10_000)]
    else:
        stream = text_stream(folder)
    return with_references(name, folder, *ragged_requests(stream))


@cache
def smollm2_workload() -> Workload:
    """Six short requests to a real chat model. Raises ModelError where it can't be had."""
    folder = resolve_model("smollm2-135m", progress=False)
    stream = iter(text_stream(folder))
    prompts = [list(islice(stream, n)) for n in (1, 5, 12, 16, 17, 24)]
    return with_references("smollm2-135m", folder, prompts, [SamplingParams(max_tokens=16)] * 6)


def with_references(
    name: str, folder: Path, prompts: list[list[int]], params: list[SamplingParams]
) -> Workload:
    """Complete a workload. transformers is asked once, then its answers come from a file."""
    eos = eos_token_ids(folder)

    def make(path: Path) -> None:
        refs = references(open_model(folder), prompts, params, eos)
        path.write_text(json.dumps([asdict(ref) for ref in refs]))

    source = inspect.getsource(reference)
    key = digest(source, hash_folder(folder), prompts, map(repr, params), eos, VERSIONS)
    path = once(CACHE / f"references-{name}-{key}.json", make)
    refs = [Reference(**fields) for fields in json.loads(path.read_text())]
    model = load_model(folder, "cpu", torch.float32)
    return Workload(model, eos, prompts, params, refs)


# --- kept on disk ------------------------------------------------------------------------------


def once(path: Path, make: Callable[[Path], None]) -> Path:
    """A file or folder that `make` writes if it isn't there: one process does, others wait.

    It appears whole or not at all.
    """
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                partial = path.with_name(path.name + ".partial")
                shutil.rmtree(partial, ignore_errors=True)
                make(partial)
                os.replace(partial, path)
    return path


def digest(*parts: Any) -> str:
    """A short hash of anything that JSON can write (a map counts as its list)."""
    text = json.dumps(parts, default=list, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_folder(folder: Path) -> str:
    """A hash of a model's files."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.json")) + sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(2**20):
                total.update(block)
    return total.hexdigest()
