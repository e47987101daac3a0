"""Checks of notebook 03: blocks, tables, slots. All is counted or laid out place by place."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from nanoteach.block_manager import BlockManager
from nanoteach.course.checking import Wrong, case, check, describe, expect, expect_equal
from nanoteach.paged_attention import PagedAttention, Row
from nanoteach.types import Trace

PAGED = (3, 4, 5, 6)


@check("nanoteach.block_manager.blocks_needed", "Blocks that hold some tokens", stages=PAGED)
def check_blocks_needed(blocks_needed: Callable[[int, int], int]) -> None:
    """Counted: blocks are added one by one until the tokens fit."""
    for tokens, size in ((17, 16), (5, 16), (16, 16), (40, 16), (0, 16), (40, 4), (3, 1)):
        right = next(n for n in range(100) if n * size >= tokens)
        likely = [
            (tokens // size + (tokens % size == 1),
             f"Here {tokens % size} tokens are left over, and nobody has given them a block. Any "
             "remainder needs a block, not only a remainder of 1."),
            (tokens // size, "A block that is partly full is a block too: round up."),
            (max(right, 1), "No tokens need no block."),
            (tokens // size + 1, "Tokens that fill their blocks exactly need no block more."),
            (tokens / size, "Half a block can't be taken: the answer is a whole number."),
            (next(n for n in range(100) if n * 16 >= tokens), "The size is not always 16."),
        ]  # fmt: skip
        name = f"{tokens} tokens in blocks of {size}"
        expect(name, blocks_needed, tokens, size, to_be=right, likely=likely)
    case("the type of the result")
    if not isinstance(blocks_needed(33, 16), int):
        raise Wrong("the type of the result", "an int", type(blocks_needed(33, 16)).__name__)


@check("nanoteach.block_manager.slot_mapping", "Where in the pool each token lives", stages=PAGED)
def check_slot_mapping(slot_mapping: Callable[[list[int], int, int, int], list[int]]) -> None:
    """Laid out: the slots of all blocks of the table in a row, and a piece of that row."""
    for name, table, size, start, stop in (
        ("a prompt of 6 tokens, table [5, 2], blocks of 4", [5, 2], 4, 0, 6),
        ("tokens 3 to 8, table [7, 1, 4], blocks of 4", [7, 1, 4], 4, 3, 9),
        ("one new token, at 33, table [9, 0, 6], blocks of 16", [9, 0, 6], 16, 33, 34),
        ("one new token, at 8, the first of its block; table [3, 1, 2], blocks of 4",
         [3, 1, 2], 4, 8, 9),
        ("a table that is longer than needed", [2, 0, 8], 4, 1, 3),
        ("no token", [1], 4, 2, 2),
    ):  # fmt: skip
        places = [block * size + offset for block in table for offset in range(size)]
        right = places[start:stop]
        spread = range(start, stop)
        case(name)
        got = slot_mapping(list(table), size, start, stop)
        if isinstance(got, Tensor):
            raise Wrong(name, right, describe(got), "Return a list: `.tolist()`.")
        likely = [
            (list(spread), "These are positions in the text. The table says where each block of "
             "them lies in the pool."),
            ([table[i // size] * size + i for i in spread],
             "Inside its block a token has a place from 0 to block_size - 1: not its position in "
             "the text."),
            ([table[(i - start) // size] * size + (i - start) % size for i in spread],
             "The first of these tokens is number `start` of its text, not number 0."),
            (places[: stop - start], "The first of these tokens is number `start` of its text."),
            ([table[i // size] + i % size for i in spread],
             "Block b begins at slot b * block_size: the blocks before it take their places."),
            ([table[start // size] * size + i % size for i in spread],
             "The tokens may lie in more blocks than one: look into the table for each."),
            ([table[start // size] * size + start % size + i for i in range(stop - start)],
             "After the end of a block comes the table's next block, not the pool's."),
            ([table[-1] * size + i % size for i in spread],
             "Not every token lies in the last block of the table."),
            (places[start : stop + 1], "`stop` itself is not among them, as in `range`."),
            (places[:stop], "Only the new tokens: those before `start` have their place already."),
            ([table[i // size] for i in spread],
             "These are blocks. Where in its block does the token lie?"),
        ]  # fmt: skip
        expect(name, slot_mapping, table, size, start, stop, to_be=right, likely=likely)


class _CountingManager(BlockManager):
    """Counts how often a block is taken as the text says. Stage 5 also does more at that point."""

    taken = 0

    def take_free_block(self) -> int:
        self.taken += 1
        return super().take_free_block()


@check("nanoteach.block_manager.BlockManager.allocate", "Growing a block table", stages=PAGED)
def check_allocate(_: Callable[..., bool]) -> None:
    """Followed by hand in a pool of 8 blocks of 4: who has what after each call."""
    manager = _CountingManager(8, 4)
    a, b = Row("a"), Row("b")

    def grow(name: str, owner: Row, tokens: int, answer: bool, blocks: int, words: str) -> None:
        other, held = (b if owner is a else a), list(owner.block_table)
        before = list(other.block_table)
        case(name)
        got = manager.allocate(owner, tokens)
        if len(owner.block_table) != blocks:
            raise Wrong(
                name, f"a table of {blocks} blocks", owner.block_table,
                too_many(len(owner.block_table), len(held), tokens) or words,
            )  # fmt: skip
        expect_equal(f"{name}: the result", answer, got, words)
        if owner.block_table[: len(held)] != held:
            words = "Blocks that were held stay where they are, in their order: their K/V are full."
            raise Wrong(name, f"a table that begins with {held}", owner.block_table, words)
        expect_equal(f"{name}: the other's table", before, other.block_table)

    def too_many(now: int, before: int, tokens: int) -> str | None:
        needed = -(-tokens // 4)
        if now > before >= needed and now == before + needed:
            return "Nothing is missing: leave the table alone."
        if before and now == before + needed:
            return (
                f"The owner held {before} blocks already: of the {needed} that it needs, "
                "only the rest is missing."
            )
        if before and now == before - (before - needed) < before:
            return "A table never shrinks here: what it holds already is enough."
        return None

    more = "Tokens that the blocks it has can hold need no new block."
    grow("9 tokens, nothing held", a, 9, True, 3, "9 tokens in blocks of 4 need 3 blocks.")
    grow("then 12 tokens: they fit into the last block", a, 12, True, 3, more)
    grow("then 13 tokens", a, 13, True, 4, "The 13th token needs a fourth block.")
    grow("13 tokens once more", a, 13, True, 4,
         "Nothing was missing. The table must depend on how many tokens there are, not on how "
         "often you are asked.")  # fmt: skip
    grow("then fewer, 5 tokens", a, 5, True, 4, "Enough is held: True, and nothing changes.")
    few = "All or nothing: with too few free blocks, return False before any block is taken."
    grow("another wants 17 tokens, 5 blocks, and 4 are free", b, 17, False, 0, few)
    expect_equal("after a refusal: free blocks", 4, manager.num_free, few)
    exactly = "4 blocks are missing and 4 are free: that is enough."
    grow("it wants 16 tokens, 4 blocks, and 4 are free", b, 16, True, 4, exactly)
    grow("the first wants 17 tokens, and none is free", a, 17, False, 4, few)
    grow("it wants 16, which it holds, and none is free", a, 16, True, 4,
         "It misses nothing, so it does not matter that nothing is free.")  # fmt: skip

    case("what the manager says of itself")
    if manager.taken != 8:
        raise Wrong(
            "how blocks are taken", "8 calls of self.take_free_block", manager.taken,
            "Take each block with `self.take_free_block()`, which also counts its holder; a later "
            "stage does more there.",
        )  # fmt: skip
    problems = manager.check([a, b])
    if problems:
        raise Wrong("manager.check", "no problem", problems, "Each block has one owner.")

    trace = Trace()
    case("a manager with a trace")
    traced = BlockManager(8, 4, trace)
    owner = SimpleNamespace(request_id="a", block_table=[])
    for tokens in (5, 8, 9):
        traced.allocate(owner, tokens)
    told = [(event.request_id, list(event.data)) for event in trace.of_kind("taken")]
    expect_equal(
        "what the trace was told, of 5, then 8, then 9 tokens", [("a", [0, 1]), ("a", [2])], told,
        [([], "Tell the trace which blocks were taken: the last line that the text gives."),
         ([("a", [0, 1]), ("a", []), ("a", [2])], "Where nothing was taken, there is nothing to "
          "tell."),
         ([("a", [0, 1]), ("a", [0, 1, 2])], "Tell the blocks that were taken now, not the whole "
          "table.")],
    )  # fmt: skip


@check("nanoteach.paged_attention.PagedAttention.gather", "A history out of its blocks", PAGED)
def check_gather(_: Callable[..., object]) -> None:
    """Copied by hand, one token at a time, out of a pool in which all values differ."""
    layers, blocks, size, heads, dim = 3, 6, 4, 2, 5
    config = SimpleNamespace(num_layers=layers, num_kv_heads=heads, head_dim=dim)
    pool = PagedAttention(config, blocks, size, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    values = torch.arange(pool.k.numel(), dtype=torch.float32).view(pool.k.shape)
    pool.k, pool.v = values.clone(), values + 0.5
    for name, layer, table in (
        ("layer 1, blocks [4, 0, 2]", 1, [4, 0, 2]),
        ("layer 2, one block, [3]", 2, [3]),
        ("layer 0, two rows of a padded group, [5, 1, 2, 0]", 0, [5, 1, 2, 0]),
        ("layer 1, padded with block 0 twice, [2, 0, 0]", 1, [2, 0, 0]),
    ):
        chosen = torch.tensor(table)
        right = [
            torch.stack([x[layer, block, i] for block in table for i in range(size)])
            for x in (pool.k, pool.v)
        ]
        case(name)
        got = gathered(pool, layer, chosen, name)
        two = "Give K and V, a tuple of two tensors."
        if got is not None and not (isinstance(got, (tuple, list)) and len(got) == 2):
            raise Wrong(name, "two tensors, K and V", type(got).__name__, two)
        if got is None:
            raise Wrong(name, "two tensors, K and V", None, "Is a `return` missing?")
        for letter, own, x, expected in zip("KV", got, (pool.k, pool.v), right, strict=True):
            first = table[0]
            likely = [
                (x[layer][chosen],
                 "The tokens of all blocks in one row: [tokens, num_kv_heads, head_dim], without "
                 "a dimension for blocks."),
                ((pool.v if letter == "K" else pool.k)[layer][chosen].flatten(0, 1),
                 "K comes from `self.k`, V from `self.v`."),
                (x[layer][sorted(table)].flatten(0, 1),
                 "In the order of the table, which is that of the text, not that of the pool."),
                (x[layer][sorted(set(table))].flatten(0, 1),
                 "Every block in the order given, as often as it is given."),
                (x[layer][list(dict.fromkeys(table))].flatten(0, 1),
                 "A block that is given twice is gathered twice: padding repeats block 0."),
                (x[0][chosen].flatten(0, 1),
                 f"This is layer 0's, not layer {layer}'s."),
                (x[layer, first : first + len(table)].flatten(0, 1),
                 "The blocks of a table do not lie side by side in the pool."),
                (x[layer].flatten(0, 1)[chosen],
                 "These are slots. Each number is a block, with `block_size` tokens in it."),
                (x[layer][chosen].flatten(),
                 "Only the first two dimensions become one: `.flatten()` alone joins all of them."),
                (x[layer][chosen].transpose(0, 1).flatten(0, 1),
                 "All tokens of the first block, then all of the second."),
            ]  # fmt: skip
            expect_equal(f"{name}: {letter}", expected, own, likely)


def gathered(pool: PagedAttention, layer: int, blocks: Tensor, name: str) -> object:
    """What the answer gives; an index beyond a dimension gets words of its own."""
    try:
        return pool.gather(layer, blocks)
    except IndexError as error:
        if "dimension 0 with size" not in str(error):
            raise
        words = f"The first dimension of self.k has the {len(pool.k)} layers: choose `layer` first."
        raise Wrong(name, "two tensors, K and V", f"IndexError: {error}", words) from error
