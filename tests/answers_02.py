"""Second and wrong answers to the exercises of notebook 02; see course_cases.py."""

from course_cases import second, wrong

APPEND = "nanoteach.kv_cache.ContiguousKVCache.append"


@second(APPEND)
def one_by_one(self, layer, k, v, slot_mapping):
    for token, slot in enumerate(slot_mapping.tolist()):
        self.k[layer, slot] = k[token]
        self.v[layer, slot] = v[token]


@wrong(APPEND, "what is done to a copy stays in the copy")
def into_a_copy(self, layer, k, v, slot_mapping):
    self.k[layer][slot_mapping].copy_(k)
    self.v[layer][slot_mapping].copy_(v)


@wrong(APPEND, "Nothing was written here")
def keys_only(self, layer, k, v, slot_mapping):
    self.k[layer].index_copy_(0, slot_mapping, k)


@wrong(APPEND, "Slots need not follow one another")
def one_slice(self, layer, k, v, slot_mapping):
    start = int(slot_mapping[0])
    self.k[layer, start : start + len(k)] = k
    self.v[layer, start : start + len(v)] = v


@wrong(APPEND, "Only the layer that is named")
def every_layer(self, layer, k, v, slot_mapping):
    self.k[:, slot_mapping] = k
    self.v[:, slot_mapping] = v


@wrong(APPEND, "do not add to it")
def added_up(self, layer, k, v, slot_mapping):
    self.k[layer].index_add_(0, slot_mapping, k)
    self.v[layer].index_add_(0, slot_mapping, v)


@wrong(APPEND, "One slot late")
def one_slot_late(self, layer, k, v, slot_mapping):
    self.k[layer][slot_mapping + 1] = k
    self.v[layer][slot_mapping + 1] = v


@wrong(APPEND, "self.k must stay the cache's own tensor")
def puts_the_new_in_its_place(self, layer, k, v, slot_mapping):
    self.k, self.v = k, v


@wrong(APPEND, "self.k afterwards")
def another_layer_up(self, layer, k, v, slot_mapping):
    self.k[layer - 1][slot_mapping] = k
    self.v[layer - 1][slot_mapping] = v


MASK = "nanoteach.kv_cache.decode_mask"


@second(MASK)
def filled_row_by_row(seq_lens, width):
    mask = torch.zeros(len(seq_lens), width, dtype=torch.bool)
    for row, length in enumerate(seq_lens):
        mask[row, :length] = True
    return mask


@wrong(MASK, "it sees key 0 alone")
def as_is_causal_does(seq_lens, width):
    return torch.ones(1, width, dtype=torch.bool).tril().expand(len(seq_lens), width)


@wrong(MASK, "A triangle, as is_causal makes it")
def a_triangle(seq_lens, width):
    return torch.ones(len(seq_lens), width, dtype=bool).tril()


@wrong(MASK, "One too many")
def one_key_more(seq_lens, width):
    return torch.arange(width) <= torch.tensor(seq_lens)[:, None]


@wrong(MASK, "sees itself too")
def not_itself(seq_lens, width):
    return torch.arange(width) < torch.tensor(seq_lens)[:, None] - 1


@wrong(MASK, "True means that the key may be seen")
def padding_is_true(seq_lens, width):
    return torch.arange(width) >= torch.tensor(seq_lens)[:, None]


@wrong(MASK, "SDPA adds a mask of numbers")
def zeros_and_ones(seq_lens, width):
    return (torch.arange(width) < torch.tensor(seq_lens)[:, None]).float()


@wrong(MASK, "SDPA adds a mask of numbers")
def minus_infinity(seq_lens, width):
    hidden = torch.arange(width) >= torch.tensor(seq_lens)[:, None]
    return torch.zeros(len(seq_lens), width).masked_fill(hidden, float("-inf"))


@wrong(MASK, "nothing is padded on the left")
def left_padded(seq_lens, width):
    return torch.arange(width) >= width - torch.tensor(seq_lens)[:, None]


@wrong(MASK, "left from an older request")
def everything(seq_lens, width):
    return torch.ones(len(seq_lens), width, dtype=torch.bool)


PLAN = "nanoteach.kv_cache.ContiguousKVCache.plan"


@second(PLAN)
def by_tensors(self, query_lens, seq_lens):
    new, total = torch.tensor(query_lens), torch.tensor(seq_lens)
    rows = torch.arange(len(new)).repeat_interleave(new)
    # The i-th new token of its row: count in the packed step, from where the row begins in it.
    i = torch.arange(int(new.sum())) - (new.cumsum(0) - new)[rows]
    slots = rows * self.row_len + (total - new)[rows] + i
    mask = torch.arange(int(total.max())) < total[:, None]
    return ContiguousMetadata(query_lens, seq_lens, slots, mask)


@wrong(PLAN, "they go after the history, not over it")
def from_zero(self, query_lens, seq_lens):
    slots = [row * self.row_len + i for row, new in enumerate(query_lens) for i in range(new)]
    mask = decode_mask(seq_lens, max(seq_lens))
    return ContiguousMetadata(query_lens, seq_lens, torch.tensor(slots), mask)


@wrong(PLAN, "One slot late")
def count_for_a_position(self, query_lens, seq_lens):
    slots = []
    for row, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        slots += [row * self.row_len + p for p in range(length - new + 1, length + 1)]
    mask = decode_mask(seq_lens, max(seq_lens))
    return ContiguousMetadata(query_lens, seq_lens, torch.tensor(slots), mask)


@wrong(PLAN, "row_len slots later")
def positions_alone(self, query_lens, seq_lens):
    slots = [p for new, n in zip(query_lens, seq_lens, strict=True) for p in range(n - new, n)]
    mask = decode_mask(seq_lens, max(seq_lens))
    return ContiguousMetadata(query_lens, seq_lens, torch.tensor(slots), mask)


@wrong(PLAN, "Rows are row_len slots apart")
def as_far_apart_as_the_longest(self, query_lens, seq_lens):
    slots = []
    for row, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        slots += [row * max(seq_lens) + p for p in range(length - new, length)]
    mask = decode_mask(seq_lens, max(seq_lens))
    return ContiguousMetadata(query_lens, seq_lens, torch.tensor(slots), mask)


@wrong(PLAN, "each needs its slot")
def the_last_alone(self, query_lens, seq_lens):
    slots = [row * self.row_len + n - 1 for row, n in enumerate(seq_lens)]
    mask = decode_mask(seq_lens, max(seq_lens))
    return ContiguousMetadata(query_lens, seq_lens, torch.tensor(slots), mask)


@wrong(PLAN, "nobody reads further")
def mask_of_the_whole_row(self, query_lens, seq_lens):
    slots = []
    for row, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        slots += [row * self.row_len + p for p in range(length - new, length)]
    mask = decode_mask(seq_lens, self.row_len)
    return ContiguousMetadata(query_lens, seq_lens, torch.tensor(slots), mask)


@wrong(PLAN, "Return a ContiguousMetadata")
def slots_alone(self, query_lens, seq_lens):
    slots = []
    for row, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        slots += [row * self.row_len + p for p in range(length - new, length)]
    return torch.tensor(slots)
