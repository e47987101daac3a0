"""Where the time of a step goes on the GPU: its kernels by class, and what a kernel costs at least.

These are the measurements behind the calibrated model. Products and attention each have a bound of
their own; what a chain of kernels with next to no work takes is the overhead; and the layers'
products alone say what a prompt's step could reach.

Knows: the profiler, graphs, names of kernels. Does not know: what a good share is.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from nanoteach.bench.graph_time import graph_us
from nanoteach.bench.table import Row
from nanoteach.bench.workloads import draw_prompts
from nanoteach.config import EngineConfig
from nanoteach.cost_model import (
    Cost,
    Work,
    attention_flops,
    kv_bytes_per_token,
    layer_matrix_parameters,
    step_cost,
)
from nanoteach.engine_core import EngineCore
from nanoteach.hardware import Hardware, measure_gemm, seconds_per_call
from nanoteach.model import Decoder
from nanoteach.overlapped import OverlappedEngineCore
from nanoteach.sequence import Sequence
from nanoteach.stages import Parts, build_graphs
from nanoteach.types import SamplingParams

BATCHES, HISTORY = (1, 4, 16, 64, 128, 256), 1024
PROMPTS = ((1, 256), (1, 1024), (1, 2048), (1, 4096), (16, 256), (16, 1024), (4, 4096))
MIXED = (16, 256)  # decodes, and the budget that they share with a prompt
CHAIN = 100  # kernels
CLASSES = {
    "attention": ("attention", "decode_kernel", "combine", "chunk_kernel"),
    "products": ("linear", "lm_head", "nvjet", "gemm", "cutlass", "splitk", "cublas"),
    "sampling": ("scores_kernel", "best_kernel"),
    "copies": ("memcpy", "memset"),
}

Event = dict[str, Any]
"""A kernel or a copy: `name`, `start_us`, `us`."""


def class_of(name: str) -> str:
    """The class of a kernel by its name; `rest` is norms, rotary, activation, embedding."""
    low = name.lower()
    return next((kind for kind, words in CLASSES.items() if any(w in low for w in words)), "rest")


def covered_us(events: list[Event]) -> dict[str, float]:
    """For how long at least one kernel ran, by class. `events` is in order of start.

    Kernels may overlap; the time that two share counts for the one that began first.
    """
    covered, end = dict.fromkeys((*CLASSES, "rest"), 0.0), float("-inf")
    for event in events:
        stop = event["start_us"] + event["us"]
        covered[class_of(event["name"])] += max(0.0, stop - max(event["start_us"], end))
        end = max(end, stop)
    return covered


def decode_steps(
    core: EngineCore, batch: int, profiled: int, timed: int, warm: int = 40
) -> tuple[list[list[Event]], list[float]]:
    """The kernels of some decode steps after HISTORY tokens, and the wall times of others in µs.

    An event's start is counted from the first of its step.
    """
    params = SamplingParams(warm + profiled + timed + 60, ignore_eos=True)
    seqs = add_requests(core, random_prompts(core, [HISTORY] * batch), params)
    while not all(seq.token_times for seq in seqs):
        core.step()
    for _ in range(warm):  # decodes that compile what is left to compile
        core.step()
    steps, walls = watch(core.step, profiled), time_of(core.step, timed)
    drop(core, seqs)
    return steps, walls


def random_prompts(core: EngineCore, lengths: list[int]) -> list[list[int]]:
    """Prompts as the experiments have them: of equal tokens a GPU may take less power."""
    return draw_prompts(lengths, core.runner.model.config.vocab_size)


def add_requests(
    core: EngineCore, prompts: list[list[int]], params: SamplingParams, name: str = ""
) -> list[Sequence]:
    """Queue them all."""
    return [core.add_request(f"{name}{i}", prompt, params) for i, prompt in enumerate(prompts)]


def drop(core: EngineCore, seqs: list[Sequence]) -> None:
    """End requests, and forget the step that was launched for them."""
    for seq in seqs:
        core.abort_request(seq.request_id)
    if isinstance(core, OverlappedEngineCore):
        core.flight = None


def time_of(step: Callable[[], object], times: int) -> list[float]:
    """Wall times in µs, after two that are not counted: nothing was in flight before them."""
    walls = []
    for _ in range(times + 2):
        start = time.perf_counter()
        step()
        walls.append(1e6 * (time.perf_counter() - start))
    return walls[2:]


def watch(step: Callable[[], object], count: int) -> list[list[Event]]:
    """The kernels and copies of `count` engine steps, each in order of start."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(count + 2):
            step()
        torch.cuda.synchronize()
    events = sorted(
        (event.time_range.start, event.time_range.elapsed_us(), event.name)
        for event in seen.events()
        if event.device_type.name == "CUDA"
    )
    # A step ends with the copy of its tokens to the host. The first and the last may be cut.
    ends = [i for i, (_, _, name) in enumerate(events) if "DtoH" in name]
    steps = [events[a + 1 : b + 1] for a, b in pairwise(ends)]
    return [
        [
            {"name": name[:48], "start_us": round(start - step[0][0], 2), "us": round(us, 2)}
            for start, us, name in step
        ]
        for step in steps[:count]
    ]


