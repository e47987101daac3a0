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
# # 00 · Measure first
#
# **At the end you can say, before any code runs, how fast a model can generate on a machine, and
# what stands in the way.**
#
# 45 minutes. It needs a laptop, and Python; no GPU, and no download. Run the cells from the top,
# one after the other: each needs what those above it have made.

# %% tags=["nbval-ignore-output"]
import random

from nanoteach.cost_model import (
    SHAPES,
    VirtualClock,
    Work,
    attention_flops,
    embedding_parameters,
    layer_matrix_parameters,
    max_requests,
    num_parameters,
    step_cost,
    weight_bytes_read,
)
from nanoteach.course import (
    exercise,
    open_notebook,
    pictures,
    predict,
    quiz,
    reveal,
    show,
    widgets,
)
from nanoteach.course.timing import recorded_runs, timing_device, where
from nanoteach.hardware import hardware_named, measure

open_notebook(0)

# %% [markdown]
# ## What serving is about
#
# A language model reads tokens and gives a score to every possible next token. To write an answer
# of 100 tokens it must run 100 times, since each token depends on the one before. Now think of
# many people who ask at the same moment, with questions of different lengths, on one machine
# whose memory is finite. *Serving* is deciding, at every step, which tokens of whose requests to
# compute, and where to keep what was computed. The model's arithmetic is the same whatever we
# decide. Only its cost changes. At the end of this notebook two decisions about the same requests
# stand side by side: the one takes 11 times as long as the other.
#
# In this course you build an engine that decides well. Each notebook adds one idea; each is
# proved to change no token, and timed. Your own functions become parts of the engine as you write
# them.
#
# ## Can you begin?
#
# Five questions. If two or more of them look foreign, read something about transformers and
# PyTorch first; [The Illustrated
# Transformer](https://jalammar.github.io/illustrated-transformer/) is enough of the one, and
# [PyTorch's first tutorial](https://pytorch.org/tutorials/beginner/basics/intro.html) of the
# other.

# %% tags=["nbval-ignore-output"]
quiz(
    "1. x has shape [5, 1024] and w has shape [3072, 1024]. The shape of x @ w.T?",
    ["[5, 3072]", "[3072, 5]", "[5, 1024]"],
    answer=0,
    because="5 rows, and one result for each of the 3072 rows of w.",
)
quiz(
    "2. What does a decoder's attention let the token at position 3 see? (They begin at 0.)",
    ["positions 0 to 2", "positions 0 to 3", "all positions"],
    answer=1,
    because="Causal attention: itself, and all before it.",
)
quiz(
    "3. A prompt has 4 tokens. Of how many are the scores of a next token needed?",
    ["4", "1", "0"],
    answer=1,
    because="Of the last one. The prompt's other tokens are known.",
)
quiz(
    "4. How many bytes do 1,000 values in bfloat16 take?",
    ["1,000", "2,000", "4,000"],
    answer=1,
    because="16 bits are 2 bytes.",
)
quiz(
    "5. What does `[1, 2, 3, 4][-1:]` give in Python?",
    ["4", "[4]", "[1, 2, 3]"],
    answer=1,
    because="A slice of a list is a list.",
)

# %% [markdown]
# ## Two numbers
#
# Whatever a machine computes, it does two things: it **multiplies and adds**, and it **moves
# bytes** between its memory and its arithmetic units. Each has a highest rate. So two numbers say
# how long a step must at least take:
#
# - its **FLOPs**: how many multiplications and additions. A product of a `[1, 1024]` row with a
#   `[1024, 3072]` matrix multiplies and adds once for each of the matrix's 3,145,728 values. That
#   is 2 × 3,145,728 FLOPs.
# - its **bytes**: what must be read and written. The same product reads 3,145,728 values, 2 bytes
#   each in bfloat16.
#
# Let us work them out by hand, once, for a real model: Qwen3-0.6B. This is its shape.

# %%
qwen = SHAPES["qwen3-0.6b"]
print("hidden size            ", qwen.hidden_size)
print("intermediate size      ", qwen.intermediate_size)
print("layers                 ", qwen.num_layers)
print("query heads, K/V heads ", qwen.num_heads, qwen.num_kv_heads)
print("values in a head       ", qwen.head_dim)
print("tokens it knows        ", f"{qwen.vocab_size:,}")

