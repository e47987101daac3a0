"""Stage 9. Which tokens may be drawn, and how likely the chosen one was.

    logits -> sorted -> / temperature -> top-k -> top-p -> race -> token
                 \\-> log-softmax -> logprobs and ranks

One descending sort serves all of it: after it, top-k and top-p each keep the beginning of a row,
and a token's rank is its place. What may not be drawn gets a score of -inf and runs in the race of
stage 1 with the others. The noise of a token is the same with the filters as without, so they
take nothing from what a seed promises.

Knows: rows of scores and what each row asks for. Does not know: batches, graphs, where scores
come from.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from nanoteach import model_runner
from nanoteach.model_runner import draw
from nanoteach.sampler import race
from nanoteach.sequence import Sequence
from nanoteach.types import MAX_LOGPROBS, Logprob

Race = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`sampler.race`, or another that draws the same."""


class Rules(NamedTuple):
    """What each row asks for, `[rows]` each. seeds, positions, top_k are int64, others float32."""

    seeds: Tensor
    positions: Tensor
    top_k: Tensor
    temperatures: Tensor
    top_p: Tensor


class Scores(NamedTuple):
    """Of each row's chosen token, and after it of the best ones: `[rows, 1 + best]` each."""

    tokens: Tensor
    ranks: Tensor
    logprobs: Tensor


def columns(seqs: list[Sequence]) -> tuple[list[list[int]], list[list[float]]]:
    """What requests ask for, as the columns of `Rules`: the whole numbers, then the others."""
    draws, params = [draw(seq) for seq in seqs], [seq.params for seq in seqs]
    return (
        [[d.seed for d in draws], [d.position for d in draws], [p.top_k for p in params]],
        [[d.temperature for d in draws], [p.top_p for p in params]],
    )


# --- on sorted rows ----------------------------------------------------------------------------


def keep_top_k(top_k: Tensor, vocab_size: int) -> Tensor:
    """Which places of a sorted row top-k leaves, bool `[rows, vocab_size]`; 0 leaves them all."""
    limit = top_k.unsqueeze(1)
    return (torch.arange(vocab_size, device=top_k.device) < limit) | (limit == 0)


def keep_top_p(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Which places of a sorted row top-p leaves, bool, as `probabilities` `[rows, vocab_size]`.

    A token stays while all before it have less than top_p between them. So the one that reaches
    top_p stays, and the first always does. 1 leaves them all.
    """
    before = probabilities.cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = -1
    limit = top_p.unsqueeze(1)
    return (before < limit) | (limit >= 1)  # their sum may pass 1 by rounding


def filter_ranked(ranked: Tensor, rules: Rules) -> Tensor:
    """Sorted scores `[rows, vocab_size]`, with -inf in the place of what may not be drawn."""
    left = ranked.masked_fill(~keep_top_k(rules.top_k, ranked.shape[1]), -torch.inf)
    temperatures = rules.temperatures.masked_fill(rules.temperatures == 0, 1)
    scaled = left / temperatures.unsqueeze(1)
    return left.masked_fill(~keep_top_p(scaled.softmax(dim=-1), rules.top_p), -torch.inf)


def score(ranked: Tensor, order: Tensor, tokens: Tensor) -> Scores:
    """Log probabilities before temperature and filters, of `tokens` `[rows]` and of the best.

    ranked: sorted scores `[rows, vocab_size]`; order: the token in each place.
    """
    own = (order == tokens.unsqueeze(1)).int().argmax(dim=-1, keepdim=True)
    best = torch.arange(min(MAX_LOGPROBS, ranked.shape[1]), device=ranked.device)
    places = torch.cat([own, best.expand(len(own), -1)], dim=1)
    logprobs = ranked.log_softmax(dim=-1)
    return Scores(order.gather(1, places), places + 1, logprobs.gather(1, places))


# --- all together ------------------------------------------------------------------------------


def pick(logits: Tensor, rules: Rules, race: Race) -> tuple[Tensor, Scores]:
    """The next token of each row, `[rows]`, and its scores; logits `[rows, vocab_size]`.

    Of equal scores the lower token id is the better.
    """
    logits = logits.float()
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    left = torch.empty_like(logits).scatter_(1, order, filter_ranked(ranked, rules))
    tokens = race(left, rules.temperatures, rules.seeds, rules.positions).long()
    return tokens, score(ranked, order, tokens)


def read(scores: Scores, counts: SequenceOf[int | None]) -> list[dict[int, Logprob] | None]:
    """For each row its token's and the `count` best ones' logprobs, by token; None for None."""
    rows = zip(*(column.tolist() for column in scores), counts, strict=True)
    return [
        None
        if count is None
        else {
            token: Logprob(logprob, rank)
            for token, rank, logprob in zip(
                tokens[: 1 + count], ranks[: 1 + count], logprobs[: 1 + count], strict=True
            )
        }
        for tokens, ranks, logprobs, count in rows
    ]


def choose(logits: Tensor, seqs: list[Sequence]) -> list[int]:
    """As `model_runner.choose`, with filters, and with the logprobs added to the requests."""
    rows = [row for row, seq in enumerate(seqs) if not seq.params.is_plain]
    if not rows:
        return model_runner.choose(logits, seqs)
    plain = [row for row, seq in enumerate(seqs) if seq.params.is_plain]
    drawn = model_runner.choose(logits[plain], [seqs[row] for row in plain])
    tokens = dict(zip(plain, drawn, strict=True))
    wanting = [seqs[row] for row in rows]
    whole, others = (torch.tensor(values, device=logits.device) for values in columns(wanting))
    picked, scores = pick(logits[rows], Rules(*whole, *others), race)
    tokens |= dict(zip(rows, picked.tolist(), strict=True))
    told = read(scores, [seq.params.logprobs for seq in wanting])
    for seq, logprobs in zip(wanting, told, strict=True):
        if logprobs is not None:
            seq.logprobs.append(logprobs)
    return [tokens[row] for row in range(len(seqs))]
