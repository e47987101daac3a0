"""Runs workloads on real engines, and holds what came beside the cost model's bound.

Knows: engines, clocks, when a number may not be trusted. Does not know: how an engine works inside.
"""

import dataclasses
import gc
import re
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from nanoteach.bench.random_model import random_model
from nanoteach.bench.table import Row
from nanoteach.bench.workloads import (
    METRICS,
    SPEED,
    Times,
    Workload,
    chosen,
    perfect_times,
    stage_workload,
)
from nanoteach.config import EngineConfig, check_positive
from nanoteach.cost_model import WallClock, Work
from nanoteach.engine_core import EngineCore
from nanoteach.hardware import HARDWARE, Hardware, measure
from nanoteach.hub import check_device, default_device, default_model, resolve_model
from nanoteach.loader import check_dtype, load_model
from nanoteach.reference import compare, open_model, references
from nanoteach.stages import Generator, Parts, Stage, build_engine, stages_here
from nanoteach.types import SamplingParams

LONGEST, SMALL_LONGEST = 4112, 144  # hold the longest request, in whole blocks of 16
STAGE_WIDTH, SMALL_STAGE_WIDTH = 8, 2  # fewer than the requests, so that some of them wait


class Refused(Exception):
    """A run whose precondition failed: its time is that of another workload."""


class FirstTokenClock(WallClock):
    """A wall clock that keeps when the first token came. Every stage tells it of its steps."""

    first: float | None = None

    def tick(self, work: SequenceOf[Work]) -> None:
        """A step is over."""
        if self.first is None and any(part.needs_logits for part in work):
            self.first = self.now()


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
        **options: Any,
    ) -> None:
        self.names = chosen(names)
        check_positive("repeats", repeats)
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
        self.clock = FirstTokenClock()
        self.bar: Any = tqdm(disable=True)
        self.settings: dict[str, Any] = {}
        self.failures: list[str] = []
        """Numbers that were refused, and stages whose tokens are wrong."""

    def run(self) -> list[Row]:
        """Run everything."""
        makers = [SPEED[name] for name in self.names if name in SPEED]
        workloads = [w for make in makers for w in make(self.model.config.vocab_size, self.small)]
        stages = stages_here(self.model, self.config)
        count = len(workloads) + ("startup" in self.names)
        count += len(stages) * ("stages" in self.names)
        rows: list[Row] = []
        with tqdm(total=count * (self.repeats + 1), unit=" runs", disable=None) as self.bar:
            if "startup" in self.names:  # before this process has compiled anything
                rows += self.run_startup()
            if workloads:
                self.free()
                core = self.build()
                rows += [row for w in workloads for row in self.measure(core, w, self.config)]
                del core
            if "stages" in self.names:
                rows += self.run_stages(stages)
        return rows

    def build(self) -> EngineCore:
        """The engine, with what memory is free."""
        core = build_engine(Parts(self.model, self.config, clock=self.clock))
        self.settings["engine"] = asdict(self.config) | {
            "num_blocks": core.scheduler.block_manager.num_blocks,
            "runner": type(core.runner).__name__,
            "num_graphs": len(getattr(core.runner, "graphs", ())),
        }
        return core

    def free(self) -> None:
        """Give the memory of engines that are gone back to the device."""
        if self.device.type == "cuda":  # a CPU's is back already, and to collect takes a while
            gc.collect()
            torch.cuda.empty_cache()

    def measure(self, engine: Generator, workload: Workload, config: EngineConfig) -> list[Row]:
        """A short run to warm up, then all repeats. A row for each metric."""
        self.bar.set_description(workload.name)
        end, runs, note = self.bar.n + self.repeats + 1, list[Times](), ""
        if workload.longest > (config.max_model_len or 0):
            note = f"left out: needs --max-model-len {workload.longest}, not {config.max_model_len}"
        else:
            try:
                self.run_once(engine, workload.short())
                runs = [self.run_once(engine, workload) for _ in range(self.repeats)]
            except (Refused, ValueError) as error:
                note = f"refused: {error}"
                self.failures.append(f"{workload.name} was {note}")
        self.bar.update(end - self.bar.n)
        bound = perfect_times(
            workload, self.model.config, self.hardware, self.dtype.itemsize, config.max_num_seqs
        )
        rows = []
        for metric in workload.metrics:
            unit, value = METRICS[metric]
            samples = [value(workload, times) for times in runs]
            rows.append(Row(workload.name, metric, unit, samples, value(workload, bound), note))
        return rows

    def run_once(self, engine: Generator, workload: Workload) -> Times:
        """One run, from the first request to the last token. Raises Refused."""
        params, before = workload.params, counters(engine)
        self.clock.first = None
        start = self.clock.now()
        outputs = engine.generate(workload.prompts, params)
        end = self.clock.now()
        preemptions, hits = (b - a for a, b in zip(before, counters(engine), strict=True))
        lens, wanted = [len(output) for output in outputs], workload.output_lens
        if preemptions:
            raise Refused(
                f"{preemptions} preemptions, so tokens were computed twice: give a larger pool, "
                "or lower --max-num-seqs"
            )
        if hits:
            raise Refused(f"{hits} prompt tokens came from a prefix cache")
        if lens != wanted:
            raise Refused(f"{sum(lens)} output tokens came, and {sum(wanted)} were due")
        assert self.clock.first is not None, "every stage tells its clock of every step"
        self.bar.update()
        return Times(start, self.clock.first, end)

    def run_startup(self) -> list[Row]:
        """Engine after engine, each up to its first token."""
        self.bar.set_description("startup")
        seconds, captures, sizes = list[float](), list[float](), list[float]()
        for _ in range(self.repeats + 1):
            self.free()
            start = self.clock.now()
            core = self.build()
            core.generate([[0] * 16], SamplingParams(max_tokens=1, ignore_eos=True))
            seconds.append(self.clock.now() - start)
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
                engine = stage.build(Parts(self.model, config, clock=self.clock))
            except ValueError as error:
                rows.append(Row(stage.title, "output", "tok/s", [], note=f"refused: {error}"))
                self.failures.append(f"{stage.title} was refused: {error}")
                continue
            (row,) = self.measure(engine, dataclasses.replace(workload, name=stage.title), config)
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
            f"{self.name}, {self.device}, {dtype}, prefix caching off, {self.repeats} repeats",
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
            "hardware": asdict(self.hardware),
            "settings": self.settings,
            "rows": [asdict(row) for row in rows],
        }


def counters(engine: Generator) -> tuple[int, int]:
    """Preemptions and prefix hits so far. The first stages have neither."""
    if not isinstance(engine, EngineCore):
        return 0, 0
    return engine.scheduler.num_preemptions, engine.scheduler.num_prefix_hits
