"""Drawing at a temperature: the right distribution, and the same draw in any company."""

import importlib.util
import random

import numpy as np
import pytest
import torch

from nanoteach.config import EngineConfig
from nanoteach.engine import Engine
from nanoteach.sampler import Draw, philox, sample
from nanoteach.stages import STAGES, Parts
from nanoteach.types import SamplingParams


def test_the_generator_is_philox() -> None:
    """The known answer of the authors' Random123 (kat_vectors) for all zeros."""
    zero = torch.tensor([0])
    assert philox(zero, zero, zero).tolist() == [0x6627E8D5]


def test_draws_follow_the_probabilities() -> None:
    """Chi-squared with 3 degrees of freedom: under 16.3 in 999 of 1,000 cases."""
    probabilities, count = torch.tensor([0.5, 0.3, 0.15, 0.05]), 2000
    for temperature in (0.5, 1.0, 2.0):
        logits = (temperature * probabilities.log()).expand(count, 4)
        tokens = sample(logits, [Draw(temperature, 9, position) for position in range(count)])
        found, expected = torch.bincount(tokens, minlength=4), count * probabilities
        assert ((found - expected) ** 2 / expected).sum() < 16.3


def test_a_draw_depends_on_its_own_row_alone() -> None:
    rng = random.Random(0)
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(0))
    draws = [
        Draw(rng.choice([0.0, 0.7, 1.5]), rng.getrandbits(32), rng.randrange(9)) for _ in range(12)
    ]
    together = sample(logits, draws).tolist()
    alone = [int(sample(logits[i : i + 1], draws[i : i + 1])) for i in range(12)]
    assert together == alone
    greedy = [i for i, draw in enumerate(draws) if draw.temperature == 0]
    assert [together[i] for i in greedy] == logits[greedy].argmax(-1).tolist()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_draws_the_same() -> None:
    from nanoteach.kernels.sample import sample as sample_on_gpu

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits = 2 * torch.randn(6, 300, generator=torch.Generator().manual_seed(0)).to(device)
    seeds, positions = [0, 5, 2**31 + 7, 2**32 - 1, 123, 9], [0, 3, 1000, 40000, 7, 2**20]
    temperatures = [0.6, 1.0, 0.0, 2.0, 0.3, 1.0]
    out = torch.zeros(6, dtype=torch.int32, device=device)
    words = torch.from_numpy(np.array(seeds, dtype=np.uint32).view(np.int32)).to(device)
    places = torch.tensor(positions, dtype=torch.int32, device=device)
    sample_on_gpu(logits, words, places, torch.tensor(temperatures, device=device), out)
    draws = [Draw(*draw) for draw in zip(temperatures, seeds, positions, strict=True)]
    assert out.tolist() == sample(logits, draws).tolist()


def test_what_is_colder_than_cold_takes_the_best_token() -> None:
    assert SamplingParams(temperature=1e-40).temperature == 0
    logits = torch.tensor([[1.0, 5, 4, 9]])
    assert sample(logits, [Draw(SamplingParams(temperature=1e-5).temperature, 3, 4)]).item() == 3


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine("tiny", device="cpu", block_size=4, num_gpu_blocks_override=30)


PROMPT = "The fox went"


def draw_text(engine: Engine, seed: int | None, others: int = 0) -> list[int]:
    params = [SamplingParams(12, temperature=0.9, seed=seed, ignore_eos=True)]
    params += [SamplingParams(12, temperature=1.2, ignore_eos=True)] * others
    prompts = [PROMPT] + ["A day in the life of a small owl"] * others
    return engine.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids


def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(engine: Engine) -> None:
    alone = draw_text(engine, 7)
    assert draw_text(engine, 7) == alone
    assert draw_text(engine, 7 + 2**32) == alone  # 32 bits of it count
    before = engine.stats().num_preemptions
    assert draw_text(engine, 7, others=12) == alone
    assert engine.stats().num_preemptions > before  # the pool is too small for all
    assert len({tuple(draw_text(engine, seed)) for seed in (7, 8, 9)}) == 3


def test_without_a_seed_every_text_is_new(engine: Engine) -> None:
    assert len({tuple(draw_text(engine, None)) for _ in range(3)}) == 3


def test_the_first_stages_are_greedy(engine: Engine) -> None:
    parts = Parts(
        engine.core.runner.model, EngineConfig(num_gpu_blocks_override=20, max_model_len=64)
    )
    params = SamplingParams(4, temperature=0.5)
    for stage in STAGES[:3]:
        with pytest.raises(ValueError, match="for a temperature use stage 4 or later"):
            stage.build(parts).generate([[5, 6]], params)
    for stage in STAGES[3:]:
        assert len(stage.build(parts).generate([[5, 6]], params)[0]) <= 4
