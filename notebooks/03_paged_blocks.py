# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · Paged blocks
#
# **At the end a request holds memory for the tokens that it has, not for those that it might get,
# and the same memory serves several times as many requests.**
#
# 60 minutes. It needs notebook 02: the KV cache, and the static batch of rows. No GPU.

# %% tags=["nbval-ignore-output"]
import random
from functools import partial

import torch

from nanoteach.bench.workloads import stage_workload
from nanoteach.block_manager import BlockManager
from nanoteach.config import EngineConfig
from nanoteach.cost_model import SHAPES, Work, kv_bytes_per_token, max_requests, step_cost
from nanoteach.course import (
    exercise,
    installed,
    open_notebook,
    pictures,
    predict,
    reveal,
    show,
    widgets,
)
from nanoteach.course.pictures import RecordingClock, Request, static_run
from nanoteach.course.timing import recorded_stages, stage_table, timed, timing_model, where
from nanoteach.hardware import hardware_named, measure
from nanoteach.hub import resolve_model
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.paged_attention import PagedAttention, Row, group_by_length
from nanoteach.reference import compare, references
from nanoteach.stages import STAGES, Parts
from nanoteach.types import SamplingParams, Trace

open_notebook(3)

# %% [markdown]
# ## The row that waits
#
# Six chats come to the engine of notebook 02. The last is **request F**, the one that we follow
# through the course.

# %%
folder = resolve_model("tiny")
tokenizer = load_tokenizer(folder)
eos = eos_token_ids(folder)
model = load_model(folder, "cpu", torch.float32, max_model_len=1024)


