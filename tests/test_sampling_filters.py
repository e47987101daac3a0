"""Filters, logprobs and seeds of stage 9: what may be drawn, how often it is, and in any company.

On a machine with an NVIDIA GPU stage 8 runs there, in graphs and without; elsewhere its steps are
computed in plain PyTorch.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Fault, save_random_model
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoteach import sampling_filters
from nanoteach.config import EngineConfig
from nanoteach.engine import Engine
from nanoteach.engine_core import EngineCore
from nanoteach.hub import resolve_model
from nanoteach.loader import load_model
from nanoteach.reference import open_model
from nanoteach.sampler import Draw, race, sample
from nanoteach.sampling_filters import (
    Rules,
    Scores,
    filter_ranked,
    keep_top_k,
    keep_top_p,
    pick,
    read,
    score,
)
from nanoteach.sequence import Sequence
from nanoteach.stages import COURSE, LADDER, STAGES, Parts, build_chunked, build_graphs
from nanoteach.types import Logprob, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs an NVIDIA GPU")


# --- each filter against brute force ------------------------------------------------------------


class Undecided(Exception):
    """A sum of probabilities is so close to top_p that no case can be made of it."""


def allowed(logits: list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    """The tokens that may be drawn, token by token, in Python's floats.

    Of equal scores the lower token goes first. Raises Undecided where rounding would decide.
    """
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    left = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    left = left[: top_k or len(left)]
    total, chosen, so_far = sum(weights[token] for token in left), set(), 0.0
    for token in left:
        if chosen and top_p < 1:
            if abs(so_far - top_p) < 1e-4:
                raise Undecided
            if so_far >= top_p:
                break
        chosen.add(token)
        so_far += weights[token] / total
    return chosen


def rules(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 5
) -> Rules:
    """The same for every row, but for the position."""
    return Rules(
        torch.full((rows,), seed), torch.arange(rows), torch.full((rows,), top_k),
        torch.full((rows,), temperature), torch.full((rows,), top_p),
    )  # fmt: skip


def may_be_drawn(logits: Tensor, wanted: Rules) -> list[set[int]]:
    """The tokens that the filters leave, row by row."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    left = filter_ranked(ranked, wanted).isfinite()
    return [set(order[row][left[row]].tolist()) for row in range(len(logits))]


# Whole numbers: many scores are equal.
LOGITS = st.lists(
    st.integers(-4, 4).map(float) | st.floats(-9, 9, width=32), min_size=1, max_size=9
)
TEMPERATURES = st.sampled_from([0.2, 0.7, 1.0, 3.0])
TOP_P = st.sampled_from([1e-30, 0.1, 0.5, 0.9, 0.999, 1.0]) | st.floats(0.01, 1)


@given(LOGITS, TEMPERATURES, st.integers(0, 12), TOP_P)
@settings(derandomize=True, max_examples=400)
def test_filters_leave_what_brute_force_leaves(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    try:
        expected = allowed(logits, temperature, top_k, top_p)
    except Undecided:
        reject()
    assert may_be_drawn(torch.tensor([logits]), rules(1, temperature, top_k, top_p)) == [expected]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 8))
@settings(derandomize=True)
def test_top_k_by_places(top_k: list[int], vocab_size: int) -> None:
    kept = keep_top_k(torch.tensor(top_k), vocab_size).numpy()
    for row, k in zip(kept, top_k, strict=True):
        assert row.tolist() == [k == 0 or place < k for place in range(vocab_size)]


@given(
    st.lists(st.lists(st.floats(0.01, 1), min_size=5, max_size=5), min_size=1, max_size=4), TOP_P
)
@settings(derandomize=True)
def test_top_p_keeps_the_shortest_beginning_that_reaches_it(
    weights: list[list[float]], top_p: float
) -> None:
    table = -np.sort(-np.array(weights), axis=1)
    table /= table.sum(axis=1, keepdims=True)
    assume(abs(table.cumsum(axis=1) - top_p).min() > 1e-5 or top_p == 1)
    tensor = torch.from_numpy(table).float()
    kept = keep_top_p(tensor, torch.full((len(table),), top_p)).numpy()
    for row, probabilities in zip(kept, table, strict=True):
        count = row.sum()
        assert row.tolist() == [place < count for place in range(5)]
        if top_p == 1:
            assert count == 5
        else:
            assert probabilities[:count].sum() > top_p > probabilities[: count - 1].sum()


