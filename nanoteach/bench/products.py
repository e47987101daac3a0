"""One layer's four matrix products for few tokens: our kernels against cuBLAS.

    python -m nanoteach.bench.products --save FILE        (on an NVIDIA GPU)

Ours have in them what comes before and after the product: the norm of QKV's and gate/up's input,
gate/up's SiLU, the residual that is added to output's and down's result. cuBLAS has the product
alone. The layers' weights take turns, so that none is found in the GPU's cache.

Knows: kernels, how to time a graph. Does not know: engines.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoteach.bench.graph_time import arguments, graph_us
from nanoteach.bench.random_model import random_model
from nanoteach.fused_decoder import FEW, ONE
from nanoteach.kernels.thin_linear import few_linear, thin_linear
from nanoteach.model import Decoder
from nanoteach.results import save_result
from nanoteach.triton_launch import has_dependent_launch

SHAPE = "qwen3-0.6b"
TOKENS = (1, 2, 4, 8, 16)


def products(model: Decoder) -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
    """Each product's weights `[out, in]`, one a layer, and what our kernel does besides."""
    layers, eps = model.weights.layers, model.config.rms_norm_eps
    normed = {"norm": layers[0].input_norm, "eps": eps}
    return {
        "qkv": ([w.qkv for w in layers], normed),
        "output": ([w.output for w in layers], {"residual": True}),
        "gate_up": ([w.gate_up for w in layers], normed | {"silu": True}),
        "down": ([w.down for w in layers], {"residual": True}),
    }


@torch.inference_mode()
def measure(model: Decoder, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each product: microseconds of one layer, for each repeat."""
    pdl, hidden = has_dependent_launch(), model.config.hidden_size
    linear, shapes = (thin_linear, ONE) if tokens == 1 else (few_linear, FEW)
    residual = torch.randn(tokens, hidden, device="cuda", dtype=model.dtype)
    rows = []
    for name, (weights, besides) in products(model).items():
        x = torch.randn(tokens, weights[0].shape[1], device="cuda", dtype=model.dtype)
        options = besides | ({"residual": residual} if "residual" in besides else {})

        def ours(weight: Tensor, x: Tensor = x, name: str = name, options: Any = options) -> Tensor:
            return linear(x, weight, None, shapes[name], pdl=pdl, **options)

        def cublas(weight: Tensor, x: Tensor = x) -> Tensor:
            return F.linear(x, weight)

        row: dict[str, Any] = {"product": name, "tokens": tokens}
        row["bytes"] = weights[0].numel() * weights[0].element_size()
        for key, product in (("ours_us", ours), ("cublas_us", cublas)):
            row[key] = [us / len(weights) for us in graph_us(for_each(product, weights), repeats)]
        rows.append(row)
    return rows


def for_each(product: Callable[[Tensor], Tensor], weights: list[Tensor]) -> Callable[[], None]:
    """The product with one weight after the other."""

    def run() -> None:
        for weight in weights:
            product(weight)

    return run


def main() -> None:
    """Print the table, and keep it with `--save FILE`."""
    args = arguments(__doc__, repeats=7)
    model = random_model(SHAPE, "cuda", torch.bfloat16)
    rows = []
    print("product    tokens   ours µs   cuBLAS µs")
    for tokens in TOKENS:
        for row in measure(model, tokens, args.repeats):
            ours, cublas = (statistics.median(row[key]) for key in ("ours_us", "cublas_us"))
            print(f"{row['product']:8}   {tokens:6}   {ours:7.2f}   {cublas:9.2f}", flush=True)
            rows.append(row)
    if args.save:
        command = f"python -m nanoteach.bench.products --repeats {args.repeats}"
        save_result(args.save, command, torch.device("cuda"), {"shape": SHAPE, "rows": rows})


if __name__ == "__main__":
    main()