def chat(question):
    """The token ids of a question, in the model's chat template."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def stage(number, num_tokens, clock=None, model=model, trace=None):
    """A stage of the course with K/V memory for so many tokens."""
    config = EngineConfig(
        max_num_seqs=24, max_model_len=1024, num_gpu_blocks_override=num_tokens // 16
    )
    return STAGES[number - 1].build(Parts(model, config, eos, clock, trace))


questions = {
    "A": "What is 27 plus 48?",
    "B": "Who are you?",
    "C": "Tell me a story about a dragon.",
    "D": "What colour is snow?",
    "E": "What is 5 plus 6?",
    "F": "Tell me a story about a fox.",
}
prompts = [chat(question) for question in questions.values()]
in_rows = stage(2, 6 * 1024).generate(prompts, SamplingParams(max_tokens=400))
print(tokenizer.decode(in_rows[-1], skip_special_tokens=True))

# %% [markdown]
# When F came, nobody knew how long its answer would be. It could have been as long as the model
# allows: here 1,024 tokens, prompt and answer together. So F got a row of 1,024 places, and so did
# everybody else. How many of them were used?
#
# One detail first, since it decides every count below. The token that was sampled last has no K/V
# yet. It is the input of the *next* step, and if there is no next step, it never gets any.
#
# ```
#   prompt      generated
#   p p p p p   g g g g       9 tokens
#   # # # # #   # # # .       8 of them have K/V: 5 + 4 - 1
# ```

# %%
for name, prompt, output in zip(questions, prompts, in_rows, strict=True):
    filled = len(prompt) + len(output) - 1
    print(
        f"{name}  {len(prompt):3} tokens in, {len(output):3} out: {filled:3} of 1,024 places used"
    )

# %% [markdown]
# The same run, as a picture. On the left are the rows of notebook 02. On the right is what you
# build now: memory comes in small pieces, *pages*, and a request takes one more when it needs it.
# Above is one moment, half-way; below is the whole run. The code is that of stages 2 and 3, with
# the lengths that you have just seen.

# %% tags=["nbval-ignore-output"]
requests = [Request(len(p), len(o)) for p, o in zip(prompts, in_rows, strict=True)]
rows = static_run(requests, row_len=1024, batch_size=6)
pages = static_run(requests, row_len=1024, batch_size=6, stage="pages")
pictures.reservation_and_pages(rows.memory, pages.memory)

# %%
for name, run in (("rows", rows), ("pages", pages)):
    held = sum(row.held for moment in run.memory for row in moment.values())
    filled = sum(row.filled for moment in run.memory for row in moment.values())
    print(f"{name:6} {filled / held:5.1%} of what is held is filled")

# %% [markdown]
# The waste of the rows has two parts. Places *that will be used later* stand empty until then: F
# holds the place of its last word from the first step on. And most places *will never be used*,
# because an answer is seldom as long as it could be. In the serving systems of 2023, 20% to 38% of
# this memory held tokens (Kwon et al., whose paper brought pages to serving; see the end).
#
# As long as a request writes, its pages waste in one place: the last of them is partly empty. It
# does not grow with the text. (K/V of requests that are done count as filled here. In the picture,
# A, B, D and E were done at step 16 or before, and they still hold their pages. 04 ends that.) How
# much of what the pages hold is filled for a request that still writes?

# %%
stays = pictures.static_stays(pages.steps, [len(o) for o in in_rows])
last_steps = {stay.name: stay.working[-1] for stay in stays}
held = sum(row.held for moment in pages.memory for row in moment.values())
needed = sum(
    row.filled
    for number, moment in enumerate(pages.memory, 1)
    for name, row in moment.items()
    if number <= last_steps[name]
)
print("last step of each request:", last_steps)
print(f"{needed / held:.1%} of what is held is filled, and its request still writes")

# %% [markdown]
# The rest is held for requests that are done, or empty at the end of a page.
#
# ## What the waste costs
#
# Take Qwen3-0.6B and 14 GiB for K/V. In notebook 00 you found 112 KiB a token. Let the limit be
# 4,096 tokens, and let each request really use 1,024.

# %%
qwen, memory = SHAPES["qwen3-0.6b"], 14 * 2**30
places = memory // kv_bytes_per_token(qwen)
reserved = max_requests(qwen, memory, 4096)
used = max_requests(qwen, memory, 1024)
print(f"{places:,} places")
print(f"{reserved:3} requests, if each is reserved 4,096 of them")
print(f"{used:3} requests, if each holds the 1,024 that it uses")


# %% tags=["nbval-ignore-output"]
@pictures.drawing
def same_memory():
    """One area, 14 GiB, twice: a request is a box, what it uses is blue."""
    figure = pictures.canvas(2.9)
    for axes, columns, lines, part, title in zip(
        figure.subplots(1, 2), (8, 16), (4, 8), (0.25, 1), ("rows", "pages"), strict=True
    ):
        pictures.bare(axes, (0, columns), (lines, 0))
        for i in range(columns * lines):
            x, y = i % columns, i // columns
            pictures.box(axes, x, y, 1, 1, pictures.PALE, **pictures.HATCHED)
            pictures.box(axes, x, y, part, 1, pictures.BLUE)
            pictures.box(axes, x, y, 1, 1, "none", edgecolor="white", lw=1.2)
        axes.set_title(f"{title}: {columns * lines} requests in 14 GiB, 1,024 tokens used by each")
    return figure


same_memory()

# %% [markdown]
# ## Predict
#
# Four times as many requests decode in one step. What does that gain? And what does it gain here,
# on this machine, with our small model, if 24 requests share one batch, instead of four at a
# time? Put your numbers in the place of `...`.

# %%
predict("H200, Qwen3-0.6B, 1,024 tokens each: 128 decode together, not 32", ..., "times as fast")
predict("this machine, tiny, short chats: 24 in a batch, not 4", ..., "times as fast")

# %% [markdown]
# The cost model's answer for the H200:

# %%
h200 = hardware_named("h200")
for together in (reserved, used):
    cost = step_cost(qwen, [Work(1, 1024)] * together)
    seconds = cost.seconds(h200)
    speed = together / seconds
    print(f"{together:3} requests: {1000 * seconds:.3f} ms a step, {speed:6,.0f} tokens/s")

# %% tags=["nbval-ignore-output"]
slow, fast = (n / step_cost(qwen, [Work(1, 1024)] * n).seconds(h200) for n in (reserved, used))
name = "H200, Qwen3-0.6B, 1,024 tokens each: 128 decode together, not 32"
reveal(name, fast / slow, "times as fast")

# %% [markdown]
# 1.2 times, not four. At 32 requests most of what a step reads is K/V already, and nobody shares
# those (notebook 00). So why do it? Because a request that has no place *waits*. With 128 who come
# together and 32 rows, the last 32 wait until three batches are over. We count that below.
#
# ## A pool, cut into blocks
#
# The idea is an old one: it is how operating systems give memory to programs. Cut the memory into
# **blocks** of equal size (the pages of the picture; both words are in use). Let each request keep
# a list of the blocks it has, its **block table**. The request's text is one line; its blocks may
# lie anywhere in the pool.
#
# An example, with blocks of 4 tokens. A text has 9 tokens, and its table is `[5, 2, 7]`:
#
# ```
#   position in the text    0  1  2  3    4  5  6  7    8
#   its block of the text       0             1         2
#   block of the pool           5             2         7   . . .   3 places are still empty
# ```
#
# Any free block is as good as any other, so there are no gaps that are too small for somebody. And
# a request that ends gives its blocks back, one by one, to whoever comes next.
#
# Four functions make this work. The first is the smallest.
#
# ### How many blocks?
#
# `blocks_needed(num_tokens, block_size)` says how many blocks hold so many tokens. Blocks are
# taken whole. 9 tokens in blocks of 4 need 3: two are full, the third has one token. 8 tokens need
# 2. No tokens need no block. The result is an `int`.


# %%
@exercise("nanoteach.block_manager.blocks_needed")
def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Python's `//` divides and rounds down. Try your formula on 8, 9, 11 and 12 tokens in blocks of 4.
#
# </details>
# <details><summary>Hint 2</summary>
#
# There are full blocks, and there is perhaps a remainder. Either ask if there is one, or add
# something to the tokens before you divide: as much as makes 9 reach the next multiple, and 8
# not.
#
# </details>

# %%
show("nanoteach.block_manager.blocks_needed")

# %%
for tokens in (1, 15, 16, 17, 236):
    blocks = blocks_needed(tokens, 16)
    word = "block " if blocks == 1 else "blocks"
    print(f"{tokens:3} tokens: {blocks:2} {word} of 16, {16 * blocks - tokens:2} places empty")

# %% [markdown]
# With blocks of 16, a request never wastes more than 15 places. That is what makes the right half
# of the picture so full.
#
# Why not blocks of 1, and no waste at all? Tables would be as long as texts, and each token would
# have to be found on its own. Why not 256? A short chat would waste most of its only block. vLLM's
# default is 16, and ours too; nano-vLLM takes 256, since the kernel that it calls
# wants a multiple of that.
#
# ### Taking blocks
#
# A `BlockManager` hands out the blocks of a pool. Whoever holds blocks is an *owner*: something
# with a `request_id` and a list `block_table`. The most important call is this:
#
# `manager.allocate(owner, num_tokens)`: from now on the owner has `num_tokens` tokens **in all**;
# see to it that its table is long enough.
#
# - New blocks go to the end of the table. Those that it has stay where they are.
# - If the table is long enough already, nothing happens, and the result is `True`.
# - **All or nothing**: if too few blocks are free, the result is `False`, and nothing has changed.
#   Half a request is of no use to anybody, and the blocks would be missing elsewhere.
#
# An example, in a fresh pool of 8 blocks of 4. An owner asks for 6 tokens: its table becomes
# `[0, 1]`. It asks for 11: 3 blocks are needed, it has two, so it takes one, `[0, 1, 2]`. It asks
# for 40: 10 are needed, 7 are missing, 5 are free. `False`, and the table is still `[0, 1, 2]`.
#
# What you have in `self`:
#
# - `self.block_size`; and `self.num_free`, how many blocks are free.
# - `self.take_free_block()` takes the next free block and returns its number. Use it: a later stage
#   does more there.
# - `blocks_needed`, yours, is known by its name.
# - `self.trace` is a `Trace`, or `None`. If you took blocks, tell it which, so that you can read
#   later what happened. You may copy this, where `taken` is the list of the new ones:
#
# ```
#         if self.trace and taken:
#             self.trace.add("taken", owner.request_id, taken)
# ```


# %%
@exercise("nanoteach.block_manager.BlockManager.allocate")
def allocate(self, owner, num_tokens: int) -> bool:
    """Grow the owner's table until it holds `num_tokens` tokens, or change nothing: False."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Before you take anything, find out how many blocks are *missing*. That number decides between
