"""What sampling costs: the time of a decode step by what its requests ask for.

    python -m nanoteach.bench.sampling --save FILE        (on an NVIDIA GPU)
    python -m nanoteach.bench.sampling --device cpu --small

Random weights, since the time does not depend on them; every request of a step asks for the same.

Knows: requests, steps, a clock. Does not know: how a token is chosen.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch

from nanoteach.bench.random_model import random_model
from nanoteach.config import EngineConfig
from nanoteach.engine_core import EngineCore
from nanoteach.hub import check_device, default_device
from nanoteach.results import check_target, save_result
from nanoteach.stages import Parts, build_engine
from nanoteach.types import SamplingParams

WISHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "logprobs": {"temperature": 0.8, "logprobs": 5},
}
WARM_UP = 8  # steps that are not counted: kernels are compiled, memory is taken


def build(shape: str, device: torch.device, max_num_seqs: int, longest: int) -> EngineCore:
    """The best engine of this machine, with room for so many requests of this length."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=longest,
        max_num_batched_tokens=16_384,
        num_gpu_blocks_override=max_num_seqs * -(-longest // EngineConfig.block_size),
        enable_prefix_caching=False,
    )
    return build_engine(Parts(random_model(shape, device, dtype, longest), config))


def step_times(core: EngineCore, batch: int, history: int, steps: int, **wish: Any) -> list[float]:
    """Milliseconds of decode steps of `batch` requests that ask for this, one after the other."""
    params = SamplingParams(core.max_model_len - history, seed=1, ignore_eos=True, **wish)
    seqs = [
        core.add_request(f"{i}", [(7 * i + j) % 500 for j in range(history)], params)
        for i in range(batch)
    ]
    while any(seq.num_output_tokens < WARM_UP for seq in seqs):
        core.step()
    samples = []
    for _ in range(steps):
        start = time.perf_counter()
        changed = core.step()
        samples.append(1e3 * (time.perf_counter() - start))
        assert len(changed) == batch, "not a step of decodes alone"
    for seq in seqs:
        core.abort_request(seq.request_id)
    return samples


def measure(
    core: EngineCore, batches: SequenceOf[int], history: int, steps: int
) -> Iterator[dict[str, Any]]:
    """A row for each batch and wish."""
    for batch, (name, wish) in itertools.product(batches, WISHES.items()):
        samples = step_times(core, batch, history, steps, **wish)
        yield {"batch": batch, "wish": name, "options": wish, "step_ms": samples}


def main(argv: SequenceOf[str] | None = None) -> None:
    """Print the table, and keep it with `--save FILE`."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", help="cpu or cuda (default: the best there is)")
    parser.add_argument("--small", action="store_true", help="a toy, to try it")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a result file (JSON)")
    args = parser.parse_args(argv)
    device = check_device(args.device) if args.device else default_device()
    check_target(args.save)
    shape, batches, history, steps = "qwen3-0.6b", [1, 16, 64, 256], 256, 64
    if args.small:
        shape, batches, history, steps = "toy", [1, 4], 12, 4
    longest = history + WARM_UP + steps + batches[-1] + 8
    core = build(shape, device, batches[-1], longest)
    rows, plain = [], 1.0
    print(f"{'requests':>8}  {'':14}{'step, ms':>9}  {'of greedy':>9}")
    for row in measure(core, batches, history, steps):
        took = statistics.median(row["step_ms"])
        plain = took if row["wish"] == "greedy" else plain
        print(f"{row['batch']:8}  {row['wish']:14}{took:9.3f}  {took / plain:8.2f}x", flush=True)
        rows.append(row)
    if args.save:
        command = "python -m nanoteach.bench.sampling"
        if args.device:
            command += f" --device {args.device}"
        if args.small:
            command += " --small"
        data = {"shape": shape, "history": history, "rows": rows}
        save_result(args.save, command, device, data)


if __name__ == "__main__":
    main()
