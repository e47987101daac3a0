"""How fast a stage is: on this machine, and on the GPU on which it was recorded.

Knows: which model and device the timing cells run on, the cost model's bound of a run, the result
files. Does not know: how anything is drawn.
"""

import os
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from statistics import median
from typing import NamedTuple, cast

import torch

from nanoteach.bench.random_model import random_model
from nanoteach.bench.workloads import stage_workload
from nanoteach.block_manager import blocks_needed
from nanoteach.config import EngineConfig
from nanoteach.cost_model import VirtualClock
from nanoteach.course.runs import QWEN3, CounterModel, RecordingClock, Rung
from nanoteach.hardware import Hardware
from nanoteach.hub import ModelError, default_device, resolve_model
from nanoteach.loader import load_model
from nanoteach.model import Decoder
from nanoteach.results import recorded
from nanoteach.stages import LADDER, Generator, Parts
from nanoteach.types import SamplingParams

QWEN = "Qwen/Qwen3-0.6B"

# --- live ---------------------------------------------------------------------------------------


def timing_device() -> tuple[torch.device, torch.dtype]:
    """Where the timing cells run: a GPU in bfloat16 where there is one, else a CPU in float32.

    NANOTEACH_DEVICE chooses another; the environment of builds and tests sets it to cpu.
    """
    device = default_device()
    return device, torch.bfloat16 if device.type == "cuda" else torch.float32


def timing_model() -> Decoder:
    """What the timing cells run: NANOTEACH_MODEL, else Qwen3-0.6B on a GPU, else `tiny`.

    It says which. Where Qwen3-0.6B can't be had, random weights of its shape take its place, and
    the same time.
    """
    device, dtype = timing_device()
    best = QWEN if device.type == "cuda" else "tiny"
    name = os.environ.get("NANOTEACH_MODEL") or best
    try:
        model = load_model(resolve_model(name), device, dtype)
    except ModelError:
        if name != QWEN:
            raise
        name = f"random weights of the shape of {QWEN}, which is not here"
        model = random_model("qwen3-0.6b", device, dtype)
    print(f"Timed on {device}, in {str(dtype).removeprefix('torch.')}: {name}.")
    return model


def timed(
    name: str,
    model: Decoder,
    hardware: Hardware,
    build: Callable[[VirtualClock], Generator],
    prompts: SequenceOf[SequenceOf[int]],
    params: SamplingParams | SequenceOf[SamplingParams],
) -> Rung:
    """Output tokens/s of a stage on this machine, beside the bound of the same steps.

    `build` makes the stage around a clock. The better of two runs counts, each on a new stage: on a
    GPU the first one also loads kernels.
    """
    seconds = []
    for _ in range(2):
        clock = VirtualClock(model.config, hardware, model.dtype.itemsize)
        stage = build(clock)
        began = time.perf_counter()
        outputs = stage.generate(prompts, params)
        seconds.append(time.perf_counter() - began)
    num_tokens = sum(map(len, outputs))
    return Rung(name, num_tokens / min(seconds), num_tokens / clock.now())


# --- recorded -----------------------------------------------------------------------------------


def where(result: str) -> str:
    """What a recorded run ran on, and when, by the name of its result file."""
    e = recorded(result)["environment"]
    return f"{e['gpu']}, driver {e['driver']}, torch {e['torch']}, recorded {e['date']}"


class Recorded(NamedTuple):
    """A stage on the recorded workload: its seconds on an H200, and what they would be at best.

    bound: the seconds of the same steps, if each takes the cost model's bound.
    """

    name: str
    num_tokens: int
    num_steps: int
    seconds: float
    bound: float

    @property
    def rung(self) -> Rung:
        """Its output tokens/s, for a picture."""
        return Rung(self.name, self.num_tokens / self.seconds, self.num_tokens / self.bound)


def recorded_stages(*numbers: int) -> list[Recorded]:
    """What these stages reached on an H200; see `nanoteach bench stages`.

    Their steps are counted here: the stage runs once more, on the virtual clock, and only the model
    is pretended.
    """
    record = recorded("stages_h200")
    speeds = {row["workload"]: median(row["samples"]) for row in record["rows"] if row["samples"]}
    settings = record["settings"]["stages"]
    longest, size = settings["max_model_len"], settings["block_size"]
    room = settings["max_num_seqs"] * blocks_needed(longest, size)  # as on the GPU, for everybody
    config = EngineConfig(**settings | {"num_gpu_blocks_override": room})
    counter = CounterModel(longest)
    workload = stage_workload(counter.config.vocab_size, record["small"])
    num_tokens = sum(workload.output_lens)
    found = []
    for stage in (LADDER[number - 1] for number in numbers):
        clock = RecordingClock(QWEN3, Hardware(**record["hardware"]))
        engine = stage.build(Parts(cast(Decoder, counter), config, clock=clock))
        engine.generate(workload.prompts, workload.params)
        seconds = num_tokens / speeds[stage.title]
        found.append(Recorded(stage.title, num_tokens, len(clock.steps), seconds, clock.now()))
    return found


def recorded_runs(*starts: str) -> list[Rung]:
    """Tokens/s of whole runs of the engine on an H200, and the bound of a perfect one.

    Those of `nanoteach bench` whose name begins with one of `starts`.
    """
    return [
        Rung(row["workload"], median(row["samples"]), row["bound"])
        for row in recorded("bench_h200")["rows"]
        if row["workload"].startswith(starts) and row["unit"] == "tok/s"
    ]


def stage_table(stages: SequenceOf[Recorded]) -> str:
    """Stages as text, each with what it gains over the one before it."""
    lines = [
        "                          tokens/s            at best           steps  ms each  at best"
    ]
    speeds: list[float] = [0, 0]
    for stage in stages:
        line = f"{stage.name:22}"
        for i, seconds in enumerate((stage.seconds, stage.bound)):
            speed = stage.num_tokens / seconds
            gain = f"(x {speed / speeds[i]:.2f})" if speeds[i] else ""
            line += f" {speed:11,.0f} {gain:8}"
            speeds[i] = speed
        each, least = (1e3 * s / stage.num_steps for s in (stage.seconds, stage.bound))
        lines.append(f"{line} {stage.num_steps:6,} {each:8.1f} {least:8.2f}")
    return "\n".join(lines)
