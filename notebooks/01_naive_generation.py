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
# # 01 · Naive generation
#
# **At the end you have a program that continues any text with the same tokens as transformers,
# you know every number in it, and you have seen what it computes for nothing.**
#
# 90 minutes. It needs what 00 needs. You should know what a matrix product and a softmax are; the
# rest of the transformer is worked out here, step by step.

# %% tags=["nbval-ignore-output"]
import json
import time

import torch

from nanoteach.config import EngineConfig
from nanoteach.cost_model import SHAPES, VirtualClock, Work, step_cost
from nanoteach.course import exercise, open_notebook, pictures, predict, reveal, show
from nanoteach.course.timing import recorded_stages, stage_table, timing_model, where
from nanoteach.hardware import hardware_named, measure
from nanoteach.hub import default_model, resolve_model
from nanoteach.loader import checkpoint_files, eos_token_ids, load_model, load_tokenizer
from nanoteach.model import TORCH_OPS, AttentionMetadata, Decoder, Ops, rope_frequencies
from nanoteach.naive import CausalAttention, NaiveGenerator
from nanoteach.reference import compare, references
from nanoteach.sampler import greedy
from nanoteach.stages import STAGES, Parts
from nanoteach.types import SamplingParams

open_notebook(1)

# %% [markdown]
# ## What a language model does
#
# It reads tokens, and gives a score to every possible next one. That is all. To write a text we
# take the token with the highest score, append it, and ask again. This notebook builds that loop,
# and the model inside it.
#
# The other notebooks begin with what is wrong with the stage before. There is none before this
# one. So you look at its own waste at the end. But say now what you expect. A prompt has 16
# tokens, and the loop writes 40 more. In all its 40 runs together, how many tokens go through the
# model? And on an H200, Qwen3-0.6B, 128 tokens after a prompt of 1,024: how much longer does this
# loop take than one that computes each token only once? Put your numbers in the place of `...`.

# %%
predict("the naive loop, 16 prompt and 40 output tokens: tokens computed", ..., "tokens")
predict("H200, 1,024 in, 128 out: naive is slower than a cache by a factor of", ..., "times")

# %% [markdown]
# ## A model is a folder
#
# `tiny` is a small model that lies in this repository. It has the same architecture as Qwen3, and
# has read nothing but small stories, sums, and chats and facts about a small world. `resolve_model`
# turns a model's name into a folder. Three files in it matter for now.

# %%
folder = resolve_model(default_model())
for name in ("config.json", "model.safetensors", "tokenizer.json"):
    print(f"{name:18} {(folder / name).stat().st_size:>10,} bytes")

# %% [markdown]
# **The config** says how large everything is. Eight numbers are worth remembering, because every
# shape below is made of them.

# %%
model = load_model(folder, dtype=torch.float32)
config = model.config
print("hidden size            ", config.hidden_size)
print("intermediate size      ", config.intermediate_size)
print("layers                 ", config.num_layers)
print("query heads, K/V heads ", config.num_heads, config.num_kv_heads)
print("values in a head       ", config.head_dim)
print("tokens it knows        ", config.vocab_size)
print("longest text           ", config.max_position)

# %% [markdown]
# **The weights** are named tensors. These are those of layer 0, as they lie in the file.

# %%
files = checkpoint_files(folder)
for name in sorted(name for name in files if name.startswith("model.layers.0.")):
    print(f"{name:45} {list(files[name](name).shape)}")

# %% [markdown]
# q, k and v are all multiplied with the same input, and so are gate and up. One wide product takes
# less time than three thin ones. So the loader stacks them, and the decoder has one matrix `qkv`
# with 256 + 128 + 128 = 512 rows, and one `gate_up` with 1,920. It also stacks the weights of two
# norms: q_norm 4 times, once for each query head, and k_norm twice. That is `qk_norm`.

# %%
first_layer = model.weights.layers[0]
print("qkv    ", list(first_layer.qkv.shape))
print("output ", list(first_layer.output.shape))
print("gate_up", list(first_layer.gate_up.shape))
print("qk_norm", list(first_layer.qk_norm.shape))
print("down   ", list(first_layer.down.shape))

# %% [markdown]
# **The tokenizer** cuts a text into tokens and gives each its number. Here is a short example. We
# carry these four tokens by hand through the whole model.

# %%
tokenizer = load_tokenizer(folder)
text = "There was once a"
token_ids = tokenizer.encode(text, add_special_tokens=False)
for position, token in enumerate(token_ids):
    print(f"position {position}   token {token:4}   {tokenizer.decode([token])!r}")

# %% [markdown]
# ### A witness
#
# Whatever we compute by hand is to be compared with what the package computes. The decoder is
# given its small operations (`Ops`) and its attention as arguments. So we can hand in operations
# that do the same, and write down what went in and what came out.
#
# `seen[name]` is then a list with an entry for each call. An entry holds the inputs in their order,
# and the result at its end. So `seen["norm"][1][0]` is the first input of the second call of the
# norm, and `seen["norm"][1][-1]` its result.

# %%
seen = {}


def watched(name, function):
    """The same function, which notes its inputs and its result in `seen`."""

    def call(*inputs):
        result = function(*inputs)
        seen.setdefault(name, []).append((*inputs, result))
        return result

    return call


