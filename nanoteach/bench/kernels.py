"""Where the time of a step goes on the GPU: its kernels by class, and what a kernel costs at least.

These are the measurements behind the calibrated model. Products and attention each have a bound of
their own; what a chain of kernels with next to no work takes is the overhead; and the layers'
products alone say what a prompt's step could reach.

Knows: the profiler, graphs, names of kernels. Does not know: what a good share is.
"""

import statistics
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from nanoteach.bench.graph_time import graph_us
from nanoteach.bench.table import Row
from nanoteach.config import EngineConfig
from nanoteach.cost_model import Work, kv_bytes_per_token, layer_matrix_parameters, step_cost
from nanoteach.engine_core import EngineCore
from nanoteach.hardware import Hardware, measure_gemm, seconds_per_call
from nanoteach.model import Decoder
from nanoteach.stages import Parts, build_graphs
from nanoteach.types import SamplingParams

BATCHES, HISTORY = (1, 4, 16, 64, 128, 256), 1024
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
    seqs = [core.add_request(str(i), list(range(HISTORY)), params) for i in range(batch)]
    while not all(seq.token_times for seq in seqs):
        core.step()
    for _ in range(warm):  # decodes that compile what is left to compile
        core.step()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(profiled + 2):
            core.step()
        torch.cuda.synchronize()
    walls = []
    for _ in range(timed):
        start = time.perf_counter()
        core.step()
        walls.append(1e6 * (time.perf_counter() - start))
    for seq in seqs:
        core.abort_request(seq.request_id)
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
        for step in steps[:profiled]
    ], walls


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
        if batch > config.max_num_seqs:
            continue
        steps, walls = decode_steps(core, batch, repeats, timed=20)
        covered = [covered_us(step) for step in steps]
        history = HISTORY + 50
        whole = step_cost(model.config, [Work(1, history)] * batch, model.dtype.itemsize)
        kv = batch * (history + 1) * kv_bytes_per_token(model.config, model.dtype.itemsize)
        bounds = {
            "attention": 1e6 * kv / hardware.read_bandwidth,
            "products": 1e6 * (whole.bytes - kv) / hardware.read_bandwidth,
        }
        name = f"kernels, batch {batch}"
        wall, busy = statistics.median(walls), [sum(step.values()) for step in covered]
        bound = 1e6 * whole.seconds(hardware)
        rows.append(Row(name, "step", "µs", walls, bound))
        rows.append(Row(name, "GPU busy", "µs", busy, bound))
        for kind in covered[0]:
            rows.append(Row(name, kind, "µs", [step[kind] for step in covered], bounds.get(kind)))
        rows.append(Row(name, "GPU idle", "µs", [max(0.0, wall - each) for each in busy]))
        counted = Counter(class_of(event["name"]) for event in steps[0])
        rows.append(Row(name, "launches", "kernels", [sum(counted.values())]))
        launches[str(batch)] = dict(counted)
    rows += chain_rows(model, repeats)
    return rows, {"launches": launches, "history": HISTORY + 50}


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
