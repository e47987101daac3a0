"""An answer is checked the moment its cell runs, and if it is right, it goes into the engine.

Knows: what to say to a learner. Does not know: what is right; see `checking.py`.
"""

import ast
import inspect
import linecache
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Literal

import torch

from nanoteach.course import parts
from nanoteach.course.checking import Wrong, case, check_of, current_case
from nanoteach.course.limits import TimeUp, time_limit
from nanoteach.course.parts import Function, Target
from nanoteach.course.progress import has_part, save_part

GOES_ON = "The notebook goes on with the package's version."


@dataclass(frozen=True)
class Outcome:
    """What became of an answer, and the words for it."""

    state: Literal["absent", "wrong", "right"]
    message: str


def exercise(target: str) -> Callable[[Function], Any]:
    """Decorator over an answer: check it, and put it in the place of `target` if it is right.

    The decorated name becomes what now stands there: the answer, or the package's version.
    """

    def decorate(function: Function) -> Any:
        lines, first_line = inspect.getsourcelines(function)
        filename = function.__code__.co_filename
        print(submit(target, "".join(lines), filename, first_line).message)
        return parts.live().get(target, parts.package_version(target))

    return decorate


def submit(path: str, source: str, filename: str = "", first_line: int = 1) -> Outcome:
    """Check the answer in `source`; if it is right, install and save it."""
    target = parts.resolve(path)
    source = textwrap.dedent(source)
    if is_stub(parts.definition(source)):
        return _absent(target)
    if not filename:
        filename = f"<your {target.short}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    function = parts.build(target, source, filename, first_line)
    outcome = judge(target, function, filename)
    if outcome.state == "right":
        parts.install(path, function)
        save_part(path, source)
    elif outcome.state == "wrong":
        parts.uninstall(path)
    return outcome


def _absent(target: Target) -> Outcome:
    which = "your saved version" if target.path in parts.live() else "the package's version"
    return Outcome("absent", f"{target.short}: not written here yet, {which} is used.")


def is_stub(function: ast.FunctionDef) -> bool:
    """Whether a body but for its docstring is only `...`, `pass` or NotImplementedError."""

    def idle(node: ast.stmt) -> bool:
        if isinstance(node, ast.Raise):
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return constant or isinstance(node, ast.Pass)

    return all(idle(node) for node in function.body)


def judge(target: Target, function: Function, filename: str) -> Outcome:
    """Run the check with the function in place, and every other part the package's own."""
    check = check_of(target.path)
    case("the first call")
    last_return: list[int] = []
    try:
        with (
            parts.installed({target.path: function}),
            watch_returns(code_of(function), last_return),
            seeded(),
            time_limit(check.seconds, filename),
        ):
            check.run(function)
    except NotImplementedError:
        return _absent(target)
    except Wrong as wrong:
        rows = [("case", wrong.case), ("expected", wrong.expected), ("got", wrong.got)]
        if wrong.hint:
            rows.append(("likely", wrong.hint))
        lines = _line(filename, last_return[-1]) if last_return else []
        return _wrong(target, "not right yet", rows, lines)
    except TimeUp as error:
        lines = _learner_lines(error, filename)
        rows = [
            ("case", current_case()),
            ("expected", f"an answer within {check.seconds:g} seconds"),
            ("got", "none: it was stopped"),
            ("likely", "A loop that never ends. Does what its condition reads change inside it?"),
        ]
        return _wrong(target, "took too long", rows, lines)
    except (Exception, SystemExit) as error:
        lines = _learner_lines(error, filename)
        rows = [("case", current_case()), ("got", f"{type(error).__name__}: {error}")]
        if lines:
            rows += _about_names(error, target)
        else:
            rows.append(("likely", "The package's code failed on what your function returned."))
            lines = _line(filename, last_return[-1]) if last_return else []
        return _wrong(target, f"raised {type(error).__name__}", rows, lines)
    note = "Your version now runs in the engine, and is kept."
    return Outcome("right", f"{target.short}: right. {note}")


def _about_names(error: BaseException, target: Target) -> list[tuple[str, str]]:
    if not isinstance(error, NameError) or isinstance(error, UnboundLocalError):
        return []
    where = target.module.__name__
    return [
        (
            "likely",
            f"Your function runs inside {where} and sees what that module imports and "
            "defines, not the notebook's names. Import or define what you need inside it.",
        )
    ]


def _wrong(target: Target, what: str, rows: list[tuple[str, Any]], lines: list[str]) -> Outcome:
    message = [f"{target.short}: {what}."]
    for name, text in rows:
        message += textwrap.wrap(
            str(text), 96, initial_indent=f"  {name:9} ", subsequent_indent=" " * 12
        ) or [f"  {name}"]
    kept = " Your last right answer is still kept." if has_part(target.path) else ""
    return Outcome("wrong", "\n".join([*message, *lines, GOES_ON + kept]))


def _learner_lines(error: BaseException, filename: str) -> list[str]:
    """The traceback, of the learner's own lines alone."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == filename]
    shown = frames if len(frames) <= 6 else [*frames[:3], *frames[-3:]]
    return [line for frame in shown for line in _line(filename, frame.lineno or 1)]


def _line(filename: str, number: int) -> list[str]:
    return [f"  your line {number}:  {linecache.getline(filename, number).strip()}"]


def code_of(function: Any) -> CodeType | None:
    """The code of a function, under its decorators if they say what they wrap."""
    if isinstance(function, property):
        function = function.fget
    code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
    return code


@contextmanager
def watch_returns(code: CodeType | None, lines: list[int]) -> Iterator[None]:
    """Note in `lines` at which line the code last returned."""

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "return" and frame.f_code is code:
            lines[:] = [frame.f_lineno]

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def seeded() -> Iterator[None]:
    """The same random numbers in every check; outside they go on as if none were drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
