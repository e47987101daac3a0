"""The bug clinic of notebook 02: the planted fault shows, and the folded answer mends it."""

import re
import textwrap
from pathlib import Path
from typing import Any

import jupytext
import pytest
import torch

from nanoteach.hub import TINY
from nanoteach.kv_cache import (
    ContiguousKVCache,
    ContiguousMetadata,
    StaticBatchGenerator,
    decode_mask,
)
from nanoteach.loader import load_model, load_tokenizer
from nanoteach.types import SamplingParams

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "02_kv_cache.py"


@pytest.fixture(scope="module")
def clinic() -> dict[str, Any]:
    """What the notebook's clinic defines, and the two requests."""
    model = load_model(TINY, "cpu", torch.float32, max_model_len=256)
    tokenizer = load_tokenizer(TINY)
    sums = ("What is 12 plus 30?", "12 plus 30 is 42.", "What is 5 plus 9?", "5 plus 9 is 14.")
    chats = [(*sums, "What is 27 plus 48?"), ("Tell me a story about a robot and a silver bell.",)]
    prompts = []
    for turns in chats:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(list(tokenizer.encode(text, add_special_tokens=False)))
    names: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "StaticBatchGenerator": StaticBatchGenerator,
        "ContiguousKVCache": ContiguousKVCache,
        "ContiguousMetadata": ContiguousMetadata,
        "decode_mask": decode_mask,
    }
    cells = jupytext.read(NOTEBOOK).cells
    (code,) = [c.source for c in cells if c.cell_type == "code" and "class SimpleBatch" in c.source]
    exec(code, names)
    (answer,) = [c.source for c in cells if c.cell_type == "markdown" and "Your turn" in c.source]
    (mend,) = re.findall(r"```python\n(.*?)```", answer, re.S)
    exec(textwrap.dedent(mend), names)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (12, 56)]
    return names | {"prompts": prompts, "params": params}


def run(clinic: dict[str, Any], batch_class: type[StaticBatchGenerator]) -> list[list[int]]:
    """Both requests in rows of 87 slots."""
    cache = clinic["PatientCache"](rows=2, row_len=87)
    generator = batch_class(clinic["model"], cache, max_num_seqs=2)
    return generator.generate(clinic["prompts"], clinic["params"])


def test_the_fault_shows_and_its_answer_mends_it(clinic: dict[str, Any]) -> None:
    right = run(clinic, StaticBatchGenerator)
    sick = run(clinic, clinic["SimpleBatch"])
    assert sick[0] == right[0] and sick[1] != right[1]

    class Mended(StaticBatchGenerator):
        generate_batch = clinic["generate_batch"]

    assert run(clinic, Mended) == right


def test_half_a_mend_is_seen_although_the_tokens_are_right(clinic: dict[str, Any]) -> None:
    """One token too many in A's row: the notebook asks for A's slots, and for the other order."""

    class Half(StaticBatchGenerator):
        def generate_batch(self, prompts: Any, params: Any) -> list[list[int]]:
            rows = [list(prompt) for prompt in prompts]
            starts = [len(row) for row in rows]
            query_lens = starts
            for _ in range(max(p.max_tokens for p in params)):
                tokens = self.step(rows, query_lens)
                for row, n, token, p in zip(rows, starts, tokens, params, strict=True):
                    if len(row) < n + p.max_tokens:
                        row.append(token)
                query_lens = [1] * len(rows)
            return [row[n:] for row, n in zip(rows, starts, strict=True)]

    cache = clinic["PatientCache"](rows=2, row_len=87)
    tokens = Half(clinic["model"], cache, max_num_seqs=2).generate(
        clinic["prompts"], clinic["params"]
    )
    assert tokens == run(clinic, StaticBatchGenerator)
    assert max(slots[0] for slots in cache.given[1:]) == 87
    swapped = clinic["PatientCache"](rows=2, row_len=87)
    with pytest.raises(IndexError):
        Half(clinic["model"], swapped, max_num_seqs=2).generate(
            clinic["prompts"][::-1], clinic["params"][::-1]
        )
    sound = clinic["PatientCache"](rows=2, row_len=87)
    StaticBatchGenerator(clinic["model"], sound, max_num_seqs=2).generate(
        clinic["prompts"], clinic["params"]
    )
    assert max(slots[0] for slots in sound.given[1:]) == 86