def test_rows_with_different_rules() -> None:
    logits = torch.tensor([[1.0, 3, 2, 0]] * 4)
    wanted = Rules(
        torch.zeros(4).long(), torch.zeros(4).long(), torch.tensor([0, 2, 0, 3]),
        torch.tensor([1.0, 1, 0.1, 1]), torch.tensor([1.0, 1, 0.999, 0.7]),
    )  # fmt: skip
    # At 0.1, token 1 has all but 0.00005; of three, tokens 1 and 2 have 0.665 and 0.245.
    assert may_be_drawn(logits, wanted) == [{0, 1, 2, 3}, {1, 2}, {1}, {1, 2}]


def test_equal_scores_are_cut_at_the_lower_token() -> None:
    """Every time, and on a GPU too: thousands of equal scores, as bfloat16 makes them."""
    logits = torch.zeros(2, 5000, device=DEVICE)
    logits[1, 4000] = 1
    wanted = Rules(*(column.to(DEVICE) for column in rules(2, top_k=3)))
    assert may_be_drawn(logits, wanted) == [{0, 1, 2}, {4000, 0, 1}]


# --- how often each token is drawn --------------------------------------------------------------

PROBABILITIES = torch.tensor([0.05, 0.4, 0.12, 0.25, 0.1, 0.08])
COUNT = 4000
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}
"""Chi-squared, by degrees of freedom: 999 of 1,000 right samplers stay below."""

CASES = {
    "temperature": (2.0, 0, 1.0),
    "cold": (0.5, 0, 1.0),
    "top-k": (1.0, 3, 1.0),
    "top-p": (1.0, 0, 0.7),
    "top-p when hot": (3.0, 0, 0.7),
    "top-k, then top-p": (1.0, 4, 0.8),
}
EXPECTED = {
    # tokens 1, 3, 2, 4, 5, 0 in the order of their probabilities
    "top-k": {1: 0.4 / 0.77, 3: 0.25 / 0.77, 2: 0.12 / 0.77},
    "top-p": {1: 0.4 / 0.77, 3: 0.25 / 0.77, 2: 0.12 / 0.77},  # 0.65 is less than 0.7
    # Of four, 0.46, 0.29, 0.14, 0.11: the first two have 0.75, less than 0.8.
    "top-k, then top-p": {1: 0.4 / 0.77, 3: 0.25 / 0.77, 2: 0.12 / 0.77},
}


def expected_distribution(name: str) -> dict[int, float]:
    """By hand where that is easy, else by the definition."""
    if name in EXPECTED:
        return EXPECTED[name]
    temperature, top_k, top_p = CASES[name]
    tokens = allowed(PROBABILITIES.log().tolist(), temperature, top_k, top_p)
    weights = {token: float(PROBABILITIES[token]) ** (1 / temperature) for token in tokens}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def drawn_as_expected(name: str, seed: int = 11) -> bool:
    """Whether 4,000 draws, at 4,000 positions, pass for draws from the right distribution."""
    temperature, top_k, top_p = CASES[name]
    logits = PROBABILITIES.log().expand(COUNT, -1)
    tokens, _ = pick(logits, rules(COUNT, temperature, top_k, top_p, seed), race)
    found = torch.bincount(tokens, minlength=6).tolist()
    expected = {token: COUNT * share for token, share in expected_distribution(name).items()}
    if any(count and token not in expected for token, count in enumerate(found)):
        return False
    statistic = sum((found[t] - wanted) ** 2 / wanted for t, wanted in expected.items())
    return statistic < CRITICAL[len(expected) - 1]


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_filtered_distribution(name: str) -> None:
    assert drawn_as_expected(name)


def test_the_seeds_do_not_repeat_each_other() -> None:
    """As before, with one draw for each of 4,000 seeds."""
    logits = PROBABILITIES.log().expand(COUNT, -1)
    tokens, _ = pick(logits, rules(COUNT)._replace(seeds=torch.arange(COUNT)), race)
    found, wanted = torch.bincount(tokens, minlength=6), COUNT * PROBABILITIES
    assert ((found - wanted) ** 2 / wanted).sum() < CRITICAL[5]


def top_p_drops_the_one_that_crosses(probabilities: Tensor, top_p: Tensor) -> Tensor:
    kept = probabilities.cumsum(-1) <= top_p.unsqueeze(1)
    kept[:, 0] = True
    return kept | (top_p.unsqueeze(1) >= 1)


