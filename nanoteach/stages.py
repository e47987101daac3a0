"""Every stage of the course as something that can run: the same loop proves and times them all.

A stage is a choice of parts. From stage 4 on the engine core stays, and a stage changes what it is
given: a block manager, a scheduler, an attention, a runner. Those from 7 on want an NVIDIA GPU, and
nothing of them is imported before they are built.
"""

import importlib.util
import os
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from nanoteach.block_manager import BlockManager
from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.config import EngineConfig
from nanoteach.cost_model import Clock
from nanoteach.engine_core import EngineCore
from nanoteach.kv_cache import BatchCache, ContiguousKVCache, StaticBatchGenerator
from nanoteach.model import Decoder
from nanoteach.model_runner import ModelRunner
from nanoteach.naive import NaiveGenerator
from nanoteach.paged_attention import PagedAttention, PagedBatchCache, pool_blocks
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.scheduler import Scheduler
from nanoteach.types import SamplingParams, Trace


class Generator(Protocol):
    """What every stage builds."""

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[list[int]]:
        """The tokens generated after each prompt (prompts are token ids)."""
        ...


@dataclass(frozen=True)
class Parts:
    """What a stage is built from. Every stage gets the same memory for K/V."""

    model: Decoder
    config: EngineConfig
    eos_token_ids: SequenceOf[int] = ()
    clock: Clock | None = None
    trace: Trace | None = None

    @cached_property  # asked once: on a GPU the free memory changes while we build
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        model = self.model
        return pool_blocks(model.config, self.config, model.dtype, model.device)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return self.config.max_model_len or self.model.max_model_len


@dataclass(frozen=True)
class Stage:
    """One rung of the ladder."""

    number: int
    name: str
    modules: tuple[str, ...]
    build: Callable[[Parts], Generator]

    @property
    def notebook(self) -> str:
        """The notebook that tells its story."""
        return f"{self.number:02d}_{self.name}"


def build_naive(parts: Parts) -> NaiveGenerator:
    """Stage 1."""
    return NaiveGenerator(parts.model, parts.eos_token_ids, parts.clock, parts.max_model_len)


