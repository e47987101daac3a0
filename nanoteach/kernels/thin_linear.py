"""Matrix products for very few tokens: as fast as the weights can be read.

With one token a product reads every weight once and uses it once; all that counts is how many
bytes are in flight. cuBLAS is made for more rows. Here a program takes a few whole rows of the
weight matrix, loads them before it waits for its input, and multiplies and adds in plain float32.
What comes before (RMSNorm) and after (SiLU times up, the residual) rides along: both are a few
values beside the weights.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoteach.triton_launch import options, wait_for_inputs


@triton.jit
def input_row(x, norm, columns, mask, eps, IN: tl.constexpr, NORM: tl.constexpr):
    """One token's values in float32, normed if asked for."""
    value = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        value = value * tl.rsqrt(tl.sum(value * value, 0) / IN + eps) * norm
    return value


@triton.jit
def thin_linear_kernel(
    x, weight, bias, norm, residual, out, eps,
    TOKENS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    ROWS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows of the weight). With SILU the weight has gate rows, then up rows."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_IN)
    inside = columns < IN
    mask = (rows < OUT)[:, None] & inside[None, :]
    places = weight + rows[:, None].to(tl.int64) * IN + columns[None, :]
    w = tl.load(places, mask=mask, other=0.0)
    if SILU:
        w_up = tl.load(places + OUT * IN, mask=mask, other=0.0)
    norm_row = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32) if NORM else 0.0
    wait_for_inputs(PDL)
    for token in tl.static_range(TOKENS):
        value = input_row(x + token * IN, norm_row, columns, inside, eps, IN, NORM)
        result = tl.sum(w.to(tl.float32) * value[None, :], 1)
        if SILU:
            up = tl.sum(w_up.to(tl.float32) * value[None, :], 1)
            result = result / (1.0 + tl.exp(-result)) * up
        if BIAS:
            result += tl.load(bias + rows, mask=rows < OUT, other=0.0).to(tl.float32)
        if RESIDUAL:
            more = tl.load(residual + token * OUT + rows, mask=rows < OUT, other=0.0)
            result += more.to(tl.float32)
        tl.store(out + token * OUT + rows, result.to(out.dtype.element_ty), mask=rows < OUT)


