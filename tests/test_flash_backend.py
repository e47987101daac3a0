"""The backend `flash_attn`, on a stand-in for the library here, on the library itself on a GPU.

The stand-in is what the library documents, in float64, and refuses what the library refuses.
"""

import importlib.util
import math
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import save_random_model
from torch import Tensor

from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.config import EngineConfig
from nanoteach.engine import Engine
from nanoteach.loader import load_model
from nanoteach.paged_attention import PagedAttention
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.stages import Parts, build_chunked, build_core, build_engine
from nanoteach.types import SamplingParams

HAS_LIBRARY = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
SIZE = 256


class StandIn(ModuleType):
    """The module `flash_attn`. calls: which of its ways of working were used."""

    def __init__(self, any_dtype: bool) -> None:
        super().__init__("flash_attn")
        self.any_dtype = any_dtype
        self.calls: set[str] = set()

    def check(self, q: Tensor, k: Tensor, v: Tensor, *int32s: Tensor | None) -> None:
        """What holds for both functions."""
        assert q.dtype is k.dtype is v.dtype and k.shape == v.shape
        assert self.any_dtype or q.dtype in (torch.float16, torch.bfloat16)
        assert q.shape[-1] == k.shape[-1] <= 256 and q.shape[-2] % k.shape[-2] == 0
        assert all(x.dtype is torch.int32 for x in int32s if x is not None)

    def gather(self, pool: Tensor, table: Tensor, length: int) -> Tensor:
        """A sequence's keys or values out of the pool."""
        assert pool.dim() == 4 and pool.shape[1] % 256 == 0
        assert length <= len(table) * pool.shape[1]
        return pool[table.long()].flatten(0, 1)[:length]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """One sequence, `[tokens, heads, head_dim]`; the last query is in line with the last key"""
        group = q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(q.shape[-1])
        if causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(hidden.triu(len(k) - len(q) + 1), -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)

    def flash_attn_with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *,
        cache_seqlens: Tensor, block_table: Tensor, causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """q `[sequences, new, heads, head_dim]`."""
        self.calls.add("decode")
        self.check(q, k_cache, v_cache, cache_seqlens, block_table)
        assert len(q) == len(cache_seqlens) == len(block_table)
        rows = [
            self.attention(
                row, self.gather(k_cache, table, n), self.gather(v_cache, table, n), causal
            )
            for row, table, n in zip(q, block_table, cache_seqlens.tolist(), strict=True)
        ]
        return torch.stack(rows)

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, *,
        causal: bool = False, block_table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """q `[tokens, heads, head_dim]`, k and v likewise or the pool. None after the longest."""
        self.calls.add("whole prompts" if block_table is None else "chunks")
        self.check(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
        assert int(cu_seqlens_q[0]) == int(cu_seqlens_k[0]) == 0
        assert int(cu_seqlens_q[-1]) == len(q)
        assert block_table is not None or int(cu_seqlens_k[-1]) == len(k)
        assert len(cu_seqlens_q) == len(cu_seqlens_k)
        queries = q.split(cu_seqlens_q.diff().tolist())
        lengths = cu_seqlens_k.diff().tolist()
        assert max(map(len, queries)) == max_seqlen_q and max(lengths) == max_seqlen_k
        if block_table is None:
            keys, values = k.split(lengths), v.split(lengths)
        else:
            keys, values = (
                tuple(self.gather(x, *pair) for pair in zip(block_table, lengths, strict=True))
                for x in (k, v)
            )
        one_by_one = zip(queries, keys, values, strict=True)
        return torch.cat([self.attention(*sequence, causal) for sequence in one_by_one])


def flash_attention(library: ModuleType | None = None) -> type[PagedAttention]:
    """The backend on a stand-in, which nobody else gets to see, or on the installed library."""
    sys.modules.pop("nanoteach.flash_backend", None)
    with pytest.MonkeyPatch.context() as patch:
        if library:
            patch.setitem(sys.modules, "flash_attn", library)
        from nanoteach.flash_backend import FlashAttention
    del sys.modules["nanoteach.flash_backend"]
    return FlashAttention


# --- planning -------------------------------------------------------------------------------------


def test_same_tokens(tmp_path: Path) -> None:
    """As stage 6: chunks beside decodes, whole prompts, prefix hits and preemption."""
    library, cpu = StandIn(any_dtype=True), torch.device("cpu")
    model = load_model(save_random_model(tmp_path, max_position=1024), cpu, torch.float32)
    config = EngineConfig(block_size=SIZE, num_gpu_blocks_override=6, max_num_batched_tokens=320)
    parts = Parts(model, config)
    rng = random.Random(0)
    shared = [rng.randrange(90) for _ in range(260)]
    prompts = [
        shared[:common] + [rng.randrange(90) for _ in range(n)]
        for common, n in ((260, 1), (0, 70), (260, 249), (0, 250), (260, 2), (0, 252), (260, 1))
    ]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (14, 4, 12, 13, 6, 12, 3)]
    core: Any = build_core(
        parts, PrefixCachingBlockManager, ChunkedPrefillScheduler, flash_attention(library)
    )
    assert core.generate(prompts, params) == build_chunked(parts).generate(prompts, params)
    assert core.scheduler.num_preemptions and core.scheduler.num_prefix_hits
    assert library.calls == {"decode", "whole prompts", "chunks"}
    assert core.check() == []


