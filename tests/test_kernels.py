"""Triton kernels beside plain PyTorch in float64. Without a GPU they run in Triton's interpreter.

What they should leave alone is checked as well: outputs begin as NaN, and so does padding.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from nanoteach.kernels.embed import embed
from nanoteach.kernels.rms_norm import add_rms_norm
from nanoteach.kernels.rope_attention import rope_attention
from nanoteach.kernels.rope_store import rope_store
from nanoteach.kernels.sample import lm_head_and_sample, sample
from nanoteach.kernels.silu_and_mul import silu_and_mul
from nanoteach.kernels.thin_linear import few_linear, thin_linear
from nanoteach.tiled_attention import tiles_of
from nanoteach.triton_attention import chunk_attention, decode_attention

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# In the interpreter bf16 products are wrong; there, float32 stands for both.
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]
# (query heads, K/V heads, head_dim): SmolLM2-135M, tiny, Qwen3-0.6B
HEADS = [(9, 3, 64), (4, 2, 64), (16, 8, 128)]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_model = pytest.mark.parametrize("heads", HEADS, ids=str)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)
    random.seed(0)


def close(found: Tensor, wanted: Tensor) -> bool:
    """Whether the relative error is what rounding gives. NaN never passes."""
    limit = 3e-6 if found.dtype is torch.float32 else 1.2e-2
    return bool((found.double() - wanted).norm() <= limit * wanted.norm())


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def nans(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, device=DEVICE, dtype=dtype)


def rms_norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


# --- attention ------------------------------------------------------------------------------------


class Pool:
    """A pool in which sequences of these lengths have scattered blocks; the rest is NaN."""

    def __init__(
        self, heads: tuple[int, int, int], block_size: int, lengths: list[int], dtype: torch.dtype
    ) -> None:
        _, num_kv_heads, head_dim = heads
        self.lengths, self.block_size = lengths, block_size
        width = max(1, -(-max(lengths) // block_size))
        num_blocks = width * len(lengths) + 2
        self.k = normal(num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype)
        self.v = normal(num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype)
        order = torch.randperm(num_blocks)[: width * len(lengths)]
        self.tables = order.view(len(lengths), width).to(DEVICE).int()
        for table, length in zip(self.tables, lengths, strict=True):
            places = torch.arange(width * block_size, device=DEVICE)
            slots = table.long()[places // block_size] * block_size + places % block_size
            for pool in (self.k, self.v):  # what no sequence has written must never be used
                pool.flatten(0, 1)[slots[length:]] = math.nan

    def history(self, i: int) -> tuple[Tensor, Tensor]:
        """K and V of a sequence in float64, `[tokens, num_kv_heads, head_dim]`."""
        table = self.tables[i].long()
        k, v = (pool[table].flatten(0, 1)[: self.lengths[i]].double() for pool in (self.k, self.v))
        return k, v

    def attend(self, i: int, q: Tensor) -> Tensor:
        """Causal attention of a sequence's last tokens, q `[new, num_heads, head_dim]`."""
        k, v = self.history(i)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(q.shape[-1])
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=DEVICE)
        hidden = hidden.triu(len(k) - len(q) + 1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)

    def workspace(self, num_heads: int, splits: int) -> tuple[Tensor, Tensor]:
        rows = (len(self.lengths), num_heads, splits)
        return (
            nans(*rows, self.k.shape[-1], dtype=torch.float32),
            nans(*rows, dtype=torch.float32),
        )


@every_dtype
@every_model
@pytest.mark.parametrize(("block_size", "splits"), [(1, 1), (3, 4), (16, 2), (256, 1)])
def test_decode_attention(
    heads: tuple[int, int, int], block_size: int, splits: int, dtype: torch.dtype
) -> None:
    lengths = [1, 0, 15, 16, 17, 70]
    pool = Pool(heads, block_size, lengths, dtype)
    q = normal(len(lengths), heads[0], heads[2], dtype=dtype)
    out = nans(*q.shape, dtype=dtype)
    workspace = pool.workspace(heads[0], splits)
    args = (q, pool.k, pool.v, pool.tables, int32(lengths), out, splits, workspace)
    decode_attention(*args, block_n=16)
    for i, length in enumerate(lengths):
        if length:
            assert close(out[i : i + 1], pool.attend(i, q[i : i + 1]))
        else:
            assert out[i].isnan().all(), "padding was written"


