"""What the timing cells run on, and what the notebooks show of recorded runs."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoteach.bench.workloads import stage_workload
from nanoteach.config import EngineConfig
from nanoteach.cost_model import SHAPES, VirtualClock, Work
from nanoteach.course import timing
from nanoteach.course.environment import notebook_environment
from nanoteach.hardware import HARDWARE, Hardware
from nanoteach.hub import TINY, ModelError
from nanoteach.results import RESULTS, recorded
from nanoteach.stages import STAGES, Parts
from nanoteach.types import SamplingParams

SLOW = Hardware("slow", 1e9, 1e9, 1e9, "made up")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A machine that seems to have a GPU, and no hub. What was loaded or drawn is listed."""
    loaded: list[tuple[Any, ...]] = []

    def resolve(name: str) -> Path:
        if "/" in name:
            raise ModelError("not on this machine, and the hub can't be reached")
        return Path(name)

    for name in ("NANOTEACH_DEVICE", "NANOTEACH_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(timing, "resolve_model", resolve)
    monkeypatch.setattr(timing, "load_model", lambda *args: loaded.append(args))
    monkeypatch.setattr(timing, "random_model", lambda *args: loaded.append(args))
    return loaded


def test_builds_and_tests_time_tiny_on_the_cpu_whatever_the_machine_has(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()  # the models are real ...
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # ... and the GPU only seems so
    for name, value in notebook_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    model = timing.timing_model()
    assert (model.device.type, model.dtype) == ("cpu", torch.float32)
    assert model.config.vocab_size == json.loads((TINY / "config.json").read_text())["vocab_size"]


def test_without_a_gpu_it_is_tiny_in_float32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NANOTEACH_DEVICE", "NANOTEACH_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert timing.timing_device() == (torch.device("cpu"), torch.float32)
    assert timing.timing_model().device.type == "cpu"
    assert capsys.readouterr().out == "Timed on cpu, in float32: tiny.\n"


def test_a_gpu_runs_qwen_in_bfloat16(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "resolve_model", Path)
    timing.timing_model()
    assert gpu == [(Path("Qwen/Qwen3-0.6B"), torch.device("cuda"), torch.bfloat16)]
    assert capsys.readouterr().out == "Timed on cuda, in bfloat16: Qwen/Qwen3-0.6B.\n"


def test_where_qwen_cannot_be_had_its_shape_is_timed_and_one_line_says_so(
    gpu: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    timing.timing_model()
    assert gpu == [("qwen3-0.6b", torch.device("cuda"), torch.bfloat16)]
    said = capsys.readouterr().out
    assert "random weights" in said and "not here" in said and said.count("\n") == 1


def test_the_environment_chooses_model_and_device(
    gpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOTEACH_MODEL", "tiny")
    timing.timing_model()
    monkeypatch.setenv("NANOTEACH_DEVICE", "cpu")
    timing.timing_model()
    assert gpu == [
        (Path("tiny"), torch.device("cuda"), torch.bfloat16),
        (Path("tiny"), torch.device("cpu"), torch.float32),
    ]
    monkeypatch.setenv("NANOTEACH_MODEL", "Qwen/Qwen3-4B")
    with pytest.raises(ModelError):  # nothing stands in for a model that was asked for
        timing.timing_model()


def test_a_timed_stage_stands_beside_the_bound_of_its_own_steps() -> None:
    model = timing.load_model(TINY, dtype=torch.float32, max_model_len=64)
    clocks = []

    def build(clock: VirtualClock) -> Any:
        clocks.append(clock)
        return STAGES[1].build(Parts(model, EngineConfig(max_model_len=64), clock=clock))

    params = SamplingParams(max_tokens=3, ignore_eos=True)
    rung = timing.timed("2", model, SLOW, build, [[5, 6, 7, 8]], params)
    by_hand = VirtualClock(model.config, SLOW, bytes_per_value=4)
    for work in (Work(4, 0), Work(1, 4), Work(1, 5)):
        by_hand.tick([work])
    assert len(clocks) == 2 and clocks[0] is not clocks[1]
    assert rung.predicted == pytest.approx(3 / by_hand.now())
    assert rung.measured is not None and rung.measured > 0


def test_recorded_stages_are_those_of_the_file_and_their_steps_are_counted() -> None:
    data = recorded("stages_h200")
    rows = {row["workload"]: row for row in data["rows"]}
    stages = timing.recorded_stages(*range(1, 9))
    assert [stage.name for stage in stages] == list(rows)
    workload = stage_workload(SHAPES["qwen3-0.6b"].vocab_size, data["small"])
    for stage in stages:
        assert stage.num_tokens == sum(workload.output_lens)
        assert stage.rung.measured == pytest.approx(statistics.median(rows[stage.name]["samples"]))
        assert stage.rung.measured < stage.rung.predicted  # nobody is faster than the bound
    naive, cached, *_ = stages
    assert naive.num_steps == naive.num_tokens  # one token a step
    assert (
        cached.num_steps
        == sum(  # each batch of eight ends with its longest
            max(workload.output_lens[i : i + 8]) for i in range(0, len(workload.output_lens), 8)
        )
    )
    # With room for every prompt in a step, stage 6 is the perfect engine of the file's bound.
    assert stages[5].rung.predicted == pytest.approx(rows[stages[5].name]["bound"])


def test_the_naive_stage_is_predicted_as_by_hand() -> None:
    workload = stage_workload(SHAPES["qwen3-0.6b"].vocab_size, small=False)
    clock = VirtualClock(SHAPES["qwen3-0.6b"], HARDWARE["h200"])
    for prompt, outputs in zip(workload.prompts, workload.output_lens, strict=True):
        for n in range(outputs):
            clock.tick([Work(len(prompt) + n, 0)])
    (naive,) = timing.recorded_stages(1)
    assert naive.bound == pytest.approx(clock.now())


def test_recorded_runs_are_speeds_with_their_bounds() -> None:
    (run,) = timing.recorded_runs("context 1,024 + 512")  # and not its seconds to the first token
    rows = [r for r in recorded("bench_h200")["rows"] if r["workload"] == run.name]
    (row,) = (r for r in rows if r["metric"] == "decode")
    assert run.measured == statistics.median(row["samples"]) and run.predicted == row["bound"]


def test_the_table_has_speeds_gains_and_milliseconds_a_step() -> None:
    first = timing.Recorded("1 slow", num_tokens=100, num_steps=10, seconds=2.0, bound=0.5)
    second = timing.Recorded("2 fast", num_tokens=100, num_steps=5, seconds=0.5, bound=0.25)
    _, one, two = timing.stage_table([first, second]).splitlines()
    assert " ".join(one.split()) == "1 slow 50 200 10 200.0 50.00"
    assert " ".join(two.split()) == "2 fast 200 (x 4.00) 400 (x 2.00) 5 100.0 50.00"


def test_where_names_the_gpu_and_the_day() -> None:
    environment = json.loads((RESULTS / "stages_h200.json").read_text())["environment"]
    assert timing.where("stages_h200") == (
        f"{environment['gpu']}, driver {environment['driver']}, torch {environment['torch']}, "
        f"recorded {environment['date']}"
    )