attention = CausalAttention()
attention.attend = watched("attention", attention.attend)
ops = Ops(
    rms_norm=watched("norm", TORCH_OPS.rms_norm),
    rotary=watched("rotary", TORCH_OPS.rotary),
    silu_and_mul=watched("activation", TORCH_OPS.silu_and_mul),
)
witness = Decoder(config, model.weights, ops)
last_hidden = witness.forward(
    torch.tensor(token_ids),
    torch.arange(4),
    attention,
    AttentionMetadata(query_lens=[4], seq_lens=[4]),  # one text: 4 tokens are new, of 4 in all
)
last_logits = witness.logits(last_hidden[-1:])
for name, calls in seen.items():
    print(f"{name:10} was called {len(calls):2} times")


def same(name, by_hand, package):
    """Say whether two tensors are equal, up to rounding."""
    verdict = "equal" if torch.allclose(by_hand, package, atol=1e-4) else "DIFFERENT"
    print(f"{name}: {list(by_hand.shape)}, {verdict}")


def numbers(row, count=5):
    """The first values of a row, to two digits."""
    shown = "  ".join(f"{value:6.2f}" for value in row[:count].tolist())
    return shown + "  ..." if len(row) > count else shown


# %% [markdown]
# There are 4 layers. Each has one attention, one rotary and one activation, and three norms: before
# attention, of its queries and keys, before the MLP. With one norm at the very end that is 4 × 3 +
# 1 = 13.
#
# ## 1. Embedding
#
# A token's number says nothing about the token. Its *embedding* does: one row of 320 values, that
# training has put there. The model holds a matrix with a row for each of the 2,048 tokens. The
# first step is to look up four rows.

# %%
hidden = model.weights.embedding[torch.tensor(token_ids)]
for position in range(4):
    print(f"position {position}:  {numbers(hidden[position])}")
same("embedding", hidden, seen["norm"][0][0])

# %% [markdown]
# These rows are called the **hidden states**, one for each token. Each layer adds something to
# them, twice: once what attention found in other tokens, and once what an MLP makes of a token by
# itself. At the end, the last row holds enough to name the next token.
#
# ## 2. Norm
#
# Rows come in all sizes, and adding makes them grow. So before each use, a row is brought to a
# standard size. `rms_norm`
# divides it by the root of its mean square (RMS), then multiplies each value by a learned weight.
#
# By hand, for the row `[3, -4, 0, 0]` with weights `[1, 0.5, 1, 1]`: the squares are 9, 16, 0, 0.
# Their mean is 6.25, its root 2.5. Divided: `[1.2, -1.6, 0, 0]`. Times the weights:
# `[1.2, -0.8, 0, 0]`.
#
# Write it.
#
# - `x` is a tensor `[..., size]`: any number of rows. Each is scaled by itself.
# - `weight` is `[size]`, or of another shape that fits when multiplied with `x`.
# - `eps` is a small number. It is added to the mean square *before* the root is taken, so that a
#   row of zeros is not divided by zero.
# - `x` may be float16. It cannot hold 300² = 90,000: its largest value is 65,504. So work in
#   float32 (`x.float()`), and give back x's dtype.
# - Leave `x` as it is: the hidden states are still needed. If x is float32 already, `x.float()` is
#   x itself and no copy.


