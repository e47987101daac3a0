"""Run notebooks and write them with their outputs: `python -m nanoteach.course.build 00 03`.

The text of a notebook is its `.py`; this makes the `.ipynb` from it, in the environment in which
`pytest --nbval notebooks/` will run it again. Without numbers: all of them.
"""

import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoteach.course.environment import notebook_environment

ROOT = Path(__file__).resolve().parents[2]
WIDGET = "application/vnd.jupyter.widget-view+json"


def read(path: Path) -> Any:
    """A `.py` notebook as nbformat has it, with ids that depend on the cells alone."""
    import jupytext

    notebook = jupytext.read(path)
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        name = hashlib.sha256(cell.source.encode()).hexdigest()[:12]
        seen[name] = seen.get(name, 0) + 1
        cell["id"] = name if seen[name] == 1 else f"{name}-{seen[name]}"
    return notebook


def execute(notebook: Any, progress: Path, seconds: int = 300) -> Any:
    """Run every cell in a fresh kernel, as nbval does. Raises CellExecutionError if one fails."""
    from nbclient import NotebookClient

    environment = os.environ | notebook_environment(progress)
    client = NotebookClient(
        notebook,
        timeout=seconds,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
        record_timing=False,
    )
    client.execute(env=environment)
    return notebook


def tidy(notebook: Any) -> Any:
    """Take out what would differ from run to run and says nothing."""
    notebook.metadata = {
        key: value for key, value in notebook.metadata.items() if key in ("jupytext", "kernelspec")
    }
    for cell in notebook.cells:
        kept: list[Any] = []
        for output in cell.get("outputs", []):
            # The widget itself is gone with its kernel. An HTML or picture of ours beside it stays.
            data = output.get("data", {})
            if data.pop(WIDGET, None) and not data.keys() & {"text/html", "image/png"}:
                continue
            # A printed text comes in one piece or in several, as the kernel had time.
            last = kept[-1] if kept else None
            if last and output.output_type == "stream" and output.get("name") == last.get("name"):
                last.text += output.text
            else:
                kept.append(output)
        if cell.cell_type == "code":
            cell.outputs = kept
    return notebook


def answered(notebook: Any, answers: Mapping[str, str]) -> Any:
    """The notebook with every stub replaced by the answer to its target."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for target, source in answers.items():
                if f'@exercise("{target}")' in cell.source:
                    cell.source = source
    return notebook


def build(path: Path) -> None:
    """Run one notebook and write its `.ipynb`."""
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        notebook = tidy(execute(read(path), Path(folder)))
    nbformat.write(notebook, path.with_suffix(".ipynb"))


def main(numbers: list[str]) -> int:
    """Build the notebooks with these numbers, or all."""
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py")):
        if not numbers or path.name[:2] in numbers:
            print(path.with_suffix(".ipynb").name, flush=True)
            build(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
