"""Two numbers first: how fast a machine multiplies, and how fast it reads its memory.

Knows: how to measure both on this machine, and what they are for a few named GPUs. Does not know:
models. No step can be faster than these two allow; cost_model.py turns them into a bound.
"""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

import torch


@dataclass(frozen=True)
class Hardware:
    """A machine's ceilings: GEMM rate in FLOP/s, bandwidths in bytes/s, and who says so.

    `flops` holds for one dtype, named in `source`. A copy counts the bytes read and the bytes
    written.
    """

    name: str
    flops: float
    read_bandwidth: float
    copy_bandwidth: float
    source: str


def _datasheet(name: str, tflops: float, gigabytes: float, document: str) -> Hardware:
    """A GPU as its vendor describes it: peaks that no program quite reaches."""
    source = f"{document}, a peak: bf16 without sparsity, accumulated in float32"
    return Hardware(name, tflops * 1e12, gigabytes * 1e9, gigabytes * 1e9, source)


HARDWARE = {
    "h200": Hardware(
        "H200", 786e12, 4311e9, 4198e9, "measured 2026-11-29: bf16, torch 2.11.0, driver 580.159"
    ),
    # Datasheets of data center GPUs print twice this GEMM rate, "with sparsity": zeros skipped.
    "h100": _datasheet("H100 SXM", 989, 3350, "NVIDIA H100 datasheet"),
    "a100": _datasheet("A100 80GB SXM", 312, 2039, "NVIDIA A100 datasheet"),
    "l4": _datasheet("L4", 121, 300, "NVIDIA L4 datasheet"),
    "rtx4090": _datasheet("RTX 4090", 165, 1008, "NVIDIA Ada architecture whitepaper"),
    "rtx3090": _datasheet("RTX 3090", 71, 936, "NVIDIA Ampere GA102 whitepaper"),
}


def hardware_named(name: str) -> Hardware:
    """The entry of HARDWARE, in any case of letters. Raises ValueError that lists the names."""
    if name.lower() not in HARDWARE:
        raise ValueError(f"no hardware is named {name!r}; these are: {', '.join(HARDWARE)}")
    return HARDWARE[name.lower()]


def measure(
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Callable[[str], object] | None = None,
) -> Hardware:
    """Measure this machine's ceilings in 2 to 6 seconds; `progress=print` shows each as it comes.

    The device is cpu, cuda or mps (else ValueError). Only the GEMM rate depends on the dtype.
    """
    if str(device).partition(":")[0] not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device {str(device)!r} cannot be measured; cpu, cuda and mps can")
    device = torch.device(device)
    say = progress or (lambda line: None)
    flops = measure_gemm(device, dtype)
    say(f"GEMM in {dtype}: {flops / 1e12:.3g} TFLOP/s")
    read = measure_read(device)
    say(f"read: {read / 1e9:.3g} GB/s")
    copy = measure_copy(device)
    say(f"copy: {copy / 1e9:.3g} GB/s")
    source = f"measured {date.today().isoformat()}: {dtype}, torch {torch.__version__}"
    return Hardware(_device_name(device), flops, read, copy, source)


def measure_gemm(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product of two square matrices: of 8192, or the first that takes 0.02 s."""
    size = 256
    while size < 8192 and seconds_per_call(_gemm(size, device, dtype), device, 0) < 0.02:
        size *= 2
    # A GPU holds its highest rate for some 30 ms; then its power limit slows it (an H200 from 780
    # to 665 TFLOP/s). A ceiling is what no step can beat, so there we stop after three samples.
    budget = 0.8 if device.type == "cpu" else 0
    return 2 * size**3 / seconds_per_call(_gemm(size, device, dtype), device, budget)


def measure_read(device: torch.device) -> float:
    """Bytes/s of reading an array once and writing next to nothing: its sum."""
    array = _large_array(device)
    return array.nbytes / seconds_per_call(array.sum, device)


def measure_copy(device: torch.device) -> float:
    """Bytes/s of copying an array; each byte counts twice, as it is read and as it is written."""
    array = _large_array(device)
    target = torch.ones_like(array)
    return 2 * array.nbytes / seconds_per_call(lambda: target.copy_(array), device)


def seconds_per_call(
    call: Callable[[], object], device: torch.device, budget: float = 0.8
) -> float:
    """Median seconds of one call: after a warm-up, three samples or `budget` seconds of them."""
    # A GPU runs behind the host, so we wait for it before we look at the clock. The wait has a
    # price of its own; ten calls share it.
    calls = 1 if device.type == "cpu" else 10
    call()
    _synchronize(device)
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < 3 or time.perf_counter() - started < budget:
        began = time.perf_counter()
        for _ in range(calls):
            call()
        _synchronize(device)
        samples.append((time.perf_counter() - began) / calls)
    return statistics.median(samples)


def _gemm(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    # Random values: a GPU draws less power on zeros, and so runs faster than it ever will again.
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    return functools.partial(torch.matmul, left, right)


def _large_array(device: torch.device) -> torch.Tensor:
    # 1 GiB on a GPU, else 256 MiB: several times the caches. Ones, not zeros or empty, since
    # pages that nobody wrote may all be one page, and that one is cached.
    num_values = 2**28 if device.type == "cuda" else 2**26
    return torch.ones(num_values, device=device, dtype=torch.float32)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "Apple GPU" if device.type == "mps" else f"CPU, {torch.get_num_threads()} threads"
