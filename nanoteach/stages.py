"""Every stage of the course as something that can run: the same loop proves and times them all.

A stage is a choice of parts. From stage 4 on the engine core stays, and a stage changes what it is
given: a block manager, a scheduler, an attention, a runner. Those from 7 on are for an NVIDIA GPU,
and nothing of them is imported before they are built.
"""

import warnings
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from nanoteach import model_runner, sampling_filters
from nanoteach.backends import problem, require
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
    reserved: int = 0
    """Bytes of the GPU's memory that the pool must leave to the steps."""
    filters: bool = False
    """Whether requests may ask for what stage 9 brings: top_k, top_p, logprobs."""
    tokenizer: Any = None
    """Stage 10 alone turns tokens into text."""

    @cached_property  # asked once: on a GPU the free memory changes while we build
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        model = self.model
        return pool_blocks(model.config, self.config, model.dtype, model.device, self.reserved)

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
    def title(self) -> str:
        """Number and name, for tables."""
        return f"{self.number} {self.name.replace('_', ' ')}"

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
    scheduler = build_scheduler(parts, manager_class, scheduler_class)
    choose = sampling_filters.choose if parts.filters else model_runner.choose
    runner = ModelRunner(parts.model, paged_attention(parts, attention_class), choose)
    return EngineCore(
        scheduler, runner, parts.max_model_len, parts.eos_token_ids, parts.clock, parts.trace,
        parts.filters,
    )  # fmt: skip


def build_scheduler(
    parts: Parts, manager_class: type[BlockManager], scheduler_class: type[Scheduler]
) -> Scheduler:
    """A scheduler over the blocks of the pool."""
    config, trace = parts.config, parts.trace
    manager = manager_class(parts.num_blocks, config.block_size, trace)
    return scheduler_class(manager, config.max_num_seqs, config.max_num_batched_tokens, trace)


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
    """Stage 7: attention that reads the pool where it lies."""
    attention: type[PagedAttention]
    if runs_kernels(parts):
        from nanoteach.triton_backend import TritonAttention as attention
    else:
        from nanoteach.tiled_attention import TiledAttention as attention
    return build_core(parts, block_manager_class(parts.config), ChunkedPrefillScheduler, attention)


def runs_kernels(parts: Parts) -> bool:
    """Whether stages 7 and 8 run on our kernels; if not, on plain PyTorch in their place.

    Raises ValueError where they should and can't.
    """
    if parts.model.device.type != "cuda" and parts.config.attention_backend != "triton":
        return False
    require("triton", parts.model, parts.config)
    return True


def build_graphs(parts: Parts) -> EngineCore:
    """Stage 8: fused kernels in CUDA graphs, and the next step prepared while one runs."""
    from nanoteach.cuda_graphs import GraphRunner
    from nanoteach.overlapped import OverlappedEngineCore
    from nanoteach.sampling_tail import SamplingTail
    from nanoteach.tiled_attention import TiledAttention

    decoder_class: Any
    if runs_kernels(parts):
        from nanoteach.fused_decoder import FusedDecoder as decoder_class
    else:
        from nanoteach.plain_decoder import PlainDecoder as decoder_class
    model, config, on_gpu = parts.model, parts.config, parts.model.device.type == "cuda"
    small = TiledAttention(model.config, 1, config.block_size, model.dtype, model.device)
    decoder = decoder_class(model, small, config.max_num_seqs)
    tail = SamplingTail(decoder, config.max_num_seqs) if parts.filters else None
    runner = GraphRunner(
        decoder, config.max_num_seqs, parts.max_model_len, config.max_num_batched_tokens, tail
    )
    if on_gpu:  # once for steps without a graph, once for what the graphs keep
        parts = replace(parts, reserved=2 * runner.peak_memory())
    decoder.pool = paged_attention(parts, TiledAttention)
    if not config.enforce_eager:
        runner.capture()
    scheduler = build_scheduler(parts, block_manager_class(config), ChunkedPrefillScheduler)
    return OverlappedEngineCore(
        scheduler, runner, parts.max_model_len, parts.eos_token_ids, parts.clock, parts.trace,
        parts.filters,
    )  # fmt: skip


def build_engine(parts: Parts) -> EngineCore:
    """Stage 9, and what `Engine` runs on: stage 8 on an NVIDIA GPU, stage 6 elsewhere, or as asked
    for, with filters.

    Raises ValueError where a backend is asked for that can't run here.
    """
    parts = replace(parts, filters=True)
    backend = parts.config.attention_backend
    if backend == "auto" and parts.model.device.type == "cuda":
        reason = problem("triton", parts.model, parts.config)
        if reason is None:
            backend = "triton"
        else:
            warnings.warn(f"runs on the slower backend sdpa: {reason}", stacklevel=2)
    if backend == "triton":
        return build_graphs(parts)
    if backend == "flash_attn":
        return build_flash_attn(parts)
    return build_chunked(parts)


def build_flash_attn(parts: Parts) -> EngineCore:
    """Stage 7 with the library flash-attn's attention in place of ours."""
    require("flash_attn", parts.model, parts.config)
    try:
        from nanoteach.flash_backend import FlashAttention
    except ImportError as error:  # none there, or one that was built for another torch
        raise ValueError(
            "attention_backend = 'flash_attn' needs the library: pip install flash-attn "
            f"--no-build-isolation ({error})"
        ) from error
    return build_core(
        parts, block_manager_class(parts.config), ChunkedPrefillScheduler, FlashAttention
    )


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
        7,
        "flash_attention",
        ("tiled_attention", "triton_launch", "triton_attention", "triton_backend", "flash_backend"),
        build_flash,
    ),
    Stage(
        8,
        "cuda_graphs",
        ("kernels", "step_inputs", "plain_decoder", "fused_decoder", "cuda_graphs", "overlapped"),
        build_graphs,
    ),
]
"""Those that want an NVIDIA GPU. Elsewhere they do the same in plain PyTorch, slowly."""

LADDER = [*STAGES, *GPU_STAGES]
"""Each is faster than the one before."""


def build_served(parts: Parts) -> Generator:
    """Stage 10: the engine in a thread of its own, its callers on an event loop."""
    from nanoteach.async_engine import ServedEngine
    from nanoteach.engine import Engine

    return ServedEngine(Engine.from_parts(parts))


def build_judged(parts: Parts) -> Generator:
    """Stage 11: the engine, and a bench around it."""
    from nanoteach.bench.judged import JudgedEngine

    return JudgedEngine(parts)


COURSE = [
    *LADDER,
    Stage(9, "sampling", ("sampling_filters", "sampling_tail"), build_engine),
    Stage(
        10,
        "serving",
        ("async_engine", "core_process", "metrics", "protocol", "server"),
        build_served,
    ),
    Stage(11, "does_the_model_match_reality", (), build_judged),
]
"""All that the course builds. What comes after the ladder does more, and is not faster."""


def stages_here(model: Decoder, config: EngineConfig) -> list[Stage]:
    """Those that are worth timing on this machine: without a GPU, 7 and 8 are not."""
    on_gpu = model.device.type == "cuda" and problem("triton", model, config) is None
    return LADDER if on_gpu else STAGES
