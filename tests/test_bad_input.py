"""What can't be served is refused at once, in words that say what to change, and harms nobody else.

And a fault inside a step is raised, leaves everything as if the step had not been, and the next try
gives what an undisturbed run would have given.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Fault, expected_tokens, fake_core, save_random_model

from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.detokenizer import Detokenizer
from nanoteach.engine import Engine
from nanoteach.engine_core import EngineCore
from nanoteach.hub import ModelError
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.sequence import Sequence
from nanoteach.types import SamplingParams

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
MANY = 100  # steps: more than enough for all of them, so that no fault can hang a test
SHARED = list(range(40))
PROMPTS = [[*SHARED, 1], [*SHARED, 2, 3], [5, 6, 7], SHARED]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


def new_engine(folder: Path, **options: Any) -> Engine:
    usual: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 60, "block_size": 4}
    return Engine(folder, **usual | options)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """The tokens of `PROMPTS` when nothing goes wrong."""
    outputs = new_engine(folder).generate(PROMPTS, PARAMS, use_tqdm=False)
    return {str(i): output.outputs[0].token_ids for i, output in enumerate(outputs)}


@pytest.fixture
def engine(folder: Path, expected: dict[str, list[int]]) -> Iterator[Engine]:
    """An engine in the midst of its work, which must go on as if nothing had been asked of it."""
    engine = new_engine(folder)
    add_all(engine)
    engine.step()
    engine.step()
    yield engine
    assert finish_all(engine) == expected


def add_all(engine: Engine) -> None:
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, PARAMS)


def finish_all(engine: Engine) -> dict[str, list[int]]:
    """The tokens of all added requests. Nothing may be left after them."""
    assert engine.check() == []
    done = {}
    for _ in range(MANY):
        for output in engine.step():
            done[output.request_id] = output.outputs[0].token_ids
        assert engine.check() == []
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_used_blocks == 0
    assert engine.requests == {}
    return done


# --- prompts ----------------------------------------------------------------------------------

BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty text": ("", "the prompt is empty"),
    "no token ids": ([[]], "the prompt is empty"),
    "empty dict": ({}, "'prompt' or 'prompt_token_ids'"),
    "wrong key": ({"text": "Hi"}, "'prompt' or 'prompt_token_ids'"),
    "key of vLLM's": ({"prompt": "Hi", "cache_salt": "x"}, "SamplingParams"),
    "none": (None, "a text or a list of token ids, not None"),
    "number": (5, "a text or a list of token ids, not 5"),
    "none in a list": (["Hi", None], "a text or a list of token ids, not None"),
    "none in a dict": ({"prompt_token_ids": None}, "a text or a list of token ids, not None"),
    "number and text": ([1, "Hi"], "a text or a list of token ids, not"),
    "floats": ([[1.0, 2.0]], "a text or a list of token ids, not"),
    "bytes": (b"Hi", "a text or a list of token ids, not b'Hi'"),
    "booleans": ([True, False], "True is no token id of this model: they run from 0 to"),
    "negative": ([3, -1], "-1 is no token id of this model: they run from 0 to"),
    "beyond the vocabulary": ([3, 10**6], "1000000 is no token id of this model"),
    "beyond any integer": ([2**70], "is no token id of this model"),
    "half a character": ("\ud800", "surrogates not allowed"),
    "too long": ([1] * 2048, "shorten the prompt or lower max_tokens"),
    "too long with its output": ([1] * 2040, "shorten the prompt or lower max_tokens"),
    "never in this pool": ([1] * 240, "the whole pool has 60: shorten the prompt, lower max_to"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts(engine: Engine, name: str) -> None:
    prompt, message = BAD_PROMPTS[name]
    ids = list(engine.requests)
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt, PARAMS, use_tqdm=False)
    batch = prompt if isinstance(prompt, list) and name.startswith("no") else [prompt]
    with pytest.raises(ValueError, match=message):
        engine.generate(["Good", "Fine", *batch, "Well"], PARAMS, use_tqdm=False)
    if len(batch) == 1:
        with pytest.raises(ValueError):
            engine.stream(batch[0], PARAMS)
        with pytest.raises(ValueError):
            engine.add_request("x", batch[0], PARAMS)
    assert list(engine.requests) == ids
    assert engine.check() == []


def test_without_max_tokens_a_request_goes_as_far_as_the_pool_lets_it(engine: Engine) -> None:
    """60 blocks of 4. It was refused: a chat says no max_tokens, so every chat was."""
    open_end = SamplingParams(max_tokens=None, ignore_eos=True)
    (output,) = engine.generate([1] * 100, open_end, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 141
    with pytest.raises(ValueError, match="the whole pool has 60: shorten the prompt"):
        engine.generate([1] * 241, open_end, use_tqdm=False)
    (output,) = engine.generate([1] * 240, open_end, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1


def test_the_longest_that_fits_is_served(engine: Engine) -> None:
    """60 blocks of 4; the last token that is sampled needs no place."""
    (output,) = engine.generate([1] * 229, PARAMS, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12
    with pytest.raises(ValueError, match="need 61 blocks"):
        engine.generate([1] * 230, PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        list(np.array([5, 6, 7])),
        [np.array([5, 6, 7])],
        np.array([[5, 6, 7]]),
        [list(torch.tensor([5, 6, 7]))],
        range(5, 8),
        ([t, t + 1, t + 2] for t in [5]),
    ],
    ids=lambda prompt: f"{type(prompt).__name__}",
)
def test_whole_numbers_of_any_kind_are_token_ids(
    engine: Engine, expected: dict[str, list[int]], prompt: Any
) -> None:
    (output,) = engine.generate(prompt, PARAMS, use_tqdm=False)
    assert output.outputs[0].token_ids == expected["2"]
    assert [type(token) for token in output.prompt_token_ids] == [int] * 3


def test_prompts_from_a_generator_are_all_served(engine: Engine) -> None:
    outputs = engine.generate((text for text in ["one", "two"]), PARAMS, use_tqdm=False)  # type: ignore[arg-type]
    assert [output.prompt for output in outputs] == ["one", "two"]


@pytest.mark.parametrize(
    "messages",
    [
        *([], None, "Hi", {"role": "user", "content": "Hi"}, ["Hi"], [{"role": "user"}], [[]]),
        *([{"rol": "user", "content": "Hi"}], [{"role": "user", "content": "Hi"}, "Hi"]),
    ],
    ids=str,
)
def test_bad_conversations(engine: Engine, messages: Any) -> None:
    with pytest.raises(ValueError, match="message"):
        engine.chat(messages, PARAMS, use_tqdm=False)


# --- parameters -------------------------------------------------------------------------------

BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, not 0"),
    ({"max_tokens": -1}, "not -1"),
    ({"max_tokens": "5"}, "not '5'"),
    ({"max_tokens": 5.0}, "not 5.0"),
    ({"max_tokens": True}, "not True"),
    ({"temperature": -0.7}, "temperature is a number from 0 (greedy) to 1,000,000"),
    ({"temperature": "hot"}, "not 'hot'"),
    ({"temperature": None}, "not None"),
    ({"temperature": True}, "not True"),
    ({"temperature": float("nan")}, "not nan"),
    ({"temperature": float("inf")}, "not inf"),
    ({"temperature": 10**400}, "temperature is a number from 0"),
    ({"seed": 0.5}, "seed is a whole number"),
    ({"seed": "7"}, "not '7'"),
    ({"stop": 5}, "stop takes one or more strings"),
    ({"stop": ""}, "stop takes one or more strings, none of them empty"),
    ({"stop": ["a", ""]}, "stop takes one or more strings, none of them empty"),
    ({"stop": [5]}, "stop takes one or more strings"),
    ({"stop": b"a"}, "stop takes one or more strings"),
    ({"stop_token_ids": 5}, "stop_token_ids takes"),
    ({"stop_token_ids": "ab"}, "stop_token_ids takes"),
    ({"stop_token_ids": [True]}, "stop_token_ids takes"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"max_token": 5}, "did you mean 'max_tokens'?"),
    ({"stop_tokens": [1]}, "did you mean 'stop_token_ids'?"),
    ({"beams": 2}, "options are max_tokens, "),
    ({"min_p": 0.9}, "no option 'min_p': of vLLM's sampling there are temperature, top_k, top_p"),
    ({"top_k": -2}, "top_k is a whole number of tokens, or 0 or -1 for all, not -2"),
    ({"top_k": 2.0}, "top_k is a whole number"),
    ({"top_k": True}, "top_k is a whole number"),
    ({"top_k": None}, "top_k is a whole number"),
    ({"top_p": 0}, "top_p is a number above 0, up to 1 for all, not 0"),
    ({"top_p": 1.01}, "top_p is a number above 0"),
    ({"top_p": -0.5}, "top_p is a number above 0"),
    ({"top_p": float("nan")}, "top_p is a number above 0"),
    ({"top_p": "0.9"}, "top_p is a number above 0, up to 1 for all, not '0.9'"),
    ({"top_p": True}, "top_p is a number above 0"),
    ({"logprobs": -1}, "logprobs is a whole number from 0 to 20, or None, not -1"),
    ({"logprobs": 21}, "logprobs is a whole number from 0 to 20"),
    ({"logprobs": 1.0}, "logprobs is a whole number from 0 to 20"),
    ({"logprobs": True}, "logprobs is a whole number from 0 to 20"),
]


@pytest.mark.parametrize(("options", "message"), BAD_PARAMS, ids=str)
def test_bad_sampling_params(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**options)
    assert message in str(error.value)


@pytest.mark.parametrize("params", [5, "greedy", {"max_tokens": 5}, [None], [5], []], ids=str)
def test_what_is_no_sampling_params(engine: Engine, params: Any) -> None:
    ids = list(engine.requests)
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate(["Hi"], params, use_tqdm=False),
        lambda: engine.stream("Hi", params),
        lambda: engine.add_request("x", "Hi", params),
        lambda: engine.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="sampling parameters"):
            call()
    assert list(engine.requests) == ids


def test_one_for_all_or_one_for_each(engine: Engine) -> None:
    with pytest.raises(ValueError, match="2 prompts came with 3 sampling parameters"):
        engine.generate(["a", "b"], [PARAMS] * 3, use_tqdm=False)


@pytest.mark.parametrize("salt", ["", "ü", "\ud800"])
def test_any_string_is_a_salt(engine: Engine, salt: str) -> None:
    (output,) = engine.generate([SHARED], SamplingParams(3, cache_salt=salt), use_tqdm=False)
    assert output.num_cached_tokens == 0


# --- ids --------------------------------------------------------------------------------------


def test_an_id_in_use(engine: Engine) -> None:
    with pytest.raises(ValueError, match="request id '0' is in use"):
        engine.add_request("0", "Hi", PARAMS)


@pytest.mark.parametrize("request_id", [5, None, b"x"])
def test_an_id_is_a_string(engine: Engine, request_id: Any) -> None:
    with pytest.raises(ValueError, match="a request id is a string"):
        engine.add_request(request_id, "Hi", PARAMS)


def test_ids_of_ones_own_never_clash_with_those_given(
    engine: Engine, expected: dict[str, list[int]]
) -> None:
    for name in ("generate-1", "generate-2", "stream-4"):
        engine.add_request(name, PROMPTS[2], SamplingParams(2))
    outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == list(expected.values())
    assert list(engine.stream(PROMPTS[2], PARAMS))[-1].outputs[0].token_ids == expected["2"]
    engine.abort_request(["generate-1", "generate-2", "stream-4"])


# --- the engine's options ---------------------------------------------------------------------

BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 0}, "block_size must be a whole number of at least 1, not 0"),
    ({"block_size": "16"}, "block_size must be a whole number of at least 1, not '16'"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be"),
    ({"max_num_seqs": 0}, "max_num_seqs must be"),
    ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override must be"),
    ({"max_model_len": 0}, "max_model_len must be"),
    ({"max_model_len": 4096}, "max_model_len = 4096 is over 2048"),
    ({"gpu_memory_utilization": 2}, "over 0 and at most 1, not 2"),
    ({"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 100}, "raise kv_cache_memory_byt"),
    ({"block_sizes": 8}, "did you mean 'block_size'?"),
    ({"max_num_batched_token": 8}, "did you mean 'max_num_batched_tokens'?"),
    ({"tensor_parallel_size": 2}, "options are model, device, dtype, trace, clock, block_size, "),
    ({"modle": "tiny"}, "did you mean 'model'?"),
    ({"gpu_memory_utilization": "0.9"}, "over 0 and at most 1, not '0.9'"),
    ({"gpu_memory_utilization": None}, "over 0 and at most 1, not None"),
    ({"enable_prefix_caching": "yes"}, "enable_prefix_caching is True or False, not 'yes'"),
    ({"trace": "yes"}, "trace is True or False, not 'yes'"),
    ({"clock": 5}, "clock is a WallClock or a VirtualClock, not 5"),
    ({"device": "gpu"}, "device is 'gpu'; it can be cpu, cuda, mps"),
    ({"device": "cuda:99"}, "device is 'cuda:99', but PyTorch finds only cpu"),
    ({"device": 0}, "device is 0; it can be cpu, cuda, mps"),
    ({"dtype": "int8"}, "dtype is 'int8'; it can be auto, float32, bfloat16, float16"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=str)
def test_bad_engine_options(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        new_engine(folder, **options)
    assert message in str(error.value)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model 'tinny'; there are tiny, smollm2-135m"):
        Engine("tinny")
    with pytest.raises(ModelError, match="it has no config.json"):
        Engine(tmp_path)
    for nothing in ("", 5):
        with pytest.raises(ModelError, match="there are tiny, smollm2-135m"):
            Engine(nothing)  # type: ignore[arg-type]


def test_a_dtype_by_name(folder: Path) -> None:
    assert new_engine(folder, dtype="bfloat16").core.runner.model.dtype == torch.bfloat16
    assert new_engine(folder, dtype="auto").core.runner.model.dtype == torch.float32


def test_what_to_abort_is_named_by_a_string(engine: Engine) -> None:
    with pytest.raises(ValueError, match="a request id is a string, not None"):
        engine.abort_request(None)  # type: ignore[arg-type]


# --- faults inside a step ---------------------------------------------------------------------


def break_once(
    monkeypatch: pytest.MonkeyPatch, target: object, name: str, error: BaseException, calls: int
) -> None:
    """The method raises at its call number `calls` from now, and works again afterwards."""
    works, left = getattr(target, name), calls

    def breaks(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise error
        return works(*args, **kwargs)

    monkeypatch.setattr(target, name, breaks)


PLACES: dict[str, Callable[[Engine], tuple[object, str]]] = {
    "model": lambda engine: (engine.core.runner.model, "forward"),
    "sampler": lambda engine: (sys.modules["nanoteach.model_runner"], "sample"),
    "attention": lambda engine: (engine.core.runner.attention, "attend"),
    "block manager": lambda engine: (engine.core.scheduler.block_manager, "take_free_block"),
    "commit": lambda engine: (engine.core.scheduler.block_manager, "publish"),
    "clock": lambda engine: (engine.core.clock, "tick"),
}


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("place", PLACES)
def test_after_a_fault_a_retry_gives_the_same(
    folder: Path,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    calls: int,
    steps: int,
    error: type[BaseException],
) -> None:
    """In the first step, where prompts are being shared, and in later ones; with little room."""
    engine = new_engine(folder, max_num_batched_tokens=32, num_gpu_blocks_override=24)
    add_all(engine)
    for _ in range(steps):
        engine.step()
    with monkeypatch.context() as patch:
        break_once(patch, *PLACES[place](engine), error(), calls)
        done: dict[str, list[int]] = {}
        with pytest.raises(error):
            for _ in range(MANY):
                done |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
    assert engine.stats().num_used_blocks == engine.stats().num_running == 0
    assert done | finish_all(engine) == expected


def test_after_a_fault_all_can_be_aborted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[int]]
) -> None:
    engine = new_engine(folder)
    add_all(engine)
    with monkeypatch.context() as patch:
        break_once(patch, engine.core.runner.model, "forward", Fault(), 3)
        with pytest.raises(Fault):
            for _ in range(MANY):
                engine.step()
    engine.abort_request(list(expected))
    assert finish_all(engine) == {}
    add_all(engine)
    assert finish_all(engine) == expected


def test_a_fault_ends_generate_and_leaves_added_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[int]]
) -> None:
    with monkeypatch.context() as patch:
        break_once(patch, engine.core.runner.model, "forward", Fault(), 3)
        with pytest.raises(Fault):
            engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert list(engine.requests) == list(expected)
    stream = engine.stream(PROMPTS[0], PARAMS)
    with monkeypatch.context() as patch:
        break_once(patch, engine.core.runner.model, "forward", Fault(), 2)
        with pytest.raises(Fault):
            list(stream)
    assert list(engine.requests) == list(expected)


@pytest.mark.parametrize("calls", [1, 2, 5, 20])
def test_a_fault_in_making_text_loses_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[int]], calls: int
) -> None:
    """What was not told because of it comes with the next step, and the text is whole."""
    (whole,) = engine.generate(PROMPTS[2], PARAMS, use_tqdm=False)
    engine.add_request("mine", PROMPTS[2], PARAMS)
    told = {}
    with monkeypatch.context() as patch:
        break_once(patch, Detokenizer, "decode", Fault(), calls)
        with pytest.raises(Fault):
            for _ in range(MANY):
                told.update({output.request_id: output for output in engine.step()})
    for _ in range(MANY):
        told.update({output.request_id: output for output in engine.step()})
    assert told["mine"].outputs == whole.outputs
    for name, output in told.items():  # those that are over are not told again by the fixture
        if output.finished and name != "mine":
            engine.add_request(name, PROMPTS[int(name)], PARAMS)


def interrupted_core(line: int) -> tuple[EngineCore, list[Sequence], bool]:
    """A core that ran to its end, or to Ctrl-C at the line number `line` of its books."""
    core, runner = fake_core(
        ChunkedPrefillScheduler, PrefixCachingBlockManager, num_blocks=8, block_size=2,
        max_num_seqs=4, budget=6, max_model_len=14,
    )  # fmt: skip
    prompts = [[1, 1, 1, 1, 1, 2], [1, 1, 1, 1, 2], [1, 1, 1, 1, 1, 2, 2], [2, 2, 1]]
    params = SamplingParams(5, ignore_eos=True)
    seqs = [core.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    books = ("scheduler", "chunked_prefill", "block_manager", "prefix_cache", "engine_core")
    files = {sys.modules[f"nanoteach.{name}"].__file__ for name in books}
    left = line

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if event == "call":
            return trace if frame.f_code.co_filename in files else None
        left -= event == "line"
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    try:
        while core.has_unfinished_requests():
            sys.settrace(trace)
            core.step()
            sys.settrace(before)
    except KeyboardInterrupt:
        runner.holders = {}
        return core, seqs, True
    finally:
        sys.settrace(before)
    return core, seqs, False


def test_ctrl_c_at_any_line_does_no_harm() -> None:
    """Every 7th line of the books of a run with shared prompts, chunks and preemptions."""
    interrupted, line = True, 1
    while interrupted:
        core, seqs, interrupted = interrupted_core(line)
        assert core.check() == [], line
        for _ in range(MANY):
            core.step()
        for seq in seqs:
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            assert seq.output_token_ids == expected_tokens(prompt, seq.params), line
        assert core.scheduler.block_manager.num_free == 8
        assert core.scheduler.num_preemptions
        line += 7
    assert line > 1000
