"""Notebook 11: its clinic, its widget, its pictures on any recording, and where they come from."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoteach.bench.cases import EXPERIMENTS
from nanoteach.bench.causes import MISS, NO_GRAPHS, cause_of
from nanoteach.bench.recording import Recording, predictions
from nanoteach.course import pictures_11, widgets

TEXT = next((Path(__file__).parents[1] / "notebooks").glob("11_*.py")).read_text(encoding="utf-8")


def functions(*names: str) -> str:
    """The source of the notebook's functions with these names."""
    nodes = [n for n in ast.parse(TEXT).body if isinstance(n, ast.FunctionDef) and n.name in names]
    assert len(nodes) == len(names)
    lines = TEXT.splitlines()
    return "\n\n".join("\n".join(lines[n.lineno - 1 : n.end_lineno]) for n in nodes)


def notebook() -> dict[str, Any]:
    """What the clinic's cells see."""
    from nanoteach.bench.serving import NoModel, serve
    from nanoteach.bench.workloads import StepLog, Workload, draw_prompts
    from nanoteach.chunked_prefill import ChunkedPrefillScheduler
    from nanoteach.cost_model import SHAPES, VirtualClock
    from nanoteach.engine_core import EngineCore
    from nanoteach.hardware import HARDWARE
    from nanoteach.prefix_cache import PrefixCachingBlockManager

    return {
        "qwen": SHAPES["qwen3-0.6b"], "h200": HARDWARE["h200"], "NoModel": NoModel, "serve": serve,
        "StepLog": StepLog, "Workload": Workload, "draw_prompts": draw_prompts,
        "ChunkedPrefillScheduler": ChunkedPrefillScheduler, "VirtualClock": VirtualClock,
        "EngineCore": EngineCore, "PrefixCachingBlockManager": PrefixCachingBlockManager,
        "SIZES": (1, 2, 4, 8, 16, 32, 64, 128),
    }  # fmt: skip


def clinic(source: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """`curve`, and everything that the source defines."""
    names = notebook()
    exec(functions("curve") + "\n\n" + source, names)
    return names["curve"], names


def mended() -> str:
    """The function of the clinic with the line of the folded answer."""
    match = re.search(r"Either other prompts for every size:\n#\n# ```python\n# (.*?)\n# ```", TEXT)
    assert match
    return re.sub(r"    return draw_prompts.*", match[1], functions("prompts_mended"))


def test_the_patient_is_faster_than_the_bound_and_bent() -> None:
    curve, names = clinic(functions("prompts_of_patient", "prompts_mended"))
    cells = curve(names["prompts_of_patient"])
    assert cells == curve(names["prompts_mended"])  # as the learner finds it
    speeds = {size: speed for size, speed, _ in cells}
    assert all(speeds[size] > 1.5 * speeds[1] for size in (2, 4, 8, 16, 32))
    assert speeds[128] < 1.1 * speeds[1] and cells[-1][2] == 0


def test_the_mend() -> None:
    curve, names = clinic(mended())
    cells = curve(names["prompts_mended"])
    assert not any(hits for _, _, hits in cells)
    assert max(speed for _, speed, _ in cells) < 1.05 * min(speed for _, speed, _ in cells)


# --- the recording -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> pictures_11.Evidence:
    recording = Recording.of("experiments_h200", "engines_h200")
    assert recording is not None
    return pictures_11.Evidence(recording, predictions())


def test_what_the_issue_asks_of_the_recording(found: pictures_11.Evidence) -> None:
    """Prefix caching: 10 times fewer prompt tokens, 2.5 times less TTFT."""
    off, on = "prefix caching off", "prefix caching on"
    recording = found.recording
    workload = recording.workload(off)
    decoded = sum(workload.output_lens) - len(workload.prompts)
    tokens = [recording.median(case, "computed") - decoded for case in (off, on)]
    assert tokens[0] >= 10 * tokens[1]
    assert recording.median(off, "TTFT") >= 2.5 * recording.median(on, "TTFT")


def test_every_miss_of_an_engine_without_graphs_has_a_cause(found: pictures_11.Evidence) -> None:
    missed = [row for row in found.judged if row.case.startswith(NO_GRAPHS)]
    missed = [row for row in missed if abs(row.error) > MISS]
    assert missed and all("launches" in cause_of(row, found.recording) for row in missed)


def test_a_cause_is_given_for_misses_alone(found: pictures_11.Evidence) -> None:
    assert not any(cause_of(row, found.recording) for row in found.judged if abs(row.error) <= MISS)


def test_a_picture_for_every_experiment(found: pictures_11.Evidence) -> None:
    assert pictures_11.EXPERIMENT_PICTURES.keys() >= EXPERIMENTS.keys()
    assert pictures_11.static(found).png() == pictures_11.static(found).png()


def test_the_knobs_of_the_widget(found: pictures_11.Evidence) -> None:
    explorer = pictures_11.CalibrationExplorer(found)
    rows = {pictures_11.batch_of(row): row for row in explorer.rows}
    # Without overhead and with all of the bandwidth it is the bound; that is a little apart, since
    # here every request is in the middle of its output.
    for batch, row in rows.items():
        assert explorer.speed(batch) == pytest.approx(row.bound, rel=0.02)
    panel = widgets.Panel(
        explorer, widgets.Control("slider", "overhead", "overhead, µs", range(0, 501, 25))
    )
    before = panel.image.value
    panel.controls["overhead"].value = 250
    assert "250 µs of overhead" in panel.words.value and panel.image.value != before