# %% [markdown]
# ### One decode step, by hand
#
# One request, 1,024 tokens so far, one new token to compute. First the matrices of **one layer**:
#
# | matrix | shape | values |
# |---|---|---|
# | q | 1,024 × (16 heads × 128) | 2,097,152 |
# | k | 1,024 × (8 heads × 128) | 1,048,576 |
# | v | the same | 1,048,576 |
# | o | (16 × 128) × 1,024 | 2,097,152 |
# | gate, up, down | 3 times 1,024 × 3,072 | 9,437,184 |
# | **together** | | **15,728,640** |
#
# There are 28 layers, so 440,401,920 values in all of them. The LM head, which turns the last
# hidden state into scores, has 151,936 × 1,024 = 155,582,464 more. In this model it is the same
# matrix as the input embedding: they are *tied*. Small vectors (norms) add 65,536.

# %%
print(f"one layer's matrices  {layer_matrix_parameters(qwen):>13,}")
print(f"28 of them            {28 * layer_matrix_parameters(qwen):>13,}")
print(f"the LM head           {embedding_parameters(qwen):>13,}")
print(f"all parameters        {num_parameters(qwen):>13,}")

# %% [markdown]
# **FLOPs.** The new token goes through every matrix once, at 2 FLOPs a value: 2 × (440,401,920 +
# 155,582,464) = 1,191,968,768.
#
# Then attention. The new token's query meets the key of each of 1,025 tokens: its own, and the
# 1,024 before it. In one head that is a product of 128 values with 128 values, 256 FLOPs for each
# key, and as many again to add up the values V. With 16 heads and 28 layers: 2 × 256 × 16 × 28 ×
# 1,025 = 235,110,400.
#
# Together: **1.427 GFLOPs**.
#
# **Bytes.** The step reads all the weights: 596,049,920 values of 2 bytes are 1,192,099,840
# bytes. And it reads the keys and values of the history. Each token has left some bytes behind,
# in every layer. How many? That is your first exercise; the answer for this model is a number you
# will meet again and again.
#
# ## What a token leaves behind
#
# A token's key and value never change, once they are computed: causal attention lets it see only
# what came before it. So a good engine keeps them. The place is called the **KV cache**, and it
# will be what most of your memory is for.
#
# Write the function: how many bytes does *one* token leave, in all layers? A toy example: 1
# layer, 1 K/V head of 4 values, 2 bytes each. The token leaves 4 values of K and 4 of V, so 16
# bytes.
#
# - `config` is a `ModelConfig`. Useful: `config.num_layers`, `config.num_heads`,
#   `config.num_kv_heads`, `config.head_dim`; and `config.kv_size`, the width of all key heads
#   together.
# - `bytes_per_value` is 2 for bfloat16, 4 for float32.
#
# Replace the `...` and run the cell. A right answer goes into the engine. A wrong one tells you
# what came, and what was expected. If you leave it as it is, the notebook goes on with the
# package's own.


# %%
@exercise("nanoteach.cost_model.kv_bytes_per_token")
def kv_bytes_per_token(config, bytes_per_value: int = 2) -> int:
    """Bytes of one token's K and V in all layers."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Query heads do not count: a query is used in its own step and then forgotten. Which heads are
# kept?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Three factors stand beside `config.kv_size`: the tensors that a layer keeps for a token, the
# layers, and the bytes of a value.
#
# </details>

# %%
show("nanoteach.cost_model.kv_bytes_per_token")

# %%
kv_bytes = kv_bytes_per_token(qwen)
print(f"{kv_bytes:,} bytes a token, {kv_bytes / 1024:g} KiB")

# %% [markdown]
# 112 KiB. One token, which is about four letters of text, leaves 112 KiB behind.
#
# How many requests fit into 14 GiB of memory, if each has 4,096 tokens? In your head: 14 GiB are
# 14 × 1,024 × 1,024 KiB; divided by 112 that is 131,072 tokens. So 32 requests of 4,096 tokens,
# or 128 of 1,024.

# %%
memory = 14 * 2**30
for tokens in (1024, 4096, 32768):
    print(f"{tokens:6,} tokens each: {max_requests(qwen, memory, tokens):4} requests")

# %% [markdown]
# Notebooks 02 and 03 are about this memory. In 02 most of it is wasted, in 03 hardly any.
#
# ## Who looks at whom
#
# A step need not compute one token of one request. It may compute a whole prompt, or the next
# token of each of a hundred requests, or any mixture. One word for all of these is `Work`: what
# one request does in one step.
#
# - `num_new`: so many tokens are computed now,
# - `num_computed`: on top of so many that have their K/V in the cache already,
# - `needs_logits`: is the score of a next token wanted at the end? (Not in the middle of a
#   prompt.)
#
# A step is a list of `Work`. These are the two kinds that you will read about everywhere:

# %%
prefill = [Work(num_new=512, num_computed=0)]  # a prompt, all its tokens at once
decode = [Work(num_new=1, num_computed=512)]  # one more token after it
print(prefill)
print(decode)

# %% [markdown]
# Attention's cost depends on how many *pairs* there are: a new token, and a token that it looks
# at. A new token looks at all tokens before it, and at itself. Requests never look at each other.
#
# An example. 3 new tokens, on top of 2:
#
# ```
#              key 0  key 1  key 2  key 3  key 4
#   new token 2  x      x      x
#   new token 3  x      x      x      x
#   new token 4  x      x      x      x      x        12 pairs
# ```
#
# Write the count, for a whole step.


# %%
@exercise("nanoteach.cost_model.num_attended")
def num_attended(work) -> int:
    """Pairs of a new token and a token it attends to: itself and all before it, causally."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Take one request, and one new token after the other. How many keys does the first new token see?
