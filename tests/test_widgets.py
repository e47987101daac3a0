"""The widgets, driven as a reader does it: knobs turned, buttons clicked, without a browser."""

import base64
import sys
from collections.abc import Callable
from typing import Any

import nbformat.v4
import pytest
from matplotlib.text import Text

from nanoteach.cost_model import Work, step_cost
from nanoteach.course import widgets
from nanoteach.course.build import WIDGET, tidy
from nanoteach.course.pictures import QWEN3
from nanoteach.course.widgets import (
    PROMPTS,
    BlockTableExplorer,
    Panel,
    PrefixExplorer,
    RooflineExplorer,
    SchedulerExplorer,
)
from nanoteach.hardware import HARDWARE

ALL = [
    widgets.roofline,
    widgets.block_table_explorer,
    widgets.scheduler_timeline,
    widgets.prefix_cache_explorer,
]


def words(panel: Panel) -> str:
    """All text of the picture as the explorer stands now."""
    return "\n".join(text.get_text() for text in panel.explorer.picture().findobj(Text))


def test_the_roofline() -> None:
    panel = widgets.roofline()
    explorer = panel.explorer
    assert isinstance(explorer, RooflineExplorer)
    before = panel.image.value
    panel.controls["batch"].value = 256
    panel.controls["context"].value = 128
    panel.controls["gpu"].value = "l4"
    seconds = step_cost(QWEN3, [Work(1, 127)] * 256).seconds(HARDWARE["l4"])
    assert explorer.tokens_per_second == pytest.approx(256 / seconds)
    assert explorer.limit == "memory"
    assert f"at most {256 / seconds:,.0f} tokens/s" in panel.words.value
    assert "Reading K/V limits it" in panel.words.value
    assert "L4: the roof" in words(panel) and "256 decodes" in words(panel)
    assert panel.image.value != before and bytes(panel.image.value).startswith(b"\x89PNG")


def test_computing_limits_a_wide_batch_of_short_texts() -> None:
    explorer = RooflineExplorer(batch=1024, context=16)
    assert explorer.limit == "compute" and "Computing limits it" in explorer.text()
    assert "Reading the weights limits it" in RooflineExplorer(batch=1).text()


def test_the_block_table_explorer() -> None:
    panel = widgets.block_table_explorer()
    explorer, click = panel.explorer, lambda name: panel.controls[name].click()
    assert isinstance(explorer, BlockTableExplorer)
    assert explorer.num_steps == 3 and explorer.run.pool().computed == {"A": 8, "B": 15, "C": 11}
    assert panel.controls["request"].options == ("A", "B", "C")
    click("step")
    assert explorer.num_steps == 4 and explorer.run.pool().computed["B"] == 16
    assert "after step 4" in words(panel) and "A taken [9]" in panel.words.value

    panel.controls["prompt"].value = 20
    click("add")
    assert "Queue: D" in panel.words.value and panel.controls["request"].value == "B"
    click("step")
    assert len(explorer.run.pool().tables["D"]) == 5 and "computed 20 of D" in panel.words.value

    panel.controls["request"].value = "D"
    click("abort")
    assert "D" not in explorer.run.pool().tables and panel.controls["request"].value is None
    assert explorer.run.core.check() == []
    for _ in range(20):
        explorer.step()
    click("step")
    assert "There is nothing to do" in panel.words.value and "nobody runs" in words(panel)
    click("add")
    assert panel.controls["request"].value == "E"


def test_the_block_table_explorer_when_the_pool_is_full() -> None:
    explorer = BlockTableExplorer()
    explorer.prompt = 14
    for _ in range(6):
        explorer.add()
    told = ""
    while explorer.requests:
        explorer.step()
        told += explorer.text()
        assert explorer.run.core.check() == []
    assert "preempted" in told


