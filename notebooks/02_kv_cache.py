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
# # 02 · KV cache
#
# **At the end the engine computes every token once, and several requests share each step.**
#
# 60 minutes. It needs notebook 01, and nothing that 01 did not need.

# %% tags=["nbval-ignore-output"]
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from nanoteach.config import EngineConfig
from nanoteach.cost_model import (
    SHAPES,
    VirtualClock,
    Work,
    kv_bytes_per_token,
    max_requests,
    step_cost,
)
from nanoteach.course import exercise, installed, open_notebook, pictures, predict, reveal, show
from nanoteach.course.timing import recorded_stages, stage_table, timed, timing_model, where
from nanoteach.hardware import hardware_named, measure
from nanoteach.hub import default_model, resolve_model
from nanoteach.kv_cache import (
    ContiguousKVCache,
    ContiguousMetadata,
    StaticBatchGenerator,
)
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.model import AttentionMetadata
from nanoteach.naive import CausalAttention
from nanoteach.reference import compare, references
from nanoteach.stages import STAGES, Parts
from nanoteach.types import SamplingParams

open_notebook(2)

# %% [markdown]
# ## The waste
#
# Request F again: "Tell me a story about a fox." The helper `build` below makes a stage of the
# course. All stages get the same memory, here room for the K/V of 512 tokens, and no request may
# be longer than 128.

# %%
folder = resolve_model(default_model())
model = load_model(folder, "cpu", torch.float32, max_model_len=256)
tokenizer, eos = load_tokenizer(folder), eos_token_ids(folder)
qwen, h200 = SHAPES["qwen3-0.6b"], hardware_named("h200")


def chat(*turns):
    """The prompt of a chat: user, assistant, user, ..."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def build(number, clock=None, max_num_seqs=4, model=model):
    """A stage of the course."""
    config = EngineConfig(
        max_model_len=128,
        max_num_seqs=max_num_seqs,
        num_gpu_blocks_override=32,  # blocks of 16 tokens
    )
    return STAGES[number - 1].build(Parts(model, config, eos, clock))


request_f = chat("Tell me a story about a fox.")
print(len(request_f), "tokens:", tokenizer.decode(request_f))

# %% [markdown]
# Let F write 24 tokens, once with the loop of notebook 01, and once with the stage that this
# notebook builds. Each column is a step, and shows which tokens it sends through the model.

# %% tags=["nbval-ignore-output"]
# A clock that writes down each step. Only its list of steps is used here, not its time.
naive_clock = pictures.RecordingClock(qwen, h200)
cached_clock = pictures.RecordingClock(qwen, h200)
naive_text = build(1, naive_clock).generate([request_f], SamplingParams(max_tokens=24))[0]
cached_text = build(2, cached_clock).generate([request_f], SamplingParams(max_tokens=24))[0]
pictures.naive_triangle(naive_clock.steps, cached_clock.steps)

# %%
for name, clock, tokens in (
    ("naive", naive_clock, naive_text),
    ("cache", cached_clock, cached_text),
):
    computed = sum(step.num_new for step in clock.steps)
    print(f"{name}: {computed:3} tokens computed; it wrote {tokenizer.decode(tokens)!r}")

# %% [markdown]
# The same text, from 660 computed tokens and from 39. The orange-red ones were computed before,
# with the same result. Why are we allowed to leave them out?
#
# ## What may be kept
#
# Attention is the only place where a token looks at others. There it brings a query, and meets the
# **keys** and **values** of all tokens up to itself. So if we have the earlier tokens' K and V in
# every layer, we need nothing else of them. Whether we may keep K and V depends on one question: do
# they change when the text grows?
#
# Ask the model. The class below is stage 1's attention; it only writes down the K and V that pass
# by. Rounding may differ a little from run to run, so "changed" means: by more than 0.01.


# %%
class Recorder(CausalAttention):
    """Stage 1's attention, which remembers each layer's K and V."""

    def __init__(self):
        self.seen = {}

    def attend(self, layer, q, k, v, metadata):
        self.seen[layer] = {"K": k, "V": v}
        return super().attend(layer, q, k, v, metadata)


@torch.inference_mode()
def kv_of(tokens):
    """For every layer a text's K and V, each a tensor [tokens, K/V heads, head_dim]."""
    recorder, n = Recorder(), len(tokens)
    model.forward(torch.tensor(tokens), torch.arange(n), recorder, AttentionMetadata([n], [n]))
    return recorder.seen


def print_changed(before, after):
    """The positions, of those that both have, whose K or V differ by more than 0.01."""
    for layer in before:
        for name, old in before[layer].items():
            new = after[layer][name]
            n = min(len(old), len(new))
            differ = (old[:n] - new[:n]).abs().amax((1, 2)) > 0.01
            print(f"layer {layer}, {name}: {differ.nonzero().flatten().tolist()}")