# three cases.
#
# </details>
# <details><summary>Hint 2</summary>
#
# What is needed for all tokens, and what the table has: their difference is what is missing. It may
# be zero or less. Compare it with what is free; only then begin to take.
#
# </details>

# %%
show("nanoteach.block_manager.BlockManager.allocate")

# %% [markdown]
# Three requests in a pool of 24 blocks of 4. All decode, and all grow by a token in each step.
# (`Row` is stage 3's owner: a name and a table. No place is reserved for it.)

# %%
manager = BlockManager(24, 4)
owners = {name: Row(name) for name in "ABF"}
lengths = {"A": 6, "B": 13, "F": 9}


def grow(names, num_tokens):
    """So many tokens more for each."""
    for name in names:
        lengths[name] += num_tokens
        assert manager.allocate(owners[name], lengths[name])


def pool():
    """The pool as it is now, for a picture."""
    return pictures.pool_of(manager, owners.values(), lengths)


grow("ABF", 0)
for _ in range(9):
    grow("ABF", 1)
for name, owner in owners.items():
    print(name, lengths[name], "tokens in", owner.block_table)

# %% tags=["nbval-ignore-output"]
pictures.block_tables(pool(), highlight="F", title="three requests")

# %% [markdown]
# F's blocks are scattered over the pool, and it does not matter: its table knows them, in the order
# of the text. Now B is done and gives its blocks back, the last of its table first. They go to the
# end of the line of free ones. A and F go on. A takes fresh blocks; in the end F lives in all those
# that were B's.

