"""Residual + RMSNorm in one pass.

PyTorch takes six kernels for it, and writes and reads the row each time. Here a row is read once,
summed with the residual, scaled and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoteach.triton_launch import options, wait_for_inputs


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = columns < SIZE
    w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    value = tl.load(x + row * SIZE + columns, mask=mask, other=0.0)
    if ADD:
        value += tl.load(residual + row * SIZE + columns, mask=mask, other=0.0)
        tl.store(residual + row * SIZE + columns, value, mask=mask)
    v = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / SIZE + eps)
    tl.store(out + row * SIZE + columns, (v * scale * w).to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pdl: bool = False
) -> Tensor:
    """RMSNorm of `x + residual`, rows `[num_tokens, size]`; the sum is left in `residual`."""
    num_tokens, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(num_tokens,)](
        x, x if residual is None else residual, weight, out, eps, SIZE=size, BLOCK=block,
        ADD=residual is not None, num_warps=max(1, min(8, block // 256)), **options(pdl),
    )  # fmt: skip
    return out