# %%
@exercise("nanoteach.model.rms_norm")
def rms_norm(x, weight, eps: float):
    """Scale each row of x to a mean square of 1, then by `weight` (Zhang and Sennrich, 2019)."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The mean is over the last dimension only. `keepdim=True` keeps that dimension with size 1, so
# that the result can be multiplied with `x`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Four steps: square, mean, add eps, one divided by the root (`torch.rsqrt`). Multiply x with
# that; only then go back to x's dtype, and multiply with the weight.
#
# </details>

# %%
show("nanoteach.model.rms_norm")

# %% [markdown]
# Now for the four tokens, in plain torch, written out in another way.

# %%
mean_square = (hidden * hidden).sum(dim=1, keepdim=True) / config.hidden_size
x = hidden / (mean_square + config.rms_norm_eps).sqrt() * first_layer.input_norm
print(f"RMS of each token before:  {numbers(mean_square.sqrt().flatten(), 4)}")
print(f"position 0, normed:  {numbers(x[0])}")
same("norm, by hand and witness", x, seen["norm"][0][-1])
same("norm, by hand and rms_norm", x, rms_norm(hidden, first_layer.input_norm, 1e-6))

# %% [markdown]
# ## 3. Query, key and value
#
# Attention is a search. Each token asks a question, its **query**. Each token has a label by
# which it is found, its **key**, and something that it hands over when it is found, its
# **value**. All three are products of the normed row with a learned matrix.
#
# They are made for several **heads**, which search for different things. Here there are 4 query
# heads, but only 2 heads of keys and 2 of values. Each head has 64 values. So a row of the product
# has (4 + 2 + 2) × 64 = 512 values.

# %%
qkv = (x @ first_layer.qkv.T).view(4, 8, 64)  # tokens, heads, values
q_raw, k_raw, v = qkv[:, 0:4], qkv[:, 4:6], qkv[:, 6:8]
print("q", list(q_raw.shape), " k", list(k_raw.shape), " v", list(v.shape))
print(f"position 3, query head 0:  {numbers(q_raw[3, 0])}")
same("q and k, raw", qkv[:, :6], seen["norm"][1][0])
same("v", v, seen["attention"][0][3])  # attend(layer, q, k, v, metadata): 3 is v

# %% [markdown]
# Qwen3 then norms each head of q and of k by itself: the same `rms_norm`, over 64 values. (Qwen2
# and Llama leave this step out.)

# %%
q_normed = rms_norm(q_raw, first_layer.qk_norm[0:4], config.rms_norm_eps)
k_normed = rms_norm(k_raw, first_layer.qk_norm[4:6], config.rms_norm_eps)
print(f"position 3, query head 0:  {numbers(q_normed[3, 0])}")
same("q and k, normed", torch.cat([q_normed, k_normed], dim=1), seen["norm"][1][-1])

# %% [markdown]
# ## 4. Position
#
# Up to here every token was treated alike, wherever it stands. But "a fox saw a hen" is not "a hen
# saw a fox". The query and the key must know their position.
#
# **Rotary embedding** (RoPE) writes the position in as an angle. The 64 values of a head are taken
# as 32 pairs. Each pair is a point in a plane, and is turned: at position 0 not at all, at
# position 1 by some angle, at position 2 by twice that, and so on. Each pair has a speed of its
# own. The first one turns by 1 radian at each position, the last by little more than a
# ten-thousandth.

# %%
speed = rope_frequencies(config)  # radians for each step of the position
for pair in (0, 1, 8, 16, 31):
    angles = "  ".join(f"{position * speed[pair].item():8.5f}" for position in range(4))
    print(f"pair {pair:2}   angle at positions 0 to 3:  {angles}")

# %% [markdown]
# By hand: pair i has the speed `rope_theta ** (-i / 32)`, where `rope_theta` is a number in the
# config. It is 10,000 for `tiny`, and 1,000,000 for Qwen3-0.6B, which reads longer texts: its slow
# pairs turn more slowly still.

# %%
by_hand = torch.tensor([config.rope_theta ** (-pair / 32) for pair in range(32)])
same("speeds", by_hand, speed)

# %% [markdown]
# Which values form a pair? In these models dimension i goes with dimension i + 32, so the first
# half of a head goes with the second half. They are *not* neighbours. (Some models pair
# neighbours. Whoever loads weights of the one kind with code of the other gets nonsense.)
#
# A small example. One token, one head of 4 values, `[1, 2, 3, 4]`. The pairs are (1, 3) and (2,
# 4). Let the first be turned by a quarter of a circle (cos 0, sin 1), the second not at all (cos
# 1, sin 0). A quarter turn, counterclockwise, takes the point (1, 3) to (-3, 1). So the head
# becomes `[-3, 2, 1, 4]`.
#
# Write it.
#
# - `x` is `[num_tokens, heads, head_dim]`.
# - `cos` and `sin` are `[num_tokens, 1, head_dim / 2]`: for each token and each pair the cosine
#   and sine of its angle. The 1 lets all heads of a token share them.
# - The result is a new tensor with the shape of `x`. Leave `x` as it is.


# %%
@exercise("nanoteach.model.apply_rotary")
def apply_rotary(x, cos, sin):
    """Turn dimension i of `[num_tokens, heads, head_dim]` with dimension i + head_dim / 2."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Cut the last dimension in two halves (`x.chunk(2, dim=-1)`). Work out the new first half and the
# new second half, each from both old ones. Then put them together again with `torch.cat`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# From school: where does a turn by the angle t take the point (1, 0)? To (cos t, sin t). And (0,
# 1)? To (-sin t, cos t). A point (a, b) is a times the one and b times the other.
#
# </details>

# %%
show("nanoteach.model.apply_rotary")

# %% [markdown]
# For our four tokens, with another tool: a point in a plane is a complex number, and turning it is
# multiplying with a number of length 1.

# %%
angles = torch.arange(4)[:, None, None] * speed  # tokens, 1, pairs
turn = torch.polar(torch.ones_like(angles), angles)


def turned(x):
    """Every pair of every head, turned by its token's angles."""
    points = torch.complex(x[..., :32], x[..., 32:]) * turn
    return torch.cat([points.real, points.imag], dim=-1)


print(f"position 3, query head 0, before:  {numbers(q_normed[3, 0])}")
q, k = turned(q_normed), turned(k_normed)
same("rotary, by hand and apply_rotary", q, apply_rotary(q_normed, angles.cos(), angles.sin()))
print(f"position 3, query head 0, after:   {numbers(q[3, 0])}")
same("rotary, by hand and witness", torch.cat([q, k], dim=1), seen["rotary"][0][-1])

# %% [markdown]
# Why this works: what counts in attention is the product of a query with a key. If both are turned
# by the same angle, their product stays. So it depends only on how far apart they are, not on
# where. The query of " a" and the key of " was", two positions apart, early and late in a text, and
# then only one apart:


# %%
def product_at(query_position, key_position):
    """The product of one query and one key, put at these positions."""
    where = torch.tensor([query_position, key_position])[:, None, None] * speed
    pair = torch.stack([seen["norm"][1][-1][3, :1], seen["norm"][1][-1][1, 4:5]])
    query, key = apply_rotary(pair, where.cos(), where.sin())
    return (query * key).sum().item()


for places in ((3, 1), (103, 101), (1003, 1001), (3, 2)):
    print(f"query at {places[0]:4}, key at {places[1]:4}: {product_at(*places):6.1f}")

