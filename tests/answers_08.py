"""Second right answers and wrong ones to the exercises of notebook 08."""

from course_cases import second, wrong

BUCKET = "nanoteach.step_inputs.bucket"


@second(BUCKET)
def smallest_of_those(sizes, num):
    return min((size for size in sizes if size >= num), default=None)


@wrong(BUCKET, "just as large as the step holds it")
def strictly_larger(sizes, num):
    return next((size for size in sizes if size > num), None)


@wrong(BUCKET, "too small: the step would not fit")
def the_one_below(sizes, num):
    return max(size for size in sizes if size <= num)


@wrong(BUCKET, "The largest graph is too small for this step: None")
def the_largest_at_last(sizes, num):
    return next((size for size in sizes if size >= num), sizes[-1])


@wrong(BUCKET, "Not every size is a power of two")
def powers_of_two(sizes, num):
    power = 1
    while power < num:
        power *= 2
    return power if power <= sizes[-1] else None


@wrong(BUCKET, "There is no graph of this size")
def the_step_s_own(sizes, num):
    return num if num <= sizes[-1] else None


@wrong(BUCKET, "Not the largest of all")
def always_the_largest(sizes, num):
    return sizes[-1] if num <= sizes[-1] else None


@wrong(BUCKET, "That is its place in the list")
def the_place(sizes, num):
    return next((place for place, size in enumerate(sizes) if size >= num), None)


@wrong(BUCKET, "None where none fits")
def the_smallest_of_nothing(sizes, num):
    return min(size for size in sizes if size >= num)


FILL = "nanoteach.step_inputs.fill_decodes"


