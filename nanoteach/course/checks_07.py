"""Checks of notebook 07: softmax in tiles, splits, tiles of a prompt. Done at once, or counted."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanoteach.course.checking import Wrong, case, check, describe, equal, expect, expect_equal
from nanoteach.tiled_attention import MAX_SPLITS, TILE_KEYS, Running

FAR = float("-inf")


def _walked(scores: Tensor, values: Tensor, widths: list[int], step: Callable[..., Any]) -> Running:
    """All tiles through `step`, one after the other; its raw result."""
    running = Running(
        scores.new_full(scores.shape[:-1], FAR),
        scores.new_zeros(scores.shape[:-1]),
        scores.new_zeros(*scores.shape[:-1], values.shape[-1]),
    )
    start = 0
    for width in widths:
        part = slice(start, start + width)
        running = step(running, scores[..., part].clone(), values[..., part, :].clone())
        start += width
    return running


def _wrong_steps() -> list[tuple[Callable[..., Running], str]]:
    """What a step may do wrong, and what to say of it."""

    def step(
        total_scaled: bool = True, weighted_scaled: bool = True, upside_down: bool = False,
        only_tile: bool = False, from_zero: bool = False, mean: bool = False,
        forgets: bool = False,
    ) -> Callable[..., Running]:  # fmt: skip
        def run(running: Running, scores: Tensor, values: Tensor) -> Running:
            here = scores.amax(-1)
            largest = here if only_tile else torch.maximum(running.largest, here)
            if from_zero:
                largest = largest.clamp(min=0)
            rescale = (running.largest - largest).exp()
            if upside_down:
                rescale = (largest - running.largest).exp()
                rescale = rescale.where(running.total > 0, torch.ones(()))
            weights = (scores - largest.unsqueeze(-1)).exp()
            if forgets:
                return Running(largest, weights.sum(-1), weights @ values)
            if mean:
                weights = weights / weights.sum(-1, keepdim=True)
            return Running(
                largest,
                running.total * (rescale if total_scaled else 1) + weights.sum(-1),
                running.weighted * (rescale.unsqueeze(-1) if weighted_scaled else 1)
                + weights @ values,
            )

        return run

    return [
        (step(total_scaled=False, weighted_scaled=False),
         "What was added up before is measured from the old largest score. When the largest "
         "changes, both sums must be scaled down to the new one."),
        (step(weighted_scaled=False),
         "`total` is scaled to the new largest score, and `weighted` is not. Both are sums of the "
         "same weights."),
        (step(total_scaled=False),
         "`weighted` is scaled to the new largest score, and `total` is not. Both are sums of the "
         "same weights."),
        (step(upside_down=True),
         "A larger score makes the old weights smaller: the factor is exp(old - new), which is at "
         "most 1."),
        (step(only_tile=True),
         "The largest score so far may be one of an earlier tile: compare the two."),
        (step(forgets=True), "What was known before must go on counting: add to it."),
        (step(mean=True), "Do not divide here: that is done once, after the last tile."),
        (step(from_zero=True), "The largest score may be below 0."),
    ]  # fmt: skip


@check("nanoteach.tiled_attention.attend_tile", "The running softmax, a tile further", (7, 8))
def check_attend_tile(attend_tile: Callable[..., Running]) -> None:
    """Softmax of all scores at once, by torch, beside tiles of them."""
    for name, shape, widths, shift in (
        ("one tile of 5 keys, 2 rows", (2,), [5], 0.0),
        ("tiles of 3 and 4 keys, the larger scores in the second", (2,), [3, 4], 3.0),
        ("tiles of 3 and 4 keys, the larger scores in the first", (2,), [3, 4], -3.0),
        ("3 heads with 2 rows each, tiles of 2, 1 and 4 keys", (3, 2), [2, 1, 4], 1.0),
        ("scores of several hundred", (2,), [3, 4], 300.0),
        ("all scores below 0", (1,), [2, 2], -50.0),
    ):
        keys = sum(widths)
        tile = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths))
        scores = torch.randn(*shape, keys) + shift * (tile + (len(widths) == 2 and shift < -9))
        values = torch.randn(*shape[:-1], keys, 4)
        _compare(name, attend_tile, scores, values, widths)
    scores, values = torch.randn(2, 6), torch.randn(6, 4)
    scores[0, 2:] = FAR
    scores[1, 4:] = FAR
    _compare("tiles of 3, and keys that a row must not see", attend_tile, scores, values, [3, 3])
    name = "what is handed in"
    case(name)
    before = Running(torch.zeros(2), torch.ones(2), torch.ones(2, 4))
    kept = Running(*(part.clone() for part in before))
    attend_tile(before, torch.randn(2, 3) + 5, torch.randn(3, 4))
    for field, old, new in zip(Running._fields, kept, before, strict=True):
        if not equal(old, new):
            words = "Leave the arguments as they are, and return a new Running."
            raise Wrong(f"{name}: running.{field}", describe(old), describe(new), words)


def _compare(
    name: str, step: Callable[..., Running], scores: Tensor, values: Tensor, widths: list[int]
) -> None:
    case(name)

    def one_step(running: Running, scores: Tensor, values: Tensor) -> Running:
        after = step(running, scores, values)
        if not isinstance(after, Running):
            came = "None" if after is None else f"a {type(after).__name__}"
            raise Wrong(name, "a Running", came, "Return a Running(largest, total, weighted).")
        return after

    got = _walked(scores, values, widths, one_step)
    largest = scores.amax(-1)
    weights = (scores - largest.unsqueeze(-1)).exp()
    right = Running(largest, weights.sum(-1), weights @ values)
    wrongs = [(_walked(scores, values, widths, wrong), words) for wrong, words in _wrong_steps()]
    likely: list[tuple[Any, str]] = [
        (own, words)
        for wrong, words in wrongs
        if all(equal(a, b) for a, b in zip(wrong, got, strict=True))
        for own in got
    ]
    likely.append((right.weighted / right.total.unsqueeze(-1),
                   "Do not divide here: that is done once, after the last tile."))  # fmt: skip
    infinite = _walked(scores, values, widths, _inverted)
    nan = all(
        isinstance(own, Tensor) and torch.equal(own.isnan(), bad.isnan())
        for own, bad in zip(got, infinite, strict=True)
    )
    words = (
        "nan: from -inf to the first score, a factor exp(new - old) is infinite. The factor for "
        "what was there is exp(old - new), which is never above 1."
    )
    for field, wanted, own in zip(Running._fields, right, got, strict=True):
        expect_equal(f"{name}: {field}", wanted, own, words if nan else likely)


def _inverted(running: Running, scores: Tensor, values: Tensor) -> Running:
    """The likeliest slip: the factor upside down, and infinite in the first tile."""
    largest = torch.maximum(running.largest, scores.amax(-1))
    factor = (largest - running.largest).exp()
    weights = (scores - largest.unsqueeze(-1)).exp()
    return Running(
        largest,
        running.total * factor + weights.sum(-1),
        running.weighted * factor.unsqueeze(-1) + weights @ values,
    )


@check("nanoteach.tiled_attention.combine", "The splits of a history, added up", (7, 8))
def check_combine(combine: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Attention over the whole history, by torch, beside that of its parts."""
    for name, shape, parts in (
        ("one split", (2,), [5]),
        ("splits of 1 and 6 keys, 2 rows", (2,), [1, 6]),
        ("splits of 4, 4 and 3 keys, 3 heads with 2 rows each", (3, 2), [4, 4, 3]),
        ("splits of 4 and 3 keys, and one that is empty", (2,), [4, 3, 0]),
        ("log sums of several hundred", (2,), [3, 2]),
    ):
        keys = sum(parts)
        scores, values = 2 * torch.randn(*shape, keys), torch.randn(*shape[:-1], keys, 4)
        if "hundred" in name:
            scores = scores + 300
        right = scores.softmax(-1) @ values
        outs, sums = [], []
        for s, v in zip(scores.split(parts, -1), values.split(parts, -2), strict=True):
            outs.append(s.softmax(-1) @ v)
            sums.append(s.logsumexp(-1))
        out, log_sums = torch.stack(outs), torch.stack(sums)
        raw = log_sums.exp().unsqueeze(-1)
        shares = log_sums.unsqueeze(-1)
        likely = [
            (out.mean(0), "The splits don't count alike: one with larger scores has the larger "
             "part of the sum."),
            (out.sum(0), "These are averages already. What is the share of each in the whole?"),
            ((out * raw).sum(0), "The weights must add up to 1: divide by the sum of all."),
            ((out * shares).sum(0) / shares.sum(0), "These are the logarithms of the sums: take "
             "`exp` first."),
            ((out * shares.softmax(-2)).sum(0), "Weigh the splits against one another, not the "
             "rows: dimension 0."),
            ((out * shares.softmax(1)).sum(0), "Weigh the splits against one another, not the "
             "rows: dimension 0."),
            ((out * (shares - shares.amax(0)).exp()).sum(0), "The shares of a row must add up to 1:"
             " divide by their sum."),
            ((out * shares.log_softmax(0)).sum(0), "The shares of a row must add up to 1. These "
             "are their logarithms."),
            (out * shares.softmax(0), "Add the splits up: the result has no dimension for them."),
            (torch.stack([o * len_ for o, len_ in zip(outs, parts, strict=True)]).sum(0) / keys,
             "It isn't the number of keys that counts, but the sum of their exponentials."),
        ]  # fmt: skip

        def words(
            got: Any, likely: list[tuple[Tensor, str]] = likely, parts: list[int] = parts
        ) -> str | None:
            if isinstance(got, Tensor) and got.isnan().any():
                if 0 in parts:
                    return "An empty split has the log sum -inf: it must count nothing."
                return (
                    "The exponential of several hundred is inf, and inf / inf is nan. Subtract "
                    "the largest log sum first, or let softmax do it."
                )
            return next((text for wrong, text in likely if equal(wrong, got)), None)

        expect(name, combine, out, log_sums, to_be=right, likely=words)


