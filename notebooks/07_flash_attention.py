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
# # 07 · FlashAttention
#
# **At the end attention reads K and V where they lie in the pool: no history is copied, and no
# score matrix exists.**
#
# 75 minutes. It needs notebooks 03 (block tables, the gather) and 06 (prompts and decodes in one
# step). No GPU: the kernel that you read here runs on the CPU, one program after the other.
#
# Run the exercise cells too, also unwritten: they put your saved version, or the package's, in
# place.

# %% tags=["nbval-ignore-output"]
import math
import os
import random
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels run on the CPU
try:
    import triton.language as tl
    from triton import jit
except ImportError:  # there is no Triton for this machine: a stand-in runs the same kernels
    from nanoteach.course import tile_language as tl
    from nanoteach.course.tile_language import jit

import torch
from torch import Tensor

from nanoteach.backends import flash_attn_needs
from nanoteach.block_manager import blocks_needed
from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.config import EngineConfig
from nanoteach.cost_model import SHAPES, Work, attention_flops, kv_bytes_per_token
from nanoteach.course import (
    exercise,
    installed,
    open_notebook,
    pictures_07,
    predict,
    reveal,
    show,
    widgets,
)
from nanoteach.course.pictures import Request, traced_run
from nanoteach.course.timing import recorded_stages, stage_table, timing_model, where
from nanoteach.hardware import hardware_named, measure, seconds_per_call
from nanoteach.hub import resolve_model
from nanoteach.kv_cache import decode_attention
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.paged_attention import PagedAttention
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.reference import compare, references
from nanoteach.stages import LADDER, Parts, build_core
from nanoteach.tiled_attention import TILE_KEYS, Running, TiledAttention, tile_tokens
from nanoteach.types import SamplingParams

open_notebook(7)

# %% [markdown]
# ## The copy
#
# Since notebook 03, K and V live in blocks all over the pool. PyTorch's attention wants them in one
# tensor. So in every step, in every layer, `gather` copies the history of each request together,
# attention reads the copy, and the copy is thrown away.
#
# How much is that? We count. Here is stage 6 with a pool that keeps books. It serves one request:
# **request F**, "Tell me a story about a fox.", the one that we follow through the course.

# %%
folder = resolve_model("tiny")
tokenizer, eos = load_tokenizer(folder), eos_token_ids(folder)
model = load_model(folder, "cpu", torch.float32)


