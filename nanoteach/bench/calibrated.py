"""The second prediction: the cost model with the rates that this engine reaches, and an overhead.

    seconds of a step = overhead + max(FLOPs / reached FLOP/s, bytes / reached bytes/s)

Two decode steps, of few requests and of many, give the overhead and the bandwidth; one step of
prompts gives the FLOP rate. Everything else is predicted, and judged. It is a `VirtualClock` like
any other, so it holds for whole runs: waiting, chunks, preemptions and all.

The overhead is no fudge: bench/kernels.py measures what it is made of, the kernels' own starts and
ends, and the GPU's idle time between two steps.

Knows: three measured points, result files. Does not know: why a point is missed.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanoteach.bench.cases import EXPERIMENTS, Case
from nanoteach.bench.serving import simulate
from nanoteach.bench.workloads import METRICS, Workload
from nanoteach.config import EngineConfig, ModelConfig, option_names
from nanoteach.cost_model import Clock, Cost, VirtualClock, Work, step_cost
from nanoteach.hardware import Hardware

FEW, MANY = "batch 1 x (1,024 + 256)", "batch 128 x (1,024 + 256)"
PROMPTS = "prefill 16 x 1,024"
TIMED = ("tok/s", "s")


class Point(NamedTuple):
    """A step whose time is known."""

    cost: Cost
    seconds: float


@dataclass(frozen=True)
class Calibrated:
    """Rates that are reached, in the place of the ceilings, and seconds a step beside them."""

    hardware: Hardware
    overhead: float

    def seconds(self, cost: Cost) -> float:
        """Of one step."""
        return self.overhead + cost.seconds(self.hardware)

    def clock(self, model: ModelConfig, bytes_per_value: int) -> Clock:
        """A virtual clock that goes by it."""
        return VirtualClock(model, self.hardware, bytes_per_value, self.overhead)


def fit(ceilings: Hardware, few: Point, many: Point, prompts: Point) -> Calibrated:
    """From two decode steps, which bytes limit, and a step of prompts, which FLOPs limit.

    Raises ValueError where more bytes took no more time, or where nothing is left for an overhead.
    """
    seconds, num_bytes = many.seconds - few.seconds, many.cost.bytes - few.cost.bytes
    if seconds <= 0 or num_bytes <= 0:
        raise ValueError("the step of many requests must move more bytes, and take longer")
    bandwidth = num_bytes / seconds
    overhead = few.seconds - few.cost.bytes / bandwidth
    if overhead < 0 or overhead >= prompts.seconds:
        raise ValueError(f"these points leave {overhead:.2g} s a step for overhead: take others")
    flops = prompts.cost.flops / (prompts.seconds - overhead)
    reached = dataclasses.replace(
        ceilings, name=f"{ceilings.name}, calibrated", flops=flops, read_bandwidth=bandwidth
    )
    return Calibrated(reached, overhead)


class Judged(NamedTuple):
    """A number, both predictions of it, and whether the model was fitted on it."""

    experiment: str
    case: str
    metric: str
    unit: str
    measured: float
    bound: float
    calibrated: float
    fitted: bool

    @property
    def error(self) -> float:
        """The calibrated prediction's, as a share: -0.1 is 10% too few."""
        return self.calibrated / self.measured - 1

    @property
    def bound_error(self) -> float:
        """The bound's, likewise."""
        return self.bound / self.measured - 1


class Recording:
    """A result file of `nanoteach bench`, and what its cases were."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found
        self.model = ModelConfig(**found["config"])
        self.hardware = Hardware(**found["hardware"])
        self.bytes_per_value = 2 if found["dtype"] == "bfloat16" else 4
        self.medians = {
            (row["workload"], row["metric"]): statistics.median(row["samples"])
            for row in found["rows"]
            if row["samples"]
        }
        self.bounds = {(row["workload"], row["metric"]): row["bound"] for row in found["rows"]}

    def cases(self) -> Iterator[tuple[str, Case]]:
        """(experiment, case) of everything that was measured."""
        for name, make in EXPERIMENTS.items():
            for case in make(self.model.vocab_size, self.found["small"]):
                if (case.name, case.workload.metrics[0]) in self.medians:
                    yield name, case

    def workload(self, name: str) -> Workload:
        """By the name of its case. Raises ValueError where that was not measured."""
        for _, case in self.cases():
            if case.name == name:
                return case.workload
        raise ValueError(f"{name!r} was not measured")

    def engine(self, case: Case) -> tuple[EngineConfig, bool]:
        """The options of the case's engine, with its pool; and whether it is one step ahead."""
        settings = self.found["settings"]
        told = settings.get(f"engine {case.engine}") or settings["engine"]
        options = {name: told[name] for name in option_names(EngineConfig) if name in told}
        options["num_gpu_blocks_override"] = told.get("num_blocks")
        return EngineConfig(**options), told.get("runner") == "GraphRunner"

    def decode_point(self, name: str) -> Point:
        """An average decode step of requests that are all alike."""
        workload = self.workload(name)
        batch, out = len(workload.prompts), workload.output_lens[0]
        work = [Work(1, len(workload.prompts[0]) + out // 2)] * batch
        seconds = batch / self.medians[name, "decode steps"]
        return Point(step_cost(self.model, work, self.bytes_per_value), seconds)

    def prompt_point(self, name: str) -> Point:
        """A step of prompts alone."""
        workload = self.workload(name)
        work = [Work(len(prompt), 0) for prompt in workload.prompts]
        seconds = sum(map(len, workload.prompts)) / self.medians[name, "prompt"]
        return Point(step_cost(self.model, work, self.bytes_per_value), seconds)

    def calibrated(self, few: str = FEW, many: str = MANY, prompts: str = PROMPTS) -> Calibrated:
        """Fitted on three of its points."""
        points = self.decode_point(few), self.decode_point(many), self.prompt_point(prompts)
        return fit(self.hardware, *points)

    def judge(self, by: Calibrated) -> list[Judged]:
        """Every speed and every time, beside both predictions."""
        rows = []
        fitted = {(FEW, "decode steps"), (MANY, "decode steps"), (PROMPTS, "prompt")}
        for experiment, case in self.cases():
            config, overlapped = self.engine(case)
            clock = by.clock(self.model, self.bytes_per_value)
            times = simulate(case, self.model, config, clock, overlapped)
            for metric in case.workload.metrics:
                unit, value = METRICS[metric]
                key = case.name, metric
                if unit in TIMED and key in self.medians and self.bounds.get(key):
                    rows.append(
                        Judged(
                            experiment, case.name, metric, unit, self.medians[key],
                            self.bounds[key], value(case.workload, times), key in fitted,
                        )
                    )  # fmt: skip
        return rows
