"""Checks of notebook 05: names of blocks, and which block is kept. All block ids are by hand."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from nanoteach.course.checking import Wrong, case, check, expect, expect_equal
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.sequence import Sequence
from nanoteach.types import SamplingParams

Manager = PrefixCachingBlockManager
TEXT = [*range(100, 113)]  # 13 tokens: three full blocks of 4, and one token


@check("nanoteach.prefix_cache.hash_block", "The name of a full block", stages=(5, 6))
def check_hash_block(hash_block: Callable[[bytes, list[int]], bytes]) -> None:
    """A name must tell apart what is different, and nothing else. No one name is asked for."""
    root = b""
    case("the first block of a prompt, tokens [1, 2, 3, 4]")
    first = hash_block(root, [1, 2, 3, 4])
    if not isinstance(first, bytes):
        hint = "A name is the parent of the next block's, so it must be bytes: digest()."
        if first is None:
            hint = "Your function returned None: is a `return` missing?"
        raise Wrong("the type of a name", "bytes", f"{type(first).__name__} {first!r}", hint)
    expect(
        "[1, 2, 3, 4] at the beginning, named again", hash_block, root, [1, 2, 3, 4],
        to_be=first,
        likely="Equal blocks must have equal names, or nothing is ever found again.",
    )  # fmt: skip
    other = hash_block(b"x" * 32, [1, 2, 3, 4])
    cases = [
        ("[1, 2, 3, 4] at the beginning, and after another block", first, other,
         "K and V depend on all tokens before, so the parent's name must go into the hash."),
        ("[1, 2, 3, 4] and [4, 3, 2, 1]", first, hash_block(root, [4, 3, 2, 1]),
         "The order of the tokens matters."),
        ("[1, 2, 3, 4] and [1, 3, 3, 3]", first, hash_block(root, [1, 3, 3, 3]),
         "A sum of the tokens is the same for many blocks: hash each token."),
        ("[1, 23] and [12, 3]", hash_block(root, [1, 23]), hash_block(root, [12, 3]),
         "Where does one token end and the next begin? Give each the same number of bytes."),
        ("[1, 2] and [257, 2]", hash_block(root, [1, 2]), hash_block(root, [257, 2]),
         "Token ids go beyond 255: one byte is not enough for each."),
        ("[1, 2] and [65537, 2]", hash_block(root, [1, 2]), hash_block(root, [65537, 2]),
         "Token ids go beyond 65,535: two bytes are not enough for each."),
        ("two blocks that differ in their last token", first, hash_block(root, [1, 2, 3, 5]),
         "Every token of the block must go into the hash."),
        ("[1, 2, 3, 4] after two other blocks", other, hash_block(b"x" * 31 + b"y", [1, 2, 3, 4]),
         "The whole name of the parent must go into the hash."),
    ]  # fmt: skip
    for name, one, two, words in cases:
        case(name)
        if one == two:
            raise Wrong(name, "two names", "one name for both", words)
    case("a token id of Qwen's vocabulary, 151,935")
    hash_block(root, [151_935, 0])
    case("how long a name is")
    if len(first) < 16:
        hint = (
            "So short a name may be borne by two different blocks, and a request would then read "
            "another's K/V. Take all 32 bytes of SHA-256."
        )
        raise Wrong("how long a name is", "16 bytes or more", f"{len(first)} bytes", hint)


def request(token_ids: list[int], salt: str | None = None) -> Sequence:
    """A request as it waits."""
    return Sequence("R", list(token_ids), SamplingParams(cache_salt=salt))


def donor(num_filler: int = 12) -> Manager:
    """A pool in which TEXT lies in the blocks 3, 4, 5 and 6, and the first three have names.

    num_filler: tokens of somebody who holds the blocks before it.
    """
    manager = Manager(12, 4)
    manager.allocate(Sequence("filler", [9] * num_filler, SamplingParams()), num_filler)
    seq = Sequence("donor", list(TEXT), SamplingParams())
    manager.allocate(seq, len(TEXT))
    manager.publish(seq, 0, len(TEXT))
    return manager


@check(
    "nanoteach.prefix_cache.PrefixCachingBlockManager.longest_prefix",
    "The longest cached prefix",
    stages=(5, 6),
)
def check_longest_prefix(_: Callable[..., Any]) -> None:
    """By hand: TEXT's first twelve tokens are cached, in the blocks 3, 4 and 5."""
    whole = "At most all tokens but one: a step must compute something, or it has no score to give."
    missing = "If it is a KeyError: block_of has no block for a name that is missing. Stop there."
    for name, tokens, right, likely in (
        ("all 13 tokens are the same", TEXT, [3, 4, 5],
         [([3, 4], "Three blocks hold 12 of the 13 tokens: one is left, and that is enough."),
          ([0, 1, 2], "These are places in the text. block_of says in which block a name is."),
          (12, "Return the blocks, not the number of tokens.")]),
        ("the first 9 are the same, then others", [*TEXT[:9], 1, 2, 3, 4], [3, 4],
         [([3, 4, 5], "The third block has other tokens, so its name is another.")]),
        ("12 tokens, three full blocks, all cached", TEXT[:12], [3, 4], [([3, 4, 5], whole)]),
        ("8 tokens, two full blocks, all cached", TEXT[:8], [3], [([3, 4], whole)]),
        ("5 tokens, the same", TEXT[:5], [3],
         [([], "One block holds 4 of the 5 tokens: one is left, and that is enough.")]),
        ("4 tokens, one full block", TEXT[:4], [], [([3], whole)]),
        ("1 token", TEXT[:1], [], None),
        ("the first token is another", [1, *TEXT[1:]], [], None),
    ):  # fmt: skip
        manager = donor()
        case(name, missing)
        expect_equal(name, right, manager.longest_prefix(request(tokens)), likely)

    name = "all 13 tokens are the same, and they lie in the blocks 0 to 3"
    manager = donor(num_filler=0)
    case(name)
    expect_equal(
        name, [0, 1, 2], manager.longest_prefix(request(TEXT)),
        [([], "Block 0 is a block too: compare with None."),
         ([1, 2], "Block 0 is a block too: compare with None.")],
    )  # fmt: skip

    name = "the second of three blocks is no longer cached"
    manager = donor()
    manager.forget(4)
    case(name, missing)
    expect_equal(
        name, [3], manager.longest_prefix(request(TEXT)),
        [([3, 5], "Stop at the first block that is missing: a prefix has no holes."),
         ([5], "Stop at the first block that is missing: a prefix has no holes.")],
    )  # fmt: skip

    name = "a prompt of 5 tokens that has generated 8 and was preempted"
    manager = donor()
    seq = request(TEXT[:5])
    seq.token_ids += TEXT[5:]
    case(name)
    expect_equal(
        name, [3, 4, 5], manager.longest_prefix(seq),
        [([3], "All its tokens count, those it generated too: it must compute them again.")],
    )  # fmt: skip

    name = "all 13 tokens are the same, under another salt"
    manager = donor()
    case(name)
    expect_equal(
        name, [], manager.longest_prefix(request(TEXT, salt="another")),
        "Ask self.names for the names: it knows about the salt.",
    )  # fmt: skip

    name = "who holds what, after a look"
    manager = donor()
    before = (list(manager.ref_counts), list(manager.free_blocks), dict(manager.block_of))
    case(name)
    seq = request(TEXT)
    manager.longest_prefix(seq)
    after = (list(manager.ref_counts), list(manager.free_blocks), dict(manager.block_of))
    words = "This only looks: match_prefix takes the blocks that you return."
    expect_equal(name, before[0], after[0], words)
    expect_equal(name, before[1], after[1], words)
    expect_equal(name, len(before[2]), len(after[2]), words)
    expect_equal(name, [], seq.block_table, words)