# %% [markdown]
# Divided by 8, the first of these is 9.64. You will meet it in a moment.
#
# ## 5. Which key for which query
#
# There are 4 query heads and only 2 K/V heads. So two query heads must share: *grouped-query
# attention*, GQA. It is done to save memory. In notebook 00 you counted what a token leaves
# behind, and it was the K/V heads that counted.
#
# **Neighbours share.** With 4 query heads and 2 K/V heads, query heads 0 and 1 read K/V head 0,
# and query heads 2 and 3 read K/V head 1. As a list: `[0, 0, 1, 1]`.
#
# Write the list for any numbers. `num_heads` is a multiple of `num_kv_heads`. Try yours in your
# head on 6 and 2, too: not every rule that is right for 4 and 2 is right there.


# %%
@exercise("nanoteach.model.kv_head_map")
def kv_head_map(num_heads: int, num_kv_heads: int) -> list[int]:
    """The K/V head that each query head reads: neighbours share (GQA, Ainslie et al., 2023)."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many query heads share one K/V head? Call that number the group.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The first group of query heads reads 0, the second reads 1. So the question is in which group a
# query head stands: a division without its rest.
#
# </details>

# %%
show("nanoteach.model.kv_head_map")

# %%
print("tiny:       ", kv_head_map(config.num_heads, config.num_kv_heads))
print("Qwen3-0.6B: ", kv_head_map(SHAPES["qwen3-0.6b"].num_heads, 8))

# %% [markdown]
# ## 6. Attention
#
# Now the search itself, for query head 0. Each query meets each key: a product of 64 values with
# 64 values, divided by √64 so that it does not grow with the head's size.

# %%
head = 0
kv_head = kv_head_map(4, 2)[head]
scores = q[:, head] @ k[:, kv_head].T / 64**0.5


def table(rows):
    """A line for each token's query, a column for each token's key."""
    words = [tokenizer.decode([token]).strip() for token in token_ids]
    print(f"{'':8}" + "".join(f"{word:>8}" for word in words))
    for word, row in zip(words, rows.tolist(), strict=True):
        print(f"{word:8}" + "".join(f"{value:8.2f}" for value in row))


table(scores)

# %% [markdown]
# A row is what one token's query found; in the last one is the 9.64 from above. But a token must
# not look at what comes after it: when the model writes, that is not there yet. So everything
# right of the diagonal is set to minus infinity. Then a softmax makes each row into shares that
# add up to 1.

# %%
after = torch.ones(4, 4, dtype=torch.bool).triu(1)
shares = scores.masked_fill(after, float("-inf")).softmax(dim=-1)
table(shares)

# %% [markdown]
# The first token can only look at itself, so its share is 1. What each token gets is the values of
# those it looked at, each in its share. And the same for the other three heads.

# %%
heads = []
for head in range(4):
    kv_head = kv_head_map(4, 2)[head]
    scores = q[:, head] @ k[:, kv_head].T / 64**0.5
    shares = scores.masked_fill(after, float("-inf")).softmax(dim=-1)
    heads.append(shares @ v[:, kv_head])
attended = torch.stack(heads, dim=1)  # tokens, heads, values
print(f"position 3, head 0:  {numbers(attended[3, 0])}")
same("attention", attended, seen["attention"][0][-1])

# %% [markdown]
# Keep one thing in mind, since the whole course rests on it. Look at position 0 in all of this. Its
# key and its value were computed from token 0 alone; its share was of itself alone. Nothing that
# stands later has touched it. If a fifth token comes, all four rows stay as they are, in this layer
# and so in every other.

# %%
print("token 1085 is", repr(tokenizer.decode([1085])))
with_a_fifth = model.forward(
    torch.tensor([*token_ids, 1085]),
    torch.arange(5),
    CausalAttention(),
    AttentionMetadata(query_lens=[5], seq_lens=[5]),
)
same("the four rows after all layers, with a fifth token there", with_a_fifth[:4], last_hidden)

# %% [markdown]
# ## 7. Output, and the first addition
#
# The 4 heads of 64 values are laid side by side, multiplied with the matrix `output`, and **added**
# to the hidden state from section 1.

# %%
after_attention = hidden + attended.reshape(4, 256) @ first_layer.output.T
print(f"position 3:  {numbers(after_attention[3])}")
same("hidden after attention", after_attention, seen["norm"][2][0])

# %% [markdown]
# ## 8. MLP, and the second addition
#
# What was fetched is now digested, each token by itself. Norm again; then two products with 960
# results each, *gate* and *up*. The gate goes through SiLU, `x * sigmoid(x)`, which lets positive
# values through and holds negative ones back. It is multiplied with up, value by value. A last
# product with *down* brings the 960 values back to 320. This is added, too.

# %%
normed = rms_norm(after_attention, first_layer.post_norm, config.rms_norm_eps)
gate, up = normed @ first_layer.gate_up[:960].T, normed @ first_layer.gate_up[960:].T
middle = gate * torch.sigmoid(gate) * up
same("gate times up", middle, seen["activation"][0][-1])
after_layer_0 = after_attention + middle @ first_layer.down.T
print(f"position 3:  {numbers(after_layer_0[3])}")
same("hidden after layer 0", after_layer_0, seen["norm"][3][0])

# %% [markdown]
# ## 9. Three more layers
#
# That was one layer. The others do the same with other weights. Here is all of it in one piece.
# You know every line.


# %%
def layer_by_hand(hidden, w):
    """One layer over a whole text: attention and MLP, each added to the hidden states."""
    n = len(hidden)
    x = rms_norm(hidden, w.input_norm, config.rms_norm_eps)
    qkv = (x @ w.qkv.T).view(n, 8, 64)
    v = qkv[:, 6:]
    qk = apply_rotary(rms_norm(qkv[:, :6], w.qk_norm, 1e-6), angles.cos(), angles.sin())
    heads = []
    for head, kv_head in enumerate(kv_head_map(4, 2)):
        scores = qk[:, head] @ qk[:, 4 + kv_head].T / 64**0.5
        heads.append(scores.masked_fill(after, float("-inf")).softmax(dim=-1) @ v[:, kv_head])
    hidden = hidden + torch.cat(heads, dim=1) @ w.output.T
    x = rms_norm(hidden, w.post_norm, config.rms_norm_eps)
    gate, up = (x @ w.gate_up.T).chunk(2, dim=1)
    return hidden + gate * torch.sigmoid(gate) * up @ w.down.T


at_the_end = after_layer_0
for layer in (1, 2, 3):
    at_the_end = layer_by_hand(at_the_end, model.weights.layers[layer])
    print(f"after layer {layer}, position 3:  {numbers(at_the_end[3], 4)}")
same("hidden at the end", at_the_end, last_hidden)

# %% [markdown]
# ## 10. Scores
#
# One last norm. Then the product with the LM head: 2,048 rows of 320 values, one row for each token
# that there is. In `tiny` it is the embedding matrix of section 1 once more. The result is a score
# for each token, a **logit**. Only the last position's are needed: they are about what comes after
# "There was once a". The other positions' next tokens are in the text already.

# %%
last_normed = rms_norm(at_the_end[-1:], model.weights.norm, config.rms_norm_eps)
logits = last_normed @ model.weights.lm_head.T
same("logits", logits, last_logits)
best = logits[0].topk(5)
for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
    print(f"{score:6.2f}   {tokenizer.decode([token])!r}")
print("greedy takes", greedy(logits).tolist(), repr(tokenizer.decode(greedy(logits))))

# %% [markdown]
# That is the whole decoder. Open `nanoteach/model.py` and read `Decoder.forward`: it has sections 1
# to 9 in this order, in about twenty lines, for any number of tokens and heads. Section 10 is
# `Decoder.logits`.
#
# `greedy` takes the highest score. That makes a text that is always the same, which is what we
# want for proofs. (It is the default here. vLLM's default is to draw by chance.)
#
# ## The loop
#
# One run gives one token. `next_token(token_ids)` of a `NaiveGenerator` does what we did by hand:
# a list of token ids in, the id of the next token out.

# %%
generator = NaiveGenerator(model, eos_token_ids(folder))
token = generator.next_token(token_ids)
print(token_ids, "->", token, repr(tokenizer.decode([token])))

# %% [markdown]
# When is a text over? Either the model says so, by an **end token**; or as many tokens are there as
# were asked for. The rules of one request are its `SamplingParams`, and they answer the question.
# `finish_reason(last_token, num_output_tokens, eos_token_ids)` is None as long as there is more to
# come.

# %%
params = SamplingParams(max_tokens=3)
print("an ordinary token, the 1st:", params.finish_reason(token, 1, generator.eos_token_ids))
print("an ordinary token, the 3rd:", params.finish_reason(token, 3, generator.eos_token_ids))
print("an end token, 2, the 1st:  ", params.finish_reason(2, 1, generator.eos_token_ids))

# %% [markdown]
# A request may have rules of its own. With `ignore_eos=True` it goes on past the model's end
# tokens. `stop_token_ids` are more tokens that end it. `finish_reason` knows both.

# %%
on_and_on = SamplingParams(max_tokens=3, ignore_eos=True)
print("ignore_eos, token 2, the 1st:", on_and_on.finish_reason(2, 1, generator.eos_token_ids))
own_end = SamplingParams(max_tokens=3, stop_token_ids=[token])
print("its own end token, the 1st:  ", own_end.finish_reason(token, 1, generator.eos_token_ids))

# %% [markdown]
# Now write the loop, a method of `NaiveGenerator`.
#
# - `prompt` is a list of token ids. It belongs to the caller: leave it as it is.
# - `params` is a `SamplingParams`. `self.next_token(token_ids)` and `self.eos_token_ids` are there.
# - It returns the generated tokens as a list: without the prompt, with the end token if there was
#   one.
#
# An example. The prompt is `[5, 6]`, the end token is 2. If `next_token([5, 6])` is 9, then
# `next_token` is asked about `[5, 6, 9]`. If that gives 2, the result is `[9, 2]`. With
# `max_tokens=1` it would be `[9]`.


# %%
@exercise("nanoteach.naive.NaiveGenerator.generate_one")
def generate_one(self, prompt, params: SamplingParams) -> list[int]:
    """The greedy loop."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three things, again and again: predict, append, ask if it is over. The model sees the prompt
