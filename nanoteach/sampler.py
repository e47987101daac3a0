"""From scores to tokens: the best one, or one drawn at a temperature.

A draw is a race. Every token gets a time from an exponential distribution whose rate is its
probability, and the earliest wins: token i with probability softmax(logits / temperature)[i]. In
logarithms that is the largest of logit / temperature - log(-log(u)), with u uniform noise; no sum
over the vocabulary is needed (the Gumbel-max trick, Gumbel, 1954).

The noise is a function of the request's seed, the token's position and its id alone, by a
counter-based generator (Philox, Salmon et al., 2011). So a request draws the same tokens whatever
runs beside it, in any batch, chunked or preempted. The GPU's kernel computes the same function.
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

MASK = 2**32 - 1
ROUNDS = 10


class Draw(NamedTuple):
    """How one token is drawn: at a temperature of 0 it is not, and the best one is taken."""

    temperature: float
    seed: int
    position: int


def greedy(logits: Tensor) -> Tensor:
    """The highest-scoring token of each row: `[rows, vocab_size]` to `[rows]`."""
    return logits.argmax(dim=-1)


def sample(logits: Tensor, draws: SequenceOf[Draw]) -> Tensor:
    """The next token of each row: `[rows, vocab_size]` and a draw for each, to `[rows]`."""
    if not any(draw.temperature for draw in draws):
        return greedy(logits)
    columns = zip(*draws, strict=True)
    return race(logits, *(torch.tensor(column, device=logits.device) for column in columns))


def race(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """As `sample`, with the draws by columns, `[rows]` each. A token of score -inf never wins."""
    tokens, drawn = greedy(logits), temperatures.nonzero().squeeze(1)
    if len(drawn):
        temperatures, seeds, positions = (
            column[drawn].unsqueeze(1) for column in (temperatures, seeds, positions)
        )
        u = uniform(seeds, positions, torch.arange(logits.shape[-1], device=logits.device))
        noise = -torch.log(-torch.log(u))
        tokens[drawn] = greedy(logits[drawn].float() / temperatures + noise)
    return tokens


def uniform(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Noise above 0 and below 1, float32 `[rows, vocab_size]`; seeds, positions `[rows, 1]`."""
    bits = philox(seeds, tokens, positions)
    folded = torch.where(bits < 2**31, bits, MASK - bits)
    # Just under 2**-31, so that rounding never makes it 1.
    return (folded.float() * 4.6566127342e-10).clamp(min=1e-10)


def philox(key: Tensor, counter_0: Tensor, counter_1: Tensor) -> Tensor:
    """The first 32 bits of Philox-4x32-10, int64, for 32-bit keys and counters."""
    key_0, key_1 = key, torch.zeros_like(key)
    c0, c1 = counter_0 + 0 * counter_1, counter_1 + 0 * counter_0  # of the same shape
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(ROUNDS):
        (low_0, high_0), (low_2, high_2) = multiply(c0, 0xD2511F53), multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_2 ^ c1 ^ key_0, low_2, high_0 ^ c3 ^ key_1, low_0
        key_0, key_1 = key_0 + 0x9E3779B9 & MASK, key_1 + 0xBB67AE85 & MASK
    return c0


def multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of a product of two 32-bit numbers, within 63-bit arithmetic."""
    low, high = (a & 0xFFFF) * b, (a >> 16) * b
    middle = high + (low >> 16)
    return (middle << 16 | low & 0xFFFF) & MASK, middle >> 16