# %%
manager.free(owners["B"])
lengths["B"] = 0
print("free, next first:", *manager.free_blocks)
grow("AF", 30)
for name, owner in owners.items():
    print(name, lengths[name], "tokens in", owner.block_table)
print("What is wrong, says the manager:", manager.check(owners.values()) or "nothing")

# %% tags=["nbval-ignore-output"]
pictures.block_tables(pool(), highlight="F", title="B is gone, A and F have grown")

# %% [markdown]
# Why the last one first? Here it makes no difference. In notebook 05, free blocks still hold K/V
# that a later request may use again. Blocks at the front of the line are overwritten first, and the
# beginning of a text is worth keeping longest.
#
# `manager.check` walks over all blocks and all tables. It finds a block with two owners, one that
# is free and held, and one that is lost. In a program like this almost every mistake is a block in
# the wrong hands, so tests call it after every step.
#
# Now do it yourself. Below is a small engine with a pool of 24 blocks of 4 (its scheduler is that
# of the next notebook; look at the tables only). Press **step** and see at which step a table
# grows. Add requests until one has to wait. Abort one: who gets its blocks?

# %% tags=["nbval-ignore-output"]
widgets.block_table_explorer()

# %% [markdown]
# ### Where does a token live?
#
# For the model, the pool is one long line of places, called **slots**. Block 0 has the slots 0 to
# `block_size - 1`, block 1 the next ones, and so on. When a step has computed the K/V of new
# tokens, it must know the slot of each.
#
# `slot_mapping(block_table, block_size, start, stop)` lists the slots of a request's tokens at the
# positions `start` to `stop - 1`, in their order.
#
# The example from above: blocks of 4, table `[5, 2, 7]`. The token at position 6 lies in the text's
# block 1, at place 2 of it. The table says that this is the pool's block 2. Before it are the
# blocks 0 and 1, with 8 slots. So the slot is 10. The tokens 6 to 8, `start=6` and `stop=9`, have
# the slots `[10, 11, 28]`.


# %%
@exercise("nanoteach.block_manager.slot_mapping")
def slot_mapping(block_table: list[int], block_size: int, start: int, stop: int) -> list[int]:
    """For the tokens `start` to `stop - 1`, the slot of the pool where each one's K/V live."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take one position. Two whole numbers come out of a division by the block size: the quotient and
# the remainder. What does each of them say?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The quotient is an index into the table. What stands there is a block of the pool. How many slots
# come before that block, and how many more before the token?
#
# </details>

# %%
show("nanoteach.block_manager.slot_mapping")

# %%
table = owners["F"].block_table
print("F's tokens 8 to 15:", slot_mapping(table, 4, 8, 16))
print("its newest token:  ", slot_mapping(table, 4, lengths["F"] - 1, lengths["F"]))

# %% [markdown]
# ### Getting a history back
#
# `PagedAttention` has the pool itself: two tensors, `self.k` and `self.v`, of shape `[num_layers,
# num_blocks, block_size, num_kv_heads, head_dim]`. In each layer a step does two things:
#
# 1. **Store.** The new tokens' K/V, `[num_tokens, num_kv_heads, head_dim]`, are written to their
#    slots. That is one line (`PagedAttention.store`), once the slots are known.
# 2. **Attend.** A query needs the keys and values of its whole history, in the order of the text.
#    They lie in blocks all over the pool.
#
# For the second, we *gather*: copy the blocks of a table into one tensor, and attend to that as in
# notebook 02. `gather(layer, blocks)` takes a tensor of block numbers and returns K and V of these
# blocks, whole, in the order given: two tensors of shape `[tokens, num_kv_heads, head_dim]`, with
# `tokens` = blocks × `block_size`.
#
# A toy: one layer, 3 blocks of 2 tokens, one head of one value. K holds 10, 11 in block 0, then 20,
# 21, then 30, 31. `gather(0, [2, 0])` gives as K the values 30, 31, 10, 11, in a tensor of shape
# `[4, 1, 1]`. A block may be given twice; then it comes twice.


# %%
@exercise("nanoteach.paged_attention.PagedAttention.gather")
def gather(self, layer: int, blocks):
    """K and V of whole blocks, in the order given: `[tokens, num_kv_heads, head_dim]` each."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A tensor can be indexed with a tensor of numbers: `x[torch.tensor([2, 0])]` has the rows 2 and 0
