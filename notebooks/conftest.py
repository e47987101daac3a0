"""`pytest --nbval notebooks/` runs every notebook in the same environment, whatever the machine."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from nanoteach.course.environment import notebook_environment

PROGRESS = Path(tempfile.mkdtemp(prefix="nanoteach-"))
os.environ.update(notebook_environment(PROGRESS))  # the kernels inherit it

_last_notebook = None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each notebook begins with an empty progress folder."""
    global _last_notebook
    if item.path != _last_notebook:
        _last_notebook = item.path
        shutil.rmtree(PROGRESS, ignore_errors=True)
        PROGRESS.mkdir()


def pytest_unconfigure() -> None:
    """Leave nothing behind."""
    shutil.rmtree(PROGRESS, ignore_errors=True)
