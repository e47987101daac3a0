"""What a notebook shows besides its own output: folded source, questions, pictures that change.

Source and questions are a text, an HTML that folds, and where ipywidgets is there a widget: whoever
reads the page takes what it can show. Code hosts show the HTML, a terminal the text.
"""

import html
from collections.abc import Sequence
from typing import Any

from nanoteach.course import parts


class _Shown:
    """Something with several faces, for IPython's `display`."""

    def __init__(self, **faces: Any) -> None:
        self.faces = {name.replace("_", "/", 1): face for name, face in faces.items()}

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return self.faces

    def __repr__(self) -> str:
        return str(self.faces["text/plain"])


def in_notebook() -> bool:
    """Whether a notebook (or another IPython) runs this, and no script."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return get_ipython() is not None


def _display(shown: _Shown) -> None:
    if not in_notebook():
        print(shown)
        return
    from IPython.display import display

    display(shown)


class Live:
    """A place on the page, below the cell that makes it, whose content changes while code runs.

    A script has no such place, and `update` does nothing there.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        if in_notebook():
            from IPython.display import display

            self._handle = display(display_id=True)

    def update(self, content: object) -> None:
        """Show `content`, say a picture, instead of what was there."""
        if self._handle is not None:
            self._handle.update(content)


def show(target: str) -> None:
    """The package's version of an exercise, from its source, folded."""
    source = parts.source_of(parts.package_version(target)).rstrip()
    summary = (
        f"The package's version: <code>{html.escape(target.removeprefix('nanoteach.'))}</code>"
    )
    page = (
        f"<details><summary>{summary}</summary>"
        f"<pre><code>{html.escape(source)}</code></pre></details>"
    )
    _display(_Shown(text_plain=source, text_html=page))


def quiz(question: str, options: Sequence[str], answer: int, because: str) -> None:
    """A multiple-choice question; `answer` is the index of the right option."""
    numbered = [f"{chr(97 + i)}) {option}" for i, option in enumerate(options)]
    right = f"{numbered[answer]}. {because}"
    text = "\n".join([question, *("  " + line for line in numbered), f"Answer: {right}"])
    lines = "".join(f"<br>{html.escape(line)}" for line in numbered)
    page = (
        f"<p>{html.escape(question)}{lines}</p>"
        f"<details><summary>Answer</summary>{html.escape(right)}</details>"
    )
    faces: dict[str, Any] = {"text_plain": text, "text_html": page}
    shown = _Shown(**faces)
    shown.faces |= _radio(question, numbered, answer, because)
    _display(shown)


def _radio(question: str, options: list[str], answer: int, because: str) -> dict[str, Any]:
    """The widget's face, or nothing where ipywidgets is missing or no notebook is there."""
    try:
        import ipywidgets as widgets
    except ImportError:
        return {}
    if not in_notebook():
        return {}
    choice = widgets.RadioButtons(options=options, value=None, layout={"width": "max-content"})
    verdict = widgets.HTML()

    def judge(change: Any) -> None:
        right = change["new"] == options[answer]
        verdict.value = f"<b>{'Right' if right else 'No'}.</b> " + (
            html.escape(because) if right else "Think again."
        )

    choice.observe(judge, names="value")
    box = widgets.VBox([widgets.HTML(html.escape(question)), choice, verdict])
    name = "application/vnd.jupyter.widget-view+json"
    return {name: {"version_major": 2, "version_minor": 0, "model_id": box.model_id}}