def kernel_rows(
    model: Decoder, config: EngineConfig, hardware: Hardware, repeats: int
) -> tuple[list[Row], dict[str, Any]]:
    """Microseconds of a decode step by class, each beside its bound; and of a kernel without work.

    One row without a number where there is no NVIDIA GPU.
    """
    if model.device.type != "cuda":
        return [Row("kernels", "step", "µs", [], note="left out: needs an NVIDIA GPU")], {}
    core = build_graphs(Parts(model, config))
    rows, launches = [], {}
    for batch in BATCHES:
        if batch <= config.max_num_seqs:
            steps, walls = decode_steps(core, batch, repeats, timed=20)
            name, work = f"kernels, batch {batch}", [Work(1, HISTORY + 50)] * batch
            rows += step_rows(name, steps, walls, work, model, hardware)
            launches[str(batch)] = dict(Counter(class_of(event["name"]) for event in steps[0]))
    for count, length in PROMPTS:
        if count * length <= config.max_num_batched_tokens:
            steps, walls = prompt_steps(core, count, length, repeats)
            name, work = f"kernels, prompts {count} x {length:,}", [Work(length, 0)] * count
            rows += step_rows(name, steps, walls, work, model, hardware)
    steps, walls = mixed_steps(core, repeats)
    mixed = [Work(1, 150)] * MIXED[0] + [Work(MIXED[1] - MIXED[0], 1000, False)]
    name = f"kernels, {MIXED[0]} decodes and {MIXED[1] - MIXED[0]} of a prompt"
    rows += step_rows(name, steps, walls, mixed, model, hardware)
    rows += chain_rows(model, repeats)
    return rows, {"launches": launches, "history": HISTORY + 50}


def prompt_steps(
    core: EngineCore, count: int, length: int, repeats: int
) -> tuple[list[list[Event]], list[float]]:
    """Steps of cold prompts alone, as `decode_steps` has them. A wall time is that of a request."""

    prompts = random_prompts(core, [length] * count)

    def serve() -> None:
        add_requests(core, prompts, SamplingParams(max_tokens=1, ignore_eos=True))
        while core.has_unfinished_requests():
            core.step()

    serve()
    return watch(serve, repeats), time_of(serve, repeats)


def mixed_steps(core: EngineCore, repeats: int) -> tuple[list[list[Event]], list[float]]:
    """Steps of a small budget: decodes, and beside them a part of a long prompt."""
    decodes, budget = MIXED
    whole, core.scheduler.max_num_batched_tokens = core.scheduler.max_num_batched_tokens, budget
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    seqs = add_requests(core, random_prompts(core, [100] * decodes), params)
    while not all(seq.token_times for seq in seqs):
        core.step()
    seqs += add_requests(core, random_prompts(core, [3000] * 4), params, "long ")
    for _ in range(4):
        core.step()
    steps, walls = watch(core.step, repeats), time_of(core.step, 10)
    drop(core, seqs)
    core.scheduler.max_num_batched_tokens = whole
    return steps, walls


