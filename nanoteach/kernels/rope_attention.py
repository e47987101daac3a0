"""For few sequences: QK-norm, rotary embedding, the store and decode attention in one kernel.

With one sequence attention is a few microseconds, and a kernel of its own for q, k and v costs as
much again. So each program norms and turns the queries that it needs; the first split does so with
the new key as well, and stores it. It need not read it back: the new token is where its running
softmax begins. The first tile of the history is loaded before the wait, since nobody writes it now.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from nanoteach.kernels.rope_store import normed_and_turned
from nanoteach.triton_attention import (
    LOG2_E,
    attend_tile,
    combine_splits,
    is_wide,
    pool_rows,
    store_split,
)
from nanoteach.triton_launch import options, wait_for_inputs


@triton.jit
def rope_attention_kernel(
    qkv, qk_norm, cos, sin, k_pool, v_pool, tables, seq_lens, slots, out, partial, partial_lse,
    eps, scale, table_stride, slot_stride,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, QK_NORM: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence, K/V head, split). Row GROUP of a tile is the new key."""
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    NUM_HEADS: tl.constexpr = GROUP * NUM_KV_HEADS
    rows, dims = tl.arange(0, GROUP_ROWS), tl.arange(0, DIM)
    inside = (dims < HEAD_DIM)[None, :]
    history = tl.load(seq_lens + seq) - 1
    if history < 0:  # padding; whoever comes next may rely on all before it
        wait_for_inputs(PDL)
        return
    table = tables + seq * table_stride
    tiles_each = tl.cdiv(tl.cdiv(history, BLOCK_N), SPLITS)
    begin = split * tiles_each * BLOCK_N
    end = tl.minimum(begin + tiles_each * BLOCK_N, history)
    pool_column = kv_head * HEAD_DIM + dims
    tokens = begin + tl.arange(0, BLOCK_N)
    places = pool_rows(table, tokens, tokens < end, slot_stride, BLOCK_SIZE, WIDE)[:, None]
    mask = (tokens < end)[:, None] & inside
    keys = tl.load(k_pool + places + pool_column[None, :], mask=mask, other=0.0)
    values = tl.load(v_pool + places + pool_column[None, :], mask=mask, other=0.0)
    wait_for_inputs(PDL)

    heads = tl.where(rows < GROUP, kv_head * GROUP + rows, NUM_HEADS + kv_head)
    row_of = qkv + seq * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    qk = normed_and_turned(
        row_of + heads[:, None] * HEAD_DIM, qk_norm + heads[:, None] * HEAD_DIM,
        (rows <= GROUP)[:, None] & inside, cos + history * (HEAD_DIM // 2),
        sin + history * (HEAD_DIM // 2), eps, dims, HEAD_DIM, QK_NORM,
    ).to(k_pool.dtype.element_ty)  # fmt: skip
    largest = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    weighted = tl.zeros([GROUP_ROWS, DIM], tl.float32)
    slot = tl.load(slots + seq).to(tl.int64)
    if split == 0:
        qk32 = qk.to(tl.float32)
        key = tl.sum(tl.where((rows == GROUP)[:, None], qk32, 0.0), 0)
        value = tl.load(
            row_of + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + dims,
            mask=dims < HEAD_DIM, other=0.0,
        )  # fmt: skip
        tl.store(
            k_pool + slot * slot_stride + pool_column, key.to(k_pool.dtype.element_ty),
            mask=dims < HEAD_DIM,
        )  # fmt: skip
        tl.store(v_pool + slot * slot_stride + pool_column, value, mask=dims < HEAD_DIM)
        largest = tl.sum(qk32 * key[None, :], 1) * scale
        total = tl.full([GROUP_ROWS], 1.0, tl.float32)
        weighted += value.to(tl.float32)[None, :]
    for start in range(begin, end, BLOCK_N):
        largest, total, weighted = attend_tile(
            qk, keys, values, (tokens < end)[None, :], scale, largest, total, weighted
        )
        tokens = start + BLOCK_N + tl.arange(0, BLOCK_N)
        places = pool_rows(table, tokens, tokens < end, slot_stride, BLOCK_SIZE, WIDE)[:, None]
        mask = (tokens < end)[:, None] & inside
        keys = tl.load(k_pool + places + pool_column[None, :], mask=mask, other=0.0)
        values = tl.load(v_pool + places + pool_column[None, :], mask=mask, other=0.0)
    store_split(
        out, partial, partial_lse, largest, total, weighted, seq * NUM_HEADS + heads, rows < GROUP,
        (rows < GROUP)[:, None] & inside, dims, HEAD_DIM, SPLITS, split,
    )  # fmt: skip


def rope_attention(
    qkv: Tensor, qk_norm: Tensor | None, cos: Tensor, sin: Tensor, k_pool: Tensor, v_pool: Tensor,
    tables: Tensor, seq_lens: Tensor, slots: Tensor, out: Tensor, eps: float, splits: int,
    workspace: tuple[Tensor, Tensor], pdl: bool = False, block_n: int = 128, num_warps: int = 4,
) -> None:  # fmt: skip
    """One new token a sequence; its K and V go to the pool.

    qkv `[num_seqs, (num_heads + 2 * num_kv_heads) * head_dim]`, the rest as in `rope_store` and
    `decode_attention`. The new token's position is its `seq_lens` less one.
    """
    num_seqs, num_heads, head_dim = out.shape
    num_kv_heads = k_pool.shape[2]
    group = num_heads // num_kv_heads
    partial, lse = workspace
    rope_attention_kernel[(num_seqs, num_kv_heads, splits)](
        qkv, qkv if qk_norm is None else qk_norm, cos, sin, k_pool, v_pool, tables, seq_lens,
        slots, out, partial, lse, eps, LOG2_E / math.sqrt(head_dim), tables.stride(0),
        k_pool.stride(1), GROUP=group, NUM_KV_HEADS=num_kv_heads,
        GROUP_ROWS=max(16, triton.next_power_of_2(group + 1)), HEAD_DIM=head_dim,
        DIM=max(16, triton.next_power_of_2(head_dim)), BLOCK_SIZE=k_pool.shape[1], BLOCK_N=block_n,
        SPLITS=splits, QK_NORM=qk_norm is not None, WIDE=is_wide(k_pool),
        num_warps=num_warps, **options(pdl),
    )  # fmt: skip
    if splits > 1:
        combine_splits(partial, lse, seq_lens, out, splits, pdl)
