"""The core in a process of its own: the same tokens, and what may happen to either side."""

import asyncio
import contextlib
import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import save_random_model

from nanoteach.async_engine import AsyncEngine, EngineStopped, StepFailed
from nanoteach.config import EngineConfig
from nanoteach.core_process import CoreDied, CoreProcess, build_core, engine_around_process
from nanoteach.engine import MOST_TOGETHER, Engine
from nanoteach.engine_core import EngineCore
from nanoteach.loader import load_tokenizer
from nanoteach.metrics import Metrics
from nanoteach.server import running
from nanoteach.types import RequestOutput, SamplingParams

ROOT = Path(__file__).parent.parent
OPTIONS: dict[str, Any] = {
    "device": "cpu", "block_size": 4, "num_gpu_blocks_override": 300, "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Engine]:
    with engine_around_process(folder, **OPTIONS) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    assert shared.requests == {} and shared.core.sequences == {}
    assert shared.check() == [] and shared.stats().num_used_blocks == 0


def build_faulty(folder: Path, at: int) -> EngineCore:
    """A core whose step number `at` raises."""
    core = build_core(folder, OPTIONS)
    right, calls = core.runner.execute, itertools.count(1)

    def execute(scheduled: Any) -> Any:
        if next(calls) == at:
            raise RuntimeError("planted")
        return right(scheduled)

    core.runner.execute = execute  # type: ignore[method-assign]
    return core


def some(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens, ignore_eos=True, **others)


def test_it_gives_what_an_engine_gives(engine: Engine, folder: Path) -> None:
    prompts = [f"{i} " + "and so it went on " * (i % 4) for i in range(30)]
    params = [
        some(40, stop=[*"ABCDEFGHIJKLMNOPabcdefghi", "xyz"]) if i % 3 == 0
        else some(30, temperature=0.9, top_k=20, top_p=0.9, seed=i, logprobs=2) if i % 3 == 1
        else some(25)
        for i in range(30)
    ]  # fmt: skip
    here = Engine(folder, **OPTIONS).generate(prompts, params, use_tqdm=False)
    there = engine.generate(prompts, params, use_tqdm=False)
    assert [out.outputs[0].finish_reason for out in here].count("stop") > 3
    for a, b in zip(here, there, strict=True):
        (left,), (right,) = a.outputs, b.outputs
        assert (left.text, left.token_ids) == (right.text, right.token_ids)
        assert left.finish_reason == right.finish_reason
        # Batches are others where requests arrive one by one, and so is rounding.
        assert left.cumulative_logprob == pytest.approx(right.cumulative_logprob, abs=1e-4)
        assert left.logprobs is None or len(right.logprobs or ()) == len(left.logprobs)
    for out in there:
        assert len(out.token_times) == len(out.outputs[0].token_ids)
        assert out.time_to_first_token is not None and out.time_to_first_token > 0


def test_a_stream_and_its_end(engine: Engine) -> None:
    texts = [out.outputs[0].text for out in engine.stream("b", some(12))]
    assert len(texts) == 12 and all(b.startswith(a) for a, b in itertools.pairwise(texts))
    for _ in engine.stream("b", some(1000)):
        break  # closes it, and so aborts the request over there, too


def test_a_step_with_nothing_to_do_does_nothing(engine: Engine) -> None:
    for _ in range(3):
        assert engine.step() == []


def test_what_cant_be_served_is_refused_here(engine: Engine) -> None:
    for prompt, params, word in (
        ("", some(1), "empty"),
        ("b", some(3000), "max_model_len"),
        ([10**6], some(1), "no token id"),
        ("b" * 1000, some(900), "whole pool"),
    ):
        with pytest.raises(ValueError, match=word):
            engine.add_request("x", prompt, params)


def test_an_id_may_come_again_while_news_of_its_first_use_come(engine: Engine) -> None:
    (expected,) = engine.generate("abc", some(30), use_tqdm=False)
    for _ in range(5):
        engine.add_request("x", "another text", some(500))
        engine.step()
        engine.abort_request("x")
    engine.add_request("x", "abc", some(30))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs == expected.outputs


def test_who_is_slow_gets_several_tokens_together_and_all_are_counted(engine: Engine) -> None:
    metrics, steps = Metrics(), 0
    for i in range(4):
        engine.add_request(str(i), "abc", some(50))
    while engine.has_unfinished_requests():
        time.sleep(0.05)
        metrics.stepped(engine.step())
        steps += 1
    assert steps < 25
    text = metrics.render(engine.stats()).decode()
    assert "nanoteach:generation_tokens_total 200.0" in text
    assert "nanoteach:prompt_tokens_total 12.0" in text
    assert "nanoteach:time_to_first_token_seconds_count 4.0" in text
    assert "nanoteach:inter_token_latency_seconds_count 196.0" in text
    assert metrics.told == {}


def test_both_may_send_much_at_once(folder: Path) -> None:
    """More than a pipe takes, in both directions, while nobody reads here."""
    options = {**OPTIONS, "num_gpu_blocks_override": 20_000, "max_num_seqs": 64}
    with engine_around_process(folder, **options) as engine:
        for i in range(64):
            engine.add_request(f"long {i}", "b", some(1900))
        time.sleep(3)  # its news fill the pipe
        for i in range(400):
            engine.add_request(str(i), "b" * 2000, some(1))
            engine.abort_request(str(i))
        engine.abort_request([f"long {i}" for i in range(64)])
        assert engine.check() == [] and engine.stats().num_used_blocks == 0


def test_a_mistake_in_its_making_is_told(folder: Path) -> None:
    for options, word in (({"max_model_len": 0}, "max_model_len"), ({"device": "gpu"}, "device")):
        with pytest.raises(ValueError, match=word), engine_around_process(folder, **options):
            pass


def test_one_that_could_not_be_made_leaves_nothing_open(folder: Path) -> None:
    before = 0
    for i in range(3):
        with contextlib.suppress(ValueError), engine_around_process(folder, device="gpu"):
            pass
        gc.collect()
        if i == 0:  # multiprocessing keeps something of its own open
            before = len(os.listdir("/dev/fd"))
    assert len(os.listdir("/dev/fd")) == before


def test_it_can_be_closed_while_its_news_wait_for_a_reader(folder: Path) -> None:
    options = {**OPTIONS, "num_gpu_blocks_override": 20_000, "max_num_seqs": 64}
    with engine_around_process(folder, **options) as engine:
        for i in range(64):
            engine.add_request(str(i), "b", some(1900))
        time.sleep(3)  # its news fill the pipe
    assert isinstance(engine.core, CoreProcess)
    assert engine.core.process.exitcode == 0  # not killed, after ten seconds


def test_it_ends_without_a_word(folder: Path) -> None:
    """Whether it has nothing to do, or is in the middle of something."""
    code = """
import sys
from nanoteach.core_process import engine_around_process
from nanoteach.types import RequestOutput, SamplingParams
if __name__ == "__main__":
    for busy in (False, True):
        with engine_around_process(sys.argv[1], device="cpu", block_size=16) as engine:
            if busy:
                engine.add_request("x", "b", SamplingParams(1900, ignore_eos=True))
                engine.step()
        print(engine.core.process.exitcode)
"""
    script = folder / "ends.py"
    script.write_text(code)
    ended = subprocess.run(
        [sys.executable, str(script), str(folder)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == ("0\n0\n", "")


def build_slowly(seconds: float) -> EngineCore:
    """What takes long, as a core on a GPU does."""
    time.sleep(seconds)
    raise ValueError("nobody should be there to hear this")


def test_a_process_whose_parent_is_gone_does_not_go_on_building() -> None:
    code = """
import multiprocessing, os, sys
from functools import partial
sys.path.insert(0, "tests")
from test_core_process import build_slowly
from nanoteach.core_process import run_core
context = multiprocessing.get_context("spawn")
ours, theirs = context.Pipe()
process = context.Process(target=run_core, args=(partial(build_slowly, 300), theirs))
process.start()
os._exit(1)
"""
    # Which waits until nobody has its pipes any more.
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert ended.stderr == ""


class Odd(str):
    """Can be sent, and not be received."""

    def __reduce__(self) -> Any:
        return int, ("odd",)


def test_a_message_that_cant_be_read_over_there_is_no_hang(folder: Path) -> None:
    with engine_around_process(folder, **OPTIONS) as engine:
        engine.add_request("x", "b", some(5, cache_salt=Odd("salt")))
        with pytest.raises(CoreDied, match="exit code 1"):
            engine.step()


def test_a_step_that_raises_ends_its_requests_and_no_others(folder: Path) -> None:
    """8 run, 4 wait; the sixth step raises. The 8 get an error, the 4 their tokens."""
    core = CoreProcess(partial(build_faulty, folder, 6))
    engine = Engine.around(core, load_tokenizer(folder), EngineConfig(max_num_seqs=8))

    async def main() -> None:
        async with AsyncEngine(engine) as async_engine:
            stream = await async_engine.open(["b"] * 12, some(12))
            with pytest.raises(StepFailed, match="planted"):
                async for _ in stream:
                    pass
            failed = set(stream.request_ids) - engine.requests.keys()
            assert len(failed) == 8
            async_engine.close(stream)
            again = [out async for out in async_engine.generate("b", some(12))]
            assert len(again[-1].outputs[0].token_ids) == 12
            assert async_engine.healthy
            assert await async_engine.call(Engine.check) == []

    try:
        asyncio.run(main())
    finally:
        core.close()
    assert not core.alive


def test_a_failure_of_requests_that_were_aborted_meanwhile_is_nobody_elses(folder: Path) -> None:
    with contextlib.closing(CoreProcess(partial(build_faulty, folder, 6))) as core:
        engine = Engine.around(core, load_tokenizer(folder), EngineConfig(max_num_seqs=8))
        engine.add_request("failed", "b", some(12))
        while not core.connection.poll():  # its five tokens and its failure are on their way
            time.sleep(0.01)
        time.sleep(0.5)
        engine.abort_request("failed")
        (out,) = engine.generate("b", some(12), use_tqdm=False)
        assert len(out.outputs[0].token_ids) == 12


def test_after_a_failure_a_step_waits_for_nothing(folder: Path) -> None:
    with contextlib.closing(CoreProcess(partial(build_faulty, folder, 1))) as core:
        engine = Engine.around(core, load_tokenizer(folder), EngineConfig(max_num_seqs=8))
        engine.add_request("failed", "b", some(12))
        with pytest.raises(RuntimeError, match="planted"):
            engine.step()
        assert core.failed == ["failed"] and engine.step() == []
        engine.abort_request("failed")
        assert not engine.has_unfinished_requests() and engine.check() == []


def test_if_the_process_dies_nobody_waits_for_ever(folder: Path) -> None:
    with engine_around_process(folder, **OPTIONS) as engine:

        async def main() -> None:
            async with AsyncEngine(engine) as async_engine:
                stream = await async_engine.open(["b"], some(1100))
                await anext(stream)
                assert isinstance(engine.core, CoreProcess)
                engine.core.process.kill()
                with pytest.raises(EngineStopped, match="has stopped"):
                    while True:
                        await asyncio.wait_for(anext(stream), 10)
                with pytest.raises(EngineStopped):
                    await async_engine.open(["b"])
                assert not async_engine.healthy

        asyncio.run(main())
        with pytest.raises(CoreDied, match="exit code -9"):
            engine.check()


def test_a_server_whose_process_died_says_so(folder: Path) -> None:
    with engine_around_process(folder, **OPTIONS) as engine, running(engine) as url:
        wanted = {"model": "tiny", "prompt": "b", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=wanted).status_code == 200
        assert isinstance(engine.core, CoreProcess)
        engine.core.process.kill()
        engine.core.process.join()
        assert httpx.get(f"{url}/health").status_code == 503
        for _ in range(2):  # the first finds it out
            answer = httpx.get(f"{url}/metrics")
            assert answer.status_code == 503 and "engine" in answer.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json=wanted).status_code == 503


def build_telling(folder: Path) -> EngineCore:
    """A core whose `check` says how many objects the garbage collector will not look at."""
    core = build_core(folder, OPTIONS)
    core.check = lambda: [str(gc.get_freeze_count())]  # type: ignore[method-assign]
    return core


def test_what_the_start_made_is_not_walked_for_garbage(folder: Path) -> None:
    with contextlib.closing(CoreProcess(partial(build_telling, folder))) as core:
        (frozen,) = core.check()
    assert int(frozen) > 100_000


def build_slow_steps(folder: Path, seconds: float) -> EngineCore:
    """A core whose steps take so long, and give a token each."""
    core = build_core(folder, OPTIONS)

    def execute(scheduled: Any) -> Any:
        time.sleep(seconds)
        return [5 if part.gives_token else None for part in scheduled]

    core.runner.execute = execute  # type: ignore[method-assign]
    return core


def test_a_new_request_is_in_the_next_step(folder: Path) -> None:
    """It comes early in a step of 0.6 s: its token comes with the end of the step after that."""
    with contextlib.closing(CoreProcess(partial(build_slow_steps, folder, 0.6))) as core:
        engine = Engine.around(core, load_tokenizer(folder), EngineConfig(max_num_seqs=8))

        async def main() -> None:
            async with AsyncEngine(engine) as async_engine:
                running = await async_engine.open(["b"], some(1000))
                await anext(running)
                (before,) = await anext(running)
                new = await async_engine.open(["b"], some(1))
                (output,) = await anext(new)
                (after,) = running.unread.values()
                steps = len(after.outputs[0].token_ids) - len(before.outputs[0].token_ids)
                assert output.finished and steps == 2
                async_engine.close(running)
                async_engine.close(new)

        asyncio.run(main())


def test_to_wake_it_often_does_no_harm(engine: Engine) -> None:
    """With nothing to do, more often than its buffer takes, and while it steps."""
    (expected,) = engine.generate("abc", some(30), use_tqdm=False)
    for _ in range(100_000):
        engine.core.wake()
    engine.add_request("x", "abc", some(30))
    last: list[RequestOutput] = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: [engine.core.wake() for _ in range(1000)])
        while engine.has_unfinished_requests():
            last = engine.step() or last
    assert last[0].outputs == expected.outputs


def test_after_its_end(folder: Path) -> None:
    with engine_around_process(folder, **OPTIONS) as engine:
        pass
    engine.core.wake()
    assert isinstance(engine.core, CoreProcess)
    engine.core.close()  # once more
    with pytest.raises(CoreDied, match="exit code 0"):
        engine.generate("b", use_tqdm=False)


def build_fast(folder: Path) -> EngineCore:
    """A core whose steps cost next to nothing, so that nobody can keep up with it."""
    core = build_core(folder, OPTIONS)

    def execute(scheduled: Any) -> Any:
        return [5 if part.gives_token else None for part in scheduled]

    core.runner.execute = execute  # type: ignore[method-assign]
    return core


def test_a_core_faster_than_its_reader_does_not_keep_him_from_telling(folder: Path) -> None:
    """To look for a stop string takes longer than such a step: there is always news."""
    with contextlib.closing(CoreProcess(partial(build_fast, folder))) as core:
        engine = Engine.around(core, load_tokenizer(folder), EngineConfig(max_num_seqs=8))
        for i in range(8):
            engine.add_request(str(i), "b", some(100, stop="no such text"))
        most = 0
        while engine.has_unfinished_requests():
            before = {i: request.detokenizer.num_tokens for i, request in engine.requests.items()}
            time.sleep(0.05)
            news = [(out.request_id, len(out.outputs[0].token_ids)) for out in engine.step()]
            most = max(most, *(count - before[i] for i, count in news))
        assert 1 < most <= 1 + MOST_TOGETHER
