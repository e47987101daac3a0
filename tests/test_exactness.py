"""In float32, every stage generates the tokens that transformers generates, however it is set up.

`make test` runs settings that have between them every pair of values that can stand together;
`pytest -m product` runs every combination. All 64 ragged requests go through each engine.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from models import (
    LONGEST_OUTPUT,
    LONGEST_PROMPT,
    MAX_MODEL_LEN,
    MODELS,
    NUM_REQUESTS,
    RANDOM_MODELS,
    model_folder,
    smollm2_workload,
    workload,
)
from settings import BUDGETS, Setting, build, covering, full_product, pairs, problems, run

from nanoteach.config import EngineConfig
from nanoteach.engine_core import EngineCore
from nanoteach.hub import ModelError
from nanoteach.reference import (
    TIE,
    Mismatch,
    Reference,
    compare,
    open_model,
    references,
    static_batches,
)
from nanoteach.stages import STAGES, Parts, Stage
from nanoteach.types import SamplingParams

EVERYTHING = full_product()
COVERING = covering(EVERYTHING)

Record = Callable[[str, object], None]
"""pytest's `record_property`. What is recorded as a number is summed up at the end."""


def prove(setting: Setting, record: Record) -> None:
    """All 64 requests are exact, the books are in order, and what was to happen did happen."""
    comparison, engine = run(setting)
    record("requests", comparison.num_requests)
    record("tokens", comparison.num_tokens)
    record("ties", len(comparison.ties))
    assert comparison.exact, str(comparison)
    assert problems(engine) == []
    if isinstance(engine, EngineCore):
        record("preemptions", engine.scheduler.num_preemptions)
        # With few tokens a step, or blocks of 256, few requests are in the pool at once.
        crowded = setting.pool == "middling" and setting.max_num_seqs == 64
        if crowded and (setting.budget or 0) >= 64 and setting.block_size != 256:
            assert engine.scheduler.num_preemptions > 0
        hits = engine.scheduler.num_prefix_hits
        # No two prompts have their first 256 tokens in common: there a hit needs a preemption.
        assert (hits > 0) == bool(setting.prefix_caching) or setting.block_size == 256


@pytest.mark.parametrize("setting", COVERING, ids=str)
def test_every_pair_of_values(setting: Setting, record_property: Record) -> None:
    prove(setting, record_property)


@pytest.mark.product
@pytest.mark.parametrize("setting", EVERYTHING, ids=str)
def test_every_combination(setting: Setting, record_property: Record) -> None:
    prove(setting, record_property)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_real_model(stage: Stage, record_property: Record) -> None:
    try:
        work = smollm2_workload()
    except ModelError as error:
        pytest.skip(str(error))
    config = EngineConfig(max_model_len=64, num_gpu_blocks_override=12)
    engine = stage.build(Parts(work.model, config, work.eos_token_ids))
    comparison = compare(work.references, engine.generate(work.prompts, work.params))
    record_property("requests", comparison.num_requests)
    record_property("tokens", comparison.num_tokens)
    record_property("ties", len(comparison.ties))
    assert comparison.exact, str(comparison)
    assert problems(engine) == []


@pytest.mark.parametrize("stage", [4, 5])
def test_before_chunks_a_budget_must_hold_the_longest_prompt(stage: int) -> None:
    setting = Setting("qwen3", stage, 16, MAX_MODEL_LEN, "ample", False, 64)
    build(setting)
    for budget in [budget for budget in BUDGETS if budget < MAX_MODEL_LEN]:
        with pytest.raises(ValueError, match=r"max_num_batched_tokens .* at least max_model_len"):
            build(setting._replace(budget=budget))


# --- the settings ------------------------------------------------------------------------------


def test_there_are_as_many_settings_as_the_axes_make() -> None:
    blocks, budgets, pools, prefix, seqs = 4, 5, 3, 2, 2
    stage_2, stage_3 = pools * seqs, blocks * pools * seqs
    stage_4 = stage_3 * 2  # budgets that hold a whole prompt
    stage_5 = stage_4 * prefix
    stage_6 = stage_3 * budgets * prefix
    one_model = 1 + stage_2 + stage_3 + stage_4 + stage_5 + stage_6
    assert len(EVERYTHING) == len(set(EVERYTHING)) == len(MODELS) * one_model == 1660


def test_the_covering_settings_have_every_pair() -> None:
    everything, covered = (set().union(*map(pairs, s)) for s in (EVERYTHING, COVERING))
    assert covered == everything
    # Every model with every budget takes 20 runs, and with stages 1, 2 and 3 another 12.
    assert 32 <= len(COVERING) <= 40


def test_a_covering_is_found_for_a_case_done_by_hand() -> None:
    def setting(model: str, stage: int, block_size: int) -> Setting:
        return Setting(model, stage, block_size)

    all_eight = [setting(m, s, b) for m in "ab" for s in (1, 2) for b in (1, 2)]
    # Four are enough for three axes of two values, and there is no way with three.
    assert len(covering(all_eight)) == 4
    assert pairs(setting("a", 1, 2)) == {
        (("model", "a"), ("stage", 1)),
        (("model", "a"), ("block_size", 2)),
        (("stage", 1), ("block_size", 2)),
    }


