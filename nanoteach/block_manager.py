"""Stage 3. Who owns which block of the KV pool.

The pool is cut into blocks of `block_size` tokens. A request holds a table of block ids; token i
lives in block `table[i // block_size]`, at offset `i % block_size` (PagedAttention, Kwon et al.,
2023). A block is taken when its first token needs a place, so at most one block a request is
partly empty.

Knows: block ids, tables, how many hold each block. Does not know: tensors, models, time.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Protocol

from nanoteach.types import Trace


class BlockOwner(Protocol):
    """Whoever holds blocks."""

    request_id: str
    block_table: list[int]


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: the quotient, rounded up."""
    return -(-num_tokens // block_size)


def slot_mapping(block_table: list[int], block_size: int, start: int, stop: int) -> list[int]:
    """For the tokens `start` to `stop - 1`, the slot of the pool where each one's K/V live."""
    return [
        block_table[position // block_size] * block_size + position % block_size
        for position in range(start, stop)
    ]


class BlockManager:
    """Hands out the blocks of one pool and takes them back."""

    def __init__(self, num_blocks: int, block_size: int, trace: Trace | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.trace = trace
        self.ref_counts = [0] * num_blocks
        # Free blocks in the order in which they are handed out.
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self.free_blocks)

    @property
    def num_reusable(self) -> int:
        """Free blocks whose K/V may still be of use. Nobody asks for them before stage 5."""
        return 0

    def allocate(self, owner: BlockOwner, num_tokens: int) -> bool:
        """Grow the owner's table until it holds `num_tokens` tokens.

        All or nothing: False, and nothing has changed, when the pool has too few free blocks.
        """
        if num_tokens <= len(owner.block_table) * self.block_size:
            return True
        missing = blocks_needed(num_tokens, self.block_size) - len(owner.block_table)
        if missing > len(self.free_blocks):
            return False
        taken = [self.take_free_block() for _ in range(missing)]
        owner.block_table.extend(taken)
        if self.trace:
            self.trace.add("taken", owner.request_id, taken)
        return True

    def take_free_block(self) -> int:
        """The next free block, now held once."""
        block, _ = self.free_blocks.popitem(last=False)
        self.ref_counts[block] = 1
        return block

    def free(self, owner: BlockOwner) -> None:
        """Let go of all the owner's blocks, the last one first."""
        table, owner.block_table = owner.block_table, []
        for block in reversed(table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.put_free_block(block)
        if self.trace and table:
            self.trace.add("freed", owner.request_id, table)

    def put_free_block(self, block: int) -> None:
        """A block that nobody holds any more joins the free ones."""
        self.free_blocks[block] = None

    # A plain pool shares nothing. Stage 5 gives these their meaning.

    def match_prefix(self, owner: BlockOwner) -> int:
        """Hold the blocks that already have the owner's first tokens; how many tokens they have."""
        return 0

    def publish(self, owner: BlockOwner, start: int, stop: int) -> None:
        """Offer to others the blocks that tokens `start` to `stop - 1` make full."""

    def begin_step(self) -> None:
        """From here on, `take_back` undoes what is published."""

    def take_back(self) -> None:
        """Withdraw what was published since `begin_step`: its K/V were never written."""

    def reset(self) -> None:
        """Everybody loses all blocks, whatever state a fault has left the books in."""
        self.ref_counts = [0] * self.num_blocks
        for block in range(self.num_blocks):
            if block not in self.free_blocks:
                self.put_free_block(block)

    def check(self, owners: Iterable[BlockOwner]) -> list[str]:
        """What is wrong, given everybody who holds blocks; empty when all is well."""
        problems = []
        owners = list(owners)
        held = Counter(block for owner in owners for block in owner.block_table)
        for owner in owners:
            if len(set(owner.block_table)) < len(owner.block_table):
                problems.append(f"{owner.request_id} has a block twice: {owner.block_table}")
        for block in range(self.num_blocks):
            count, free = self.ref_counts[block], block in self.free_blocks
            if count != held[block]:
                problems.append(f"block {block} counts {count} holders and has {held[block]}")
            if free and held[block]:
                problems.append(f"block {block} is free and held")
            if not free and not held[block]:
                problems.append(f"block {block} is lost: not free, and nobody holds it")
        strangers = (held.keys() | self.free_blocks.keys()) - set(range(self.num_blocks))
        problems += [f"block {block} is not in the pool" for block in sorted(strangers)]
        return problems