def test_the_scheduler_timeline() -> None:
    panel = widgets.scheduler_timeline()
    explorer = panel.explorer
    assert isinstance(explorer, SchedulerExplorer)
    first, chunked = explorer.longest_waits
    assert first > 10 * chunked
    assert "512 tokens a step" in words(panel) and "simulated, H200" in words(panel)
    panel.controls["budget"].value = 8192
    assert explorer.longest_waits[0] == first and explorer.longest_waits[1] > 0.9 * first
    assert "8,192 tokens a step" in words(panel)
    panel.controls["budget"].value = 64
    assert explorer.longest_waits[1] < chunked
    assert explorer.first_tokens[1] > explorer.first_tokens[0]
    panel.controls["arrival"].value = 2
    assert explorer.runs()[0].sequences["D"].arrival_time == pytest.approx(0.002, abs=3e-4)
    panel.controls["prompt"].value = 512
    assert explorer.longest_waits[0] < first / 5


def test_the_prefix_cache_explorer() -> None:
    panel = widgets.prefix_cache_explorer()
    explorer, click = panel.explorer, lambda name: panel.controls[name].click()
    assert isinstance(explorer, PrefixExplorer)
    assert explorer.running == ["A", "B"] and "held by 2: A, B" in words(panel)
    assert "8 of 14 tokens were in the cache" in panel.words.value
    assert "sing a song about" in words(panel) and "free, place 6 in line" in words(panel)
    assert explorer.free_order[-1] == 5 and "5 (cached)" in panel.words.value

    click("finish")
    assert explorer.running == ["B"] and "held by 2" not in words(panel)
    click("finish")
    assert explorer.running == [] and len(explorer.free_order) == 12
    # The last block of a text is lost before those that others may share.
    assert explorer.free_order[-1] == 0

    panel.controls["keep"].value = False
    for prompt in PROMPTS[3:]:
        explorer.prompt = prompt
        explorer.send()
        assert explorer.run.core.check() == []
    panel.controls["prompt"].value = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
    click("send")
    assert "Lost from the cache: block" in panel.words.value
    assert len(explorer.manager.name_of) <= 12


def test_a_prompt_that_cannot_be_served_is_answered_in_words() -> None:
    panel = widgets.prefix_cache_explorer()
    explorer = panel.explorer
    assert isinstance(explorer, PrefixExplorer)
    panel.controls["prompt"].value = "word " * 60
    panel.controls["send"].click()
    assert "do not fit" in panel.words.value
    panel.controls["prompt"].value = "  "
    panel.controls["send"].click()
    assert "the prompt is empty" in panel.words.value
    panel.controls["prompt"].value = "still alive"
    panel.controls["send"].click()
    assert "0 of 2 tokens were in the cache" in panel.words.value


def test_prompts_wait_for_blocks_and_are_served() -> None:
    panel = widgets.prefix_cache_explorer()
    explorer = panel.explorer
    assert isinstance(explorer, PrefixExplorer)
    for prompt in PROMPTS[3:]:
        panel.controls["prompt"].value = prompt
        panel.controls["send"].click()
    assert "had to wait for blocks" in panel.words.value


@pytest.mark.parametrize("make", ALL)
def test_the_still_picture_is_how_the_widget_starts(make: Callable[[], Panel]) -> None:
    panel = make()
    assert panel.still._repr_png_() == panel.image.value
    assert make().still.png() == panel.image.value


@pytest.mark.parametrize("make", ALL)
def test_a_notebook_has_the_widget_and_its_picture_in_one_output(
    make: Callable[[], Panel], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda faces, raw: shown.append(faces))
    panel = make()
    panel._ipython_display_()
    (faces,) = shown
    assert base64.b64decode(faces["image/png"]) == panel.still.png()
    assert faces[WIDGET]["model_id"] == panel.box.model_id

    output = nbformat.v4.new_output("display_data", faces)
    cell = nbformat.v4.new_code_cell(outputs=[output])
    assert tidy(nbformat.v4.new_notebook(cells=[cell])).cells[0].outputs == [output]
    assert output.data.keys() == {"text/plain", "image/png"}


@pytest.mark.parametrize("make", ALL)
def test_without_ipywidgets_a_line_and_the_picture_are_left(
    make: Callable[[], Panel],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown: list[object] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    panel = make()
    panel._ipython_display_()
    assert shown == [panel.still] and panel.controls == {}
    assert capsys.readouterr().out.count("\n") == 1