def top_p_keeps_one_more(probabilities: Tensor, top_p: Tensor) -> Tensor:
    return keep_top_p(probabilities, top_p).roll(1, -1).index_fill(1, torch.tensor([0]), True)


def top_k_keeps_one_more(top_k: Tensor, vocab_size: int) -> Tensor:
    return keep_top_k(top_k + (top_k > 0), vocab_size)


def top_p_before_temperature(ranked: Tensor, wanted: Rules) -> Tensor:
    return filter_ranked(ranked, wanted._replace(temperatures=torch.ones_like(wanted.temperatures)))


def top_p_before_top_k(ranked: Tensor, wanted: Rules) -> Tensor:
    left = filter_ranked(ranked, wanted._replace(top_k=torch.zeros_like(wanted.top_k)))
    return left.masked_fill(~keep_top_k(wanted.top_k, ranked.shape[1]), -torch.inf)


def nothing_is_filtered(ranked: Tensor, wanted: Rules) -> Tensor:
    return ranked


FAULTS: list[tuple[str, Callable[..., Tensor], str]] = [
    ("keep_top_p", top_p_drops_the_one_that_crosses, "top-p"),
    ("keep_top_p", top_p_keeps_one_more, "top-p"),
    ("keep_top_k", top_k_keeps_one_more, "top-k"),
    ("filter_ranked", top_p_before_temperature, "top-p when hot"),
    ("filter_ranked", top_p_before_top_k, "top-k, then top-p"),
    ("filter_ranked", nothing_is_filtered, "top-k"),
]


@pytest.mark.parametrize(("name", "fault", "case"), FAULTS, ids=lambda x: getattr(x, "__name__", x))
def test_a_planted_fault_is_seen_in_the_draws(
    name: str, fault: Callable[..., Tensor], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_filters, name, fault)
    assert not drawn_as_expected(case)


def test_a_temperature_that_is_taken_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    hotter = CASES["temperature"][0] ** 2
    monkeypatch.setitem(CASES, "temperature", (hotter, 0, 1.0))
    monkeypatch.setitem(EXPECTED, "temperature", dict(enumerate(
        ((PROBABILITIES**0.5) / (PROBABILITIES**0.5).sum()).tolist()
    )))  # fmt: skip
    assert not drawn_as_expected("temperature")


def test_without_filters_it_draws_as_stage_1_does() -> None:
    logits = 3 * torch.randn(40, 500, generator=torch.Generator().manual_seed(1))
    temperatures = torch.tensor([0.0, 0.6, 1.0, 2.0]).repeat(10)
    wanted = rules(40)._replace(temperatures=temperatures)
    draws = [Draw(float(t), 5, position) for position, t in enumerate(temperatures)]
    assert torch.equal(pick(logits, wanted, race)[0], sample(logits, draws))


def test_a_row_of_no_numbers_spoils_no_other() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    wanted = rules(3, top_k=5, top_p=0.8)
    tokens, scores = pick(logits, wanted, race)
    logits[1] = torch.nan
    again, spoiled = pick(logits, wanted, race)
    assert again[[0, 2]].tolist() == tokens[[0, 2]].tolist()
    assert torch.equal(spoiled.logprobs[[0, 2]], scores.logprobs[[0, 2]])


# --- logprobs -----------------------------------------------------------------------------------


@given(LOGITS, st.data())
@settings(derandomize=True)
def test_logprobs_and_ranks_by_hand(logits: list[float], data: st.DataObject) -> None:
    """In float64, by counting; equal scores rank by their tokens."""
    token = data.draw(st.integers(0, len(logits) - 1))
    ranked, order = torch.tensor([logits]).sort(dim=-1, descending=True, stable=True)
    scores = score(ranked, order, torch.tensor([token]))
    row = np.array(logits)
    expected = row - np.log(np.exp(row - row.max()).sum()) - row.max()
    best = sorted(range(len(row)), key=lambda t: (-row[t], t))
    assert scores.tokens[0].tolist() == [token, *best]
    assert scores.ranks[0].tolist() == [1 + best.index(token), *range(1, len(row) + 1)]
    assert scores.logprobs[0].tolist() == pytest.approx(expected[[token, *best]], abs=1e-5)


