"""Stages 7 and 8 give the tokens of stage 6. Without a GPU, in Triton's interpreter, on a toy."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import save_random_model

from nanoteach.backends import problem
from nanoteach.config import EngineConfig
from nanoteach.cost_model import SHAPES
from nanoteach.engine import Engine
from nanoteach.loader import load_model
from nanoteach.stages import GPU_STAGES, Parts, Stage, build_chunked
from nanoteach.step_inputs import FEW_SEQS
from nanoteach.types import SamplingParams

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    folder = save_random_model(tmp_path_factory.mktemp("model"), max_position=128)
    model = load_model(folder, DEVICE, torch.float32)
    # Padded, a step of 20 tokens has room for 20 requests: as many of both, and yet not one each.
    config = EngineConfig(
        block_size=3, num_gpu_blocks_override=18, max_num_seqs=20, max_num_batched_tokens=20
    )
    return Parts(model, config)


@pytest.mark.parametrize(
    ("stage", "backend", "eager"),
    [
        (GPU_STAGES[0], "triton", False),
        pytest.param(
            GPU_STAGES[1],
            "triton",
            False,
            marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="takes minutes without a GPU"),
        ),
        (GPU_STAGES[1], "triton", True),
        (GPU_STAGES[0], "auto", False),
        (GPU_STAGES[1], "auto", False),
        (GPU_STAGES[1], "auto", True),
    ],
    ids=["7", "8", "8-eager", "7-plain", "8-plain", "8-plain-eager"],
)
def test_same_tokens(stage: Stage, backend: str, eager: bool, parts: Parts) -> None:
    """Chunks beside decodes, prefix hits, one to four decodes a step, and preemption.

    On a CPU, `triton` runs in its interpreter, and `auto` in plain PyTorch. eager: steps of their
    own size; otherwise in the padded buffers that graphs are recorded with.
    """
    rng = random.Random(0)
    shared = [rng.randrange(90) for _ in range(13)]
    prompts = [
        shared[:common] + [rng.randrange(90) for _ in range(n)]
        for common, n in ((13, 1), (0, 30), (13, 7), (13, 2), (13, 5))
    ]
    interpreted = backend == "triton" and DEVICE.type == "cpu"  # a step takes seconds
    lens = (6, 2, 5, 4, 3) if interpreted else (14, 4, 12, 13, 6)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lens]
    config = replace(parts.config, attention_backend=backend, enforce_eager=eager)
    core: Any = stage.build(Parts(parts.model, config))
    assert core.generate(prompts, params) == build_chunked(parts).generate(prompts, params)
    assert core.scheduler.num_prefix_hits
    assert core.scheduler.num_preemptions or interpreted
    assert core.check() == []


def test_mixed_steps_of_few_requests_and_of_many(parts: Parts) -> None:
    """Both kinds of padded buffers, with prompts in them, and the same tokens as stage 6."""
    rng = random.Random(1)
    prompts = [[rng.randrange(90) for _ in range(rng.randint(1, 12))] for _ in range(FEW_SEQS + 13)]
    params = [SamplingParams(max_tokens=rng.randint(9, 14), ignore_eos=True) for _ in prompts]
    config = replace(
        parts.config, max_num_seqs=FEW_SEQS + 8, max_num_batched_tokens=60,
        num_gpu_blocks_override=300, attention_backend="auto",
    )  # fmt: skip
    core: Any = GPU_STAGES[1].build(Parts(parts.model, config))
    kinds = []
    for (kind, _), (_, recorded) in core.runner.graphs.items():
        replay = recorded.replay
        recorded.replay = lambda kind=kind, replay=replay: kinds.append(kind) or replay()
    stage_6 = build_chunked(Parts(parts.model, config))
    assert core.generate(prompts, params) == stage_6.generate(prompts, params)
    assert {"few", "mixed", "decode"} == set(kinds)


def test_the_engine_runs_on_a_backend_by_name(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path, max_position=64)
    texts = [
        Engine(
            folder,
            device=DEVICE,
            dtype="float32",
            attention_backend=backend,
            block_size=4,
            enforce_eager=True,
        )
        .generate("fox", SamplingParams(max_tokens=3), use_tqdm=False)[0]
        .outputs[0]
        .text
        for backend in ("sdpa", "triton")
    ]
    assert texts[0] == texts[1] != ""


def test_one_request_alone_has_room_for_the_parts_of_its_prompt(parts: Parts) -> None:
    """A chunk's parts lie where those of decodes do, and one decode alone needs little room."""
    from nanoteach.fused_decoder import CHUNK_SPLITS, SPLIT_STEP

    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 90, "num_gpu_blocks_override": 40}
    config = replace(parts.config, **sizes, attention_backend="triton", enforce_eager=True)
    core: Any = GPU_STAGES[1].build(replace(parts, config=config))
    decoder = core.runner.decoder
    assert len(decoder.partial) == len(decoder.partial_lse) >= SPLIT_STEP * CHUNK_SPLITS
    decoder.partial.fill_(float("nan"))
    decoder.partial_lse.fill_(float("nan"))
    prompt, params = [i * i % 90 for i in range(75)], SamplingParams(max_tokens=2)
    expected = build_chunked(replace(parts, config=config)).generate([prompt], params)
    assert core.generate([prompt], params) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_triton_without_a_gpu_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_random_model(tmp_path, max_position=64)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        Engine(folder, device="cpu", attention_backend="triton")
    with pytest.raises(ValueError, match="attention_backend is one of auto, sdpa, triton"):
        Engine(folder, device="cpu", attention_backend="flash")


GPUS = {
    "H200": ((9, 0), 232448, None),
    "A100": ((8, 0), 166912, "takes 196608 bytes of shared memory for this head_dim"),
    "T4": ((7, 5), 65536, "compute capability 8.0"),
}


@pytest.mark.parametrize("name", GPUS)
def test_what_the_kernels_need_of_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told from the GPU's own properties, before a kernel is compiled for it in vain."""
    (major, minor), shared, message = GPUS[name]
    properties = SimpleNamespace(major=major, minor=minor, shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    model: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.float32, config=SHAPES["qwen3-0.6b"]
    )
    reason = problem("triton", model, EngineConfig())
    assert message in str(reason) if message else reason is None
