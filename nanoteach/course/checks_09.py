"""Checks of notebook 09: the race, top-k, top-p, logprobs. By hand, or token by token."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanoteach.course.checking import (
    Wrong,
    case,
    check,
    current_case,
    describe,
    equal,
    expect,
    expect_equal,
)
from nanoteach.sampler import uniform
from nanoteach.sampling_filters import Scores
from nanoteach.types import MAX_LOGPROBS


@check("nanoteach.sampler.race", "The race that draws a token", (8, 9))
def check_race(race: Callable[..., Tensor]) -> None:
    """Arrival times, token by token: -log(u) / probability, and the earliest wins."""
    for name, temperatures, unlikely in (
        ("one row at a temperature of 1", [1.0], False),
        ("24 rows at a temperature of 1", [1.0] * 24, False),
        ("24 rows at temperatures of 0.5 and 3", [0.5, 3.0] * 12, False),
        ("6 rows at a temperature of 0", [0.0] * 6, False),
        ("24 rows, every second one at a temperature of 0", [0.0, 2.0] * 12, False),
        ("24 rows in which some scores are -inf", [1.0, 2.0] * 12, True),
    ):
        rows = len(temperatures)
        logits = 2 * torch.randn(rows, 9)
        if unlikely:
            logits[:, ::2] = -torch.inf
        heat = torch.tensor(temperatures)
        if not heat.any():  # two that are almost level, which noise over a tiny divisor decides
            logits[:, 4:6] = 6 + torch.tensor([0, 2e-6])
        seeds, positions = torch.randint(0, 2**32, (rows,)), torch.randint(0, 5000, (rows,))
        u = uniform(seeds[:, None], positions[:, None], torch.arange(9))
        right = torch.tensor(
            [_first(logits[i].tolist(), temperatures[i], u[i].tolist()) for i in range(rows)]
        )
        divisor = torch.where(heat == 0, 1.0, heat)[:, None]
        gumbel, cold = -torch.log(-torch.log(u)), (heat == 0)[:, None]
        first_row = uniform(seeds[:1, None], positions[:1, None], torch.arange(9))

        def won(scores: Tensor, cold: Tensor = cold, logits: Tensor = logits) -> Tensor:
            return torch.where(cold, logits, scores).argmax(-1)

        likely = [
            (logits.argmax(-1), "Every row has its best token: where is the noise?"),
            (won(logits + gumbel),
             "Divide the scores by the row's temperature, and not the noise. Where both are "
             "divided, or neither, the same tokens win."),
            (won(logits * divisor + gumbel), "A high temperature makes the scores smaller."),
            (won(logits / divisor - gumbel),
             "The sign of the noise: a small arrival time is to give a large number."),
            *[(won(logits / divisor + time),
               "-log(u) is an arrival time. Its logarithm belongs to the scores, which are "
               "logarithms.")
              for time in (torch.log(u), -torch.log(u))],
            (won(logits / divisor + torch.log(-torch.log(u))),
             "The sign of the noise: a small arrival time is to give a large number."),
            (won(logits / divisor + u), "u is uniform: make an arrival time of it, -log(u)."),
            (won(logits / divisor - torch.log(-torch.log(first_row))),
             "Each row has a seed and a position of its own."),
            ((logits / heat[:, None] + gumbel).argmax(-1),
             "A temperature of 0 can't be divided by: it takes the best token."),
            ((logits + gumbel).argmax(-1),
             "A temperature of 0 takes the best token: no noise there."),
            ((logits / divisor + gumbel).argmax(-1),
             "A temperature of 0 takes the best token: no noise there."),
        ]  # fmt: skip

        def words(
            got: Any,
            likely: list[tuple[Tensor, str]] = likely,
            rows: int = rows,
            heat: Tensor = heat,
        ) -> str | None:
            if isinstance(got, Tensor) and got.shape != (rows,):
                return "One token for each row: take the argmax along the last dimension."
            if isinstance(got, Tensor) and got.dtype.is_floating_point:
                return "The winner's id is wanted, not its number: argmax."
            told = next((text for wrong, text in likely if equal(wrong, got)), None)
            if not heat.any():
                told = told or "A temperature of 0 takes the best token: no noise there."
            return told or (
                "The noise of a token is `uniform` of its row's seed, its row's position and its "
                "own id; nothing else may come in."
            )

        raised = (
            "`seeds` and `positions` are [rows]; `uniform` wants them as [rows, 1], so that they "
            "meet the token ids along the other dimension."
        )
        expect(
            name, race, logits, heat, seeds, positions, to_be=right, likely=words, if_raised=raised
        )


def _first(logits: list[float], temperature: float, u: list[float]) -> int:
    """Who arrives first, in Python's floats; at a temperature of 0 the best."""
    if not temperature:
        return logits.index(max(logits))
    rates = [math.exp((x - max(logits)) / temperature) for x in logits]
    times = [-math.log(v) / rate if rate else math.inf for v, rate in zip(u, rates, strict=True)]
    return times.index(min(times))


