"""QK-norm, rotary embedding and the store of K and V, from the rows that the QKV product wrote.

Three steps that each would read and write all of q and k. Each value is turned with its partner,
half a head away. Instead of cutting heads in two, a program loads each head twice, the second time
shifted by half its width: the values are in the cache, and no shuffle is needed.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoteach.triton_launch import options, wait_for_inputs


@triton.jit
def normed_and_turned(
    heads, weight, mask, cos, sin, eps, dims, HEAD_DIM: tl.constexpr, QK_NORM: tl.constexpr
):
    """Heads in float32, `[rows, dims]`, after QK-norm and rotation.

    heads, weight: pointers to each row's first value, `[rows, 1]`; cos, sin: pointers to the
    position's first angle.
    """
    half: tl.constexpr = HEAD_DIM // 2
    partners = (dims + half) % HEAD_DIM
    x = tl.load(heads + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(heads + partners[None, :], mask=mask, other=0.0).to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x * scale * tl.load(weight + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight + partners[None, :], mask=mask, other=0.0).to(tl.float32)
    inside = dims < HEAD_DIM
    c = tl.load(cos + dims % half, mask=inside, other=0.0)
    s = tl.load(sin + dims % half, mask=inside, other=0.0)
    return x * c[None, :] + y * tl.where(dims < half, -s, s)[None, :]


@triton.jit
def rope_store_kernel(
    qkv, qk_norm, positions, slots, cos, sin, q_out, k_pool, v_pool, eps, slot_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, QK_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token). HEADS: a power of two that holds all heads of q and k."""
    token = tl.program_id(0).to(tl.int64)
    rows, dims = tl.arange(0, HEADS), tl.arange(0, DIM)
    inside = (dims < HEAD_DIM)[None, :]
    is_q, is_k = rows < NUM_HEADS, (rows >= NUM_HEADS) & (rows < NUM_HEADS + NUM_KV_HEADS)
    wait_for_inputs(PDL)
    position = tl.load(positions + token)
    slot = tl.load(slots + token).to(tl.int64)
    width: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    heads = qkv + token * width + rows[:, None] * HEAD_DIM
    weight = qk_norm + rows[:, None] * HEAD_DIM
    angles = position * (HEAD_DIM // 2)
    qk = normed_and_turned(
        heads, weight, (is_q | is_k)[:, None] & inside, cos + angles, sin + angles, eps, dims,
        HEAD_DIM, QK_NORM,
    )  # fmt: skip
    q_place = q_out + token * NUM_HEADS * HEAD_DIM + rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(q_place, qk.to(q_out.dtype.element_ty), mask=is_q[:, None] & inside)
    if slot >= 0:  # padding has no place
        place = slot * slot_stride + (rows[:, None] - NUM_HEADS) * HEAD_DIM + dims[None, :]
        mask = is_k[:, None] & inside
        tl.store(k_pool + place, qk.to(k_pool.dtype.element_ty), mask=mask)
        v = tl.load(heads + NUM_KV_HEADS * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        tl.store(v_pool + place, v, mask=mask)


def rope_store(
    qkv: Tensor, qk_norm: Tensor | None, positions: Tensor, slots: Tensor, cos: Tensor, sin: Tensor,
    k_pool: Tensor, v_pool: Tensor, num_heads: int, eps: float, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """q `[num_tokens, num_heads, head_dim]`, ready; K and V are in the pool.

    qkv `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`; positions, slots int32
    `[num_tokens]`, a slot of -1 for padding; cos, sin float32 `[positions, head_dim / 2]`.
    """
    num_kv_heads, head_dim = k_pool.shape[-2:]
    q = qkv.new_empty(qkv.shape[0], num_heads, head_dim)
    rope_store_kernel[(qkv.shape[0],)](
        qkv, qkv if qk_norm is None else qk_norm, positions, slots, cos, sin, q, k_pool, v_pool,
        eps, k_pool.stride(1), NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HEADS=triton.next_power_of_2(num_heads + num_kv_heads), HEAD_DIM=head_dim,
        DIM=triton.next_power_of_2(head_dim), QK_NORM=qk_norm is not None, num_warps=4,
        **options(pdl),
    )  # fmt: skip
    return q
