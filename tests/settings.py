"""Every way to set up an engine that the exactness tests tell apart, and how one is run."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import NamedTuple

from models import MAX_MODEL_LEN, MODELS, workload

from nanoteach.block_manager import blocks_needed
from nanoteach.config import EngineConfig
from nanoteach.engine_core import EngineCore
from nanoteach.kv_cache import StaticBatchGenerator
from nanoteach.paged_attention import PagedBatchCache
from nanoteach.reference import Comparison, compare
from nanoteach.stages import STAGES, Generator, Parts

BLOCK_SIZES = (1, 3, 16, 256)
UNLIMITED = 1_000_000
BUDGETS = (1, 7, 64, MAX_MODEL_LEN, UNLIMITED)
# In tokens: a pool that runs out (requests are preempted), what the longest request needs (the last
# sampled token needs no place), and enough for all 64 requests, each rounded up to blocks of 256.
POOLS = {"middling": 700, "smallest": MAX_MODEL_LEN - 1, "ample": 64 * 512}
MAX_NUM_SEQS = (64, 5)


class Setting(NamedTuple):
    """One engine. None stands for what a stage does not have."""

    model: str
    stage: int
    block_size: int | None = None
    budget: int | None = None
    pool: str | None = None
    prefix_caching: bool | None = None
    max_num_seqs: int | None = None

    def __str__(self) -> str:
        budget = "unlimited" if self.budget == UNLIMITED else self.budget
        words = {
            "block": self.block_size,
            "budget": budget,
            "pool": self.pool,
            "prefix": self.prefix_caching,
            "seqs": self.max_num_seqs,
        }
        named = [f"{name}={value}" for name, value in words.items() if value is not None]
        return "-".join([self.model, f"stage{self.stage}", *named])


def full_product(models: Sequence[str] = MODELS) -> list[Setting]:
    """Every combination of values that can stand together."""
    whole_prompts = tuple(budget for budget in BUDGETS if budget >= MAX_MODEL_LEN)
    nothing, both = (None,), (True, False)
    # For each stage: block sizes, budgets, pools, prefix caching, max_num_seqs.
    axes: dict[int, tuple[Sequence[object], ...]] = {
        1: (nothing, nothing, nothing, nothing, nothing),
        2: (nothing, nothing, tuple(POOLS), nothing, MAX_NUM_SEQS),
        3: (BLOCK_SIZES, nothing, tuple(POOLS), nothing, MAX_NUM_SEQS),
        4: (BLOCK_SIZES, whole_prompts, tuple(POOLS), nothing, MAX_NUM_SEQS),
        5: (BLOCK_SIZES, whole_prompts, tuple(POOLS), both, MAX_NUM_SEQS),
        6: (BLOCK_SIZES, BUDGETS, tuple(POOLS), both, MAX_NUM_SEQS),
    }
    return [
        Setting(model, stage, *values)  # type: ignore[arg-type]
        for model in models
        for stage, axis in axes.items()
        for values in product(*axis)
    ]


Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs(setting: Setting) -> set[Pair]:
    """All pairs of values in a setting, each with the name of its axis."""
    values = [(name, value) for name, value in setting._asdict().items() if value is not None]
    return set(combinations(values, 2))


def covering(settings: Sequence[Setting]) -> list[Setting]:
    """A few of the settings that have between them every pair that any of them has.

    Greedy: take the setting with the most pairs that are still missing, the first of several.
    """
    having = {setting: pairs(setting) for setting in settings}
    missing, chosen = set().union(*having.values()), []
    while missing:
        best = max(settings, key=lambda setting: len(having[setting] & missing))
        chosen.append(best)
        missing -= having[best]
    return chosen


def build(setting: Setting) -> Generator:
    """The engine of a setting."""
    work = workload(setting.model)
    block_size = setting.block_size or 16
    config = EngineConfig(
        block_size=block_size,
        max_num_seqs=setting.max_num_seqs or 1,
        max_num_batched_tokens=setting.budget or UNLIMITED,
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=blocks_needed(POOLS[setting.pool or "smallest"], block_size),
        enable_prefix_caching=bool(setting.prefix_caching),
    )
    return STAGES[setting.stage - 1].build(Parts(work.model, config, work.eos_token_ids))


def run(setting: Setting) -> tuple[Comparison, Generator]:
    """Serve all 64 requests, and compare with transformers."""
    work, engine = workload(setting.model), build(setting)
    return compare(work.references, engine.generate(work.prompts, work.params)), engine


def problems(engine: Generator) -> list[str]:
    """What is wrong in an engine that has nothing to do: its books, or blocks not given back."""
    if isinstance(engine, EngineCore):
        manager, found = engine.scheduler.block_manager, engine.check()
    elif isinstance(engine, StaticBatchGenerator) and isinstance(engine.cache, PagedBatchCache):
        manager = engine.cache.block_manager
        found = manager.check(engine.cache.rows)
    else:
        return []  # no blocks, no books
    if manager.num_free != manager.num_blocks:
        found.append(f"{manager.num_blocks - manager.num_free} blocks were not given back")
    return found
