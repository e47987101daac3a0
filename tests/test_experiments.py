"""Every experiment at a small size: what is counted, never what is timed. And what judges them."""

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoteach import cli
from nanoteach.bench import dram, kernels, peers, speed
from nanoteach.bench.calibrated import Calibrated, Point, fit, line_through, possible_gains
from nanoteach.bench.cases import EXPERIMENTS, Case, PrefillFirstScheduler, StaticScheduler
from nanoteach.bench.counts import BLOCK_SIZES
from nanoteach.bench.random_model import SHAPES, random_model
from nanoteach.bench.recording import Recording
from nanoteach.bench.serving import (
    NoModel,
    Refused,
    check_counts,
    fresh_scheduler,
    serve,
    simulate,
    waits_counted,
)
from nanoteach.bench.table import Row
from nanoteach.bench.workloads import (
    COUNTS,
    NAMES,
    Served,
    Step,
    StepLog,
    Times,
    Workload,
    alike,
    gaps,
    longest_two,
)
from nanoteach.config import EngineConfig
from nanoteach.cost_model import Cost, VirtualClock, Work, kv_bytes_per_token, step_cost
from nanoteach.engine_core import EngineCore
from nanoteach.hardware import HARDWARE, Hardware
from nanoteach.overlapped import OverlappedEngineCore
from nanoteach.stages import Parts, build_graphs