# of `x`. Which dimension of the pool has the blocks, once you have chosen the layer?
#
# </details>
# <details><summary>Hint 2</summary>
#
# What comes has four dimensions: blocks, places, heads, values. The first two must become one.
# `flatten` and `view` can do that.
#
# </details>

# %%
show("nanoteach.paged_attention.PagedAttention.gather")

# %% [markdown]
# Try the parts together. F has 48 tokens of history. We give each a random key and value, write
# them to F's slots, and gather F's table. What went into the pool must come out of it.

# %%
config, num_tokens = model.config, lengths["F"]
attention = PagedAttention(config, 24, 4, torch.float32, torch.device("cpu"))
k, v = torch.randn(2, num_tokens, config.num_kv_heads, config.head_dim)
attention.store(1, k, v, torch.tensor(slot_mapping(table, 4, 0, num_tokens)))
keys, values = attention.gather(1, torch.tensor(table))
print("shape:", list(keys.shape))
print("K as it was:", torch.equal(keys[:num_tokens], k))
print("V as it was:", torch.equal(values[:num_tokens], v))

# %% [markdown]
# Two details that the package takes care of:
#
# - A gathered history is made of whole blocks. After the last token come places that nobody has
#   written, or that hold K/V of an earlier owner. They must never be seen: a prompt's history is
#   cut to its length, and a decode gets a mask (`decode_mask`, from notebook 02).
# - Several requests decode at once, and their tables are not of the same length. The shorter ones
#   are padded with block 0. What is gathered for the padding is hidden by the same mask.
#
# Gathering copies the history in every step, which is bytes for nothing. A real kernel reads K/V
# through the table, in place. You write one in notebook 07; what is around it stays
# as it is.
#
# ## Plug it in
#
# Stage 3 is stage 2 with another cache. The loop is the same `StaticBatchGenerator`; the cache is a
# `PagedBatchCache` in the place of the `ContiguousKVCache`.
#
# A static batch cannot wait in the middle of its work. So it is made of requests that fit to their
# end: `fits` counts the blocks of each at its own `max_tokens`. That is already much less than the
# model's longest. To count only what a request has *now*, the engine must be able to make somebody
# wait; that comes in notebook 04, and the pages stay as they are.
#
# The six chats again, each with `max_tokens` as long as its answer was, in a memory of 640 places.
# Stage 2 cannot reserve a single row in it:

# %%
try:
    stage(2, 640)
except ValueError as error:
    print(error)

# %% [markdown]
# Stage 3 serves all six at once:

# %%
trace = Trace()
in_pages = stage(3, 640, trace=trace).generate(
    prompts, [SamplingParams(max_tokens=len(o)) for o in in_rows]
)
print("the same tokens as in rows:", in_pages == in_rows)
taken = sum(len(event.data) for event in trace.of_kind("taken"))
freed = sum(len(event.data) for event in trace.of_kind("freed"))
print(f"{taken} blocks of 16 taken, {freed} given back")
events = [event for event in trace.of_kind("taken") if event.request_id == "row 5"]
print("F's blocks, as they were taken:", *(event.data for event in events))

# %% [markdown]
# ## Prove it
#
# The lengths that go wrong are those at the edge of a block. So here are prompts of 1, 15, 16, 17
# tokens and so on, cut out of F's story, with outputs that cross an edge, reach it exactly, or
# stop one before. The pool has 24 blocks: the requests need two batches, and the second gets blocks
# with old K/V in them.

# %%
story = in_rows[5]
sizes = [1, 15, 16, 17, 31, 32, 33, 47, 48, 5, 64, 100]
news = [33, 1, 17, 16, 2, 32, 31, 18, 17, 44, 16, 28]
ragged = [story[7 * i : 7 * i + size] for i, size in enumerate(sizes)]
params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in news]
expected = references(folder, ragged, params, eos)
print(compare(expected, stage(3, 24 * 16).generate(ragged, params)))

