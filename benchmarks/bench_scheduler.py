"""What the scheduler and the block manager take of a decode step, without any model.

    python benchmarks/bench_scheduler.py

Stage 6's scheduler with prefix caching. Each request decodes 128 tokens after a prompt of 100 to
199, so that the steps hold what a real one does: block boundaries, one request in 16, with a new
block to take and a full one to hash. Printed are medians over all steps, beside the budget that
this project set itself: 100 µs and 3 µs a running request.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from nanoteach.block_manager import blocks_needed
from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.results import save_result
from nanoteach.sequence import Sequence
from nanoteach.types import SamplingParams

BLOCK_SIZE = 16
NUM_STEPS = 128


def prompt_len(i: int) -> int:
    """Ragged, so that not all requests reach the end of a block in the same step."""
    return 100 + 37 * i % 100


def decode_steps(num_running: int) -> list[float]:
    """Seconds that `schedule` and `commit` take together, for each of the decode steps."""
    num_blocks = num_running * blocks_needed(200 + NUM_STEPS, BLOCK_SIZE)
    manager = PrefixCachingBlockManager(num_blocks, BLOCK_SIZE)
    scheduler = ChunkedPrefillScheduler(manager, num_running, max_num_batched_tokens=1_000_000)
    for i in range(num_running):
        prompt = [1000 * i + j for j in range(prompt_len(i))]
        scheduler.add(Sequence(str(i), prompt, SamplingParams(NUM_STEPS + 2)))
    scheduler.commit(scheduler.schedule(), [7] * num_running, (), now=0.0)  # the prompts

    seconds = []
    for step in range(NUM_STEPS):
        start = time.perf_counter()
        scheduled = scheduler.schedule()
        decided = time.perf_counter()
        tokens: list[int | None] = [step] * len(scheduled)  # what the model would do
        sampled = time.perf_counter()
        scheduler.commit(scheduled, tokens, (), now=float(step))
        seconds.append(decided - start + time.perf_counter() - sampled)
        assert len(scheduled) == num_running
    return seconds


def main() -> None:
    """Print the table, and keep it with `--save FILE`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a result file (JSON)")
    save = parser.parse_args().save
    rows = []
    print("running   median µs   budget µs   µs a request")
    for num_running in (1, 16, 64, 256):
        decode_steps(num_running)  # warm up
        seconds = decode_steps(num_running)
        median = 1e6 * statistics.median(seconds)
        budget = 100 + 3 * num_running
        print(f"{num_running:7}   {median:9.1f}   {budget:9}   {median / num_running:12.2f}")
        rows.append({"running": num_running, "budget_us": budget, "seconds": seconds})
    if save:
        save_result(
            save, "python benchmarks/bench_scheduler.py", torch.device("cpu"), {"rows": rows}
        )


if __name__ == "__main__":
    main()
