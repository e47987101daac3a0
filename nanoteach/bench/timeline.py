"""What the GPU does in one decode step, kernel by kernel, and what launching it costs the host.

    python -m nanoteach.bench.timeline --save FILE        (on an NVIDIA GPU)

One request with 1,024 tokens of history, random weights of Qwen3-0.6B's shape in bfloat16: through
stage 7 (our attention, all else in plain PyTorch), stage 8 without graphs, stage 8, and stage 8 in
the plain loop, which commits a step before it schedules the next.

Knows: the profiler, the engine's steps. Does not know: what a good timeline looks like.
"""

import dataclasses
import statistics
import time
from typing import Any

import torch

from nanoteach.bench.graph_time import arguments
from nanoteach.bench.kernels import HISTORY, covered_us, decode_steps
from nanoteach.bench.random_model import random_model
from nanoteach.config import EngineConfig
from nanoteach.engine_core import EngineCore
from nanoteach.model import Decoder
from nanoteach.results import save_result
from nanoteach.stages import Parts, build_flash, build_graphs

STEPS = 200
SHAPE = "qwen3-0.6b"


def decode_step(core: EngineCore, steps: int = STEPS) -> dict[str, Any]:
    """The kernels of one step (microseconds from the first one's start), and wall times of many."""
    (events, *_), walls = decode_steps(core, 1, profiled=1, timed=steps)
    return {
        "events": events,
        "launches": len(events),
        "wall_us": [round(wall, 1) for wall in walls],
    }


def launch_us(core: EngineCore, repeats: int = 200) -> dict[str, list[float]]:
    """Host microseconds of one launch: of a small kernel, and of a whole step as a graph."""
    x = torch.zeros(16, device="cuda")
    _, graph = core.runner.graphs["decode", 1]  # type: ignore[attr-defined]
    samples: dict[str, list[float]] = {}
    for name, launch in (("kernel", lambda: x.add_(1)), ("graph", graph.replay)):
        launch()
        torch.cuda.synchronize()
        samples[name] = []
        for _ in range(repeats):
            start = time.perf_counter()
            launch()
            samples[name].append(round(1e6 * (time.perf_counter() - start), 1))
            torch.cuda.synchronize()
    return samples


def run(model: Decoder) -> dict[str, Any]:
    """All of it."""
    config = EngineConfig(max_model_len=2048, num_gpu_blocks_override=256, max_num_seqs=16)
    eager = dataclasses.replace(config, enforce_eager=True)
    steps = {"stage 7, eager": decode_step(build_flash(Parts(model, config)))}
    steps["stage 8, eager"] = decode_step(build_graphs(Parts(model, eager)))
    core = build_graphs(Parts(model, config))
    steps["stage 8, graph"] = decode_step(core)
    plain = EngineCore(core.scheduler, core.runner, core.max_model_len)
    steps["stage 8, graph, plain loop"] = decode_step(plain)
    return {"shape": SHAPE, "history": HISTORY, "steps": steps, "launch_us": launch_us(core)}


def main() -> None:
    """Print the summary, and keep it all with `--save FILE`."""
    args = arguments(__doc__)
    found = run(random_model(SHAPE, "cuda", torch.bfloat16, max_model_len=2048))
    for name, step in found["steps"].items():
        busy = sum(covered_us(step["events"]).values())
        wall = statistics.median(step["wall_us"])
        print(
            f"{name}: {step['launches']} launches, {busy:.0f} µs with a kernel running, "
            f"{wall:.0f} µs a step"
        )
    for name, samples in found["launch_us"].items():
        print(f"a launch, {name}: {statistics.median(samples):.1f} µs of the host")
    if args.save:
        save_result(args.save, "python -m nanoteach.bench.timeline", torch.device("cuda"), found)


if __name__ == "__main__":
    main()
