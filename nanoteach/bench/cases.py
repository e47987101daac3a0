"""The experiments: one thing switched on and off, under the same requests in the same order.

A `Case` is a workload with an engine and what its scheduler is given. Cases of one experiment
differ in one of these. The whole of `EXPERIMENTS` is data: speed.py runs it on real engines, and
serving.py runs the same schedulers on a virtual clock, which is what the numbers are held beside.

Knows: which engines, policies and pools are compared. Does not know: how they are run or timed.
"""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanoteach.bench.workloads import SPEED, Workload, alike, draw_prompts
from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.scheduler import Scheduled, Scheduler
from nanoteach.stages import (
    Generator,
    Parts,
    build_chunked,
    build_flash,
    build_graphs,
    build_naive,
    build_static,
)

ENGINES: dict[str, tuple[Callable[[Parts], Generator], dict[str, Any]]] = {
    "stage 8": (build_graphs, {}),
    "stage 8, no graphs": (build_graphs, {"enforce_eager": True}),
    "stage 7": (build_flash, {}),
    "stage 6": (build_chunked, {"attention_backend": "sdpa"}),
    "stage 2": (build_static, {}),
    "stage 1": (build_naive, {}),
}
"""What builds an engine, and the options that it takes for that. `best` is `build_engine`'s."""


class StaticScheduler(ChunkedPrefillScheduler):
    """A batch starts together, and nobody is let in before its last request is done."""

    def admit(self, budget: int) -> list[Scheduled]:
        """See `Scheduler.admit`."""
        return [] if self.running else super().admit(budget)


class PrefillFirstScheduler(ChunkedPrefillScheduler):
    """The same budget handed out the other way round: prompts take what they can, then decodes."""

    def schedule(self) -> list[Scheduled]:
        """The next step: chunks of prompts, new requests, and decodes with what is left."""
        self.block_manager.begin_step()
        budget, grants = self.max_num_batched_tokens, list[int]()
        missing = [seq.num_missing_tokens for seq in self.running]
        for num_missing in missing:
            grants.append(min(num_missing, budget) if num_missing > 1 else 0)
            budget -= grants[-1]
        scheduled = self.continue_running(grants)
        if len(self.running) < len(grants):  # somebody was preempted: no room for new ones
            return scheduled
        admitted = self.admit(budget)
        budget -= sum(part.num_new for part in admitted)
        decodes = []
        for num_missing in missing:
            decodes.append(int(num_missing == 1 and budget > 0))
            budget -= decodes[-1]
        return scheduled + admitted + self.continue_running(decodes)


@dataclass(frozen=True)
class Case:
    """One engine on one workload. None: what the engine has. `name` is that of its rows.

    plain_loop: stage 4's loop around the engine's runner, which commits a step before it schedules
    the next. perfect: its bound is a perfect engine's, and not that of its own schedule. preempts:
    that it runs out of blocks is what it is about; elsewhere such a run is refused.
    """

    name: str
    workload: Workload
    engine: str = "best"
    scheduler: type[Scheduler] = ChunkedPrefillScheduler
    prefix_caching: bool = False
    budget: int | None = None
    max_num_seqs: int | None = None
    num_blocks: int | None = None
    plain_loop: bool = False
    perfect: bool = False
    preempts: bool = False


def static(vocab_size: int, small: bool) -> list[Case]:
    """Outputs of very different lengths, a quarter of the requests at a time."""
    requests, prompt_len, low, high = (8, 8, 2, 12) if small else (64, 128, 16, 256)
    rng = random.Random(0)
    prompts = draw_prompts([prompt_len] * requests, vocab_size)
    output_lens = [rng.randint(low, high) for _ in prompts]
    workload = Workload("static", prompts, output_lens, ("output", "TTFT", "steps", "rows"))
    seats = requests // 4
    return [
        Case("static batches", workload, scheduler=StaticScheduler, max_num_seqs=seats),
        Case("continuous batching", workload, max_num_seqs=seats),
    ]


def packed(vocab_size: int, small: bool) -> list[Case]:
    """Prompts of one length: all that fit in a step, or one in each."""
    size, lengths = (4, (8, 16)) if small else (16, (64, 128, 256, 512, 1024))
    cases = []
    for n in lengths:
        workload = alike("packed", size, n, 1, vocab_size, "prompt", "TTFT", "steps")
        cases.append(Case(f"packed, {size} x {n:,}", workload))
        cases.append(Case(f"one by one, {size} x {n:,}", workload, budget=n))
    return cases


def prefix(vocab_size: int, small: bool) -> list[Case]:
    """Requests with one beginning; then many beginnings, in pools that hold them or don't."""
    size, shared, own, out = (4, 32, 8, 2) if small else (32, 1024, 32, 16)
    (beginning,) = draw_prompts([shared], vocab_size, seed=1)
    prompts = [beginning + end for end in draw_prompts([own] * size, vocab_size)]
    metrics = ("TTFT", "computed", "hit rate", "output")
    workload = Workload("prefix", prompts, [out] * size, metrics)
    cases = [
        Case("prefix caching off", workload),
        Case("prefix caching on", workload, prefix_caching=True),
    ]
    mixed = mixed_reuse(vocab_size, small)
    cases.append(Case("mixed reuse, no caching", mixed, max_num_seqs=4))
    for num_blocks in (24, 16, 10) if small else (1536, 1024, 640, 384):
        cases.append(
            Case(
                f"mixed reuse, {num_blocks:,} blocks", mixed, prefix_caching=True, max_num_seqs=4,
                num_blocks=num_blocks,
            )
        )  # fmt: skip
    return cases