@triton.jit
def few_linear_kernel(
    x, weight, bias, norm, residual, out, eps, tokens,
    PAD: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for 2 to 16 tokens, on the tensor cores. PAD: tokens rounded up to a power of two.

    The tensor cores want 16 rows. A row of 1,024 weights is cut into 8 pieces of 128, and so is
    each token: `[ROWS * 8, 128]` times `[128, PAD * 8]`. Of the result only the pairs of pieces at
    the same place count. Seven eighths of the products are thrown away, and still nothing but the
    weights takes time.
    """
    piece: tl.constexpr = 128
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS * 8) // 8
    places = tl.arange(0, ROWS * 8) % 8
    who, where = tl.arange(0, PAD * 8) // 8, tl.arange(0, PAD * 8) % 8
    inner = tl.arange(0, piece)
    w_columns = places[:, None] * piece + inner[None, :]
    x_columns = where[:, None] * piece + inner[None, :]
    w_at = weight + rows[:, None].to(tl.int64) * IN + w_columns
    w_mask = (rows < OUT)[:, None] & (w_columns < IN)
    x_at = x + who[:, None] * IN + x_columns
    w = tl.load(w_at, mask=w_mask, other=0.0)
    if SILU:
        w_up = tl.load(w_at + OUT * IN, mask=w_mask, other=0.0)
    wait_for_inputs(PDL)
    value = tl.load(x_at, mask=(who < tokens)[:, None] & (x_columns < IN), other=0.0)
    if NORM:  # then the row is one chunk
        v = value.to(tl.float32)
        square = tl.sum(tl.reshape(tl.sum(v * v, 1), [PAD, 8]), 1)
        scale = tl.rsqrt(square / IN + eps)
        scale = tl.reshape(tl.broadcast_to(scale[:, None], [PAD, 8]), [PAD * 8])
        n = tl.load(norm + x_columns, mask=x_columns < IN, other=0.0).to(tl.float32)
        value = (v * scale[:, None] * n).to(x.dtype.element_ty)
    products = tl.dot(w, tl.trans(value), input_precision="ieee")
    if SILU:
        up_products = tl.dot(w_up, tl.trans(value), input_precision="ieee")
    for chunk in tl.static_range(1, CHUNKS):
        shift = chunk * 8 * piece
        w = tl.load(w_at + shift, mask=w_mask & (w_columns + shift < IN), other=0.0)
        mask = (who < tokens)[:, None] & (x_columns + shift < IN)
        value = tl.load(x_at + shift, mask=mask, other=0.0)
        products = tl.dot(w, tl.trans(value), products, input_precision="ieee")
    result = same_place(products, ROWS, PAD)
    if SILU:
        result = result / (1.0 + tl.exp(-result)) * same_place(up_products, ROWS, PAD)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    who = tl.arange(0, PAD)[None, :]
    mask = (rows < OUT) & (who < tokens)
    if BIAS:
        result += tl.load(bias + rows, mask=rows < OUT, other=0.0).to(tl.float32)
    if RESIDUAL:
        result += tl.load(residual + who * OUT + rows, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + who * OUT + rows, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def same_place(products, ROWS: tl.constexpr, PAD: tl.constexpr):
    """`[ROWS, PAD]`: of the products of pieces `[ROWS * 8, PAD * 8]`, those at the same place."""
    i, j = tl.arange(0, ROWS * 8)[:, None], tl.arange(0, PAD * 8)[None, :]
    products = tl.where(i % 8 == j % 8, products, 0.0)
    products = tl.sum(tl.reshape(products, [ROWS, 8, PAD * 8]), 1)
    return tl.sum(tl.reshape(products, [ROWS, PAD, 8]), 2)


def few_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, shape: tuple[int, int] = (4, 4), *,
    norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None,
    silu: bool = False, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """As `thin_linear`, for 2 to 16 tokens."""
    (tokens, width), (rows, num_warps) = x.shape, shape
    size = weight.shape[0] // (2 if silu else 1)
    out = x.new_empty(tokens, size)
    few_linear_kernel[(triton.cdiv(size, rows),)](
        x, weight, x if bias is None else bias, x if norm is None else norm,
        x if residual is None else residual, out, eps, tokens, PAD=triton.next_power_of_2(tokens),
        IN=width, OUT=size, CHUNKS=triton.cdiv(width, 1024), ROWS=rows, NORM=norm is not None,
        BIAS=bias is not None, RESIDUAL=residual is not None, SILU=silu, num_warps=num_warps,
        **options(pdl),
    )  # fmt: skip
    return out


def thin_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, shape: tuple[int, int] = (4, 4), *,
    norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None,
    silu: bool = False, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """`x @ weight.T` for few tokens: x `[tokens, in]`, weight `[out, in]`.

    norm: RMSNorm x by these weights first; residual: add this `[tokens, out]`; silu: weight is
    `[2 * out, in]`, and the result is silu of the first half times the second.
    """
    (tokens, width), (rows, num_warps) = x.shape, shape
    size = weight.shape[0] // (2 if silu else 1)
    out = x.new_empty(tokens, size)
    thin_linear_kernel[(triton.cdiv(size, rows),)](
        x, weight, x if bias is None else bias, x if norm is None else norm,
        x if residual is None else residual, out, eps, TOKENS=tokens, IN=width, OUT=size,
        BLOCK_IN=triton.next_power_of_2(width), ROWS=rows, NORM=norm is not None,
        BIAS=bias is not None, RESIDUAL=residual is not None, SILU=silu, num_warps=num_warps,
        **options(pdl),
    )  # fmt: skip
    return out
