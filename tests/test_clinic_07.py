"""Notebook 07: its kernels under Triton and under the stand-in, its widget, and its clinic."""

import ast
import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoteach.course import parts, pictures_07, tile_language, widgets

TEXT = next((Path(__file__).parents[1] / "notebooks").glob("07_*.py")).read_text(encoding="utf-8")
ATTEND = "nanoteach.tiled_attention.attend_tile"


def function(name: str) -> str:
    """The source of one function of the notebook, with its decorators."""
    for node in ast.walk(ast.parse(TEXT)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return "\n".join(TEXT.splitlines()[first - 1 : node.end_lineno]) + "\n"
    raise ValueError(name)


# --- the kernels --------------------------------------------------------------------------------


def stand_in(name: str, folder: Path) -> Any:
    """A kernel on the stand-in for Triton."""
    names: dict[str, Any] = {"tl": tile_language, "jit": tile_language.jit}
    exec(function(name), names)
    return names[name]


def interpreted(name: str, folder: Path) -> Any:
    """A kernel in Triton's interpreter, which reads its source from a file."""
    pytest.importorskip("triton")
    path = folder / f"{name}.py"
    path.write_text("import triton.language as tl\nfrom triton import jit\n\n\n" + function(name))
    names: dict[str, Any] = {"__name__": name}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled there")
@pytest.mark.parametrize("made", [stand_in, interpreted])
def test_the_kernels(made: Callable[[str, Path], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    heads, group, dim, size, lengths = 3, 2, 32, 4, [1, 16, 37]
    k_pool, v_pool = torch.randn(2, 40, size, heads, dim)
    tables = torch.randperm(40)[:30].view(3, 10).int()
    sizes = {"HEADS": heads, "DIM": dim, "SIZE": size, "TILE": 16}

    copied = torch.full((16, heads, dim), math.nan)
    made("copy_keys", tmp_path)[(heads,)](k_pool, tables[2], copied, 32, 37, **sizes)
    history = k_pool[tables[2].long()].flatten(0, 1)
    assert torch.equal(copied[:5], history[32:37]) and not copied[5:].any()

    q = torch.randn(3, heads * group, dim)
    out = torch.full_like(q, math.nan)
    made("decode_kernel", tmp_path)[(3, heads)](
        q, k_pool, v_pool, tables, torch.tensor(lengths, dtype=torch.int32), out,
        1 / math.sqrt(dim), 10, GROUP=group, **sizes,
    )  # fmt: skip
    for row, table, length, found in zip(q, tables.long(), lengths, out, strict=True):
        k, v = (x[table].flatten(0, 1)[:length].repeat_interleave(group, 1)
                for x in (k_pool, v_pool))  # fmt: skip
        weights = (torch.einsum("hd,thd->ht", row, k) / math.sqrt(dim)).softmax(-1)
        torch.testing.assert_close(found, torch.einsum("ht,thd->hd", weights, v))


# --- the widget ---------------------------------------------------------------------------------


def test_the_sum_is_the_same_in_any_order_and_size() -> None:
    steps = pictures_07.SoftmaxSteps([0.3, 2.0, -1.0, 4.5, 1.0, 0.0, 3.0])
    right = sum(math.exp(score - 4.5) for score in steps.scores)
    for order in steps.orders:
        for size in (1, 2, 4, 8):
            steps.order, steps.size = order, size
            largest, total, _ = steps.after(9)
            assert largest == 4.5 and total == pytest.approx(right)
    panel = widgets.Panel(
        pictures_07.SoftmaxSteps(), widgets.Control("slider", "tiles", "tiles read", range(9))
    )
    steps.order, steps.size = "as in the text", 1  # 2.0 and 4.5 are larger than all before
    assert "a larger score comes in 2 of 6 tiles" in steps.text()
    steps.order = "largest first"
    assert "a larger score comes in 0 of 6 tiles" in steps.text()
    before = panel.image.value
    panel.controls["tiles"].value = 4
    assert "After 4 of 4 tiles" in panel.words.value and panel.image.value != before
    panel.controls["tiles"].value = 0
    assert "Nothing is read yet" in panel.words.value


# --- the clinic ---------------------------------------------------------------------------------


def mended() -> str:
    """The function of the clinic with the lines of the folded answer."""
    match = re.search(r"as long as nothing overflows:\n#\n# ```python\n(.*?)# ```", TEXT, re.S)
    assert match
    lines = "".join(line[2:] + "\n" for line in match[1].splitlines())
    lazy = re.compile(r"    rescale = torch\.exp\(.*?1\.0, rescale\)\n", re.S)
    return lazy.sub(lambda _: lines, function("attend_tile_mended"))


def error(source: str, history: int) -> float:
    """How far from softmax a walk through tiles of 64 ends."""
    step = parts.build(parts.resolve(ATTEND), textwrap.dedent(source), "<clinic>")
    scores, values = torch.randn(100, history), torch.randn(history, 8)
    running: Any = (torch.full((100,), -torch.inf), torch.zeros(100), torch.zeros(100, 8))
    running = parts.resolve(ATTEND).module.__dict__["Running"](*running)
    for start in range(0, history, 64):
        running = step(running, scores[:, start : start + 64], values[start : start + 64])
    right: Tensor = scores.softmax(-1) @ values
    return float((running.weighted / running.total[:, None] - right).norm() / right.norm())


@pytest.mark.parametrize("name", ["attend_tile_lazy", "attend_tile_mended"])
def test_the_patient_is_right_in_one_tile_and_wrong_in_two(name: str) -> None:
    torch.manual_seed(0)
    assert error(function(name), 64) < 1e-5
    assert error(function(name), 80) > 0.05 and error(function(name), 1024) > 0.2


def test_both_mends() -> None:
    torch.manual_seed(0)
    always = re.sub(r"    rescale = torch\.where.*\n", "", function("attend_tile_lazy"))
    for source in (always, mended()):
        assert source != function("attend_tile_mended")
        assert max(error(source, history) for history in (64, 80, 1024)) < 1e-5