# --- the requests ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_requests_are_as_ragged_as_we_say(name: str) -> None:
    work = workload(name)
    lengths, max_tokens = [len(p) for p in work.prompts], [p.max_tokens or 0 for p in work.params]
    assert len(lengths) == len(work.references) == NUM_REQUESTS
    assert (min(lengths), max(lengths)) == (1, LONGEST_PROMPT)
    assert (min(max_tokens), max(max_tokens)) == (1, LONGEST_OUTPUT)
    assert (LONGEST_PROMPT, LONGEST_OUTPUT) in zip(lengths, max_tokens, strict=True)
    as_tuples = [tuple(prompt) for prompt in work.prompts]
    long = {prompt for prompt in as_tuples if len(prompt) > 40}
    assert len({prompt for prompt in as_tuples if as_tuples.count(prompt) > 1} & long) == 1
    assert sum(a != b and b[: len(a)] == a for a in long for b in long) >= 10
    assert 16 <= sum(p.ignore_eos for p in work.params) < NUM_REQUESTS


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_random_models_can_show_a_fault(name: str) -> None:
    """Their texts keep changing, without ties, and end early or go past an end token as told."""
    work = workload(name)
    assert min(gap for ref in work.references for gap in ref.gaps) > TIE
    long = [ref.tokens[:40] for ref in work.references if len(ref.tokens) >= 40]
    assert len(long) >= 10
    assert min(len(set(tokens)) for tokens in long) >= 25
    by_request = list(zip(work.references, work.params, strict=True))
    assert sum(len(ref.tokens) < (p.max_tokens or 0) for ref, p in by_request) >= 5
    eos = set(work.eos_token_ids)
    assert any(p.ignore_eos and eos & set(ref.tokens[:-1]) for ref, p in by_request)


# --- the references ----------------------------------------------------------------------------


def test_references_are_what_argmax_gives_without_any_generate() -> None:
    """Token 0 stands for padding where prompts are padded; in a prompt it is a token."""
    model, prompt = open_model(model_folder("qwen3")), [0, 0, 5, 0]
    [reference] = references(model, [prompt], SamplingParams(max_tokens=20))
    tokens = list(prompt)
    for token, gap in zip(reference.tokens, reference.gaps, strict=True):
        with torch.inference_mode():
            best, second = model(torch.tensor([tokens])).logits[0, -1].topk(2).values.tolist()
            assert token == int(model(torch.tensor([tokens])).logits[0, -1].argmax())
        assert gap == pytest.approx(best - second, abs=1e-4)
        tokens.append(token)
    assert len(tokens) == 24


def test_the_models_own_generation_settings_are_set_aside() -> None:
    work, model = workload("qwen3"), open_model(model_folder("qwen3"))
    model.generation_config.repetition_penalty = 5.0
    found = references(model, work.prompts[:6], work.params[:6], work.eos_token_ids)
    assert [ref.tokens for ref in found] == [ref.tokens for ref in work.references[:6]]
    assert model.generation_config.repetition_penalty == 5.0


@pytest.mark.parametrize("width", [1, 5, 64])
def test_padded_batches_of_transformers_give_the_same(width: int) -> None:
    work, n = workload("qwen3"), 12
    outputs = static_batches(
        model_folder("qwen3"), work.prompts[:n], work.params[:n], width, work.eos_token_ids
    )
    comparison = compare(work.references[:n], outputs)
    assert comparison.exact, str(comparison)


# --- the comparison ----------------------------------------------------------------------------

THREE = Reference(tokens=[5, 6, 7], gaps=[1.0, 0.5, 0.00009])


def test_equal_tokens_are_exact() -> None:
    comparison = compare([THREE, THREE], [[5, 6, 7], [5, 6, 7]])
    assert comparison.exact
    assert (comparison.num_requests, comparison.num_tokens, comparison.ties) == (2, 6, [])


@pytest.mark.parametrize(
    "output, difference",
    [
        ([5, 9, 7], Mismatch(0, 1, expected=6, got=9, gap=0.5)),
        ([5, 6], Mismatch(0, 2, expected=7, got=None, gap=0.00009)),
        ([5, 6, 7, 8], Mismatch(0, 3, expected=None, got=8, gap=None)),
        ([], Mismatch(0, 0, expected=5, got=None, gap=1.0)),
    ],
    ids=["another token", "too short, even at a tie", "too long", "empty"],
)
def test_a_difference_is_a_mismatch(output: list[int], difference: Mismatch) -> None:
    comparison = compare([THREE], [output])
    assert not comparison.exact
    assert comparison.mismatches == [difference]
    assert f"request 0, step {difference.step}" in str(comparison)


def test_a_small_gap_makes_a_tie_and_ends_the_comparison() -> None:
    reference = Reference([5, 6, 7], [1.0, 0.00009, 1.0])
    comparison = compare([reference], [[5, 9, 1, 2, 3]])
    assert comparison.exact
    assert comparison.ties == [Mismatch(0, 1, expected=6, got=9, gap=0.00009)]
    assert comparison.num_tokens == 1
    at_the_limit = replace(reference, gaps=[1.0, 1e-4, 1.0])
    assert not compare([at_the_limit], [[5, 9, 7]]).exact


def test_a_missing_request_is_an_error() -> None:
    with pytest.raises(ValueError):
        compare([THREE, THREE], [[5, 6, 7]])
