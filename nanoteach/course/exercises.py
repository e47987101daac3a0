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
from types import FrameType
from typing import Any, Literal

import torch

from nanoteach.course import parts
from nanoteach.course.checking import NOTHING_RETURNED, Wrong, case, check_of, current_case
from nanoteach.course.display import in_notebook
from nanoteach.course.limits import TimeUp, time_limit
from nanoteach.course.parts import Function, Target
from nanoteach.course.progress import has_part, save_part, saved_part

GOES_ON = "The notebook goes on with the package's version."


@dataclass(frozen=True)
class Outcome:
    """What became of an answer, and the words for it."""

    state: Literal["absent", "wrong", "right"]
    message: str


def exercise(target: str) -> Callable[[Function], Any]:
    """Decorator over an answer: check it, and put it in the place of `target` if it is right.

    The decorated name becomes what now stands there: the answer, or the package's version. In a
    script, `python solutions/NN_name.py` for one, nothing is kept.
    """

    def decorate(function: Function) -> Any:
        lines, first_line = inspect.getsourcelines(function)
        filename = function.__code__.co_filename
        print(submit(target, "".join(lines), filename, first_line, keep=in_notebook()).message)
        return parts.live().get(target, parts.package_version(target))

    return decorate


def submit(
    path: str, source: str, filename: str = "", first_line: int = 1, keep: bool = True
) -> Outcome:
    """Check the answer in `source`; if it is right, install it, and save it if `keep`."""
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
        if keep:
            save_part(path, source)
        else:
            return Outcome("right", f"{target.short}: right. (Kept only when run in a notebook.)")
    elif outcome.state == "wrong":
        parts.uninstall(path)
    return outcome


def _absent(target: Target) -> Outcome:
    """Nothing was written, so a right answer of before takes its place again."""
    if target.path not in parts.live() and (kept := saved_part(target.path)):
        parts.install(target.path, kept)
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
    if wanted := _other_arguments(target, function):
        rows = [
            ("expected", f"def {target.name}{wanted}"),
            ("got", f"def {target.name}{_arguments(function)}"),
            ("likely", "Keep the stub's arguments: their names, order and defaults."),
        ]
        return _wrong(target, "its arguments changed", rows, [])
    case("the first call")
    returned: list[Any] = []
    try:
        with (
            parts.installed({target.path: function}),
            watch_returns(function) as returned,
            seeded(),
            time_limit(check.seconds, filename),
        ):
            check.run(function)
    except NotImplementedError:
        return _absent(target)
    except Wrong as wrong:
        rows = [("case", wrong.case), ("expected", wrong.expected), ("got", wrong.got)]
        forgot = str(wrong.got) == "None" and returned == [None] and _gives_a_value(target)
        if likely := NOTHING_RETURNED if forgot else wrong.hint:
            rows.append(("likely", likely))
        return _wrong(target, "not right yet", rows, [])
    except TimeUp as error:
        lines = _learner_lines(error, filename)
        rows = [
            ("case", current_case()[0]),
            ("expected", f"an answer within {check.seconds:g} seconds"),
            ("got", "none: it was stopped"),
            ("likely", "A loop that never ends. Does what its condition reads change inside it?"),
        ]
        return _wrong(target, "took too long", rows, lines)
    except (Exception, SystemExit) as error:
        lines = _learner_lines(error, filename)
        name, if_raised = current_case()
        text = str(error).replace("make.<locals>.", "")  # see parts.build
        rows = [("case", name), ("got", f"{type(error).__name__}: {text}")]
        if not lines:
            rows.append(("likely", "The package's code failed on what your function returned."))
        elif about := _about_names(error, target):
            rows += about
        elif if_raised:
            rows.append(("likely", if_raised))
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
            f"A typo, or a name of the notebook's. Your function runs inside {where} and sees what "
            "that module imports and defines; import or define what else you need inside it.",
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
    numbers = list(dict.fromkeys(frame.lineno or 1 for frame in frames))
    shown = numbers if len(numbers) <= 6 else [*numbers[:3], *numbers[-3:]]
    return [f"  your line {n}:  {linecache.getline(filename, n).strip()}" for n in shown]


def _plain(function: Any) -> Any:
    """The function under its decorators, if they say what they wrap."""
    if isinstance(function, property):
        function = function.fget
    elif isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    return inspect.unwrap(function)


def _arguments(function: Any) -> inspect.Signature:
    """What a function takes, without annotations."""
    signature = inspect.signature(_plain(function))
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=signature.empty)


def _other_arguments(target: Target, function: Any) -> inspect.Signature | None:
    """The package's arguments, if an answer could not be called as the package's is.

    More arguments than those, with defaults, do no harm.
    """
    package = _arguments(parts.package_version(target.path))
    wanted, got = (list(s.parameters.values()) for s in (package, _arguments(function)))
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in got):
        return None
    more = got[len(wanted) :]
    same = got[: len(wanted)] == wanted and all(p.default is not p.empty for p in more)
    return None if same else package


def _gives_a_value(target: Target) -> bool:
    """Whether the package's version holds a `return` with a value."""
    source = parts.source_of(parts.package_version(target.path))
    nodes = ast.walk(parts.definition(source))
    return any(isinstance(node, ast.Return) and node.value for node in nodes)


@contextmanager
def watch_returns(function: Any) -> Iterator[list[Any]]:
    """A list that holds what the function last returned, once it has."""
    last: list[Any] = []
    code = getattr(_plain(function), "__code__", None)

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "return" and frame.f_code is code:
            last[:] = [argument]

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield last
    finally:
        sys.setprofile(before)


@contextmanager
def seeded() -> Iterator[None]:
    """The same random numbers in every check; outside they go on as if none were drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
