"""The public API, on a small model with random weights: what goes in, what comes out, what is told.

What the tokens should be is settled elsewhere, against transformers. Here they are compared with
those of an engine without prefix caching that serves one request at a time.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import save_random_model
from hypothesis import given
from hypothesis import strategies as st

from nanoteach import types
from nanoteach.cost_model import SHAPES, VirtualClock
from nanoteach.engine import Engine, overlap
from nanoteach.hardware import hardware_named
from nanoteach.types import RequestOutput, SamplingParams

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = ["The first step", "b", "A much longer prompt, of more blocks than one or two.", "Oh no"]
CHAT = [{"role": "user", "content": "Hi"}]
# Few enough blocks for `check` to walk in every step.
POOL: dict[str, Any] = {"num_gpu_blocks_override": 2200}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., Engine]]:
    """Engines, of which each must be idle and in order when the test is over."""
    engines: list[Engine] = []

    def make_engine(**options: Any) -> Engine:
        engines.append(Engine(folder, device="cpu", **POOL | options))
        return engines[-1]

    yield make_engine
    for engine in engines:
        assert_idle(engine)


@pytest.fixture
def engine(make: Callable[..., Engine]) -> Engine:
    return make(block_size=4)


@pytest.fixture
def alone(folder: Path) -> Callable[..., RequestOutput]:
    """What a request comes to in an engine of its own."""

    def run(prompt: Any, params: SamplingParams = GREEDY) -> RequestOutput:
        engine = Engine(folder, device="cpu", enable_prefix_caching=False, **POOL)
        return generate(engine, prompt, params)

    return run


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert engine.check() == []
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert not engine.has_unfinished_requests()
    assert engine.requests == {}


def generate(engine: Engine, prompt: Any, params: SamplingParams | None = GREEDY) -> RequestOutput:
    (output,) = engine.generate(prompt, params, use_tqdm=False)
    return output


def text(output: RequestOutput) -> str:
    return output.outputs[0].text


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def step_to_the_end(engine: Engine) -> dict[str, RequestOutput]:
    """The last output of every request."""
    last = {}
    for _ in range(200):  # more than enough, so that no fault can hang a test
        last.update({output.request_id: output for output in engine.step()})
        assert engine.check() == []
    assert not engine.has_unfinished_requests()
    return last


# --- generate, chat ---------------------------------------------------------------------------


def test_a_prompt_is_a_text_or_token_ids_or_a_dict_of_either(
    engine: Engine, alone: Callable[..., RequestOutput]
) -> None:
    ids = engine.tokenizer.encode(PROMPTS[0])
    expected = alone(PROMPTS[0])
    assert len(set(tokens(expected))) > 8, "the weights are too weak to show a fault"
    forms = [PROMPTS[0], ids, tuple(ids), {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    for form in forms:
        output = generate(engine, form)
        assert output.outputs == expected.outputs
        assert output.prompt_token_ids == ids
        assert output.prompt == (PROMPTS[0] if form in (forms[0], forms[3]) else None)
    batch = engine.generate(forms, GREEDY, use_tqdm=False)
    assert [output.outputs for output in batch] == [expected.outputs] * len(forms)


def test_a_batch_comes_back_in_its_order(
    make: Callable[..., Engine], alone: Callable[..., RequestOutput]
) -> None:
    engine = make(block_size=4, max_num_seqs=2, max_num_batched_tokens=8)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (20, 3, 9, 1)]
    outputs = engine.generate(PROMPTS, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    for output, prompt, p in zip(outputs, PROMPTS, params, strict=True):
        assert output.outputs == alone(prompt, p).outputs
        assert output.finished
        assert output.outputs[0].finish_reason == "length"
    assert engine.generate([], use_tqdm=False) == []


def test_chat_follows_the_template(engine: Engine) -> None:
    (one,) = engine.chat(CHAT, GREEDY, use_tqdm=False)
    two = engine.chat([CHAT, CHAT], GREEDY, use_tqdm=False)
    ids = engine.apply_chat_template(CHAT)
    assert engine.tokenizer.decode(ids) == "<|user|>Hi<|end|><|assistant|>"
    assert one.prompt_token_ids == ids
    assert [output.outputs for output in two] == [one.outputs] * 2
    assert generate(engine, ids).outputs == one.outputs


def test_the_fields_of_an_output(make: Callable[..., Engine]) -> None:
    engine = make(block_size=4, clock=VirtualClock(SHAPES["qwen3-0.6b"], hardware_named("h200")))
    first, second = generate(engine, PROMPTS[2]), generate(engine, PROMPTS[2])
    assert first.request_id != second.request_id
    # 53 tokens: 13 blocks of 4, and one token that is always left to compute.
    assert len(first.prompt_token_ids) == 53
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 52)
    for output in (first, second):
        assert len(tokens(output)) == 24
        assert output.time_to_first_token is not None
        assert output.time_to_first_token > 0
        assert len(output.inter_token_times) == 23
        assert min(output.inter_token_times) > 0
        assert output.outputs[0].index == 0
    assert tokens(first) == tokens(second)


# --- how a request ends -----------------------------------------------------------------------


def test_max_tokens_none_goes_up_to_the_models_length(make: Callable[..., Engine]) -> None:
    engine = make(max_model_len=40)
    output = generate(engine, [5] * 10, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(tokens(output)) == 30
    assert output.outputs[0].finish_reason == "length"


def test_stop_token_ids_end_it_and_leave_no_text(engine: Engine) -> None:
    full = generate(engine, PROMPTS[0])
    at = next(i for i in range(5, 24) if tokens(full)[i] not in tokens(full)[:i])
    stop = tokens(full)[at]
    params = SamplingParams(24, stop_token_ids=[stop], ignore_eos=True)
    output = generate(engine, PROMPTS[0], params)
    assert tokens(output) == tokens(full)[: at + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert text(output) == text(generate(engine, PROMPTS[0], SamplingParams(at, ignore_eos=True)))


def test_end_of_text_ends_it_unless_ignored(engine: Engine) -> None:
    full = generate(engine, PROMPTS[0])
    at = next(i for i in range(5, 24) if tokens(full)[i] not in tokens(full)[:i])
    eos = tokens(full)[at]
    engine.core.eos_token_ids = (eos,)
    ended = generate(engine, PROMPTS[0], SamplingParams(24))
    assert tokens(ended) == tokens(full)[: at + 1]
    assert ended.outputs[0].finish_reason == "stop"
    assert tokens(generate(engine, PROMPTS[0])) == tokens(full)


@pytest.mark.parametrize("start", [0, 1, 7])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_cuts_the_text_before_it(engine: Engine, start: int, length: int) -> None:
    """A token is a character here, so all but the shortest straddle tokens."""
    full = text(generate(engine, PROMPTS[0]))
    stop = full[start : start + length]
    for stops in (stop, [stop], [stop, "not there"], ["zzzz", stop]):
        output = generate(engine, PROMPTS[0], SamplingParams(24, stop=stops, ignore_eos=True))
        assert text(output) == full[: full.index(stop)]
        assert output.outputs[0].finish_reason == "stop"
        assert output.finished


def test_of_two_stop_strings_the_first_in_the_text_counts(engine: Engine) -> None:
    full = text(generate(engine, PROMPTS[0]))
    early, late = full[4:6], full[10:13]
    output = generate(engine, PROMPTS[0], SamplingParams(24, stop=[late, early], ignore_eos=True))
    assert text(output) == full[: min(full.index(early), full.index(late))]
    # One that ends in the same step as a longer one which begins before it.
    output = generate(
        engine, PROMPTS[0], SamplingParams(24, stop=[full[5:7], full[3:7]], ignore_eos=True)
    )
    assert text(output) == full[: min(full.index(full[5:7]), full.index(full[3:7]))]


@pytest.mark.parametrize("length", [2, 4, 9])
def test_text_that_may_become_a_stop_string_is_not_shown(engine: Engine, length: int) -> None:
    full = text(generate(engine, PROMPTS[0]))
    stop = full[10 : 10 + length]
    params = SamplingParams(24, stop=stop, ignore_eos=True)
    shown = [text(output) for output in engine.stream(PROMPTS[0], params)]
    assert shown[-1] == full[: full.index(stop)]
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before), "text was shown and taken back"
    assert all(shown[-1].startswith(piece) for piece in shown)


def test_text_that_was_held_back_is_shown_in_the_end(engine: Engine) -> None:
    full = text(generate(engine, PROMPTS[0]))
    almost = full[-3:] + "#" if not full.endswith("#") else full[-3:] + "~"
    output = generate(engine, PROMPTS[0], SamplingParams(24, stop=almost, ignore_eos=True))
    assert text(output) == full
    assert output.outputs[0].finish_reason == "length"


@given(st.text("ab", max_size=8), st.text("ab", min_size=1, max_size=6))
def test_overlap_is_the_longest_end_that_is_a_beginning(before: str, stop: str) -> None:
    lengths = [n for n in range(1, len(stop)) if before.endswith(stop[:n])]
    assert overlap(before, stop) == max(lengths, default=0)


def test_a_long_stop_string_is_not_tried_at_every_place() -> None:
    class Counted(str):
        tried = 0

        def startswith(self, *args: Any) -> bool:
            Counted.tried += 1
            return super().startswith(*args)

        def __getitem__(self, key: Any) -> str:
            Counted.tried += isinstance(key, slice)
            return super().__getitem__(key)

    stop = Counted("<" + "ab" * 500)
    assert overlap("A long text. " * 200 + "<abab", stop) == 5
    assert overlap("A long text. " * 200, stop) == 0
    assert Counted.tried < 10


def test_the_text_of_a_logprobs_token_is_made_once(engine: Engine) -> None:
    params = SamplingParams(24, logprobs=5, ignore_eos=True)
    outputs = engine.generate([PROMPTS[0]] * 3, params, use_tqdm=False)
    told = [each for output in outputs for each in output.outputs[0].logprobs or []]
    kinds = {token for each in told for token in each}
    assert engine.text_of.cache_info().misses == len(kinds) < 24 * 5 < sum(map(len, told))


# --- streams ----------------------------------------------------------------------------------


def test_a_stream_ends_in_what_generate_gives(engine: Engine) -> None:
    outputs = list(engine.stream(PROMPTS[0], GREEDY))
    assert [len(tokens(output)) for output in outputs] == list(range(1, 25))
    assert [output.finished for output in outputs] == [False] * 23 + [True]
    assert outputs[-1].outputs == generate(engine, PROMPTS[0]).outputs


def test_an_output_stays_as_it_is_but_for_its_times_which_are_not_copied(engine: Engine) -> None:
    outputs, known = [], []
    for output in engine.stream(PROMPTS[0], SamplingParams(9, logprobs=1, ignore_eos=True)):
        outputs.append(output)
        known.append(copy.deepcopy(output.outputs))
    assert [output.outputs for output in outputs] == known
    assert all(output.token_times is outputs[0].token_times for output in outputs)
    assert len(outputs[0].token_times) == 9


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_closing_a_stream_early_frees_its_blocks(engine: Engine, num_read: int) -> None:
    stream = engine.stream(PROMPTS[2], GREEDY)
    for _ in range(num_read):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_idle(engine)


def test_two_streams_interleaved_both_come_to_their_ends(
    engine: Engine, alone: Callable[..., RequestOutput]
) -> None:
    streams = [engine.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    last: list[RequestOutput | None] = [None, None]
    going = True
    while going:
        going = False
        for i, stream in enumerate(streams):
            for output in stream:
                last[i], going = output, True
                break
    for end, prompt in zip(last, PROMPTS, strict=False):
        assert end is not None
        assert end.finished
        assert end.outputs == alone(prompt).outputs


@pytest.mark.parametrize("read_first", [0, 3])
def test_a_stream_that_others_brought_to_its_end_still_tells_it(
    engine: Engine, alone: Callable[..., RequestOutput], read_first: int
) -> None:
    stream = engine.stream(PROMPTS[0], GREEDY)
    for _ in range(read_first):
        next(stream)
    engine.add_request("mine", PROMPTS[1], SamplingParams(60, ignore_eos=True))
    assert step_to_the_end(engine)["mine"].finished
    assert list(stream)[-1].outputs == alone(PROMPTS[0]).outputs


def test_generate_while_a_stream_and_an_added_request_are_under_way(
    engine: Engine, alone: Callable[..., RequestOutput]
) -> None:
    stream = engine.stream(PROMPTS[0], GREEDY)
    engine.add_request("mine", PROMPTS[1], GREEDY)
    next(stream)
    engine.step()
    assert generate(engine, PROMPTS[2]).outputs == alone(PROMPTS[2]).outputs
    assert list(stream)[-1].outputs == alone(PROMPTS[0]).outputs
    assert step_to_the_end(engine)["mine"].outputs == alone(PROMPTS[1]).outputs


# --- step by step -----------------------------------------------------------------------------


def test_step_returns_those_that_got_a_token(
    engine: Engine, alone: Callable[..., RequestOutput]
) -> None:
    engine.add_request("a", PROMPTS[0], SamplingParams(3, ignore_eos=True))
    assert [output.request_id for output in engine.step()] == ["a"]
    engine.add_request("b", PROMPTS[1], SamplingParams(3, ignore_eos=True))
    counts = []
    for _ in range(3):
        counts.append({o.request_id: (len(tokens(o)), o.finished) for o in engine.step()})
    assert counts == [
        {"a": (2, False), "b": (1, False)},
        {"a": (3, True), "b": (2, False)},
        {"b": (3, True)},
    ]
    assert engine.step() == []


def test_an_id_is_free_again_when_its_request_is_over(engine: Engine) -> None:
    for _ in range(2):
        engine.add_request("a", PROMPTS[0], GREEDY)
        assert step_to_the_end(engine)["a"].finished


def test_abort(engine: Engine, alone: Callable[..., RequestOutput]) -> None:
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, GREEDY)
    engine.step()
    engine.abort_request("0")
    engine.abort_request(["1", "2", "nobody"])
    assert engine.check() == []
    assert step_to_the_end(engine)["3"].outputs == alone(PROMPTS[3]).outputs


# --- sharing, budgets -------------------------------------------------------------------------


def shared_prompts() -> list[list[int]]:
    """32 prompts: 1,024 tokens that all share, and 32 of their own."""
    prefix = [7 * i % 95 for i in range(1024)]
    return [prefix + [(i * j + 3 * i) % 95 for j in range(32)] for i in range(32)]


@pytest.mark.parametrize("budget", [2048, 256])
def test_a_shared_prefix_is_computed_once(make: Callable[..., Engine], budget: int) -> None:
    """Of 32 requests that arrive at once; with a small budget the prefix takes several steps."""
    engine = make(max_num_batched_tokens=budget, trace=True)
    plain = make(enable_prefix_caching=False)
    prompts, params = shared_prompts(), SamplingParams(8, ignore_eos=True)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    expected = plain.generate(prompts, params, use_tqdm=False)
    assert [tokens(output) for output in outputs] == [tokens(output) for output in expected]
    assert len({tuple(tokens(output)) for output in outputs}) > 16, "too much alike to tell"

    num_prompt = sum(map(len, prompts))
    num_decodes = 32 * 7  # the first token comes with the prompt
    assert plain.stats().num_computed_tokens == num_prompt + num_decodes
    assert engine.stats().num_computed_tokens - num_decodes == 1024 + 32 * 32
    assert (1024 + 32 * 32) / num_prompt <= 0.10
    assert [output.num_cached_tokens for output in outputs] == [0] + [1024] * 31
    assert engine.stats().prefix_hit_rate == 31 * 1024 / num_prompt


def test_no_step_is_over_its_budget_and_no_decode_waits(make: Callable[..., Engine]) -> None:
    engine = make(max_num_batched_tokens=256, trace=True)
    prompts = [[(5 * i + j) % 95 for j in range(90 + 41 * i % 300)] for i in range(24)]
    engine.generate(prompts, SamplingParams(12, ignore_eos=True), use_tqdm=False)
    assert engine.trace is not None
    steps = [event.data for event in engine.trace.of_kind("step")]
    assert max(sum(step.values()) for step in steps) == 256
    computed: Counter[str] = Counter()
    first_decode: dict[str, int] = {}
    mixed = 0
    for i, step in enumerate(steps):
        decodes = [name for name in step if name in first_decode]
        mixed += len(step) > len(decodes) > 0
        computed.update(step)
        for name in step:
            if computed[name] >= len(prompts[int(name.split("-")[1])]):
                first_decode.setdefault(name, i)
    # The prompt's last step gives the first token, and the 11 steps after it one each.
    for name, start in first_decode.items():
        assert [step.get(name) for step in steps[start + 1 : start + 12]] == [1] * 11
    assert mixed > 5, "no prompt was computed beside decodes"


def test_a_wholly_cached_prompt_computes_something_and_writes_no_shared_block(
    make: Callable[..., Engine],
) -> None:
    engine = make(block_size=4)
    for length in (16, 17, 19):  # whole blocks, and not
        prompt = list(range(length))
        stream = engine.stream(prompt, GREEDY)
        next(stream)
        held = dict.fromkeys(next(iter(engine.core.sequences.values())).block_table)
        attention = engine.core.runner.attention
        full = [block for block in held][: length // 4]
        before = attention.k[:, full].clone(), attention.v[:, full].clone()
        before_tokens = engine.stats().num_computed_tokens
        other = generate(engine, prompt, SamplingParams(1))
        assert other.num_cached_tokens == (length - 1) // 4 * 4
        assert engine.stats().num_computed_tokens > before_tokens
        assert attention.k[:, full].equal(before[0])
        assert attention.v[:, full].equal(before[1])
        assert tokens(other) == tokens(list(stream)[-1])[:1]


def test_a_salt_keeps_prefixes_apart(engine: Engine) -> None:
    def cached(salt: str | None) -> int:
        params = SamplingParams(2, ignore_eos=True, cache_salt=salt)
        return generate(engine, PROMPTS[2], params).num_cached_tokens

    assert [cached(salt) for salt in (None, "a", "b", "", None, "a", "b", "")] == [
        0, 0, 0, 0, 52, 52, 52, 52,
    ]  # fmt: skip


def test_preempted_requests_give_the_same(
    make: Callable[..., Engine], alone: Callable[..., RequestOutput]
) -> None:
    engine = make(block_size=4, num_gpu_blocks_override=20)
    outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert engine.stats().num_preemptions > 0
    assert [o.outputs for o in outputs] == [alone(prompt).outputs for prompt in PROMPTS]


# --- looking inside ---------------------------------------------------------------------------


def test_stats(make: Callable[..., Engine]) -> None:
    engine = make(block_size=4, num_gpu_blocks_override=40, max_num_seqs=2)
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.add_request(str(i), prompt, SamplingParams(4, ignore_eos=True))
    engine.step()
    stats = engine.stats()
    # Prompts of 14 and 1 tokens, each of which just got one more that has no place yet.
    assert (stats.num_blocks, stats.num_used_blocks, stats.num_free_blocks) == (40, 5, 35)
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (2, 1, 0)
    assert stats.num_computed_tokens == 15
    assert stats.prefix_hit_rate == 0
    step_to_the_end(engine)
    stats = engine.stats()
    # 3 requests, each with 3 tokens after the first, of 14, 1 and 53 tokens. Full: 4, 1 and 14.
    assert stats.num_computed_tokens == 14 + 1 + 53 + 3 * 3
    assert stats.num_cached_blocks == 4 + 1 + 14
    assert stats.num_free_blocks == 40
    assert stats.batch_sizes == {2: 4, 1: 4}


def test_check_finds_a_block_that_two_hold(engine: Engine) -> None:
    engine.add_request("a", PROMPTS[2], GREEDY)
    engine.add_request("b", PROMPTS[0], GREEDY)
    engine.step()
    a, b = engine.core.scheduler.running
    taken, b.block_table[0] = b.block_table[0], a.block_table[0]
    assert engine.check() == [
        f"block {a.block_table[0]} counts 1 holders and has 2",
        f"block {taken} counts 1 holders and has 0",
        f"block {taken} is lost: not free, and nobody holds it",
    ]
    b.block_table[0] = taken
    engine.abort_request(["a", "b"])


def test_a_trace_tells_what_happened(make: Callable[..., Engine]) -> None:
    engine = make(block_size=4, num_gpu_blocks_override=22, max_num_batched_tokens=16, trace=True)
    outputs = engine.generate([*PROMPTS, PROMPTS[2]], GREEDY, use_tqdm=False)
    trace, stats = engine.trace, engine.stats()
    assert trace is not None
    steps = trace.of_kind("step")
    assert [event.step for event in steps] == list(range(1, len(steps) + 1))
    assert sum(sum(event.data.values()) for event in steps) == stats.num_computed_tokens
    assert Counter(len(event.data) for event in steps) == stats.batch_sizes
    assert len(trace.of_kind("preempted")) == stats.num_preemptions > 0
    assert {(e.request_id, e.data) for e in trace.of_kind("finished")} == {
        (output.request_id, "length") for output in outputs
    }
    held: dict[str | None, list[int]] = {}
    for event in trace.events:
        if event.kind in ("hit", "taken"):
            held[event.request_id] = held.get(event.request_id, []) + event.data
        elif event.kind == "freed":
            assert event.data == held.pop(event.request_id)
    assert held == {}
    hits = sum(4 * len(event.data) for event in trace.of_kind("hit"))
    assert hits >= sum(output.num_cached_tokens for output in outputs) > 0


def test_without_a_trace_none_is_made(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*args: object) -> None:
        raise AssertionError("a Trace was touched")

    monkeypatch.setattr(types.Trace, "__init__", touched)
    monkeypatch.setattr(types.Trace, "add", touched)
    engine = make(block_size=4, num_gpu_blocks_override=22)
    engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert engine.trace is None
    with pytest.raises(AssertionError, match="touched"):
        make(trace=True)


def test_the_virtual_clock_gives_the_same_times_to_the_digit(make: Callable[..., Engine]) -> None:
    def times() -> list[tuple[float | None, list[float]]]:
        clock = VirtualClock(SHAPES["qwen3-0.6b"], hardware_named("h200"))
        engine = make(block_size=4, max_num_batched_tokens=16, clock=clock)
        outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        return [(output.time_to_first_token, output.inter_token_times) for output in outputs]

    assert times() == times()
