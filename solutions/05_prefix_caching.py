"""Notebook 05, answered. `python solutions/05_prefix_caching.py` checks every answer."""

import struct
from hashlib import sha256

from nanoteach.course import exercise

# SHA-256 over the parent's name and the tokens, eight bytes each. Whoever knows the parent's name
# knows all tokens before, so two names are equal only where the whole histories are. Common wrong
# turns: the tokens alone (the same words after another beginning would be taken for the same
# K/V); tokens as text without a separator, where [1, 23] and [12, 3] are one; one byte a token;
# Python's own hash(), which is short, and for bytes another in every process.


@exercise("nanoteach.prefix_cache.hash_block")
def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """The name of a full block: `parent` is the name of the one before it."""
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return sha256(parent + tokens).digest()


# Names in order, as long as each is known. Common wrong turns: all full blocks, so that a prompt of
# exactly some blocks is found whole and nothing is left to compute; going on after a block that is
# missing; `if not block`, which takes block 0 for none; taking the prompt's length, where a
# preempted request has generated tokens too; and raising reference counts here, which match_prefix
# does.


@exercise("nanoteach.prefix_cache.PrefixCachingBlockManager.longest_prefix")
def longest_prefix(self, seq) -> list[int]:
    """The cached blocks that hold the request's first tokens, at most all tokens but one."""
    most = (len(seq.token_ids) - 1) // self.block_size
    blocks = []
    for name in self.names(seq, most):
        block = self.block_of.get(name)
        if block is None:
            break
        blocks.append(block)
    return blocks


# Each block gets one more holder, and leaves the free ones if it was there. Common wrong turns: a
# count that is set to 1 where it should grow (the first request that ends then frees what the
# others read); a block that stays among the free ones while somebody holds it; and an error where
# it was not free, because another request still runs with it.


@exercise("nanoteach.prefix_cache.PrefixCachingBlockManager.match_prefix")
def match_prefix(self, owner) -> int:
    """Hold the blocks that already have the owner's first tokens; how many tokens they have."""
    blocks = self.longest_prefix(owner)
    for block in blocks:
        self.ref_counts[block] += 1
        self.free_blocks.pop(block, None)
    owner.block_table = blocks
    return len(blocks) * self.block_size


# Stage 3's method takes the block at the front, and counts its holder. Here its name goes too, from
# both dictionaries. Common wrong turns: leaving it in block_of, which is the worst fault that a
# prefix cache can have, since a request then reads what somebody else has written; and forgetting
# that most blocks of a young pool have no name.


@exercise("nanoteach.prefix_cache.PrefixCachingBlockManager.take_free_block")
def take_free_block(self) -> int:
    """The least recently used free block; if it had a name, nobody finds it any more."""
    block = super().take_free_block()
    if block in self.name_of:
        name = self.name_of.pop(block)
        del self.block_of[name]
    return block
