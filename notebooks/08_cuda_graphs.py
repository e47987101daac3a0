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
# # 08 · CUDA graphs
#
# **At the end a decode step is one launch instead of more than a thousand, its inputs lie in
# buffers of fixed places, and the next step is prepared while this one runs.**
#
# 60 minutes. It needs the engine of notebooks 04 and 06, and the cost model of 00. No GPU, and no
# download: the GPU's part of the story is told from a recorded run, and what you write runs here.
#
# Run the exercise cells too, also unwritten: they put your saved version, or the package's, in
# place.

# %% tags=["nbval-ignore-output"]
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from statistics import median, quantiles
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanoteach import cuda_graphs
from nanoteach.config import EngineConfig
from nanoteach.cost_model import SHAPES, Work, step_cost, weight_bytes_read
from nanoteach.course import exercise, installed, open_notebook, pictures, predict, reveal, show
from nanoteach.course import pictures_08 as told
from nanoteach.course.timing import (
    recorded_stages,
    stage_table,
    timed,
    timing_device,
    timing_model,
    where,
)
from nanoteach.hardware import hardware_named, measure
from nanoteach.hub import resolve_model
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.reference import compare, references
from nanoteach.results import recorded
from nanoteach.sequence import Sequence
from nanoteach.stages import LADDER, Parts
from nanoteach.step_inputs import DECODE_SIZES, MIXED_SIZES, BlockTables, StepBuffer
from nanoteach.types import SamplingParams

open_notebook(8)

# %% [markdown]
# ## The GPU waits
#
# One request decodes on an H200: Qwen3-0.6B's shape, bfloat16, 1,024 tokens of history. Attention
# is the kernel of notebook 07; everything else is plain PyTorch, as in notebook 01. A profiler has
# written down every kernel of one step: its name, when it began, how long it took.

# %%
record = recorded("timeline_h200")
print(where("timeline_h200"))
gpu_steps = {name: step for name, step in record["steps"].items() if "plain loop" not in name}
eager = gpu_steps["stage 7, eager"]
for event in eager["events"][600:612]:
    name = event["name"].replace("void at::native::", "")
    print(f"{event['start_us']:9.1f} µs, for {event['us']:4.1f} µs: {name[:56]}")

# %% [markdown]
# Each line is a kernel that works for one or two microseconds. Then nothing happens for many
# microseconds, until the next one begins. Add it up:

# %%
launches, busy, wall = told.summary(eager)
print(f"kernels launched in the step                {launches:8,}")
print(f"all of them together run for                {busy:8,.0f} µs")
print(f"the whole step takes (median, no profiler)  {wall:8,.0f} µs")
print(f"the GPU works                               {busy / wall:8.1%} of the time")

# %% [markdown]
# (The kernels are those of one step under the profiler, and the whole step's time is the median of
# many without it. So the last kernel need not end at that very time.)
#
# What does it wait for? For the host. A kernel doesn't run by itself: the CPU has to **launch** it.
# PyTorch looks up which kernel fits, allocates the result, and puts the kernel into the GPU's
# queue. That costs the host about the same for a small kernel as for a large one. Recorded on the
# same machine, the launch of one small kernel from PyTorch:

# %%
cost = median(record["launch_us"]["kernel"])
print(f"one launch: {cost:.1f} µs of the host, median of {len(record['launch_us']['kernel'])}")
print(f"{launches:,} launches: {launches * cost / 1e3:.1f} ms; the step: {wall / 1e3:.1f} ms")
bound = 1e6 * step_cost(SHAPES["qwen3-0.6b"], [Work(1, 1024)]).seconds(hardware_named("h200"))
print(f"what the step's bytes would take: {bound / 1e3:.2f} ms")

# %% [markdown]
# Launching alone takes many times as long as moving the bytes. The rest of the step is Python: what
# the host does between two launches. With a large batch the kernels take longer, and the host gets
# ahead of the GPU. With a small one, the GPU is faster than the CPU can talk.
#
# On this machine it can be felt as well. A call of PyTorch on one number costs about as much as a
# call on a thousand:

# %% tags=["nbval-ignore-output"]
device, _ = timing_device()
for size in (1, 1000, 1_000_000):
    x = torch.ones(size, device=device)
    for _ in range(20):  # the first calls set things up
        x.add_(1)
    samples = []
    for _ in range(200):
        start = time.perf_counter()
        x.add_(1)
        samples.append(1e6 * (time.perf_counter() - start))
    print(f"add 1 to {size:9,} numbers: {median(samples):8.1f} µs")

# %% [markdown]
# ## Three ways out
#
# 1. **Fewer launches.** Write kernels that do several operations at once.
# 2. **One launch for all.** Record the step's kernels once, and launch the recording. That is a
#    CUDA graph.
# 3. **Don't let the GPU wait for the host between steps.** Prepare the next step while this one
#    runs.
#
# Before you read on: the same request on the same GPU. What will each of them bring?

# %%
predict("H200, one request: launches a step with fused kernels", ..., "launches")
predict("H200, one request: a step with fused kernels, launched one by one", ..., "ms")
predict("H200, one request: a step with fused kernels in a graph", ..., "ms")

# %% [markdown]
# ### The answer of the cost model
#
# A step can't be faster than its bytes, and not faster than its launches. The larger of the two is
# a bound.

# %%
print("   launches      bytes   launching      bound")
for count in (1250, 500, 175, 1):
    total = max(bound, count * cost)
    print(f"{count:11,} {bound:7.0f} µs {count * cost:8.0f} µs {total:7.0f} µs")
print(f"({cost:.1f} µs a launch; bytes: {hardware_named('h200').name})")