@second(FILL)
def row_by_row(to, decodes, block_size):
    to["input_ids"].fill(0)
    to["positions"].fill(0)
    to["slots"].fill(-1)
    to["decode_lens"].fill(0)
    for row, seq in enumerate(decodes):
        n = seq.num_computed_tokens
        to["input_ids"][row] = seq.token_ids[n]
        to["positions"][row] = n
        to["slots"][row] = seq.block_table[n // block_size] * block_size + n % block_size
        to["decode_lens"][row] = n + 1


@wrong(FILL, "Padding has slot -1")
def slot_0(to, decodes, block_size):
    at = [seq.num_computed_tokens for seq in decodes]
    slots = [s.block_table[n // block_size] * block_size + n % block_size
             for s, n in zip(decodes, at, strict=True)]  # fmt: skip
    pad(to["input_ids"], [s.token_ids[n] for s, n in zip(decodes, at, strict=True)], 0)
    pad(to["positions"], at, 0)
    pad(to["slots"], slots, 0)
    pad(to["decode_lens"], [n + 1 for n in at], 0)


@wrong(FILL, "What the step before wrote is still there")
def not_padded(to, decodes, block_size):
    for row, seq in enumerate(decodes):
        n = seq.num_computed_tokens
        to["input_ids"][row] = seq.token_ids[n]
        to["positions"][row] = n
        to["slots"][row] = seq.block_table[n // block_size] * block_size + n % block_size
        to["decode_lens"][row] = n + 1


@wrong(FILL, "its length is 0")
def length_1(to, decodes, block_size):
    at = [seq.num_computed_tokens for seq in decodes]
    slots = [s.block_table[n // block_size] * block_size + n % block_size
             for s, n in zip(decodes, at, strict=True)]  # fmt: skip
    pad(to["input_ids"], [s.token_ids[n] for s, n in zip(decodes, at, strict=True)], 0)
    pad(to["positions"], at, 0)
    pad(to["slots"], slots, -1)
    pad(to["decode_lens"], [n + 1 for n in at], 1)


@wrong(FILL, "The new token counts as well")
def history_only(to, decodes, block_size):
    at = [seq.num_computed_tokens for seq in decodes]
    slots = [s.block_table[n // block_size] * block_size + n % block_size
             for s, n in zip(decodes, at, strict=True)]  # fmt: skip
    pad(to["input_ids"], [s.token_ids[n] for s, n in zip(decodes, at, strict=True)], 0)
    pad(to["positions"], at, 0)
    pad(to["slots"], slots, -1)
    pad(to["decode_lens"], at, 0)


@wrong(FILL, "the block table says where in the pool it lies")
def positions_for_slots(to, decodes, block_size):
    at = [seq.num_computed_tokens for seq in decodes]
    pad(to["input_ids"], [s.token_ids[n] for s, n in zip(decodes, at, strict=True)], 0)
    pad(to["positions"], at, 0)
    pad(to["slots"], at, -1)
    pad(to["decode_lens"], [n + 1 for n in at], 0)


@wrong(FILL, "A table may be longer than the text")
def last_block(to, decodes, block_size):
    at = [seq.num_computed_tokens for seq in decodes]
    slots = [s.block_table[-1] * block_size + n % block_size
             for s, n in zip(decodes, at, strict=True)]  # fmt: skip
    pad(to["input_ids"], [s.token_ids[n] for s, n in zip(decodes, at, strict=True)], 0)
    pad(to["positions"], at, 0)
    pad(to["slots"], slots, -1)
    pad(to["decode_lens"], [n + 1 for n in at], 0)


@wrong(FILL, "Write into it")
def new_arrays(to, decodes, block_size):
    rows = len(to["input_ids"])
    at = [seq.num_computed_tokens for seq in decodes]
    rest = [0] * (rows - len(at))
    ids = [s.token_ids[n] for s, n in zip(decodes, at, strict=True)]
    to["input_ids"] = np.array(ids + rest, np.int32)
    to["positions"] = np.array(at + rest, np.int32)


SEND = "nanoteach.step_inputs.BlockTables.send"


@second(SEND)
def by_comparing(self, turn, tables):
    for row, table in enumerate(tables):
        held = self.known[turn][row][0] or []
        same = 0
        while same < len(held) and same < len(table) and held[same] == table[same]:
            same += 1
        if same < len(table):
            new = torch.tensor(table[same:], dtype=torch.int32)
            self.hosts[turn][row, same : len(table)] = new
        self.known[turn][row] = (list(table), len(table))
    for row in range(len(tables)):
        self.tables[row].copy_(self.hosts[turn][row])


@wrong(SEND, "Row 0 still holds A's table")
def by_length(self, turn, tables):
    for row, table in enumerate(tables):
        _, length = self.known[turn][row]
        if length < len(table):
            self.hosts[turn].numpy()[row, length : len(table)] = table[length:]
            self.known[turn][row] = (table, len(table))
    self.tables[: len(tables)].copy_(self.hosts[turn][: len(tables)])


@wrong(SEND, "They were written again")
def everything_again(self, turn, tables):
    for row, table in enumerate(tables):
        self.hosts[turn].numpy()[row, : len(table)] = table
    self.tables[: len(tables)].copy_(self.hosts[turn][: len(tables)])


@wrong(SEND, "each has rows of its own: look at self.known[turn]")
def one_memory_for_both(self, turn, tables):
    for row, table in enumerate(tables):
        held, length = self.known[0][row]
        length = length if held is table else 0
        if length < len(table):
            self.hosts[turn].numpy()[row, length : len(table)] = table[length:]
            self.known[0][row] = (table, len(table))
    self.tables[: len(tables)].copy_(self.hosts[turn][: len(tables)])


@wrong(SEND, "copy whole rows, not only what is new on the host")
def only_the_new_to_the_device(self, turn, tables):
    for row, table in enumerate(tables):
        held, length = self.known[turn][row]
        length = length if held is table else 0
        if length < len(table):
            self.hosts[turn].numpy()[row, length : len(table)] = table[length:]
            self.tables[row, length : len(table)] = self.hosts[turn][row, length : len(table)]
            self.known[turn][row] = (table, len(table))


@wrong(SEND, "The device has nothing yet")
def host_only(self, turn, tables):
    for row, table in enumerate(tables):
        held, length = self.known[turn][row]
        length = length if held is table else 0
        if length < len(table):
            self.hosts[turn].numpy()[row, length : len(table)] = table[length:]
            self.known[turn][row] = (table, len(table))


@wrong(SEND, "use copy_")
def another_tensor(self, turn, tables):
    for row, table in enumerate(tables):
        held, length = self.known[turn][row]
        length = length if held is table else 0
        if length < len(table):
            self.hosts[turn].numpy()[row, length : len(table)] = table[length:]
            self.known[turn][row] = (table, len(table))
    self.tables = self.hosts[turn].clone()


@wrong(SEND, "Ask whether it is the same list")
def same_length_is_same_table(self, turn, tables):
    for row, table in enumerate(tables):
        held, length = self.known[turn][row]
        if held is not None and length == len(table):
            continue
        self.hosts[turn].numpy()[row, : len(table)] = table
        self.known[turn][row] = (table, len(table))
    self.tables[: len(tables)].copy_(self.hosts[turn][: len(tables)])


@wrong(SEND, "its `.numpy()` does")
def a_list_into_a_tensor(self, turn, tables):
    for row, table in enumerate(tables):
        held, length = self.known[turn][row]
        length = length if held is table else 0
        if length < len(table):
            self.hosts[turn][row, length : len(table)] = table[length:]
            self.known[turn][row] = (table, len(table))
    self.tables[: len(tables)].copy_(self.hosts[turn][: len(tables)])


PROMISE = "nanoteach.overlapped.Flight.promise"


@second(PROMISE)
def by_index(self, last_too=False):
    for i in range(len(self.parts)):
        seq = self.parts[i][0]
        waits = self.pending.gives_token[i] and seq.status == Status.RUNNING
        is_last = len(seq.output_token_ids) == seq.params.max_tokens - 1
        if waits and (last_too or not is_last):
            seq.token_ids += [-(i + 1)]


@wrong(PROMISE, "every row counts: also those that get no promise")
def counts_promises(self, last_too=False):
    given = 0
    for row, (seq, _, _, _) in enumerate(self.parts):
        if self.pending.gives_token[row] and seq.status is Status.RUNNING:
            given += 1
            if last_too or seq.num_output_tokens + 1 != seq.params.max_tokens:
                seq.token_ids.append(-given)


@wrong(PROMISE, "hence -1 - row")
def minus_the_row(self, last_too=False):
    for row, (seq, _, _, _) in enumerate(self.parts):
        goes_on = last_too or seq.num_output_tokens + 1 != seq.params.max_tokens
        if self.pending.gives_token[row] and seq.status is Status.RUNNING and goes_on:
            seq.token_ids.append(-row)


@wrong(PROMISE, "It is in the middle of its prompt")
def to_everybody_who_runs(self, last_too=False):
    for row, (seq, _, _, _) in enumerate(self.parts):
        goes_on = seq.num_output_tokens + 1 != seq.params.max_tokens
        if seq.status is Status.RUNNING and (goes_on or last_too):
            seq.token_ids.append(-1 - row)


@wrong(PROMISE, "It is over")
def to_those_who_are_over(self, last_too=False):
    for row, (seq, _, _, _) in enumerate(self.parts):
        goes_on = seq.num_output_tokens + 1 != seq.params.max_tokens
        if self.pending.gives_token[row] and (goes_on or last_too):
            seq.token_ids.append(-1 - row)


@wrong(PROMISE, "The token in flight counts")
def forgets_the_one_in_flight(self, last_too=False):
    for row, (seq, _, _, _) in enumerate(self.parts):
        goes_on = seq.num_output_tokens < seq.params.max_tokens
        waits = self.pending.gives_token[row] and seq.status is Status.RUNNING
        if waits and (last_too or goes_on):
            seq.token_ids.append(-1 - row)


@wrong(PROMISE, "those at their max_tokens get one as well")
def ignores_last_too(self, last_too=False):
    for row, (seq, _, _, _) in enumerate(self.parts):
        goes_on = seq.num_output_tokens + 1 != seq.params.max_tokens
        if self.pending.gives_token[row] and seq.status is Status.RUNNING and goes_on:
            seq.token_ids.append(-1 - row)


@wrong(PROMISE, "row i is promised as -1 - i")
def always_minus_1(self, last_too=False):
    for row, (seq, _, _, _) in enumerate(self.parts):
        goes_on = last_too or seq.num_output_tokens + 1 != seq.params.max_tokens
        if self.pending.gives_token[row] and seq.status is Status.RUNNING and goes_on:
            seq.token_ids.append(-1)