# *and* all that was generated so far; it remembers nothing.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Keep a list of the output, empty at first. `[*prompt, *output]` makes a new list of both. After
# each append, ask `params.finish_reason` about the last token, with the number of tokens in the
# output. `max_tokens` needs no line of its own.
#
# </details>

# %%
show("nanoteach.naive.NaiveGenerator.generate_one")

# %% [markdown]
# ## Plug it in
#
# `STAGES` lists every engine of this course. The first is this one, on whatever parts are in
# place: yours, and the package's for the rest.
#
# We give it a request that you will meet in every notebook from here on: **request F**. A chat
# model wants its prompt in the form that it was trained on. The tokenizer's *chat template* writes
# who speaks, and where the answer begins.

# %%
chat = [{"role": "user", "content": "Tell me a story about a fox."}]
request_f = tokenizer.encode(
    tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False),
    add_special_tokens=False,
)
print(tokenizer.decode(request_f))
print(len(request_f), "tokens:", request_f)

# %%
eos = eos_token_ids(folder)
naive = STAGES[0].build(Parts(model, EngineConfig(), eos))
[story] = naive.generate([request_f], SamplingParams(max_tokens=40))
print(tokenizer.decode(story))

# %% [markdown]
# It goes on for 221 tokens, with a happy end. You will read the rest when it is cheaper.
#
# ## Prove it
#
# A readable text proves nothing. A decoder with a small fault writes readable texts, too. So: nine
# requests of different lengths, chats and plain beginnings, some that end by themselves. The
# reference is transformers, which has its own code for everything above. The tokens must be the
# same, all of them.