def _mask(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function, which may return nothing but bools: others are not inverted by `~`."""

    def called(*args: Any) -> Tensor:
        got = function(*args)
        if isinstance(got, Tensor) and got.dtype != torch.bool:
            raise Wrong(
                current_case()[0], "a tensor of torch.bool", describe(got) + f", {got.dtype}",
                "The result is a mask: True where a place stays.",
            )  # fmt: skip
        return got

    return called


@check("nanoteach.sampling_filters.keep_top_k", "What top-k leaves of a sorted row", (9,))
def check_keep_top_k(keep_top_k: Callable[[Tensor, int], Tensor]) -> None:
    """Place by place."""
    for top_k, vocab_size in (
        ([2], 5), ([3, 1, 4], 6), ([2, 0, 5, 9], 5), ([1, 2, 3, 0], 4), ([0, 0], 3),
    ):  # fmt: skip
        limits = torch.tensor(top_k)
        right = torch.tensor([[k == 0 or place < k for place in range(vocab_size)] for k in top_k])
        places = torch.arange(vocab_size)
        likely: list[tuple[Any, str]] = [
            (places <= limits[:, None], "Places are counted from 0: of 2, the places 0 and 1."),
            (places < limits[:, None], "0 leaves all of them."),
            ((places <= limits[:, None]) | (limits[:, None] == 0),
             "Places are counted from 0: of 2, the places 0 and 1."),
            (~right, "True is for what stays."),
        ]  # fmt: skip
        if len(top_k) == vocab_size:
            flat = (places < limits) | (limits == 0)
            likely += [
                (right.T, "Row i of the result belongs to top_k[i]."),
                (flat.expand(vocab_size, -1),
                 "top_k has a number for each row: give it a second dimension, unsqueeze(1)."),
            ]  # fmt: skip

        def words(
            got: Any, likely: list[tuple[Any, str]] = likely, shape: torch.Size = right.shape
        ) -> str | None:
            if isinstance(got, Tensor) and got.shape != shape:
                return "The mask is [rows, vocab_size]: `unsqueeze(1)` gives top_k its columns."
            return next((text for wrong, text in likely if equal(wrong, got)), None)

        expect(
            f"top_k {top_k}, {vocab_size} tokens", _mask(keep_top_k), limits, vocab_size,
            to_be=right, likely=words,
            if_raised="top_k has a number for each row: give it a second dimension, unsqueeze(1).",
        )  # fmt: skip


@check("nanoteach.sampling_filters.keep_top_p", "What top-p leaves of a sorted row", (9,))
def check_keep_top_p(keep_top_p: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Token by token: one is let in while those before it have less than top_p."""
    for rows, limits in (
        ([[0.5, 0.3, 0.15, 0.05]], [0.97]),
        ([[0.3, 0.28, 0.22, 0.2]], [0.29]),
        ([[0.5, 0.3, 0.15, 0.05]], [0.7]),
        ([[0.5, 0.25, 0.25]], [0.5]),  # which floats hold exactly
        ([[0.5, 0.3, 0.15, 0.05], [0.3, 0.28, 0.22, 0.2], [0.9, 0.06, 0.03, 0.01]],
         [0.9, 0.5, 0.5]),
        ([[0.4, 0.35, 0.25], [0.9, 0.06, 0.04], [0.5, 0.3, 0.2]], [0.9, 0.5, 0.6]),
        ([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]], [1.0, 0.4]),
        ([[0.5, 0.3, 0.2]], [1e-50]),
        ([[0.6, 0.4 - 2e-9, 1e-9, 1e-9]], [1.0]),
    ):  # fmt: skip
        probabilities, top_p = torch.tensor(rows), torch.tensor(limits)
        right = []
        for row, most in zip(rows, limits, strict=True):
            before, mask = 0.0, list[bool]()
            for probability in row:
                mask.append(not mask or before < most or most == 1)
                before += probability
            right.append(mask)
        total, limit = probabilities.cumsum(-1), top_p[:, None]
        before_each = total - probabilities
        reversed_total = probabilities.flip(-1).cumsum(-1).flip(-1)
        likely = [
            (total < limit, "The token that reaches top_p stays. Ask what those *before* a token "
             "have, not what they have with it."),
            (total <= limit, "The token that reaches top_p stays. Ask what those *before* a token "
             "have, not what they have with it."),
            ((total <= limit).index_fill(1, torch.tensor(0), True),
             "The token that reaches top_p stays. Ask what those *before* a token have, not what "
             "they have with it."),
            ((before_each <= limit) | (limit >= 1),
             "A token stays while those before it have less than top_p. Here they have as much."),
            ((before_each - probabilities.roll(1, -1)) < limit,
             "One too many: the token after the one that reaches top_p goes."),
            (total.roll(1, -1) < limit,
             "What `roll` brings to the front is the sum of the whole row. Before the first token "
             "there is nothing."),
            ((before_each < limit) | (limit >= 1).any(), "A 1 keeps all of its own row."),
            (reversed_total > limit, "Add up from the best one on: the row begins with it."),
            (probabilities > limit, "It is the sum that is held against top_p, not each one."),
            (probabilities >= limit, "It is the sum that is held against top_p, not each one."),
        ]  # fmt: skip

        def words(
            got: Any,
            likely: list[tuple[Tensor, str]] = likely,
            limits: list[float] = limits,
            shape: torch.Size = probabilities.shape,
        ) -> str | None:
            if isinstance(got, Tensor) and got.shape != shape:
                return "A mask for every place: [rows, vocab_size]."
            if limits == [1.0]:
                return (
                    "1 leaves them all. In float32 the first two add up to 1 already, and what "
                    "comes after them must stay all the same."
                )
            if limits[0] < 1e-6:
                return "The first token always stays, however small top_p is (here 0 in float32)."
            return next((text for wrong, text in likely if equal(wrong, got)), None)

        name = f"probabilities {rows if len(rows) == 1 else f'in {len(rows)} rows'}, top_p {limits}"
        expect(
            name, _mask(keep_top_p), probabilities, top_p, to_be=torch.tensor(right), likely=words,
            if_raised="top_p has a number for each row: give it a second dimension, unsqueeze(1).",
        )  # fmt: skip