def build_static(parts: Parts) -> StaticBatchGenerator:
    """Stage 2: as many rows as the memory holds when each is reserved to the longest length.

    Raises ValueError where it holds none.
    """
    model, config, longest = parts.model, parts.config, parts.max_model_len
    places = parts.num_blocks * config.block_size
    if places < longest - 1:  # the last token of a request has no K/V and needs no place
        raise ValueError(
            f"the KV cache has {places} places, too few for one row: each is reserved to "
            f"max_model_len = {longest}. Lower max_model_len, or enlarge the cache"
        )
    row_len = min(longest, places)
    rows = min(config.max_num_seqs, places // row_len)
    cache = ContiguousKVCache(model.config, rows, row_len, model.dtype, model.device)
    return static_batch(parts, cache, rows)


def build_paged(parts: Parts) -> StaticBatchGenerator:
    """Stage 3: the same batch on pages, as many rows as really fit."""
    manager = BlockManager(parts.num_blocks, parts.config.block_size, parts.trace)
    cache = PagedBatchCache(manager, paged_attention(parts))
    return static_batch(parts, cache, parts.config.max_num_seqs)


def static_batch(parts: Parts, cache: BatchCache, rows: int) -> StaticBatchGenerator:
    """Stages 2 and 3: the same batch on another cache."""
    return StaticBatchGenerator(
        parts.model, cache, rows, parts.eos_token_ids, parts.clock, parts.max_model_len
    )


def paged_attention(
    parts: Parts, attention_class: type[PagedAttention] = PagedAttention
) -> PagedAttention:
    """The pool and its attention."""
    model, config = parts.model, parts.config
    return attention_class(
        model.config, parts.num_blocks, config.block_size, model.dtype, model.device
    )


def build_core(
    parts: Parts,
    manager_class: type[BlockManager],
    scheduler_class: type[Scheduler],
    attention_class: type[PagedAttention] = PagedAttention,
) -> EngineCore:
    """Stages 4 to 7: one core, other parts."""
    config, trace = parts.config, parts.trace
    manager = manager_class(parts.num_blocks, config.block_size, trace)
    scheduler = scheduler_class(manager, config.max_num_seqs, config.max_num_batched_tokens, trace)
    runner = ModelRunner(parts.model, paged_attention(parts, attention_class))
    return EngineCore(
        scheduler, runner, parts.max_model_len, parts.eos_token_ids, parts.clock, trace
    )


def build_continuous(parts: Parts) -> EngineCore:
    """Stage 4."""
    return build_core(parts, BlockManager, Scheduler)


def build_prefix(parts: Parts) -> EngineCore:
    """Stage 5."""
    return build_core(parts, block_manager_class(parts.config), Scheduler)


def build_chunked(parts: Parts) -> EngineCore:
    """Stage 6."""
    return build_core(parts, block_manager_class(parts.config), ChunkedPrefillScheduler)


def build_flash(parts: Parts) -> EngineCore:
    """Stage 7: our own attention, which reads the pool where it lies."""
    from nanoteach.triton_backend import TritonAttention

    return build_core(
        parts, block_manager_class(parts.config), ChunkedPrefillScheduler, TritonAttention
    )


def build_graphs(parts: Parts) -> EngineCore:
    """Stage 8: fused kernels in CUDA graphs, and the next step prepared while one runs."""
    from nanoteach.cuda_graphs import GraphRunner
    from nanoteach.fused_decoder import FusedDecoder
    from nanoteach.overlapped import OverlappedEngineCore

    config, trace = parts.config, parts.trace
    manager = block_manager_class(config)(parts.num_blocks, config.block_size, trace)
    scheduler = ChunkedPrefillScheduler(
        manager, config.max_num_seqs, config.max_num_batched_tokens, trace
    )
    decoder = FusedDecoder(parts.model, paged_attention(parts), config.max_num_seqs)
    runner = GraphRunner(
        decoder, config.max_num_seqs, parts.max_model_len, config.max_num_batched_tokens
    )
    if parts.model.device.type == "cuda" and not config.enforce_eager:
        runner.capture()
    return OverlappedEngineCore(
        scheduler, runner, parts.max_model_len, parts.eos_token_ids, parts.clock, trace
    )


def build_engine(parts: Parts) -> EngineCore:
    """What `Engine` runs on: stage 6, or stage 8 where `attention_backend` is `triton`.

    Raises ValueError where a backend is asked for that can't run here.
    """
    if parts.config.attention_backend != "triton":
        return build_chunked(parts)
    if importlib.util.find_spec("triton") is None:
        raise ValueError("attention_backend = 'triton' needs Triton: pip install triton")
    device, interpreted = parts.model.device, os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise ValueError(
            "attention_backend = 'triton' needs an NVIDIA GPU; without one, TRITON_INTERPRET=1 "
            "in the environment runs its kernels on the CPU, slowly"
        )
    if device.index:
        raise ValueError(
            f"attention_backend = 'triton' runs on the first GPU, not on {device}: choose another "
            "with CUDA_VISIBLE_DEVICES"
        )
    return build_graphs(parts)


def block_manager_class(config: EngineConfig) -> type[BlockManager]:
    """With prefix caching or without."""
    return PrefixCachingBlockManager if config.enable_prefix_caching else BlockManager


STAGES = [
    Stage(
        1,
        "naive_generation",
        ("types", "smollm2", "hub", "loader", "model", "sampler", "naive"),
        build_naive,
    ),
    Stage(2, "kv_cache", ("kv_cache",), build_static),
    Stage(3, "paged_blocks", ("block_manager", "paged_attention"), build_paged),
    Stage(
        4,
        "continuous_batching",
        ("sequence", "scheduler", "model_runner", "engine_core"),
        build_continuous,
    ),
    Stage(5, "prefix_caching", ("prefix_cache",), build_prefix),
    Stage(6, "chunked_prefill", ("chunked_prefill",), build_chunked),
]

GPU_STAGES = [
    Stage(
        7, "flash_attention", ("triton_launch", "triton_attention", "triton_backend"), build_flash
    ),
    Stage(
        8, "cuda_graphs", ("kernels", "fused_decoder", "cuda_graphs", "overlapped"), build_graphs
    ),
]
"""Those that want an NVIDIA GPU."""
