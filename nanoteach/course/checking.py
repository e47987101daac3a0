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
from nanoteach.stages import STAGES

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
        number = next((stage.number for stage in STAGES if module in stage.modules), 0)
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

_case = ""


def case(name: str) -> None:
    """From here on, what goes wrong goes wrong in this case."""
    global _case
    _case = name


def current_case() -> str:
    """The case that was last named."""
    return _case


def expect(name: str, function: Function, *args: Any, to_be: Any, likely: Likely = None) -> None:
    """Call a function on copies of `args` and compare its result; raises Wrong."""
    case(name)
    expect_equal(name, to_be, function(*copy.deepcopy(args)), likely)


def expect_equal(name: str, expected: Any, got: Any, likely: Likely = None) -> None:
    """Raise Wrong unless the two are equal; floats, and tensors of them, to 5 digits."""
    case(name)
    if not equal(expected, got):
        raise Wrong(name, describe(expected), describe_against(expected, got), hint(got, likely))


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
    """The words that fit what came."""
    if got is None:
        return "Your function returned None: is a `return` missing?"
    if likely is None or isinstance(likely, str):
        return likely
    if callable(likely):
        return likely(got)
    return next((words for wrong, words in likely if equal(wrong, got)), None)


def describe(value: Any) -> str:
    """A value in one line, shortened."""
    if isinstance(value, Tensor) and value.numel() > 16:
        return f"a tensor of shape {list(value.shape)}, {value.dtype}"
    if isinstance(value, Tensor):
        return f"tensor({value.tolist()}), shape {list(value.shape)}"
    text = f"{value:,}" if type(value) is int and abs(value) > 9999 else repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def describe_against(expected: Any, got: Any) -> str:
    """The same, and for large tensors of one shape the first place where they differ."""
    text = describe(got)
    if isinstance(expected, Tensor) and isinstance(got, Tensor) and expected.shape == got.shape:
        differ = (expected.double() - got.double()).abs() > 1e-5
        if expected.numel() > 16 and differ.any():
            place = tuple(differ.nonzero()[0].tolist())
            text += (
                f"; {int(differ.sum())} values differ, first at {list(place)}: "
                f"expected {expected[place].item():.5g}, got {got[place].item():.5g}"
            )
    return text