def mixed_reuse(vocab_size: int, small: bool) -> Workload:
    """Many requests over a few beginnings, some of which are in far greater demand than others."""
    requests, count, shared, own, out = (12, 5, 32, 8, 2) if small else (96, 16, 1024, 32, 8)
    beginnings = draw_prompts([shared] * count, vocab_size, seed=2)
    weights = [1 / rank for rank in range(1, count + 1)]  # Zipf's law
    picked = random.Random(0).choices(beginnings, weights, k=requests)
    ends = draw_prompts([own] * requests, vocab_size, seed=3)
    prompts = [a + b for a, b in zip(picked, ends, strict=True)]
    metrics = ("TTFT", "computed", "hit rate", "output")
    return Workload("mixed reuse", prompts, [out] * requests, metrics)


def chunked(vocab_size: int, small: bool) -> list[Case]:
    """Long prompts come together while others decode: three budgets, and at one both orders.

    Then the plain loop. Stage 8's commits a step while the next is launched, so one long wait of
    its requests may show as two: of the token before the large step, and of that after it.
    """
    early, prompt_len, out, late, long, after = (
        (3, 8, 24, 2, 64, 4) if small else (16, 128, 512, 6, 2048, 20)
    )
    prompts = draw_prompts([prompt_len] * early + [long] * late, vocab_size)
    metrics = (
        "TTFT", "ITL p50", "ITL p99", "ITL max", "two tokens", "ITL p50 outside", "window",
        "output", "largest step",
    )  # fmt: skip
    workload = Workload(
        "chunked", prompts, [out] * early + [out // 16] * late, metrics, late=late, after=after
    )
    few, more, unlimited = (16, 32, 2048) if small else (256, 512, 16_384)
    return [
        Case("decodes first, unlimited", workload, budget=unlimited),
        Case(f"decodes first, {more}", workload, budget=more),
        Case(f"decodes first, {few}", workload, budget=few),
        Case(f"prompts first, {few}", workload, scheduler=PrefillFirstScheduler, budget=few),
        Case("plain loop, unlimited", workload, budget=unlimited, plain_loop=True),
        Case(f"plain loop, {few}", workload, budget=few, plain_loop=True),
    ]


def preemption(vocab_size: int, small: bool) -> list[Case]:
    """Requests that grow: pools that hold all of them at their longest, or less."""
    size, n, out, pools = (
        (4, 16, 32, (12, 9, 6)) if small else (32, 512, 256, (1536, 1280, 1024, 512))
    )
    metrics = ("output", "preemptions", "computed", "steps")
    workload = alike("preemption", size, n, out, vocab_size, *metrics)
    return [
        Case(f"pool of {blocks:,} blocks", workload, num_blocks=blocks, preempts=blocks < pools[0])
        for blocks in pools
    ]


def kv_cache(vocab_size: int, small: bool) -> list[Case]:
    """One request after prompts of several lengths, every token computed again, or once."""
    lengths, out = ((16, 48), 6) if small else ((512, 2048, 8192), 32)
    cases = []
    for n in lengths:
        workload = alike("kv_cache", 1, n, out, vocab_size, "decode", "computed")
        cases.append(Case(f"no cache, {n:,} + {out}", workload, engine="stage 1"))
        cases.append(Case(f"KV cache, {n:,} + {out}", workload, engine="stage 2"))
    return cases


def graphs(vocab_size: int, small: bool) -> list[Case]:
    """Decode steps of few and many requests, launched as graphs or kernel by kernel."""
    sizes, n, out = ((1, 2), 16, 4) if small else ((1, 16, 64), 1024, 64)
    cases = []
    for size in sizes:
        workload = alike("graphs", size, n, out, vocab_size, "decode steps", "steps")
        for engine, words in (("stage 8", "graphs"), ("stage 8, no graphs", "no graphs")):
            cases.append(Case(f"{words}, {size} x {n:,}", workload, engine=engine))
    return cases


def backends(vocab_size: int, small: bool) -> list[Case]:
    """Decode steps by our attention kernel and by the gather; all else is plain PyTorch in both."""
    shapes = [(1, 16), (2, 32)] if small else [(1, 1024), (16, 1024), (64, 1024), (64, 4064)]
    cases = []
    for size, n in shapes:
        workload = alike("backends", size, n, 4 if small else 24, vocab_size, "decode steps")
        for engine, words in (("stage 7", "kernel"), ("stage 6", "gather")):
            cases.append(Case(f"{words}, {size} x {n:,}", workload, engine=engine))
    return cases


def speed(name: str) -> Callable[[int, bool], list[Case]]:
    """The workloads of SPEED as cases."""
    return lambda vocab_size, small: [
        Case(workload.name, workload, perfect=True) for workload in SPEED[name](vocab_size, small)
    ]


EXPERIMENTS: dict[str, Callable[[int, bool], list[Case]]] = {
    **{name: speed(name) for name in SPEED},
    "static": static,
    "packed": packed,
    "prefix": prefix,
    "chunked": chunked,
    "preemption": preemption,
    "kv_cache": kv_cache,
    "graphs": graphs,
    "backends": backends,
}
"""Those that are cases: vocabulary and size in, cases out. The same every time."""


def short(case: Case) -> Case:
    """The same with few output tokens, to warm up. Its pool is the engine's."""
    return dataclasses.replace(case, workload=case.workload.short(), num_blocks=None)