# %%
questions = ["What is 27 plus 48?", "Tell me a story about a fox.", "What comes after 98?"]
prompts = [
    tokenizer.encode(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        ),
        add_special_tokens=False,
    )
    for question in questions
]
beginnings = ["The", "There was once a", "A dragon and a dog", "The cat sat", "Once upon a time"]
beginnings.append("One evening the old goat came home, and the door was open. Then")
prompts += [tokenizer.encode(text, add_special_tokens=False) for text in beginnings]
limits = [SamplingParams(max_tokens=n) for n in (20, 24, 20, 9, 1, 17, 12, 16, 28)]

theirs = references(folder, prompts, limits, eos)
ours = naive.generate(prompts, limits)
print(compare(theirs, ours))
print("prompt lengths ", [len(prompt) for prompt in prompts])
print("output lengths ", [len(output) for output in ours])

# %% [markdown]
# ## Feel the waste
#
# Now look at what the loop did for request F. `RecordingClock` notes, at each step, how many tokens
# were computed. The left picture is that run. The right one is a loop that computes each token
# once, and keeps its keys and values.

# %%
h200 = hardware_named("h200")
clock = pictures.RecordingClock(config, h200)
recorded = NaiveGenerator(model, eos, clock)
recorded.generate([request_f], SamplingParams(max_tokens=40))
print("tokens computed in the first steps:", [step.num_new for step in clock.steps[:5]])
print("in the last step:", clock.steps[-1].num_new)
print("in all steps:", sum(step.num_new for step in clock.steps))
print("different ones among them:", clock.steps[-1].num_new)

# %% tags=["nbval-ignore-output"]
cached = pictures.static_run([pictures.Request(len(request_f), 40)], batch_size=1)
pictures.naive_triangle(clock.steps, cached.steps)

# %% [markdown]
# 1,420 tokens went through the model, and only 55 of them were new. (There are 56 in the text. The
# last one was sampled, but never went in: nobody asked what comes after it.) The orange-red
# triangle is pure repetition. Remember section 6: the rows of earlier tokens do not change when a
# later one comes. Everything in the triangle had the same result as the time before.
#
# The triangle grows with the **square** of the length. Twice as many output tokens make it nearly
# four times as large: the longer the text, the nearer.

# %%
print("output tokens   computed   different   computed again")
before = None
for outputs in (40, 80, 160, 320, 640, 1280):
    total = sum(16 + n for n in range(outputs))
    different = 16 + outputs - 1
    again = total - different
    times = f"   {again / before:.1f} times" if before else ""
    print(f"{outputs:13} {total:10,} {different:11,} {again:16,}{times}")
    before = again

# %% tags=["nbval-ignore-output"]
computed = sum(step.num_new for step in clock.steps)
reveal("the naive loop, 16 prompt and 40 output tokens: tokens computed", computed, "tokens")

# %% [markdown]
# ## The prediction
#
# What does the waste cost? The cost model of notebook 00 knows. Qwen3-0.6B, 128 output tokens, on
# the H200's virtual clock (simulated: what the machine could do at best).


# %%
def simulated(config, hardware, prompt, outputs, cache, bytes_per_value=2):
    """Seconds on the virtual clock, with each token computed once or again and again."""
    clock = VirtualClock(config, hardware, bytes_per_value)
    for n in range(outputs):
        first = n == 0 or not cache
        clock.tick([Work(prompt + n, 0) if first else Work(1, prompt + n - 1)])
    return clock.now()


qwen = SHAPES["qwen3-0.6b"]
print("simulated, H200, Qwen3-0.6B, 128 output tokens")
print("prompt     naive, ms   each token once, ms   factor")
for prompt in (16, 128, 1024, 8192):
    slow = 1000 * simulated(qwen, h200, prompt, 128, cache=False)
    fast = 1000 * simulated(qwen, h200, prompt, 128, cache=True)
    print(f"{prompt:6} {slow:12.1f} {fast:18.1f} {slow / fast:12.1f}")