# The second?
#
# </details>
# <details><summary>Hint 2</summary>
#
# In the picture there is a rectangle on the left (new tokens × history) and a triangle on the
# right (new tokens among themselves, the diagonal included). A triangle of side n has n (n + 1) /
# 2 places; use whole-number division. Or write two loops: they are right, too.
#
# </details>

# %%
show("nanoteach.cost_model.num_attended")

# %% [markdown]
# One consequence already. Three prompts of 128, 256 and 64 tokens, computed in one step, are
# three triangles. They are not one triangle of 448.

# %%
three = [Work(128, 0), Work(256, 0), Work(64, 0)]
print(f"three triangles {num_attended(three):>8,} pairs")
print(f"one of 448      {num_attended([Work(448, 0)]):>8,} pairs")

# %% [markdown]
# ## FLOPs of a step
#
# Now all of a step's FLOPs. Three terms, each of which you have worked out by hand above, for one
# token. Here any number of requests may share the step.
#
# - **The layers.** Each new token goes through all matrices of all layers.
#   `layer_matrix_parameters(config)` gives the values in one layer's.
# - **Attention.** `attention_flops(config, work)` is there already, for all layers, with the factor
#   2 in it. It uses your `num_attended`.
# - **The LM head**, `embedding_parameters(config)` values. Who goes through it? Not every token:
#   look at the fields of `Work`.

# %%
print(f"attention, by hand   {2 * 256 * 16 * 28 * 1_025:,}")
print(f"attention, computed  {attention_flops(qwen, [Work(1, 1024)]):,}")


# %%
@exercise("nanoteach.cost_model.step_flops")
def step_flops(config, work) -> int:
    """FLOPs of a step's matrix products: the layers, attention, and the LM head."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two counts come first: how many tokens are new in the whole step, and how many requests want
# logits.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A row of values times a matrix costs 2 FLOPs for each value of the matrix. The layers see one
# row for each new token. The head sees one row for each request that needs logits; `True` counts
# as 1 in a `sum`.
#
# </details>

# %%
show("nanoteach.cost_model.step_flops")

# %%
print(f"by hand   {2 * (440_401_920 + 155_582_464) + 235_110_400:,}")
print(f"computed  {step_flops(qwen, [Work(1, 1024)]):,}")

# %% [markdown]
# ## Bytes of a step
#
# The weights must come from memory to the arithmetic units, once in a step, however many tokens
# use them on the way. So must the K/V of every history. The new tokens' own K/V are written, and
# count once. So a request with 1,024 tokens of history and 1 new one moves the K/V of 1,025 tokens.
#
# - `weight_bytes_read(config, bytes_per_value)` are the weights' bytes, the LM head's among them.
# - If nobody in the step wants logits, the LM head stays where it is: take away its
#   `embedding_parameters(config)` values. If one request wants them and another does not, it is
#   read.
# - `kv_bytes_per_token(config, bytes_per_value)` is yours.
# - A step in which nobody does anything moves nothing.


# %%
@exercise("nanoteach.cost_model.step_bytes")
def step_bytes(config, work, bytes_per_value: int = 2) -> int:
    """Bytes that a step must move: the weights once, K/V read for the history and written anew."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which of the terms depends on the number of requests, and which does not?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Three terms: the weights, the head that may be taken away from them, the tokens' K/V. Begin with
