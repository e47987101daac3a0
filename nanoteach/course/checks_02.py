"""Checks of notebook 02: where K/V are written, what a decode step sees, who gets which slot."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanoteach.config import ModelConfig
from nanoteach.course.checking import Wrong, case, check, describe, expect, expect_equal
from nanoteach.kv_cache import ContiguousKVCache, ContiguousMetadata

# Every size is another number, so that no two wrong turns meet in one result.
ODD = ModelConfig(
    family="qwen3", vocab_size=101, hidden_size=24, intermediate_size=31, num_layers=3,
    num_heads=6, num_kv_heads=2, head_dim=4, max_position=128, rms_norm_eps=1e-6,
    rope_theta=1e4, tie_word_embeddings=True,
)  # fmt: skip


def make_cache(rows: int, row_len: int) -> ContiguousKVCache:
    """A cache in which an older batch has left its K/V."""
    cache = ContiguousKVCache(ODD, rows, row_len, torch.float32, torch.device("cpu"))
    cache.k.normal_()
    cache.v.normal_()
    return cache


@check("nanoteach.kv_cache.ContiguousKVCache.append", "New K/V go to their slots", stages=(2,))
def check_append(append: Callable[..., None]) -> None:
    """Written value by value, in a copy."""
    for name, layer, slots in (
        ("3 tokens of layer 1 into slots 2, 3 and 8", 1, [2, 3, 8]),
        ("a token for each row, layer 2, slots 9 and 4", 2, [9, 4]),
        ("one token of layer 0 into slot 5", 0, [5]),
    ):
        cache = make_cache(rows=2, row_len=5)
        k, v = (torch.randn(len(slots), ODD.num_kv_heads, ODD.head_dim) for _ in range(2))
        old_k, old_v = cache.k.clone(), cache.v.clone()
        case(name)
        cache.append(layer, k.clone(), v.clone(), torch.tensor(slots))
        for letter, before, now in (("k", old_k, cache.k), ("v", old_v, cache.v)):
            if not isinstance(now, Tensor) or now.shape != before.shape:
                raise Wrong(
                    f"{name}: self.{letter} afterwards", describe(before), describe(now),
                    f"self.{letter} must stay the cache's own tensor: write into it.",
                )  # fmt: skip
        likely = append_mistakes(layer, slots, old_k, k, v)
        expect_equal(f"{name}: self.k afterwards", written(old_k, k, slots, layer), cache.k, likely)
        likely = append_mistakes(layer, slots, old_v, v, k)
        expect_equal(f"{name}: self.v afterwards", written(old_v, v, slots, layer), cache.v, likely)


def written(old: Tensor, new: Tensor, slots: list[int], *layers: int) -> Tensor:
    """`old` with the new tokens in these slots of these layers."""
    out = old.clone()
    for layer in layers:
        for token, slot in enumerate(slots):
            if slot < out.shape[1]:
                out[layer, slot] = new[token]
    return out


def append_mistakes(
    layer: int, slots: list[int], old: Tensor, new: Tensor, other: Tensor
) -> list[tuple[Any, str]]:
    """What a cache holds after a likely mistake. `other`: V's new values for K, K's for V."""
    run = [slots[0] + i for i in range(len(slots))]
    added = written(old, old[layer][slots] + new, slots, layer)
    return [
        (old, "Nothing was written here. Selecting slots with a tensor makes a copy, and what is "
         "done to a copy stays in the copy: assign into the cache itself."),
        (written(old, new, slots, *range(3)),
         "Only the layer that is named is written: the others have K/V of their own."),
        (written(old, new, slots, 0), "Write to the layer that is named, not always to layer 0."),
        (written(old, new, run, layer),
         "Slots need not follow one another: each token has its own."),
        (written(old, new, sorted(slots), layer),
         "Token i goes to slot_mapping[i], in the order given."),
        (written(old, new, list(range(len(slots))), layer),
         "Token i goes to slot_mapping[i], not to slot i."),
        (written(old, new, [s + 1 for s in slots], layer),
         "One slot late: the slots are given, nothing is to be added to them."),
        (written(old, other, slots, layer), "K goes into self.k and V into self.v."),
        (added,
         "A slot may hold an older request's K/V: overwrite it, do not add to it."),
    ]  # fmt: skip


@check("nanoteach.kv_cache.decode_mask", "What a decode step sees", stages=(2, 3, 4, 5, 6))
def check_decode_mask(decode_mask: Callable[[list[int], int], Tensor]) -> None:
    """Place by place: a row of n tokens has them at 0 to n - 1."""
    for name, seq_lens, width in (
        ("rows of 2 and 4 tokens, width 4", [2, 4], 4),
        ("rows of 3, 1 and 2 tokens, width 5", [3, 1, 2], 5),
        ("one row of 1 token, width 1", [1], 1),
    ):
        right = torch.tensor([[place in range(n) for place in range(width)] for n in seq_lens])

        likely = partial(mask_mistake, right, seq_lens)
        expect(name, decode_mask, seq_lens, width, to_be=right, likely=likely)
        got = decode_mask(list(seq_lens), width)
        if got.dtype != torch.bool:
            raise Wrong(name, "torch.bool", got.dtype, FLOATS)


FLOATS = (
    "SDPA adds a mask of numbers to the scores, so it means something else: return booleans, True "
    "where the key may be seen."
)


def mask_mistake(right: Tensor, seq_lens: list[int], got: Any) -> str | None:
    """Words for a wrong mask."""
    if not isinstance(got, Tensor):
        return "Return a tensor of booleans, [rows, width]."
    if got.dtype.is_floating_point:
        return FLOATS
    if got.shape != right.shape:
        return "One line for each row, and `width` columns, however long the rows are."
    width = right.shape[1]
    columns = torch.arange(width).expand(right.shape)
    lengths = torch.tensor(seq_lens)[:, None]
    wrong = [
        (torch.ones_like(right).tril(),
         "A triangle, as is_causal makes it. Each line is another request's newest token, not the "
         "next query."),
        (columns < 1, "That is what is_causal does with one query: it sees key 0 alone. The newest "
         "token sees its whole row."),
        (~right, "True means that the key may be seen."),
        (columns <= lengths, "One too many: a row of n tokens has them at 0 to n - 1."),
        (columns < lengths - 1,
         "The newest token sees itself too: its K/V are stored before it attends."),
        (columns == lengths - 1,
         "The newest token sees all before it as well, not only itself."),
        (columns >= width - lengths,
         "A row begins at column 0: nothing is padded on the left here."),
        (columns < max(seq_lens), "A short row sees only its own tokens. What stands further right "
         "is left from an older request."),
    ]  # fmt: skip
    return next((words for mask, words in wrong if torch.equal(mask, got.bool())), None)


@check("nanoteach.kv_cache.ContiguousKVCache.plan", "A slot for every new token", stages=(2,))
def check_plan(plan: Callable[..., ContiguousMetadata]) -> None:
    """The slots are numbered in a grid, and looked up in it."""
    rows, row_len = 3, 7
    grid = [[row * 7 + place for place in range(row_len)] for row in range(rows)]
    for name, new, total in (
        ("prompts of 3 and 2 tokens, rows of 7 slots", [3, 2], [3, 2]),
        ("one new token a row, then 4, 3 and 6 tokens", [1, 1, 1], [4, 3, 6]),
        ("a prompt of 4, and one token after 5", [4, 1], [4, 6]),
        ("2 tokens after 5: the row is full", [2], [7]),
    ):
        cache = make_cache(rows, row_len)
        case(name)
        got = cache.plan(list(new), list(total))
        if not isinstance(got, ContiguousMetadata):
            hint = "Return a ContiguousMetadata, as the text shows."
            raise Wrong(name, "a ContiguousMetadata", describe(got), hint)
        if not isinstance(got.slot_mapping, Tensor):
            hint = "slot_mapping is a tensor of whole numbers: torch.tensor(...)."
            raise Wrong(name, "a tensor", describe(got.slot_mapping), hint)
        spans = [range(n - m, n) for m, n in zip(new, total, strict=True)]
        right = [grid[row][place] for row, span in enumerate(spans) for place in span]
        starts = [sum(total[:row]) for row in range(len(total))]
        likely = [
            ([row * row_len + i for row, m in enumerate(new) for i in range(m)],
             "The new tokens are the last of the row's `seq_lens[row]` tokens: they go after the "
             "history, not over it."),
            ([slot + 1 for slot in right],
             "One slot late. seq_lens counts the new tokens too: the last one's position is "
             "seq_lens[row] - 1."),
            ([slot - 1 for slot in right],
             "One slot early: positions begin at 0, and the last one is seq_lens[row] - 1."),
            ([grid[row][place] for row, n in enumerate(total) for place in range(n)],
             "Only the new tokens get a slot; the history's K/V are stored already."),
            ([grid[row][n - 1] for row, n in enumerate(total)],
             "A row may have several new tokens, and each needs its slot."),
            ([place for span in spans for place in span],
             "These are positions in a row. The next row begins row_len slots later."),
            ([row * max(total) + place for row, span in enumerate(spans) for place in span],
             "Rows are row_len slots apart, however long the requests are now."),
            ([starts[row] + place for row, span in enumerate(spans) for place in span],
             "Rows are reserved: each begins at a multiple of row_len, however short the rows "
             "before it are."),
            ([row + place * rows for row, span in enumerate(spans) for place in span],
             "A row's slots follow one another: row 0 has the first row_len of them."),
        ]  # fmt: skip
        expect_equal(f"{name}: slot_mapping", right, got.slot_mapping.tolist(), likely)
        mask = torch.tensor([[place in range(n) for place in range(max(total))] for n in total])
        expect_equal(
            f"{name}: mask", mask, got.mask,
            "The mask is decode_mask(seq_lens, longest); the longest is the longest row now, so "
            "that nobody reads further than that.",
        )  # fmt: skip
        words = "query_lens and seq_lens go into the metadata as they are."
        expect_equal(f"{name}: query_lens", new, list(got.query_lens), words)
        expect_equal(f"{name}: seq_lens", total, list(got.seq_lens), words)
