"""Notebook 01, answered. `python solutions/01_naive_generation.py` checks every answer."""

import torch

from nanoteach.course import exercise
from nanoteach.types import SamplingParams

# The mean is over the last dimension, so that each row, and each head, is scaled by itself.
# Common wrong turns: a sum in the place of the mean; eps outside the root, which shows only where
# values are small; subtracting the mean, as LayerNorm does; and squaring in float16, where 300
# squared is infinity, and the row becomes zeros.


@exercise("nanoteach.model.rms_norm")
def rms_norm(x, weight, eps: float):
    """Scale each row of x to a mean square of 1, then by `weight` (Zhang and Sennrich, 2019)."""
    wide = x.float()
    mean_square = wide.pow(2).mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight


# A turn by t takes (1, 0) to (cos t, sin t) and (0, 1) to (-sin t, cos t). The first halves of
# the heads are the a's of all points (a, b), the second halves their b's. Common wrong turns:
# pairing neighbours, which is how other models store their weights; turning clockwise, which gives
# right products of q and k and still another text than k's from another engine; and two signs that
# do not belong together, so that nothing is a turn any more.


@exercise("nanoteach.model.apply_rotary")
def apply_rotary(x, cos, sin):
    """Turn dimension i of `[num_tokens, heads, head_dim]` with dimension i + head_dim / 2."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


# A query head's group is its number divided by the size of a group. Common wrong turns: the rest
# of a division (heads dealt out in turn), and a division by the number of K/V heads, which is right
# for 4 and 2 and for no larger ratio.


@exercise("nanoteach.model.kv_head_map")
def kv_head_map(num_heads: int, num_kv_heads: int) -> list[int]:
    """The K/V head that each query head reads: neighbours share (GQA, Ainslie et al., 2023)."""
    group = num_heads // num_kv_heads
    return [head // group for head in range(num_heads)]


# Predict, append, ask. The end token is part of the output, and finish_reason knows all ways in
# which a request may end. Common wrong turns: to ask before the append, so that the end token is
# lost; to look at one end token only; to append to the caller's prompt; and to show the model only
# the last token, as if it had a cache (that is notebook 02).


@exercise("nanoteach.naive.NaiveGenerator.generate_one")
def generate_one(self, prompt, params: SamplingParams) -> list[int]:
    """The greedy loop."""
    output = []
    reason = None
    while reason is None:
        output.append(self.next_token([*prompt, *output]))
        reason = params.finish_reason(output[-1], len(output), self.eos_token_ids)
    return output