alone = kv_of(request_f)
print("positions that changed when 10 tokens were added:")
print_changed(alone, kv_of([*request_f, *cached_text[:10]]))

# %% [markdown]
# None, in no layer, neither K nor V. The reason is the causal mask: a token never sees what comes
# after it, so what comes after cannot change it.
#
# And what comes *before*? Change the token at position 3 ("Tell" becomes "What") and look again.

# %%
edited = [*request_f[:3], *tokenizer.encode("What"), *request_f[4:]]
print(tokenizer.decode(edited).splitlines()[1])
print_changed(alone, kv_of(edited))

# %% [markdown]
# In layer 0 only the token itself has another K and V. Above layer 0 every later token has, because
# it has looked at position 3 on its way. Keep both halves in mind:
#
# - K/V of a token **never change when text is added after it**. That is this notebook.
# - K/V of a token **depend on all tokens before it**. That is notebook 05.
#
# ## The last token has no K/V yet
#
# Now the one thing that readers of an engine most often get wrong. A step takes tokens *in*,
# computes their K/V, and gives one token *out*. The token that comes out has not been through the
# model. It has no K/V. They will be computed in the next step, whose input it is.
#
# Here is F when it writes 4 tokens, as each step of the real run found it.

# %% tags=["nbval-ignore-output"]
short_clock = pictures.RecordingClock(qwen, h200)
build(2, short_clock).generate([request_f], SamplingParams(max_tokens=4))
moments = {}
for number, step in enumerate(short_clock.steps, start=1):
    (work,) = step.work
    total = work.num_computed + work.num_new
    moments[f"step {number}"] = pictures.Moment(
        "F", len(request_f), total, work.num_computed, work.num_new
    )
moments["at the end"] = pictures.Moment("F", len(request_f), total + 1, total, 0)
pictures.one_request(moments)

# %% [markdown]
# Read a line from left to right, in the colours of the first picture: grey tokens have K/V in the
# cache, the blue ones are computed in this step, the white one is known and has no K/V. In step 1
# the whole prompt is computed, and the first "g" comes out; that one is the blue token of step 2.
# At the end, 4 tokens are written and 3 of them have K/V.
#
# So a request with a prompt of p tokens that writes n needs room for **p + n - 1** tokens, not
# p + n. And in the words of notebook 00, the whole story is two kinds of `Work`:

# %%
for number, step in enumerate(short_clock.steps, start=1):
    print(f"step {number}: {step.work[0]}")

# %% [markdown]
# ## What it should gain
#
# Qwen3-0.6B on an H200, one request that writes 128 tokens. Notebook 01 found that a cache makes it
# 30 times as fast if the prompt has 8,192 tokens. And with 64? From which prompt length on does the
# cache double the speed? Write down what you think before you go on. (A hint: notebook 00 had *two*
# numbers for a step.)

# %%
predict("H200, 64 in, 128 out: a cache is faster by a factor of", ..., "times")
predict("H200, 128 out: a cache doubles the speed from prompts of", ..., "tokens")


# %%
def gain(prompt):
    """Tokens/s without a cache and with one, of one request that writes 128."""
    naive, cached = VirtualClock(qwen, h200), VirtualClock(qwen, h200)
    for written in range(128):
        naive.tick([Work(prompt + written, 0)])
        cached.tick([Work(1, prompt + written - 1) if written else Work(prompt, 0)])
    return 128 / naive.now(), 128 / cached.now()


print(f"{'prompt':>6} {'naive':>12} {'cache':>12}")
for prompt in (64, 256, 424, 425, 1024, 8192):
    slow, fast = gain(prompt)
    print(f"{prompt:6,} {slow:8,.0f} tok/s {fast:8,.0f} tok/s   x {fast / slow:.3f}")
print(f"({h200.name}, simulated)")

# %% tags=["nbval-ignore-output"]
slow, fast = gain(64)
reveal("H200, 64 in, 128 out: a cache is faster by a factor of", fast / slow, "times")
doubled = next(p for p in range(256, 1024) if gain(p)[1] >= 2 * gain(p)[0])
reveal("H200, 128 out: a cache doubles the speed from prompts of", doubled, "tokens")

# %% [markdown]
# With 64 tokens: nothing at all. A factor of 2 comes at 425. Why nothing? A step must read all the
# weights, 1.19 GB, and that takes longer than computing the 64 to 191 tokens of the text. The
# orange-red triangle is wasted work, but it is done by arithmetic units that would otherwise wait.
# There is a length at which this ends:

# %%
for tokens in (244, 245):
    cost = step_cost(qwen, [Work(tokens, 0)])
    print(f"a step of {tokens} tokens: {1000 * cost.seconds(h200):.4f} ms, ", end="")
    print(f"limited by {cost.limit(h200)}")

# %% [markdown]
# From 245 tokens on, computing takes longer than reading, and the triangle costs time. With a
# prompt of 8,192 tokens it takes nearly all of the time.
#
# A CPU has far fewer FLOPs for each byte that it can read. There the cache pays for short texts,
# too; you will measure it below.
#
# The cache is not free. It takes memory:

# %%
print(f"Qwen3-0.6B: {kv_bytes_per_token(qwen):,} bytes a token")
print(f"a request of 8,192 + 128 tokens: {8319 * kv_bytes_per_token(qwen) / 2**30:.2f} GiB")

# %% [markdown]
# ## Build it: rows of slots
#
# The simplest place for K/V: one long array in each layer, cut into **rows**. A row belongs to one
# request. It is reserved for the longest text that the request could become. A place for one token
# is a **slot**. With 2 rows of 6 slots each:
#
# ```
#           position  0    1    2    3    4    5
#  row 0    slot      0    1    2    3    4    5
#  row 1    slot      6    7    8    9   10   11
# ```
#
# `ContiguousKVCache` holds two tensors, `k` and `v`, each of shape
# `[num_layers, rows * row_len, num_kv_heads, head_dim]`. So `self.k[layer]` is one layer's array
# of slots.

# %%
cache = ContiguousKVCache(model.config, rows=2, row_len=6, dtype=torch.float32, device=model.device)
print("k:", list(cache.k.shape), " v:", list(cache.v.shape))

# %% [markdown]
# **Exercise: append.** A step computes new tokens. In each layer, their K/V must be written to
# their slots, before anybody attends.
#
# - `layer` is the layer's number.
# - `k` and `v` are `[num_tokens, num_kv_heads, head_dim]`: the step's new tokens, those of all
#   requests one after the other.
# - `slot_mapping` is `[num_tokens]`, whole numbers: token i goes to slot `slot_mapping[i]`.
#
# An example: row 0 has 2 tokens, row 1 has 4, and each gets one more. Then `slot_mapping` is
# `[2, 10]`: `k[0]` goes to slot 2 and `k[1]` to slot 10 of that layer, and all other slots and
# layers stay as they are. Nothing is returned. A slot may still hold what an older request left
# there.


# %%
@exercise("nanoteach.kv_cache.ContiguousKVCache.append")
def append(self, layer: int, k, v, slot_mapping) -> None:
    """Write the new tokens' K/V `[num_tokens, num_kv_heads, head_dim]` to their slots."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two things are written. The slots need not follow one another, so a slice will not do. Torch can
# take a tensor of whole numbers where an index is wanted.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `x[numbers]` on the right of an equals sign makes a copy. On the left of one, it writes into x.
# There is also a method of tensors that copies rows to the places in an index. A loop over the
# tokens is right, too.
#
# </details>

# %%
show("nanoteach.kv_cache.ContiguousKVCache.append")

# %%
ones = torch.ones(2, model.config.num_kv_heads, model.config.head_dim)
cache.append(1, ones, 2 * ones, torch.tensor([2, 10]))
for name, tensor in (("k", cache.k), ("v", cache.v)):
    for layer in (0, 1):
        print(
            f"{name}, layer {layer}, first value of each slot:",
            tensor[layer, :, 0, 0].int().tolist(),
        )

# %% [markdown]
# ## What a decode step may see
#
# The K/V are stored. Now the newest token attends. It has one query, and it is the last of its
# text, so it may see **everything** in its row. No causal triangle is needed. It looks harmless to
# ask for one anyway: "attention in a decoder is causal, so `is_causal=True`". See what PyTorch's
# SDPA (`scaled_dot_product_attention`) does with it.

# %%
torch.manual_seed(0)
q = torch.randn(1, 1, 1, 8)  # [batch, heads, queries, head_dim]: one query
k, v = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8)  # five keys and values
out = scaled_dot_product_attention(q, k, v, is_causal=True)
print("what comes out is the first value, unchanged:", torch.allclose(out[0, 0, 0], v[0, 0, 0]))
triangle = torch.ones(1, 5, dtype=torch.bool).tril()
print("the mask that it took:", triangle.int().tolist())

# %% [markdown]
# The triangle is lined up at the *top left*: query 0 sees key 0, query 1 sees keys 0 and 1, and so
# on. That is right when all tokens are queries. With one query and five keys it leaves key 0 and
# hides four. No error, no warning. What does F write, if every decode step sees like that?


# %%
def first_key_alone(seq_lens, width):
    """What is_causal makes of one query a row."""
    return torch.ones(1, width, dtype=torch.bool).tril().expand(len(seq_lens), width)


with installed({"nanoteach.kv_cache.decode_mask": first_key_alone}):
    broken = build(2).generate([request_f], SamplingParams(max_tokens=8))[0]
print(repr(tokenizer.decode(broken)))

# %% [markdown]
# The first token is right: it comes from the prompt's own step, where the triangle is right. Then
# the model has forgotten everything but the first token of the chat, <|im_start|>. After that one
# it expects a speaker's name, so it writes one, again and again. Many people have met
# this; PyTorch's issues [115111](https://github.com/pytorch/pytorch/issues/115111) and
# [144858](https://github.com/pytorch/pytorch/issues/144858) are about it.
#
# There is a reason to need *some* mask, though. Several requests decode in one step, and their
# rows are not equally long. They are read as one block, as wide as the longest of them. What
# stands behind the end of a shorter row is not its own: nothing yet, or what an older request left
# there.
#
# **Exercise: the decode step's mask.** One line for each row, `width` columns, booleans. True means
# that the row's newest token sees that position.
#
# - `seq_lens`: the tokens of each row, *with* the newest one, whose K/V are stored already.
# - Returned is a tensor `[rows, width]` of `torch.bool`.
#
# An example: `decode_mask([2, 4], 4)` is
#
# ```
#   row 0   True  True  False False
#   row 1   True  True  True  True
# ```


# %%
@exercise("nanoteach.kv_cache.decode_mask")
def decode_mask(seq_lens: list[int], width: int):
    """True where row i has a token: `[rows, width]`."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Each place of the mask compares two numbers: which column it is, and how many tokens the row has.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `torch.arange(width)` has the columns. A tensor of shape `[rows, 1]` compared with one of shape
