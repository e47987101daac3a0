"""Rows of the embedding, for tokens of which some are only just being sampled.

The step after this one is prepared while this one still runs. A decode's input is then a promise:
-1 - i stands for the token that request i of the running step will have sampled. It is looked up
here, on the device, so the host never waits for it.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoteach.triton_launch import options, wait_for_inputs


@triton.jit
def embed_kernel(
    input_ids, sampled, embedding, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Program (token)."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    token = tl.load(input_ids + row)
    if token < 0:
        token = tl.load(sampled - 1 - token)
    mask = columns < SIZE
    value = tl.load(embedding + token.to(tl.int64) * SIZE + columns, mask=mask)
    tl.store(out + row * SIZE + columns, value, mask=mask)


def embed(input_ids: Tensor, sampled: Tensor, embedding: Tensor, pdl: bool = False) -> Tensor:
    """Hidden states `[num_tokens, hidden]` of int32 ids; negative ones are rows of `sampled`."""
    size = embedding.shape[1]
    out = embedding.new_empty(input_ids.shape[0], size)
    embed_kernel[(input_ids.shape[0],)](
        input_ids, sampled, embedding, out, SIZE=size, BLOCK=triton.next_power_of_2(size),
        num_warps=4, **options(pdl),
    )  # fmt: skip
    return out
