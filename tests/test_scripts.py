"""Every notebook is also a script that a plain Python runs to its end, without Jupyter."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from without_jupyter import JUPYTER

from nanoteach.course.environment import notebook_environment

ROOT = Path(__file__).parents[1]
RUN = Path(__file__).with_name("without_jupyter.py")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py"))
QUICK = ("00", "10")


def run(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | notebook_environment(folder)
    environment.pop("TRITON_INTERPRET", None)  # the notebook that needs it sets it
    return subprocess.run(
        [sys.executable, str(RUN), str(script)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.name[:2] in QUICK else pytest.mark.slow)
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_it_runs_to_the_end(path: Path, tmp_path: Path) -> None:
    done = run(path, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"Notebook {path.name[:2]}." in done.stdout
    assert list(tmp_path.iterdir()) == []  # a script keeps nothing


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_imports_nothing_of_jupyter(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert not {name.partition(".")[0] for name in imported} & JUPYTER


def test_what_comes_with_jupyter_is_not_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import importlib.metadata\nimport ipywidgets.widgets\n")
    assert "No module named 'ipywidgets'" in run(script, tmp_path).stderr
