"""Runs workloads on real engines, and holds what came beside the cost model's bound.

Knows: engines, clocks, when a number may not be trusted. Does not know: how an engine works inside.
"""

import dataclasses
import gc
import re
import statistics
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanoteach.bench.cases import ENGINES, EXPERIMENTS, Case, short
from nanoteach.bench.counts import paged_rows
from nanoteach.bench.kernels import gemm_rows, kernel_rows
from nanoteach.bench.peers import peer_rows
from nanoteach.bench.profiling import Profile, profile_steps
from nanoteach.bench.random_model import random_model
from nanoteach.bench.serving import (
    Refused,
    check_counts,
    fresh_scheduler,
    loop_of,
    serve,
    simulate,
    waits_counted,
)
from nanoteach.bench.table import Row
from nanoteach.bench.workloads import (
    METRICS,
    StepLog,
    Times,
    Workload,
    chosen,
    perfect_times,
    stage_workload,
)
from nanoteach.config import EngineConfig, check_positive
from nanoteach.cost_model import VirtualClock, WallClock
from nanoteach.engine_core import EngineCore
from nanoteach.hardware import HARDWARE, Hardware, measure
from nanoteach.hub import check_device, default_device, default_model, resolve_model
from nanoteach.loader import check_dtype, load_model
from nanoteach.overlapped import OverlappedEngineCore
from nanoteach.paged_attention import PagedAttention
from nanoteach.reference import compare, open_model, references
from nanoteach.stages import Generator, Parts, Stage, build_engine, stages_here
from nanoteach.types import SamplingParams

LONGEST, SMALL_LONGEST = 4112, 144  # hold the longest request, in whole blocks of 16
STAGE_WIDTH, SMALL_STAGE_WIDTH = 8, 2  # fewer than the requests, so that some of them wait


def hardware_of(device: torch.device, dtype: torch.dtype) -> Hardware:
    """The ceilings of this machine: a known GPU's in bfloat16, else measured in some seconds."""
    if device.type == "cuda" and dtype is torch.bfloat16:
        name = torch.cuda.get_device_name(device).lower().replace("rtx ", "rtx")
        for word in re.split("[ -]", name):
            if word in HARDWARE:
                return HARDWARE[word]
    return measure(device, dtype)


