"""Notebook 03's clinic: the fault shows as the text says, and the folded mend cures it."""

import re
from pathlib import Path

import pytest
import torch

from nanoteach.config import EngineConfig
from nanoteach.course import installed, parts
from nanoteach.course.pictures import Request, static_run
from nanoteach.hub import TINY
from nanoteach.kv_cache import StaticBatchGenerator
from nanoteach.loader import load_model
from nanoteach.stages import STAGES, Parts
from nanoteach.types import SamplingParams

TEXT = next((Path(__file__).parents[1] / "notebooks").glob("03_*.py")).read_text(encoding="utf-8")
ALLOCATE = "nanoteach.block_manager.BlockManager.allocate"
# A is done in step 14 with 33 tokens, a remainder of 1; B goes on to step 40.
REQUESTS = [Request(20, 14), Request(10, 40), Request(16, 30), Request(5, 12)]


def faulty() -> str:
    """The function that the learner is to mend."""
    match = re.search(r"^def allocate_mended.*?return True\n", TEXT, re.S | re.M)
    assert match
    return match[0]


def mended() -> str:
    """The same with the lines of the folded answer."""
    match = re.search(r"One way to mend it.*?```\n(.*?)# ```", TEXT, re.S)
    assert match
    lines = "".join(line[2:] + "\n" for line in match[1].splitlines())
    return re.sub(r"    else:\n        missing = [^\n]*\n", lines, faulty())


def blocks_at_the_end(source: str, row_len: int) -> int:
    """Blocks held in the last step by the clinic's requests, in a pool of 4 * row_len places."""
    allocate = parts.build(parts.resolve(ALLOCATE), source, "<clinic>")
    with installed({ALLOCATE: allocate}):
        run = static_run(REQUESTS, stage="pages", row_len=row_len)
    return sum(row.held // row.piece for row in run.memory[-1].values())


def test_the_fault_leaks_a_block_in_every_step() -> None:
    assert blocks_at_the_end(faulty(), 1024) == 11 + 26


def test_in_a_small_pool_it_runs_out() -> None:
    with pytest.raises(RuntimeError, match="the pool is too small"):
        blocks_at_the_end(faulty(), 50)


def test_the_folded_answer_mends_it() -> None:
    assert blocks_at_the_end(mended(), 1024) == 11
    assert blocks_at_the_end(mended(), 50) == 11


def test_stage_2_refuses_a_memory_without_room_for_one_row() -> None:
    """The notebook shows its words; a row may lack the place of the last token."""
    model = load_model(TINY, "cpu", torch.float32, max_model_len=1024)
    params = SamplingParams(max_tokens=40, ignore_eos=True)

    def served(num_blocks: int) -> StaticBatchGenerator:
        config = EngineConfig(max_model_len=65, block_size=8, num_gpu_blocks_override=num_blocks)
        generator = STAGES[1].build(Parts(model, config))
        assert isinstance(generator, StaticBatchGenerator)
        return generator

    with pytest.raises(ValueError, match="56 places, too few for one row"):
        served(7)
    smallest = served(8)
    assert smallest.cache.k.shape[1] == 64
    longest = smallest.generate([[5] * 25], params)
    assert longest == served(9).generate([[5] * 25], params)