def step_rows(
    name: str, steps: list[list[Event]], walls: list[float], work: list[Work], model: Decoder,
    hardware: Hardware,
) -> list[Row]:  # fmt: skip
    """A step in µs: its wall time, the time in which the GPU ran, that of each class of kernel."""
    covered, itemsize = [covered_us(step) for step in steps], model.dtype.itemsize
    whole, pairs = step_cost(model.config, work, itemsize), attention_flops(model.config, work)
    tokens = sum(part.num_computed + part.num_new for part in work)
    kv = tokens * kv_bytes_per_token(model.config, itemsize)
    bounds = {
        "attention": 1e6 * Cost(pairs, kv).seconds(hardware),
        "products": 1e6 * Cost(whole.flops - pairs, whole.bytes - kv).seconds(hardware),
    }
    busy, bound = [sum(step.values()) for step in covered], 1e6 * whole.seconds(hardware)
    rows = [Row(name, "step", "µs", walls, bound), Row(name, "GPU busy", "µs", busy, bound)]
    for kind in covered[0]:
        rows.append(Row(name, kind, "µs", [step[kind] for step in covered], bounds.get(kind)))
    wall = statistics.median(walls)
    rows.append(Row(name, "GPU idle", "µs", [max(0.0, wall - each) for each in busy]))
    rows.append(Row(name, "launches", "kernels", [len(steps[0])]))
    return rows


def chain_rows(model: Decoder, repeats: int) -> list[Row]:
    """What a kernel costs in a graph that has next to nothing to do: a norm of one row."""
    from nanoteach.kernels.rms_norm import add_rms_norm
    from nanoteach.triton_launch import has_dependent_launch

    x = torch.ones(1, model.config.hidden_size, dtype=model.dtype, device=model.device)
    rows = []
    for pdl, words in ((False, "one kernel"), (True, "one kernel, its start overlapped")):
        if pdl and not has_dependent_launch():
            continue

        def chain(pdl: bool = pdl) -> None:
            out = x
            for _ in range(CHAIN):
                out = add_rms_norm(out, None, model.weights.norm, 1e-6, pdl)

        samples = [us / CHAIN for us in graph_us(chain, repeats)]
        rows.append(Row("a chain of small kernels", words, "µs", samples))
    return rows


@torch.inference_mode()
def gemm_rows(model: Decoder, repeats: int, small: bool) -> list[Row]:
    """The products of all layers alone, for several numbers of tokens, and a large square one."""
    rows = []
    config, device = model.config, model.device
    for tokens in (8, 32) if small else (256, 512, 1024, 2048, 4096, 16_384):
        sizes = (config.hidden_size, config.q_size, config.intermediate_size)
        wide, heads, inner = (
            torch.randn(tokens, size, device=device).to(model.dtype) for size in sizes
        )

        def products(wide: Any = wide, heads: Any = heads, inner: Any = inner) -> None:
            for layer in model.weights.layers:
                F.linear(wide, layer.qkv)
                F.linear(heads, layer.output)
                F.linear(wide, layer.gate_up)
                F.linear(inner, layer.down)

        if device.type == "cuda":
            seconds = [us / 1e6 for us in graph_us(products, repeats, loops=3)]
        else:
            seconds = [seconds_per_call(products, device, 0) for _ in range(repeats)]
        flops = 2 * tokens * config.num_layers * layer_matrix_parameters(config)
        samples = [flops / each / 1e12 for each in seconds]
        rows.append(Row(f"the layers' products, {tokens:,} tokens", "rate", "TFLOP/s", samples))
    if not small:
        samples = [measure_gemm(device, model.dtype) / 1e12 for _ in range(repeats)]
        rows.append(Row("a square product", "rate", "TFLOP/s", samples))
    return rows