@every_dtype
@every_model
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_chunk_attention(heads: tuple[int, int, int], block_size: int, dtype: torch.dtype) -> None:
    lengths, news = [40, 17, 33, 16], [40, 1, 20, 15]
    pool = Pool(heads, block_size, lengths, dtype)
    q = normal(sum(news), heads[0], heads[2], dtype=dtype)
    out = nans(*q.shape, dtype=dtype)
    rows = 32 if heads[0] // heads[1] == 3 else 16
    tiles = [*tiles_of(news, 0, rows // (4 if heads[0] // heads[1] == 3 else 2)), (-1, 0)]
    starts = [sum(news[:i]) for i in range(len(news) + 1)]
    chunk_attention(
        q, pool.k, pool.v, pool.tables, int32(starts), int32(lengths),
        int32([seq for seq, _ in tiles]), int32([first for _, first in tiles]), out,
        block_m=rows, block_n=16,
    )  # fmt: skip
    for i in range(len(news)):
        mine = slice(starts[i], starts[i + 1])
        assert close(out[mine], pool.attend(i, q[mine]))


@every_dtype
@pytest.mark.parametrize("heads", [*HEADS, (3, 1, 24)], ids=str)
@pytest.mark.parametrize(("block_size", "splits"), [(3, 2), (16, 4)])
def test_chunk_attention_in_splits(
    heads: tuple[int, int, int], block_size: int, splits: int, dtype: torch.dtype
) -> None:
    """Beside two decodes, and with room for more tokens and tiles than there are."""
    lengths, news = [9, 30, 101, 5, 16, 50], [1, 1, 21, 5, 16, 3]
    pool = Pool(heads, block_size, lengths, dtype)
    starts = [sum(news[:i]) for i in range(len(news) + 1)]
    q = normal(starts[-1] + 4, heads[0], heads[2], dtype=dtype)
    out = nans(*q.shape, dtype=dtype)
    partial = nans(len(q), heads[0], splits, heads[2], dtype=torch.float32)
    lse = nans(len(q), heads[0], splits, dtype=torch.float32)
    tokens = 8
    tiles = [*tiles_of(news[2:], 2, tokens), (-1, 0), (-1, 0)]
    rows = tokens * (4 if heads[0] // heads[1] == 3 else 2)
    chunk_attention(
        q, pool.k, pool.v, pool.tables, int32([*starts, starts[-1]]), int32([*lengths, 0]),
        int32([seq for seq, _ in tiles]), int32([first for _, first in tiles]), out,
        splits, (partial, lse), block_m=rows, block_n=16,
    )  # fmt: skip
    for i in range(2, len(news)):
        mine = slice(starts[i], starts[i + 1])
        assert close(out[mine], pool.attend(i, q[mine]))
        assert not lse[mine].isnan().any() and not partial[mine].isnan().any()
    assert (lse[starts[3] : starts[4], :, 1:] == -math.inf).all(), "five tokens are one split's"
    for untouched in (out, partial, lse):
        assert untouched[:2].isnan().all(), "the row of a decode was written"
        assert untouched[starts[-1] :].isnan().all(), "padding was written"


# --- around attention -----------------------------------------------------------------------------


def rotated64(
    qkv: Tensor, qk_norm: Tensor | None, cos: Tensor, sin: Tensor, heads: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in float64 from rows of the QKV product."""
    num_heads, num_kv_heads, head_dim = heads
    x = qkv.double().view(len(qkv), -1, head_dim)
    qk, v = x.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if qk_norm is not None:
        qk = rms_norm64(qk, qk_norm, 1e-6)
    first, second = qk.chunk(2, dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    qk = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    return qk[:, :num_heads], qk[:, num_heads:], v


@every_dtype
@every_model
@pytest.mark.parametrize("with_norm", [True, False])
def test_rope_store(heads: tuple[int, int, int], with_norm: bool, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim = heads
    positions, slots = [0, 1, 7, 3, 2], [4, 0, 13, -1, 7]
    qkv = normal(len(slots), (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    qk_norm = normal(num_heads + num_kv_heads, head_dim, dtype=dtype) if with_norm else None
    angles = torch.rand(9, head_dim // 2, device=DEVICE) * 6
    cos, sin = angles.cos(), angles.sin()
    k_pool = normal(5, 3, num_kv_heads, head_dim, dtype=dtype)
    v_pool = normal(5, 3, num_kv_heads, head_dim, dtype=dtype)
    before = k_pool.flatten(0, 1).clone(), v_pool.flatten(0, 1).clone()
    q = rope_store(
        qkv, qk_norm, int32(positions), int32(slots), cos, sin, k_pool, v_pool, num_heads, 1e-6
    )
    want_q, want_k, want_v = rotated64(qkv, qk_norm, cos[positions], sin[positions], heads)
    assert close(q, want_q)
    real = [i for i, slot in enumerate(slots) if slot >= 0]
    written = [slots[i] for i in real]
    assert close(k_pool.flatten(0, 1)[written], want_k[real])
    assert torch.equal(v_pool.flatten(0, 1)[written].double(), want_v[real])
    others = [slot for slot in range(15) if slot not in written]
    for pool, old in zip((k_pool, v_pool), before, strict=True):
        assert torch.equal(pool.flatten(0, 1)[others], old[others]), "a slot of others was written"


@every_dtype
@every_model
@pytest.mark.parametrize(("block_size", "splits"), [(3, 4), (16, 1)])
def test_rope_attention(
    heads: tuple[int, int, int], block_size: int, splits: int, dtype: torch.dtype
) -> None:
    """One kernel does what rope_store and decode_attention do."""
    num_heads, num_kv_heads, head_dim = heads
    lengths = [1, 40, 0, 17]
    pool = Pool(heads, block_size, lengths, dtype)
    twin = pool.k.clone(), pool.v.clone()
    qkv = normal(4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    qk_norm = normal(num_heads + num_kv_heads, head_dim, dtype=dtype) if num_heads != 9 else None
    angles = torch.rand(64, head_dim // 2, device=DEVICE) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = int32([max(0, length - 1) for length in lengths])
    blocks = pool.tables.gather(1, (positions // block_size).long()[:, None])[:, 0]
    slots = blocks * block_size + positions % block_size
    slots[2] = -1
    out, want = (nans(4, num_heads, head_dim, dtype=dtype) for _ in range(2))
    workspace = pool.workspace(num_heads, splits)
    q = rope_store(qkv, qk_norm, positions, slots, cos, sin, pool.k, pool.v, num_heads, 1e-6)
    args = (q, pool.k, pool.v, pool.tables, int32(lengths), want, splits, workspace)
    decode_attention(*args, block_n=16)
    rope_attention(
        qkv, qk_norm, cos, sin, *twin, pool.tables, int32(lengths), slots, out, 1e-6, splits,
        workspace, block_n=16,
    )  # fmt: skip
    assert close(out[[0, 1, 3]], want[[0, 1, 3]].double()) and out[2].isnan().all()
    for mine, theirs in zip(twin, (pool.k, pool.v), strict=True):
        assert close(mine.nan_to_num(), theirs.nan_to_num().double())


# --- rows -----------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("size", [64, 576, 1024])
def test_add_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, residual, weight = normal(3, size, dtype=dtype), normal(3, size, dtype=dtype), None
    weight = normal(size, dtype=dtype)
    total = x.double() + residual.double()
    assert close(add_rms_norm(x, None, weight, 1e-6), rms_norm64(x, weight, 1e-6))
    assert close(add_rms_norm(x, residual, weight, 1e-6), rms_norm64(total, weight, 1e-6))
    assert close(residual, total)


@every_dtype
def test_silu_and_mul(dtype: torch.dtype) -> None:
    gate_up = normal(3, 2 * 1536, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert close(silu_and_mul(gate_up), F.silu(gate) * up)


@every_dtype
def test_embed_looks_promises_up(dtype: torch.dtype) -> None:
    embedding, sampled = normal(50, 96, dtype=dtype), int32([7, 49, 3])
    rows = embed(int32([5, -1, -3, 0, -2]), sampled, embedding)
    assert torch.equal(rows, embedding[[5, 7, 3, 0, 49]])


Linear = Callable[..., Tensor]


@every_dtype
@pytest.mark.parametrize(
    ("linear", "tokens", "size", "width"),
    [
        (thin_linear, 1, 40, 576), (thin_linear, 3, 33, 128), (few_linear, 2, 40, 576),
        (few_linear, 3, 33, 128), (few_linear, 8, 24, 1024),
    ],
)  # fmt: skip
def test_products_of_few_tokens(
    linear: Linear, tokens: int, size: int, width: int, dtype: torch.dtype
) -> None:
    x, weight = normal(tokens, width, dtype=dtype), normal(size, width, dtype=dtype) / 8
    norm, bias = normal(width, dtype=dtype), normal(size, dtype=dtype)
    residual = normal(tokens, size, dtype=dtype)
    normed, weight64 = rms_norm64(x, norm, 1e-5), weight.double()
    plain = x.double() @ weight64.T
    assert close(linear(x, weight), plain)
    assert close(linear(x, weight, None, (2, 2), residual=residual), plain + residual.double())
    with_norm = linear(x, weight, bias, norm=norm, eps=1e-5)
    assert close(with_norm, normed @ weight64.T + bias.double())
    gate_up = normal(2 * size, width, dtype=dtype) / 8
    gate, up = (normed @ gate_up.double().T).chunk(2, -1)
    assert close(linear(x, gate_up, norm=norm, eps=1e-5, silu=True), F.silu(gate) * up)


@every_dtype
@pytest.mark.parametrize("linear", [thin_linear, few_linear])
def test_products_over_more_than_1024_values(linear: Linear, dtype: torch.dtype) -> None:
    x, weight = normal(2, 3072, dtype=dtype), normal(8, 3072, dtype=dtype) / 8
    assert close(linear(x, weight), x.double() @ weight.double().T)


# --- sampling -------------------------------------------------------------------------------------


def sampled(logits: Tensor, seeds: list[int], positions: list[int], temperature: float) -> Tensor:
    out = int32([-7] * len(logits))
    temperatures = torch.full((len(logits),), temperature, device=DEVICE)
    sample(logits, int32(seeds), int32(positions), temperatures, out)
    return out


def test_at_temperature_0_the_highest_score_wins() -> None:
    logits = normal(3, 300, dtype=torch.float32)
    assert torch.equal(sampled(logits, [1, 2, 3], [5, 6, 7], 0.0).long(), logits.argmax(-1))


@every_dtype
def test_the_lm_head_samples_without_writing_scores(dtype: torch.dtype) -> None:
    hidden, weight = normal(1, 64, dtype=dtype), normal(301, 64, dtype=dtype)
    norm, out = normal(64, dtype=dtype), int32([-7])
    scores = rms_norm64(hidden, norm, 1e-6) @ weight.double().T
    for temperature in (0.0, 0.8):
        temperatures = torch.tensor([temperature], device=DEVICE)
        lm_head_and_sample(
            hidden, weight, norm, 1e-6, int32([3]), int32([9]), temperatures, out, programs=5
        )
        assert torch.equal(out, sampled(scores.float(), [3], [9], temperature))


def test_samples_follow_the_probabilities_and_the_seed() -> None:
    """Chi-squared with 3 degrees of freedom: under 16.3 in 999 of 1,000 cases."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05], device=DEVICE)
    count = 400 if DEVICE.type == "cuda" else 100  # a draw takes the interpreter 0.1 s
    logits = (2 * probabilities.log()).expand(count, 4).contiguous()
    tokens = sampled(logits, [9] * count, list(range(count)), temperature=2.0)
    found, expected = torch.bincount(tokens.long(), minlength=4), count * probabilities
    assert ((found - expected) ** 2 / expected).sum() < 16.3
    assert torch.equal(sampled(logits[:3], [9] * 3, [7, 8, 9], 2.0), tokens[7:10])  # alone
    assert not torch.equal(sampled(logits, [8] * count, list(range(count)), 2.0), tokens)