TOY, H200 = SHAPES["toy"], HARDWARE["h200"]
ROUND = Hardware("round", 1e12, 1e9, 1e9, "made up")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result file of all experiments, small, on `toy`."""
    folder = tmp_path_factory.mktemp("experiments")
    file = folder / "all.json"
    names = [name for name in NAMES if name not in ("all", "startup", "stages")]
    argv = ["--shape", "toy", "--small", "--device", "cpu", "--repeats", "1", "--save", str(file)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "measure", lambda device, dtype: H200)
        assert cli.main(["bench", *names, *argv, "--profile", str(folder)]) == 0
    return json.loads(file.read_text()) | {"folder": folder}


def number(found: dict[str, Any], case: str, metric: str) -> float:
    """One number of the result file."""
    (row,) = [r for r in found["rows"] if (r["workload"], r["metric"]) == (case, metric)]
    (sample,) = row["samples"]
    return float(sample)


def test_every_case_was_run_and_counts_what_its_schedule_says(found: dict[str, Any]) -> None:
    rows = {(row["workload"], row["metric"]): row for row in found["rows"]}
    for make in EXPERIMENTS.values():
        for case in make(TOY.vocab_size, True):
            for metric in case.workload.metrics:
                row = rows[case.name, metric]
                assert len(row["samples"]) == 1 and row["note"] == "", row
                if metric in COUNTS:  # the same scheduler, without a model
                    assert row["samples"][0] == pytest.approx(row["bound"]), row


def test_all_experiments_have_names() -> None:
    assert EXPERIMENTS.keys() < NAMES.keys()
    cases = [case.name for make in EXPERIMENTS.values() for case in make(TOY.vocab_size, True)]
    assert len(cases) == len(set(cases))


def test_a_static_batch_takes_more_steps_for_the_same_tokens(found: dict[str, Any]) -> None:
    workload = EXPERIMENTS["static"](TOY.vocab_size, True)[0].workload
    steps = [number(found, n, "steps") for n in ("static batches", "continuous batching")]
    rows = [number(found, n, "rows") for n in ("static batches", "continuous batching")]
    # Two seats, and a batch of two is over with the longer one.
    lens = workload.output_lens
    assert steps[0] == sum(max(pair) for pair in zip(lens[::2], lens[1::2], strict=True))
    assert steps[0] > steps[1] >= sum(lens) / 2
    for s, r in zip(steps, rows, strict=True):
        assert s * r == pytest.approx(sum(lens))


def test_packed_prompts_share_a_step(found: dict[str, Any]) -> None:
    assert number(found, "packed, 4 x 16", "steps") == 1
    assert number(found, "one by one, 4 x 16", "steps") == 4


def test_a_prefix_is_computed_once(found: dict[str, Any]) -> None:
    # 4 prompts of 32 + 8 tokens, 2 outputs, of which the last is never computed.
    assert number(found, "prefix caching off", "computed") == 4 * (40 + 1)
    assert number(found, "prefix caching on", "computed") == 32 + 4 * (8 + 1)
    assert number(found, "prefix caching on", "hit rate") == 100 * 3 * 32 / (4 * 40)


def test_a_pool_that_is_too_small_forgets(found: dict[str, Any]) -> None:
    rates = [number(found, f"mixed reuse, {n} blocks", "hit rate") for n in (24, 16, 10)]
    assert number(found, "mixed reuse, no caching", "hit rate") == 0
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1] > 0


def test_a_budget_holds_for_both_orders(found: dict[str, Any]) -> None:
    assert number(found, "decodes first, unlimited", "largest step") == 2 * 64 + 3
    assert number(found, "decodes first, 32", "largest step") == 32
    assert number(found, "decodes first, 16", "largest step") == 16
    assert number(found, "prompts first, 16", "largest step") == 16
    assert number(found, "plain loop, 16", "largest step") == 16
    assert number(found, "plain loop, unlimited", "largest step") == 2 * 64 + 3


def test_a_pool_that_is_too_small_computes_twice(found: dict[str, Any]) -> None:
    assert number(found, "pool of 12 blocks", "preemptions") == 0
    assert number(found, "pool of 12 blocks", "computed") == 4 * (16 + 31)
    last = 0.0
    for blocks in (9, 6):
        assert number(found, f"pool of {blocks} blocks", "preemptions") > last
        assert number(found, f"pool of {blocks} blocks", "computed") > 4 * (16 + 31)
        last = number(found, f"pool of {blocks} blocks", "preemptions")


def test_a_cache_computes_each_token_once(found: dict[str, Any]) -> None:
    assert number(found, "no cache, 16 + 6", "computed") == sum(range(16, 22))
    assert number(found, "KV cache, 16 + 6", "computed") == 16 + 5


def test_pages_waste_half_a_block(found: dict[str, Any]) -> None:
    assert number(found, "blocks of 1", "wasted by a request") == 0
    for size in (2, 4, 8, 16):
        assert number(found, f"blocks of {size}", "wasted by a request") == pytest.approx(
            (size - 1) / 2, rel=0.1
        )
    shares = [number(found, f"blocks of {n}", "wasted") for n in BLOCK_SIZES]
    assert shares == sorted(shares)
    data = found["data"]["paged"]
    assert data["held"]["1"] == data["tokens"]
    assert all(h % 16 == 0 for h in data["held"]["16"])
    assert data["held"]["reserved"] == [64 * requests for requests in data["requests"]]


def test_what_cannot_run_here_says_so(found: dict[str, Any]) -> None:
    notes = {row["workload"]: row["note"] for row in found["rows"] if not row["samples"]}
    missing = {"kernels"} if not torch.cuda.is_available() else set()
    for name, (package, _) in peers.PEERS.items():
        if not peers.importlib.util.find_spec(package):
            missing.add(name)
    assert notes.keys() == missing
    assert all("not run" in note or "needs an NVIDIA GPU" in note for note in notes.values())


def test_the_settings_say_what_ran(found: dict[str, Any]) -> None:
    best = found["settings"]["engine"]
    assert best["num_blocks"] > 0 and best["attention"] and best["num_graphs"] == 0
    assert found["settings"]["engine stage 8"]["runner"] == "GraphRunner"
    assert found["settings"]["engine stage 8"]["num_graphs"] > 0
    assert found["settings"]["engine stage 8, no graphs"]["num_graphs"] == 0
    assert found["settings"]["engine stage 6"]["attention"] == "PagedAttention"


def test_a_profile_has_named_ranges_and_opens_as_a_trace(found: dict[str, Any]) -> None:
    parts = ("scheduling", "preparation", "model", "sampling", "commit")
    for name, waits in (("chunked", False), ("graphs", True)):
        trace = json.loads((found["folder"] / f"{name}.json").read_text())
        named = {event["name"] for event in trace["traceEvents"]}
        assert named >= {*parts, "waiting"} if waits else named >= {*parts}
        profile = found["profiles"][name]
        assert 0 < sum(profile["ranges"].values()) <= profile["wall"]
        assert all(profile["ranges"][part] > 0 for part in parts)


# --- schedules -----------------------------------------------------------------------------------


def steps_of(scheduler: Any, budget: int) -> list[tuple[int, int]]:
    """(requests, tokens) of each step: two decode, then a prompt of 6 comes."""
    workload = Workload("few", [[1, 2], [3, 4], [5] * 6], [9, 9, 1], late=1, after=2)
    case = Case("few", workload, scheduler=scheduler, budget=budget)
    log = StepLog(VirtualClock(TOY, ROUND))
    times = simulate(case, TOY, EngineConfig(max_model_len=16), log, overlapped=False)
    return [(step.requests, step.tokens) for step in times.steps]


def test_who_goes_first_when_the_budget_is_short() -> None:
    from nanoteach.chunked_prefill import ChunkedPrefillScheduler

    decodes_first = steps_of(ChunkedPrefillScheduler, 4)
    prompts_first = steps_of(PrefillFirstScheduler, 4)
    assert decodes_first[:2] == prompts_first[:2] == [(2, 4), (2, 2)]
    # Two decodes and two tokens of the prompt, three times; or the prompt alone, then its rest.
    assert decodes_first[2:6] == [(3, 4), (3, 4), (3, 4), (2, 2)]
    assert prompts_first[2:5] == [(1, 4), (3, 4), (2, 2)]


def test_a_static_scheduler_lets_nobody_in() -> None:
    workload = Workload("three", [[1], [2], [3]], [1, 4, 2])
    case = Case("three", workload, scheduler=StaticScheduler, max_num_seqs=2)
    log = StepLog(VirtualClock(TOY, ROUND))
    times = simulate(case, TOY, EngineConfig(max_model_len=16), log, False)
    assert [step.requests for step in times.steps] == [2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_simulation_takes_the_time_of_its_steps(overlapped: bool) -> None:
    case = Case("two", alike("two", 2, 5, 3, TOY.vocab_size))
    log = StepLog(VirtualClock(TOY, ROUND, overhead=1.0))
    times = simulate(case, TOY, EngineConfig(max_model_len=16), log, overlapped)
    other = VirtualClock(TOY, ROUND, overhead=1.0)
    for work in ([Work(5, 0)] * 2, [Work(1, 5)] * 2, [Work(1, 6)] * 2):
        other.tick(work)
    assert times.end == other.now() > 3
    assert times.computed == case.workload.computed == 14


def test_a_run_that_is_not_what_it_says_is_refused() -> None:
    case = Case("two", alike("two", 2, 5, 3, TOY.vocab_size))
    right = Times(0, 1, [Step(1, 2, 10, 2)], [Served(0, [1.0])] * 2, computed=14)
    check_counts(case, right)
    for wrong, words in (
        (right._replace(preemptions=1), "1 preemptions"),
        (right._replace(hits=16), "16 prompt tokens"),
        (right._replace(computed=13), "13 tokens were computed, and 14 were due"),
    ):
        with pytest.raises(Refused, match=words):
            check_counts(case, wrong)
    check_counts(Case("two", case.workload, preempts=True), right._replace(preemptions=1))


def test_a_case_that_asks_for_too_much_is_told() -> None:
    case = Case("big", alike("big", 1, 5, 3, TOY.vocab_size), num_blocks=9)
    with pytest.raises(ValueError, match="num_gpu_blocks_override of 9"):
        fresh_scheduler(case, 8, EngineConfig())


def test_a_wait_over_the_window_counts() -> None:
    early = Served(0.0, [1.0, 2.0, 7.0, 8.0, 9.0])
    late = Served(3.0, [6.0, 6.5])
    times = Times(0.0, 9.0, [], [early, late])
    workload = Workload("w", [[1], [2]], [5, 2], late=1, after=2)
    assert gaps(workload, times) == [5.0]  # from 2 to 7: it touches 3 to 6
    assert gaps(workload, times, inside=False) == [1.0, 1.0, 1.0]
    assert longest_two(workload, times) == 6.0  # from 1 to 7, or 2 to 8


def test_a_run_after_one_that_is_in_flight_is_refused() -> None:
    case = Case("one", alike("one", 1, 5, 2, TOY.vocab_size))
    runner: Any = NoModel(TOY)
    log = StepLog(VirtualClock(TOY, ROUND))
    scheduler = fresh_scheduler(case, 4, EngineConfig())
    core = OverlappedEngineCore(scheduler, runner, 64, clock=log)
    seq = core.add_request("a", [1] * 5, case.workload.params[0])
    core.step()
    core.flight = core.flight or Any  # whatever abort does about it
    with pytest.raises(Refused, match="in flight"):
        serve(core, case.workload, log)
    kernels.drop(core, [seq])
    assert serve(core, case.workload, log).computed == 6


# --- predictions ---------------------------------------------------------------------------------


def test_the_fit_by_hand() -> None:
    # 1 GB in 1.5 s and 3 GB in 2.5 s: 2 GB/s, and 1 s beside it. 4e12 FLOPs in 3 s: 2 s without.
    found = fit(ROUND, Point(Cost(0, 10**9), 1.5), Point(Cost(0, 3 * 10**9), 2.5),
                Point(Cost(4 * 10**12, 0), 3.0))  # fmt: skip
    assert found.overhead == pytest.approx(1.0)
    assert found.hardware.read_bandwidth == pytest.approx(2e9)
    assert found.hardware.flops == pytest.approx(2e12)
    assert found.seconds(Cost(10**12, 4 * 10**9)) == pytest.approx(1.0 + 2.0)


def test_a_line_by_hand() -> None:
    # 2 GB more in 1 s more; 1 GB would take half a second, and took 1.5.
    found = line_through(Point(Cost(0, 10**9), 1.5), Point(Cost(0, 3 * 10**9), 2.5))
    assert found == (pytest.approx(1.0), pytest.approx(2e9))


def test_gains_by_hand() -> None:
    # 10 in all. Without the 4 that `a` takes over its bound: 6. Without `b`, which has none: 7.
    gains = possible_gains({"a": 6.0, "b": 3.0, "c": 1.0}, {"a": 2.0, "c": 5.0})
    assert gains == {"a": pytest.approx(10 / 6), "b": pytest.approx(10 / 7), "c": 1.0}


def test_points_that_make_no_sense() -> None:
    few, many, prompts = Point(Cost(0, 10), 1.0), Point(Cost(0, 30), 2.0), Point(Cost(9, 0), 3.0)
    for points, words in (
        ((many, few, prompts), "more bytes"),
        ((few, many._replace(seconds=9.0), prompts), "overhead"),
        ((few, many, prompts._replace(seconds=0.1)), "overhead"),
    ):
        with pytest.raises(ValueError, match=words):
            fit(ROUND, *points)


def test_a_model_that_made_the_numbers_misses_none() -> None:
    truth = Calibrated(Hardware("t", 3e14, 2e12, 2e12, ""), 3e-4)
    config = EngineConfig(max_num_batched_tokens=16_384, max_model_len=4112)
    settings = asdict(config) | {"num_blocks": 65_792, "runner": "GraphRunner"}
    from nanoteach.bench.workloads import METRICS

    rows, model = [], SHAPES["qwen3-0.6b"]
    for case in EXPERIMENTS["batch"](100, False) + EXPERIMENTS["prefill"](100, False):
        if case.name.startswith(("batch 1 ", "batch 4 ", "batch 128", "prefill 1 ", "prefill 16")):
            log = StepLog(truth.clock(model, 2))
            times = simulate(case, model, config, log, overlapped=True)
            for metric in case.workload.metrics:
                value = METRICS[metric][1](case.workload, times)
                rows.append(asdict(Row(case.name, metric, METRICS[metric][0], [value], 1.0)))
    recording = Recording(
        {
            "config": asdict(model) | {"vocab_size": model.vocab_size}, "rows": rows,
            "hardware": asdict(H200), "dtype": "bfloat16", "small": False,
            "settings": {"engine": settings},
        }
    )  # fmt: skip
    found = recording.calibrated()
    assert found.overhead == pytest.approx(3e-4, rel=0.02)
    assert found.hardware.read_bandwidth == pytest.approx(2e12, rel=0.01)
    judged = recording.judge(found)
    assert sum(row.fitted for row in judged) == 3
    assert {row.experiment for row in judged} == {"batch", "prefill"}
    assert all(abs(row.error) < 0.02 for row in judged)


# --- the GPU's own words -------------------------------------------------------------------------


def test_time_that_kernels_share_counts_once() -> None:
    events = [
        {"name": "thin_linear_kernel", "start_us": 0.0, "us": 4.0},
        {"name": "decode_kernel", "start_us": 3.0, "us": 4.0},
        {"name": "rms_norm_kernel", "start_us": 4.0, "us": 1.0},
        {"name": "Memcpy DtoH (Device -> Pinned)", "start_us": 9.0, "us": 1.0},
    ]
    covered = kernels.covered_us(events)
    assert covered == {"products": 4, "attention": 3, "rest": 0, "copies": 1, "sampling": 0}


def test_steps_of_prompts_and_mixed_ones_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    event = {"name": "decode_kernel", "start_us": 0.0, "us": 4.0}

    def watch(step: Any, count: int) -> list[list[kernels.Event]]:
        before = len(log.steps)
        for _ in range(count + 2):
            step()
        seen.append([s.tokens for s in log.steps[before:]])
        return [[event]] * count

    monkeypatch.setattr(kernels, "watch", watch)
    model, log = random_model("toy"), StepLog(VirtualClock(TOY, ROUND))
    config = EngineConfig(
        max_num_seqs=20, max_num_batched_tokens=300, max_model_len=3300, enable_prefix_caching=False
    )
    core = build_graphs(Parts(model, config, clock=log))
    steps, walls = kernels.prompt_steps(core, 2, 32, 1)
    assert len(steps) == len(walls) == 1 and seen.pop() == [64, 64, 64]
    steps, walls = kernels.mixed_steps(core, 1)
    assert seen.pop() == [256] * 3 and len(walls) == 10
    assert core.scheduler.max_num_batched_tokens == 300 and not core.sequences

    work = [Work(1, 99)] * 2 + [Work(10, 0, False)]
    rows = {row.metric: row for row in kernels.step_rows("s", steps, walls, work, model, H200)}
    whole = step_cost(TOY, work, 4)
    assert rows["step"].bound == pytest.approx(1e6 * whole.seconds(H200))
    kv = 210 * kv_bytes_per_token(TOY, 4)
    assert rows["attention"].bound == pytest.approx(1e6 * kv / H200.read_bandwidth)
    products = 1e6 * (whole.bytes - kv) / H200.read_bandwidth
    assert rows["products"].bound == pytest.approx(products)
    assert rows["GPU busy"].samples == [4.0] and rows["launches"].samples == [1]


def test_a_fault_costs_no_other_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_memory(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(speed, "measure", lambda device, dtype: H200)
    monkeypatch.setattr(speed, "gemm_rows", no_memory)
    monkeypatch.setattr(speed, "ENGINES", speed.ENGINES | {"stage 1": (no_memory, {})})
    argv = ["gemm", "kv_cache", "--shape", "toy", "--small", "--device", "cpu", "--repeats", "1"]
    assert cli.main(["bench", *argv]) == 1
    out, err = capsys.readouterr()
    assert "KV cache, 16 + 6" in out and "no cache" not in out
    assert "gemm failed: RuntimeError: out of memory" in err and "engine stage 1 failed" in err


NCU = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","thin_linear_kernel","dram__bytes_read.sum","Mbyte","1,200.5"
"0","1","thin_linear_kernel","dram__bytes_write.sum","Kbyte","500"
"1","1","decode_kernel","dram__bytes_read.sum","byte","100000000"
"1","1","decode_kernel","gpu__time_duration.sum","usecond","9"
"""


