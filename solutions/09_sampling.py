"""Notebook 09, answered. `python solutions/09_sampling.py` checks all of it."""

import torch
from torch import Tensor

from nanoteach.course import exercise
from nanoteach.sampler import uniform
from nanoteach.sampling_filters import Scores
from nanoteach.types import MAX_LOGPROBS

# An arrival time is -log(u) / p. Its logarithm is log(-log(u)) - log(p), and the earliest has the
# largest of the opposite, log(p) - log(-log(u)). The scores over the temperature are log(p) but for
# a number that is the same in the whole row, so that no softmax is needed. Common wrong turns: the
# noise divided by the temperature as well; one logarithm too few; the sign; the noise of one row
# for all; and a division by a temperature of 0.


@exercise("nanoteach.sampler.race")
def race(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The next token of each row."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    u = uniform(seeds[:, None], positions[:, None], tokens)
    hot = (temperatures > 0)[:, None]
    heat = torch.where(hot, temperatures[:, None], 1.0)
    noise = torch.where(hot, -torch.log(-torch.log(u)), 0.0)
    return (logits.float() / heat + noise).argmax(dim=1)


# Every row has a limit of its own, which needs a dimension to meet the places. Common wrong turns:
# one place too many, since they are counted from 0; and 0, which means all, taken at its word.


@exercise("nanoteach.sampling_filters.keep_top_k")
def keep_top_k(top_k: Tensor, vocab_size: int) -> Tensor:
    """Which places of a sorted row top-k leaves."""
    limit = torch.where(top_k == 0, vocab_size, top_k)
    return torch.arange(vocab_size, device=top_k.device)[None, :] < limit[:, None]


# A token goes when those before it have enough without it. The running sum holds the token itself,
# so the sum before it is one place to the left. Common wrong turns: the sum with the token, which
# drops the one that reaches top_p, and the best one where it has more than top_p alone; and a 1
# that cuts off rare tokens, since sums of float32 reach 1 before the end.


@exercise("nanoteach.sampling_filters.keep_top_p")
def keep_top_p(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Which places of a sorted row top-p leaves."""
    limit = top_p[:, None]
    reached = probabilities.cumsum(dim=1) >= limit
    keep = torch.ones_like(reached)
    keep[:, 1:] = ~reached[:, :-1]
    return keep | (limit >= 1)


# In the sorted row everything is a place: the best ones are 0, 1, 2, ..., and the chosen token is
# where `order` has it. Common wrong turns: places given for tokens, or tokens used as places; ranks
# from 0; a softmax over the few that are told, which makes them add up to 1.


@exercise("nanoteach.sampling_filters.score")
def score(ranked: Tensor, order: Tensor, tokens: Tensor) -> Scores:
    """Log probabilities of `tokens` and of the best."""
    rows, vocab_size = ranked.shape
    place = torch.nonzero(order == tokens[:, None])[:, 1:]
    best = torch.arange(min(MAX_LOGPROBS, vocab_size), device=ranked.device)
    places = torch.cat([place, best.repeat(rows, 1)], dim=1)
    logprobs = ranked - ranked.logsumexp(dim=1, keepdim=True)
    return Scores(order.gather(1, places), places + 1, logprobs.gather(1, places))