# %% tags=["nbval-ignore-output"]
slow, fast = (simulated(qwen, h200, 1024, 128, cache) for cache in (False, True))
reveal("H200, 1,024 in, 128 out: naive is slower than a cache by a factor of", slow / fast, "times")

# %% [markdown]
# How near was your guess? The first two lines are a surprise: hardly any loss. A step must read all
# weights anyway, and the arithmetic of a short text is done while they are on their way. How short?
# This is the first prompt for which computing takes longer than reading:

# %%
first = next(n for n in range(1, 1000) if step_cost(qwen, [Work(n, 0)]).limit(h200) == "compute")
print("limited by computing from", first, "tokens on")

# %% [markdown]
# In notebook 00 the corner lay at 182 FLOPs a byte. A weight of 2 bytes gives each token 2 FLOPs,
# so 182 tokens should be enough. But the LM head's weights are read for one token only, which takes
# time and gives little to compute: hence 245.
#
# As long as the text is shorter than that, the repetition is hidden. At 1,024 tokens it costs a
# factor of 4, at 8,192 one of 30.
#
# And this is one request alone. In notebook 00, 64 requests shared one reading of the weights. They
# could, because each had one token to compute. Here each brings its whole text, and 64 whole texts
# are far above 245 tokens.
#
# ## Measure it
#
# And on the machine in front of you? A CPU has far less arithmetic for each byte, so little is
# hidden. `timing_model` says what is timed in this course: `tiny` in float32 on a CPU; where there
# is an NVIDIA GPU, Qwen3-0.6B in bfloat16 on that. (The prompt stays a list of numbers. To Qwen
# they are another text, and take the same time.)

# %%
live = timing_model()

# %% [markdown]
# `measure` finds the machine's ceilings anew; the prediction is made of them. (They may differ from
# those of notebook 00: a machine is not equally fast at all times.)

# %% tags=["nbval-ignore-output"]
here = measure(live.device, live.dtype)
loop = NaiveGenerator(live)
loop.next_token(request_f)  # the first call of all also sets things up
took = []
text_so_far = list(request_f)
for _ in range(40):
    began = time.perf_counter()
    text_so_far.append(loop.next_token(text_so_far))
    took.append(time.perf_counter() - began)
bound, once = (
    simulated(live.config, here, len(request_f), 40, cache, live.dtype.itemsize)
    for cache in (False, True)
)
print(f"this machine: {here.flops / 1e9:.0f} GFLOP/s, reads {here.read_bandwidth / 1e9:.1f} GB/s")
print(f"measured        {1000 * sum(took):7.0f} ms, {40 / sum(took):6.1f} tokens/s")
print(f"predicted bound {1000 * bound:7.0f} ms, {40 / bound:6.1f} tokens/s")
print(f"each token once {1000 * once:7.0f} ms, {40 / once:6.1f} tokens/s, at best")
first, last = sorted(took[:8])[4], sorted(took[-8:])[4]
print(f"a step took {1000 * first:.1f} ms at the beginning and {1000 * last:.1f} ms at the end")

# %% [markdown]
# The measured run is slower than its bound. The products are small, so that PyTorch's own work for
# each operation counts, and the bound leaves out what lies between the products. On a CPU a step at
# the end takes longer than one at the beginning, since the text has grown: that is the triangle, in
# milliseconds.
#
# ### On an H200
#
# The same loop on a large GPU, as recorded: 24 requests, prompts of 64 to 512 tokens, 16 to 64
# tokens to write, with weights of Qwen3-0.6B's shape in bfloat16. All later notebooks show their
# stage on these requests. *At best* is the cost model's answer: the same steps, each as fast as the
# ceilings of the H200 allow.

# %%
on_h200 = recorded_stages(1)
print(where("stages_h200"))
print(stage_table(on_h200))

# %% tags=["nbval-ignore-output"]
rung = pictures.Rung("1 naive generation", 40 / sum(took), 40 / bound)
pictures.ladder({"this machine": [rung], "an H200, recorded": [on_h200[0].rung]})

# %% [markdown]
# Compare each bar with its bound. The H200's ceilings are hundreds of times higher than a CPU's,
# and the loop uses next to nothing of them. The last two columns say how much is lost: the bytes
# and FLOPs of such a step would take less than half a millisecond there. But a step is more than a
# thousand small operations, and Python starts them one after the other. That takes many
# milliseconds, whatever the GPU can do. Keep this in mind when the next stages save bytes and
# FLOPs: on a GPU a step may cost what it costs to *start* it. Notebook 08 looks into that, and ends
# it.
#
# ## Bug clinic
#
# When Llama 3 came out, users of several engines saw chats that did not stop: the answer was
# there, and then the model went on, for as long as it was let. One of the reports is [vLLM issue
# 4180](https://github.com/vllm-project/vllm/issues/4180); [pull request
# 4182](https://github.com/vllm-project/vllm/pull/4182) mended it. Here is a fault of the same
# kind, planted in code of our own. This function finds the end tokens:


# %%
def end_tokens(folder):
    """The tokens that end a text."""
    config = json.loads((folder / "config.json").read_text())
    return (config["eos_token_id"],)


