"""Notebook 10: its clinic, its pictures, its widget."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jupytext
import pytest

from nanoteach import Engine
from nanoteach.async_engine import AsyncEngine, QueueFull
from nanoteach.bench.serve import LoadTest, Record, level_of
from nanoteach.course import pictures_10, widgets
from nanoteach.types import SamplingParams

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "10_serving.py"


@pytest.fixture(scope="module")
def clinic() -> dict[str, Any]:
    """What the notebook's clinic defines, the mend included."""
    names: dict[str, Any] = {
        "asyncio": asyncio, "ThreadPoolExecutor": ThreadPoolExecutor, "Engine": Engine,
        "AsyncEngine": AsyncEngine, "QueueFull": QueueFull, "SamplingParams": SamplingParams,
    }  # fmt: skip
    for cell in jupytext.read(NOTEBOOK).cells:
        if cell.cell_type == "code":
            # Up to the first line that is no definition: those run the clinic.
            source = re.split(r"\n(?=for |print\()", cell.source)[0]
            if re.search(r"def (patient|an_hour|examine|run)\(", source):
                exec(source.split("\n\n\nasync def two")[0], names)
        elif "<summary>The diagnosis" in cell.source:
            (mend,) = re.findall(r"```python\n(.*?)```", cell.source, re.S)
            exec(mend, names)
    return names


def test_the_patient_keeps_those_who_left_and_refuses_who_comes(clinic: dict[str, Any]) -> None:
    trace = clinic["run"](clinic["an_hour"](clinic["patient"]))
    assert [streams for _, streams, _ in trace] == [1, 2, 3, 4, 5, 6, 6]
    assert trace[-1][0] == "refused"
    assert clinic["examine"](clinic["patient"]) == "still ill"


def test_the_folded_mend_cures_it(clinic: dict[str, Any]) -> None:
    assert clinic["examine"](clinic["mended"]) == "well again"


def test_a_queue_without_end_grows_and_one_with_an_end_refuses() -> None:
    calm, busy = (pictures_10.queue(rate, 8, 1.0, None) for rate in (4.0, 12.0))
    assert calm.refused == busy.refused == 0
    assert max(calm.waits) < 2 and max(n for _, n in calm.lengths) < 20
    assert busy.waits[-1] > 50 and busy.lengths[-1][1] > 500
    bounded = pictures_10.queue(12.0, 8, 1.0, 4)
    assert max(n for _, n in bounded.lengths) == 4
    assert len(bounded.waits) + bounded.refused == 2000
    # Of 12 a second, 8 can be answered: a third is refused, or a little more.
    assert 0.3 < bounded.refused / 2000 < 0.42 and max(bounded.waits) < 4


def test_one_place_waits_as_queueing_theory_says() -> None:
    """M/M/1: the mean wait is load / (1 - load) times an answer's time."""
    waits = pictures_10.queue(0.5, 1, 1.0, None, count=20_000).waits
    assert sum(waits) / len(waits) == pytest.approx(1.0, rel=0.15)


def test_the_knobs_say_what_the_queue_does() -> None:
    explorer = pictures_10.QueueExplorer(rate=4.0)
    assert "50% of it" in explorer.text() and "0% are refused" in explorer.text()
    panel = widgets.Panel(explorer, widgets.Control("slider", "room", "room", [0, 1, 4]))
    before = panel.image.value
    panel.controls["room"].value = 1
    explorer.rate = 12.0
    assert "150% of it" in explorer.text() and "0% are refused" not in explorer.text()
    assert panel.image.value != before or panel.words.value


def test_the_text_names_the_rates_that_were_tried() -> None:
    text = " ".join(line.removeprefix("# ") for line in NOTEBOOK.read_text().splitlines())
    first, _, third = pictures_10.recorded_loads(0.5).values()
    for load, words in ((first, "{} and {} a second."), (third, "tried at {} and {} alone")):
        *most, last = (f"{level['rate']:g}" for level in load["levels"])
        assert words.format(", ".join(most), last) in text


def test_pictures_draw_what_they_are_given() -> None:
    assert len(pictures_10.waiting([0.1, 0.2], 0.2).axes[0].lines) == 2
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "hit_rate")
    samples = [dict.fromkeys(names, 0.5) | {"seconds": float(i)} for i in range(3)]
    assert len(pictures_10.over_time(samples, [1.0]).axes[0].lines) == 3
    test = LoadTest("", [1, 2], ttft_limit=0.5)
    for rate, first in ((1.0, 0.1), (2.0, 0.9)):
        records = [Record(i / rate, 0, first, first + 0.4, 5, 0, 9, [0.1] * 4) for i in range(9)]
        test.levels.append(level_of(rate, records, test.limits))
    assert test.knee == 1.0
    figure = pictures_10.latency_against_load({"here": test.result()})
    assert list(figure.axes[0].lines[1].get_ydata()) == pytest.approx([100, 900])
    assert [text.get_text() for text in figure.axes[0].texts] == ["knee 1"]
    legends = [[text.get_text() for text in axes.get_legend().texts] for axes in figure.axes]
    assert legends == [
        ["p99", "p50", "the limit"], ["p99", "p50"],
        ["completed", "within limits", "all that arrive"],
    ]  # fmt: skip
    assert figure.png()
