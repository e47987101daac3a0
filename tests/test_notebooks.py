"""The notebooks as files: paired, run, and honest about names. `pytest --nbval` runs them again."""

import ast
import builtins
import keyword
import re
from functools import cache
from pathlib import Path

import jupytext
import nbformat
import pytest
from course_cases import solutions

from nanoteach.course.build import answered, execute, read
from nanoteach.course.checking import all_checks

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py"))
IGNORE = "nbval-ignore-output"
COMMANDS = "start", "progress", "ladder", "generate", "chat", "doctor", "bench", "serve"
TEXT = ("text/plain", "text/html", "text/markdown")

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def outputs(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path.with_suffix(".ipynb"), as_version=4)


def test_the_two_halves_are_paired(path):
    def cells(notebook):
        return [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in notebook.cells]

    notebook = outputs(path)
    assert cells(jupytext.read(path)) == cells(notebook), (
        f"run: python -m nanoteach.course.build {path.name[:2]}"
    )
    assert notebook.metadata.jupytext.formats == "ipynb,py:percent"


def test_it_was_run_in_order_and_nothing_failed(path):
    cells = [c for c in outputs(path).cells if c.cell_type == "code"]
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    shown = [output for cell in cells for output in cell.outputs]
    assert shown and all(output.output_type != "error" for output in shown)


def test_most_cells_with_text_are_compared(path):
    def has_text(cell):
        return any(
            output.output_type == "stream" or set(TEXT) & set(output.data)
            for output in cell.outputs
        )

    cells = [c for c in outputs(path).cells if c.cell_type == "code" and has_text(c)]
    compared = [c for c in cells if IGNORE not in c.metadata.get("tags", [])]
    assert len(compared) >= 0.6 * len(cells), f"{len(compared)} of {len(cells)}"


def test_each_exercise_has_a_stub_two_hints_and_the_package_s_version_after_it(path):
    cells = outputs(path).cells
    number = int(path.name[:2])
    targets = [check.target for check in all_checks() if check.notebook == number]
    found = {
        ast.literal_eval(match[1]): i
        for i, cell in enumerate(cells)
        if cell.cell_type == "code" and (match := re.search(r"@exercise\((.+)\)", cell.source))
    }
    assert found.keys() == set(targets)
    for target, i in found.items():
        assert cells[i + 1].source.count("<details>") == 2, f"two hints after {target}"
        assert f'show("{target}")' in cells[i + 2].source
        above = "".join(cell.source for cell in cells[: i + 1])
        assert f'show("{target}")' not in above


def test_every_name_in_the_prose_resolves(path):
    notebook = outputs(path)
    code = [c.source for c in notebook.cells if c.cell_type == "code"]
    known = package_names() | names_in("\n".join(code))
    unknown = []
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        prose = re.sub(r"```.*?```", "", cell.source, flags=re.S)
        for span in re.findall(r"`([^`\n]+)`", prose):
            if not resolves(span, known):
                unknown.append(span)
    assert not unknown


# On Linux ru_maxrss won't do: it survives exec, so a kernel begins with the peak of its parent.
PEAK = """\
import re, resource, sys
if sys.platform == "linux":
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("peak memory", peak)"""


def test_it_runs_to_the_end_on_the_solutions_in_2_gb(path, tmp_path):
    notebook = answered(read(path), solutions())
    notebook.cells.append(nbformat.v4.new_code_cell(PEAK))
    execute(notebook, tmp_path)
    (peak,) = re.findall(r"peak memory (\d+)", notebook.cells[-1].outputs[0].text)
    assert int(peak) < 2 * 10**9
    said = "".join(
        output.get("text", "") for c in notebook.cells for output in c.get("outputs", [])
    )
    number = int(path.name[:2])
    assert said.count(": right. ") == sum(check.notebook == number for check in all_checks())
    assert "not written here yet" not in said


# --- names --------------------------------------------------------------------------------------


def names_in(source: str) -> set[str]:
    """Every identifier that a source mentions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "name", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                names.update(value.split("."))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(re.findall(r"^[A-Za-z_]\w*$", node.value))  # a trace's kinds, and the like
    return names


@cache
def package_names() -> frozenset[str]:
    """Every identifier of the package, and the names of its files."""
    names = {"nanoteach", "torch", *dir(builtins), *keyword.kwlist}
    for path in (ROOT / "nanoteach").rglob("*.py"):
        names |= names_in(path.read_text(encoding="utf-8")) | {path.stem}
    return frozenset(names)


def resolves(span: str, known: set[str]) -> bool:
    """Whether a span of code in the prose speaks of things that are there."""
    if span.startswith("nanoteach "):  # a command
        return span.split()[1] in COMMANDS
    if span == "..." or re.fullmatch(r"(pip|python|pytest|make|jupyter) .*", span):
        return True
    if "/" in span and re.fullmatch(r"[\w./-]+", span):
        return (ROOT / span).exists() or re.fullmatch(r"[\w-]+/[\w.-]+", span) is not None
    if re.fullmatch(r"\w+\.(py|ipynb|md|json)", span):
        return any(ROOT.glob(f"*/{span}")) or (ROOT / span).exists()
    return all(name in known for name in re.findall(r"[A-Za-z_]\w*", span))