# %% [markdown]
# ## Measure it
#
# 24 short chats, and a memory of 4 × 1,024 places. In rows that is a batch of 4. In pages all 24
# fit at once. First how many steps each takes. That is known without a clock.

# %%
rng = random.Random(0)
heroes = ("fox", "bear", "mouse", "otter", "cat", "goat")
chats = [chat(f"Tell me a story about a {rng.choice(heroes)}.") for _ in range(24)]
wanted = [SamplingParams(max_tokens=rng.randint(8, 64), ignore_eos=True) for _ in chats]
asked = [Request(len(p), s.max_tokens) for p, s in zip(chats, wanted, strict=True)]
for name, width in (("rows", 4), ("pages", 24)):
    steps = static_run(asked, stage=name, batch_size=width).steps
    work = sum(len(step.work) for step in steps)
    print(f"{name:6} {len(steps):3} steps, {work / len(steps):4.1f} requests in each")

# %% [markdown]
# Five times fewer steps. On this machine, is that five times the speed? The cost model says no.
# Here is one step of each kind, 40 tokens in each request, on the machine's measured ceilings:

# %%
live = timing_model()

# %% tags=["nbval-ignore-output"]
here = measure(live.device, live.dtype)
for width in (4, 24):
    cost = step_cost(live.config, [Work(1, 40)] * width, live.dtype.itemsize)
    milliseconds = 1000 * cost.seconds(here)
    print(f"{width:2} requests: {milliseconds:6.2f} ms a step, limited by {cost.limit(here)}")

# %% [markdown]
# If computing limits the wide step, it takes longer, and part of the gain is lost. (On a CPU with
# many cores, or on a GPU, memory may limit both.)
#
# Now the prediction for the whole run, and beside it the wall clock.

# %% tags=["nbval-ignore-output"]
rungs = [
    timed(name, live, here, partial(stage, number, 4 * 1024, model=live), chats, wanted)
    for number, name in ((2, "2 rows"), (3, "3 pages"))
]
for which in ("predicted", "measured"):
    a, b = (getattr(rung, which) for rung in rungs)
    print(f"{which:9}  rows {a:7,.0f}, pages {b:7,.0f} tokens/s: {b / a:.1f} times")
reveal("this machine, tiny, short chats: 24 in a batch, not 4", b / a, "times as fast")

# %% [markdown]
# Both speeds are below the bound. The gain may be larger than predicted, or smaller. The bound
# counts bytes and FLOPs, and a model as small as `tiny` spends much of a step on what the bound
# leaves out. To start an operation takes the same time for 4 requests as for 24: that is for the
# pages. Stage 3 copies every history before it attends: that is against them.
#
# Both stages as recorded on an H200, in the 24 requests of notebook 01, eight side by side:

# %%
on_h200 = recorded_stages(2, 3)
print(where("stages_h200"))
print(stage_table(on_h200))

# %% tags=["nbval-ignore-output"]
pictures.ladder({"this machine": rungs, "an H200, recorded": [stage.rung for stage in on_h200]})

# %% [markdown]
# There pages bring nothing. Memory is no matter in this run: the H200 has room for every row, so
# both stages do the same steps with the same requests, and the prediction sees no gain. What pages
# add is work. To gather a history through its table takes more operations in each layer, and on a
# GPU it is their number that takes the time. And it is done several times: neighbours are gathered
# together only if the longest of them is at most twice as long as the shortest. Here are the first
# eight requests of that run, when they begin to decode:

# %%
first_eight = [len(p) for p in stage_workload(qwen.vocab_size, small=False).prompts[:8]]
print("prompts of", first_eight)
print("gathered in", len(group_by_length(first_eight)), "groups in every layer, K and V apart")

# %% [markdown]
# So the price of pages is in the picture, and what they are for is not. (How large the price is,
# two runs can't say for sure: the host sets the pace there, and it is not the same in every run.
# Notebook 05 shows two runs of the very same parts.) For that, give the H200 little memory. 128
# requests come at the same moment, 512 tokens in and 512 out, in 14 GiB, with a limit of 4,096
# tokens: 32 rows, as above. In pages all 128 fit. This is the course's own stage 2 and stage 3, on
# the virtual clock.

