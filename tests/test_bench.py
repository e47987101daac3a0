"""`nanoteach bench`: what it counts, what it refuses, and its bound. Never how fast anything is."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoteach import cli
from nanoteach.bench import speed, workloads
from nanoteach.bench.random_model import SHAPES, random_model
from nanoteach.bench.table import Row, table
from nanoteach.bench.workloads import METRICS, SPEED, Workload, perfect_times
from nanoteach.cost_model import num_parameters
from nanoteach.engine_core import EngineCore
from nanoteach.hardware import HARDWARE
from nanoteach.sequence import Sequence
from nanoteach.stages import STAGES, Generator, Parts, Stage

H200, QWEN, TOY = HARDWARE["h200"], SHAPES["qwen3-0.6b"], SHAPES["toy"]
SMALL = ("--small", "--device", "cpu")


@pytest.fixture(autouse=True)
def given_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """To measure this machine's takes seconds, and here nobody looks at them."""
    monkeypatch.setattr(speed, "measure", lambda device, dtype: H200)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[EngineCore]:
    """The engines that a command builds."""
    built: list[EngineCore] = []
    build = speed.build_engine

    def keep(parts: Parts) -> EngineCore:
        built.append(build(parts))
        return built[-1]

    monkeypatch.setattr(speed, "build_engine", keep)
    return built


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `nanoteach bench`."""
    code = cli.main(["bench", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def computed(workload: Workload) -> int:
    """Tokens that a run computes: all but each request's last."""
    return sum(map(len, workload.prompts)) + sum(workload.output_lens) - len(workload.prompts)


def test_one_engine_computes_what_the_workloads_ask_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, cores: list[EngineCore]
) -> None:
    file = tmp_path / "results" / "speed.json"
    argv = ("--shape", "toy", "--repeats", "2", "--block-size", "8", "--save", str(file))
    code, out, err = run(capsys, "prefill", "nano", "batch", "context", *SMALL, *argv)
    assert code == 0, err
    (core,) = cores
    asked = [w for make in SPEED.values() for w in make(TOY.vocab_size, True)]
    assert core.num_computed_tokens == sum(computed(w.short()) + 2 * computed(w) for w in asked)

    saved = json.loads(file.read_text())
    assert [(row["workload"], row["metric"]) for row in saved["rows"]] == [
        (w.name, metric) for w in asked for metric in w.metrics
    ]
    for row in saved["rows"]:
        assert len(row["samples"]) == 2 and row["bound"] > 0 and row["note"] == ""
        assert row["unit"] == METRICS[row["metric"]][0]
        assert row["workload"] in out
    settings = saved["settings"]["engine"]
    assert settings["block_size"] == 8 and settings["max_num_batched_tokens"] == 2048
    assert settings["enable_prefix_caching"] is False and settings["num_graphs"] == 0
    assert settings["num_blocks"] == core.scheduler.block_manager.num_blocks
    assert saved["command"].startswith("nanoteach bench prefill nano batch context --shape toy")
    assert "--block-size 8" in saved["command"] and "--small" in saved["command"]


def test_startup_reports_what_the_runner_tells_of_its_graphs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cores: list[EngineCore]
) -> None:
    argv = ("startup", "--shape", "toy", *SMALL)
    assert run(capsys, *argv)[1].count("startup") == 1  # no graphs, so nothing of them
    assert len(cores) == 4  # three, and one to warm up
    runner = type(cores[0].runner)
    monkeypatch.setattr(runner, "capture_seconds", 1.5, raising=False)
    monkeypatch.setattr(runner, "graph_bytes", 3 * 2**20, raising=False)
    lines = run(capsys, *argv)[1].splitlines()
    assert [line.split()[1:4] for line in lines if line.startswith("startup")][1:] == [
        ["capture,", "s", "1.5"],
        ["graphs,", "MiB", "3"],
    ]


def test_stages_are_timed_and_judged(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "stages", "--model", "tiny", "--repeats", "1", *SMALL)
    rows = out.splitlines()[-6:]
    assert code == 0 and [row[:2] for row in rows] == [f"{n} " for n in range(1, 7)]
    assert all("tokens in float32 as transformers', 0 ties" in row for row in rows)
    assert [" x " in row for row in rows] == [False] + [True] * 5


def test_stages_are_not_judged_on_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "stages", "--shape", "toy", "--repeats", "1", *SMALL)
    assert code == 0 and "tokens are not judged" in out and "as transformers" not in out


class Wrong:
    """A stage whose last token is another one."""

    def __init__(self, stage: Generator) -> None:
        self.stage = stage

    def generate(self, *args: Any) -> list[list[int]]:
        outputs = self.stage.generate(*args)
        outputs[-1][-1] ^= 1
        return outputs