@check(
    "nanoteach.prefix_cache.PrefixCachingBlockManager.match_prefix",
    "Holding the blocks that are there",
    stages=(5, 6),
)
def check_match_prefix(_: Callable[..., Any]) -> None:
    """By hand: TEXT's first twelve tokens are cached, in the blocks 3, 4 and 5."""
    held = [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]  # 0, 1, 2 by the filler, 3 to 6 by the donor
    for name, donor_is_over, tokens, table, counts in (
        ("the donor still runs, all 13 tokens are the same", False, TEXT, [3, 4, 5],
         [1, 1, 1, 2, 2, 2, 1, 0, 0, 0, 0, 0]),
        ("the donor still runs, the first 9 are the same", False, [*TEXT[:9], 1, 2], [3, 4],
         [1, 1, 1, 2, 2, 1, 1, 0, 0, 0, 0, 0]),
        ("the donor still runs, nothing is the same", False, [1, *TEXT[1:]], [], held),
        ("the donor is over, its blocks are free and cached", True, TEXT, [3, 4, 5],
         [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]),
    ):  # fmt: skip
        manager, seq = donor(), request(tokens)
        if donor_is_over:
            manager.ref_counts[3:7] = [0, 0, 0, 0]
            manager.free_blocks = OrderedDict.fromkeys((6, 7, 8, 9, 10, 11, 5, 4, 3))
        free = [block for block in manager.free_blocks if block not in table]
        first_free = list(manager.free_blocks)[: len(table)]
        others_too = [count + (block in first_free) for block, count in enumerate(counts)]
        any_block = "take_free_block takes the first free block, not the one that was found."
        case(name, "If it is a KeyError: a block that somebody holds is not among the free ones.")
        got = manager.match_prefix(seq)
        expect_equal(
            f"{name}: what is returned", 4 * len(table), got,
            [(len(table), "Return how many tokens they hold: block_size in each block."),
             (table, "Return how many tokens they hold; the blocks go into block_table.")],
        )  # fmt: skip
        expect_equal(
            f"{name}: owner.block_table", table, seq.block_table,
            [([], "The blocks are found, and the owner must also hold them: block_table."),
             (first_free, any_block)],
        )  # fmt: skip
        expect_equal(
            f"{name}: ref_counts", counts, manager.ref_counts,
            [(held, "The new holder is not counted: add 1 to what is there. "
              "Otherwise the block is free as soon as one of the two is over."),
             ([1] * 3 + [0] * 9, "The new holder is not counted."),
             (others_too, any_block)],
        )  # fmt: skip
        expect_equal(
            f"{name}: free_blocks", free, list(manager.free_blocks),
            "A block that somebody holds is not free: it would be handed out and overwritten.",
        )  # fmt: skip

    name = "three requests, one after the other"
    manager = donor()
    case(name)
    for _i in range(3):
        manager.match_prefix(request(TEXT))
    expect_equal(
        f"{name}: holders of block 3", 4, manager.ref_counts[3],
        [(2, "One more holder each time: add 1 to what is there."),
         (1, "One more holder each time: add 1 to what is there.")],
    )  # fmt: skip


