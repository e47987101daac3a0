"""One layer's attention for one decode step: our kernel, which reads the pool, against the gather.

    python -m nanoteach.bench.attention --save FILE        (on an NVIDIA GPU)

Both run as CUDA graphs on the same pool and tables, so that their GPU time is compared, and not
what it takes to launch them.

Knows: pools, backends, how to time a graph. Does not know: engines.
"""

import dataclasses
import random
import statistics
from typing import Any

import torch

from nanoteach.bench.graph_time import arguments, graph_us
from nanoteach.block_manager import blocks_needed
from nanoteach.cost_model import SHAPES, kv_bytes_per_token
from nanoteach.paged_attention import PagedAttention
from nanoteach.results import save_result
from nanoteach.triton_backend import TritonAttention

BATCHES, HISTORIES = (1, 4, 16, 64), (512, 1024, 2048, 4096, 8192)
BLOCK_SIZE = 16
LAYERS = 4  # take turns, so that a small history is not found in the GPU's cache


@torch.inference_mode()
def measure(batch: int, history: int, repeats: int) -> dict[str, Any]:
    """One row: a decode of `batch` requests with `history` tokens each."""
    config, device, dtype = SHAPES["qwen3-0.6b"], torch.device("cuda"), torch.bfloat16
    per_request = blocks_needed(history, BLOCK_SIZE)
    blocks = list(range(batch * per_request))
    random.Random(0).shuffle(blocks)
    tables = [blocks[i * per_request : (i + 1) * per_request] for i in range(batch)]
    q = torch.randn(batch, config.num_heads, config.head_dim, dtype=dtype, device=device)
    k = torch.randn(batch, config.num_kv_heads, config.head_dim, dtype=dtype, device=device)
    row: dict[str, Any] = {"batch": batch, "history": history}
    outs = []
    for name, backend in (("kernel_us", TritonAttention), ("gather_us", PagedAttention)):
        torch.manual_seed(0)
        few = dataclasses.replace(config, num_layers=LAYERS)
        pool = backend(few, len(blocks), BLOCK_SIZE, dtype, device)
        pool.k.normal_()
        pool.v.normal_()
        metadata = pool.plan([1] * batch, [history] * batch, tables)

        def all_layers(pool: PagedAttention = pool, metadata: Any = metadata) -> None:
            for layer in range(LAYERS):
                pool.attend(layer, q, k, k, metadata)

        outs.append(pool.attend(0, q, k, k, metadata).float())
        row[name] = [us / LAYERS for us in graph_us(all_layers, repeats)]
    error = float((outs[0] - outs[1]).norm() / outs[1].norm())
    if error > 0.02:
        raise RuntimeError(f"the two do not agree: {error:.3f} of the result's size")
    row["bytes"] = batch * history * kv_bytes_per_token(config, dtype.itemsize) // config.num_layers
    return row


def main() -> None:
    """Print the table, and keep it with `--save FILE`."""
    args = arguments(__doc__, repeats=7)
    rows = []
    print("batch  history   kernel µs   gather µs   times   kernel GB/s")
    for batch in BATCHES:
        for history in HISTORIES:
            row = measure(batch, history, args.repeats)
            kernel, gather = (statistics.median(row[name]) for name in ("kernel_us", "gather_us"))
            speed, times = row["bytes"] / kernel / 1000, gather / kernel
            print(
                f"{batch:5}  {history:7}   {kernel:9.1f}   {gather:9.1f}   {times:5.1f}   "
                f"{speed:11,.0f}",
                flush=True,
            )
            rows.append(row)
    if args.save:
        command = f"python -m nanoteach.bench.attention --repeats {args.repeats}"
        save_result(args.save, command, torch.device("cuda"), {"rows": rows})


if __name__ == "__main__":
    main()