def test_a_stage_with_other_tokens_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = STAGES[5]
    wrong = Stage(6, stage.name, (), lambda parts: Wrong(stage.build(parts)))
    monkeypatch.setattr(speed, "stages_here", lambda model, config: [wrong])
    code, out, err = run(capsys, "stages", "--model", "tiny", "--repeats", "1", *SMALL)
    assert code == 1
    assert "NOT transformers' tokens in 1 requests" in out and "stage 6 in float32" in err


# --- numbers that are refused --------------------------------------------------------------------


def test_preemption(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pool = ("--block-size", "4", "--num-gpu-blocks-override", "20", "--save")
    file = tmp_path / "refused.json"
    code, out, err = run(capsys, "nano", "--shape", "toy", *SMALL, *pool, str(file))
    assert code == 1
    (row,) = json.loads(file.read_text())["rows"]
    assert row["samples"] == [] and "preemptions" in row["note"]
    assert "refused" in out and "larger pool" in err


def test_a_wrong_count_of_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = EngineCore.add_request

    def one_less(self: EngineCore, name: str, prompt: Any, params: Any) -> Sequence:
        params = dataclasses.replace(params, max_tokens=params.max_tokens - 1)
        return right(self, name, prompt, params)

    monkeypatch.setattr(EngineCore, "add_request", one_less)
    code, out, _ = run(capsys, "context", "--shape", "toy", *SMALL)
    assert code == 1 and "refused: 15 output tokens came, and 16 were due" in out


def test_prefix_hits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = EngineCore.add_request

    def hit(self: EngineCore, *args: Any) -> Sequence:
        self.scheduler.num_prefix_hits = 16
        return right(self, *args)

    monkeypatch.setattr(EngineCore, "add_request", hit)
    code, out, _ = run(capsys, "prefill", "--shape", "toy", *SMALL)
    assert code == 1 and "refused: 16 prompt tokens came from a prefix cache" in out


def test_too_long_for_the_engine_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("prefill", "--shape", "toy", "--max-model-len", "64", "--repeats", "1")
    code, out, _ = run(capsys, *argv, *SMALL)
    assert code == 0 and "left out: needs --max-model-len 129, not 64" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), ("name one or more", "nano ", "context ", "batch ", "prefill ", "startup ", "all ")),
        (("nano", "fast"), ("'fast'", "these are", "stages ")),
        (("nano", "--shape", "huge"), ("'huge'", "qwen3-0.6b, toy")),
        (("nano", "--shape", "toy", "--model", "tiny"), ("--model and --shape", "one of them")),
        (("nano", "--shape", "toy", "--repeats", "0"), ("repeats",)),
        (("nano", "--shape", "toy", "--device", "tpu"), ("cpu, cuda",)),
        (("nano", "--shape", "toy", "--block-size", "0"), ("block_size",)),
        (("nano", "--shape", "toy", "--max-model-len", "9000"), ("8192",)),
        (("nano", "--shape", "toy", "--attention-backend", "fast"), ("attention_backend",)),
        (("nano", "--shape", "toy", "--gpu-memory-utilization", "2"), ("gpu_memory_utilization",)),
        (("nano", "--shape", "toy", "--kv-cache-memory-bytes", "0"), ("kv_cache_memory_bytes",)),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *argv)
    assert code == 1 and out == "" and "Traceback" not in err
    assert all(word in err for word in words), err


def test_prefix_caching_is_no_option() -> None:
    with pytest.raises(ValueError, match="leave enable_prefix_caching out"):
        speed.Bench(["nano"], shape="toy", device="cpu", enable_prefix_caching=True)


def test_help_lists_the_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and text in out for name, text in workloads.NAMES.items())
    assert "--kv-cache-memory-bytes" in out and "--gpu-memory-utilization" in out


# --- workloads and bounds ------------------------------------------------------------------------


def test_the_lengths_are_those_on_record() -> None:
    for vocab_size in (QWEN.vocab_size, TOY.vocab_size):
        (nano,) = workloads.nano(vocab_size, False)
        assert sum(map(len, nano.prompts)) == 142_827
        assert sum(nano.output_lens) == 133_966  # as nano-vLLM's README says
        assert max(map(max, nano.prompts)) < vocab_size
    shapes = {
        w.name: (len(w.prompts), {*map(len, w.prompts)}, {*w.output_lens})
        for name in ("context", "batch", "prefill")
        for w in SPEED[name](TOY.vocab_size, False)
    }
    assert list(shapes.values()) == [
        *[(1, {n}, {512}) for n in (256, 1024, 3072)],
        *[(1, {n}, {1024}) for n in (256, 512, 1024, 2048, 3072)],
        *[(size, {1024}, {256}) for size in (1, 4, 16, 64, 128, 256)],
        *[(1, {n}, {1}) for n in (256, 512, 1024, 2048, 4096)],
        (4, {1024}, {1}),
        (16, {1024}, {1}),
        (4, {4096}, {1}),
    ]


