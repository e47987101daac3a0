"""SiLU of the first half of each row times the second: one read, one write."""

import triton
import triton.language as tl
from torch import Tensor

from nanoteach.triton_launch import options, wait_for_inputs


@triton.jit
def silu_and_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row, part of the row)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    wait_for_inputs(PDL)
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: Tensor, pdl: bool = False) -> Tensor:
    """`[num_tokens, 2 * size]` to `[num_tokens, size]`."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    block = min(1024, triton.next_power_of_2(size))
    silu_and_mul_kernel[(num_tokens, triton.cdiv(size, block))](
        gate_up, out, SIZE=size, BLOCK=block, num_warps=4, **options(pdl)
    )
    return out