def chat(text):
    """A prompt's tokens, in the chat template."""
    message = [{"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def parts(budget=256):
    """What an engine on `tiny` is built from, with so many tokens a step."""
    config = EngineConfig(
        max_num_seqs=16, max_model_len=1024, num_gpu_blocks_override=512,
        max_num_batched_tokens=budget,
    )  # fmt: skip
    return Parts(model, config, eos)


def engine_with(attention, budget=256):
    """The engine of notebook 06, with another attention."""
    return build_core(parts(budget), PrefixCachingBlockManager, ChunkedPrefillScheduler, attention)


class Counting(PagedAttention):
    """The attention of stage 3 to 6. It counts what it stores and what it copies, in layer 0."""

    def attend(self, layer, q, k, v, metadata):
        if layer == 0:
            stored.append(len(k))
            copied.append(0)
        return super().attend(layer, q, k, v, metadata)

    def gather(self, layer, blocks):
        if layer == 0:
            copied[-1] += len(blocks) * self.block_size
        return super().gather(layer, blocks)


stored, copied = [], []
fox = chat("Tell me a story about a fox.")
story = engine_with(Counting).generate([fox], SamplingParams(max_tokens=120))[0]
print(tokenizer.decode(story, skip_special_tokens=True)[:75], "...")
print(f"{len(stored)} steps: {sum(stored)} tokens stored, {sum(copied):,} tokens copied")

# %% tags=["nbval-ignore-output"]
pictures_07.copies(stored, copied)

# %% [markdown]
# It is the triangle of notebook 01 once more. There, each step *computed* everything again. The
# cache ended that. Now each step *copies* everything again.
#
# Every copied byte is moved three times. It is read from the pool, written to the copy, and read
# from the copy by attention. A program that could read the pool through the block table would move
# it once.
#
# ## The score matrix
#
# There is a second thing that need not exist. Attention as it stands in textbooks has three
# steps: `scores = q @ k.T`, `weights = softmax(scores)`, `out = weights @ v`. The scores are a
# matrix with a row for every query and a column for every key, for every head.
#
# Take four prompts of 4,096 tokens each, in one step, on Qwen3-0.6B: 16 query heads, 8 K/V heads,
# 128 values a head. Before you read on:

# %%
predict("the scores of one layer for 4 prompts of 4,096 tokens, 2 bytes each", ..., "GB")
predict("H200, 64 decodes of 4,096 tokens: attention with a gather, to one without", ..., "times")
predict("stage 6 with 400 requests a second: steps with decodes alone", ..., "%")

# %%
qwen, h200 = SHAPES["qwen3-0.6b"], hardware_named("h200")
prompts_4 = [Work(4096, 0)] * 4
tokens = 4 * 4096
matrix = 2 * qwen.num_heads * 4 * 4096**2
needed = 2 * tokens * (2 * qwen.q_size + 2 * qwen.kv_size)  # Q and the result, K and V
moving = 2 * matrix / h200.read_bandwidth  # the scores are written, and read
square = 4 * qwen.q_size * 4 * 4096**2 / h200.flops  # q @ k.T and weights @ v, 2 FLOPs a step
causal = attention_flops(qwen, prompts_4) / qwen.num_layers / h200.flops
print(f"scores of one layer        {matrix / 1e9:6.2f} GB")
print(f"Q, K, V and the result     {needed / 1e9:6.2f} GB")
print(f"to write and read the scores once   {1e3 * moving:.2f} ms")
print(f"to compute with all of them         {1e3 * square:.2f} ms")
print(f"to compute what is causal           {1e3 * causal:.2f} ms   ({h200.name}, bounds)")

# %% tags=["nbval-ignore-output"]
reveal("the scores of one layer for 4 prompts of 4,096 tokens, 2 bytes each", matrix / 1e9, "GB")

# %% [markdown]
# The scores are ten times as large as all that goes in and comes out. Writing and reading them
# once takes longer than all the arithmetic of the textbook. And half of that is for nothing: a
# token looks only back, so the scores above the diagonal count 0. Beside the causal half, which is
# needed, the moving takes almost three times as long. Then, softmax sits between the two products:
# it wants a row's largest score and the sum of all exponentials before it can give the first
# weight. So it seems that the scores must all be there at once. They need not.
#
# (PyTorch's `scaled_dot_product_attention`, which the stages so far call, knows the trick that
# follows where it can. What it does not take is a block table.)
#
# ## Softmax, a tile at a time
#
# Softmax of a row is computed with the largest score $m$ taken off, so that nothing overflows:
# $w_i = e^{s_i - m}$, and the result is $\sum_i w_i v_i / \sum_i w_i$. It is two sums over the same
# weights. Sums can be added up piece by piece. Only $m$ is not known before the last score.
#
# So take the largest score *so far*, and repair the sums when a larger one comes. An example by
# hand, with keys in two tiles. The scores are logarithms, to make it easy: $\ln 1$ and $\ln 2$ in
# the first tile, with the values 10 and 20. Then $\ln 8$ in the second, with the value 40.
#
# - **After the first tile.** The largest score is $\ln 2$. The weights are $1/2$ and $1$. Their
#   total is $1.5$, and the weighted sum of the values is $\frac12 \cdot 10 + 1 \cdot 20 = 25$.
# - **The second tile** brings $\ln 8$, which is larger. Measured from there, the first two weights
#   would be $1/8$ and $2/8$. So the total of the first tile is worth $0.375$ now, and its weighted
#   sum $6.25$: a quarter of what we had. The new weight is $1$. Together: a total of $1.375$, and a
#   weighted sum of $46.25$.
# - **At the end** we divide, once: $46.25 / 1.375 = 33.64$. And at once it would have been
#   $(1 \cdot 10 + 2 \cdot 20 + 8 \cdot 40)/11 = 33.64$.
#
# Three things are kept for each row, then: the largest score so far, the total, the weighted sum.
# That is a `Running`. It does not grow with the history.
#
# ### One step of it
#
# `attend_tile(running, scores, values)` takes in one more tile and returns a new `Running`.
#
# - `running.largest`, `running.total`: `[..., rows]`; `running.weighted`: `[..., rows, head_dim]`.
#   The dots stand for any dimensions before, such as heads.
# - `scores`: `[..., rows, keys]`, the tile's. `-inf` where a row must not look.
# - `values`: `[..., keys, head_dim]`, the tile's V.
# - Before the first tile `largest` is `-inf`, and `total` and `weighted` are 0. Nothing special
#   is needed for it: $e^{-\infty}$ is 0. In each first tile every row sees at least one key.
# - Nothing is divided here, and what is handed in stays as it is.


# %%
@exercise("nanoteach.tiled_attention.attend_tile")
def attend_tile(running: Running, scores: Tensor, values: Tensor) -> Running:
    """The running softmax, one tile further."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Four lines: the new largest score of each row; the factor for what was there; the weights of this
# tile; and the three new parts. `amax(-1)` is the largest along the last dimension, and
# `unsqueeze(-1)` gives a row's number a dimension to be subtracted along.
#
# </details>
# <details><summary>Hint 2</summary>
#
# By which factor does a weight $e^{s - m}$ change, when $m$ becomes $m'$? The score drops out. In
# the example it was a quarter, from $\ln 2$ and $\ln 8$. Both sums are made of such weights.
#
# </details>

# %%
show("nanoteach.tiled_attention.attend_tile")

# %% [markdown]
# The example from above, through the function that is in place now:

# %%
running = Running(torch.tensor([-torch.inf]), torch.zeros(1), torch.zeros(1, 1))
for numbers, worth in (([1.0, 2.0], [10.0, 20.0]), ([8.0], [40.0])):
    running = attend_tile(running, torch.tensor([numbers]).log(), torch.tensor(worth)[:, None])
    total, weighted = running.total.item(), running.weighted.item()
    print(f"total {total:.3f}, weighted {weighted:.2f}, divided {weighted / total:.2f}")


# %% [markdown]
# And all of it in ten lines without any library, for one query and one key at a time. This is
# online softmax (Milakov and Gimelshein, 2018). FlashAttention (Dao and others, 2022) is the same
# with the values in the sum, and with tiles in the place of single keys.


# %%
def attention(query, keys, values):
    """Softmax attention of one query. Lists of numbers; no list of scores anywhere."""
    largest, total, weighted = -math.inf, 0.0, [0.0] * len(values[0])
    for key, value in zip(keys, values, strict=True):
        score = sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(len(query))
        rescale = math.exp(largest - max(largest, score))
        largest = max(largest, score)
        weight = math.exp(score - largest)
        total = total * rescale + weight
        weighted = [w * rescale + weight * v for w, v in zip(weighted, value, strict=True)]
    return [w / total for w in weighted]


q, k, v = torch.randn(8), torch.randn(50, 8), torch.randn(50, 8)
ours = torch.tensor(attention(q.tolist(), k.tolist(), v.tolist()))
textbook = (k @ q / math.sqrt(8)).softmax(0) @ v
print("as softmax of all scores at once:", torch.allclose(ours, textbook, atol=1e-5))

# %% [markdown]
# How often does a larger score come? Here are real scores of F, in the middle of its story: one
# head of the last layer, the newest token against the 64 up to it. Read them tile by tile. Then
# change the order, and the size. The line below the picture counts. The sum at the end is always
# the same.


# %% tags=["nbval-ignore-output"]
class Watching(TiledAttention):
    """The attention of stage 7. It keeps the last step's queries, metadata and results."""

    def attend(self, layer, q, k, v, metadata):
        out = super().attend(layer, q, k, v, metadata)
        self.seen = {**getattr(self, "seen", {}), layer: (q.contiguous(), metadata, out)}
        return out


core = engine_with(Watching)
chats = {"A": chat("What is 27 plus 48?"), "B": chat("Who are you?"), "F": fox + story[:70]}
for name, prompt in chats.items():
    core.add_request(name, prompt, SamplingParams(max_tokens=9, ignore_eos=True))
for _ in range(4):
    core.step()
pool = core.runner.attention
last = model.config.num_layers - 1
q, metadata, out = pool.seen[last]
length, table = metadata.seq_lens[2], metadata.tables[2].tolist()
group, head_dim = model.config.num_heads // model.config.num_kv_heads, model.config.head_dim
keys = pool.k[last][table].flatten(0, 1)[:length, 0]
scores = keys @ q[2, 0] / math.sqrt(head_dim)
steps = pictures_07.SoftmaxSteps(scores.tolist()[-64:], tiles=3)
widgets.Panel(
    steps,
    widgets.Control("slider", "tiles", "tiles read", range(0, 17)),
    widgets.Control("slider", "size", "keys in a tile", [4, 8, 16, 32]),
    widgets.Control("choice", "order", "order", steps.orders),
)

# %% [markdown]
# ## Tiles of a prompt
#
# A decode has one query. A prompt's chunk has many, and each of them is a row of the same running
# softmax: K and V of a tile are read once for all rows of a program. So a chunk is cut as well,
# into **tiles of new tokens**. A GPU runs one *program* for each of them and for each K/V head.
#
# A tile has a fixed number of rows, 128. A row is a pair: one new token in one of the query heads.
# The query heads that share a K/V head are together in a tile, since they read the same keys. On
# `tiny` two heads share one, so a tile holds 64 new tokens. On Qwen3-0.6B it is the same.
#
# (So "tile" means two things here: some keys of a history, as above, and some new tokens with their
# rows. Below, Triton calls any small array of a kernel a tile, and both become such arrays.)

# %%
for name, config in (("tiny", model.config), ("Qwen3-0.6B", qwen)):
    print(f"{name:10} {tile_tokens(config)} new tokens in a tile")

# %% [markdown]
# A program must be told which sequence it works for, and from which new token on.
# `tiles_of(query_lens, first_seq, tile_tokens)` makes that list.
#
# - `query_lens`: how many new tokens each chunk of this step has.
# - `first_seq`: the number of the first of these sequences. In a step the decodes come first, so
#   with 2 decodes the chunks begin with sequence 2.
# - The result has a pair for each tile, sequence by sequence: the number of the sequence, and the
#   tile's first new token. Tokens are counted from 0 within each sequence's new tokens.
#
# An example with tiles of 4: two chunks, of 9 and 3 new tokens, after two decodes. The first needs
# three tiles, and the last of them has one token: `[(2, 0), (2, 4), (2, 8), (3, 0)]`.


# %%
@exercise("nanoteach.tiled_attention.tiles_of")
def tiles_of(query_lens: list[int], first_seq: int, tile_tokens: int) -> list[tuple[int, int]]:
    """(sequence, its first new token) of every tile of `tile_tokens` new tokens."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two loops: over the chunks, and over the tiles of each. `enumerate` can begin with another number
# than 0.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `range` has a third argument, the stride. Does it get the last, partly full tile right?
#
# </details>

# %%
show("nanoteach.tiled_attention.tiles_of")

# %%
for lens in ([4096] * 4, [512], [16, 70]):
    print(f"chunks of {lens}: {len(tiles_of(lens, 0, 64))} tiles, times 8 K/V heads")

# %% [markdown]
# ## A kernel
#
# Now the program itself, in Triton, the language in which the kernels of this course are written.
# A Triton kernel is a Python function that works on **tiles**: small arrays that lie in registers.
# Three things are new if you have never read one.
#
# - The function is one program. It is started many times at once, on a grid; `tl.program_id` says
#   which one it is. Nobody waits for anybody.
# - A tensor comes in as a **pointer**, the place of its first value. `tl.load(pointer + places)`
#   reads what stands at these places, and `tl.store` writes. A `mask` says which places are real.
# - Sizes of tiles are known when the kernel is compiled: `tl.constexpr`.
#
# Here, without a GPU, Triton's interpreter runs the programs one after the other on the CPU. Where
# Triton can't be installed, a stand-in of ninety lines does (`tile_language`).
#
# ### Step one: follow the table
#
# The smallest kernel that does something for us. A program copies one tile of keys out of the pool,
# for one sequence and one K/V head. `block * SIZE + offset` is the slot, as in your
# `slot_mapping`. A slot is `HEADS * DIM` values wide.


# %%
@jit
def copy_keys(
    k_pool, table, out, start, length,
    HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    keys_at = start + tl.arange(0, TILE)  # positions in the text
    there = keys_at < length
    block = tl.load(table + keys_at // SIZE, mask=there, other=0)
    slot = block * SIZE + keys_at % SIZE
    dims = tl.arange(0, DIM)
    places = slot[:, None] * HEADS * DIM + head * DIM + dims[None, :]  # a tile of TILE x DIM
    keys = tl.load(k_pool + places, mask=there[:, None], other=0.0)
    rows = tl.arange(0, TILE)
    to = (rows[:, None] * HEADS + head) * DIM + dims[None, :]
    tl.store(out + to, keys)


heads = model.config.num_kv_heads
tile = torch.zeros(16, heads, head_dim)
sizes = {"HEADS": heads, "DIM": head_dim, "SIZE": pool.block_size, "TILE": 16}
copy_keys[(heads,)](pool.k[last], metadata.tables[2], tile, 40, length, **sizes)
gathered, _ = pool.gather(last, torch.tensor(table))
print(f"F has {length} tokens in the blocks {table}")
print("its keys 40 to 55, as the gather has them:", torch.equal(tile, gathered[40:56]))

# %% [markdown]
# That would still be a copy. But `keys` is in registers now, and nothing forces us to store it.
#
# ### Step two: attend to it
#
# The kernel for decodes. A program has one sequence and one K/V head. Its rows are the query heads
# that share this K/V head. It walks the history in tiles, and what it carries along is your
# `Running`, in three variables.


# %%
@jit
def decode_kernel(
    q, k_pool, v_pool, tables, lengths, out, scale, table_width,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(lengths + seq)
    dims = tl.arange(0, DIM)
    rows = (seq * HEADS + head) * GROUP + tl.arange(0, GROUP)  # of q and of out
    mine = rows[:, None] * DIM + dims[None, :]
    queries = tl.load(q + mine)

    largest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    weighted = tl.zeros([GROUP, DIM], tl.float32)
    for start in range(0, length, TILE):
        keys_at = start + tl.arange(0, TILE)
        there = keys_at < length
        block = tl.load(tables + seq * table_width + keys_at // SIZE, mask=there, other=0)
        slot = block * SIZE + keys_at % SIZE
        places = (slot[:, None] * HEADS + head) * DIM + dims[None, :]
        keys = tl.load(k_pool + places, mask=there[:, None], other=0.0)
        values = tl.load(v_pool + places, mask=there[:, None], other=0.0)

        scores = tl.dot(queries, tl.trans(keys)) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        rescale = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest[:, None])
        total = total * rescale + tl.sum(weights, 1)
        weighted = weighted * rescale[:, None] + tl.dot(weights, values)
        largest = new_largest
    tl.store(out + mine, weighted / total[:, None])


result = torch.zeros_like(q)
decode_kernel[(len(q), heads)](
    q, pool.k[last], pool.v[last], metadata.tables, metadata.lengths, result,
    1 / math.sqrt(head_dim), metadata.tables.shape[1], GROUP=group, **sizes,
)  # fmt: skip
print("histories:", metadata.seq_lens, " programs:", len(q) * heads)
print("as the engine's attention in that step:", torch.allclose(result, out, atol=1e-5))

# %% [markdown]
# Look for the score matrix: `scores` has `GROUP` rows and `TILE` columns, 2 x 16 here. Look for the
# copy: there is none. And a block table of any order is fine, with any block size.
#
# `decode_kernel` of the package, in `triton_attention.py`, is this kernel with four things more. A
# product on the tensor cores wants at least 16 rows, so there are rows that nobody uses. Powers of
# two are faster than those of e, so scores are scaled by $\log_2 e$. A row of length 0 pads the
# batch, for notebook 08. And a history may be cut.
#
# ## One long history
#
# One request decodes, with 8,192 tokens behind it, on Qwen3-0.6B. How many programs are that? One
# for each K/V head: 8. An H200 has 132 processors (SMs), and each wants several programs. So 124 of
# them have nothing to do, and 8 read it all.
#
# **Split-KV** (Flash-Decoding, Dao and others, 2023) cuts the history into parts, and gives each to
# a program of its own. A part's softmax is right in itself: it is an average of the part's values.
# But what is its share in the whole?
#
# An example by hand. A history in two parts. In the first the exponentials add up to 3, and its
# average is 10. In the second they add up to 1, and its average is 50. All exponentials add up to
# 4, of which the first part has three quarters. So the whole is
# $\frac34 \cdot 10 + \frac14 \cdot 50 = 20$.
#
# A sum of exponentials may be too large to be written down ($e^{300}$), so each part hands in the
# *logarithm* of its sum, largest score included. For the two parts: $\ln 3$ and $\ln 1 = 0$.
#
# `combine(outs, log_sums)` adds the parts up.
#
# - `outs`: `[splits, ..., rows, head_dim]`, each part's own average.
# - `log_sums`: `[splits, ..., rows]`. A part without keys has `-inf`, and its `outs` are 0. At
#   least one part of each row has keys.
# - The result is `[..., rows, head_dim]`.


# %%
@exercise("nanoteach.tiled_attention.combine")
def combine(outs: Tensor, log_sums: Tensor) -> Tensor:
    """One result from those of several splits."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The share of a part is the exponential of its log sum, over those of all parts. You know a
# function that computes exactly this from logarithms, and never overflows.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The parts are dimension 0. Give the shares a dimension at the end, so that they can be multiplied
# with `outs`, and add up over the parts.
#
# </details>

# %%
show("nanoteach.tiled_attention.combine")

# %%
outs, sums = torch.tensor([[[10.0]], [[50.0]]]), torch.tensor([[3.0], [1.0]])
print("the example:", round(combine(outs, sums.log()).item(), 4))
k, v, q1 = torch.randn(300, 64), torch.randn(300, 64), torch.randn(4, 64)
s = q1 @ k.T / 8
cut = [slice(0, 7), slice(7, 200), slice(200, 300)]
outs = torch.stack([s[:, part].softmax(-1) @ v[part] for part in cut])
log_sums = torch.stack([s[:, part].logsumexp(-1) for part in cut])
same = torch.allclose(combine(outs, log_sums), s.softmax(-1) @ v, atol=1e-5)
print("300 keys in three parts, as at once:", same)

# %% [markdown]
# ### How many parts?
#
# Cutting isn't free: each part writes a result, and a second kernel reads them all. With 256
# requests there are programs enough, and nothing need be cut. So the number depends on the batch.
#
# `choose_splits(num_seqs, num_kv_heads, longest)` gives the number of parts for all decodes of a
# step. It is the **largest power of two** for which all three hold:
#
# - it is at most `MAX_SPLITS`, which is 32;
# - all programs together, `num_seqs * num_kv_heads` times the parts, are at most 528: four for each
#   SM of an H200. Where that can't be met even without a cut, the answer is 1;
# - with *half* as many parts, a part would hold more than one tile: half the number times
#   `TILE_KEYS`, which is 64, is less than `longest`, the longest history. (So more than half of the
#   parts have something to do.) The answer 1 is always allowed.
#
# Examples with 8 K/V heads. One decode, 8,192 tokens: 32 parts. 16 decodes, 1,024 tokens: 128
# programs without a cut, so 4 parts make 512, and 8 would be too many. One decode of 200 tokens: 4
# parts, since 2 times 64 is less than 200, and 4 times 64 is not. Of 129 tokens: 4 as well, since 2
# times 64 is 128. (They are three tiles, and one part is empty.) Of 128 tokens: 2.
#
# A step of prompts alone asks, too: then `num_seqs` is 0, and any answer from 1 to 32 that is a
# power of two will do. `MAX_SPLITS` and `TILE_KEYS` are known to your function by their names.


# %%
@exercise("nanoteach.tiled_attention.choose_splits")
def choose_splits(num_seqs: int, num_kv_heads: int, longest: int) -> int:
    """Into how many parts a decode's history is cut: enough programs to fill a GPU, 4 an SM."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin with 1, and double as long as the doubled number keeps all three rules.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Two of the rules are about the doubled number. The third is about the number before it was
# doubled, since that is half of it.
#
# </details>

# %%
show("nanoteach.tiled_attention.choose_splits")

# %%
print("parts, and programs with 8 K/V heads (a history of 512 / 1,024 / 8,192 tokens)")
for batch in (1, 4, 16, 64, 256):
    cells = [choose_splits(batch, 8, longest) for longest in (512, 1024, 8192)]
    print(f"{batch:4} decodes: " + "  ".join(f"{n:2} -> {batch * 8 * n:5,}" for n in cells))

# %% [markdown]
# ## Plug it in
#
# Stage 7 is stage 6 with another attention. On a GPU that is `TritonAttention`: our two Triton
# kernels, one for the decodes of a step, one for the tiles of its chunks. Here it is
# `TiledAttention`: the same tiles, parts and sums in plain PyTorch, one program after the other.
# Your functions are in it. It is slow, and it is right.
#
# F arrives while A and B decode, with a budget of 8, as in notebook 06. What does the attention of
# each step get to do?


# %%
class Telling(TiledAttention):
    """The attention of stage 7. It says how it cuts each step."""

    def plan(self, query_lens, seq_lens, block_tables):
        m = super().plan(query_lens, seq_lens, block_tables)
        tiles = list(zip(m.tile_seqs.tolist(), m.tile_starts.tolist(), strict=True))
        decodes = m.decode_lens.tolist()
        print(f"decodes {decodes!s:9} parts {m.splits:2}   chunks {query_lens[len(decodes):]!s:4} "
              f"tiles {tiles}")  # fmt: skip
        return m


core = engine_with(Telling, budget=8)
for name, text in (("A", "The"), ("B", "A dog")):
    core.add_request(name, list(tokenizer.encode(text)), SamplingParams(max_tokens=8))
core.step()
core.add_request("F", fox, SamplingParams(max_tokens=3))
while core.has_unfinished_requests():
    core.step()

# %% [markdown]
# (In the first step A is a prompt of one token, so it counts as a decode.) F's chunks are of 6, 6
# and 4 tokens, so each is a tile, and with two K/V heads two programs a layer. When F decodes, it
# is one of the decodes. All histories are shorter than a tile here, so none is cut.
#
# ## The same tokens as transformers
#
# Lengths that matter now: around a tile of 64 keys, and several tiles. F is the first. (This takes
# ten to twenty seconds, and more on a busy machine.)

# %%
prompts = [fox, chat("What is 27 plus 48?"), list(tokenizer.encode("The")), fox * 4]
prompts += [(fox * 4)[1:], fox * 4 + fox[:1], story[:50], (story * 2)[:129], (story * 3)[:320]]
params = [SamplingParams(max_tokens=4 + 2 * i, ignore_eos=True) for i in range(len(prompts))]
expected = references(folder, prompts, params)
print("prompts of", [len(prompt) for prompt in prompts])
for budget in (24, 512):
    tokens_7 = LADDER[6].build(parts(budget)).generate(prompts, params)
    print(f"budget {budget:3}: {compare(expected, tokens_7)}")

# %%
again = LADDER[6].build(parts()).generate([fox], SamplingParams(max_tokens=30))[0]
print("F's story is the same:", again == story[:30])

# %% [markdown]
# ## Kernel against gather
#
# What should it gain? One layer of Qwen3-0.6B, one decode step. Each history token has 4 KiB of K
# and V in a layer. The kernel reads them once. The gather reads them, writes them, and attention
# reads them: three times the bytes. An H200's ceilings are 4,311 GB/s for reading and 4,198 for
# copying (notebook 00).


# %%
def bounds(batch, history):
    """Seconds that the bytes of one layer take: read by a kernel, and with a gather."""
    num_bytes = batch * history * kv_bytes_per_token(qwen) // qwen.num_layers
    read = num_bytes / h200.read_bandwidth
    return read, 2 * num_bytes / h200.copy_bandwidth + read


for batch, history in ((1, 512), (1, 8192), (16, 2048), (64, 4096), (64, 8192)):
    kernel, gather = (1e6 * seconds for seconds in bounds(batch, history))
    print(f"{batch:2} x {history:5,} tokens: kernel {kernel:6.1f} us, gather {gather:7.1f} us")
print(f"(by bytes, {h200.name})")

# %% [markdown]
# Beside it what was recorded on an H200, from `figures/results/attention_h200.json`: medians of
# seven, each in a CUDA graph, so that launching costs nothing. In the record each side stores the
# new token's K/V, and then attends.

# %%
timings = pictures_07.recorded_timings()
print("decodes  history   kernel: bytes  recorded    gather: bytes  recorded   times")
for t in timings:
    if t.history in (512, 2048, 4096, 8192):
        kernel, gather = (1e6 * seconds for seconds in bounds(t.batch, t.history))
        print(
            f"{t.batch:7}  {t.history:7,} {kernel:12.1f} us {t.kernel:6.1f} us {gather:12.1f} us "
            f"{t.gather:7.1f} us {t.gather / t.kernel:7.1f}"
        )

# %% tags=["nbval-ignore-output"]
every = {(t.batch, t.history): tuple(1e6 * x for x in bounds(t.batch, t.history)) for t in timings}
pictures_07.against_bytes(timings, every)

# %% tags=["nbval-ignore-output"]
(found,) = (t for t in timings if (t.batch, t.history) == (64, 4096))
reveal(
    "H200, 64 decodes of 4,096 tokens: attention with a gather, to one without",
    found.gather / found.kernel,
    "times",
)

# %% [markdown]
# Read the picture from the right, where the bytes are many.
#
# - **64 decodes of 8,192 tokens.** The kernel takes what its bytes take. (If it is a hair faster
#   than its bound: a ceiling is a measurement, too.) The gather is a little over its own bound, and
#   so the gain is more than the three times that the bytes promise.
# - **One decode of 512 tokens.** The bytes would take half a microsecond, and the kernel takes
#   many times that. There is little to read and much to wait for: small kernels (store, attend,
#   combine), one after the other. No prediction from bytes holds here.
# - **One decode of 8,192 tokens.** Now both are over their bounds, the gather by far more. A bound
#   says how much is read, and nothing about how many read it. Our kernel cuts the history into 32
#   parts. (Of what the gather spends its time on here, the record does not tell.)
#
# ### On this machine
#
# The tiles of stage 7 are Python loops here, and no measure of a kernel. (Where there is an NVIDIA
# GPU, `python -m nanoteach.bench.attention` measures the kernel, as recorded above.) But the price
# of the gather can be measured anywhere: the same attention on K/V that lie in one piece already.
# One layer of the model that is timed, 16 decodes of 2,048 tokens.

# %%
live = timing_model()

# %% tags=["nbval-ignore-output"]
here = measure(live.device, live.dtype)
batch, history = 16, 2048
kind = {"dtype": live.dtype, "device": live.device}
big = PagedAttention(replace(live.config, num_layers=1), batch * history // 16, 16, **kind)
blocks = torch.randperm(batch * history // 16, device=live.device)
queries = torch.randn(batch, live.config.num_heads, live.config.head_dim, **kind)
mask = torch.ones(batch, history, dtype=torch.bool, device=live.device)
k_piece, v_piece = (x.unflatten(0, (batch, history)) for x in big.gather(0, blocks))


def with_gather():
    k, v = (x.unflatten(0, (batch, history)) for x in big.gather(0, blocks))
    return decode_attention(queries, k, v, mask)


def in_one_piece():
    return decode_attention(queries, k_piece, v_piece, mask)


num_bytes = 2 * k_piece.nbytes
read = num_bytes / here.read_bandwidth
bound = {"in one piece": read, "with a gather": 2 * num_bytes / here.copy_bandwidth + read}
print(f"{num_bytes / 2**20:.0f} MiB of K/V")
for name, run in (("in one piece", in_one_piece), ("with a gather", with_gather)):
    took = seconds_per_call(run, live.device)
    print(f"{name:14} bound {1e3 * bound[name]:7.3f} ms, measured {1e3 * took:7.3f} ms")

# %% [markdown]
# The difference of the two is what the copy costs here. Where computing limits attention, as on a
# CPU with few cores, it is a smaller part of the whole than the bytes say.
#
# ## Decodes alone
#
# A kernel for decodes is the easy half. Suppose that we stop there: a step that has only decodes
# takes the kernel, and a step with a prompt's chunk in it takes the gather, as before. How much of
# the gain would we get?
#
# We count on stage 6: the real scheduler, 100 requests at random moments, prompts of 100 to 2,000
# tokens, answers of 20 to 200, a budget of 512 tokens, on the virtual clock with 0.2 ms a step on
# top. Steps count until the last request has come.

# %%
shares = {}
for rate in (100, 200, 400):
    rng, moment, requests = random.Random(0), 0.0, []
    for _ in range(100):
        moment += rng.expovariate(rate)
        requests.append(Request(rng.randint(100, 2000), rng.randint(20, 200), arrival=moment))
    run = traced_run(
        requests, scheduler=ChunkedPrefillScheduler, max_num_batched_tokens=512, overhead=2e-4
    )
    busy = [step for step in run.steps if step.start < moment]
    pure = [step for step in busy if all(work.num_new == 1 for work in step.work)]
    decodes, all_decodes = (
        sum(work.num_new == 1 for step in some for work in step.work) for some in (pure, busy)
    )
    shares[rate] = len(pure) / len(busy)
    print(
        f"{rate:3} requests/s: {len(busy):5,} steps, {shares[rate]:4.0%} are decodes alone; "
        f"in them {decodes / all_decodes:4.0%} of the decoded tokens"
    )
print(f"({run.clock.label})")

# %% tags=["nbval-ignore-output"]
reveal("stage 6 with 400 requests a second: steps with decodes alone", 100 * shares[400], "%")

# %% [markdown]
# Where little is asked, most steps are decodes alone, and the easy half would do. But where much is
# asked, which is when speed matters, most steps carry a chunk, and nearly all of the decoded tokens
# are in such steps: chunked prefill puts them there on purpose. They would all go through the
# gather.
#
# So stage 7 does not ask what kind of step it is. `plan` cuts every step in two, decodes in front
# and chunks behind, and each half has its kernel. That is what you saw when F arrived.
#
# ## The library's two calls
#
# You need not write kernels to have this. The library flash-attn has two functions that read a
# block table, and `attention_backend="flash_attn"` puts them in the place of ours
# (`nanoteach/flash_backend.py`). One for each half of a step:
#
# ```python
# # n decodes: one new token each, against the pool
# flash_attn_with_kvcache(
#     q[:n, None], k_pool, v_pool,           # [n, 1, heads, dim], [blocks, size, kv_heads, dim]
#     cache_seqlens=decode_lens,             # [n]
#     block_table=decode_tables, causal=True,
# )
# # the chunks: packed, as in notebook 04
# flash_attn_varlen_func(
#     q[n:], k_pool, v_pool,
#     query_starts, key_starts,              # cu_seqlens of the new tokens and of all tokens
#     longest_query, longest_key,
#     causal=True, block_table=chunk_tables,
# )
# ```
#
# A chunk has fewer queries than keys. `causal` lines up the *last* of each, and that is what a
# chunk after a history needs. Where no chunk has a history, K and V of the step itself are handed
# in, without a table.
#
# What does it need of us? `flash_attn_needs` knows. Asked about this notebook's engine:

# %%
for met, otherwise in flash_attn_needs(model, parts().config):
    if not met:
        print("-", otherwise)

# %% [markdown]
# The second one costs memory: blocks of 256 tokens. (Its author, [asked
# why](https://github.com/Dao-AILab/flash-attention/issues/828): it is easier to implement.)
# nano-vLLM takes 256 for this reason. What it means for 24 chats of 20 to 300 tokens, and for a
# prefix of 200 tokens that all of them share:

# %%
rng = random.Random(0)
lengths = [rng.randint(20, 300) for _ in range(24)]
for size in (16, 256):
    held = sum(blocks_needed(n, size) for n in lengths) * size
    print(
        f"blocks of {size:3}: {held:5,} places held for {sum(lengths):,} tokens; "
        f"of a prefix of 200 tokens {200 // size * size} are shared"
    )

# %% [markdown]
# Our kernels take any block size. They ask the table for every token, and that is not the fastest
# way: on prompts they reach 389 TFLOP/s of the 786 that the H200 has in large products
# (`notes/gpu.md` has what was tried). Hopper's unit for moving whole tiles can't follow a table of
# 16 tokens a block.
#
# ## Bug clinic
#
# A patient. Its author had read that scaling the sums costs time, and that a new FlashAttention
# leaves it out where the largest score has grown only a little. So:


# %%
def attend_tile_lazy(running, scores, values):
    """The running softmax, one tile further. A small rise is not worth two multiplications."""
    largest = torch.maximum(running.largest, scores.amax(-1))
    rescale = torch.exp(running.largest - largest)
    rescale = torch.where(rescale > 0.05, 1.0, rescale)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    return Running(
        largest,
        running.total * rescale + weights.sum(-1),
        running.weighted * rescale.unsqueeze(-1) + weights @ values,
    )


# %% [markdown]
# Its tests passed: they had texts of one or two dozen tokens. Then users with long texts said that
# the answers were strange. Here is its error beside softmax of all scores at once, for random
# queries, keys and values: a prompt's last token, then one decode, then a decode that runs beside
# 255 others, on 8 K/V heads.


# %%
def error(step, history, splits=1):
    """The relative error of 200 rows, with the history in so many parts."""
    rng = torch.Generator().manual_seed(history)
    scores, values = (torch.randn(*s, generator=rng) for s in ((200, history), (history, 64)))
    tiles = -(-history // TILE_KEYS)
    width = -(-tiles // splits) * TILE_KEYS
    outs, log_sums = [], []
    for begin in range(0, history, width):
        largest = torch.full((200,), -torch.inf)
        running = Running(largest, torch.zeros(200), torch.zeros(200, 64))
        for start in range(begin, min(begin + width, history), TILE_KEYS):
            part = slice(start, min(start + TILE_KEYS, begin + width, history))
            running = step(running, scores[:, part], values[part])
        outs.append(running.weighted / running.total[:, None])
        log_sums.append(running.largest + running.total.log())
    right = scores.softmax(-1) @ values
    got = combine(torch.stack(outs), torch.stack(log_sums))
    return float((got - right).norm() / right.norm())


def table_of(step):
    """Print the errors by the length of the history; gives back the largest."""
    worst = 0.0
    print("history    prompt   one decode   one of 256")
    for history in (16, 48, 64, 80, 128, 512, 2048, 4096):
        parts_of = (1, choose_splits(1, 8, history), choose_splits(256, 8, history))
        cells = [error(step, history, splits) for splits in parts_of]
        said = [f"{e:.2%}" if e > 1e-4 else "right" for e in cells]
        print(f"{history:7} {said[0]:>9} {said[1]:>12} {said[2]:>12}")
        worst = max(worst, *cells)
    return worst


largest_error = table_of(attend_tile_lazy)

# %% [markdown]
# And in the engine. Prompts of several lengths, each answered twice: by the engine that we proved
# above, and with the patient's function in it.


# %%
def answers(step):
    """8 tokens after each of these prompts, with another `attend_tile`."""
    with installed({"nanoteach.tiled_attention.attend_tile": step}):
        return LADDER[6].build(parts(512)).generate(dogs, SamplingParams(8, ignore_eos=True))


line = list(tokenizer.encode("There was once a small dog. "))
dogs = [line * n for n in (2, 4, 7, 12, 16, 24)]
healthy = answers(attend_tile)
for prompt, right, got in zip(dogs, healthy, answers(attend_tile_lazy), strict=True):
    print(f"a prompt of {len(prompt):3} tokens: the same answer? {right == got}")

# %% [markdown]
# Three questions. Why is everything right up to 64, and wrong beyond? Why is a single decode right
# much longer than a prompt? And what is wrong in the code? Write it down. Then mend the function
# below (there are two ways), and run the cell.


# %%
def attend_tile_mended(running, scores, values):
    """Change what is wrong."""
    largest = torch.maximum(running.largest, scores.amax(-1))
    rescale = torch.exp(running.largest - largest)
    rescale = torch.where(rescale > 0.05, 1.0, rescale)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    return Running(
        largest,
        running.total * rescale + weights.sum(-1),
        running.weighted * rescale.unsqueeze(-1) + weights @ values,
    )


largest_error = table_of(attend_tile_mended)
changed = [a != b for a, b in zip(healthy, answers(attend_tile_mended), strict=True)]
print(f"{sum(changed)} of {len(dogs)} answers are not those of the healthy engine")
well = largest_error < 1e-4 and not any(changed)
print("well again" if well else f"still ill: the largest error is {largest_error:.2%}")

# %% [markdown]
# <details><summary>The diagnosis</summary>
#
# A history of up to 64 tokens is one tile. There is nothing to rescale: before it everything is 0.
# From the second tile on, the largest score may grow. If it grows by less than 3 ($e^{-3}$ is
# 0.05), the patient leaves the old sums as they are, and *still* measures the new weights from the
# new largest score. Now one sum holds weights with two different origins. The old tiles count too
# much, by up to twenty times. With every rise it gets worse, and long texts have more of them.
#
# A single decode is cut into parts, 32 at most, and each part has a sum of its own. Up to 2,048
# tokens a part is one tile, and nothing is ever rescaled in it: `combine` does that work, and
# `combine` is healthy. At 4,096 a part has two tiles. With 256 decodes there are no parts, and the
# fault shows at once. So it depended on the *load* as well, which is what made it so hard to find.
#
# Either always rescale. Or leave the scaling out, and then go on measuring from the *old* largest
# score, which is exact as long as nothing overflows:
#
# ```python
#     small = torch.exp(running.largest - largest) > 0.05
#     largest = torch.where(small, running.largest, largest)
#     rescale = torch.exp(running.largest - largest)
# ```
#
# </details>
#
# The idea is a real one. FlashAttention-4 leaves rescaling out where the largest score has grown by
# less than a threshold, and measures from the old one. With numbers of 8 bits that went wrong:
# [issue 2577](https://github.com/Dao-AILab/flash-attention/issues/2577) shows a decode that is
# right at 127 tokens and far off at 128, at every border of a tile, because weights measured from
# the old largest score went over what such a number can hold. The
# [mend](https://github.com/Dao-AILab/flash-attention/pull/2578) was to rescale always there. [Issue
# 2082](https://github.com/Dao-AILab/flash-attention/issues/2082) is a cousin: a tile that was
# hidden from a row set its largest score to 0, and where all real scores were far below, the row
# came out as zeros. (The code above is ours, and not theirs.)
#
# Test attention with histories of several tiles, with the largest score in the last of them, and
# with each way of cutting.
#
# ## What moved
#
# - A step's attention moves the bytes of its history once. For large batches that is the bound, and
#   the kernel reaches it.
# - No score matrix: what a program holds does not grow with the history.
# - A history is cut where programs are too few, and `combine` makes it exact.
# - **The bottleneck now** is elsewhere. These are stages 6 and 7 in the 24 requests of notebook 01,
#   8 at a time, as recorded on the H200:

# %%
on_h200 = recorded_stages(6, 7)
print(where("stages_h200"))
print(stage_table(on_h200))

# %% [markdown]
# Attention reads a third of the bytes, and the engine is nearly where it was. Both stages are far
# below the bound, so what counts is neither bytes nor FLOPs. Each layer is some forty small
# kernels, and Python can't launch them as fast as the GPU is done with them. That is notebook 08.
#
# ### In other engines
#
# - **nano-vLLM**,
#   [nanovllm/layers/attention.py](https://github.com/GeeeekExplorer/nano-vllm/blob/cde3fc22c2694ba8052f7df0b5e05ef7e10c8603/nanovllm/layers/attention.py):
#   a Triton kernel stores K/V, and the library's two calls do the rest. A step is all prompts or
#   all decodes, so each step has one call.
# - **vLLM** 0.20.2,
#   [vllm/v1/attention/backends/flash_attn.py](https://github.com/vllm-project/vllm/blob/v0.20.2/vllm/v1/attention/backends/flash_attn.py):
#   one call of its own build of flash-attn for decodes and chunks together; it takes pages of 16.
#   [triton_unified_attention.py](https://github.com/vllm-project/vllm/blob/v0.20.2/vllm/v1/attention/ops/triton_unified_attention.py)
#   is the same in Triton, with a kernel that adds up the parts of cut histories.
#
# ### To read
#
# - Milakov and Gimelshein, [Online normalizer calculation for
#   softmax](https://arxiv.org/abs/1805.02867) (2018): four pages, and the whole idea.
# - Dao and others, [FlashAttention](https://arxiv.org/abs/2205.14135) (2022), section 3; Dao,
#   [FlashAttention-2](https://arxiv.org/abs/2307.08691) (2023): who does which tile.
# - Dao, Haziza, Massa and Sizov,
#   [Flash-Decoding](https://crfm.stanford.edu/2023/10/12/flashdecoding.html) (2023): split-KV.
# - `triton_attention.py`: the two kernels. You can read all of it now.
