"""`nanoteach bench serve`: what it sends, how it sums up, and that the knee is where it is."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fakes import save_random_model

from nanoteach import cli
from nanoteach.bench.random_model import SHAPES, random_folder
from nanoteach.bench.serve import (
    SHARED_TOKENS,
    TURNS,
    WARM_REQUESTS,
    WORKLOADS,
    Level,
    LoadTest,
    Record,
    knee,
    level_of,
    line_of,
    percentiles,
)
from nanoteach.config import ModelConfig
from nanoteach.engine import Engine
from nanoteach.loader import load_model
from nanoteach.sequence import Sequence
from nanoteach.server import running


def record(due: float, first: float = 0.1, end: float = 0.5, num_tokens: int = 5) -> Record:
    gaps = [(end - first) / (num_tokens - 1)] * (num_tokens - 1)
    return Record(due, 0.0, first, end, num_tokens, 0, 10, gaps)


def test_percentiles() -> None:
    assert percentiles([]) == {}
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
    found = percentiles([float(i) for i in range(101)])
    assert found == pytest.approx({"p50": 50, "p90": 90, "p99": 99})


def test_a_level_sums_up_its_requests() -> None:
    records = [record(10 + i) for i in range(5)]
    records[3] = record(13, first=2.0, end=2.4)  # too late
    records[4] = record(14, end=1.7, num_tokens=5)  # too slow: 0.4 s a token
    level = level_of(1.0, records, (1.0, 0.2))
    assert level.offered == 1.0
    span = 14 + 1.7 - 10
    assert level.completed == pytest.approx(4 / (15.7 - 10.5))
    assert level.goodput == pytest.approx(3 / span)
    assert level.output_tokens == pytest.approx(25 / span)
    assert level.ttft["p50"] == pytest.approx(0.1) and level.num_errors == 0
    records[0].error = "429"
    level = level_of(1.0, records, (1.0, 0.2))
    assert level.num_errors == 1 and not level.holds(10)


def test_the_knee_is_the_last_rate_before_the_first_that_fails() -> None:
    def level(rate: float, ttft: float, completed: float | None = None) -> Level:
        done = rate if completed is None else completed
        return Level(rate, rate, done, 0, 0, {"p99": ttft}, {}, {}, 9, 0, 0, 0, {})

    levels = [level(1, 0.1), level(2, 0.2), level(4, 1.5), level(8, 0.9)]
    assert knee(levels, 1.0) == 2
    assert knee([level(1, 0.1), level(2, 0.1, completed=1.6)], 1.0) == 1
    assert knee([level(1, 2.0)], 1.0) is None


def test_a_client_that_is_late_is_told_of() -> None:
    records = [record(i) for i in range(5)]
    assert "late" not in line_of(level_of(1.0, records, (1.0, 0.2)), 1.0)
    records[3].sent = 0.15
    line = line_of(level_of(1.0, records, (1.0, 0.2)), 1.0)
    assert line.endswith("  this client sent up to 150 ms late: try more --clients")
    assert "late" not in line_of(level_of(1.0, records, (1.0, 0.2)), 2.0)
    records[0].error = "429"
    line = line_of(level_of(1.0, records, (1.0, 0.2)), 1.0)
    assert line.endswith("  too much, this client sent up to 150 ms late: try more --clients, 1 "
                         "errors: 429")  # fmt: skip


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_have_the_lengths_that_were_asked_for(name: str) -> None:
    draw = WORKLOADS[name](random.Random(0), (5, 9), (2, 3))
    asks = [draw() for _ in range(50)]
    own = [ask.prompt[SHARED_TOKENS if name == "shared" else 0 :] for ask in asks]
    assert {len(prompt) for prompt in own} == {5, 6, 7, 8, 9}
    assert {ask.num_output for ask in asks} == {2, 3}
    assert len({tuple(prompt) for prompt in own}) == 50
    if name == "shared":
        assert len({tuple(ask.prompt[:SHARED_TOKENS]) for ask in asks}) == 1
    assert {len(ask.then) for ask in asks} == {TURNS - 1 if name == "chat" else 0}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"workload": "x"}, "--workload is one of"),
        ({"rates": []}, "--rates"),
        ({"rates": [0]}, "--rates"),
        ({"duration": 0}, "--duration"),
        ({"input_len": (9, 5)}, "--input-len"),
        ({"ttft_limit": -1}, "--slo-ttft"),
        ({"clients": 0}, "clients"),
    ],
)
def test_a_wrong_option_is_told(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        LoadTest(**{"url": "", "rates": [1], **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


def test_conversations_find_their_history_in_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoteach.bench.serve.VOCABULARY", 90)
    monkeypatch.setattr("nanoteach.bench.serve.THINK_SECONDS", 0.01)
    engine = Engine(folder, device="cpu", num_gpu_blocks_override=1000)
    levels: list[Level] = []
    with running(engine) as url:
        test = LoadTest(
            url, [20], "chat", duration=0.4, input_len=(40, 40), output_len=(20, 20),
            ttft_limit=60, on_level=levels.append,
        )  # fmt: skip
        asyncio.run(test.run())
    assert levels == test.levels and test.client.model == "tiny"
    (level,) = levels
    assert level.num_requests % TURNS == 0 and level.num_errors == 0
    assert set(level.samples["tokens"]) == {20}
    # Turns of 40, 100 and 160 tokens. The last token of an answer has no K/V yet, and a prompt's
    # last block is never a hit: blocks of 16 tokens leave 0, 48 and 96 + 0 or 16 of them.
    assert level.cached_share == pytest.approx((48 + 112) / 300, abs=0.06)
    assert engine.check() == []


def test_a_server_that_cant_follow_is_found_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoteach.bench.serve.VOCABULARY", 90)
    engine = Engine(folder, device="cpu", num_gpu_blocks_override=1000, max_num_seqs=1)
    with running(engine, max_queue=1) as url:
        test = LoadTest(url, [30, 60, 90], duration=0.5, input_len=(9, 9), output_len=(99, 99))
        asyncio.run(test.run())
    assert [level.rate for level in test.levels] == [30, 60]  # two in a row are enough
    assert all(level.num_errors for level in test.levels) and test.knee is None
    assert "Not even 30" in test.verdict


def test_several_clients_send_what_one_would() -> None:
    engine = Engine("tiny", device="cpu", num_gpu_blocks_override=1000)
    seen: list[list[int]] = []
    queue = engine.core.queue

    def note(seq: Sequence) -> None:
        seen.append(list(seq.token_ids))
        queue(seq)

    engine.core.queue = note  # type: ignore[method-assign]
    sent, samples = [], []
    with running(engine) as url:
        for clients in (1, 2):
            test = LoadTest(
                url, [30], duration=1, input_len=(9, 30), output_len=(1, 3), clients=clients
            )
            (level,) = asyncio.run(test.run())
            sent.append(sorted(seen[clients * WARM_REQUESTS :]))
            samples.append(level)
            seen.clear()
    assert sent[0] == sent[1] and len(sent[0]) > 10
    assert samples[0].num_requests == samples[1].num_requests == len(sent[0])
    one, two = (sorted(level.samples["due"]) for level in samples)
    assert one == pytest.approx(two, abs=0.05)
    assert samples[1].num_errors == 0


def test_the_command_loads_a_running_server_and_saves(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("nanoteach.bench.serve.VOCABULARY", 90)
    monkeypatch.setattr("nanoteach.bench.serve.KEEPS_UP", 0.0)  # six requests are few
    engine = Engine(folder, device="cpu", num_gpu_blocks_override=1000)
    file = tmp_path / "load.json"
    options = "--duration 0.3 --input-len 4 8 --output-len 2 4 --slo-ttft 50 --workload shared"
    with running(engine) as url:
        argv = ["bench", "serve", "--url", url, "--rates", "20", *options.split()]
        assert cli.main([*argv, "--save", str(file)]) == 0
        assert cli.main([*argv, "--block-size", "8"]) == 1  # a running server has its own
    out, err = capsys.readouterr()
    assert "up to 20 requests" in out and "--block-size" in err
    saved = json.loads(file.read_text())
    assert list(tmp_path.iterdir()) == [file]
    assert saved["knee"] == 20 and saved["levels"][0]["cached_share"] > 0.5
    assert saved["command"].startswith("nanoteach bench serve --rates 20 --workload shared")
    assert {"environment", "limits", "seed", "input_len"} <= saved.keys()


def test_a_load_test_that_is_cut_off_keeps_the_rates_that_are_over(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from nanoteach.bench import serve

    judge, file = serve.level_of, tmp_path / "load.json"

    def once(rate: float, *rest: Any) -> serve.Level:
        if rate == 21:
            raise RuntimeError("cut off")
        return judge(rate, *rest)

    monkeypatch.setattr(serve, "VOCABULARY", 90)
    monkeypatch.setattr(serve, "level_of", once)
    engine = Engine(folder, device="cpu", num_gpu_blocks_override=1000)
    options = "--rates 20 21 --duration 0.3 --input-len 4 8 --output-len 2 4"
    with running(engine) as url:
        argv = ["bench", "serve", "--url", url, *options.split(), "--save", str(file)]
        assert cli.main(argv) == 1
    assert "cut off" in capsys.readouterr().err
    kept = json.loads((tmp_path / "load.json.partial").read_text())
    assert [level["rate"] for level in kept["levels"]] == [20] and not file.exists()


MODELS = '{"data": [{"id": "m"}]}'
CHUNK = 'data: {"choices": [{"token_ids": [1]}]}\n\n'
RIGHT = 3 * CHUNK + "data: [DONE]\n\n"


@contextmanager
def server_of(models: str, first: tuple[int, str], then: tuple[int, str]) -> Iterator[str]:
    """Has one answer to the first WARM_REQUESTS requests and another to all that follow.

    Status 0: none at all.
    """
    asked, over = count(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(*(first if next(asked) < WARM_REQUESTS else then))

        def answer(self, status: int, body: str) -> None:
            if not status:
                over.wait()
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        over.set()
        server.shutdown()


LOAD = "--rates 50 --duration 0.1 --input-len 2 2 --output-len 3 3 --slo-ttft 60"


@pytest.mark.parametrize(
    ("then", "word"),
    [
        ((500, "it broke"), "errors: 500 it broke"),
        ((429, "too many"), "errors: 429 too many"),
        ((200, 2 * CHUNK), "errors: 2 tokens came of 3"),
        ((200, CHUNK + 'data: {"error": {"message": "a fault"}}\n\n'), "errors: a fault"),
        ((200, 'data: {"choices": [{"text": "a"}]}\n\n'), "KeyError('token_ids')"),
        ((200, "data: {\n\n"), "JSONDecodeError"),
        ((200, "<html>"), "errors: 0 tokens came of 3"),
        ((0, ""), "errors: ReadTimeout"),
    ],
)
def test_an_error_is_counted_and_told(
    then: tuple[int, str], word: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not then[0]:
        monkeypatch.setattr("nanoteach.bench.serve.STALLED", 3.0)
    with server_of(MODELS, (200, RIGHT), then) as url:
        assert cli.main(["bench", "serve", "--url", url, *LOAD.split()]) == 0
    assert word in capsys.readouterr().out


@pytest.mark.parametrize(
    ("models", "first", "word"),
    [
        (MODELS, (401, "no key"), "served none of the first requests: 401 no key"),
        (MODELS, (200, 'data: {"choices": [{"text": "a"}]}\n\n'), "KeyError('token_ids')"),
        ("<html>", (200, RIGHT), "names no model"),
        ('{"data": []}', (200, RIGHT), "names no model"),
    ],
)
def test_a_server_that_serves_nothing_is_one_line(
    models: str, first: tuple[int, str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server_of(models, first, first) as url:
        assert cli.main(["bench", "serve", "--url", url, *LOAD.split()]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:x"]) == 1
    assert "Invalid port" in capsys.readouterr().err
    assert cli.main(["bench", "serve", "nano"]) == 1
    assert cli.main(["bench", "serve", "--workload", "x", "--shape", "toy"]) == 1


def test_random_weights_are_a_folder_like_any_other() -> None:
    with random_folder("toy") as folder:
        assert ModelConfig.from_folder(folder) == SHAPES["toy"]
        engine = Engine(folder, device="cpu", num_gpu_blocks_override=64)
        (output,) = engine.generate([[1, 2, 3]], use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 16
        assert load_model(folder).dtype.itemsize == 2
    assert not folder.exists()