@check("nanoteach.tiled_attention.choose_splits", "Into how many parts a history is cut", (7, 8))
def check_choose_splits(choose_splits: Callable[[int, int, int], int]) -> None:
    """Every power of two is tried against the three rules."""
    for seqs, heads, longest in (
        (1, 8, 8192), (16, 8, 1024), (64, 8, 1024), (256, 8, 8192), (1, 8, 200), (1, 8, 128),
        (1, 8, 129), (1, 8, 64), (1, 8, 1), (3, 5, 4000), (33, 8, 4096), (1, 2, 1_000_000),
        (2, 33, 640), (1, 600, 5000), (5, 3, 300),
    ):  # fmt: skip
        powers = [1, 2, 4, 8, 16, 32]
        room = [n for n in powers if n == 1 or seqs * heads * n <= 528]
        full = [n for n in powers if n == 1 or n // 2 * TILE_KEYS < longest]
        right = max(set(room) & set(full))
        words = partial(_rule_for, num_seqs=seqs, num_kv_heads=heads, longest=longest)
        name = f"{seqs} decodes, {heads} K/V heads, the longest history {longest:,}"
        expect(name, choose_splits, seqs, heads, longest, to_be=right, likely=words)
        if type(got := choose_splits(seqs, heads, longest)) is not int:
            raise Wrong(name, right, repr(got), "Parts are counted: give an int.")
    name = "a step without decodes: num_seqs is 0"
    case(name, "A step of prompts alone asks as well: don't divide by `num_seqs`.")
    if choose_splits(0, 8, 500) not in (1, 2, 4, 8, 16, 32):
        raise Wrong(name, "any power of two up to 32", choose_splits(0, 8, 500))


def _rule_for(got: Any, num_seqs: int, num_kv_heads: int, longest: int) -> str | None:
    """The rule that a wrong number of parts breaks, or that twice as many would not break."""
    if not isinstance(got, int):
        return "Parts are counted: give an int."
    if got < 1:
        return "It never is 0: 1 is always allowed, and is a history that is not cut."
    if got > MAX_SPLITS:
        return f"Never more than MAX_SPLITS, which is {MAX_SPLITS}."
    if got & (got - 1):
        return f"{got} is not a power of two."
    programs = num_seqs * num_kv_heads * got
    if programs > 528:
        return (
            f"{num_seqs} x {num_kv_heads} x {got} programs are more than 528: ask this rule of the "
            "number that you double to, not of the one before."
        )
    if got // 2 * TILE_KEYS >= longest:
        return (
            f"The third rule is about half the parts: {got // 2} x {TILE_KEYS} = "
            f"{got // 2 * TILE_KEYS:,} is not less than {longest:,}."
        )
    return (
        f"{2 * got} parts are allowed as well. They make {2 * programs} programs, and the third "
        f"rule is about half of them: {got} x {TILE_KEYS} = {got * TILE_KEYS:,} is less than "
        f"{longest:,}."
    )


@check("nanoteach.tiled_attention.tiles_of", "A step's prompts, in tiles", (7, 8))
def check_tiles_of(tiles_of: Callable[..., list[tuple[int, int]]]) -> None:
    """Token by token: a tile begins at every token whose place is a multiple of the size."""
    for query_lens, first, size in (
        ([5], 0, 4), ([4], 0, 4), ([9, 3], 2, 4), ([70, 64, 1, 130], 3, 64), ([7, 2], 0, 1),
        ([], 5, 64),
    ):  # fmt: skip
        right = [
            (first + i, token)
            for i, length in enumerate(query_lens)
            for token in range(length)
            if token % size == 0
        ]
        starts = [sum(query_lens[:i]) for i in range(len(query_lens))]
        likely = [
            ([(seq - first, start) for seq, start in right],
             f"The first of these sequences is number {first} of the step: the decodes before it "
             "have the numbers below."),
            ([(seq, start // size) for seq, start in right],
             "The second number is a token, the tile's first, and not the tile's number."),
            ([(seq, starts[seq - first] + start) for seq, start in right],
             "Count the new tokens of each sequence from 0, not those of the whole step."),
            ([(first + i, start * size) for i, n in enumerate(query_lens)
              for start in range(n // size)],
             "The last tile of a sequence may be partly full: it is a tile, too."),
            ([(first + i, start * size) for i, n in enumerate(query_lens)
              for start in range(n // size + 1)],
             "Tokens that fill their tiles exactly need no tile more."),
            ([(first + i, 0) for i in range(len(query_lens))],
             "A sequence of more tokens than a tile has several tiles."),
            ([(start, seq) for seq, start in right], "The sequence comes first."),
            ([(first + next(i for i, s in reversed(list(enumerate(starts))) if s <= token),
               token) for token in range(0, sum(query_lens), size)],
             "A tile belongs to one sequence: each sequence begins a new one."),
            ([(seq, start) for seq, n in enumerate(query_lens[first:], first)
              for start in range(0, n, size)],
             "`query_lens` has the chunks only: the decodes are not in it."),
        ]  # fmt: skip

        def words(got: Any, likely: list[tuple[Any, str]] = likely) -> str | None:
            if not isinstance(got, (list, tuple)):
                return "Return a list of pairs."
            return next((text for wrong, text in likely if equal(wrong, got)), None)

        name = f"sequences from {first} on with {query_lens} new tokens, tiles of {size}"
        expect(name, tiles_of, query_lens, first, size, to_be=right, likely=words)
