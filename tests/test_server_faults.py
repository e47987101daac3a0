"""What may happen to a server. After each: idle, every block free, and `check` finds nothing."""

import asyncio
import gc
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fakes import save_random_model

from nanoteach import cli, core_process
from nanoteach.engine import Engine
from nanoteach.server import Server, running

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


OPTIONS: dict[str, Any] = {
    "device": "cpu", "block_size": 4, "num_gpu_blocks_override": 400, "max_num_seqs": 32
}  # fmt: skip


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    engine = Engine(folder, **OPTIONS)
    yield engine
    assert_idle(engine)


@pytest.fixture
def engine_around_process(folder: Path) -> Iterator[Engine]:
    with core_process.engine_around_process(folder, **OPTIONS) as engine:
        yield engine
        assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    """Soon, that is: a client that has left is noticed a moment later."""
    for _ in range(1000):
        if not engine.requests:
            break
        time.sleep(0.01)
    assert engine.requests == {}
    assert engine.stats().num_used_blocks == 0
    assert engine.check() == []


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def body(max_tokens: int, **others: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "prompt": "The first step", "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, **others,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["engine", "engine_around_process"])
def test_200_streams_of_which_a_third_disconnect(kind: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(kind)
    rng = random.Random(0)

    async def one(client: httpx.AsyncClient, i: int) -> int | None:
        """How many events came, or None if we left."""
        await asyncio.sleep(rng.random() * 2)
        count, last, leaves, when = 0, "", i % 3 == 0, rng.randint(0, 3)
        # Several tokens may come in one event, so one that leaves asks for far more of them.
        max_tokens = rng.randint(8, 20) * (10 if leaves else 1)
        wanted = body(max_tokens, prompt=f"{i}: once", stream=True)
        async with client.stream("POST", "/v1/completions", json=wanted) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                count += line.startswith("data: {")
                if leaves and count >= when:
                    return None
                last = line or last
        assert last == "data: [DONE]"
        return count

    async def main(url: str) -> list[int | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client, i) for i in range(200)))

    with running(engine) as url:
        counts = asyncio.run(main(url))
        assert_idle(engine)
        assert httpx.post(f"{url}/v1/completions", json=body(3)).status_code == 200
    assert counts.count(None) > 50  # a few came to their end first
    assert all(count for count in counts if count is not None)


def test_a_client_that_waits_for_the_whole_and_leaves_aborts_its_request(engine: Engine) -> None:
    with running(engine) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=body(1400), timeout=0.3)
        start = time.perf_counter()
        assert_idle(engine)
        assert time.perf_counter() - start < 2
        tokens = engine.stats().num_computed_tokens
        assert tokens < 1400
        time.sleep(0.1)
        assert engine.stats().num_computed_tokens == tokens


def test_what_the_pool_cant_hold_is_refused_and_what_it_can_is_not(engine: Engine) -> None:
    with running(engine) as url, connect(url) as client:
        with pytest.raises(openai.BadRequestError, match="the whole pool has 400") as caught:
            client.completions.create(model="tiny", prompt=[1] * 1000, max_tokens=700)
        assert caught.value.code == "context_length_exceeded"
        # Each needs a third of the pool, so they take turns, and some are preempted.
        with httpx.Client(base_url=url, timeout=120) as http:
            threads = [
                threading.Thread(target=http.post, args=("/v1/completions",),
                                 kwargs={"json": body(200, prompt=[1] * 300)})
                for _ in range(6)
            ]  # fmt: skip
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert_idle(engine)