# the case of an empty `work`, since no weights are read then; `any(...)` finds out if someone wants
# logits.
#
# </details>

# %%
show("nanoteach.cost_model.step_bytes")

# %%
print(f"by hand   {1_192_099_840 + 1_025 * 114_688:,}")
print(f"computed  {step_bytes(qwen, [Work(1, 1024)]):,}")

# %% [markdown]
# ## Which of the two binds
#
# A machine has two ceilings: FLOPs a second, and bytes a second. These are the H200's, measured:

# %%
h200 = hardware_named("h200")
print(f"{h200.name}: {h200.flops / 1e12:g} TFLOP/s, reads {h200.read_bandwidth / 1e12:g} TB/s")

# %% [markdown]
# The decode step from above, with 1,024 tokens of history, has 1.43 GFLOPs. They would take 1.8
# *microseconds* on it, if computing were all. Its 1.31 GB take 304 microseconds to read. The two go
# on at the same time: while one matrix is multiplied, the next is on its way. So a step takes at
# least as long as ... what? Write it. `self` is a `Cost`, with `flops` and `bytes`. `hardware` is a
# `Hardware`, with `flops` and `read_bandwidth`, both a second.
#
# (There is also `copy_bandwidth`, in which each byte counts when it is read and again when it is
# written. Nearly all bytes of a step are only read.)