# %% [markdown]
# Fusing alone is not enough: even 175 launches take longer than the bytes. One launch would do.
# (And it is a bound: what Python does between two launches is not in it.)
#
# ## Fewer launches: fusion
#
# Where do so many launches come from? Count the calls of one step here. PyTorch lets us look on at
# each operation. The model is `tiny` in bfloat16, and attention is left out: it gives back its
# queries.


# %%
class Calls(TorchDispatchMode):
    """Counts the operations that compute something; a view moves nothing."""

    views = ("split_with_sizes", "chunk", "view", "reshape", "lift_fresh", "detach_")

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).split(".")[1]
        self.count.update([] if name in self.views else [name])
        return function(*args, **(kwargs or {}))


class NoAttention:
    """Gives back the queries."""

    def attend(self, layer, q, k, v, metadata):
        return q


folder = resolve_model("tiny")
small = load_model(folder, "cpu", torch.bfloat16)
with torch.inference_mode(), Calls() as calls:
    small.forward(torch.tensor([5]), torch.tensor([3]), NoAttention(), None)
layers = small.config.num_layers
a_layer = {name: n // layers for name, n in calls.count.most_common() if n >= layers}
print(f"{sum(a_layer.values())} calls a layer, without attention:")
print(", ".join(f"{name} {n}" for name, n in a_layer.items()))

# %% [markdown]
# Four of them are the matrix products (`linear`). The others are glue. One RMS norm is eight calls:
# to float32, square, mean, plus epsilon, root, times, back to bfloat16, times the weight. A layer
# has three norms, since Qwen3 norms its queries and keys too. With attention's four (two stores,
# and two kernels for a history that is cut in parts) it is 43 calls a layer.
#
# Each call reads its input from memory and writes its result back. So glue costs twice: a launch,
# and a round trip of the activations. Here is both, for Qwen3-0.6B, from its sizes alone. Before:

# %%
qwen = SHAPES["qwen3-0.6b"]
h, q, kv, wide = qwen.hidden_size, qwen.q_size, qwen.kv_size, qwen.intermediate_size
# What: launches, and bytes read and written for one token, 2 a value in bfloat16, 4 in float32.
# The eight calls of a norm, in bytes a value: to float32, square, mean (epsilon and root have one
# number a row), times, back to bfloat16, times the weight.
norm = (2 + 4) + (4 + 4) + 4 + (4 + 4) + (4 + 2) + (2 + 2)
before = {
    "input norm": (8, norm * h),
    "QKV product": (1, 2 * h + 2 * (q + 2 * kv)),
    "norm of q and k": (8, norm * (q + kv)),
    "rotary": (7, (8 + 6 + 4) * (q + kv)),
    "store of k and v": (2, 8 * kv),
    "attention": (2, 4 * q),
    "output product, residual": (2, 2 * q + 2 * h + 6 * h),
    "post norm": (8, norm * h),
    "gate and up product": (1, 2 * h + 4 * wide),
    "SiLU, times": (2, 4 * wide + 6 * wide),
    "down product, residual": (2, 2 * wide + 2 * h + 6 * h),
}
# A product takes in what comes before and after it. One token:
one = {
    "norm, QKV product": (1, 2 * h + 2 * (q + 2 * kv)),
    "norm of q and k, rotary, store, attention": (2, 2 * (q + 2 * kv) + 4 * kv + 2 * q),
    "output product, residual": (1, 2 * q + 4 * h),
    "norm, gate and up product, SiLU, times": (1, 2 * h + 2 * wide),
    "down product, residual": (1, 2 * wide + 4 * h),
}
# Many tokens: cuBLAS has the faster products, and between them one kernel each.
many = {
    "four products": (4, 2 * (h + q + h + wide) + 2 * (q + 2 * kv + h + 2 * wide + h)),
    "norm of q and k, rotary, store": (1, 2 * (q + 2 * kv) + 2 * q + 4 * kv),
    "attention": (2, 4 * q),
    "residual and norm, twice": (2, 2 * 8 * h),
    "SiLU, times": (1, 4 * wide + 2 * wide),
}
for title, kernels in (("before", before), ("fused, one token", one), ("fused, many", many)):
    count, size = (sum(column) for column in zip(*kernels.values(), strict=True))
    print(f"{title:17} {count:3} launches a layer, {count * qwen.num_layers:6,} in all; "
          f"{qwen.num_layers * size / 1e6:6.2f} MB of activations a token")  # fmt: skip

# %% [markdown]
# What do these megabytes matter? That depends on how many tokens share the weights:

# %%
weights = weight_bytes_read(qwen)
for tokens in (1, 256):
    for title, kernels in (("before", before), ("fused", one if tokens == 1 else many)):
        size = tokens * qwen.num_layers * sum(size for _, size in kernels.values())
        print(f"{tokens:3} tokens, {title:6}: activations {size / 1e9:6.3f} GB, "
              f"weights {weights / 1e9:.2f} GB")  # fmt: skip

# %% [markdown]
# For one request the bytes of the glue are nothing, and its launches are everything. For 256 it is
# the other way round: before, activations move more bytes than the weights have. Fusion helps at
# both ends, each time for another reason.
#
# Now the recorded run. Do its kernels agree with the count?

# %%
for name, step in gpu_steps.items():
    launches, busy, wall = told.summary(step)
    kinds = Counter(told.kind_of(event["name"]) for event in step["events"])
    print(f"{name:15} {launches:5,} launches: " + ", ".join(f"{n} {k}" for k, n in kinds.items()))

# %% [markdown]
# 43 a layer makes 1,204; cuBLAS cuts one product in two kernels, which adds one a layer; and some
# 25 more are outside the layers. Fused it is six a layer, and six outside.
#
# ### A product with one row
#
# Why write matrix products of our own? cuBLAS is hard to beat. But it is made for many rows. A
# decode of one request has one: the product of a vector and a matrix. Each weight is read from
# memory, multiplied once, and not used again. Two FLOPs for two bytes, where the corner of this
# GPU's roofline is at 182. So such a product is reading the weights, and nothing else: its bound is
# the size of the matrix.

# %%
rate = hardware_named("h200").read_bandwidth
shapes = {"QKV": (h, q + 2 * kv), "output": (q, h), "gate and up": (h, 2 * wide), "down": (wide, h)}
products = recorded("products_h200")
taken = {(row["product"], row["tokens"]): (median(row["ours_us"]), median(row["cublas_us"]))
         for row in products["rows"]}  # fmt: skip
print(where("products_h200"))
print("µs a layer     MB  bound    1 token: ours, cuBLAS    8: ours, cuBLAS   16: ours, cuBLAS")
for name, (width, height) in shapes.items():
    size, key = 2 * width * height, name.lower().replace(" and ", "_")
    pairs = "   ".join("{:10.1f} {:7.1f}".format(*taken[key, tokens]) for tokens in (1, 8, 16))
    print(f"{name:12} {size / 1e6:5.1f} {1e6 * size / rate:6.2f} {pairs}")

# %% [markdown]
# With one token ours are nearer to their bounds, and that although they do more: cuBLAS's time is
# the product alone, and ours have the norm before it or the residual after it inside. The more
# tokens, the more often a weight is used once it is read, and at 16 cuBLAS has overtaken. So stage
# 8 has both, and chooses by the number of tokens. What was tried on the way, and what lost, is in
# `notes/gpu.md`.
#
# ## One launch: graphs
#
# A **CUDA graph** is a recording. You run a step once while the GPU's driver takes down which
# kernels were launched, with which arguments (the *capture*). From then on one call launches all of
# them (the *replay*). The driver knows the whole order beforehand, so there is hardly a gap between
# two kernels.
#
# The arguments are addresses. A kernel was told "read at 0x7f3a00, write at 0x7f3b00", and in each
# replay it does exactly that. So:
#
# - the inputs must lie **where they lay** at the recording. New inputs are written over the old
#   ones,
# - there must be **as many** of them. A kernel for 8 rows computes 8 rows,
# - nothing may depend on the **host**. What Python decided at the recording is decided for ever.
#   `if x.item() > 0` would have to wait for the GPU, and so can't be recorded at all.
#
# A tape of calls shows the same on a CPU:

# %%
x, y, z = torch.tensor([1.0, 2.0, 3.0]), torch.empty(3), torch.empty(3)


def double(source=x, target=y):  # the tensors are part of the recording
    torch.mul(source, 2, out=target)


def increase(source=y, target=z):
    torch.add(source, 1, out=target)


tape = [double, increase]


def replay():
    """Make the recorded calls again."""
    for call in tape:
        call()


replay()
print("recorded:  ", z.tolist())
x.copy_(torch.tensor([10.0, 20.0, 30.0]))
replay()
print("new inputs:", z.tolist())

# %% [markdown]
# What can't be captured in our engine, and what became of it:
#
# | what | why | instead |
# |---|---|---|
# | a step of any size | a graph has one size | a few sizes, and padding |
# | tensors made for each step | new addresses | buffers, made once: `StepBuffer` |
# | lists copied to the GPU in mid-step | taken from the host once | all is sent before the replay |
# | sampling that asks a tensor for its values | waits for the GPU | a kernel that samples |
# | a prompt of 5,000 tokens | seldom of use | no graph: its kernels outlast their launches |
#
# The following four functions are all that the host does for a replay. None of them needs a GPU.
#
# ### Which graph?
#
# There are graphs for decode steps of these numbers of requests, as far as `max_num_seqs` goes, and
# for mixed steps (decodes and chunks of prompts) of these numbers of tokens:

# %%
print("decodes:", *DECODE_SIZES)
print("mixed:  ", *MIXED_SIZES)

# %% [markdown]
# Each costs memory and time to record, so there are few. A step takes a graph that has room for it.
# Write the choice. `sizes` is such a list, sorted. `num` is how many rows the step has. Give back
# the smallest size that holds the step, or `None` if there is none: then the step runs without a
# graph.
#
# An example: in the sizes 1, 2, 4 and 8, a step of 3 takes the graph of 4.


# %%
@exercise("nanoteach.step_inputs.bucket")
def bucket(sizes: list[int], num: int) -> int | None:
    """The smallest of the sizes that holds `num`; None where none does. `sizes` is sorted."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What should a step of exactly 4 take?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The list is sorted: the first size that is not too small is the smallest that fits. A loop will
# do; the package searches by halves.
#
# </details>

# %%
show("nanoteach.step_inputs.bucket")

# %% [markdown]
# How much is computed for nothing? For every number of requests from 1 to 256, the share of rows
# that are padding:

# %%
sizes = [size for size in DECODE_SIZES if size <= 256]
shares = {n: 1 - n / bucket(sizes, n) for n in range(1, 257)}
worst = max(shares, key=shares.get)
print(f"on average {sum(shares.values()) / 256:.1%}, at worst {shares[worst]:.0%}, at {worst}")
for n in (3, 9, 100, 193):
    print(f"{n:3} requests take the graph of {bucket(sizes, n)}: {shares[n]:.0%} of it is padding")

# %% [markdown]
# A share of rows is not a share of time. A decode step is about reading weights and K/V. A padded
# row reads no K/V, and the weights are read anyway.
#
# ### What a padded row must not do
#
# A padded row goes through every kernel like the others. It is normed, multiplied, attends, and its
# K and V are stored. Nobody looks at its result. But it may do harm on its way: a store goes to
# *some* place of the pool, and the pool is full of other people's K/V. And what the step before
# wrote is still in the buffer.
#
# Write the rows of a step's decodes, and the padding. `to` holds four arrays of numbers, which lie
# in the host's memory; they are made once and used for every step. `decodes` are requests with one
# token to compute: the one at position `num_computed_tokens`. A row has
#
# - in `"input_ids"` that token,
# - in `"positions"` its position,
# - in `"slots"` the place in the pool where its K/V go: its block's number, times the block size,
#   plus the place inside the block (notebook 03),
# - in `"decode_lens"` how many tokens it attends to, itself among them.
#
# What is left of each array is padding: token 0 and position 0 (they exist, so looking them up is
# safe), slot -1 (kernels store nothing there), length 0 (attention reads nothing). The arrays may
# be of different lengths: in a mixed step there are fewer lengths than tokens. Write *into* the
# arrays. `pad(array, values, padding)` of this module writes some values, and padding behind them.
#
# An example, with blocks of 4. A request has the tokens 10 to 15, of which five are computed, in
# the blocks 3 and 5. Its token is 15, at position 5, in block 5 at place 1: slot 21, length 6. In
# buffers of 2 rows: ids `[15, 0]`, positions `[5, 0]`, slots `[21, -1]`, lengths `[6, 0]`.


# %%
@exercise("nanoteach.step_inputs.fill_decodes")
def fill_decodes(to: dict[str, np.ndarray], decodes: list[Sequence], block_size: int) -> None:
    """Write the next token of each request, its position, slot and length; pad what is left."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# One list for each of the four arrays, in the order of the requests; then four times `pad`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Everything follows from the position. The block is the entry of `seq.block_table` at the position
# divided by the block size, without its rest; the rest is the place inside. A table may be longer
# than the text: don't take its last block.
#
# </details>

# %%
show("nanoteach.step_inputs.fill_decodes")

# %% [markdown]
# ### Block tables
#
# One input is large. With 256 requests of 4,096 tokens, blocks of 16, the tables are 65,536
# numbers. To write them all in every step would take the host milliseconds (measured below), a
# large part of the step. And nearly all of them are known already: from one step to the next a
# request gets a new block every 16 tokens, and that is all.
#
# So `BlockTables` keeps host copies of the tables, and remembers what is in them. It has:
#
# - `self.tables`: on the device, `[max_num_seqs, most blocks]`; row i is for the step's request i,
# - `self.hosts`: two copies on the host, which take turns. One is written while the other may still
#   be on its way to the device. `turn` is 0 or 1,
# - `self.known[turn][row]`: which list that host copy has in the row, and how many of its numbers:
#   a pair. At first `(None, 0)`.
#
# `send(turn, tables)` is given the step's tables, a list of block numbers for each request, in the
# order of the rows. They are the requests' own lists: a list grows while its request runs. When a
# request is over, another one moves into its row. When one is preempted, its blocks are given back,
# and when it returns it has a **new list**, perhaps as long as the old one, with other blocks in
# it.
#
# Bring the host copy of this turn up to date, and write only what is new. Then copy the rows of
# this step to the device, in place (`copy_`); all rows, since the device has what the *other* copy
# sent last time. What lies behind the end of a table doesn't matter: no length reaches there.
#
# An example. Turn 0 sends `a = [4, 7]`. Then `a` becomes `[4, 7, 9]`, and turn 0 sends it again:
# only the 9 is written. Then a row is sent with another list, `[2, 0, 3]`: all three are written.


# %%
@exercise("nanoteach.step_inputs.BlockTables.send")
def send(self, turn: int, tables: list[list[int]]) -> None:
    """Bring the device's rows up to these tables. On the host only what is new is written."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two lists can be equally long, and even equal, and yet not the same one. Python's `is` tells
# whether it is the same.
#
# </details>
# <details><summary>Hint 2</summary>
#
# For each row: if the known list is this very list, write from the known length on, else from the
# beginning; and remember the list itself and its length. `self.hosts[turn].numpy()` takes a slice
# of a list in one assignment.
#
# </details>

# %%
show("nanoteach.step_inputs.BlockTables.send")

# %% [markdown]
# What it saves here, for 256 requests with 256 blocks each: the first time all is new, the second
# time a few tables have grown by a block.

# %% tags=["nbval-ignore-output"]
took = {"all new": [], "16 have grown": []}
for _ in range(9):
    tables = BlockTables(256, 300, torch.device("cpu"))
    lists = [list(range(row, row + 256)) for row in range(256)]
    for samples in took.values():
        start = time.perf_counter()
        tables.send(0, lists)
        samples.append(1e3 * (time.perf_counter() - start))
        for table in lists[::16]:
            table.append(7)
for title, samples in took.items():
    print(f"{title:14} {median(samples):6.2f} ms")

# %% [markdown]
# ## Don't wait: the overlapped loop
#
# With a graph a step takes 0.6 ms of the GPU. Between two steps the host has to schedule, fill the
# buffers, launch, and afterwards commit. In the loop of notebook 04 the GPU has nothing to do
# meanwhile. Why does it wait? Because the next step's input is this step's output. But the *host*
# doesn't need to know that token in order to prepare the step. It knows that there will be one, at
# which position, and in which slot. Only its value is missing, and that is on the GPU already.
#
# Here are both loops, drawn from two numbers alone: 250 µs of the host and 600 µs of the GPU for
# each step.

# %% tags=["nbval-ignore-output"]
told.two_loops(host=250, device=600)

# %% [markdown]
# Below, step 1 is scheduled while step 0 runs. In the place of the missing token the request gets a
# **promise**, a negative number: -1 - i stands for "what the running step samples in its row i".
# The GPU looks it up as the first thing in the next step. When step 0 is done, the host reads its
# tokens, puts them in the place of the promises, and looks for ends: **commit comes one step
# late**.
#
# That has a price. Whether a token ends the text is known one step too late. By then the request
# has a row in the step that runs already; its result is dropped. So an end token costs one wasted
# row. An end by `max_tokens` costs nothing: the host counts tokens, and need not see them.
#
# Write the promises. `self.parts` has a tuple for each row of the running step; its first entry is
# the request. `self.pending.gives_token[row]` says whether the row samples: in the middle of a
# prompt it doesn't. Put a promise at the end of `seq.token_ids` of every request that
#
# - gets a token from this step,
# - is still running (`seq.status is Status.RUNNING`): meanwhile it may have ended, or been aborted,
# - goes on afterwards: with the token in flight it has fewer than `seq.params.max_tokens`. With
#   `last_too` this condition is left out (the engine's own check asks for it).
#
# `seq.num_output_tokens` doesn't count the token in flight.
#
# An example. The running step has three rows. In row 0 a request is in the middle of its prompt.
# Row 1 has 4 outputs of at most 9, row 2 has 8 of at most 9. Only row 1 gets a promise: -2.


# %%
@exercise("nanoteach.overlapped.Flight.promise")
def promise(self, last_too: bool = False) -> None:
    """Give every request that goes on a token to compute next, which the GPU will look up."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The number names a row. Rows that get no promise are rows all the same.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Go over the parts with their row numbers, and ask the three questions one after the other. The
# token in flight makes one output more than `num_output_tokens` says.
#
# </details>

# %%
show("nanoteach.overlapped.Flight.promise")

# %% [markdown]
# Turn the two times yourself. Where does the overlapped loop gain most? What if the host takes
# longer than the GPU?

# %% tags=["nbval-ignore-output"]
told.overlap()

# %% [markdown]
# ## Plug it in
#
# Stage 8 is stage 6 with another runner and another loop. On an NVIDIA GPU it runs fused kernels in
# graphs. Here a `PlainDecoder` computes the step in PyTorch, and a `Rerun` stands in for each
# graph: it runs the step anew on the same buffers. Sizes, padding, tables, promises and the loop
# are the same.
#
# We follow request F, "Tell me a story about a fox.", beside a question S. Watch what each step is
# launched with.

# %%
tokenizer, eos = load_tokenizer(folder), eos_token_ids(folder)
model = load_model(folder, "cpu", torch.float32)


def chat(text):
    """A prompt's tokens, in the chat template."""
    message = [{"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def engine(stage, clock=None, model=model, **options):
    """A stage on `tiny` or another model: at most 8 requests, and 64 tokens a step."""
    defaults = {"max_num_seqs": 8, "max_model_len": 256, "num_gpu_blocks_override": 64,
                "max_num_batched_tokens": 64, "block_size": 8}  # fmt: skip
    return LADDER[stage - 1].build(Parts(model, EngineConfig(**defaults | options), eos, clock))


def watch(core):
    """Keep for each step: its kind, who is in it, its size, and its buffer's ids and slots."""
    seen, runner, launch = [], core.runner, core.runner.launch

    def watched(scheduled):
        count = sum(num_new for _, num_new in scheduled)
        kind = "decode" if count == len(scheduled) else "mixed"
        size = bucket(runner.decode_sizes if kind == "decode" else runner.mixed_sizes, count)
        pending = launch(scheduled)
        views = runner.graphs[kind, size][0].views[runner.turn]
        names = {part.seq.request_id: part.num_new for part in scheduled}
        seen.append((kind, names, size, views["input_ids"].tolist(), views["slots"].tolist()))
        return pending

    runner.launch = watched
    return seen


core = engine(8)
steps = watch(core)
request_f = chat("Tell me a story about a fox.")
F = core.add_request("F", request_f, SamplingParams(max_tokens=18))
S = core.add_request("S", chat("What is 27 plus 48?"), SamplingParams(max_tokens=60))
while core.has_unfinished_requests():
    core.step()
for number, (kind, names, size, ids, slots) in enumerate(steps, 1):
    if number < 5 or number > len(steps) - 7:
        real = sum(names.values())
        row = f"ids {ids}, slots {slots}" if kind == "decode" else f"and {size - real} padded rows"
        print(f"step {number:2}: {kind} of {size:2}, {', '.join(names)}: {row}")

# %% [markdown]
# Step 1 reads both prompts, in the graph of 64 tokens. From step 2 on the ids are promises: -1 for
# row 0, -2 for row 1. Not one step is launched with a token that the host knows. And the slots are
# right all the same.
#
# When does the question S end?

# %%
for seq in (F, S):
    mine = [names[seq.request_id] for _, names, _, _, _ in steps if seq.request_id in names]
    needed = seq.num_prompt_tokens + len(seq.output_token_ids) - 1
    print(
        f"{seq.request_id}: {len(seq.output_token_ids)} tokens, ended by {seq.finish_reason}. "
        f"Rows needed {needed}, launched {sum(mine)}"
    )
print("S:", tokenizer.decode(S.output_token_ids, skip_special_tokens=True))
print("F:", tokenizer.decode(F.output_token_ids, skip_special_tokens=True))

# %% [markdown]
# S ended by an end token and cost one row more than needed. F ended by its length and cost none.
# Its story is the same one as in every notebook since 01.
#
# And a padded row never stores: here are the places of the pool that changed in a step with
# three requests in the graph of 4.

# %%
core = engine(8)
steps = watch(core)
for name, animal in zip("ABC", ("bear", "goat", "otter"), strict=True):
    core.add_request(name, chat(f"Tell me a story about a {animal}."), SamplingParams(max_tokens=9))
core.step()
core.step()
pool = core.runner.decoder.pool.k[0].flatten(0, 1)
old = pool.clone()
core.step()
changed = (pool != old).flatten(1).any(1).nonzero().flatten().tolist()
print("slots of the step:", steps[-1][4], " places that changed:", changed)

# %% [markdown]
# ## The same tokens as transformers
#
# Ten ragged requests. First with padded sizes and eight at once. Then with a pool so small that
# requests are preempted, some while a step of theirs is in flight. Such a request has lost its
# blocks, but not its token: the promise stays at the end of its tokens until the commit. (A quarter
# of a minute, and more on a busy machine: this decoder is made to be read.)

# %%
animals = ("fox", "bear", "mouse", "otter", "goat", "dragon")
prompts = [chat(f"Tell me a story about a {animal}.") for animal in animals]
prompts += [chat("What is 27 plus 48?"), list(tokenizer.encode("The")), prompts[0] * 2]
prompts.append(list(tokenizer.encode("There was once a small dog. " * 4)))
params = [SamplingParams(max_tokens=5 + 3 * i) for i in range(len(prompts))]
expected = references(folder, prompts, params, eos)
for title, options in (
    ("padded sizes", {}),
    ("a small pool", {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 24}),
):
    core = engine(8, **options)
    print(f"{title}: {compare(expected, core.generate(prompts, params))}; "
          f"{core.scheduler.num_preemptions} preemptions")  # fmt: skip

# %% [markdown]
# ## What it brings
#
# The recorded steps again, all three: stage 7 as you saw it above, stage 8 with its kernels
# launched one by one, and stage 8 in a graph. The kernels' times are added up; the GPU is at work
# while at least one runs.

# %%
print("                 launches kernels' times   GPU at work      the step     tokens/s")
for name, step in gpu_steps.items():
    launches, busy, wall = told.summary(step)
    added = sum(event["us"] for event in step["events"])
    print(f"{name:15} {launches:9,} {added:11,.0f} µs {busy:10,.0f} µs {wall:10,.0f} µs "
          f"{1e6 / wall:12,.0f}")  # fmt: skip
print(f"{'bound, bytes':15} {'':9} {'':14} {'':13} {bound:10,.0f} µs {1e6 / bound:12,.0f}")
graph = median(record["launch_us"]["graph"])
print(f"launching the graph: {graph:.0f} µs, as much as {graph / cost:.0f} small kernels")

# %% tags=["nbval-ignore-output"]
told.step_kernels(gpu_steps)

# %% [markdown]
# Beside what you said, if you did:

# %% tags=["nbval-ignore-output"]
fused = told.summary(gpu_steps["stage 8, eager"])
in_graph = told.summary(gpu_steps["stage 8, graph"])
reveal("H200, one request: launches a step with fused kernels", fused[0], "launches")
reveal("H200, one request: a step with fused kernels, launched one by one", fused[2] / 1e3, "ms")
reveal("H200, one request: a step with fused kernels in a graph", in_graph[2] / 1e3, "ms")

# %% [markdown]
# Fusing cut the launches to a seventh and the kernels' time to about a third, and yet the GPU was
# idle some nine tenths of the time: it waited for 174 launches from Python. That takes several
# times what the launches alone would: the rest is Python between them (the record does not divide
# it).
#
# The graph has the same 174 kernels and no gaps. The step now takes about as long as the GPU is at
# work. And that is less than before, though the kernels' own times add up to more: in the graph a
# kernel begins while the one before it still ends, and waits for its result. Launched one by one,
# most are over before the next one comes.
#
# It is still twice the bound. 168 kernels in a row each have a beginning, where they wait for the
# first bytes, and an end, where few programs are left.
#
# Whole runs of the engine, with the overlapped loop, beside the bound of a perfect engine:

# %%
bench = recorded("bench_h200")
print(where("bench_h200"))
for row in bench["rows"]:
    if row["samples"] and row["bound"] and row["unit"] == "tok/s":
        reached, most = median(row["samples"]), row["bound"]
        print(f"{row['workload']:28} {row['metric']:7} {reached:9,.0f} {row['unit']} "
              f"of {most:9,.0f}: {reached / most:.0%}")  # fmt: skip

# %% [markdown]
# What did the loop alone give? The same step of one request once more, with the same graphs, in the
# plain loop, which commits a step before it schedules the next:

# %%
for name in ("stage 8, graph", "stage 8, graph, plain loop"):
    low, middle, high = quantiles(record["steps"][name]["wall_us"], n=4)
    print(f"{name:28} {middle:6.0f} µs a step, half of them {low:,.0f} to {high:,.0f}")

# %% [markdown]
# The difference is what the host needs for one request: to commit, to schedule, to fill the
# buffers. With 256 requests there are 256 rows to fill and to commit, and more is hidden.
#
# ### On this machine
#
# On a CPU there are no launches to save, and host and device are the same cores: nobody waits for
# anybody, so a loop that is one step ahead gains nothing. `PlainDecoder` is slower than stage 6's
# runner, and a padded row is computed like any other. What you see there is that the logic is
# right, not that it is fast. Where there is an NVIDIA GPU, these are the real kernels and graphs.

# %%
live = timing_model()

# %% tags=["nbval-ignore-output"]
here = measure(live.device, live.dtype)
some = prompts[:3]
same = SamplingParams(max_tokens=8 if live.device.type == "cpu" else 64, ignore_eos=True)
rungs = []
for title, stage, options in (
    ("6", 6, {}), ("8, steps as they are", 8, {"enforce_eager": True}), ("8, graphs", 8, {}),
):  # fmt: skip
    rung = timed(title, live, here, partial(engine, stage, model=live, **options), some, same)
    rungs.append(rung)
    print(f"stage {title:22} {rung.measured:8,.0f} tokens/s, at most {rung.predicted:8,.0f}")

# %% tags=["nbval-ignore-output"]
on_h200 = [stage.rung for stage in recorded_stages(7, 8)]
pictures.ladder({"this machine": rungs, "an H200, recorded": on_h200})

# %% [markdown]
# On the right are stages 7 and 8 in the 24 requests of notebook 01, eight at a time. On a CPU a
# graph has nothing to save. On the H200 the same steps, with fewer kernels in each, and recorded
# instead of launched one by one, are most of the speed.

# %% [markdown]
# ## Bug clinic
#
# ### First patient
#
# Its owner says: "With `enforce_eager=True` all is well. With graphs it writes nonsense, and
# nothing raises." This is the part that it has changed. A step's positions are numbers of 32 bits;
# it wants them as 64, as other libraries do.


# %%
class Patient(StepBuffer):
    """Step inputs, the positions in 64 bits."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.narrow = self.inputs.positions
        self.inputs = replace(self.inputs, positions=self.narrow.long())

    def send(self, turn):
        super().send(turn)
        self.inputs = replace(self.inputs, positions=self.narrow.long())


def run_with(buffer, **options):
    """Two requests on stage 8 with this kind of buffer."""
    with patch.object(cuda_graphs, "StepBuffer", buffer):
        core = engine(8, **options)
    return core, core.generate(prompts[:2], params[:2])


for title, options in (("eager", {"enforce_eager": True}), ("graphs", {})):
    ill, tokens = run_with(Patient, **options)
    print(f"{title:7}", compare(expected[:2], tokens).exact, tokens[1])

# %% [markdown]
# The trace of its last decode step: what the host has filled in, what the buffer holds, and what
# the recorded step has read.

# %%
buffer, rerun = ill.runner.graphs["decode", 1]
print("filled    ", buffer.views[ill.runner.turn]["positions"].tolist())
(inputs,) = rerun.replay.args  # those of the recorded call
print("the buffer", buffer.inputs.positions.tolist())
print("the graph ", inputs.positions.tolist())

# %% [markdown]
# What is wrong? Mend `send`.


# %%
class Mended(Patient):
    """Change what is wrong. (`super().send` would be the patient's.)"""

    def send(self, turn):
        StepBuffer.send(self, turn)
        self.inputs = replace(self.inputs, positions=self.narrow.long())


# %%
def examine(buffer):
    """Whether its tokens are right, both ways."""
    found = [
        compare(expected[:2], run_with(buffer, enforce_eager=eager)[1]).exact
        for eager in (True, False)
    ]
    verdict = {(True, True): "well again", (True, False): "still ill with graphs"}
    return verdict.get(tuple(found), f"eager right: {found[0]}, graphs right: {found[1]}")


print(examine(Mended))

# %% [markdown]
# <details><summary>The diagnosis</summary>
#
# `long()` makes a new tensor, at a new address, in every step. A step without a graph asks the
# buffer for its inputs, and gets the new one. A recorded step doesn't ask: it has the address of
# the tensor that was there at the recording, and that one still holds what it held then, zeros.
# Every token is turned as if it were the first of its text. Here the old tensor is kept alive by
# the `Rerun`; on a GPU its memory may belong to somebody else by now.
#
# The mend is to make the wide tensor once, and to write in place:
#
# ```python
# class Mended(Patient):
#     def send(self, turn):
#         StepBuffer.send(self, turn)
#         self.inputs.positions.copy_(self.narrow)
# ```
#
# </details>
#
# vLLM had it in a more hidden form: an operation between two graphs made its output anew in each
# step, and [the graph behind it went on reading the old
# place](https://github.com/vllm-project/vllm/pull/53915). The report has what makes this kind of
# fault bad: "silently corrupts output". The check of addresses that would have found it ran only
# with debug logging. (The code above is ours, and not theirs.)
#
# ### Second patient
#
# "At first all is well. When the server has run for a while, one user in a hundred gets a wrong
# answer. With two or four users at a time, never." It wipes its arrays before it fills them:

# %%
FILL = "nanoteach.step_inputs.fill_decodes"


def wipes(to, decodes, block_size):
    """Write the rows; what is left is zero."""
    for name in ("input_ids", "positions", "slots", "decode_lens"):
        to[name][:] = 0
    for row, seq in enumerate(decodes):
        position = seq.num_computed_tokens
        block, place = divmod(position, block_size)
        to["input_ids"][row] = seq.token_ids[position]
        to["positions"][row] = position
        to["slots"][row] = seq.block_table[block] * block_size + place
        to["decode_lens"][row] = position + 1


# %% [markdown]
# We let two requests come and go, and then ask S again, "What is 27 plus 48?", beside none, one,
# two or three others that decode. Blocks have 11 tokens here.


# %%
question = chat("What is 27 plus 48?")


def serve(fill, others):
    """S's answer beside so many others, and its blocks."""
    with installed({FILL: fill}):
        core = engine(8, max_num_batched_tokens=len(question), num_gpu_blocks_override=10,
                      block_size=11, enable_prefix_caching=False)  # fmt: skip
        for length in (2, 87):  # these come and go
            core.generate([[5] * length], SamplingParams(max_tokens=1, ignore_eos=True))
        seq = core.add_request("S", question, SamplingParams(max_tokens=14))
        for i in range(others):
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            core.add_request(f"other {i}", [300 + i], params)
        core.step()
        table = list(seq.block_table)
        while not seq.finish_reason:
            core.step()
    return tokenizer.decode(seq.output_token_ids, skip_special_tokens=True), table


for others in range(4):
    text, table = serve(wipes, others)
    print(f"{1 + others} rows a step: {text!r}, blocks of S {table}")

# %% [markdown]
# Who loses what, and at which numbers? These are the tokens of the question, with their places in
# the pool:

# %%
print(", ".join(
    f"{tokenizer.decode([token])!r} {table[i // 11] * 11 + i % 11}"
    for i, token in enumerate(question)
))  # fmt: skip

# %% [markdown]
# Write down what is wrong. Then mend it; one line will do.


# %%
def mended(to, decodes, block_size):
    """Your mend: as it stands, the patient."""
    wipes(to, decodes, block_size)


# %%
def examine_rows(fill):
    """One row, and three."""
    texts = [serve(fill, others)[0] for others in (0, 2)]
    bad = [text for text in texts if text != "27 plus 48 is 75."]
    return f"wrong: {bad}" if bad else "well again"


print(examine_rows(mended))

# %% [markdown]
# <details><summary>The diagnosis</summary>
#
# Three rows take the graph of 4, and one row is padding. Zero is a token that exists and a position
# that exists, and as a length it reads nothing. But slot 0 is a place of the pool: the first of
# block 0. In each step the padded row stores there the K/V of token 0. S has block 0 as its second
# block, and what lay at place 0 was the 8 of its 48. S goes on without it, and answers what 27 plus
# 4 is.
#
# On a fresh server block 0 belongs to the first request, and place 0 to the first token of a chat,
# which is the same for all and tells the model little. So it went unnoticed. And with 1, 2 or 4
# rows there is no padding at all.
#
# ```python
# def mended(to, decodes, block_size):
#     wipes(to, decodes, block_size)
#     to["slots"][len(decodes):] = -1
# ```
#
# </details>
#
# vLLM has slot -1 for padding, and [a new piece of
# code](https://github.com/vllm-project/vllm/issues/43810) took the block and the place out of it by
# division, as if it were real. In Python -1 is the last block: 64 padded rows overwrote the last
# place of the pool. SGLang reserves slot 0, which no request gets, as
# the place to write to, and [later skipped those stores](https://github.com/sgl-project/sglang/pull/32477),
# since what lay there could still be read. Both are the same question: where does a row go that is
# nobody's?
#
# ## What moved
#
# The ladder as recorded, one small workload on all stages, in the order of the course:

# %%
print(where("stages_h200"))
print(stage_table(recorded_stages(*range(1, 9))))

# %% [markdown]
# Stages 1 to 7 all launch kernels one by one from Python, and on this GPU that is what limits them.
# Each was right about what it saves: tokens not computed twice, memory not reserved, slots not
# idle. With eight short requests at a time, none of it is what the time goes to, and stage 3, which
# gathers its pages with more calls, gains nothing. Only when the launches are gone do the bytes
# show. On a large model, or a wide batch, the order of the gains is another one.
#
# - **The bottleneck now**: for one request, the beginnings and ends of 168 kernels. For 256, K/V:
#   attention is most of the step.
# - A prompt step is not in a graph: the host still launches it kernel by kernel, which delays the
#   first token.
# - Recording takes time before the first request, and memory:

# %%
for row in bench["rows"]:
    if row["workload"] == "startup":
        print(f"{row['metric']:12} {median(row['samples']):7.2f} {row['unit']}")

# %% [markdown]
# ### Where others do this
#
# - nano-vLLM,
#   [nanovllm/engine/model_runner.py](https://github.com/GeeeekExplorer/nano-vllm/blob/cde3fc22c2694ba8052f7df0b5e05ef7e10c8603/nanovllm/engine/model_runner.py):
#   capturing and replaying on one screen: graphs of 1, 2, 4, 8 and every 16 requests,
#   slots filled with -1 and lengths with 0 before each replay. Its loop is the plain one.
# - vLLM 0.14.0, [vllm/compilation/cuda_graph.py](https://github.com/vllm-project/vllm/blob/v0.14.0/vllm/compilation/cuda_graph.py):
#   records whole steps of decodes, and for other steps the pieces between two attentions;
#   [vllm/v1/cudagraph_dispatcher.py](https://github.com/vllm-project/vllm/blob/v0.14.0/vllm/v1/cudagraph_dispatcher.py)
#   chooses, and
#   [async_scheduler.py](https://github.com/vllm-project/vllm/blob/v0.14.0/vllm/v1/core/sched/async_scheduler.py)
#   is the loop that runs ahead: it counts placeholders where ours appends promises.
#
# ### To read
#
# - Alan Gray, [Getting Started with CUDA Graphs](https://developer.nvidia.com/blog/cuda-graphs/)
#   (2019): launches, measured.
# - [Accelerating PyTorch with CUDA Graphs](https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/)
#   (2021): what may be captured, and static inputs.
# - Williams et al., [Roofline](https://doi.org/10.1145/1498765.1498785) (2009), again, with the
#   thin product in mind.
#
# What is left of a step is to say more about the token that it draws: notebook 09, sampling.
