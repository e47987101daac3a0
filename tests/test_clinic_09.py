"""Notebook 09: its clinic, its pictures' numbers, its widget."""

import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jupytext
import pytest
import torch

from nanoteach.config import EngineConfig
from nanoteach.course import installed, pictures_09, widgets
from nanoteach.hub import TINY
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.stages import COURSE, Parts
from nanoteach.types import SamplingParams

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "09_sampling.py"


@pytest.fixture(scope="module")
def clinic() -> dict[str, Any]:
    """What the notebook's clinic defines, the mend included."""
    model = load_model(TINY, "cpu", torch.float32)
    names: dict[str, Any] = {
        "torch": torch, "replace": replace, "EngineConfig": EngineConfig, "COURSE": COURSE,
        "Parts": Parts, "SamplingParams": SamplingParams, "installed": installed, "model": model,
        "tokenizer": load_tokenizer(TINY), "eos": eos_token_ids(TINY),
    }  # fmt: skip
    cells = jupytext.read(NOTEBOOK).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")

    def run(start: str) -> None:
        """The definition that begins so; nothing else of its cell."""
        found = re.search(rf"^{re.escape(start)}.*?(?=^\S|\Z)", code, re.S | re.M)
        assert found, start
        exec(found[0], names)

    for start in ("def chat(", "def parts(", "def engine(", "def patient(", "def watched("):
        run(start)
    names["fox"] = names["chat"]("Tell me a story about a fox.")
    names["prompts"] = [
        names["chat"](f"Tell me a story about a {a}.") for a in ("fox", "bear", "mouse", "ox")
    ]
    run("def examine(")
    for cell in cells:
        if cell.cell_type == "markdown" and "<summary>The diagnosis" in cell.source:
            (mend,) = re.findall(r"```python\n(.*?)```", cell.source, re.S)
            exec(mend, names)
    return names


def test_the_patient_is_well_alone_and_ill_when_rows_move(clinic: dict[str, Any]) -> None:
    patient, watched = clinic["patient"], clinic["watched"]
    ill = patient()
    usual, _ = watched(ill, [])
    assert watched(ill, [])[0] == usual == watched(patient(), [20])[0]
    text, trace = watched(patient(), [5])
    moved = trace.index("U")  # the first step without A
    assert 0 < moved < len(usual)
    assert text[:moved] == usual[:moved] and text != usual
    assert clinic["examine"](patient) == "still ill"


def test_the_folded_mend_cures_it(clinic: dict[str, Any]) -> None:
    assert clinic["examine"](clinic["mended"]) == "well again"


def test_and_so_does_the_function_of_the_package(clinic: dict[str, Any]) -> None:
    from nanoteach.course import parts

    assert (
        clinic["examine"](lambda: parts.package_version("nanoteach.sampler.race")) == "well again"
    )


def test_generators_by_seed_are_no_mend(clinic: dict[str, Any]) -> None:
    """Two requests may have the same seed."""
    code = Path(NOTEBOOK).read_text()
    (patient,) = re.findall(r"^def patient.*?return race_by_rows\n", code, re.S | re.M)
    by_seed = (
        patient.replace("last.get(row)", "last.get(seed)")
        .replace("last[row]", "last[seed]")
        .replace("generators[row]", "generators[seed]")
    )
    names = dict(clinic)
    exec(by_seed, names)
    watched, make = clinic["watched"], names["patient"]
    alone, _ = watched(make(), [])
    assert watched(make(), [5])[0] == alone != watched(make(), [5, 9], seed=6)[0]


def test_the_knobs_say_what_is_left() -> None:
    logits = torch.tensor([4.0, 2.0, 1.0, 0.0, 3.0]).log()
    logits[3] = math.log(0.5)  # of 10.5 in all
    explorer = pictures_09.SamplingExplorer(logits, "abcde")
    assert explorer.probabilities.tolist() == pytest.approx([x / 10.5 for x in (4, 2, 1, 0.5, 3)])
    explorer.top_k = 3
    assert explorer.probabilities.tolist() == pytest.approx([4 / 9, 2 / 9, 0, 0, 3 / 9])
    assert "3 tokens are left, which had 85.7%" in explorer.text()
    explorer.top_p = 0.5
    assert explorer.probabilities.tolist() == pytest.approx([4 / 7, 0, 0, 0, 3 / 7])
    explorer.top_k, explorer.top_p = 1, 1.0
    assert "1 token is left" in explorer.text() and "like drawing from 1.0 equal" in explorer.text()
    panel = widgets.Panel(
        pictures_09.SamplingExplorer(), widgets.Control("slider", "top_k", "top_k", range(5))
    )
    before = panel.image.value
    panel.controls["top_k"].value = 2
    assert "2 tokens are left" in panel.words.value and panel.image.value != before


def test_pictures_draw_what_they_are_given() -> None:
    rng = random.Random(0)
    times = {name: [rng.expovariate(rate) for _ in range(3)] for name, rate in (("a", 2), ("b", 1))}
    race = pictures_09.race_lanes({"a": 2.0, "b": 1.0}, times).axes[0]
    rings = {line.get_xdata()[0] for line in race.lines if line.get_markersize() == 14}
    assert rings == {min(times["a"][i], times["b"][i]) for i in range(3)}
    figure = pictures_09.compared(["a", "b"], {"one": ([0.75, 0.25], [30, 10])})
    assert [bar.get_height() for bar in figure.axes[0].patches] == [0.75, 0.25]
    assert list(figure.axes[0].lines[0].get_ydata()) == [0.75, 0.25]
    assert figure.png() and pictures_09.temperatures(torch.randn(30), ["w"] * 30, (0.5, 2.0)).png()
