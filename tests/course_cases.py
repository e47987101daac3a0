"""Answers to the exercises, right and wrong, for the tests.

Solutions are read out of `solutions/NN_name.py`, second and wrong answers out of `answers_NN.py`,
where they stand under `@second(target)` and `@wrong(target, words)`. They are read as source and
never run there: an answer sees the names of its target's module, not those of the file.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Answer(NamedTuple):
    """kind: exercise (the solution), second, wrong. words: what the message to it must hold."""

    kind: str
    target: str
    name: str
    source: str
    words: str = ""

    def __str__(self) -> str:
        return f"{self.target.removeprefix('nanoteach.')}-{self.kind}-{self.name}"


def second(target: str) -> Callable[[Any], Any]:
    """A right answer that is built differently from the solution."""
    return lambda function: function


def wrong(target: str, words: str) -> Callable[[Any], Any]:
    """A plausible wrong answer, and words of the message that point at its mistake."""
    return lambda function: function


def answers_in(path: Path) -> Iterator[Answer]:
    """The answers in a file, by their decorators."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    constants: dict[str, Any] = {}  # NAME = "nanoteach...", so that a target is written once
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            constants |= {t.id: node.value.value for t in node.targets if isinstance(t, ast.Name)}
        if not isinstance(node, ast.FunctionDef) or not node.decorator_list:
            continue
        mark = node.decorator_list[0]
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name):
            if mark.func.id not in ("exercise", "second", "wrong"):
                continue
            arguments = [
                constants[argument.id]
                if isinstance(argument, ast.Name)
                else ast.literal_eval(argument)
                for argument in mark.args
            ]
            # Without the mark itself, which means nothing to the course but in a solution.
            first = mark.lineno - 1 if mark.func.id == "exercise" else mark.end_lineno
            source = "".join(lines[first : node.end_lineno])
            yield Answer(mark.func.id, arguments[0], node.name, source, *arguments[1:])


def all_answers() -> list[Answer]:
    """All answers of all notebooks."""
    files = [*ROOT.glob("solutions/[0-9][0-9]_*.py"), *ROOT.glob("tests/answers_[0-9][0-9].py")]
    return [answer for path in sorted(files) for answer in answers_in(path)]


def solutions() -> dict[str, str]:
    """The solution's source for each target."""
    return {a.target: a.source for a in all_answers() if a.kind == "exercise"}