def test_counters_are_read_and_held_beside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "1.csv").write_text(NCU)
    (tmp_path / "1.json").write_text('{"batch": 1, "tokens": 1000}')
    rows, data = dram.dram_rows(tmp_path)
    moved, attention, rest = rows
    assert moved.samples == [pytest.approx(1.301)]
    assert moved.bound == pytest.approx((1_192_099_840 + 1000 * 114_688) / 1e9)
    assert attention.samples == [pytest.approx(0.1)] and rest.samples == [pytest.approx(1.201)]
    assert data["1"]["way"] == {"read": pytest.approx(1.3005e9), "write": pytest.approx(5e5)}
    file = tmp_path / "out" / "dram.json"
    monkeypatch.setattr("sys.argv", ["dram", "read", str(tmp_path), "--save", str(file)])
    dram.main()
    assert "DRAM, batch 1" in capsys.readouterr().out
    assert json.loads(file.read_text())["rows"][0]["bound"] == moved.bound


def test_counters_that_may_not_be_read_say_why(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('{"batch": 1, "tokens": 1000}')
    (tmp_path / "1.csv").write_text("==ERROR== ERR_NVGPUCTRPERM - no permission\n")
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        dram.dram_rows(tmp_path)
    with pytest.raises(ValueError, match="no notes"):
        dram.dram_rows(tmp_path / "1.csv")


def test_peers_are_driven_step_by_step() -> None:
    workload = alike("two", 2, 5, 3, TOY.vocab_size, "output", "decode")
    brought = iter([1, 1, 2, 2])

    def queue(asked: Workload) -> Any:
        assert asked is workload
        return lambda: next(brought)

    times = peers.run(queue, workload)
    assert [step.samples for step in times.steps] == [1, 1, 2, 2]
    assert times.start < times.first < times.end


def test_a_checkpoint_for_peers_has_the_shape(tmp_path: Path) -> None:
    from nanoteach.loader import load_model

    peers.write_checkpoint(TOY, torch.float32, tmp_path)
    found = load_model(tmp_path, torch.device("cpu"), torch.float32).config
    assert found == TOY
    assert (tmp_path / "tokenizer.json").is_file()


def test_no_model_gives_tokens_to_those_who_sample() -> None:
    case = Case("one", alike("one", 1, 5, 2, TOY.vocab_size))
    config = EngineConfig(max_num_batched_tokens=3)
    runner: Any = NoModel(TOY)
    core = EngineCore(fresh_scheduler(case, 4, config), runner, 64)
    core.add_request("a", [1] * 5)
    assert core.step() == []  # three of five tokens
    assert [seq.output_token_ids for seq in core.step()] == [[0]]


def test_a_turn_counts_the_host_and_not_its_waits() -> None:
    from nanoteach.cuda_graphs import PendingTokens

    clock = VirtualClock(TOY, ROUND)
    log = StepLog(clock)

    class Slow:
        """In a CUDA event's place: two seconds away."""

        def synchronize(self) -> None:
            clock.wait_until(clock.now() + 2)

    done: Any = Slow()
    result = PendingTokens.result
    with waits_counted(log), log.turn():
        clock.wait_until(3)
        assert PendingTokens([True], torch.tensor([7]), done).result() == [7]
    assert log.host == [3] and clock.now() == 5 and PendingTokens.result is result
    log.begin()
    assert log.host == []


def test_every_request_and_every_step_is_a_turn() -> None:
    model, log = random_model("toy"), StepLog(VirtualClock(TOY, ROUND))
    workload = Workload("few", [[1, 2], [3, 4], [5] * 6], [9, 9, 1], late=1, after=2)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    times = serve(build_graphs(Parts(model, config, clock=log)), workload, log)
    # Each step is launched in one turn and over in the next, so there is one turn more.
    assert len(times.host) == 3 + len(times.steps) + 1


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "figures"))
    return importlib.import_module("watched")


