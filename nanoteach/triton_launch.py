"""Stage 7. How the kernels are launched.

A kernel may start while the one before it still runs (programmatic dependent launch, Hopper): it
loads what nobody writes, its weights, then waits until the results of the one before are there.
In a chain of kernels of 3 µs each this hides most of a launch. Several kernels may be started in
this way at once, so what one loads before its wait must be written by no kernel of the same step.
"""

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Let the next kernel start, then wait until the kernel before has written its results."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@functools.cache
def has_dependent_launch() -> bool:
    """Whether the GPU can overlap the start of a kernel with the end of the one before."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    known = hasattr(tl.extra.cuda, "gdc_wait")  # Triton 3.4 and later
    return not interpreted and known and torch.cuda.get_device_capability() >= (9, 0)


def options(pdl: bool) -> dict[str, Any]:
    """Launch options, `PDL` among them."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
