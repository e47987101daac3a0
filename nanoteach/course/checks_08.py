"""Checks of notebook 08: sizes, padding, tables and promises. Counted, or worked out by hand."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nanoteach.course.checking import Wrong, case, check, expect, expect_equal
from nanoteach.overlapped import Flight
from nanoteach.scheduler import Scheduled
from nanoteach.sequence import Sequence, Status
from nanoteach.step_inputs import BlockTables
from nanoteach.types import SamplingParams


@check("nanoteach.step_inputs.bucket", "Which graph serves a step", stages=(8,))
def check_bucket(bucket: Callable[[list[int], int], int | None]) -> None:
    """Counted up from the step's own size until one of the sizes is met."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48]
    for num in (5, 1, 2, 3, 16, 17, 25, 33, 48, 49, 100):
        right = next((n for n in range(num, 200) if n in sizes), None)
        smaller = max((size for size in sizes if size <= num), default=None)
        power = 1 << (num - 1).bit_length()
        larger = next((size for size in sizes if size > num), None)
        expect(
            f"a step of {num} in sizes {sizes}", bucket, sizes, num, to_be=right,
            likely=[
                (None, "This step fits: one of the sizes holds it."),
                (sizes[-1], "Not the largest of all: the smallest that holds the step." if right
                 else "The largest graph is too small for this step: None."),
                (larger, "A size that is just as large as the step holds it: nothing is padded."),
                (smaller, "This is too small: the step would not fit. The next size up."),
                (power, "Not every size is a power of two: look in the list."),
                (num, "There is no graph of this size: take the next one up."),
                (None if right is None else sizes.index(right), "That is its place in the list: "
                 "give the size that stands there."),
            ],
            if_raised=None if right else "None where none fits: `min` and `next` raise when there "
            "is nothing to give, unless they are told a default.",
        )  # fmt: skip


# --- padding ------------------------------------------------------------------------------------


def decode(name: str, tokens: list[int], table: list[int]) -> Sequence:
    """A request that decodes: all its tokens but the last are computed."""
    seq = Sequence(name, tokens, SamplingParams())
    seq.block_table, seq.num_computed_tokens = table, len(tokens) - 1
    seq.status = Status.RUNNING
    return seq


def buffers(rows: int, lens: int) -> dict[str, np.ndarray]:
    """What the step before has left in the buffers."""
    sizes = {"input_ids": rows, "positions": rows, "slots": rows, "decode_lens": lens}
    return {name: np.full(n, 77, np.int32) for name, n in sizes.items()}


@check("nanoteach.step_inputs.fill_decodes", "Rows and padding", stages=(8,))
def check_fill_decodes(fill_decodes: Callable[..., None]) -> None:
    """Three requests in buffers of four; a full step; and longer buffers than lengths."""
    # A has 6 tokens in blocks 3 and 5 of 4. Its last, token 15, is at position 5: block 5, place 1.
    # B has 4 tokens, the last at position 3, the end of block 0. C has 9: position 8 opens block 7.
    a = decode("A", [10, 11, 12, 13, 14, 15], [3, 5, 8])
    b = decode("B", [20, 21, 22, 23], [0])
    c = decode("C", list(range(30, 39)), [2, 6, 7])
    d = decode("D", [40], [9])
    # -1 in A's last place is a promise: it is an input like any other. E's table is longer than it.
    promised = decode("A", [10, 11, 12, 13, 14, -1], [3, 5])
    for name, seqs, rows, lens, right in (
        (
            "A, B and C in buffers of 4", [a, b, c], 4, 4,
            {"input_ids": [15, 23, 38, 0], "positions": [5, 3, 8, 0], "slots": [21, 3, 28, -1],
             "decode_lens": [6, 4, 9, 0]},
        ),
        (
            "D and B in buffers of 2: no padding", [d, b], 2, 2,
            {"input_ids": [40, 23], "positions": [0, 3], "slots": [36, 3], "decode_lens": [1, 4]},
        ),
        (
            "A, whose last token is a promise, in buffers of 4", [promised], 4, 4,
            {"input_ids": [-1, 0, 0, 0], "positions": [5, 0, 0, 0], "slots": [21, -1, -1, -1],
             "decode_lens": [6, 0, 0, 0]},
        ),
        (
            "B in a mixed step's buffers: 6 tokens, 3 lengths", [b], 6, 3,
            {"input_ids": [23, 0, 0, 0, 0, 0], "positions": [3, 0, 0, 0, 0, 0],
             "slots": [3, -1, -1, -1, -1, -1], "decode_lens": [4, 0, 0]},
        ),
        (
            "nobody decodes, buffers of 2", [], 2, 2,
            {"input_ids": [0, 0], "positions": [0, 0], "slots": [-1, -1], "decode_lens": [0, 0]},
        ),
    ):  # fmt: skip
        to = buffers(rows, lens)
        held = dict(to)
        case(name)
        fill_decodes(to, seqs, 4)
        for key, wanted in right.items():
            array = to.get(key)
            if array is not held[key]:
                raise Wrong(
                    f"{name}: {key}", "the same array, written in place", "another object",
                    "The graph reads the array that was there. Write into it: to[name][...] = ...",
                )  # fmt: skip
            got = array.tolist()
            words = words_for(key, got, wanted, seqs) if got != wanted else None
            expect_equal(f"{name}: {key}", wanted, got, words)