def recorded_steps(watched: Any) -> Any:
    recording = Recording.of("experiments_h200", "engines_h200")
    assert recording is not None
    return watched.WatchedSteps(recording, recording.calibrated())


def test_a_watched_step_takes_as_long_as_it_took(watched: Any) -> None:
    steps = recorded_steps(watched)
    for name, work in (
        ("batch 16", [Work(1, 1074)] * 16),
        ("prompts 1 x 1,024", [Work(1024, 0)]),
        ("prompts 1 x 4,096", [Work(4096, 0)]),
        ("prompts 16 x 256", [Work(256, 0)] * 16),  # as many tokens
        ("16 decodes and 240 of a prompt", [Work(1, 150)] * 16 + [Work(240, 1000, False)]),
    ):
        took = steps.found.median(f"kernels, {name}", "GPU busy") / 1e6
        assert steps.seconds(work) == pytest.approx(took)
    few, many = [Work(1, 9)] * 20, [Work(100, 0)] * 8  # nearest are 16, and 1 x 1,024
    assert steps.seconds(few) == pytest.approx(steps.expected(few) + steps.decodes[16])
    assert steps.seconds(many) == pytest.approx(steps.expected(many) + steps.prompts[1, 1024])


class Steady:
    """In the watched steps' place: each takes 10 seconds."""

    def seconds(self, work: list[Work]) -> float:
        return 10.0