# %%
many = [Request(512, 512)] * 128
for name, limit, width in (("rows", 4096, reserved), ("pages", 4096, used), ("rows", 1024, used)):
    run = static_run(many, stage=name, row_len=limit, batch_size=width)
    firsts = [times[0] for times in pictures.token_times(run.steps).values()]
    speed = 128 * 512 / run.steps[-1].end
    mean, most = 1000 * sum(firsts) / 128, 1000 * max(firsts)
    print(f"{name:5} limit {limit:,}: {speed:7,.0f} tokens/s, first token after ", end="")
    print(f"{mean:3.0f} ms on average, {most:5,.0f} ms at most")
print("(simulated, H200)")

# %% [markdown]
# Here is what pages are for. The speed grows by a quarter. The wait for a first token falls to a
# tenth, because nobody stands outside while memory is reserved for words that are never written.
# The last line is fair to the rows. With a limit of 1,024, each row is filled to its end, 128 of
# them fit, and pages gain nothing. They gain what is reserved and never used, and no more.
#
# ## Bug clinic
#
# nano-vLLM grows a table by a short test, made when a request decodes:
# `len(seq) % block_size == 1`. Readers have reported it as a bug again and again, for example in
# [#30](https://github.com/GeeeekExplorer/nano-vllm/issues/30),
# [#150](https://github.com/GeeeekExplorer/nano-vllm/issues/150) and
# [#240](https://github.com/GeeeekExplorer/nano-vllm/issues/240). Somebody brought the same test
# into our block manager. A prompt gets all its blocks at once; after that, one token more needs a
# block only if it is the first in it:


# %%
def allocate_by_remainder(self, owner, num_tokens):
    """What somebody wrote in the place of `BlockManager.allocate`."""
    if not owner.block_table:
        missing = -(-num_tokens // self.block_size)
    else:
        missing = 1 if num_tokens % self.block_size == 1 else 0
    if missing > self.num_free:
        return False
    owner.block_table += [self.take_free_block() for _ in range(missing)]
    return True


def run_with(own_allocate, num_blocks):
    """Four requests in stage 3 with another `allocate`: the trace, and what came of it."""
    clock = RecordingClock(model.config, h200)
    with installed({"nanoteach.block_manager.BlockManager.allocate": own_allocate}):
        generator = stage(3, 16 * num_blocks, clock=clock)
        clock.watch = lambda: [len(row.block_table) for row in generator.cache.rows]
        try:
            outcome = generator.generate(ill, ill_params)
        except RuntimeError as error:
            outcome = error
    return clock, outcome


ill = [story[:20], story[20:30], story[30:46], story[46:51]]
ill_params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (14, 40, 30, 12)]
healthy = references(folder, ill, ill_params, eos)

# %% [markdown]
# Its author tested it with plenty of memory, and all was well: the tokens are right.

# %%
clock, outcome = run_with(allocate_by_remainder, 64)
print(compare(healthy, outcome))

# %% [markdown]
# Then it went to a machine with a pool of 12 blocks. The four requests need 11 at their longest,
# and `fits` had said so:

# %%
for prompt, settings in zip(ill, ill_params, strict=True):
    longest = len(prompt) + settings.max_tokens - 1
    print(f"{longest} tokens at the end, blocks of 16: {blocks_needed(longest, 16)}")
clock, outcome = run_with(allocate_by_remainder, 12)
print(f"step {len(clock.steps) + 1}: {type(outcome).__name__}: {outcome}")

# %% [markdown]
# The trace of the large pool: how many tokens each request has in each step, and in how many
# blocks. Find the request that is ill, the step in which it falls ill, and why. Then unfold the
# answer.

# %%
clock, outcome = run_with(allocate_by_remainder, 64)
print("step   " + "".join(f"{name:>14}" for name in "ABCD"))
for number in [1, 2, *range(11, 22), 30, 40]:
    work, blocks = clock.steps[number - 1].work, clock.seen[number - 1]
    cells = [f"{w.num_computed + w.num_new} in {n}" for w, n in zip(work, blocks, strict=True)]
    print(f"{number:4}   " + "".join(f"{cell:>14}" for cell in cells))