def test_a_full_queue_is_a_429(folder: Path) -> None:
    engine = Engine(folder, device="cpu", num_gpu_blocks_override=400, max_num_seqs=1)
    with running(engine, max_queue=2) as url, connect(url) as client:
        streams = [
            client.completions.create(
                model="tiny", prompt="b", max_tokens=1500, stream=True,
                extra_body={"ignore_eos": True},
            )
            for _ in range(3)
        ]  # fmt: skip
        with pytest.raises(openai.RateLimitError, match="try again later") as caught:
            client.completions.create(model="tiny", prompt="b", max_tokens=1)
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.code == "queue_full"
        with pytest.raises(openai.BadRequestError, match="4 prompts are more than ever"):
            client.completions.create(model="tiny", prompt=["b"] * 4, max_tokens=1)
        for stream in streams:
            stream.close()
        assert_idle(engine)
        assert client.completions.create(model="tiny", prompt="b", max_tokens=1).choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_inside_a_step_is_told_and_the_server_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    right, calls = engine.core.runner.execute, 0

    def execute(scheduled: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("planted")
        return right(scheduled)

    monkeypatch.setattr(engine.core.runner, "execute", execute)
    with running(engine) as url, connect(url) as client:

        def ask() -> Any:
            answer = client.completions.create(
                model="tiny", prompt="b", max_tokens=6, stream=stream
            )
            return list(answer)

        with pytest.raises(openai.APIError, match="planted") as caught:
            ask()
        assert stream or isinstance(caught.value, openai.InternalServerError)
        assert_idle(engine)
        assert ask()
        assert httpx.get(f"{url}/health").status_code == 200
        assert 'finished_reason="error"} 1.0' in httpx.get(f"{url}/metrics").text


def test_memory_is_steady_over_2000_requests(engine: Engine) -> None:
    def resident() -> float:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096 / 2**20

    async def work(client: httpx.AsyncClient, count: int) -> None:
        for i in range(count):
            wanted = body(1 + i % 2, stream=i % 3 == 0, prompt=[i % 97, i % 89])
            answer = await client.post("/v1/completions", json=wanted)
            assert answer.status_code == 200

    async def main(url: str) -> list[float]:
        sizes = []
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for _ in range(4):
                await asyncio.gather(*(work(client, 500 // 20) for _ in range(20)))
                sizes.append(resident())
        return sizes

    with running(engine) as url:
        sizes = asyncio.run(main(url))
        assert_idle(engine)
    assert sizes[3] - sizes[0] < 10, f"MiB after each 500 requests: {sizes}"


# --- the end -----------------------------------------------------------------------------------


@pytest.fixture
def server(
    folder: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`nanoteach serve` as a process of its own; its parameter is further options."""
    command = [
        sys.executable, "-m", "nanoteach", "serve", "--model", str(folder), "--port", "0",
        "--served-model-name", "tiny", "--device", "cpu", "--num-gpu-blocks-override", "800",
        "--shutdown-timeout", "2", *getattr(request, "param", ()),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout
        found = re.search(r"http://[\d.:]+", process.stdout.readline())
        assert found
        yield process, found[0]
    finally:
        process.kill()


@pytest.mark.parametrize("server", [(), ("--core-process",)], indirect=True)
def test_sigterm_under_load_finishes_the_short_and_ends_the_long(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = server

    async def read(client: httpx.AsyncClient, max_tokens: int, begun: asyncio.Event) -> list[str]:
        lines = []
        wanted = body(max_tokens, stream=True, prompt="b")
        async with client.stream("POST", "/v1/completions", json=wanted) as answer:
            async for line in answer.aiter_lines():
                begun.set()
                lines.append(line)
        return [line for line in lines if line]

    async def main() -> tuple[list[list[str]], list[list[str]]]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            events = [asyncio.Event() for _ in range(16)]
            tasks = [
                asyncio.create_task(read(client, 2000 if i % 2 else 20, event))
                for i, event in enumerate(events)
            ]
            await asyncio.gather(*(event.wait() for event in events))
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                async with httpx.AsyncClient() as other:
                    await other.get(f"{url}/health")
            results = await asyncio.gather(*tasks)
            return results[::2], results[1::2]

    short, long = asyncio.run(main())
    for lines in short:
        assert '"finish_reason": "length"' in lines[-2] and lines[-1] == "data: [DONE]"
    for lines in long:
        assert lines[-1] == "data: [DONE]"
        assert "shutting down" in lines[-2] or '"finish_reason": "length"' in lines[-2]
    # `nanoteach serve` walks every block at its end, and this says that all was well.
    assert process.wait(30) == 0
    assert process.stderr and process.stderr.read() == ""


@pytest.mark.parametrize(
    "server",
    [("--shutdown-timeout", "3000"), ("--shutdown-timeout", "3000", "--core-process")],
    indirect=True,
)
def test_a_second_ctrl_c_ends_it_now(server: tuple[subprocess.Popen[str], str]) -> None:
    process, url = server

    async def main() -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            wanted = body(2000, stream=True)
            async with client.stream("POST", "/v1/completions", json=wanted) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                process.send_signal(signal.SIGINT)
                with pytest.raises(httpx.TransportError):  # so it has come
                    while True:
                        httpx.get(f"{url}/health", timeout=60)
                process.send_signal(signal.SIGINT)
                return [line async for line in lines if line]

    lines = asyncio.run(main())
    assert "shutting down" in lines[-2] and lines[-1] == "data: [DONE]"
    assert process.wait(30) == 130
    assert process.stderr and "Traceback" not in process.stderr.read()


def test_a_sigterm_before_uvicorn_listens_for_it_ends_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, known = Server.run, signal.getsignal(signal.SIGTERM)

    def run(self: Server, listeners: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        assert self.should_exit
        right(self, listeners)

    monkeypatch.setattr(Server, "run", run)
    try:
        argv = ["--port", "0", "--model", str(folder), "--device", "cpu"]
        assert cli.main(["serve", *argv, "--num-gpu-blocks-override", "400"]) == 0
    finally:
        signal.signal(signal.SIGTERM, known)


def test_an_idle_server_ends_at_once(server: tuple[subprocess.Popen[str], str]) -> None:
    process, url = server
    assert httpx.get(f"{url}/health").status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_what_is_there_at_the_start_is_no_work_for_the_garbage_collector(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(Server, "run", lambda *_: frozen.append(gc.get_freeze_count()))
    assert cli.main(["serve", "--port", "0", "--model", str(folder), "--device", "cpu"]) == 0
    assert frozen[0] > 100_000 and gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("--port", "70000"), "0-65535"),
        (("--max-queue", "0"), "max_queue"),
        (("--api-key", ""), "--api-key is empty"),
        (("--shape", "no-such"), "no shape is named"),
        (("--shape", "toy", "--model", "tiny"), "give one of them"),
        (("--shutdown-timeout", "0"), "shutdown-timeout"),
        (("--max-model-len", "0"), "max_model_len"),
    ],
)
def test_a_wrong_option_is_one_line(
    argv: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--port", "0", *argv]) == 1
    assert word in capsys.readouterr().err


def test_it_listens_on_ipv6(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    places: list[Any] = []
    monkeypatch.setattr(Server, "run", lambda self, listeners: places.extend(
        listener.getsockname() for listener in listeners
    ))  # fmt: skip
    argv = ["--host", "::1", "--port", "0", "--model", str(folder), "--device", "cpu"]
    assert cli.main(["serve", *argv]) == 0
    ((host, port, *_),) = places
    assert host == "::1" and f"http://[::1]:{port}/v1" in capsys.readouterr().out


def test_without_the_extra_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nanoteach.server", None)
    assert cli.main(["serve"]) == 1
    assert "pip install 'nanoteach[serve]'" in capsys.readouterr().err
