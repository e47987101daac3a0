"""Second and wrong answers to the exercises of notebook 03; see course_cases.py."""

from course_cases import second, wrong

NEEDED = "nanoteach.block_manager.blocks_needed"


@second(NEEDED)
def by_divmod(num_tokens, block_size):
    full, rest = divmod(num_tokens, block_size)
    return full + bool(rest)


@second(NEEDED)
def counted(num_tokens, block_size):
    return len(range(0, num_tokens, block_size))


@wrong(NEEDED, "round up")
def rounds_down(num_tokens, block_size):
    return num_tokens // block_size


@wrong(NEEDED, "need no block more")
def always_one_more(num_tokens, block_size):
    return num_tokens // block_size + 1


@wrong(NEEDED, "not only a remainder of 1")
def rest_of_one(num_tokens, block_size):
    return num_tokens // block_size + (num_tokens % block_size == 1)


@wrong(NEEDED, "a whole number")
def no_rounding(num_tokens, block_size):
    return num_tokens / block_size


@wrong(NEEDED, "No tokens need no block")
def at_least_one(num_tokens, block_size):
    return max(1, -(-num_tokens // block_size))


@wrong(NEEDED, "not always 16")
def always_sixteen(num_tokens, block_size):
    return -(-num_tokens // 16)


ALLOCATE = "nanoteach.block_manager.BlockManager.allocate"


@second(ALLOCATE)
def while_too_short(self, owner, num_tokens):
    room = len(owner.block_table) * self.block_size
    if num_tokens > room + self.num_free * self.block_size:
        return False
    old = len(owner.block_table)
    while len(owner.block_table) * self.block_size < num_tokens:
        owner.block_table.append(self.take_free_block())
    if self.trace and len(owner.block_table) > old:
        self.trace.add("taken", owner.request_id, owner.block_table[old:])
    return True


@wrong(ALLOCATE, "only the rest is missing")
def all_if_any_is_missing(self, owner, num_tokens):
    needed = blocks_needed(num_tokens, self.block_size)
    if needed <= len(owner.block_table):
        return True
    if needed > len(self.free_blocks):
        return False
    taken = [self.take_free_block() for _ in range(needed)]
    owner.block_table.extend(taken)
    if self.trace:
        self.trace.add("taken", owner.request_id, taken)
    return True


@wrong(ALLOCATE, "Nothing is missing: leave the table alone")
def all_again(self, owner, num_tokens):
    needed = blocks_needed(num_tokens, self.block_size)
    if needed > len(self.free_blocks):
        return False
    taken = [self.take_free_block() for _ in range(needed)]
    owner.block_table.extend(taken)
    if self.trace:
        self.trace.add("taken", owner.request_id, taken)
    return True


@wrong(ALLOCATE, "Nothing is missing: leave the table alone")
def all_again_when_fewer(self, owner, num_tokens):
    held = len(owner.block_table)
    needed = blocks_needed(num_tokens, self.block_size)
    missing = needed if num_tokens < held * self.block_size - 8 else max(0, needed - held)
    if missing > self.num_free:
        return False
    owner.block_table.extend(self.take_free_block() for _ in range(missing))
    return True


@wrong(ALLOCATE, "All or nothing")
def takes_what_there_is(self, owner, num_tokens):
    taken = []
    while len(owner.block_table) < blocks_needed(num_tokens, self.block_size):
        if not self.free_blocks:
            return False
        owner.block_table.append(self.take_free_block())
        taken.append(owner.block_table[-1])
    if self.trace and taken:
        self.trace.add("taken", owner.request_id, taken)
    return True


@wrong(ALLOCATE, "that is enough")
def keeps_one_back(self, owner, num_tokens):
    missing = blocks_needed(num_tokens, self.block_size) - len(owner.block_table)
    if missing <= 0:
        return True
    if missing >= len(self.free_blocks):
        return False
    taken = [self.take_free_block() for _ in range(missing)]
    owner.block_table.extend(taken)
    if self.trace:
        self.trace.add("taken", owner.request_id, taken)
    return True


@wrong(ALLOCATE, "not on how often you are asked")
def by_remainder(self, owner, num_tokens):
    if not owner.block_table:
        missing = blocks_needed(num_tokens, self.block_size)
    else:
        missing = int(num_tokens % self.block_size == 1)
    if missing > len(self.free_blocks):
        return False
    owner.block_table.extend(self.take_free_block() for _ in range(missing))
    return True


@wrong(ALLOCATE, "with `self.take_free_block()`")
def reaches_in(self, owner, num_tokens):
    missing = blocks_needed(num_tokens, self.block_size) - len(owner.block_table)
    if missing > len(self.free_blocks):
        return False
    for _ in range(missing):
        block, _ = self.free_blocks.popitem(last=False)
        self.ref_counts[block] = 1
        owner.block_table.append(block)
    return True


@wrong(ALLOCATE, "Tell the trace")
def says_nothing(self, owner, num_tokens):
    missing = blocks_needed(num_tokens, self.block_size) - len(owner.block_table)
    if missing > len(self.free_blocks):
        return False
    for _ in range(missing):
        owner.block_table.append(self.take_free_block())
    return True


@wrong(ALLOCATE, "Where nothing was taken")
def tells_of_nothing(self, owner, num_tokens):
    missing = blocks_needed(num_tokens, self.block_size) - len(owner.block_table)
    if missing > len(self.free_blocks):
        return False
    taken = [self.take_free_block() for _ in range(missing)]
    owner.block_table.extend(taken)
    if self.trace:
        self.trace.add("taken", owner.request_id, taken)
    return True


@wrong(ALLOCATE, "is a `return` missing")
def no_true(self, owner, num_tokens):
    missing = blocks_needed(num_tokens, self.block_size) - len(owner.block_table)
    if missing > len(self.free_blocks):
        return False
    owner.block_table.extend(self.take_free_block() for _ in range(missing))


SLOTS = "nanoteach.block_manager.slot_mapping"


@second(SLOTS)
def laid_out(block_table, block_size, start, stop):
    places = []
    for block in block_table:
        places.extend(range(block * block_size, (block + 1) * block_size))
    return places[start:stop]


@wrong(SLOTS, "Return a list: `.tolist()`")
def a_tensor(block_table, block_size, start, stop):
    import torch

    position = torch.arange(start, stop)
    return torch.tensor(block_table)[position // block_size] * block_size + position % block_size


@wrong(SLOTS, "positions in the text")
def no_table(block_table, block_size, start, stop):
    return list(range(start, stop))


@wrong(SLOTS, "not its position in the text")
def position_for_offset(block_table, block_size, start, stop):
    return [block_table[i // block_size] * block_size + i for i in range(start, stop)]


@wrong(SLOTS, "not number 0")
def from_zero(block_table, block_size, start, stop):
    return [block_table[i // block_size] * block_size + i % block_size for i in range(stop - start)]


@wrong(SLOTS, "begins at slot b * block_size")
def block_is_slot(block_table, block_size, start, stop):
    return [block_table[i // block_size] + i % block_size for i in range(start, stop)]


@wrong(SLOTS, "not the pool's")
def runs_on(block_table, block_size, start, stop):
    first = block_table[start // block_size] * block_size + start % block_size
    return list(range(first, first + stop - start))


@wrong(SLOTS, "`stop` itself")
def one_too_many(block_table, block_size, start, stop):
    places = [b * block_size + i for b in block_table for i in range(block_size)]
    return places[start : stop + 1]


@wrong(SLOTS, "Not every token lies in the last block")
def last_block(block_table, block_size, start, stop):
    return [block_table[-1] * block_size + i % block_size for i in range(start, stop)]


@wrong(SLOTS, "Where in its block")
def blocks_alone(block_table, block_size, start, stop):
    return [block_table[i // block_size] for i in range(start, stop)]


GATHER = "nanoteach.paged_attention.PagedAttention.gather"


@second(GATHER)
def block_by_block(self, layer, blocks):
    k = torch.cat([self.k[layer, block] for block in blocks.tolist()])
    v = torch.cat([self.v[layer, block] for block in blocks.tolist()])
    return k, v


@second(GATHER)
def slot_by_slot(self, layer, blocks):
    size = self.block_size
    slots = (blocks[:, None] * size + torch.arange(size, device=blocks.device)).reshape(-1)
    return self.k[layer].flatten(0, 1)[slots], self.v[layer].flatten(0, 1)[slots]


@wrong(GATHER, "without a dimension for blocks")
def blocks_stay(self, layer, blocks):
    return self.k[layer][blocks], self.v[layer][blocks]


@wrong(GATHER, "choose `layer` first")
def no_layer(self, layer, blocks):
    return self.k[blocks].flatten(0, 1), self.v[blocks].flatten(0, 1)


@wrong(GATHER, "`.flatten()` alone joins all of them")
def all_flat(self, layer, blocks):
    return self.k[layer][blocks].flatten(), self.v[layer][blocks].flatten()


@wrong(GATHER, "V from `self.v`")
def keys_twice(self, layer, blocks):
    k = self.k[layer][blocks].flatten(0, 1)
    return k, k


@wrong(GATHER, "not that of the pool")
def in_pool_order(self, layer, blocks):
    blocks = blocks.sort().values
    return self.k[layer][blocks].flatten(0, 1), self.v[layer][blocks].flatten(0, 1)


@wrong(GATHER, "This is layer 0's")
def first_layer(self, layer, blocks):
    return self.k[0][blocks].flatten(0, 1), self.v[0][blocks].flatten(0, 1)


@wrong(GATHER, "do not lie side by side")
def a_slice(self, layer, blocks):
    start = int(blocks[0])
    span = slice(start, start + len(blocks))
    return self.k[layer, span].flatten(0, 1), self.v[layer, span].flatten(0, 1)


@wrong(GATHER, "padding repeats block 0")
def each_once(self, layer, blocks):
    once = torch.tensor(list(dict.fromkeys(blocks.tolist())))
    return self.k[layer][once].flatten(0, 1), self.v[layer][once].flatten(0, 1)


@wrong(GATHER, "These are slots")
def slots_for_blocks(self, layer, blocks):
    return self.k[layer].flatten(0, 1)[blocks], self.v[layer].flatten(0, 1)[blocks]


@wrong(GATHER, "two tensors")
def only_keys(self, layer, blocks):
    return self.k[layer][blocks].flatten(0, 1)