# %%
@exercise("nanoteach.cost_model.Cost.seconds")
def seconds(self, hardware) -> float:
    """The bound, in seconds: computing and moving overlap perfectly."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Work out two times: that of the FLOPs alone, and that of the bytes alone.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Two people carry boxes side by side. When is the last box where it should be?
#
# </details>

# %%
show("nanoteach.cost_model.Cost.seconds")

# %% [markdown]
# The same decode, and the two steps that you made above: `decode` has a history of 512 tokens only,
# so it takes a little less.

# %%
by_hand = [Work(num_new=1, num_computed=1024)]
for name, work in (("by hand", by_hand), ("decode", decode), ("prefill", prefill)):
    cost = step_cost(qwen, work)
    print(
        f"{name:8} {cost.flops / 1e9:6.1f} GFLOPs {cost.bytes / 1e9:5.2f} GB "
        f"{cost.flops / cost.bytes:6.1f} FLOPs a byte   "
        f"{1000 * cost.seconds(h200):.3f} ms, limited by {cost.limit(h200)}"
    )

# %% [markdown]
# Look at the last two lines. The prefill computes 512 tokens in about twice the time in which
# the decode computes one. That is the asymmetry on which all of serving rests:
#
# - A **prefill** has many tokens for each weight that it reads. It is limited by **computing**.
# - A **decode** reads all weights for one token. It is limited by **memory**. The arithmetic
#   units wait, more than 99% of the time.
#
# So the way to make decoding cheap is to share what is read: let many requests decode in one step.
# How much does that gain? Before you see it, say what you think: put your numbers in the place of
# `...`. One request with 1,024 tokens decodes at 3,292 tokens/s at best. The second question:
# double the requests, from 1 to 2, to 4, and so on. How many are there when another doubling gains
# less than 10%? (Each is answered below, and the last notebook comes back to them.)

# %%
predict("H200, 64 requests of 1,024 tokens decode together", ..., "tokens/s")
predict("H200, requests of 1,024 tokens until twice as many gain less than 10%", ..., "requests")
predict("this machine, one request of Qwen3-0.6B decodes", ..., "tokens/s")

# %% [markdown]
# ### The answer
#
# The weights are shared. The K/V are not: each request reads its own.


# %%
def speed(requests):
    """Tokens a second at best, when so many requests of 1,024 tokens decode together."""
    return requests / step_cost(qwen, [Work(1, 1024)] * requests).seconds(h200)


print("requests    tokens/s   twice as many gain   of what is read, K/V are")
for requests in (1, 2, 4, 8, 16, 32, 64, 128, 256):
    kv_share = 1 - weight_bytes_read(qwen) / step_cost(qwen, [Work(1, 1024)] * requests).bytes
    gain = speed(2 * requests) / speed(requests) - 1
    print(f"{requests:8} {speed(requests):11,.0f} {gain:20.0%} {kv_share:26.0%}")

# %% tags=["nbval-ignore-output"]
enough = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if speed(2 * n) < 1.1 * speed(n))
reveal("H200, 64 requests of 1,024 tokens decode together", speed(64), "tokens/s")
reveal("H200, requests of 1,024 tokens until twice as many gain less than 10%", enough, "requests")

# %% [markdown]
# At 1 request, nearly all bytes are weights, and a second request is almost free. At 64, K/V are
# 86% of what is read, and little is left to share. That is why memory is the scarce thing in
# serving, and why half of this course is about where K/V live.
#
# ## The roofline
#
# The same as a picture. On the right is the table from above, also for other lengths (the *context*
# is how many tokens a request has). On the left is the roofline. (A *chunk* is a part of a prompt;
# notebook 06.) Further right there: more FLOPs for each byte moved. As long as a step
# lies on the slope, memory limits it; under the flat part, computing does. The corner is where
# both take the same time: on an H200 at 182 FLOPs a byte. The prefill of 512 has 385.

# %% tags=["nbval-ignore-output"]
pictures.roofline(
    qwen,
    h200,
    {
        "1 decode": [Work(1, 1024)],
        "64 decodes": [Work(1, 1024)] * 64,
        "prefill of 32": [Work(32, 0)],
        "prefill of 512": prefill,
        "64 decodes and a chunk of 512": [Work(1, 1024)] * 64 + [Work(512, 0)],
    },
)

# %% [markdown]
# Turn the knobs (in a running notebook): from which context does doubling 32 requests to 64 gain
# less than 10%? (Here the context counts the new token too. So 32 requests of 1,024 have 27,868
# tokens/s, a little more than in the table.)

# %% tags=["nbval-ignore-output"]
widgets.roofline()

# %% [markdown]
# From 2,048 on, of the contexts that the knob has:

# %%
for context in (512, 1024, 2048, 4096):
    few, many = (step_cost(qwen, [Work(1, context)] * n).seconds(h200) for n in (32, 64))
    print(f"{context:5,} tokens: 64 requests give {2 * few / many - 1:.0%} more than 32")

# %% [markdown]
# Where the corner lies depends on the GPU. The prefill of 512 has 385 FLOPs a byte: on which GPU is
# even that limited by memory? (Only the H200's numbers are measured. The others are peaks from
# datasheets, which no program quite reaches; so do not compare the H200 with the H100 by this
# table.)

# %%
cost = step_cost(qwen, prefill)
print(f"prefill of 512: {cost.flops / cost.bytes:.0f} FLOPs a byte")
for name in ("rtx3090", "a100", "rtx4090", "h200", "h100", "l4"):
    gpu = hardware_named(name)
    corner = gpu.flops / gpu.read_bandwidth
    print(f"{gpu.name:26} corner at {corner:4.0f}, so it is limited by {cost.limit(gpu)}")

# %% [markdown]
# ## This machine
#
# And yours? Its ceilings can be measured in a few seconds. A product of two large matrices gives
# FLOPs a second. Summing up a large array gives the bytes it can read in a second. `timing_device`
# says what this course takes the time of: the CPU in float32, or an NVIDIA GPU, where there is one,
# in bfloat16.

# %%
device, dtype = timing_device()
print(f"{device}, {dtype}")

# %% tags=["nbval-ignore-output"]
here = measure(device, dtype, progress=print)

# %% tags=["nbval-ignore-output"]
for name, work in (("decode", decode), ("prefill", prefill)):
    cost = step_cost(qwen, work, dtype.itemsize)
    bound = cost.seconds(here)
    tokens = sum(request.num_new for request in work)
    print(
        f"{name:8} at least {1000 * bound:8.2f} ms, at most {tokens / bound:9,.1f} tokens/s, "
        f"limited by {cost.limit(here)}"
    )

alone = step_cost(qwen, [Work(1, 1024)], dtype.itemsize).seconds(here)
reveal("this machine, one request of Qwen3-0.6B decodes", 1 / alone, "tokens/s")

# %% [markdown]
# The last line answers your third prediction, for a request with 1,024 tokens like the others.
#
# These are bounds. A program that reads each weight once and loses no time between the steps
# would reach them. In notebook 01 you write the simplest program that works, and see how far
# below it is.
#
# ## A clock for machines that you don't have
#
# One more tool. If we know what a step costs, we can add up the steps of a whole run, and know
# how long it would take at best, on any machine. `VirtualClock` does this: it advances by the
# bound of each step. It always says that it is simulated.

# %%
clock = VirtualClock(qwen, h200)
clock.tick([Work(512, 0)])  # the prompt
first = clock.now()
for step in range(99):
    clock.tick([Work(1, 512 + step)])  # one token after the other
print(
    f"{clock.label}: first token after {1000 * first:.2f} ms, the 100th {1000 * clock.now():.1f} ms"
)

# %% [markdown]
# The first token took the time of two of the others. A user who waits for it speaks of the *time
# to first token* (TTFT). What passes between two tokens is the *inter-token latency* (ITL). Every
# later notebook moves one of these, or the number of requests that share a step.
#
# The clock also bounds a public benchmark, that of nano-vLLM: 256 requests, with prompts and
# outputs of 100 to 1,024 tokens, drawn with seed 0. All prompts are computed first; then the
# requests decode together, and each leaves when it is done. An engine that computes all prompts
# first cannot run it faster on an H200 than this. (One that mixes prompts into the decode steps
# can, a little; that is notebook 06.)

# %%
draw = random.Random(0)
prompts = [
    len([draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))]) for _ in range(256)
]
outputs = [draw.randint(100, 1024) for _ in range(256)]
clock = VirtualClock(qwen, h200)
clock.tick([Work(prompt, 0) for prompt in prompts])
for step in range(max(outputs) - 1):
    running = [prompt for prompt, output in zip(prompts, outputs, strict=True) if step < output - 1]
    clock.tick([Work(1, prompt + step) for prompt in running])
print(f"{sum(outputs):,} tokens in {clock.now():.2f} s: {sum(outputs) / clock.now():,.0f} tokens/s")

# %% [markdown]
# The same requests one after the other: the same arithmetic for each token, by another decision.

# %%
together = clock.now()
clock = VirtualClock(qwen, h200)
for prompt, output in zip(prompts, outputs, strict=True):
    clock.tick([Work(prompt, 0)])
    for step in range(output - 1):
        clock.tick([Work(1, prompt + step)])
print(f"{sum(outputs):,} tokens in {clock.now():.2f} s: {sum(outputs) / clock.now():,.0f} tokens/s")
print(f"{clock.now() / together:.1f} times as long")

# %% [markdown]
# Only the order has changed.
#
# ## What came of it
#
# Bounds are cheap. Does a real engine come near them? These runs were recorded on an H200 with the
# engine of notebook 08: one request that decodes after 1,024 tokens, 64 that decode together,
# prompts alone, and the benchmark from above. Beside each is its bound, worked out as you did here,
# step by step. (The whole run is bounded, its prompts and its growing histories, so the numbers
# differ a little from those of a single step.)

# %%
print(where("bench_h200"))
runs = recorded_runs("context 1,024 + 512", "batch 64", "nano", "prefill 16")
for name, measured, bound in runs:
    print(f"{name:26} {measured:9,.0f} of {bound:9,.0f} tokens/s: {measured / bound:.0%}")

# %% tags=["nbval-ignore-output"]
prompts_alone = [run for run in runs if run.name.startswith("prefill")]
others = [run for run in runs if run not in prompts_alone]
pictures.ladder({"an H200, recorded": others, "prompts alone": prompts_alone})

# %% [markdown]
# No line passes its bound, and each is within a small factor of it. The bounds also say which line
# is faster than which, and roughly by how much. What they do not say is what is lost on the way. Of
# these, one request alone loses most: its steps are the shortest, so whatever a step costs besides
# bytes and FLOPs weighs most in them. Notebooks 01 to 08 find these costs and take them away. The
# last notebook comes back to the numbers.
#
# ## What to take along
#
# - Two numbers bound a step: FLOPs and bytes. It takes at least the longer of the two times.
# - Decode is limited by memory, prefill by computing.
# - A token of Qwen3-0.6B leaves 112 KiB behind. 14 GiB hold 131,072 tokens.
# - Decoding together shares the weights, and never the histories.
#
# Your functions are in the engine now: `step_flops`, `step_bytes` and the rest move the virtual
# clock of every notebook from here on. `nanoteach progress` tells which are yours.
#
# To read: Williams, Waterman and Patterson,
# [Roofline](https://dl.acm.org/doi/10.1145/1498765.1498785) (2009); Pope et al., [Efficiently
# Scaling Transformer Inference](https://arxiv.org/abs/2211.05102) (2022), section 2 and the
# appendix on costs; Kipply, [Transformer Inference
# Arithmetic](https://kipp.ly/transformer-inference-arithmetic/) (2022).
#
# **Next:** [01 · Naive generation](01_naive_generation.ipynb), the slowest program that is right.
