"""Notebook 03, answered. `python solutions/03_paged_blocks.py` checks every answer."""

from nanoteach.course import exercise

# A quotient, rounded up. Common wrong turns: rounding down, which leaves the last tokens without
# a place; one block more in every case, which is wrong exactly where tokens fill their blocks; and
# a block for a remainder of 1 only, which is the rule for *growing by one token*, not for counting.
# `math.ceil(num_tokens / block_size)` is right too, as long as floats hold the quotient.


@exercise("nanoteach.block_manager.blocks_needed")
def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return (num_tokens + block_size - 1) // block_size


# How many are missing is a difference of two states: what is needed, and what is held. It does not
# ask how the owner came here, so it is right for a whole prompt, for one token more, for many, and
# for none. Common wrong turns: taking all that is needed where some is held; taking blocks one by
# one and finding too late that there are too few; asking for more free blocks than are missing;
# and reaching into `free_blocks` oneself, which leaves the counts behind, and which breaks stage 5,
# where a block that is taken must also lose its name.


@exercise("nanoteach.block_manager.BlockManager.allocate")
def allocate(self, owner, num_tokens: int) -> bool:
    """Grow the owner's table until it holds `num_tokens` tokens, or change nothing: False."""
    missing = blocks_needed(num_tokens, self.block_size) - len(owner.block_table)
    if missing > self.num_free:
        return False
    taken = []
    for _ in range(missing):  # no turn at all if the difference is below zero
        taken.append(self.take_free_block())
    owner.block_table += taken
    if self.trace and taken:
        self.trace.add("taken", owner.request_id, taken)
    return True


# Two questions to each position: which block of the text, and which place in it? Then the table
# says which block of the pool that is. Common wrong turns: the position itself for the place in
# the block; counting from `start`; leaving the table out, which works as long as one request is
# alone in a fresh pool; and block + offset, without the block's size.


@exercise("nanoteach.block_manager.slot_mapping")
def slot_mapping(block_table: list[int], block_size: int, start: int, stop: int) -> list[int]:
    """For the tokens `start` to `stop - 1`, the slot of the pool where each one's K/V live."""
    slots = []
    for position in range(start, stop):
        nth, offset = divmod(position, block_size)
        slots.append(block_table[nth] * block_size + offset)
    return slots


# Indexing with a tensor of block ids gives [blocks, block_size, heads, dim]; then blocks and places
# become one dimension. Common wrong turns: forgetting the layer; leaving the blocks as a dimension
# of their own; a slice of the pool, which is right only while tables are runs of neighbours; and
# dropping repeated blocks, when a group of tables is padded with block 0.


@exercise("nanoteach.paged_attention.PagedAttention.gather")
def gather(self, layer: int, blocks):
    """K and V of whole blocks, in the order given: `[tokens, num_kv_heads, head_dim]` each."""
    return self.k[layer][blocks].flatten(0, 1), self.v[layer][blocks].flatten(0, 1)