# `[width]` gives one of `[rows, width]`. Think of a row of 1 token: which columns does it have?
#
# </details>

# %%
show("nanoteach.kv_cache.decode_mask")

# %%
print(decode_mask([2, 4, 1], 5).int())

# %% [markdown]
# ## Where the new tokens go
#
# One part is missing. Somebody must say which slots a step's new tokens get.
#
# **Exercise: plan.** A step gives each row some new tokens: a whole prompt at first, then one at a
# time. `query_lens[i]` is how many *new* tokens row i has in this step. `seq_lens[i]` is how many
# it has altogether, the new ones included. So the new ones are the last of them.
#
# An example, with rows of 6 slots (`self.row_len` is 6). Row 0 gets a prompt of 3 tokens, row 1 its
# fifth token: `query_lens` is `[3, 1]`, `seq_lens` is `[3, 5]`. Row 0's tokens are at positions 0,
# 1, 2. Row 1's is at position 4. The table above says which slots that is: 0, 1, 2 and 10.
#
# Return what attention needs to know:
#
# ```python
# ContiguousMetadata(query_lens, seq_lens, slot_mapping=..., mask=...)
# ```
#
# - `slot_mapping`: a tensor `[num_tokens]`, the slot of each new token, row after row.
# - `mask`: your mask for these rows, as wide as the longest of them is now, `max(seq_lens)`.
# - Both must be on the device of the cache, `self.k.device`. (`torch.tensor(..., device=...)`, and
#   `.to(...)`.)
#
# The mask is used only when every row has one new token. In a step with a prompt it is made, and
# nobody looks at it: prompts see by their own causal triangle. The example mixes a prompt with a
# decode to show both in one; the batch below never does.


