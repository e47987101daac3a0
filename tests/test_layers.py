"""The package is the syllabus: a module imports only from its own stage or an earlier one."""

import ast
from functools import cache
from pathlib import Path

import pytest

import nanoteach
from nanoteach.stages import COURSE

PACKAGE = Path(nanoteach.__file__).parent

STAGE_0 = ("config", "hardware", "cost_model")
# What stands on all stages, and so may import anything. A folder counts as one module.
ALL = (
    "__init__",
    "__main__",
    "backends",
    "bench",
    "cli",
    "course",
    "detokenizer",
    "engine",
    "ladder",
    "reference",
    "results",
    "stages",
)
LAST = 99
SERVING = 10  # stands on the whole engine, not on single stages

Places = dict[str, int]


def places() -> Places:
    """The stage of every module. Raises ValueError where two claim the same one."""
    listed = [(name, 0) for name in STAGE_0]
    listed += [(name, stage.number) for stage in COURSE for name in stage.modules]
    listed += [(name, LAST) for name in ALL]
    result = dict(listed)
    if len(result) < len(listed):
        names = [name for name, _ in listed]
        raise ValueError(f"listed twice: {sorted({n for n in names if names.count(n) > 1})}")
    return result


@cache
def modules() -> dict[str, str]:
    """The source of every module of the package; those of a folder are one."""
    sources: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("").parts[0]
        sources[name] = sources.get(name, "") + path.read_text(encoding="utf-8") + "\n"
    return sources


def imports(source: str) -> set[str]:
    """The modules of the package that a source imports, wherever in it that happens."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"line {node.lineno} has a relative import: name the package")
            # `from nanoteach import x` may mean the module x, or a name in nanoteach itself.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    paths = [name.split(".") for name in found]
    names = {[*path, "__init__"][1] for path in paths if path[0] == "nanoteach"}
    return {name if name in modules() else "__init__" for name in names}


def violations(sources: dict[str, str], stage_of: Places) -> list[str]:
    """Imports from a later stage, in words. A module without a place may not be imported."""

    def highest(name: str) -> int:
        return LAST if stage_of[name] == SERVING else stage_of[name]

    return [
        f"{name} (stage {stage_of[name]}) imports {other} (stage {stage_of.get(other, LAST)})"
        for name, source in sources.items()
        for other in sorted(imports(source))
        if name in stage_of and stage_of.get(other, LAST) > highest(name)
    ]


def test_every_module_has_one_place() -> None:
    assert set(places()) == set(modules()), (
        "a new module belongs in its stage's `modules` in stages.py, or, if it needs all stages, "
        "in ALL above"
    )


def test_a_module_in_two_places_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_layers.ALL", (*ALL, "scheduler"))
    with pytest.raises(ValueError, match="listed twice: .*scheduler"):
        places()


def test_no_module_imports_from_a_later_stage() -> None:
    assert violations(modules(), places()) == []


@pytest.mark.parametrize(
    "line, other",
    [
        ("from nanoteach.scheduler import Scheduler", "scheduler"),
        ("import nanoteach.scheduler", "scheduler"),
        ("import nanoteach.scheduler as s", "scheduler"),
        ("from nanoteach import scheduler", "scheduler"),
        ("from nanoteach import Engine", "__init__"),
        ("import nanoteach", "__init__"),
        ("def f():\n    from nanoteach.scheduler import Scheduler", "scheduler"),
        ("if TYPE_CHECKING:\n    from nanoteach.scheduler import Scheduler", "scheduler"),
    ],
)
def test_an_import_from_a_later_stage_is_found(line: str, other: str) -> None:
    sources = dict(modules())
    sources["block_manager"] += "\n" + line  # stage 3
    found = violations(sources, places())
    assert [problem for problem in found if problem.startswith("block_manager")] == [
        f"block_manager (stage 3) imports {other} (stage {places()[other]})"
    ]


@pytest.mark.parametrize(
    "line", ["from nanoteach.config import ModelConfig", "import torch", "import nanoteachers"]
)
def test_other_imports_are_fine(line: str) -> None:
    sources = {"block_manager": modules()["block_manager"] + "\n" + line}
    assert violations(sources, places()) == []


@pytest.mark.parametrize("line", ["from .config import ModelConfig", "from . import config"])
def test_a_relative_import_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="relative import"):
        imports(line)
