"""A stand-in for `triton.language`, for machines that have no Triton: notebook 07 teaches a kernel.

It runs one program after the other, on PyTorch tensors in place of registers, and has the few
operations that the notebook's kernels use. Where Triton is installed its own interpreter does this.

Knows: what the operations mean. Does not know: GPUs, or any kernel.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

float32 = torch.float32
constexpr = int  # for annotations
trans, maximum, exp, where, dot = torch.t, torch.maximum, torch.exp, torch.where, torch.matmul


class Pointer(NamedTuple):
    """Places in a tensor's memory: the tensor in one line, and a number, or a tensor of them."""

    line: Tensor
    place: Any

    def __add__(self, places: Any) -> "Pointer":
        return Pointer(self.line, self.place + places)


class Kernel:
    """What `jit` makes: `kernel[grid](...)` runs every program of the grid."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            pointers = [Pointer(a.view(-1), 0) if isinstance(a, Tensor) else a for a in args]
            for program in torch.cartesian_prod(*map(torch.arange, grid)).view(-1, len(grid)):
                _program[:] = program.tolist()
                self.function(*pointers, **constants)

        return launch


jit = Kernel
_program: list[int] = []


def program_id(axis: int) -> int:
    """Which program of the grid runs."""
    return _program[axis]


def arange(start: int, end: int) -> Tensor:
    """Whole numbers from `start` to `end - 1`."""
    return torch.arange(start, end)


def full(shape: list[int], value: float, dtype: torch.dtype) -> Tensor:
    """A tile of one value."""
    return torch.full(shape, value, dtype=dtype)


def zeros(shape: list[int], dtype: torch.dtype) -> Tensor:
    """A tile of zeros."""
    return torch.zeros(shape, dtype=dtype)


def max(x: Tensor, axis: int) -> Tensor:
    """The largest along an axis."""
    return x.amax(axis)


def sum(x: Tensor, axis: int) -> Tensor:
    """The sum along an axis."""
    return x.sum(axis)


def load(pointer: Pointer, mask: Tensor | None = None, other: float = 0) -> Tensor:
    """What stands at these places; `other` where the mask is False, and no place is looked at."""
    place = torch.as_tensor(pointer.place)
    if mask is None:
        return pointer.line[place]
    return pointer.line[place.where(mask, 0)].where(mask, other)


def store(pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    """Write to these places, but for those where the mask is False."""
    if mask is None:
        pointer.line[pointer.place] = value
    else:
        mask = mask.expand(pointer.place.shape)
        pointer.line[pointer.place[mask]] = value.expand(mask.shape)[mask]
