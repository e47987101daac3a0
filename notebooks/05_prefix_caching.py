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
# # 05 · Prefix caching
#
# **At the end your engine computes a beginning that requests share only once, keeps it when they
# are gone, and gives it up only when the memory is needed.**
#
# 60 minutes. It needs the blocks of notebook 03 and the engine of notebook 04; no GPU, and no
# download.

# %% tags=["nbval-ignore-output"]
import random
import traceback
from functools import partial

import torch

from nanoteach.block_manager import BlockManager
from nanoteach.config import EngineConfig
from nanoteach.cost_model import SHAPES, Work, step_cost
from nanoteach.course import exercise, open_notebook, pictures, predict, reveal, show, widgets
from nanoteach.course.pictures import Request
from nanoteach.course.timing import recorded_stages, stage_table, timed, timing_model, where
from nanoteach.hardware import hardware_named, measure
from nanoteach.hub import resolve_model
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.reference import compare, references
from nanoteach.scheduler import Scheduled, Scheduler
from nanoteach.sequence import Sequence, Status
from nanoteach.stages import STAGES, Parts, build_core
from nanoteach.types import SamplingParams, Trace

open_notebook(5)

# %% [markdown]
# ## The waste
#
# A chat service puts the same instructions in front of every question. Here are three people who
# ask such a service, and what the model is given to read for the first of them.

