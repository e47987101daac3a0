"""Run a notebook's script on a plain Python: `python tests/without_jupyter.py notebooks/00_*.py`.

Whatever comes with Jupyter counts as not installed, as on a machine that has the GPU and little
else. Widgets are left out there, and pictures are drawn and not shown.
"""

import runpy
import sys
from typing import NoReturn

JUPYTER = {"IPython", "ipykernel", "ipywidgets", "jupytext", "nbclient", "nbformat", "traitlets"}


class NotInstalled:
    """An import hook before all others."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise as Python does for a package that is not there."""
        if name.partition(".")[0] in JUPYTER:
            not_installed(name)


def not_installed(name: str) -> NoReturn:
    """What Python raises."""
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, NotInstalled())  # type: ignore[arg-type]
    for script in sys.argv[1:]:
        runpy.run_path(script, run_name="__main__")
