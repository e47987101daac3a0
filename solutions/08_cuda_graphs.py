"""Notebook 08, answered. `python solutions/08_cuda_graphs.py` checks every answer."""

import numpy as np

from nanoteach.course import exercise
from nanoteach.sequence import Sequence, Status
from nanoteach.step_inputs import pad

# The first size in a sorted list that is not too small. Common wrong turns: the nearest size, which
# may be too small; a comparison that sends a step of exactly 8 to the graph of 16; and the largest
# size for a step that fits in none. That step must run without a graph, so the answer is None.


@exercise("nanoteach.step_inputs.bucket")
def bucket(sizes: list[int], num: int) -> int | None:
    """The smallest of the sizes that holds `num`; None where none does. `sizes` is sorted."""
    for size in sizes:
        if size >= num:
            return size
    return None


# A row of padding runs through every kernel like any other. It must find a token and a position
# that exist (0), must not store (slot -1), and must not read (length 0). Common wrong turns: slot 0
# is a real place, of whoever has block 0; and a buffer that is not padded to its end still holds
# rows of the step before, which would store a second time. The arrays must stay the same objects,
# since the graph's copy is made from them.


@exercise("nanoteach.step_inputs.fill_decodes")
def fill_decodes(to: dict[str, np.ndarray], decodes: list[Sequence], block_size: int) -> None:
    """Write the next token of each request, its position, slot and length; pad what is left."""
    ids, positions, slots, lengths = [], [], [], []
    for seq in decodes:
        position = seq.num_computed_tokens
        block, place = divmod(position, block_size)
        ids.append(seq.token_ids[position])
        positions.append(position)
        slots.append(seq.block_table[block] * block_size + place)
        lengths.append(position + 1)
    pad(to["input_ids"], ids, 0)
    pad(to["positions"], positions, 0)
    pad(to["slots"], slots, -1)
    pad(to["decode_lens"], lengths, 0)


# Each host copy remembers for each row whose list it wrote, and how much of it. A list only grows
# while its request runs, so the same list needs its new end and nothing else. A preempted request
# gets a new list; so `is`, and not the length or the request's name, says whether a row is stale.
# Common wrong turns: to look at the length alone; to share one memory between the two copies; and
# to send only the new numbers to the device, whose rows may be another request's since last time.


@exercise("nanoteach.step_inputs.BlockTables.send")
def send(self, turn: int, tables: list[list[int]]) -> None:
    """Bring the device's rows up to these tables. On the host only what is new is written."""
    known, host = self.known[turn], self.hosts[turn].numpy()
    for row, table in enumerate(tables):
        held, length = known[row]
        begin = length if held is table else 0
        if begin < len(table):
            host[row, begin : len(table)] = table[begin:]
        known[row] = (table, len(table))
    self.tables[: len(tables)].copy_(self.hosts[turn][: len(tables)], non_blocking=True)


# The row in the running step names the sample. Rows without a promise count too: row numbers are
# places in `sampled`, where every request of the step has one. Common wrong turns: to count
# promises instead of rows; to promise to one in mid-prompt, whose next input is known; to forget
# that the token in flight counts towards max_tokens, which wastes a row for every request.


@exercise("nanoteach.overlapped.Flight.promise")
def promise(self, last_too: bool = False) -> None:
    """Give every request that goes on a token to compute next, which the GPU will look up."""
    for row, (part, gives_token) in enumerate(
        zip(self.parts, self.pending.gives_token, strict=True)
    ):
        seq = part[0]
        if not gives_token or seq.status is not Status.RUNNING:
            continue
        if last_too or seq.num_output_tokens + 1 < seq.params.max_tokens:
            seq.token_ids.append(-1 - row)
