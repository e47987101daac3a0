"""Notebook 08's clinics: each fault shows as the text says, and the folded mend cures it."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jupytext
import pytest
import torch

from nanoteach import cuda_graphs
from nanoteach.config import EngineConfig
from nanoteach.course import installed
from nanoteach.hub import TINY
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.stages import LADDER, Parts
from nanoteach.step_inputs import StepBuffer
from nanoteach.types import SamplingParams

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "08_cuda_graphs.py"


@pytest.fixture(scope="module")
def clinic() -> dict[str, Any]:
    """What the notebook's clinics define, mends included."""
    model = load_model(TINY, "cpu", torch.float32)
    tokenizer, eos = load_tokenizer(TINY), eos_token_ids(TINY)
    names: dict[str, Any] = {
        "torch": torch, "replace": replace, "patch": patch, "cuda_graphs": cuda_graphs,
        "EngineConfig": EngineConfig, "LADDER": LADDER, "Parts": Parts, "StepBuffer": StepBuffer,
        "SamplingParams": SamplingParams, "installed": installed, "model": model, "eos": eos,
        "tokenizer": tokenizer,
    }  # fmt: skip
    cells = jupytext.read(NOTEBOOK).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]

    def run(start: str) -> None:
        """The definition that begins so; nothing else of its cell."""
        found = re.search(rf"^{re.escape(start)}.*?(?=^\S|\Z)", "\n".join(code), re.S | re.M)
        assert found, start
        exec(found[0], names)

    for start in ("def chat(", "def engine(", "class Patient(", "FILL =", "def wipes("):
        run(start)
    names["question"] = names["chat"]("What is 27 plus 48?")
    names["prompts"] = [names["chat"](f"Tell me a story about a {who}.") for who in ("fox", "bear")]
    names["params"] = [SamplingParams(max_tokens=n) for n in (5, 8)]
    run("def run_with(")
    run("def serve(")
    for cell in cells:
        if cell.cell_type == "markdown" and "<summary>The diagnosis" in cell.source:
            (mend,) = re.findall(r"```python\n(.*?)```", cell.source, re.S)
            exec(mend, names)
    return names


def test_a_stale_tensor_shows_with_graphs_alone(clinic: dict[str, Any]) -> None:
    def tokens(buffer: type[StepBuffer], eager: bool) -> list[list[int]]:
        got: list[list[int]] = clinic["run_with"](buffer, enforce_eager=eager)[1]
        return got

    right = tokens(StepBuffer, eager=False)
    assert tokens(clinic["Patient"], eager=True) == right
    assert tokens(clinic["Patient"], eager=False) != right
    assert tokens(clinic["Mended"], eager=True) == tokens(clinic["Mended"], eager=False) == right


def test_a_padded_row_in_slot_0_takes_a_digit_of_the_question(clinic: dict[str, Any]) -> None:
    answers = {
        (fill, others): clinic["serve"](clinic[fill], others)[0]
        for fill in ("wipes", "mended")
        for others in (1, 2)
    }
    right = "27 plus 48 is 75."
    assert answers == {
        ("wipes", 1): right, ("wipes", 2): "27 plus 4 is 31.",
        ("mended", 1): right, ("mended", 2): right,
    }  # fmt: skip
