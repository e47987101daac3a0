"""What a check is made of. README.md in this folder shows how to write one.

Knows: how to compare what came with what was expected, and how to say it. Does not know: any
exercise; those are in `checks_NN.py`, one file for each notebook.
"""

import copy
import importlib
import math
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoteach.course.parts import Function, resolve
from nanoteach.stages import COURSE, STAGES

Likely = str | Callable[[Any], str | None] | Sequence[tuple[Any, str]] | None
"""The likely mistake: words; or a list of (wrong result, words); or a function of what came."""


class Wrong(Exception):
    """A wrong answer: in which case, what was expected, what came, and the likely mistake."""

    def __init__(self, case: str, expected: Any, got: Any, hint: str | None = None) -> None:
        super().__init__(f"{case}: expected {expected}, got {got}. {hint or ''}")
        self.case, self.expected, self.got, self.hint = case, expected, got, hint


@dataclass(frozen=True)
class Check:
    """One exercise. `stages`: those whose engine runs the target. `run` raises Wrong."""

    target: str
    notebook: int
    title: str
    stages: tuple[int, ...]
    run: Callable[[Function], None]
    seconds: float = 10.0


ALL_STAGES = tuple(stage.number for stage in STAGES)

_checks: dict[str, Check] = {}


def check(
    target: str, title: str, stages: Sequence[int] = ALL_STAGES, seconds: float = 10.0
) -> Callable[[Callable[[Function], None]], Callable[[Function], None]]:
    """Register a check, in a file `checks_NN.py`. While it runs, its candidate is in place."""

    def register(run: Callable[[Function], None]) -> Callable[[Function], None]:
        resolve(target)
        notebook = int(run.__module__.rpartition("_")[2])
        _checks[target] = Check(target, notebook, title, tuple(stages), run, seconds)
        return run

    return register


def all_checks() -> list[Check]:
    """Every exercise, notebook by notebook, in the order of the files."""
    package = importlib.import_module("nanoteach.course")
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        if module.startswith("checks_"):
            importlib.import_module(f"nanoteach.course.{module}")
    return sorted(_checks.values(), key=lambda check: check.notebook)


def check_of(target: str) -> Check:
    """The check of one target. Its module's own notebook is looked at before all others."""
    if target not in _checks:
        module = target.split(".")[1]
        number = next((stage.number for stage in COURSE if module in stage.modules), 0)
        name = f"nanoteach.course.checks_{number:02d}"
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
        if target not in _checks:
            all_checks()
    if target not in _checks:
        raise ValueError(f"{target!r} is no exercise; these are: {', '.join(sorted(_checks))}")
    return _checks[target]


# --- for writers of checks ---------------------------------------------------------------------

NOTHING_RETURNED = "Your function returned None: is a `return` missing?"

_case = ""
_if_raised: str | None = None


def case(name: str, if_raised: str | None = None) -> None:
    """From here on, what goes wrong goes wrong in this case.

    if_raised: the likely mistake, should the learner's code raise in it.
    """
    global _case, _if_raised
    _case, _if_raised = name, if_raised


def current_case() -> tuple[str, str | None]:
    """The case that was last named, and the likely mistake if something is raised in it."""
    return _case, _if_raised


def expect(
    name: str,
    function: Function,
    *args: Any,
    to_be: Any,
    likely: Likely = None,
    if_raised: str | None = None,
) -> None:
    """Call a function on copies of `args` and compare its result; raises Wrong."""
    case(name, if_raised)
    got = function(*copy.deepcopy(args))
    if got is None and to_be is not None:
        raise Wrong(name, describe(to_be), "None", NOTHING_RETURNED)
    expect_equal(name, to_be, got, likely)


def expect_equal(name: str, expected: Any, got: Any, likely: Likely = None) -> None:
    """Raise Wrong unless the two are equal; floats, and tensors of them, to 5 digits."""
    case(name)
    if not equal(expected, got):
        raise Wrong(name, *describe_both(expected, got), hint(got, likely))


def equal(expected: Any, got: Any) -> bool:
    """Equal, with a tolerance for floats. A list may come as a tuple."""
    if isinstance(expected, Tensor):
        if not isinstance(got, Tensor) or expected.shape != got.shape:
            return False
        if expected.dtype.is_floating_point:
            return torch.allclose(expected.double(), got.double(), rtol=1e-5, atol=1e-5)
        return torch.equal(expected, got.to(expected.dtype))
    if isinstance(got, Tensor):
        return (
            got.numel() == 1
            and not isinstance(expected, (list, tuple))
            and equal(expected, got.item())
        )
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(got, (list, tuple))
            and len(expected) == len(got)
            and all(equal(e, g) for e, g in zip(expected, got, strict=True))
        )
    if isinstance(expected, float):
        return isinstance(got, (int, float)) and math.isclose(expected, got, rel_tol=1e-5)
    return bool(expected == got)


def hint(got: Any, likely: Likely) -> str | None:
    """The words that fit what came. A function of what came is never asked about None."""
    if likely is None or isinstance(likely, str):
        return likely
    if callable(likely):
        return None if got is None else likely(got)
    return next((words for wrong, words in likely if equal(wrong, got)), None)


def describe(value: Any, digits: int = 4) -> str:
    """A value in one line, shortened; floats to `digits` digits."""
    if isinstance(value, Tensor) and value.numel() > 16:
        return f"a tensor of shape {list(value.shape)}, {value.dtype}"
    if isinstance(value, Tensor):
        return f"tensor({_listed(value.tolist(), digits)}), shape {list(value.shape)}"
    text = f"{value:,}" if type(value) is int else _listed(value, digits)
    return text if len(text) <= 200 else text[:197] + "..."


def _listed(value: Any, digits: int) -> str:
    """As `repr` has it, but for the digits of floats, however deep in lists."""
    if type(value) is float and math.isfinite(value):
        large = 1e4 <= abs(value) < 1e15
        text = f"{value:,.{digits - 4}f}" if large else f"{value:,.{digits}g}"
        return text if set(text) & set(".e") else text + ".0"
    if type(value) is list:
        return "[" + ", ".join(_listed(part, digits) for part in value) + "]"
    if type(value) is tuple:
        inside = ", ".join(_listed(part, digits) for part in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)


def describe_both(expected: Any, got: Any) -> tuple[str, str]:
    """Two values that differ, with as many digits as it takes to see that they do.

    For large tensors of one shape, with the first place where they differ.
    """
    texts = [(describe(expected, digits), describe(got, digits)) for digits in (4, 6, 9, 17)]
    wanted, text = next((pair for pair in texts if pair[0] != pair[1]), texts[0])
    if isinstance(expected, Tensor) and isinstance(got, Tensor) and expected.shape == got.shape:
        differ = ~torch.isclose(expected.double(), got.double(), rtol=1e-5, atol=1e-5)
        if expected.numel() > 16 and differ.any():
            place = tuple(differ.nonzero()[0].tolist())
            text += (
                f"; {int(differ.sum())} values differ, first at {list(place)}: "
                f"expected {expected[place].item():.5g}, got {got[place].item():.5g}"
            )
    return wanted, text