def test_what_is_read_out() -> None:
    """The token's own and the best: `logprobs` of them, or one more where it is not among them."""
    scores = Scores(
        torch.tensor([[7, 4, 9, 7], [4, 4, 9, 7], [5, 4, 9, 7]]),
        torch.tensor([[3, 1, 2, 3], [1, 1, 2, 3], [9, 1, 2, 3]]),
        torch.tensor([[-3.0, -1, -2, -3], [-1, -1, -2, -3], [-9, -1, -2, -3]]),
    )
    four, nine, seven = Logprob(-1.0, 1), Logprob(-2.0, 2), Logprob(-3.0, 3)
    assert read(scores, [2, 2, 2]) == [
        {7: seven, 4: four, 9: nine}, {4: four, 9: nine}, {5: Logprob(-9.0, 9), 4: four, 9: nine}
    ]  # fmt: skip
    assert read(scores, [0, None, 3]) == [
        {7: seven}, None, {5: Logprob(-9.0, 9), 4: four, 9: nine, 7: seven}
    ]  # fmt: skip


# --- engines ------------------------------------------------------------------------------------

Build = Callable[[Parts], Any]


def eager_graphs(parts: Parts) -> EngineCore:
    """Stage 8 in steps of their own size."""
    return build_graphs(replace(parts, config=replace(parts.config, enforce_eager=True)))


BUILDS: dict[str, Build] = {
    "stage 4": STAGES[3].build,
    "stage 6": build_chunked,
    "stage 8": build_graphs,
    "stage 8, eager": eager_graphs,
    "stage 9": COURSE[8].build,
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    folder = save_random_model(tmp_path_factory.mktemp("model"), max_position=96)
    model = load_model(folder, DEVICE, torch.float32)
    config = EngineConfig(
        block_size=4, num_gpu_blocks_override=200, max_num_seqs=16, max_num_batched_tokens=128
    )
    return Parts(model, config, filters=True)


FEW_BLOCKS = {"num_gpu_blocks_override": 14}
"""So few that requests are preempted."""


def with_options(parts: Parts, **options: Any) -> Parts:
    return replace(parts, config=replace(parts.config, **options))


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 14),
        temperature=rng.choice([0.0, 0.6, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 1, 5, 40, 1000]),
        top_p=rng.choice([1.0, 1.0, 0.3, 0.9]),
        seed=rng.getrandbits(32),
        logprobs=rng.choice([None, None, 0, 1, 20]),
        ignore_eos=True,
    )


def random_prompt(rng: random.Random) -> list[int]:
    """Some begin with the same 12 tokens, three blocks of them."""
    beginning = [7] * 12 if rng.random() < 0.4 else []
    return beginning + [rng.randrange(90) for _ in range(rng.randint(1, 20))]


Told = tuple[list[int], list[dict[int, Logprob]]]


def serve(core: EngineCore, requests: list[tuple[list[int], SamplingParams]]) -> list[Told]:
    """Tokens and logprobs of each; half of the requests come when the others have begun."""
    seqs = [core.add_request(str(i), *r) for i, r in enumerate(requests[::2])]
    for _ in range(3):
        core.step()
    seqs += [core.add_request(f"late {i}", *r) for i, r in enumerate(requests[1::2])]
    while core.has_unfinished_requests():
        core.step()
        assert core.check() == []
    told = dict(zip([*range(0, len(requests), 2), *range(1, len(requests), 2)], seqs, strict=True))
    return [(told[i].output_token_ids, told[i].logprobs) for i in range(len(requests))]


def assert_same(found: Told, expected: Told) -> None:
    """The same tokens; logprobs to the rounding of another batch's float32 sums."""
    assert found[0] == expected[0]
    assert len(found[1]) == len(expected[1])
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert list(ours) == list(theirs)
        assert [x.rank for x in ours.values()] == [x.rank for x in theirs.values()]
        logprobs = [x.logprob for x in theirs.values()]
        assert [x.logprob for x in ours.values()] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_seeded_request_is_the_same_in_any_company(build: Build, parts: Parts) -> None:
    """Alone at stage 6, and in 20 random batches: chunked, preempted, after a prefix hit."""
    rng = random.Random(3)
    probes = [(random_prompt(rng), random_params(rng)) for _ in range(6)]
    probes[0] = ([7] * 15, SamplingParams(12, 1.0, top_k=5, top_p=0.9, seed=1, ignore_eos=True))
    alone = [serve(build_chunked(parts), [probe])[0] for probe in probes]
    assert len({tuple(tokens) for tokens, _ in alone}) == 6
    chunks = {} if build is BUILDS["stage 4"] else {"max_num_batched_tokens": 9}
    core: Any = build(with_options(parts, **FEW_BLOCKS, **chunks))
    for _ in range(20):
        others = [(random_prompt(rng), random_params(rng)) for _ in range(rng.randint(0, 7))]
        mine = rng.sample(range(6), rng.randint(1, 3))
        requests = [*others, *(probes[i] for i in mine)]
        order = rng.sample(range(len(requests)), len(requests))
        found = serve(core, [requests[i] for i in order])
        for place, i in enumerate(mine, len(others)):
            assert_same(found[order.index(place)], alone[i])
    assert core.scheduler.num_preemptions > 3
    assert core.scheduler.num_prefix_hits or build is BUILDS["stage 4"]