# --- numbers --------------------------------------------------------------------------------------

STEPS = {  # (new tokens, tokens in all) of each sequence
    "decodes": [(1, 1), (1, 256), (1, 257), (1, 700)],
    "whole prompts": [(5, 5), (300, 300), (256, 256)],
    "chunks": [(40, 296), (100, 100), (1, 513), (257, 700)],
    "decodes and whole prompts": [(1, 300), (1, 20), (280, 280), (3, 3)],
    "decodes and chunks": [(1, 512), (1, 513), (1, 2), (2, 258), (64, 64), (300, 900)],
}


@pytest.mark.parametrize("heads", [(9, 3, 64), (16, 8, 128)], ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "library",
    [
        "stand-in",
        pytest.param(
            "flash-attn",
            marks=pytest.mark.skipif(not HAS_LIBRARY, reason="needs a GPU with flash-attn"),
        ),
    ],
)
def test_attend(library: str, step: str, heads: tuple[int, int, int]) -> None:
    """The numbers of `sdpa` in float64, from a pool of bfloat16 with scattered blocks."""
    torch.manual_seed(0)
    device = torch.device("cpu" if library == "stand-in" else "cuda")
    num_heads, num_kv_heads, head_dim = heads
    shape: Any = SimpleNamespace(
        num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    news, lens = (list(part) for part in zip(*STEPS[step], strict=True))
    num_blocks = 16
    order = iter(torch.randperm(num_blocks).tolist())
    # The last table is longer than its sequence needs.
    tables = [[next(order) for _ in range(-(-n // SIZE))] for n in lens]
    tables[-1].append(next(order))

    flash_class = flash_attention(StandIn(any_dtype=False) if library == "stand-in" else None)
    flash = flash_class(shape, num_blocks, SIZE, torch.bfloat16, device)
    plain = PagedAttention(shape, num_blocks, SIZE, torch.float64, device)
    for mine, exact in ((flash.k, plain.k), (flash.v, plain.v)):
        exact.copy_(mine.normal_())
    q, k, v = (
        torch.randn(sum(news), n, head_dim, device=device).bfloat16()
        for n in (num_heads, num_kv_heads, num_kv_heads)
    )
    out = flash.attend(0, q, k, v, flash.plan(news, lens, tables))
    want = plain.attend(0, q.double(), k.double(), v.double(), plain.plan(news, lens, tables))
    assert out.shape == q.shape and out.dtype is torch.bfloat16
    for found, wanted in zip(out.split(news), want.split(news), strict=True):
        assert (found.double() - wanted).norm() < 1e-2 * wanted.norm()
    assert torch.equal(flash.k.double(), plain.k) and torch.equal(flash.v.double(), plain.v)


# --- what the library can't do --------------------------------------------------------------------


def test_without_a_gpu(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path, max_position=64)
    with pytest.raises(ValueError, match="'flash_attn' needs an NVIDIA GPU .* set attention_back"):
        Engine(folder, device="cpu", attention_backend="flash_attn", block_size=SIZE)


def build(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), block_size: int = SIZE,
    dtype: torch.dtype = torch.bfloat16, head_dim: int = 64,
) -> None:  # fmt: skip
    """Ask for the backend, on what looks like a GPU, for a model of which only this is known."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=dtype, config=SimpleNamespace(head_dim=head_dim)
    )
    build_engine(Parts(model, EngineConfig(attention_backend="flash_attn", block_size=block_size)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"capability": (7, 5)}, "needs an NVIDIA GPU of compute capability 8.0 .Ampere. or newer"),
        ({"block_size": 16}, "multiple of 256 tokens, not of 16: set block_size=256, or attention"),
        ({"dtype": torch.float32}, "not in torch.float32: set dtype='bfloat16'"),
        ({"head_dim": 288}, "at most 256, and this model's is 288: set attention_backend='sdpa'"),
        ({}, "needs the library: pip install flash-attn"),
    ],
)
def test_what_it_cannot_do_is_said(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # importing it fails
    monkeypatch.delitem(sys.modules, "nanoteach.flash_backend", raising=False)
    with pytest.raises(ValueError, match=f"attention_backend = 'flash_attn' .*{message}") as caught:
        build(monkeypatch, **given)
    assert "\n" not in str(caught.value)
