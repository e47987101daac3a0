"""Memory for K/V, counted: what blocks of several sizes hold for nothing, beside reserved rows.

A scheduler runs with no model at all, since who holds which block depends on lengths alone. So this
is the same on every machine, and no time is measured.

Knows: how to look at the block tables of a step. Does not know: devices, clocks.
"""

import random
from typing import Any

from nanoteach.bench.cases import Case
from nanoteach.bench.serving import AMPLE, NoModel, fresh_scheduler, serve
from nanoteach.bench.table import Row
from nanoteach.bench.workloads import StepLog, Workload, draw_prompts
from nanoteach.config import EngineConfig, ModelConfig
from nanoteach.cost_model import WallClock
from nanoteach.engine_core import EngineCore
from nanoteach.scheduler import Scheduled

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Watched(NoModel):
    """Computes nothing, and keeps for every step: requests, their tokens, the slots they hold."""

    def __init__(self, config: ModelConfig, block_size: int) -> None:
        super().__init__(config)
        self.block_size = block_size
        self.seen: list[tuple[int, int, int]] = []

    def execute(self, scheduled: list[Scheduled]) -> list[int | None]:
        """See `Runner.execute`."""
        tokens = sum(seq.num_computed_tokens + num_new for seq, num_new in scheduled)
        blocks = sum(len(seq.block_table) for seq, _ in scheduled)
        self.seen.append((len(scheduled), tokens, blocks * self.block_size))
        return super().execute(scheduled)


def paged_workload(vocab_size: int, small: bool) -> tuple[Workload, int]:
    """Requests whose histories grow, and the length that a row would be reserved to."""
    requests, prompt_lens, output_lens, longest = (
        (4, (4, 20), (8, 40), 64) if small else (64, (100, 1024), (100, 1024), 4096)
    )
    rng = random.Random(0)
    prompts = draw_prompts([rng.randint(*prompt_lens) for _ in range(requests)], vocab_size)
    return Workload("paged", prompts, [rng.randint(*output_lens) for _ in prompts]), longest


def watch(model: ModelConfig, workload: Workload, block_size: int) -> list[tuple[int, int, int]]:
    """Requests, tokens and held slots of each step, with blocks of this size."""
    seats = len(workload.prompts)
    budget = sum(map(len, workload.prompts))  # all prompts in the first step
    config = EngineConfig(
        block_size=block_size, max_num_seqs=seats, max_num_batched_tokens=budget,
        max_model_len=workload.longest,
    )  # fmt: skip
    log, runner = StepLog(WallClock()), Watched(model, block_size)
    scheduler = fresh_scheduler(Case("paged", workload), 2 * AMPLE, config)
    serve(EngineCore(scheduler, runner, workload.longest, clock=log), workload, log)
    return runner.seen


def paged_rows(model: ModelConfig, small: bool) -> tuple[list[Row], dict[str, Any]]:
    """Slots held for nothing by one request, averaged over all steps; predicted: half a block."""
    workload, longest = paged_workload(model.vocab_size, small)
    rows, steps = [], {}
    for block_size in BLOCK_SIZES:
        seen = watch(model, workload, block_size)
        name = f"blocks of {block_size}"
        rows += waste(name, seen, (block_size - 1) / 2)
        steps[str(block_size)] = [held for _, _, held in seen]
    reserved = [(requests, tokens, requests * longest) for requests, tokens, _ in seen]
    lengths = zip(map(len, workload.prompts), workload.output_lens, strict=True)
    mean = sum(out * (prompt + out / 2) for prompt, out in lengths) / sum(workload.output_lens)
    rows += waste(f"rows of {longest:,}", reserved, longest - mean)
    data = {
        "requests": [requests for requests, _, _ in seen],
        "tokens": [tokens for _, tokens, _ in seen],
        "held": steps | {"reserved": [held for _, _, held in reserved]},
        "longest": longest,
    }
    return rows, data


def waste(name: str, seen: list[tuple[int, int, int]], predicted: float) -> list[Row]:
    """Two rows: what one request holds for nothing, and how much of all that is held it is."""
    requests, tokens, held = (sum(column) for column in zip(*seen, strict=True))
    return [
        Row(name, "wasted by a request", "slots", [(held - tokens) / requests], predicted),
        Row(name, "wasted", "%", [100 * (held - tokens) / held]),
    ]