@pytest.mark.parametrize("build", [build_chunked, build_graphs], ids=["6", "8"])
def test_what_others_ask_for_changes_nobody(build: Build, parts: Parts) -> None:
    """A noise that came from the row, or from the count of draws, would show here."""
    mine = ([5, 6, 7], SamplingParams(10, 1.0, seed=4, ignore_eos=True))
    other = [9, 8], SamplingParams(12, 1.0, top_k=3, logprobs=2, ignore_eos=True)
    core = build(parts)
    (alone,) = serve(core, [mine])
    for requests, place in (([mine, other], 0), ([other, mine], 1), ([other] * 5 + [mine], 5)):
        assert serve(core, requests)[place][0] == alone[0]


@pytest.mark.parametrize("build", [build_chunked, build_graphs], ids=["6", "8"])
@pytest.mark.parametrize("place", ["publish", "tick"])
def test_a_fault_takes_back_tokens_and_logprobs(
    build: Build, place: str, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It strikes when the step's tokens are being booked."""
    request = [3, 4, 5], SamplingParams(8, 0.9, top_k=9, seed=2, logprobs=3, ignore_eos=True)
    (expected,) = serve(build(parts), [request])
    core = build(parts)
    seq = core.add_request("a", *request)
    target = core.scheduler.block_manager if place == "publish" else core.clock
    works, calls = getattr(target, place), cycle([0, 0, 0, 1])

    def breaks(*args: Any) -> None:
        if next(calls):
            raise Fault
        works(*args)

    monkeypatch.setattr(target, place, breaks)
    faults = 0
    while core.has_unfinished_requests():
        try:
            core.step()
        except Fault:
            faults += 1
        assert len(seq.logprobs) == seq.num_output_tokens == len(seq.token_times)
    assert faults > 1
    assert_same((seq.output_token_ids, seq.logprobs), expected)


@pytest.mark.parametrize(
    "options",
    [{"top_k": 3, "temperature": 1.0}, {"top_p": 0.5, "temperature": 1.0}, {"logprobs": 0}],
)
@pytest.mark.parametrize("stage", LADDER, ids=lambda stage: stage.name)
def test_the_stages_before_refuse(stage: Any, options: dict[str, Any], parts: Parts) -> None:
    core = stage.build(with_options(replace(parts, filters=False), enforce_eager=True))
    message = "greedy" if "temperature" in options and stage.number < 4 else "come with stage 9"
    with pytest.raises(ValueError, match=message):
        core.generate([[5, 6]], SamplingParams(4, **options))
    assert len(core.generate([[5, 6]], SamplingParams(4, ignore_eos=True))[0]) == 4


def test_without_a_draw_there_is_nothing_to_filter(parts: Parts) -> None:
    params = SamplingParams(6, top_k=7, top_p=0.2)
    assert params.is_plain and params == SamplingParams(6)
    core: Any = build_chunked(replace(parts, filters=False))
    assert core.generate([[5, 6]], params) == core.generate([[5, 6]], SamplingParams(6))


@pytest.mark.parametrize("build", [build_chunked, build_graphs], ids=["6", "8"])
def test_the_best_of_one_is_the_best(build: Build, parts: Parts) -> None:
    """top_k = 1, or a tiny top_p, takes the greedy token at any temperature."""
    prompts = [[5, 6], [40, 2, 3], [8] * 9]
    core = build(parts)
    greedy = core.generate(prompts, SamplingParams(12, ignore_eos=True))
    for options in ({"top_k": 1}, {"top_p": 1e-12}):
        assert core.generate(prompts, SamplingParams(12, 5.0, ignore_eos=True, **options)) == greedy


@pytest.mark.skipif(DEVICE.type == "cuda", reason="runs natively in the other tests")
def test_in_the_kernels(parts: Parts) -> None:
    """Stage 8 with its kernels, in Triton's interpreter: few tokens, a step takes seconds."""
    pytest.importorskip("triton")
    requests = [
        ([5, 6, 7], SamplingParams(3, 1.0, top_k=4, seed=1, logprobs=2, ignore_eos=True)),
        ([9, 8], SamplingParams(3, 1.3, seed=2, ignore_eos=True)),
        ([1], SamplingParams(3, 0.8, top_p=0.7, seed=2**32 - 1, logprobs=0, ignore_eos=True)),
    ]
    config = with_options(parts, attention_backend="triton", enforce_eager=True)
    found, expected = (serve(build(config), requests) for build in (build_graphs, build_chunked))
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


@needs_gpu
def test_the_tail_waits_for_nothing(parts: Parts) -> None:
    """Not one of its operations asks the device for a value."""
    core: Any = build_graphs(parts)
    params = SamplingParams(6, 1.0, top_k=9, top_p=0.9, seed=1, logprobs=5, ignore_eos=True)
    core.generate([[5, 6]] * 3, params)  # kernels are compiled, workspaces are there
    hidden = torch.randn(16, core.runner.model.config.hidden_size, device=DEVICE)
    rows = [(row, Sequence("", [0] * row, params)) for row in range(16)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        read_logprobs = core.runner.tail.launch(0, hidden, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert sorted(read_logprobs()) == list(range(16))


# --- the engine's own outputs -------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(
        "tiny", device=DEVICE, dtype="float32", block_size=4, max_model_len=128,
        num_gpu_blocks_override=256,
    )  # fmt: skip


def test_logprobs_are_those_of_transformers(engine: Engine) -> None:
    """Of the scores as the model gives them, whatever the temperature and the filters."""
    theirs = open_model(resolve_model("tiny"), device=DEVICE)
    prompts = ["The fox went", "What is 2 plus 3?", "A"]
    params = [
        SamplingParams(12, logprobs=5, ignore_eos=True),
        SamplingParams(12, 1.7, top_k=30, seed=3, logprobs=20, ignore_eos=True),
        SamplingParams(12, 0.8, top_p=0.9, seed=4, logprobs=0, ignore_eos=True),
    ]
    for output, p in zip(engine.generate(prompts, params, use_tqdm=False), params, strict=True):
        (completion,) = output.outputs
        prompt, tokens, told = output.prompt_token_ids, completion.token_ids, completion.logprobs
        assert told is not None and len(told) == 12
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + tokens], device=DEVICE)).logits[0].float().cpu()
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        total = 0.0
        for row, token, each in zip(expected, tokens, told, strict=True):
            best = row.topk(p.logprobs or 0).indices.tolist()
            assert set(each) == {token, *best}
            for t, logprob in each.items():
                assert logprob.logprob == pytest.approx(float(row[t]), abs=1e-3)
                assert logprob.rank == 1 + int((row > row[t]).sum())
                assert logprob.decoded_token == engine.tokenizer.decode([t])
            total += each[token].logprob
        assert completion.cumulative_logprob == pytest.approx(total)


def test_logprobs_come_only_when_asked_for(engine: Engine) -> None:
    asked, silent = engine.generate(
        ["The fox"] * 2, [SamplingParams(3, logprobs=0), SamplingParams(3)], use_tqdm=False
    )
    assert asked.outputs[0].token_ids == silent.outputs[0].token_ids
    assert silent.outputs[0].logprobs is silent.outputs[0].cumulative_logprob is None
    assert [len(each) for each in asked.outputs[0].logprobs or []] == [1, 1, 1]


def test_a_stream_brings_the_logprobs_of_its_tokens(engine: Engine) -> None:
    params = SamplingParams(9, 1.0, top_p=0.9, seed=5, logprobs=2, ignore_eos=True)
    (whole,) = engine.generate("The fox went", params, use_tqdm=False)
    for output in engine.stream("The fox went", params):
        (completion,) = output.outputs
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
    assert completion == whole.outputs[0]


def test_a_stop_string_ends_the_logprobs_with_the_tokens(engine: Engine) -> None:
    params = SamplingParams(30, logprobs=1, stop=["."], ignore_eos=True)
    (output,) = engine.generate("The fox went", params, use_tqdm=False)
    (completion,) = output.outputs
    assert output.outputs[0].finish_reason == "stop"
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) < 30