# %%
folder = resolve_model("tiny")
tokenizer = load_tokenizer(folder)
model = load_model(folder, "cpu", torch.float32)
eos = eos_token_ids(folder)


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def chat(*messages: str, system: str = "") -> list[int]:
    """Token ids of a conversation: the user speaks, then the assistant, and so on."""
    turns = [{"role": "system", "content": system}] if system else []
    for i, text in enumerate(messages):
        turns.append({"role": ("user", "assistant")[i % 2], "content": text})
    return encode(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def words(token_ids: list[int]) -> str:
    """Tokens as text in one line."""
    return " ".join(tokenizer.decode(token_ids, skip_special_tokens=True).split())


instructions = "You are a friendly teller of small stories. You tell of animals and of the sea."
animals = ("fox", "bear", "goat")
asked = [chat(f"Tell me a story about a {who}.", system=instructions) for who in animals]
print(tokenizer.decode(asked[0]))

# %% [markdown]
# Stage 4 computes each of the three prompts from its first token to its last. Now count how much of
# this was new. A token's K and V depend on the token and on all before it, and on nothing else. So
# whoever has the same *beginning*, up to and with a token, has the same K and V for it. Count the
# different beginnings:

# %%
computed = sum(len(prompt) for prompt in asked)
beginnings = {tuple(prompt[: i + 1]) for prompt in asked for i in range(len(prompt))}
print(f"{computed} tokens computed, {len(beginnings)} different beginnings")
print(f"{computed - len(beginnings)} tokens computed again, for nothing")

# %% [markdown]
# And each copy takes its own place in memory. This is the pool of stage 4, blocks of 8 tokens,
# after the first step. A, B and C hold 18 blocks. Most of them hold what another block holds as
# well.

# %% tags=["nbval-ignore-output"]
run = pictures.Run(
    [Request(prompt, 20) for prompt in asked], manager=BlockManager, block_size=8, num_blocks=32
)
run.step()
pictures.block_tables(run.pool(), title="stage 4")

# %% [markdown]
# ### Is it really the same?
#
# A claim about K and V can be looked at. `values_of` computes a text in an engine of its own, and
# takes the values V of each token out of the pool. They are those of the last layer, where
# everything before has had its say.


# %%
def engine_of(stage, num_blocks, block_size=8, longest=128, clock=None, trace=None, model=model):
    """A stage of the course, on `tiny` or another model."""
    config = EngineConfig(
        block_size=block_size,
        max_num_seqs=32,
        max_model_len=longest,
        max_num_batched_tokens=4096,
        num_gpu_blocks_override=num_blocks,
    )
    return STAGES[stage - 1].build(Parts(model, config, eos, clock, trace))


def values_of(text: str) -> torch.Tensor:
    """V of each token in the last layer, `[tokens, heads, head_dim]`."""
    core = engine_of(4, num_blocks=16)
    core.generate([encode(text)], SamplingParams(max_tokens=1))
    # The first request of a new engine gets the blocks in order, so its tokens lie in order.
    return core.runner.attention.v[-1].flatten(0, 1)[: len(encode(text))]


def same(one: str, other: str) -> str:
    """For each token that the two texts have at the same place: is its V the same?"""
    pairs = zip(encode(one), encode(other), values_of(one), values_of(other), strict=False)
    return "  ".join(
        f"{tokenizer.decode([a]).strip()}: {'same' if torch.allclose(v, w, atol=1e-4) else 'other'}"
        for a, b, v, w in pairs
        if a == b
    )


print(same("The old fox ran to the river", "The old fox ran to the sea"))
print(same("The old fox ran to the river", "One old fox ran to the river"))

# %% [markdown]
# In the first pair, all is the same up to the word that differs. In the second pair only the first
# word is another, and every V after it is another too, at the same place and for the same token. So
# it is **prefixes** that can be shared: from the first token on, without a hole. The same words
# after another beginning are of no use.
#
# ## Predict
#
# Thirty-two requests arrive together. All begin with the same 1,024 tokens. Each then has a
# question of its own, of 16 to 47 tokens. What do you think?

# %%
to_compute = "32 requests, 1,024 tokens shared: prompt tokens that must be computed"
first_token = "H200, stage {}: the last of the 32 has its first token after"
predict(to_compute, ..., "percent")
predict(first_token.format(4), ..., "ms")
predict(first_token.format(5), ..., "ms")

# %% [markdown]
# The cost model can tell. Without sharing, there are 32 prompts to compute. With sharing there is
# one whole prompt; the other 31 compute their questions only, on top of a history of 1,024.

# %%
qwen, h200 = SHAPES["qwen3-0.6b"], hardware_named("h200")
questions = [16 + i for i in range(32)]
plain = [Work(1024 + n, 0) for n in questions]
shared = [Work(1024 + questions[0], 0)] + [Work(n, 1024) for n in questions[1:]]
for name, work in (("nothing shared", plain), ("prefix shared", shared)):
    cost = step_cost(qwen, work)
    tokens = sum(request.num_new for request in work)
    print(
        f"{name:15} {tokens:6,} tokens, {cost.flops / 1e12:5.2f} TFLOPs, "
        f"{1000 * cost.seconds(h200):5.2f} ms (simulated, H200, limited by {cost.limit(h200)})"
    )
times = [step_cost(qwen, work).seconds(h200) for work in (plain, shared)]
print(f"{times[1] / times[0]:.1%} of the time")
new = [sum(request.num_new for request in work) for work in (plain, shared)]
reveal(to_compute, 100 * new[1] / new[0], "percent")

# %% [markdown]
# 6.0% of the tokens, 6.4% of the time. The questions still attend to the 1,024 tokens before them,
# and that is arithmetic, which no cache saves.
#
# Three things are missing in the engine for this: to **find** a beginning that was computed, to let
# several requests **hold** the same block, and to **keep** blocks that nobody holds, as long as
# there is room.
#
# ## A name for a block
#
# We share whole blocks, because blocks are what tables are made of. To find a block we need a name
# that says what is in it. Not its tokens alone: we just saw that K and V depend on everything
# before. All tokens up to the block's end would do, but they get long: the name of block 64 would
# have 1,024 tokens, and a prompt of *n* blocks would need *n*²/2 blocks' worth of names.
#
# A **chain** is short. The name of a block is a hash of two things: the name of the block before
# it, and its own tokens.
#
# ```
#   tokens   the old fox ran  |  to the river .  |  It was cold to
#
#   names    n0 = hash("",      n1 = hash(n0,      n2 = hash(n1,
#            the old fox ran)   to the river .)    It was cold to)
# ```
#
# By its parent's name, *n2* depends on every token before it. If two requests have the same *n2*,
# they have the same twelve tokens.
#
# ### Exercise: the name
#
# - `parent` is the name of the block before, 32 bytes; for the first block of a prompt it is `b""`.
# - `token_ids` are the block's tokens, whole numbers from 0 to some hundred thousand.
# - Return the name: the 32 bytes that SHA-256 makes of both. `sha256` (of `hashlib`) and `struct`
#   are at hand: `sha256(data).digest()` is 32 bytes long.
#
# How you turn the numbers into bytes is up to you, so long as different tokens give different
# bytes. An example of what must hold, with *n0* for the name of `[1, 2]` at the beginning of a
# prompt:
#
# | block | its name must be |
# |---|---|
# | `[1, 2]` at the beginning | *n0* again |
# | `[2, 1]` at the beginning | another |
# | `[1, 2]` after *n0* | another |
# | `[12]` and `[1, 2]` | two different ones |
#
# Why SHA-256, and not something shorter? If two different beginnings ever got one name, a request
# would go on from a text that is not its own. Somebody may even try to bring that about. With
# SHA-256 nobody has found two such inputs.


# %%
@exercise("nanoteach.prefix_cache.hash_block")
def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """The name of a full block: `parent` is the name of the one before it."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The parent is bytes already. So the tokens must become bytes too, and both be put one after the
# other. Where does one token end and the next begin? Think of 1, 23 and 12, 3.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Give every token the same number of bytes, enough for the largest token. `struct.pack` does that:
# the format "<2q" means two numbers of eight bytes each, and an f-string can fill in the count. A
# separator between decimal numbers would do as well.
#
# </details>

# %%
show("nanoteach.prefix_cache.hash_block")


# %% [markdown]
# Two of the prompts above, in blocks of 8. How many blocks at the beginning have equal names?


# %%
def chain(token_ids: list[int], block_size: int = 8) -> list[bytes]:
    """The names of the full blocks."""
    names = [b""]
    for start in range(0, len(token_ids) // block_size * block_size, block_size):
        names.append(hash_block(names[-1], token_ids[start : start + block_size]))
    return names[1:]


fox_names, bear_names = chain(asked[0]), chain(asked[1])
equal = [a == b for a, b in zip(fox_names, bear_names, strict=True)]
alike = next(i for i, (a, b) in enumerate(zip(*asked[:2], strict=False)) if a != b)
print(f"the first {alike} tokens are the same")
print("names equal:", equal)

# %% [markdown]
# The last full block begins with tokens that are the same, and ends with others. It can't be
# shared: only whole blocks can. With smaller blocks less would be lost, but there would be more of
# them to keep books about. 16 is the usual compromise.
#
# ## Finding the longest prefix
#
# The block manager of stage 5 is a `PrefixCachingBlockManager`. It has what a `BlockManager` has,
# and two dictionaries more:
#
# - `block_of`: from a name to the block that holds its K and V,
# - `name_of`: from a block to its name.
#
# A full block is entered in both by `publish`. From then on others can find it. (You will see
# `publish` below.) It is called for the blocks of a prompt when the prompt is scheduled, and for
# those that fill up with generated tokens when the step is booked.
#
# ### Exercise: the longest prefix
#
# Which blocks of the cache hold the beginning of this request?
#
# - `self.names(seq, n)` gives the names of the first `n` blocks of a request, a list of `n` names.
# - `self.block_of` and `self.block_size` you know.
# - `seq.token_ids` are all its tokens: the prompt, and what it has generated.
# - Return the list of block ids, in the order of the text. Change nothing.
#
# **At most all tokens but one.** The step is there to give a next token. That takes the score of
# the last token that we have, and a score is not in the cache: only K and V are. So one token at
# least must be computed, even where all are known.
#
# An example, blocks of 4. The cache has the tokens 0 to 11 of a text in the blocks 3, 4 and 5.
#
# | the request's tokens | answer |
# |---|---|
# | the first 13 of that text | `[3, 4, 5]`; one token is left to compute |
# | the first 9, then others | `[3, 4]` |
# | other tokens from the first one on | `[]` |
# | the first 12 | `[3, 4]`; with block 5, nothing would be left |


# %%
@exercise("nanoteach.prefix_cache.PrefixCachingBlockManager.longest_prefix")
def longest_prefix(self, seq: Sequence) -> list[int]:
    """The cached blocks that hold the request's first tokens, at most all tokens but one."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two questions. How many names are worth asking for? And when do you stop?
#
# </details>
# <details><summary>Hint 2</summary>
#
# How many whole blocks fit into all tokens but the last? Go through so many names in order, look
# each up, and stop at the first that is not there: what comes after it can't be used.
#
# </details>

# %%
show("nanoteach.prefix_cache.PrefixCachingBlockManager.longest_prefix")

# %% [markdown]
# ### Request F, twice
#
# Request F of the other notebooks has 16 tokens. Send it to stage 5, and when it is done send it
# again. How many of its tokens come out of the cache, with blocks of 4, 8 and 16?

# %%
fox = chat("Tell me a story about a fox.")
print(len(fox), "tokens:", tokenizer.decode(fox))
for block_size in (4, 8, 16):
    core = engine_of(5, num_blocks=256 // block_size, block_size=block_size)
    first = core.generate([fox], SamplingParams(max_tokens=60))
    before = core.scheduler.num_prefix_hits
    second = core.generate([fox], SamplingParams(max_tokens=60))
    found = core.scheduler.num_prefix_hits - before
    answer = "the same answer" if first == second else "ANOTHER ANSWER"
    print(f"blocks of {block_size:2}: {found:2} tokens found, {16 - found:2} computed, {answer}")

# %% [markdown]
# With blocks of 16, F is one full block, and nothing is found: its only block would leave nothing
# to compute. That is no mistake, it is the price of whole blocks.
#
# So the second F computes its first 16 tokens again, into another block. Then two blocks hold the
# same, and there is one name for both. Which of them bears it?

# %%
show("nanoteach.prefix_cache.PrefixCachingBlockManager.publish")

# %% [markdown]
# A name that another block bears already stays with that block. The second block gets none. So the
# number of names does not grow when F comes again:

# %%
core = engine_of(5, num_blocks=16, block_size=16)
for time_of_f in ("first", "second"):
    core.generate([fox], SamplingParams(max_tokens=60))
    print(f"after the {time_of_f} F: {core.scheduler.block_manager.num_cached} blocks have a name")

# %% [markdown]
# A prompt of whole blocks is a case that engines get wrong. nano-vLLM took all blocks, and [a
# prompt that was cached whole, to its last
# block,](https://github.com/GeeeekExplorer/nano-vllm/issues/144) (second part) became a query of
# length 0, at which the attention kernel gave up. vLLM takes all tokens but one, as you do, and
# [computes the last block again](https://github.com/vllm-project/vllm/pull/11186).
#
# What F said, both times:

# %%
print(tokenizer.decode(first[0]))

# %% [markdown]
# ## One block, several holders
#
# The block manager of notebook 03 has a number for each block, in `ref_counts`: how many hold it.
# You have not needed it, since it was 0 or 1. Now it may be any number, and a block is free again
# when the *last* holder lets go. `free` does this
# already: it takes 1 away from the count of each block, and a block that is at 0 joins the free
# ones.
#
# ### Exercise: match a prefix
#
# A request is about to be admitted. It holds nothing yet. Let it hold the blocks that are there.
#
# - `owner` is the request. `self.longest_prefix(owner)` says which blocks.
# - Afterwards `owner.block_table` is the list of these blocks. Each is counted once more in
#   `self.ref_counts`, and none is in `self.free_blocks` (an `OrderedDict`, whose keys are the free
#   blocks).
# - Return how many **tokens** they hold.
#
# Two kinds of block may be found. Another request may be running with it: its count is 1 or more.
# Or nobody holds it any more: its count is 0, it is among the free blocks, and its K and V are
# still there. An example, blocks of 4: the request finds block 3, which two others hold, and block
# 8, which is free.
#
# | | before | after |
# |---|---|---|
# | `ref_counts` of 3 and 8 | 2 and 0 | 3 and 1 |
# | `free_blocks` | 6, 8, 7 | 6, 7 |
# | `owner.block_table` | `[]` | `[3, 8]` |
# | returned | | 8 tokens |


# %%
@exercise("nanoteach.prefix_cache.PrefixCachingBlockManager.match_prefix")
def match_prefix(self, owner) -> int:
    """Hold the blocks that already have the owner's first tokens; how many tokens they have."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# For each block, two things may change: its count, always; its place among the free ones,
# sometimes.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `del` complains about a key that is not there. A dictionary's `pop` with a second argument does
# not. And two requests may already hold the block, so the count is not simply 1 afterwards.
#
# </details>

# %%
show("nanoteach.prefix_cache.PrefixCachingBlockManager.match_prefix")

# %% [markdown]
# The three requests of the beginning again, on this block manager. The left part is the pool, with
# the number of holders where there is more than one. The right part shows the tables: they lead to
# the same blocks at first, in grey, and then each goes its own way, in its own colour.

# %% tags=["nbval-ignore-output"]
run = pictures.Run(
    [Request(prompt, 20) for prompt in asked],
    manager=PrefixCachingBlockManager,
    block_size=8,
    num_blocks=32,
)
run.step()
pictures.block_tables(run.pool(), highlight="B", title="stage 5")

# %%
for name, seq in run.sequences.items():
    holders = [run.manager.ref_counts[block] for block in seq.block_table]
    print(f"{name}: blocks {seq.block_table}, holders {holders}")
print(f"computed: {run.trace.of_kind('step')[0].data}")

# %% [markdown]
# The same blocks as a tree. From the left to the right you read a text; where two requests part, so
# does the tree. Every path from the left is somebody's beginning. (Blocks that are not full have no
# name, and are not shown.)

# %% tags=["nbval-ignore-output"]
pictures.prefix_tree(pictures.prefix_nodes(run.manager, run.sequences.values()), words)

# %% [markdown]
# No request ever writes into a block that it shares. A shared block is full, and a request writes
# only behind its last full block. So nothing must be copied, and there are no locks.
#
# ### Together in one step
#
# Look at the counts once more. All three requests were admitted in the *same* step. B computed only
# what A does not have. But when B was scheduled, A had not computed anything yet.
#
# It works because of the order of things inside a step. Every layer first stores K and V of **all**
# new tokens of the step, and then lets every token attend. In layer 1, when B looks at the shared
# block, A's tokens have put their K and V of layer 1 there; in layer 2 it is the same, and so on. A
# name may be given out before its block is filled, as long as it is filled before anybody reads it.
#
# It is a promise, though. If the step fails, the promise is broken. So `publish` notes which blocks
# it named, `begin_step` begins a new list, and after a failure `take_back` withdraws all that is on
# it:

# %%
core = engine_of(5, num_blocks=64)
execute = core.runner.execute


def fails(scheduled: list[Scheduled]) -> list[int | None]:
    """As if the GPU had no memory left."""
    raise MemoryError


core.add_request("A", asked[0], SamplingParams(max_tokens=4))
core.runner.execute = fails
try:
    core.step()
except MemoryError:
    print(f"the step failed: {core.scheduler.block_manager.num_cached} blocks can be found")
core.runner.execute = execute
core.step()
print(f"tried again:     {core.scheduler.block_manager.num_cached} blocks can be found")

# %% [markdown]
# nano-vLLM's users have discussed [both](https://github.com/GeeeekExplorer/nano-vllm/issues/208)
# [sides](https://github.com/GeeeekExplorer/nano-vllm/issues/219) of this: whether a block may be
# found before it is filled, and that requests of one step each compute a copy if it may not.
#
# ## Keeping what nobody holds
#
# A, B and C are done. Their blocks are free. But free does not mean empty: the K and V are still
# there, and the names are, too. As long as no one needs the memory, the next request can find them.
# So a block has three states:
#
# | | holders | has a name | |
# |---|---|---|---|
# | held | 1 or more | if it is full | |
# | free, cached | 0 | yes | can be found, and can be handed out |
# | free | 0 | no | can be handed out |
#
# Which free block is handed out first? One without a name: nobody can ask for it. After those, the
# one that has been free for the longest time, the *least recently used*. `put_free_block` keeps the
# free blocks in this order, so the next one to use is always the first:

# %%
show("nanoteach.prefix_cache.PrefixCachingBlockManager.put_free_block")

# %% [markdown]
# And a request lets go of its blocks from the last one to the first. Let D be done, in a pool of 8
# blocks, and look at the line:

# %%
done = pictures.traced_run(
    [Request(asked[0], 1, name="D")],
    manager=PrefixCachingBlockManager,
    block_size=8,
    num_blocks=8,
)
print("D held        ", done.trace.of_kind("taken")[0].data)
print("free, in order", list(done.manager.free_blocks))
print("without a name", [b for b in done.manager.free_blocks if b not in done.manager.name_of])

# %% [markdown]
# Blocks without a name come first, among them D's last one, which was not full. Then the end of D's
# text, then its beginning. If the beginning went first, the rest would be useless, because a prefix
# has no holes. And a beginning is what others are most likely to share.
#
# ### Exercise: hand out a block
#
# Now write what happens when the memory *is* needed. A block is handed out, and its K and V will be
# overwritten.
#
# - `super().take_free_block()` takes the first of the free blocks, sets its count to 1, and returns
#   it.
# - The block may have a name, in `self.name_of` and `self.block_of`. From now on nobody may find
#   it.
# - Return the block.
#
# An example: the free blocks are 4, 5 and 3, and `name_of` has 5 and 3. The first call returns 4,
# which had none. The second returns 5, and afterwards only 3 has a name.


# %%
@exercise("nanoteach.prefix_cache.PrefixCachingBlockManager.take_free_block")
def take_free_block(self) -> int:
    """The least recently used free block; if it had a name, nobody finds it any more."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A name stands in two dictionaries. What would happen if it stayed in `block_of`? The next request
# with that beginning would be given a block in which somebody else's K and V are.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Look the block up in `name_of` to get its name; the name is the key in `block_of`. Blocks without
# a name are in neither.
#
# </details>

# %%
show("nanoteach.prefix_cache.PrefixCachingBlockManager.take_free_block")
show("nanoteach.prefix_cache.PrefixCachingBlockManager.forget")

# %% [markdown]
# The fox is asked for first, then the bear, then comes a text that has nothing to do with them, and
# then the fox again. Each is done before the next comes. How much does the last one find, in a pool
# of 12 blocks, and in one of 8?


# %%
def one_after_another(num_blocks: int, *prompts: list[int]) -> pictures.Run:
    """Each request comes when the one before is done."""
    run = pictures.Run(
        manager=PrefixCachingBlockManager, block_size=8, num_blocks=num_blocks, max_model_len=64
    )
    for prompt in prompts:
        run.add(Request(prompt, 1))
        run.finish()
    return run


other = encode(
    "There was once a mouse who lived near the river. One day the mouse went to the sea."
)
for num_blocks in (12, 8):
    run = one_after_another(num_blocks, asked[0], asked[1], other, asked[0])
    last = run.sequences["D"]
    print(
        f"{num_blocks:2} blocks: the fox again, "
        f"{last.num_cached_tokens} of {last.num_prompt_tokens} tokens found"
    )

# %% [markdown]
# In the small pool one block was lost. Here is what was cached there after the third request:

# %% tags=["nbval-ignore-output"]
run = one_after_another(8, asked[0], asked[1], other)
pictures.prefix_tree(pictures.prefix_nodes(run.manager, run.sequences.values()), words)

# %% [markdown]
# The mouse needed three blocks. Two had no name. The third was the least recently used one with a
# name, the end of the fox's question. The beginning that fox and bear have in common is still
# there, and it will be the last of their text to go: places 2 to 5, its end first.
#
# Try it. Send prompts that begin alike, and watch what they share; keep some running, finish
# others; send until the pool is full, and see which block is lost. Can you lose the beginning that
# all share? (Only when nothing else is left.)

# %% tags=["nbval-ignore-output"]
widgets.prefix_cache_explorer()

# %% [markdown]
# ## Plug it in
#
# Stage 5 is stage 4 with this block manager. Nothing else is exchanged: the scheduler asks
# `match_prefix` when it admits a request, and a plain pool answers 0.
#
# A conversation shows best what it is good for. Every turn sends all that was said before. Request
# F again, and what one might say next:

# %%
core = engine_of(5, num_blocks=128, longest=512)
said: list[str] = []
for text in ("Tell me a story about a fox.", "Tell me another story.", "What is 3 plus 4?"):
    prompt = chat(*said, text)
    seq = core.add_request(text, prompt, SamplingParams(max_tokens=80))
    while core.has_unfinished_requests():
        core.step()
    reply = tokenizer.decode(seq.output_token_ids, skip_special_tokens=True)
    said += [text, reply]
    print(f"{seq.num_cached_tokens:3} of {len(prompt):3} prompt tokens found for: {text}")

# %% [markdown]
# The second turn finds not only the first question. It finds the first *answer* as well: generated
# tokens fill blocks too, and these get names when they are full.
#
# ## Prove it
#
# Sharing must not change a token. Twenty-four ragged requests, with request F twice, and many that
# begin alike. One is exactly five blocks long, and in the large pool all five are cached when it
# comes. The pools have 200, 40 and 20 blocks. In the small ones, blocks lose their names all the
# time, and requests are preempted and come back. `check` walks through all blocks and tables after
# the run.

# %%
draw = random.Random(5)
starts = ["There was once a fox who", "There was once a bear who lived near the river and", "The"]
ends = [" had a friend", " was afraid of the dark", " sang", " went to the sea", " was very small"]
texts = [start + end for start in starts for end in ends]
prompts = [fox, *asked, *(encode(text) for text in texts), other, *asked[:2], asked[0][:40], fox]
params = [SamplingParams(max_tokens=60)]
params += [SamplingParams(max_tokens=draw.randint(4, 28), ignore_eos=True) for _ in prompts[2:]]
params += [SamplingParams(max_tokens=60)]
expected = references(folder, prompts, params, eos)

with_cache = {}
for num_blocks in (200, 40, 20):
    core = engine_of(5, num_blocks)
    outcome = compare(expected, core.generate(prompts, params))
    scheduler = core.scheduler
    with_cache[num_blocks] = core
    print(
        f"{num_blocks:3} blocks, {scheduler.num_prefix_hits:4} tokens found, "
        f"{scheduler.num_preemptions} preemptions: {outcome}, problems: {core.check()}"
    )

# %% [markdown]
# Not a token differs. But two numbers are odd. The pool of 40 blocks found more than the pool of
# 200. And are so many preemptions not more than stage 4 had? Beside each other; "again" is what was
# computed beyond the pool of 200, where nobody is preempted:

# %%
least = {}
for num_blocks in (200, 40, 20):
    without = engine_of(4, num_blocks)
    without.generate(prompts, params)
    for stage, core in ((4, without), (5, with_cache[num_blocks])):
        again = core.num_computed_tokens - least.setdefault(stage, core.num_computed_tokens)
        preempted = core.scheduler.num_preemptions
        each = f", {again / preempted:4.1f} each" if preempted else ""
        steps = sum(core.batch_sizes.values())
        rows = sum(size * times for size, times in core.batch_sizes.items())
        print(
            f"{num_blocks:3} blocks, stage {stage}: {rows / steps:.1f} requests a step, "
            f"{steps:3} steps, {preempted:2} preemptions, {again:3} tokens again{each}"
        )

# %% [markdown]
# A preemption has become cheaper: about half the tokens each time. A request that comes back finds
# its own blocks, if they are still there. That is why the pool of 40 found more than that of 200,
# where nobody ever comes back.
#
# But there are more preemptions. Where requests share blocks, more of them fit into the pool at
# once. All of them grow, and so the blocks run out more often. It pays all the same: the work is
# done in fewer steps.
#
# ## Measure it
#
# Now the thirty-two requests of the prediction, for real, on `tiny`: 1,024 tokens that all share,
# and a question of 16 to 47 tokens each. They arrive together.

# %%
rules = "".join(f"Rule {i}: a story has {i} animals, and number {i} is kind. " for i in range(80))
rules_ids = encode(rules)[:1024]
tails = [encode(f" Request {i}: tell a story about a fox and a bear. " * 3) for i in range(32)]
thirty_two = [rules_ids + tail[:n] for tail, n in zip(tails, questions, strict=True)]
short = SamplingParams(max_tokens=4, ignore_eos=True)

core = engine_of(5, num_blocks=512, block_size=16, longest=1152)
outputs = core.generate(thirty_two, short)
num_prompt = sum(map(len, thirty_two))
num_computed = num_prompt - core.scheduler.num_prefix_hits
print(f"{num_prompt:,} prompt tokens, {num_computed:,} computed: {num_computed / num_prompt:.1%}")

# %% [markdown]
# It is what the cost model was told: 2,032 tokens. The shared part fills 64 blocks of 16 exactly.
# And the answers are right, here for three of the thirty-two:

# %%
some = [0, 16, 31]
long_ones = references(folder, [thirty_two[i] for i in some], short, eos)
print(compare(long_ones, [outputs[i] for i in some]))

# %% [markdown]
# The whole batch on the virtual clock, through the real scheduler. Stage 4 has a budget of 16,384
# tokens a step, so it takes three steps for the prompts. Stage 5 takes one.

# %%
tokens_of = [Request([*range(1024), *range(5000 + 99 * i, 5000 + 99 * i + n)], 32)
             for i, n in enumerate(questions)]  # fmt: skip
last = {}
for stage, manager in ((4, BlockManager), (5, PrefixCachingBlockManager)):
    run = pictures.traced_run(tokens_of, manager=manager)
    firsts = [times[0] for times in pictures.token_times(run.steps).values()]
    last[stage] = 1000 * max(firsts)
    print(
        f"stage {stage}: first tokens after {1000 * min(firsts):5.2f} to {last[stage]:5.2f} ms, "
        f"all done after {1000 * run.clock.now():.1f} ms ({run.clock.label})"
    )
for stage, milliseconds in last.items():
    reveal(first_token.format(stage), milliseconds, "ms")

# %% [markdown]
# The last user waited 43.07 ms for a first token, and now 2.75: 40 ms less. The end comes 40 ms
# earlier too. But the end is only halved, because decoding costs as before: each request still
# reads its own history, shared or not.
#
# And on this machine? Stage 4 would take long for all thirty-two, so it gets three of them. To
# compare, each time is divided by the number of requests. The prediction is the cost model's, with
# the ceilings of this machine.

# %%
live = timing_model()

# %% tags=["nbval-ignore-output"]
here = measure(live.device, live.dtype)
rungs = []
for name, stage, number in (("4 continuous", 4, 3), ("5 prefix cache", 5, 32)):
    make = partial(engine_of, stage, 512, 16, 1152, model=live)
    rung = timed(name, live, here, make, thirty_two[:number], short)
    rungs.append(rung)
    measured, bound = (4000 / speed for speed in (rung.measured, rung.predicted))
    print(f"{name:14} {measured:7.2f} ms a request, at least {bound:7.2f}")
print(f"gain: measured {rungs[1].measured / rungs[0].measured:.1f} times, ", end="")
print(f"predicted {rungs[1].predicted / rungs[0].predicted:.1f} times")

# %% [markdown]
# If the measured gain is smaller than the predicted one, ask what stage 5 has left to do: many
# small pieces of attention and many requests' books, where Python takes its time.
#
# Both stages as recorded on an H200, in the 24 requests of notebook 01, eight at a time. Their
# prompts are drawn at random, so that no two begin alike, and the cache was switched off:

# %%
on_h200 = recorded_stages(4, 5)
print(where("stages_h200"))
print(stage_table(on_h200))

# %% tags=["nbval-ignore-output"]
panels = {"1,024 shared, here": rungs, "an H200, nothing shared": [s.rung for s in on_h200]}
pictures.ladder(panels)

# %% [markdown]
# The prediction is the same for both, and so it should be. With its cache off, stage 5 is made of
# stage 4's very parts, and what differs on the right is how one run differs from another. So the
# gain of this stage is no property of the machine. It depends on what people send, and on the left
# they send much that is the same.
#
# ## Whose prefix is it?
#
# A cache that many people share tells them something about each other. If your prompt is answered
# faster than it should be, somebody has sent the same beginning before. Guess a beginning, measure
# the time to the first token, and you know whether you guessed right; block by block, you can go on
# guessing. [This has been done](https://arxiv.org/abs/2411.18191), and vLLM has [a security
# advisory](https://github.com/vllm-project/vllm/security/advisories/GHSA-4qjh-9fv9-r85r) about it.
#
# The remedy is small. A request may carry a **salt**, a secret word of its user or company. It goes
# into the parent of the first block, and so, down the chain, into every name. Who has another salt
# finds nothing. vLLM has the [same parameter](https://github.com/vllm-project/vllm/pull/17045),
# `cache_salt`.

# %%
core = engine_of(5, num_blocks=64)
for salt in (None, None, "red", "blue", "red"):
    params_of = SamplingParams(max_tokens=4, cache_salt=salt)
    seq = core.add_request("R", asked[0], params_of)
    while core.has_unfinished_requests():
        core.step()
    print(f"salt {salt!s:5} {seq.num_cached_tokens:2} of {seq.num_prompt_tokens} tokens found")

# %% [markdown]
# The salt costs what it protects: users with different salts compute the same instructions each for
# themselves.
#
# ## Bug clinic
#
# A colleague has put prefix caching into a scheduler that worked well without it. This is the
# result: `admit`, shortened a little, and with a line of its own for the trace.
#
# You know from notebook 04 which rule it breaks. What it looks like from outside is another
# question. Before you go on, say: which requests will go wrong? Will their answers be wrong, or
# will something raise, and where?


# %%
class HastyScheduler(Scheduler):
    """As it came from the colleague."""

    def admit(self, budget: int) -> list[Scheduled]:
        """Move requests from the queue to the running ones."""
        scheduled: list[Scheduled] = []
        while self.waiting and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            num_new = self.chunk(seq.num_missing_tokens, budget)
            seq.num_computed_tokens = self.block_manager.match_prefix(seq)
            if num_new == 0 or not self.block_manager.allocate(seq, len(seq.token_ids)):
                self.release(seq)
                break
            self.trace.add(
                "admitted", seq.request_id, (len(seq.token_ids), seq.num_computed_tokens, num_new)
            )
            self.waiting.popleft()
            self.running.append(seq)
            seq.status = Status.RUNNING
            self.publish_prompt(seq, num_new)
            scheduled.append(Scheduled(seq, num_new))
            budget -= num_new
        return scheduled


def try_scheduler(scheduler: type[Scheduler], *prompts: list[int]) -> None:
    """Send prompts one after the other, and say what happens."""
    config = EngineConfig(
        block_size=8, max_model_len=128, max_num_batched_tokens=128, num_gpu_blocks_override=64
    )
    trace = Trace()
    core = build_core(Parts(model, config, eos, trace=trace), PrefixCachingBlockManager, scheduler)
    for prompt, right in zip(prompts, references(folder, prompts, short), strict=True):
        try:
            print(compare([right], core.generate([prompt], short)))
        except IndexError as error:
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            where = [name for name in frames if name.isidentifier()][-1]
            print(f"IndexError in {where}: {error}")
    for event in trace.of_kind("admitted"):
        print("  admitted: {} tokens, {} in the cache, {} to compute".format(*event.data))


print("three that have nothing in common")
try_scheduler(HastyScheduler, fox, other, encode("What is 27 plus 48?"))

# %% [markdown]
# All is well. Now two of the three who asked about animals:

# %%
try_scheduler(HastyScheduler, asked[0], asked[1])

# %% [markdown]
# The error is raised in `slot_mapping`, which looks up where each new token is stored. It is right,
# and so are the tables. Which number in the trace can't be, and by how much is it wrong? In which
# cases does it do harm? And `admit` uses `num_new` for two things more than its result: what goes
# wrong there, though nothing raises?
#
# <details><summary>Diagnosis</summary>
#
# The second line of the trace can't be: what is in the cache and what is to be computed must
# together be the tokens of the request. Here they are more, and the surplus is exactly what was
# found. `num_new` was counted before the prefix was matched, when nothing was computed yet, and
# kept afterwards. So the runner stores tokens behind the request's end, where the table has no more
# blocks.
#
# In `admit` the same number goes to `publish_prompt`, which offers blocks that this step does not
# fill, and into the budget, from which too much is taken. In the result it is only the last to be
# wrong, and the first to be noticed.
#
# It does harm at every hit, and only then. Without hits the count happens to be right, and that is
# why tests with prompts that have nothing in common are green.
#
# nano-vLLM had this fault: [a report](https://github.com/GeeeekExplorer/nano-vllm/pull/210), with
# the same sum (256 found, and 465 of 465 still to compute), and [a
# mend](https://github.com/GeeeekExplorer/nano-vllm/pull/207). It showed itself as a list index out
# of range, far from its cause.
#
# </details>
#
# Now mend it. Copy `admit` from above into this class, and put right what is wrong. You are done
# when both requests have transformers' tokens, and in every line of the trace the last two numbers
# add up to the first. (Mending the result alone gives the right tokens, and leaves the rest.)


# %%
class Mended(HastyScheduler):
    """Yours."""


try_scheduler(Mended, asked[0], asked[1])

# %% [markdown]
# <details><summary>A mend</summary>
#
# ```python
# seq = self.waiting[0]
# seq.num_computed_tokens = self.block_manager.match_prefix(seq)
# num_new = self.chunk(seq.num_missing_tokens, budget)
# ```
#
# The prefix first. Then `num_missing_tokens` is what is really left, and only that counts against
# the budget. There is a second gain: a budget that counts tokens which nobody computes lets in too
# few requests. Early vLLM [did that](https://github.com/vllm-project/vllm/pull/7753) for a while,
# and [counted only the uncached ones](https://github.com/vllm-project/vllm/pull/10128) later.
#
# </details>
#
# The package's scheduler does it in this order:

# %%
try_scheduler(Scheduler, asked[0], asked[1])

# %% [markdown]
# ## What moved
#
# Beginnings are computed once. What is left of a prompt is what nobody has sent before. Three
# things have not changed:
#
# - **Decoding reads each history for each request.** Thirty-two requests share 64 blocks in memory,
#   but attention reads them thirty-two times in every step. Kernels exist that read a shared prefix
#   once ([Hydragen](https://arxiv.org/abs/2402.05099)); we do not have one.
# - **A hit depends on where a request goes.** With several machines, each has a cache of its own,
#   and whoever distributes the requests should know them.
# - **A long prompt that nobody has sent before still stops everybody else.** All of it is computed
#   in one step, while those who decode wait. That is notebook 06.
#
# ### Where others do this
#
# - nano-vLLM,
#   [nanovllm/engine/block_manager.py](https://github.com/GeeeekExplorer/nano-vllm/blob/cde3fc22c2694ba8052f7df0b5e05ef7e10c8603/nanovllm/engine/block_manager.py):
#   the same chain, with xxhash of 64 bits; because that is short, it also compares the tokens of a
#   block that it finds. Blocks have 256 tokens.
# - vLLM 0.14.0: the chain is in
#   [vllm/v1/core/kv_cache_utils.py](https://github.com/vllm-project/vllm/blob/v0.14.0/vllm/v1/core/kv_cache_utils.py)
#   (where images and adapters go into the hash as well, since K and V depend on them); "all tokens
#   but one" in
#   [kv_cache_manager.py](https://github.com/vllm-project/vllm/blob/v0.14.0/vllm/v1/core/kv_cache_manager.py);
#   the order of the free blocks in
#   [block_pool.py](https://github.com/vllm-project/vllm/blob/v0.14.0/vllm/v1/core/block_pool.py).
# - SGLang keeps the tree itself in place of hashes, a radix tree, and can share to the token.
#
# ### To read
#
# - Zheng et al., [SGLang](https://arxiv.org/abs/2312.07104) (2023), section 3: RadixAttention, the
#   tree of prefixes, and an order of requests that makes hits likely.
# - Kwon et al., [PagedAttention](https://arxiv.org/abs/2309.06180) (2023), section 4.4: sharing
#   blocks, and what a reference count is for.
# - Song et al., [The Early Bird Catches the Leak](https://arxiv.org/abs/2409.20002) (2024), and Gu
#   et al., [Auditing Prompt Caching in Language Model APIs](https://arxiv.org/abs/2502.07776)
#   (2025): what a shared cache gives away.
#
# **Next:** [06 · Chunked prefill](06_chunked_prefill.ipynb): nobody waits while a long prompt is
# read.