chat_prompt = prompts[0]
plain_prompt = tokenizer.encode("And Ivy slept well that night.", add_special_tokens=False)
patients = {"chat": chat_prompt, "plain text": plain_prompt}
limit = SamplingParams(max_tokens=30)
sick = NaiveGenerator(model, end_tokens(folder)).generate(list(patients.values()), limit)
for name, tokens in zip(patients, sick, strict=True):
    print(f"{name}: {len(tokens)} tokens\n{tokenizer.decode(tokens)}\n")

# %% [markdown]
# The chat is as it should be. Whoever tests with chats finds nothing. The plain text is the end of
# a story, and then something odd happens: the model asks itself a question, in the name of the
# user. Here both are compared with what transformers writes; then comes the trace of the second.

# %%
right = references(folder, list(patients.values()), limit, eos)


def examine(outputs):
    """Say of each patient whether it has the tokens of transformers."""
    for name, reference, tokens in zip(patients, right, outputs, strict=True):
        wanted = reference.tokens
        if tokens == wanted:
            print(f"{name}: all {len(wanted)} tokens are those of transformers")
        elif tokens[: len(wanted)] == wanted:
            print(f"{name}: DIFFERENT, first token too many: step {len(wanted)}")
        else:
            step = next(n for n, t in enumerate(wanted) if tokens[n : n + 1] != [t])
            print(f"{name}: DIFFERENT, first at step {step}")


examine(sick)
for step, token in enumerate(sick[1]):
    print(f"step {step:2}   token {token:4}   {tokenizer.decode([token])!r}")

# %% [markdown]
# **Your turn.** With which token should it have ended? Which of the folder's files would have said
# so? The comments in the cell list the files and open one. Then write the mended function here.


# %%
# sorted(path.name for path in folder.iterdir())
# json.loads((folder / name).read_text())
def mended(folder):
    """The tokens that end a text, all of them."""
    ...


found = mended(folder)
if found is None:
    print("Not mended yet.")
elif not isinstance(found, (tuple, list)):
    print(f"A tuple of token ids is wanted, as {end_tokens(folder)} is one, not {found!r}.")
else:
    examine(NaiveGenerator(model, found).generate(list(patients.values()), limit))

# %% [markdown]
# <details><summary>The diagnosis, and the mend</summary>
#
# It should have ended with step 1, token 0, <|endoftext|>; step 2 is the first too many. Token 0
# ends a text; token 2, <|im_end|>, ends what one speaker says. After step 1 the model begins
# another document of the kind that it has read, and this happens to be a chat. It stopped at step
# 13 by luck: the chat has the one end token that the engine knows.
#
# config.json has one end token, the number 2. But generation_config.json has the list 2, 0, and
# that is the file that says how to generate. With Llama 3 it was the same, with the two tokens'
# parts exchanged: the config named the end of a text, and the end of a speaker's turn stood only
# in the list that was added to generation_config.json. A mend:
#
# ```python
# def mended(folder):
#     for name in ("generation_config.json", "config.json"):
#         path = folder / name
#         found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
#         if found is not None:
#             return tuple(found) if isinstance(found, list) else (found,)
#     return ()
# ```
#
# Two more faults live close by: to take only the first of the list, and to write `if found:`, to
# which an end token 0 is no token.
#
# </details>

# %% [markdown]
# The package's `eos_token_ids` has the mend in it:

# %%
print("planted:", end_tokens(folder), " package:", eos_token_ids(folder))
examine(NaiveGenerator(model, eos).generate(list(patients.values()), limit))

# %% [markdown]
# ## What moved
#
# There was nothing, and now there is a program that is right. Its bottleneck is repetition: a text
# of n tokens costs about n²/2 tokens' work. And it serves one request at a time, so that nobody
# shares the weights that each step reads.
#
# Where the same things are in other engines:
#
# | here | nano-vLLM 0.2.0, in nanovllm/ | vLLM 0.20.2, in vllm/ |
# |---|---|---|
# | `Decoder.forward` | models/qwen3.py | model_executor/models/qwen3.py |
# | `rms_norm` | layers/layernorm.py | model_executor/layers/layernorm.py |
# | `apply_rotary` | layers/rotary_embedding.py | model_executor/layers/rotary_embedding/common.py |
# | `finish_reason` | engine/scheduler.py | v1/core/sched/utils.py |
# | `eos_token_ids` | engine/llm_engine.py | sampling_params.py |
#
# Look at the last line in nano-vLLM: it takes one end token, the tokenizer's. You know now on which
# texts that shows. You will find neither the loop of this notebook there, since both start with a
# cache, nor a `kv_head_map`, since attention kernels do the division inside.
#
# To read: Vaswani et al., [Attention Is All You Need](https://arxiv.org/abs/1706.03762) (2017),
# section 3; Su et al., [RoFormer](https://arxiv.org/abs/2104.09864) (2021), section 3.2; Ainslie
# et al., [GQA](https://arxiv.org/abs/2305.13245) (2023); Zhang and Sennrich, [Root Mean Square
# Layer Normalization](https://arxiv.org/abs/1910.07467) (2019); Shazeer, [GLU Variants Improve
# Transformer](https://arxiv.org/abs/2002.05202) (2020); the [Qwen3 Technical
# Report](https://arxiv.org/abs/2505.09388) (2025), section 2.
#
# **Next:** [02 · KV cache](02_kv_cache.ipynb). The triangle goes.