# %%
@exercise("nanoteach.kv_cache.ContiguousKVCache.plan")
def plan(self, query_lens: list[int], seq_lens: list[int]) -> ContiguousMetadata:
    """Find a slot for each new token: row i grows to `seq_lens[i]`."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two questions for each row. At which slot does the row begin? And at which position does its
# first new token stand, if there are `seq_lens[i]` tokens and the last `query_lens[i]` of them are
# new?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A row begins at the same slot in every step, however long the rows before it are. Build a list of
# slots in two loops, over the rows and over the positions of their new tokens, then make a tensor
# of it.
#
# </details>

# %%
show("nanoteach.kv_cache.ContiguousKVCache.plan")

# %%
metadata = cache.plan([3, 1], [3, 5])
print("slots", metadata.slot_mapping.tolist())
print(metadata.mask.int())

# %% [markdown]
# ## Plug it in
#
# `ContiguousKVCache.attend` puts the parts together: append, then attend. Prompts go through
# `causal_attention`, which does what you did by hand in section 6 of notebook 01. Decode steps go
# through `decode_attention`, all rows at once, under your mask. The model itself has not changed in
# any line. Look for the `if`: one new token a row, or not. The mask is used in one branch alone.

# %%
show("nanoteach.kv_cache.ContiguousKVCache.attend")

# %% [markdown]
# F, with 40 tokens, on whatever parts are in place now:

# %%
story = build(2).generate([request_f], SamplingParams(max_tokens=40))[0]
print(tokenizer.decode(story))

# %% [markdown]
# ## Several requests: the static batch
#
# A decode step reads all weights for one token. Notebook 00 said what to do about it: let more
# requests share the step. `StaticBatchGenerator` does this in the simplest way. It takes as many
# requests as there are rows. Their prompts are computed in one step. Then each row gets one token
# a step, **until all of them are done**. Then comes the next batch.
#
# Each row is reserved for the longest request that it could get. Whether a request fits is
# therefore a matter of its largest length, known before it begins. And here it counts that the last
# token needs no K/V: F has 16 tokens, and a row of 32 slots lets it write 17 more.

# %%
tight = StaticBatchGenerator(
    model, ContiguousKVCache(model.config, 4, 32, torch.float32, model.device), max_num_seqs=4
)
print("17 tokens to write:", tight.batches([request_f] * 6, [SamplingParams(max_tokens=17)] * 6))
try:
    tight.batches([request_f], [SamplingParams(max_tokens=18)])
except ValueError as error:
    print("18 tokens to write:", error)

# %% [markdown]
# Six requests in four rows make two batches: the first four, then the other two.
#
# What does a batch look like from inside? Take four requests that want 10, 20, 50 and 100 tokens,
# and let the batch run. (A stand-in, which only counts, takes the real one's place in this
# run. The loop and the cache are the real ones.)

# %%
wanted = [10, 20, 50, 100]
asked = [pictures.Request(5, n) for n in wanted]  # prompts of 5 tokens
batch = pictures.static_run(asked, row_len=5 + 100 - 1)
stays = pictures.static_stays(batch.steps, wanted)
for stay in stays:
    busy, held = len(stay.working), stay.last - stay.first + 1
    print(f"request {stay.name}: in its row for {held} steps, {busy} of them for something")
print(f"rows in use {pictures.share_working(stays):.0%} of the time")


# %% tags=["nbval-ignore-output"]
@pictures.drawing
def static_rows(stays):
    """Who is in which row at each step; hatched where a row is done and waits for the others."""
    figure = pictures.canvas(2.2)
    axes = figure.subplots()
    colours = pictures.colours_of(stay.name for stay in stays)
    for name, row, first, last, working in stays:
        pictures.box(axes, first - 1, row - 0.4, last, 0.8, pictures.PALE, **pictures.HATCHED)
        pictures.box(axes, first - 1, row - 0.4, len(working), 0.8, colours[name])
        colour = pictures.ink(colours[name])
        pictures.say(axes, first - 0.5, row, f"{name}  {len(working)}", colour, weight="bold")
    pictures.lanes(axes, [f"row {stay.slot}" for stay in stays])
    axes.set_xlim(0, max(stay.last for stay in stays))
    axes.set_title("one static batch: hatched rows are done, and computed for nothing")
    axes.set_xlabel("step")
    return figure


static_rows(stays)

# %% [markdown]
# The first request had its answer after 10 steps, and its row was dead weight for 90 more. It was
# computed all the same: every step has one token for each row, so a row that is done gets its last
# token computed again, for nothing. That costs little, since the weights are read anyway. What
# costs is that nobody else can have the row.
#
# ## Prove it
#
# Twelve requests, with prompts of 10 to 76 tokens, that write at most 1 to 34, in batches of four.
# Each must give transformers' tokens, whoever shared its batch, and whoever had its row before.

# %%
sums = ("What is 12 plus 30?", "12 plus 30 is 42.", "What is 5 plus 9?", "5 plus 9 is 14.")
texts = [
    ("Tell me a story about a fox.",),
    (*sums, "What is 27 plus 48?"),
    ("What is the opposite of early?",),
    ("Tell me a story about a robot and a silver bell.",),
    (*sums[:2], "What is 61 plus 7?"),
    ("Hello!",),
]
prompts = [chat(*text) for text in texts] * 2
params = [SamplingParams(max_tokens=1 + 3 * i, ignore_eos=i % 2 == 0) for i in range(12)]
print("prompts of", sorted({len(prompt) for prompt in prompts}), "tokens")

# %%
expected = references(folder, prompts, params, eos)
print(compare(expected, build(2).generate(prompts, params)))

# %% [markdown]
# ## Measure it
#
# Four requests, F among them, that write 8, 16, 24 and 32 tokens. First the naive loop; then the
# cache with one row, so one request after the other; then the cache with four rows. `timed` runs
# each twice and takes the better one. The bound beside it is the cost model's, on the ceilings of
# this machine, for the steps that were run.

# %%
live = timing_model()

# %% tags=["nbval-ignore-output"]
here = measure(live.device, live.dtype)
sample = [prompts[i] for i in (2, 3, 4, 0)]
lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (8, 16, 24, 32)]
rungs = []
for name, number, rows in (
    ("1 naive", 1, 1),
    ("2 cache, 1 row", 2, 1),
    ("2 cache, 4 rows", 2, 4),
):
    make = partial(build, number, max_num_seqs=rows, model=live)
    rung = timed(name, live, here, make, sample, lengths)
    rungs.append(rung)
    print(f"{name:16} {rung.measured:7,.0f} tokens/s, at most {rung.predicted:7,.0f}")

# %% [markdown]
# Two things to look for in your numbers. By how much does the cache gain with one row? And how far
# below its bound does it stay? The bound knows bytes and FLOPs only. A small model's decode step
# has few of both, so most of its time is Python and the start of each operation. Four rows share
# that time as well.
#
# And on an H200, as recorded, for the 24 requests that notebook 01 began with? The cache has eight
# rows there.

# %%
on_h200 = recorded_stages(1, 2)
print(where("stages_h200"))
print(stage_table(on_h200))

# %% tags=["nbval-ignore-output"]
pictures.ladder({"this machine": rungs, "an H200, recorded": [stage.rung for stage in on_h200]})

# %% [markdown]
# Look at the last two columns first. A step takes about as long with the cache as without: the
# H200 waits for its operations to be started, and there are as many of them for one token as for
# five hundred. What the cache saves does not show. The gain is in the column before: eight rows
# share a step, so there are far fewer steps. On a CPU computing takes time, and the cache
# alone is worth something.
#
# Your requests of above on an H200, for Qwen3-0.6B, simulated:

# %%
shape = [pictures.Request(len(p), s.max_tokens) for p, s in zip(sample, lengths, strict=True)]
for name, stage, rows in (("naive", "naive", 1), ("1 row", "rows", 1), ("4 rows", "rows", 4)):
    run = pictures.static_run(shape, stage=stage, batch_size=rows)
    print(f"{name:7} {80 / run.steps[-1].end:6,.0f} tokens/s (simulated, H200)")

# %% [markdown]
# With prompts as short as these, the cache alone gains nothing there, as the table above said. The
# rows do. But four rows do not gain a factor of 4. The 80 steps become 32, and not 20, since three
# of the rows are done before the last one.
#
# ## Bug clinic
#
# Somebody finds the loop of the static batch too complicated. Why keep track of who is done? Let
# every row decode as long as the batch runs, and cut the texts to their length afterwards. On the
# first day this raised an error about the mask: a text had become longer than its row.
# So they limited the mask's width to the row's. Since then it runs. Read both classes before you go
# on.


# %%
class SimpleBatch(StaticBatchGenerator):
    """Every row decodes to the end of the batch; what is too much is cut off."""

    def generate_batch(self, prompts, params):
        rows = [list(prompt) for prompt in prompts]
        query_lens = [len(row) for row in rows]
        for _ in range(max(p.max_tokens for p in params)):
            tokens = self.step(rows, query_lens)
            for row, token in zip(rows, tokens, strict=True):
                row.append(token)
            query_lens = [1] * len(rows)
        starts = [len(prompt) for prompt in prompts]
        return [row[n : n + p.max_tokens] for row, n, p in zip(rows, starts, params, strict=True)]


class PatientCache(ContiguousKVCache):
    """The cache, with the mask no wider than a row. It keeps a list of all slots given out."""

    def __init__(self, rows, row_len):
        super().__init__(model.config, rows, row_len, torch.float32, model.device)
        self.given = []

    def plan(self, query_lens, seq_lens):
        slots = [
            row * self.row_len + position
            for row, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True))
            for position in range(length - new, length)
        ]
        self.given.append(slots)
        mask = decode_mask(seq_lens, min(max(seq_lens), self.row_len))
        return ContiguousMetadata(query_lens, seq_lens, torch.tensor(slots), mask)


# %% [markdown]
# **The symptom.** Two requests. A has two sums behind it and asks a third: its prompt has 76
# tokens, and its answer takes 12. B asks for a story about a robot and a silver bell: a prompt of
# 20 tokens, and it writes 56. Rows are as long as the longest of them needs: 76 + 12 - 1 = 87
# slots. So A has the slots 0 to 86, and B those from 87 on.

# %%
pair = [prompts[1], prompts[3]]
limits = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (12, 56)]
theirs = references(folder, pair, limits)


def examine(batch_class, cache, order=(0, 1)):
    """Run the two requests, compare them with transformers, and return what they wrote."""
    generator = batch_class(model, cache, max_num_seqs=2)
    tokens = generator.generate([pair[i] for i in order], [limits[i] for i in order])
    print(compare([theirs[i] for i in order], tokens))
    return [tokenizer.decode(text) for text in tokens]


cache = PatientCache(rows=2, row_len=87)
answer, sick_story = examine(SimpleBatch, cache)
print("A:", answer)
print("B:", sick_story)
print("A's largest slot:", max(slots[0] for slots in cache.given[1:]))

# %% [markdown]
# A is right. B's story is good English, with nothing odd about it. But the silver bell has gone:
# transformers, and this engine when B is alone, write of it in the second paragraph.

# %%
print("transformers, B:", tokenizer.decode(theirs[1].tokens))

# %% [markdown]
# Could it be rounding? The two best tokens are 0.015 apart, which is close. So measure what
# rounding does: B's scores at that place, once with the whole text in one step, once token by token
# through the cache. And let B run alone.

# %%
alone_too = StaticBatchGenerator(model, PatientCache(rows=1, row_len=87), max_num_seqs=1)
print("B alone is right:", alone_too.generate(pair[1:], limits[1:])[0] == theirs[1].tokens)
text = torch.tensor([*pair[1], *theirs[1].tokens[:39]])
n, prompt = len(text), len(pair[1])
one_row = PatientCache(rows=1, row_len=n)
with torch.inference_mode():
    whole = model.forward(text, torch.arange(n), CausalAttention(), AttentionMetadata([n], [n]))
    for a, b in [(0, prompt), *((i, i + 1) for i in range(prompt, n))]:
        metadata = one_row.plan([b - a], [b])
        newest = model.forward(text[a:b], torch.arange(a, b), one_row, metadata)
    apart = (model.logits(whole[-1:]) - model.logits(newest[-1:])).abs().max()
print("rounding changes a score by less than 0.0001:", bool(apart < 0.0001))

# %% [markdown]
# It is not rounding: that is more than a hundred times smaller, and B alone gets it right.
#
# One more finding. If A and B change places, there is no wrong text, but an error:

# %%
swapped = PatientCache(rows=2, row_len=87)
try:
    examine(SimpleBatch, swapped, order=(1, 0))
    print("no error")
except IndexError:
    print("IndexError. Slots there are: 0 to", len(swapped.k[0]) - 1, end=". ")
    print("The largest that was given:", max(max(slots) for slots in swapped.given))

# %% [markdown]
# **The trace.** The slots of some steps: A's, then B's. (Steps are counted from 1 here. The
# comparison above counts from 0, so its step 39 is step 40 here.)

# %%
for number in (2, 11, 12, 13, 14, 15, 40):
    print(f"step {number:2}: A's token goes to slot {cache.given[number - 1][0]:3}, "
          f"B's to {cache.given[number - 1][1]:3}")  # fmt: skip

# %% [markdown]
# **Your turn.** A row has 87 slots. Whose slots are those that A writes to, from step 13 on? What
# was there before? Why does the mask not help, and why is it an error in the other order? Then mend
# `SimpleBatch` above, and run the cells again, until both requests are right in both orders, and A
# gets no slot above 86. (Right tokens alone are not enough: B's story can survive one wrong slot.
# The limit of the mask's width is not the disease. It hides the disease. In which of the two
# classes is that?)
#
# <details><summary>Answer</summary>
#
# Rows of 87 slots: row 0 has slots 0 to 86, and row 1 begins at slot 87. In step 12, A computes the
# token at position 86, and gets the last token of its answer. It is done. In step 13 it goes on,
# to position 87. That is slot 87, which is position 0 of B. From then on, every step of A
# destroys one token of B: first the beginning of its chat, then the question. By step 40, all of
# B's prompt is overwritten, the words "silver bell" too. B's mask says, rightly, that these places
# are its own. Only what lies in them is not. In the other order, A is in the last row, and its
# slots lie behind the end of the array, which torch reports.
#
# The disease is a row that grows though its request is done. The error on the first day said so.
# Limiting the mask made the error go away, and left the wrong writes. (It would have been better to
# say more loudly that a row is too long.)
#
# The mend: a request that is done gets nothing more, and its row stays as it is. Its last token has
# no K/V and so no place in the row; the outputs are kept apart.
#
# ```python
# def generate_batch(self, prompts, params):
#     rows = [list(prompt) for prompt in prompts]
#     outputs = [[] for _ in prompts]
#     query_lens = [len(row) for row in rows]
#     for _ in range(max(p.max_tokens for p in params)):
#         tokens = self.step(rows, query_lens)
#         for row, output, token, p in zip(rows, outputs, tokens, params, strict=True):
#             if len(output) < p.max_tokens:
#                 output.append(token)
#                 if len(output) < p.max_tokens:
#                     row.append(token)
#         query_lens = [1] * len(rows)
#     return outputs
# ```
#
# `StaticBatchGenerator.generate_batch` does the same, and ends a request at its end token too.
#
# </details>

# %% [markdown]
# The package's loop, on the same rows, not one slot longer:

# %%
answer, mended_story = examine(StaticBatchGenerator, PatientCache(rows=2, row_len=87))
print("silver bell" in mended_story)

# %% [markdown]
# **Where this happens.** In this very engine. Its first version appended a row's last token before
# it noticed that the request was done. So a done row claimed one slot more than was reserved for
# it: p + n, not p + n - 1. With rows as long as the model allows, nothing was ever seen. On pages
# (notebook 03), where a batch has exactly as many places as it needs, a test with a full pool
# failed: there was no page for the token that nobody needs.
#
# And in large engines. [vLLM issue 53982](https://github.com/vllm-project/vllm/issues/53982) tells
# of a kernel that works out slots from a table with one line for each request. It does not check
# that a position is still within its request's line, and so it reads on, in the next request's.
# Measurements in [pull request 54296](https://github.com/vllm-project/vllm/pull/54296) show both of
# your symptoms: just behind the end, the neighbour's entry, in silence; far behind it, an illegal
# memory access. The proposed mend gives positions out of range a slot number that means "nowhere".
# [Pull request 54288](https://github.com/vllm-project/vllm/pull/54288) is about the other half: a
# finished request's last token was counted as if it had K/V.
#
# ## What moved
#
# Computing is no longer the bottleneck: each token is computed once. What is scarce now is
# **memory**, in two ways, and both are waste.
#
# - *Rows that are done wait for the longest.* In the batch of 10, 20, 50 and 100 tokens, rows were
#   in use 45% of the time.
# - *Rows are reserved for what a request could become.* 14 GiB of Qwen3-0.6B's K/V are 32 rows of
#   4,096 tokens, even if all requests are short. The next cell counts what was really filled in the
#   batch of 10, 20, 50 and 100, whose prompts have 5 tokens: in rows of 5 + 100 - 1 slots, then in
#   rows of 4,096. (K/V of requests that are done count as filled here, though nobody needs them; 04
#   ends that.)

# %%
filled = sum(held.filled for step in batch.memory for held in step.values())
reserved = sum(held.held for step in batch.memory for held in step.values())
print(f"rows of 104: {filled / reserved:.0%} of the reserved slots were filled, on average")
memory = pictures.static_run(asked, row_len=4096).memory
filled = sum(held.filled for step in memory for held in step.values())
reserved = sum(held.held for step in memory for held in step.values())
print(f"rows of 4,096: {filled / reserved:.1%}")
print(f"rows of 4,096 in 14 GiB: {max_requests(qwen, 14 * 2**30, 4096)}")

# %% [markdown]
# Notebook 03 ends the second kind of waste, and 04 the first.
#
# Where the same things are in other engines:
#
# | here | there | file and name |
# |---|---|---|
# | `ContiguousKVCache` | gpt-fast | model.py, KVCache: the same reserved rows |
# | `ContiguousKVCache` | transformers 5 | cache_utils.py, StaticLayer (DynamicLayer grows) |
# | `ContiguousKVCache.append` | nano-vLLM 0.2.0 | nanovllm/layers/attention.py, store_kvcache |
# | `slot_mapping` | vLLM 0.20.2 | vllm/v1/worker/block_table.py, compute_slot_mapping |
#
# nano-vLLM and vLLM have no rows: both begin with pages. But in both, a step's new tokens get
# a slot each, and the slots' numbers travel to the kernel in a tensor of the same name as yours.
#
# To read: Pope et al., [Efficiently Scaling Transformer
# Inference](https://arxiv.org/abs/2211.05102) (2022), section 3 on attention and the KV cache;
# Shazeer, [Fast Transformer Decoding](https://arxiv.org/abs/1911.02150) (2019), on why K/V heads
# are shared; Kwon et al., [Efficient Memory Management for Large Language Model Serving with
# PagedAttention](https://arxiv.org/abs/2309.06180) (2023), sections 2 and 3: how much of reserved
# memory is wasted, measured.
#
# **Next:** [03 · Paged blocks](03_paged_blocks.ipynb). The same batch, in a memory without rows.