@check(
    "nanoteach.prefix_cache.PrefixCachingBlockManager.take_free_block",
    "Handing out a block that may have a name",
    stages=(5, 6),
)
def check_take_free_block(_: Callable[..., Any]) -> None:
    """By hand: 0, 1, 2 and 6 are held. 5, 4 and 3 are free, oldest first, and have names."""
    manager = Manager(7, 4)
    manager.ref_counts = [1, 1, 1, 0, 0, 0, 1]
    manager.free_blocks = OrderedDict.fromkeys((5, 4, 3))
    manager.name_of = {block: bytes([block]) * 32 for block in (3, 4, 5)}
    manager.block_of = {name: block for block, name in manager.name_of.items()}

    def look(name: str, taken: int, block: int, named: set[int]) -> None:
        expect_equal(
            name, block, taken,
            [(3, "The most recently used one: the least recently used is at the other end.")],
        )  # fmt: skip
        expect_equal(
            f"{name}: how many hold it", 1, manager.ref_counts[block],
            [(0, "A block that is handed out is held once: ref_counts.")],
        )  # fmt: skip
        expect_equal(
            f"{name}: is it still free", False, block in manager.free_blocks,
            "It must leave free_blocks, or it is handed out twice.",
        )  # fmt: skip
        found = set(manager.block_of.values())
        if block in found:
            raise Wrong(
                f"{name}: blocks that a name leads to",
                named,
                found,
                "block_of still leads to it. The next request with that beginning would read "
                "what somebody else writes there now.",
            )
        expect_equal(
            f"{name}: blocks that have a name", named, set(manager.name_of),
            [(named | {block}, "name_of still has it: both dictionaries must agree."),
             (set(), "Only the block that is handed out loses its name.")],
        )  # fmt: skip
        expect_equal(
            f"{name}: blocks that a name leads to", named, found,
            "Only the block that is handed out loses its name.",
        )  # fmt: skip

    case("three free blocks with names, the oldest is 5")
    look("three free blocks with names, the oldest is 5", manager.take_free_block(), 5, {3, 4})
    name = "a block without a name is the next one"
    manager.free_blocks[6] = None
    manager.free_blocks.move_to_end(6, last=False)
    manager.ref_counts[6] = 0
    case(name, "If it is a KeyError: a free block need not have a name.")
    look(name, manager.take_free_block(), 6, {3, 4})
    case("the next one, 4")
    look("the next one, 4", manager.take_free_block(), 4, {3})