def words_for(key: str, got: list[int], wanted: list[int], seqs: list[Sequence]) -> str:
    """What a wrong array says."""
    n = len(seqs)
    if got[:n] == wanted[:n]:
        if 77 in got[n:]:
            return "What the step before wrote is still there: pad the whole rest of the array."
        if key == "slots":
            return (
                f"A padded row with slot {got[n]} would store its K/V there, in some request's "
                "memory. Padding has slot -1."
            )
        if key == "decode_lens":
            return "A padded row attends to nothing: its length is 0."
        return "Padding is 0 here, so that it looks up a token and a position that exist."
    if key == "decode_lens" and got[:n] == [w - 1 for w in wanted[:n]]:
        return "The new token counts as well: it attends to itself."
    if key == "positions" and got[:n] == [w + 1 for w in wanted[:n]]:
        return "The first token of a text is at position 0."
    if key == "slots" and got[:n] == [s.block_table[s.num_computed_tokens // 4] for s in seqs]:
        return (
            "That is the block. The slot is its number times the block size, and the place in it."
        )
    if key == "slots" and got[:n] == [s.num_computed_tokens for s in seqs]:
        return "That is the position in the text: the block table says where in the pool it lies."
    if key == "slots" and any(s.block_table[-1] * 4 <= g < s.block_table[-1] * 4 + 4
                              for g, s in zip(got, seqs, strict=False)):  # fmt: skip
        return (
            "The new token goes to place p of block b: p is its position modulo the block size, b "
            "the entry of the table at position // block size. A table may be longer than the text."
        )
    return "Each request's next token is the first that is not computed: the one at this position."


# --- tables -------------------------------------------------------------------------------------

POISON = 55


def rows_of(name: str, tables: BlockTables, turn: int, sent: list[list[int]]) -> list[list[int]]:
    """Send some tables; what the device has of each."""
    case(name, "Is it a list that is assigned? The host copy is a tensor and takes none: its "
         "`.numpy()` does.")  # fmt: skip
    tables.send(turn, sent)
    return [tables.tables[row, : len(table)].tolist() for row, table in enumerate(sent)]


@check("nanoteach.step_inputs.BlockTables.send", "Tables, as far as they are new", stages=(8,))
def check_send(send: Callable[..., None]) -> None:
    """Tables that grow, change rows and come back, on both host copies; then what is written."""
    tables = BlockTables(3, 6, torch.device("cpu"))
    device = tables.tables
    a, b = [4, 7], [5]
    name = "turn 0: A has blocks 4 and 7, B has 5"
    got = rows_of(name, tables, 0, [a, b])
    nothing = [[0, 0], [0]]
    expect_equal(
        name, [[4, 7], [5]], got,
        [(nothing, "The device has nothing yet: copy the host's rows to `self.tables`.")],
    )  # fmt: skip
    if tables.tables is not device:
        raise Wrong(
            name, "self.tables, written in place", "another tensor in its place",
            "A graph goes on reading the tensor that it was recorded with: use copy_.",
        )  # fmt: skip
    name = "turn 1, the same tables: the other host copy has none of it"
    expect_equal(
        name, [[4, 7], [5]], rows_of(name, tables, 1, [a, b]),
        "There are two host copies, and each has rows of its own: look at self.known[turn].",
    )  # fmt: skip
    a.append(9)
    name = "turn 0: A grew by block 9"
    expect_equal(
        name, [[4, 7, 9], [5]], rows_of(name, tables, 0, [a, b]),
        [([[4, 7, 0], [5]], "A's table grew since this copy was last written: write what was added."
          )],
    )  # fmt: skip
    name = "turn 1: A is over, and B has moved to row 0"
    expect_equal(
        name, [[5]], rows_of(name, tables, 1, [b]),
        [([[4]], "Row 0 still holds A's table. Another request's table is written from its "
          "beginning, whatever its length.")],
    )  # fmt: skip
    name = "turn 0: row 0 is A's again, as this copy has it already"
    expect_equal(
        name, [[4, 7, 9], [5]], rows_of(name, tables, 0, [a, b]),
        "The device's rows hold what the last turn sent: copy whole rows, not only what is new on "
        "the host.",
    )  # fmt: skip
    old, a = a, [2, 0, 3]
    name = "turn 0: A was preempted and came back, with blocks 2, 0 and 3 in a new list"
    expect_equal(
        name, [[2, 0, 3], [5]], rows_of(name, tables, 0, [a, b]),
        [([[4, 7, 9], [5]], "The table is as long as before and yet another one: its blocks were "
          "given back. Ask whether it is the same list.")],
    )  # fmt: skip
    for i in range(4):
        name = f"one request a step, each with two blocks of its own (step {i + 1})"
        expect_equal(
            name, [[i + 1, i]], rows_of(name, tables, 0, [list((i + 1, i))]),
            "A list that is gone may leave its id() to the next one: keep the list itself.",
        )  # fmt: skip
    del old

    tables = BlockTables(2, 6, torch.device("cpu"))
    a, b = [4, 7], [5]
    rows_of("turn 0: A and B", tables, 0, [a, b])
    tables.hosts[0][0, 0] = tables.hosts[0][1, 0] = POISON  # whoever writes here writes again
    a.append(9)
    name = "turn 0: A grew by one block. Blocks that this copy had before"
    rows_of(name, tables, 0, [a, b])
    expect_equal(
        name + f" (we put {POISON} there, and look whether it stays)",
        [POISON, POISON], tables.hosts[0][:2, 0].tolist(),
        "They were written again. With 256 requests of 256 blocks that is 65,536 numbers a step: "
        "write from the length that is known, and remember the new one.",
    )  # fmt: skip


# --- promises -----------------------------------------------------------------------------------


def flight_of(*parts: tuple[Sequence, int]) -> Flight:
    """A step that has been launched."""
    scheduled = [Scheduled(seq, num_new) for seq, num_new in parts]
    pending: Any = SimpleNamespace(gives_token=[part.gives_token for part in scheduled])
    return Flight(scheduled, pending)


def seq_of(name: str, prompt: int, outputs: int, computed: int, max_tokens: int) -> Sequence:
    """A running request."""
    seq = Sequence(name, list(range(100, 100 + prompt)), SamplingParams(max_tokens=max_tokens))
    seq.token_ids += range(200, 200 + outputs)
    seq.num_computed_tokens, seq.status = computed, Status.RUNNING
    return seq


@check("nanoteach.overlapped.Flight.promise", "Promises", stages=(8,))
def check_promise(promise: Callable[..., None]) -> None:
    """A step of five requests, each another case; then the same with `last_too`."""
    for last_too in (False, True):
        over = seq_of("over", 3, 2, 4, 9)
        last = seq_of("last", 3, 4, 6, 5)  # its fifth output is on its way, and is its last
        middle = seq_of("middle", 12, 0, 4, 9)  # computes 4 of its prompt, and 4 are left
        first = seq_of("first", 4, 0, 0, 9)  # its whole prompt
        going = seq_of("going", 2, 5, 6, 9)
        flight = flight_of((over, 1), (last, 1), (going, 1), (middle, 4), (first, 4))
        over.status = Status.FINISHED
        seqs = (over, last, going, middle, first)
        before = [list(seq.token_ids) for seq in seqs]
        name = "a step of five requests" + (", last_too" if last_too else "")
        case(name)
        flight.promise(last_too) if last_too else flight.promise()
        got = {
            seq.request_id: seq.token_ids[len(old) :] for seq, old in zip(seqs, before, strict=True)
        }
        if any(seq.token_ids[: len(old)] != old for seq, old in zip(seqs, before, strict=True)):
            raise Wrong(name, "tokens as they were, and promises after them", "tokens were changed",
                        "Append; the tokens before are known.")  # fmt: skip
        minus_row = got["going"] == [-2] and got["first"] == [-4]
        wanted = {"over": [], "last": [-2] if last_too else [], "going": [-3], "middle": [],
                  "first": [-5]}  # fmt: skip
        for who, words in (
            ("going", [
                ([], "It goes on: it has 5 outputs, the step gives the 6th, and it may have 9."),
                ([-2], "-row would be 0 for row 0, which is a token: hence -1 - row." if minus_row
                 else "The number is the row in the step, and every row counts: also those that "
                 "get no promise." if not last_too else
                 "Rows count from 0, and row i is promised as -1 - i."),
                ([-1], "The number is the row in the step: row i is promised as -1 - i."),
                ([2], "A token id is never negative, so a promise is: -1 - row."),
            ]),
            ("over", "It is over (its status is FINISHED): nobody waits for its token."),
            ("middle", "It is in the middle of its prompt: the step gives it no token "
             "(self.pending.gives_token), and its next input is known."),
            ("last", [
                ([], "With last_too, those at their max_tokens get one as well."),
                ([-2], "The token in flight is its last (4 outputs, and max_tokens is 5): it "
                 "computes nothing after it. The token in flight counts."),
            ]),
            ("first", "Its prompt is computed, and its first token is in flight, in row 4."),
        ):  # fmt: skip
            expect_equal(f"{name}: what was put after the tokens of {who!r}", wanted[who],
                         got[who], words)  # fmt: skip