# %% [markdown]
# <details><summary>The answer</summary>
#
# A is ill, from step 15 on. It wanted 14 tokens, and got the last of them in step 14, with 33
# tokens in 3 blocks. But its batch is not over. A row that is done stays as it is, and its last
# token is computed again in every step, as in notebook 02. So `allocate` is asked again,
# for 33 tokens, and 33 leaves a remainder of 1. A gets one more block in each step, and never
# uses any of them. The tokens stay right, because slots come from the first three blocks. `check`
# finds nothing either: each block has one owner.
#
# Only a request that ends on a remainder of 1 leaks, which is one in 16, and only while others go
# on: B ends with 49 tokens, but it is the last. Most tests will not meet it.
#
# The test looks at how many tokens there are, and concludes from it *what has just happened*: one
# token more than last time. Where that holds it is right, and in nano-vLLM it holds: `len(seq)`
# counts the token that this step computes, and every request grows by exactly one. This is what the
# reports above come to. Where it stops holding, the test is wrong. ROCm's engine ATOM had the same
# test and began to compute several tokens in a step, with speculative decoding: [too few blocks
# were counted](https://github.com/ROCm/ATOM/pull/250). In our batch a request grows by no token,
# and too many are taken.
#
# </details>
#
# Mend it: change one line below, and run the cell. It should say 11 blocks, and still the tokens of
# transformers.


# %%
def allocate_mended(self, owner, num_tokens):
    """Change the line that is wrong."""
    if not owner.block_table:
        missing = -(-num_tokens // self.block_size)
    else:
        missing = 1 if num_tokens % self.block_size == 1 else 0
    if missing > self.num_free:
        return False
    owner.block_table += [self.take_free_block() for _ in range(missing)]
    return True


clock, outcome = run_with(allocate_mended, 64)
print("blocks held at the end:", sum(clock.seen[-1]))
print(compare(healthy, outcome))

# %% [markdown]
# <details><summary>One way to mend it</summary>
#
# ```
#     else:
#         missing = max(0, -(-num_tokens // self.block_size) - len(owner.block_table))
# ```
#
# Now both branches say the same, and the `if` can go: an empty table has length 0. What is left is
# your own `allocate`. It compares two states, what is needed and what is held. It does not ask how
# it came here, so it may be called once, twice, or for many tokens at a time. vLLM counts in this
# way too.
#
# </details>
#
# ## What moved
#
# Memory is no longer given away for nothing. The next waste is one you have met in the clinic: a
# row that is done stays in its batch, and is computed, until the longest row is done. And whoever
# comes meanwhile waits outside, next to free blocks.

# %%
steps = static_run(asked, stage="pages", batch_size=24).steps
stays = pictures.static_stays(steps, [request.max_tokens for request in asked])
idle = sum(stay.last - stay.first + 1 - len(stay.working) for stay in stays)
print(
    f"{len(steps)} steps of 24 rows: in {idle} of {24 * len(steps)} places a row was done already"
)

# %% [markdown]
# That is the next notebook.
#
# ### What to take along
#
# - A pool of blocks, and a table for each request: token i lives in block `table[i // block_size]`,
#   at place `i % block_size`.
# - A request wastes less than one block, whatever it might have become.
# - Count what is needed and what is held; take the difference, all or nothing.
# - The last sampled token has no K/V yet.
#
# ### Where others do this
#
# - nano-vLLM:
#   [block_manager.py](https://github.com/GeeeekExplorer/nano-vllm/blob/cde3fc22c2694ba8052f7df0b5e05ef7e10c8603/nanovllm/engine/block_manager.py)
#   has the pool and the tables, one screen of code, with prefix caching in it. Slots are computed
#   in the model runner. Attention reads through the table, in flash-attn's kernel.
# - vLLM 0.20.2:
#   [block_pool.py](https://github.com/vllm-project/vllm/blob/v0.20.2/vllm/v1/core/block_pool.py)
#   has the free blocks,
#   [single_type_kv_cache_manager.py](https://github.com/vllm-project/vllm/blob/v0.20.2/vllm/v1/core/single_type_kv_cache_manager.py)
#   the tables: look for where it subtracts what is held from what is required.
#   [block_table.py](https://github.com/vllm-project/vllm/blob/v0.20.2/vllm/v1/worker/block_table.py)
#   computes the slots.
#
# ### To read
#
# - Kwon et al., [Efficient Memory Management for Large Language Model Serving with
#   PagedAttention](https://arxiv.org/abs/2309.06180) (2023): sections 3 and 4 are this notebook.
# - Prabhu et al., [vAttention](https://arxiv.org/abs/2405.04437) (2024): the same gain with the
#   GPU's own page tables, and K/V that stay in one piece for the kernel.
# - Denning, [Virtual Memory](https://doi.org/10.1145/356571.356573) (1970), for where it comes
#   from.
#
# **Next:** [04 · Continuous batching](04_continuous_batching.ipynb): requests come and go at every
# step.