class Bench:
    """One model, one set of engine options (see `EngineConfig`), some workloads.

    names: see `workloads.NAMES`. model or shape: a model as `Engine` takes it, or random weights.
    Defaults: float32 on a CPU and else bfloat16; steps of 16,384 tokens on a GPU, as vLLM offline.
    """

    def __init__(
        self,
        names: SequenceOf[str],
        model: str | None = None,
        shape: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        repeats: int = 3,
        small: bool = False,
        profile: Path | None = None,
        **options: Any,
    ) -> None:
        self.names = chosen(names)
        check_positive("repeats", repeats)
        if "enable_prefix_caching" in options:
            raise ValueError(
                "a bench switches prefix caching itself: off, and on in the workload `prefix`; "
                "leave enable_prefix_caching out"
            )
        if model is not None and shape is not None:
            raise ValueError("--model and --shape both say which model to run: give one of them")
        self.repeats, self.small = repeats, small
        self.device = check_device(device) if device else default_device()
        cpu = self.device.type == "cpu"
        chosen_dtype = check_dtype(dtype)
        self.dtype = chosen_dtype or (torch.float32 if cpu else torch.bfloat16)
        drawn = shape is not None
        self.name = f"random weights, {shape}" if drawn else model or default_model()
        self.folder = None if drawn else resolve_model(self.name)
        longest = options.get("max_model_len")
        if self.folder:
            self.model = load_model(self.folder, self.device, self.dtype, max_model_len=longest)
        else:
            self.model = random_model(str(shape), self.device, self.dtype, longest)
        defaults = {
            "max_num_batched_tokens": 2048 if cpu else 16_384,
            "max_model_len": min(SMALL_LONGEST if small else LONGEST, self.model.max_model_len),
        }
        self.config = EngineConfig(**defaults | options, enable_prefix_caching=False)
        self.hardware = hardware_of(self.device, self.dtype)
        self.log = StepLog(WallClock())
        self.bar: Any = tqdm(disable=True)
        self.profile, self.profiles = profile, dict[str, Profile]()
        self.host: dict[str, list[int]] = {}
        """By case of stage 8, for how many µs the host worked in each turn: medians."""
        self.settings: dict[str, Any] = {}
        self.data: dict[str, Any] = {}
        """What does not fit into rows, by the workload's name."""
        self.failures: list[str] = []
        """Numbers that were refused, and stages whose tokens are wrong."""

    def run(self) -> list[Row]:
        """Run everything; the rows are in the order of NAMES."""
        cases = self.cases()
        stages = stages_here(self.model, self.config) if "stages" in self.names else []
        count = len(cases) + len(stages) + ("startup" in self.names)
        rows: dict[str, list[Row]] = {name: [] for name in self.names}
        with tqdm(total=count * (self.repeats + 1), unit=" runs", disable=None) as self.bar:
            if "startup" in self.names:  # before this process has compiled anything
                rows["startup"] = self.run_startup()
            engines = list(dict.fromkeys(self.engine_of(case) for case in cases))
            found: dict[str, list[Row]] = {}
            for engine in engines:
                own = [case for case in cases if self.engine_of(case) == engine]
                found |= {case.name: [] for case in own}
                with self.kept(f"the engine {engine}"):
                    self.run_cases(engine, own, found)
            for name in self.names:
                if name in EXPERIMENTS:
                    of_name = EXPERIMENTS[name](self.model.config.vocab_size, self.small)
                    rows[name] = [row for case in of_name for row in found[case.name]]
            if "stages" in self.names:
                rows["stages"] = self.run_stages(stages)
        for name, run in (
            ("gemm", self.run_gemm),
            ("paged", self.run_paged),
            ("kernels", self.run_kernels),
            ("peers", self.run_peers),
        ):
            if name in self.names:
                self.free()
                with self.kept(name):
                    rows[name] = run()
        return [row for name in self.names for row in rows[name]]

    @contextmanager
    def kept(self, what: str) -> Iterator[None]:
        """A fault inside is a failure, and costs no results of others, which took minutes."""
        try:
            yield
        except Exception as error:
            self.failures.append(f"{what} failed: {type(error).__name__}: {error}")

    def run_gemm(self) -> list[Row]:
        """See `gemm_rows`."""
        return gemm_rows(self.model, self.repeats, self.small)

    def run_paged(self) -> list[Row]:
        """See `paged_rows`."""
        rows, self.data["paged"] = paged_rows(self.model.config, self.small)
        return rows

    def run_kernels(self) -> list[Row]:
        """See `kernel_rows`."""
        rows, self.data["kernels"] = kernel_rows(
            self.model, self.config, self.hardware, self.repeats
        )
        return rows

    def run_peers(self) -> list[Row]:
        """See `peer_rows`."""
        return peer_rows(self.model, self.config, self.dtype, self.repeats, self.small)

    def cases(self) -> list[Case]:
        """All cases that were asked for."""
        makers = [EXPERIMENTS[name] for name in self.names if name in EXPERIMENTS]
        return [case for make in makers for case in make(self.model.config.vocab_size, self.small)]

    def engine_of(self, case: Case) -> str:
        """The name of the case's engine. On a GPU the best one is stage 8, and is built once."""
        best = self.device.type == "cuda" and self.config.attention_backend in ("auto", "triton")
        if case.engine == "stage 8" and best and not self.config.enforce_eager:
            return "best"
        return case.engine

    def run_cases(self, name: str, cases: SequenceOf[Case], found: dict[str, list[Row]]) -> None:
        """Build one engine and run its cases; their rows go into `found`, by the case's name."""
        config = self.config
        self.free()
        if name == "best":
            engine: Generator = self.build()
        else:  # as long as its own cases, since some reserve that much for each row
            build, options = ENGINES[name]
            longest = max(case.workload.longest for case in cases)
            options = options | {"max_model_len": min(longest, self.model.max_model_len)}
            config = dataclasses.replace(config, **options)
            engine = build(Parts(self.model, config, clock=self.log))
            self.settings[f"engine {name}"] = self.told(engine, config)
        vocab_size, names = (
            self.model.config.vocab_size,
            [n for n in self.names if n in EXPERIMENTS],
        )
        firsts = {EXPERIMENTS[name](vocab_size, self.small)[0].name: name for name in names}
        for case in cases:
            found[case.name] = self.measure(engine, case, config)
            if self.profile and case.name in firsts and isinstance(engine, EngineCore):
                engine.scheduler = fresh_scheduler(case, pool_of(engine).k.shape[1], config)
                path = self.profile / f"{firsts[case.name]}.json"
                self.profiles[firsts[case.name]] = profile_steps(engine, case, path)
        del engine

    def told(self, engine: Generator, config: EngineConfig) -> dict[str, Any]:
        """What an engine is: its options, its pool, its runner and attention, its graphs."""
        told: dict[str, Any] = asdict(config)
        if isinstance(engine, EngineCore):
            runner: Any = engine.runner
            told |= {
                "num_blocks": pool_of(engine).k.shape[1],
                "runner": type(runner).__name__,
                "attention": type(pool_of(engine)).__name__,
                "num_graphs": len(getattr(runner, "graphs", ())),
            }
        return told

    def build(self) -> EngineCore:
        """The engine, with what memory is free."""
        core = build_engine(Parts(self.model, self.config, clock=self.log))
        self.settings["engine"] = self.told(core, self.config)
        return core

    def free(self) -> None:
        """Give the memory of engines that are gone back to the device."""
        if self.device.type == "cuda":  # a CPU's is back already, and to collect takes a while
            gc.collect()
            torch.cuda.empty_cache()

    def measure(self, engine: Generator, case: Case, config: EngineConfig) -> list[Row]:
        """A short run to warm up, then all repeats. A row for each metric."""
        self.bar.set_description(case.name)
        end, runs, note = self.bar.n + self.repeats + 1, list[Times](), ""
        workload = case.workload
        if workload.longest > (config.max_model_len or 0):
            note = f"left out: needs --max-model-len {workload.longest}, not {config.max_model_len}"
        else:
            try:
                self.run_once(engine, short(case), config)
                runs = [self.run_once(engine, case, config) for _ in range(self.repeats)]
            except (Refused, ValueError) as error:
                note = f"refused: {error}"
                self.failures.append(f"{case.name} was {note}")
        self.bar.update(end - self.bar.n)
        # On a CPU the host computes, too, and waits for nobody.
        if runs and isinstance(engine, OverlappedEngineCore) and self.device.type == "cuda":
            turns = zip(*(times.host for times in runs), strict=True)
            self.host[case.name] = [round(1e6 * statistics.median(each)) for each in turns]
        bound = self.bound(case, config, isinstance(engine, OverlappedEngineCore))
        rows = []
        for metric in workload.metrics:
            unit, value = METRICS[metric]
            samples = [value(workload, times) for times in runs]
            expected = value(workload, bound) if bound else None
            rows.append(Row(case.name, metric, unit, samples, expected, note))
        return rows

    def bound(self, case: Case, config: EngineConfig, overlapped: bool) -> Times | None:
        """The case where every step takes its bound; None where it can't run."""
        size, seats = self.dtype.itemsize, case.max_num_seqs or config.max_num_seqs
        if case.perfect:
            return perfect_times(case.workload, self.model.config, self.hardware, size, seats)
        clock = VirtualClock(self.model.config, self.hardware, size)
        try:
            return simulate(case, self.model.config, config, StepLog(clock), overlapped)
        except ValueError:
            return None

    def run_once(self, engine: Generator, case: Case, config: EngineConfig) -> Times:
        """One run, from the first request to the last token. Raises Refused, or ValueError."""
        if isinstance(engine, EngineCore):
            engine.scheduler = fresh_scheduler(case, pool_of(engine).k.shape[1], config)
            engine = loop_of(case, engine)
        with waits_counted(self.log):
            times = serve(engine, case.workload, self.log)
        check_counts(case, times)
        self.bar.update()
        return times

    def run_startup(self) -> list[Row]:
        """Engine after engine, each up to its first token."""
        self.bar.set_description("startup")
        seconds, captures, sizes = list[float](), list[float](), list[float]()
        for _ in range(self.repeats + 1):
            self.free()
            start = self.log.now()
            core = self.build()
            core.generate([[0] * 16], SamplingParams(max_tokens=1, ignore_eos=True))
            seconds.append(self.log.now() - start)
            captures.append(getattr(core.runner, "capture_seconds", None) or 0.0)
            sizes.append((getattr(core.runner, "graph_bytes", None) or 0) / 2**20)
            del core
            self.bar.update()
        # The first is the warm run. It may have compiled kernels, and so is worth telling.
        note = f"the first in this process: {seconds[0]:.2f} s"
        rows = [Row("startup", "first token", "s", seconds[1:], note=note)]
        for metric, unit, samples in (("capture", "s", captures), ("graphs", "MiB", sizes)):
            if any(samples):
                rows.append(Row("startup", metric, unit, samples[1:]))
        return rows

    def run_stages(self, stages: SequenceOf[Stage]) -> list[Row]:
        """The ladder: stage after stage, each with the same requests and the same memory."""
        workload = stage_workload(self.model.config.vocab_size, self.small)
        longest = min(workload.longest, self.model.max_model_len)
        config = dataclasses.replace(
            self.config,
            max_num_seqs=SMALL_STAGE_WIDTH if self.small else STAGE_WIDTH,
            max_model_len=longest,
            # Before stage 6 a step must hold a whole prompt.
            max_num_batched_tokens=max(self.config.max_num_batched_tokens, longest),
        )
        self.settings["stages"] = asdict(config)
        judge = self.make_judge(workload, config)
        rows: list[Row] = []
        for stage in stages:
            self.free()
            try:
                engine = stage.build(Parts(self.model, config, clock=self.log))
            except ValueError as error:
                rows.append(Row(stage.title, "output", "tok/s", [], note=f"refused: {error}"))
                self.failures.append(f"{stage.title} was refused: {error}")
                continue
            case = Case(stage.title, workload, perfect=True)
            if isinstance(engine, EngineCore):
                case = dataclasses.replace(case, scheduler=type(engine.scheduler))
            (row,) = self.measure(engine, case, config)
            del engine
            notes = [row.note, judge(stage) if row.samples else ""]
            if row.samples and rows and rows[-1].samples:
                notes.insert(0, f"x {row.median / rows[-1].median:.2f}")
            if stage.name == "prefix_caching":
                notes.append("its cache is off here")
            rows.append(dataclasses.replace(row, note="; ".join(filter(None, notes))))
        return rows

    def make_judge(self, workload: Workload, config: EngineConfig) -> Callable[[Stage], str]:
        """What says whether a stage's greedy tokens are those of transformers, in float32."""
        if self.folder is None:
            return lambda stage: ""
        theirs = open_model(self.folder, device=self.device)
        expected = references(theirs, workload.prompts, workload.params)
        ours, length = self.model, self.model.max_model_len
        if self.dtype is not torch.float32:
            ours = load_model(self.folder, self.device, torch.float32, max_model_len=length)

        def judge(stage: Stage) -> str:
            self.free()
            tokens = stage.build(Parts(ours, config)).generate(workload.prompts, workload.params)
            comparison = compare(expected, tokens)
            if comparison.exact:
                return f"tokens in float32 as transformers', {len(comparison.ties)} ties"
            self.failures.append(f"stage {stage.number} in float32: {comparison}")
            return f"NOT transformers' tokens in {len(comparison.mismatches)} requests"

        return judge

    @property
    def title(self) -> str:
        """What was run, and what it is compared with."""
        dtype = str(self.dtype).removeprefix("torch.")
        lines = [
            f"{self.name}, {self.device}, {dtype}, {self.repeats} repeats",
            f"bound: a perfect engine on {self.hardware.name} ({self.hardware.source})",
        ]
        if self.folder is None and "stages" in self.names:
            lines.append("the stages' tokens are not judged: the weights are random")
        return "\n".join(lines)

    def result(self, rows: SequenceOf[Row]) -> dict[str, Any]:
        """The rows as data, every sample kept."""
        return {
            "model": self.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "repeats": self.repeats,
            "small": self.small,
            "config": asdict(self.model.config),
            "hardware": asdict(self.hardware),
            "settings": self.settings,
            "data": self.data,
            "profiles": {name: each._asdict() for name, each in self.profiles.items()},
            "host": self.host,
            "rows": [asdict(row) for row in rows],
        }


def pool_of(core: EngineCore) -> PagedAttention:
    """Where its K/V live."""
    runner: Any = core.runner
    pool: PagedAttention = runner.decoder.pool if hasattr(runner, "decoder") else runner.attention
    return pool