@pytest.mark.parametrize("overlapped", [False, True])
def test_on_the_watched_clock_the_gpu_begins_when_the_host_has_launched(
    watched: Any, overlapped: bool
) -> None:
    case = Case("one", alike("one", 1, 5, 3, TOY.vocab_size))
    host = [1.0, 2.0, 4.0, 3.0] + [0.5] * overlapped
    log = watched.WatchedLog(Steady(), host)
    times = simulate(case, TOY, EngineConfig(max_model_len=16), log, overlapped)
    (request,) = times.requests
    assert request.arrival == 1.0
    if overlapped:
        # Launched at 3, so over at 13, and the host has launched the second at 7. That runs from
        # 13 to 23 and the third, launched at 16, to 33.
        assert request.times == [13.0, 23.0, 33.0]
    else:  # each is launched when the one before is over
        assert request.times == [13.0, 27.0, 40.0]


def test_on_the_watched_clock_a_step_without_a_graph_lasts_as_long_as_its_launch(
    watched: Any,
) -> None:
    case = Case("one", alike("one", 1, 5000, 1, TOY.vocab_size))
    config = EngineConfig(max_num_batched_tokens=8192, max_model_len=8192)
    for launch, over in ((14.0, 15.0), (4.0, 11.0)):
        log = watched.WatchedLog(Steady(), [1.0, launch, 0.0])
        times = simulate(case, TOY, config, log, overlapped=True)
        assert times.requests[0].times == [over]
