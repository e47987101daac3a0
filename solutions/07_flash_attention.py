"""Notebook 07, answered. `python solutions/07_flash_attention.py` checks all of it."""

import torch
from torch import Tensor

from nanoteach.course import exercise
from nanoteach.tiled_attention import Running

# The largest score may change; what was added up from the old one is then too large by the same
# factor everywhere, exp(new - old). Both sums are scaled, since both are made of the same weights.
# Common wrong turns: no scaling at all, or of one sum only; the factor upside down; the tile's own
# largest score in the place of the largest so far, which overflows where an earlier one was much
# larger; and a division in each tile, which makes every tile count alike. In the first tile the
# old largest is -inf and the factor exp(-inf) = 0: no special case is needed.


@exercise("nanoteach.tiled_attention.attend_tile")
def attend_tile(running: Running, scores: Tensor, values: Tensor) -> Running:
    """The running softmax, one tile further."""
    largest = torch.maximum(running.largest, scores.max(dim=-1).values)
    shrink = torch.exp(running.largest - largest)
    weights = torch.exp(scores - largest[..., None])
    total = running.total * shrink + weights.sum(dim=-1)
    weighted = running.weighted * shrink[..., None] + torch.matmul(weights, values)
    return Running(largest, total, weighted)


# A tile belongs to one sequence, whose keys it walks. Common wrong turns: a last tile that is
# partly full and forgotten; one too many where the tokens fill their tiles exactly; numbers that
# do not begin at `first_seq`; and tokens counted through the whole step.


@exercise("nanoteach.tiled_attention.tiles_of")
def tiles_of(query_lens: list[int], first_seq: int, tile_tokens: int) -> list[tuple[int, int]]:
    """(sequence, its first new token) of every tile of `tile_tokens` new tokens."""
    tiles = []
    for i, query_len in enumerate(query_lens):
        for start in range(0, query_len, tile_tokens):
            tiles.append((first_seq + i, start))
    return tiles


# Each split's result is an average under its own sum of exponentials. In the whole it has the share
# that its sum has of all sums: a softmax of the log sums. Common wrong turns: the plain mean; the
# number of keys for a weight; `exp` of the log sums without taking off the largest, which is inf
# for scores of a few hundred; a softmax over another dimension than that of the splits.


@exercise("nanoteach.tiled_attention.combine")
def combine(outs: Tensor, log_sums: Tensor) -> Tensor:
    """One result from those of several splits."""
    weights = torch.exp(log_sums - log_sums.max(dim=0).values)
    share = weights / weights.sum(dim=0)
    return (outs * share[..., None]).sum(dim=0)


# Double as long as all three rules hold for the doubled number. The last one is asked of the number
# before it: where the parts of `splits` are longer than one tile, twice as many have something to
# do. Common wrong turns: rules asked before the doubling, so that the last one breaks them; a
# division by `num_seqs`, which is 0 in a step of prompts alone; a number that is no power of two.


@exercise("nanoteach.tiled_attention.choose_splits")
def choose_splits(num_seqs: int, num_kv_heads: int, longest: int) -> int:
    """Into how many parts a decode's history is cut: enough programs to fill a GPU, 4 an SM."""
    splits = 1
    while True:
        doubled = 2 * splits
        too_many = doubled > MAX_SPLITS or num_seqs * num_kv_heads * doubled > 528
        if too_many or splits * TILE_KEYS >= longest:
            return splits
        splits = doubled
