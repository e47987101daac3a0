"""Stage 7. Attention that reads the pool where it lies: two Triton kernels.

Both walk a history tile by tile, find each token's K/V through the block table, and keep a running
softmax (FlashAttention, Dao et al., 2022): the largest score so far, the sum of the exponentials,
and the weighted sum of V. When a tile brings a larger score, the two sums are scaled down. So no
score matrix and no gathered copy of K/V ever exists.

    decode_kernel   one new token a sequence. All query heads that share a K/V head are the rows of
                    one small product, so K/V are read once. A long history is split over several
                    programs (split-KV: Flash-Decoding, Dao et al., 2023), and `combine_kernel`
                    adds up their parts.
    chunk_kernel    several new tokens a sequence: a prompt, or a chunk of one after its history.
                    In a small step this may be split, too; `combine_chunks_kernel` adds up.

Every number that changes from step to step is read from memory, none is an argument: a CUDA graph
that has recorded a launch can replay it. A sequence of length 0 is padding: its row is left alone.

Knows: how attention is computed. Does not know: who owns a block, or what a step is.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from nanoteach.triton_launch import options, wait_for_inputs

LOG2_E = math.log2(math.e)
# The kernels use powers of two: exp2 is what the hardware has, and scores are scaled to suit.


@triton.jit
def pool_rows(table, tokens, mask, slot_stride, BLOCK_SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Where in the pool the tokens with these indices begin. WIDE: 32 bits are not enough."""
    if mask is None:
        block = tl.load(table + tokens // BLOCK_SIZE)
    else:
        block = tl.load(table + tokens // BLOCK_SIZE, mask=mask, other=0)
    if WIDE:
        block = block.to(tl.int64)
    return (block * BLOCK_SIZE + tokens % BLOCK_SIZE) * slot_stride


@triton.jit
def attend_tile(q, keys, values, seen, scale, largest, total, weighted):
    """The running softmax, one tile of keys further. `seen` is None or says which to count."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
    rescale = tl.exp2(largest - new_largest)
    weights = tl.exp2(scores * scale - new_largest[:, None])
    total = total * rescale + tl.sum(weights, 1)
    weighted = weighted * rescale[:, None]
    weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
    return new_largest, total, weighted


@triton.jit
def store_split(
    out, partial, partial_lse, largest, total, weighted, row, rows_mask, mask, dims,
    HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, split,
):  # fmt: skip
    """The result of one split, or the whole result where there is but one."""
    empty = total == 0.0  # a split that had nothing to do
    total = tl.where(empty, 1.0, total)
    result = weighted / total[:, None]
    if SPLITS == 1:
        place = out + row[:, None] * HEAD_DIM + dims[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=mask)
    else:
        place = partial + (row * SPLITS + split)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(place, result, mask=mask)
        lse = tl.where(empty, float("-inf"), largest + tl.log2(total))
        tl.store(partial_lse + row * SPLITS + split, lse, mask=rows_mask)


@triton.jit
def decode_kernel(
    q, k_pool, v_pool, tables, seq_lens, out, partial, partial_lse,
    scale, table_stride, q_stride, slot_stride,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence, K/V head, split)."""
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_inputs(PDL)
    seq_len = tl.load(seq_lens + seq)
    if seq_len == 0:  # padding
        return
    table = tables + seq * table_stride
    rows, dims = tl.arange(0, GROUP_ROWS), tl.arange(0, DIM)
    heads = kv_head * GROUP + rows
    row_mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = q + seq * q_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    q_tile = tl.load(q_at, mask=row_mask, other=0.0)

    num_tiles = tl.cdiv(seq_len, BLOCK_N)
    tiles_each = tl.cdiv(num_tiles, SPLITS)
    begin = split * tiles_each * BLOCK_N
    end = tl.minimum(begin + tiles_each * BLOCK_N, seq_len)
    largest = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    weighted = tl.zeros([GROUP_ROWS, DIM], tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        valid = tokens < end
        starts = pool_rows(table, tokens, valid, slot_stride, BLOCK_SIZE, WIDE)
        places = starts[:, None] + kv_head * HEAD_DIM + dims[None, :]
        kv_mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(k_pool + places, mask=kv_mask, other=0.0)
        values = tl.load(v_pool + places, mask=kv_mask, other=0.0)
        largest, total, weighted = attend_tile(
            q_tile, keys, values, valid[None, :], scale, largest, total, weighted
        )

    store_split(
        out, partial, partial_lse, largest, total, weighted,
        seq * tl.num_programs(1) * GROUP + heads, rows < GROUP, row_mask, dims,
        HEAD_DIM, SPLITS, split,
    )  # fmt: skip


@triton.jit
def combine_kernel(
    partial, partial_lse, seq_lens, out,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence, query head): the splits' results, weighted by their share of the sum."""
    row = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIM)
    wait_for_inputs(PDL)
    if tl.load(seq_lens + tl.program_id(0)) == 0:
        return
    lse = tl.load(partial_lse + row * SPLITS + splits)
    weights = tl.exp2(lse - tl.max(lse, 0))
    place = partial + (row * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(place, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def chunk_kernel(
    q, k_pool, v_pool, tables, query_starts, seq_lens, tile_seqs, tile_starts, out, partial,
    partial_lse, scale, table_stride, q_stride, slot_stride,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Program (tile of new tokens of one sequence, K/V head, split).

    A tile's rows are its tokens times the query heads of the K/V head, `GROUP_ROWS` a token.
    """
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    split = tl.program_id(2)
    seq = tl.load(tile_seqs + tile)
    if seq < 0:  # no such tile in this step
        return
    first = tl.load(tile_starts + tile)  # of the sequence's new tokens
    query_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)
    history = seq_len - query_len
    table = tables + seq * table_stride
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    tokens = first + rows // GROUP_ROWS
    heads = kv_head * GROUP + rows % GROUP_ROWS
    alive = (tokens < query_len) & (rows % GROUP_ROWS < GROUP)
    mask = alive[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = (query_start + tokens).to(tl.int64)
    q_at = q + offsets[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    q_tile = tl.load(q_at, mask=mask, other=0.0)
    positions = history + tokens

    # Not -inf: of its split's first tile a row may see no key, and -inf less itself is NaN.
    largest = tl.full([BLOCK_M], -1.0e38, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, DIM], tl.float32)
    last = tl.minimum(history + first + BLOCK_M // GROUP_ROWS, seq_len)
    tiles_each = tl.cdiv(tl.cdiv(last, BLOCK_N), SPLITS)
    begin = split * tiles_each * BLOCK_N
    end = tl.minimum(begin + tiles_each * BLOCK_N, last)
    # Up to here every row sees every key: no mask needed.
    clear = (history + first + 1) // BLOCK_N * BLOCK_N
    for start in range(begin, tl.minimum(clear, end), BLOCK_N):
        keys_at = start + tl.arange(0, BLOCK_N)
        starts = pool_rows(table, keys_at, None, slot_stride, BLOCK_SIZE, WIDE)
        places = starts[:, None] + kv_head * HEAD_DIM + dims[None, :]
        if DIM == HEAD_DIM:
            keys = tl.load(k_pool + places)
            values = tl.load(v_pool + places)
        else:
            keys = tl.load(k_pool + places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            values = tl.load(v_pool + places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        largest, total, weighted = attend_tile(
            q_tile, keys, values, None, scale, largest, total, weighted
        )
    for start in range(tl.maximum(clear, begin), end, BLOCK_N):
        keys_at = start + tl.arange(0, BLOCK_N)
        valid = keys_at < end
        starts = pool_rows(table, keys_at, valid, slot_stride, BLOCK_SIZE, WIDE)
        places = starts[:, None] + kv_head * HEAD_DIM + dims[None, :]
        kv_mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(k_pool + places, mask=kv_mask, other=0.0)
        values = tl.load(v_pool + places, mask=kv_mask, other=0.0)
        seen = keys_at[None, :] <= positions[:, None]
        largest, total, weighted = attend_tile(
            q_tile, keys, values, seen, scale, largest, total, weighted
        )

    store_split(
        out, partial, partial_lse, largest, total, weighted,
        offsets * tl.num_programs(1) * GROUP + heads, alive, mask, dims, HEAD_DIM, SPLITS, split,
    )  # fmt: skip


@triton.jit
def combine_chunks_kernel(
    partial, partial_lse, query_starts, tile_seqs, tile_starts, out,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (tile of `TOKENS` new tokens, query head): `combine_kernel` for what is in a tile.

    The rows of decodes and of padding are in no tile, so they are left alone.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tile_seqs + tile)
    if seq < 0:  # no such tile in this step
        return
    first = tl.load(query_starts + seq) + tl.load(tile_starts + tile)
    tokens, dims = first + tl.arange(0, TOKENS), tl.arange(0, DIM)
    alive = tokens < tl.load(query_starts + seq + 1)
    mask = alive[:, None] & (dims < HEAD_DIM)[None, :]
    row = tokens.to(tl.int64) * tl.num_programs(1) + head
    splits = row[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :]
    largest = tl.max(tl.load(partial_lse + splits, mask=alive[:, None], other=0.0), 1)
    total = tl.zeros([TOKENS], tl.float32)
    weighted = tl.zeros([TOKENS, DIM], tl.float32)
    for split in tl.static_range(SPLITS):
        at = row * SPLITS + split
        weight = tl.exp2(tl.load(partial_lse + at, mask=alive, other=0.0) - largest)
        part = tl.load(partial + at[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        total += weight
        weighted += weight[:, None] * part
    result = (weighted / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)


def is_wide(k_pool: Tensor) -> bool:
    """Whether places in one layer's pool need 64 bits. (Arithmetic on 32 is faster.)"""
    return k_pool.numel() >= 2**31


def decode_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, tables: Tensor, seq_lens: Tensor, out: Tensor,
    splits: int = 1, workspace: tuple[Tensor, Tensor] | None = None, pdl: bool = False,
    block_n: int = 64, num_warps: int = 4, num_stages: int = 3,
) -> None:  # fmt: skip
    """One new token a sequence.

    q, out `[num_seqs, num_heads, head_dim]`; pools `[blocks, block_size, num_kv_heads, head_dim]`;
    tables int32 `[num_seqs, most blocks]`; seq_lens int32 `[num_seqs]`, the new token among them.
    workspace: for `splits` over 1, float32 `[num_seqs, num_heads, splits, head_dim]` and
    `[num_seqs, num_heads, splits]`.
    """
    num_seqs, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_pool.shape
    group = num_heads // num_kv_heads
    partial, lse = workspace if workspace is not None else (out, out)
    dim = max(16, triton.next_power_of_2(head_dim))
    decode_kernel[(num_seqs, num_kv_heads, splits)](
        q, k_pool, v_pool, tables, seq_lens, out, partial, lse,
        LOG2_E / math.sqrt(head_dim), tables.stride(0), q.stride(0), k_pool.stride(1),
        GROUP=group, GROUP_ROWS=max(16, triton.next_power_of_2(group)), HEAD_DIM=head_dim, DIM=dim,
        BLOCK_SIZE=block_size, BLOCK_N=block_n, SPLITS=splits, WIDE=is_wide(k_pool),
        num_warps=num_warps, num_stages=num_stages, **options(pdl),
    )  # fmt: skip
    if splits > 1:
        combine_splits(partial, lse, seq_lens, out, splits, pdl)


def combine_splits(
    partial: Tensor, lse: Tensor, seq_lens: Tensor, out: Tensor, splits: int, pdl: bool
) -> None:
    """out `[num_seqs, num_heads, head_dim]` from the splits' parts."""
    num_seqs, num_heads, head_dim = out.shape
    combine_kernel[(num_seqs, num_heads)](
        partial, lse, seq_lens, out, HEAD_DIM=head_dim, DIM=triton.next_power_of_2(head_dim),
        SPLITS=splits, num_warps=1, **options(pdl),
    )  # fmt: skip


def chunk_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, tables: Tensor, query_starts: Tensor,
    seq_lens: Tensor, tile_seqs: Tensor, tile_starts: Tensor, out: Tensor,
    splits: int = 1, workspace: tuple[Tensor, Tensor] | None = None,
    block_m: int = 128, block_n: int = 64, num_warps: int = 4, num_stages: int = 2,
) -> None:  # fmt: skip
    """Several new tokens a sequence, packed.

    q, out `[num_tokens, num_heads, head_dim]`; query_starts int32 `[num_seqs + 1]`;
    tile_seqs, tile_starts int32 `[tiles]`: which sequence, from which of its new tokens on; a tile
    has `block_m // group_rows` tokens (`tile_tokens`), and one with sequence -1 does not exist.
    workspace: for `splits` over 1, as in `decode_attention`, but for each token.
    """
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_pool.shape
    group = num_heads // num_kv_heads
    group_rows = triton.next_power_of_2(group)
    partial, lse = workspace if workspace is not None else (out, out)
    dim = max(16, triton.next_power_of_2(head_dim))
    num_tiles = tile_seqs.shape[0]
    chunk_kernel[(num_tiles, num_kv_heads, splits)](
        q, k_pool, v_pool, tables, query_starts, seq_lens, tile_seqs, tile_starts, out, partial,
        lse, LOG2_E / math.sqrt(head_dim), tables.stride(0), q.stride(0), k_pool.stride(1),
        GROUP=group, GROUP_ROWS=group_rows, HEAD_DIM=head_dim, DIM=dim, BLOCK_SIZE=block_size,
        BLOCK_M=block_m, BLOCK_N=block_n, SPLITS=splits, WIDE=is_wide(k_pool),
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if splits > 1:
        combine_chunks_kernel[(num_tiles, num_heads)](
            partial, lse, query_starts, tile_seqs, tile_starts, out,
            TOKENS=block_m // group_rows, HEAD_DIM=head_dim, DIM=dim, SPLITS=splits,
        )  # fmt: skip
