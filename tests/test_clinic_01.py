"""The bug clinic of notebook 01: the planted fault shows, and the folded mend mends it."""

import json
import re
from pathlib import Path

import jupytext

from nanoteach.hub import TINY
from nanoteach.loader import eos_token_ids

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "01_naive_generation.py"


def function(name: str, source: str):
    """A function out of a source that holds other things as well."""
    match = re.search(rf"^def {name}\(.*?(?=^\S|\Z)", source, flags=re.S | re.M)
    assert match, name
    namespace = {"json": json}
    exec(match[0], namespace)
    return namespace[name]


def test_the_planted_function_misses_an_end_token_and_the_mended_one_does_not():
    cells = jupytext.read(NOTEBOOK).cells
    planted = next(c.source for c in cells if "def end_tokens" in c.source)
    folded = next(c.source for c in cells if "<summary>The diagnosis" in c.source)
    mend = re.search(r"```python\n(.*?)```", folded, flags=re.S)[1]
    assert function("end_tokens", planted)(TINY) == (2,)
    assert function("mended", mend)(TINY) == eos_token_ids(TINY) == (2, 0)