@check("nanoteach.sampling_filters.score", "Logprobs and ranks", (9,))
def check_score(score: Callable[[Tensor, Tensor, Tensor], Scores]) -> None:
    """Of the unsorted scores, token by token, in Python's floats."""
    for name, rows, vocab_size, choice in (
        ("2 rows, 5 tokens, the best ones were drawn", 2, 5, "best"),
        ("3 rows, 6 tokens", 3, 6, "any"),
        ("2 rows, 40 tokens", 2, 40, "any"),
        ("4 rows, 30 tokens, the last ones were drawn", 4, 30, "last"),
    ):
        case(name, "A row may have fewer tokens than MAX_LOGPROBS: then all are told.")
        logits = 3 * torch.randn(rows, vocab_size) + 4
        ranked, order = logits.sort(dim=-1, descending=True, stable=True)
        places = {"best": [0] * rows, "last": [vocab_size - 1] * rows}.get(
            choice, [(7 * i + 2) % vocab_size for i in range(rows)]
        )
        tokens = torch.stack([order[i, place] for i, place in enumerate(places)])
        got = score(ranked.clone(), order.clone(), tokens.clone())
        if not isinstance(got, tuple) or len(got) != 3:
            raise Wrong(
                name, "Scores of three tensors", type(got).__name__,
                "Return a Scores: the tokens, their ranks and their logprobs.",
            )  # fmt: skip
        best = min(MAX_LOGPROBS, vocab_size)
        wanted = [[place, *range(best)] for place in places]
        sums = [math.log(sum(map(math.exp, row))) for row in logits.tolist()]
        right = Scores(
            torch.stack([order[i, row] for i, row in enumerate(wanted)]),
            torch.tensor(wanted) + 1,
            torch.tensor([
                [float(logits[i, order[i, place]]) - sums[i] for place in row]
                for i, row in enumerate(wanted)
            ]),
        )  # fmt: skip
        raw = ranked.gather(1, torch.tensor(wanted))
        likely: list[tuple[Any, str]] = [
            (torch.tensor(wanted), "Ranks are counted from 1: the best token has rank 1."
             if "ranks" in name else "These are places of the sorted row: `order` has the tokens."),
            *[(wrong, "The drawn token comes first, and the best ones after it.")
              for column in right for wrong in (column[:, 1:], column.roll(-1, 1))],
            (torch.cat([order.gather(1, order.gather(1, tokens[:, None])), right.tokens[:, 1:]], 1),
             "`order` has the token of a place. The place of a token is where `order` equals it."),
            (raw, "These are scores: log-softmax makes log probabilities of them."),
            (ranked.softmax(-1).gather(1, torch.tensor(wanted)),
             "These are probabilities: their logarithms are wanted."),
            (ranked.log_softmax(-1).gather(1, right.tokens.clamp(max=vocab_size - 1)),
             "`ranked` is sorted: look up by places in it, not by tokens."),
            (raw.log_softmax(-1), "Log-softmax goes over the whole row, not over what is picked."),
        ]  # fmt: skip
        for field, expected, own in zip(Scores._fields, right, got, strict=True):
            if isinstance(own, Tensor) and own.shape != expected.shape:
                told = next((text for wrong, text in likely if equal(wrong, own)), None)
                hint = told or (
                    "The drawn token, then the best ones: as many as MAX_LOGPROBS, or all where "
                    "the row is shorter."
                )
                raise Wrong(f"{name}: {field}", describe(expected), describe(own), hint)
            if field == "ranks":
                likely[0] = (likely[0][0], "Ranks are counted from 1: the best token has rank 1.")
            else:
                likely[0] = (
                    likely[0][0], "These are places of the sorted row: `order` has the tokens."
                )  # fmt: skip
            expect_equal(f"{name}: {field}", expected, own, likely)