@pytest.mark.parametrize("small", [True, False])
def test_the_default_length_holds_the_longest_request(small: bool) -> None:
    longest = max(w.longest for make in SPEED.values() for w in make(TOY.vocab_size, small))
    room = speed.SMALL_LONGEST if small else speed.LONGEST
    assert longest <= room < longest + 16 and room % 16 == 0


def test_the_bound_of_a_prefill_worked_by_hand() -> None:
    # 16 x 1,024 in one step. Layers: 2 x 440,401,920 parameters x 16,384 tokens = 14.431e12 FLOPs.
    # Attention: 4 x 28 x 2,048 a pair, 16 x 1,024 x 1,025 / 2 pairs: 1.926e12. LM head: 16 rows of
    # 2 x 151,936 x 1,024 = 0.005e12. 16.362e12 in all, 20.82 ms at 786e12 a second.
    workload = next(
        w for w in workloads.prefill(QWEN.vocab_size, False) if w.name == "prefill 16 x 1,024"
    )
    times = perfect_times(workload, QWEN, H200, 2, max_num_seqs=256)
    assert times.end == times.first == pytest.approx(0.02082, abs=5e-6)
    assert METRICS["prompt"][1](workload, times) == pytest.approx(16_384 / 0.02082, rel=3e-4)


def test_the_bound_of_nano_is_that_of_notebook_00() -> None:
    (nano,) = workloads.nano(QWEN.vocab_size, False)
    times = perfect_times(nano, QWEN, H200, 2, max_num_seqs=256)
    assert METRICS["output"][1](nano, times) == pytest.approx(36_491, rel=1e-4)


def test_who_has_no_seat_waits_in_the_bound() -> None:
    one = Workload("one", [[1] * 50], [8])
    two = Workload("two", one.prompts * 2, one.output_lens * 2)
    alone = perfect_times(one, TOY, H200, 4, max_num_seqs=1)
    assert perfect_times(two, TOY, H200, 4, max_num_seqs=1).end == pytest.approx(2 * alone.end)
    assert perfect_times(two, TOY, H200, 4, max_num_seqs=2).end < 1.9 * alone.end


def test_share_and_numbers() -> None:
    rows = [
        Row("fast", "output", "tok/s", [20_000.0, 10_000.0, 30_000.0], 40_000.0),
        Row("soon", "first token", "s", [0.5], 0.1, "a note"),
        Row("never", "output", "tok/s", [], 10.0, "refused: a reason"),
    ]
    lines = [line.split("  ") for line in table(rows).splitlines()[1:]]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells == [
        ["fast", "output, tok/s", "20,000", "10,000 to 30,000", "40,000", "50%"],
        ["soon", "first token, s", "0.5", "0.5 to 0.5", "0.1", "20%", "a note"],
        ["never", "output, tok/s", "none", "10", "refused: a reason"],
    ]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", None),  # not an L4
    ],
)
def test_known_gpus(monkeypatch: pytest.MonkeyPatch, name: str, known: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(speed, "measure", lambda device, dtype: "measured")
    found = HARDWARE[known] if known else "measured"
    assert speed.hardware_of(torch.device("cuda"), torch.bfloat16) == found
    assert speed.hardware_of(torch.device("cuda"), torch.float32) == "measured"


def test_random_weights_have_the_shape_and_come_from_the_seed() -> None:
    models = [random_model("toy", dtype=torch.bfloat16, seed=seed) for seed in (0, 0, 1)]
    tensors = [[m.weights.embedding, m.weights.norm] for m in models]
    for found, m in zip(tensors, models, strict=True):
        found += [x for layer in m.weights.layers for x in vars(layer).values() if x is not None]
    heads = TOY.num_heads + TOY.num_kv_heads  # a row of qk_norm for each; in a checkpoint two
    extra = TOY.num_layers * (heads - 2) * TOY.head_dim
    assert sum(x.numel() for x in tensors[0]) == num_parameters(TOY) + extra
    assert all(x.dtype is torch.bfloat16 for x in tensors[0])
    assert models[0].weights.lm_head is models[0].weights.embedding
    assert models[0].weights.embedding.float().std() == pytest.approx(0.02, rel=0.05)
    assert all(torch.equal(a, b) for a, b in zip(tensors[0], tensors[1], strict=True))
    assert not torch.equal(tensors[0][0], tensors[2][0])
