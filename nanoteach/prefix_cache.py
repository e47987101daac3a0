"""Stage 5. Blocks whose tokens are known by name, so that a prompt's beginning is computed once.

A full block's name is the hash of all tokens up to its end: SHA-256 over the name of the block
before it and its own tokens. Equal names mean equal histories, hence equal K/V. A freed block keeps
its name and its K/V until the pool needs it for something else, least recently used first.

Knows: names of blocks. Does not know: when to look, or what a step is for.
"""

import struct
from collections.abc import Iterable
from hashlib import sha256

from nanoteach.block_manager import BlockManager, BlockOwner
from nanoteach.sequence import Sequence
from nanoteach.types import Trace


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """The name of a full block: `parent` is the name of the one before it."""
    return sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


def root_hash(cache_salt: str | None) -> bytes:
    """What the first block has for a parent. Another salt makes other names all the way down."""
    return b"" if cache_salt is None else sha256(cache_salt.encode(errors="surrogatepass")).digest()


class PrefixCachingBlockManager(BlockManager):
    """A block manager in which requests with the same beginning hold the same blocks."""

    def __init__(self, num_blocks: int, block_size: int, trace: Trace | None = None) -> None:
        super().__init__(num_blocks, block_size, trace)
        self.block_of: dict[bytes, int] = {}
        self.name_of: dict[int, bytes] = {}
        self.published: list[int] = []  # since begin_step

    @property
    def num_cached(self) -> int:
        """Blocks with a name, held or free."""
        return len(self.name_of)

    @property
    def num_reusable(self) -> int:
        """Of these, the free ones."""
        return len(self.name_of.keys() & self.free_blocks.keys())

    def names(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """The names of the request's first full blocks, each computed once."""
        known = seq.block_hashes
        while len(known) < num_blocks:
            start = len(known) * self.block_size
            parent = known[-1] if known else root_hash(seq.params.cache_salt)
            known.append(hash_block(parent, seq.token_ids[start : start + self.block_size]))
        return known[:num_blocks]

    def longest_prefix(self, seq: Sequence) -> list[int]:
        """The cached blocks that hold the request's first tokens, at most all tokens but one.

        One token is always left to compute, since its score is what the step is for. And as only
        whole blocks are shared, that token is never written into one.
        """
        blocks: list[int] = []
        for name in self.names(seq, (len(seq.token_ids) - 1) // self.block_size):
            if name not in self.block_of:
                break
            blocks.append(self.block_of[name])
        return blocks

    def match_prefix(self, owner: BlockOwner) -> int:
        """See `BlockManager.match_prefix`."""
        assert isinstance(owner, Sequence)
        owner.block_table = self.longest_prefix(owner)
        for block in owner.block_table:
            self.free_blocks.pop(block, None)
            self.ref_counts[block] += 1
        return len(owner.block_table) * self.block_size

    def publish(self, owner: BlockOwner, start: int, stop: int) -> None:
        """See `BlockManager.publish`. A name that another block bears already stays with it."""
        first, last = start // self.block_size, stop // self.block_size
        if first == last:
            return
        assert isinstance(owner, Sequence)
        names = self.names(owner, last)
        for name, block in zip(names[first:], owner.block_table[first:last], strict=True):
            if name not in self.block_of:
                self.published.append(block)
                self.block_of[name] = block
                self.name_of[block] = name

    def begin_step(self) -> None:
        """See `BlockManager.begin_step`."""
        self.published.clear()

    def take_back(self) -> None:
        """See `BlockManager.take_back`."""
        for block in self.published:
            self.forget(block)
        self.published.clear()

    def reset(self) -> None:
        """See `BlockManager.reset`. Blocks that were written keep their names."""
        super().reset()
        self.block_of = {name: block for block, name in self.name_of.items()}

    def take_free_block(self) -> int:
        """The least recently used free block; if it had a name, nobody finds it any more."""
        block = super().take_free_block()
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Take a block's name away."""
        name = self.name_of.pop(block, None)
        if name is not None:
            self.block_of.pop(name, None)

    def put_free_block(self, block: int) -> None:
        """A block with a name is kept as long as possible; one without is the next to be used."""
        super().put_free_block(block)
        if block not in self.name_of:
            self.free_blocks.move_to_end(block, last=False)

    def check(self, owners: Iterable[BlockOwner]) -> list[str]:
        """See `BlockManager.check`."""
        problems = super().check(owners)
        if {block: name for name, block in self.block_of.items()} != self.name_of:
            problems.append("names and blocks do not agree")
        return problems
