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
# # 04 · Continuous batching
#
# **At the end your engine takes in a request at any step, lets it go at the step in which it is
# done, and when memory runs out, sets one aside without changing a single token.**
#
# 75 minutes. It needs the cost model of notebook 00 and the pages of notebook 03; no GPU, and no
# download.

# %% tags=["nbval-ignore-output"]
import copy
import random
import statistics
from functools import partial
from itertools import pairwise

import torch

from nanoteach.config import EngineConfig
from nanoteach.course import exercise, open_notebook, pictures, predict, reveal, show, widgets
from nanoteach.course.pictures import Request
from nanoteach.course.timing import recorded_stages, stage_table, timed, timing_model, where
from nanoteach.hardware import measure
from nanoteach.hub import resolve_model
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.model_runner import ModelRunner, PackedBatch
from nanoteach.reference import compare, references
from nanoteach.scheduler import Scheduled
from nanoteach.sequence import Sequence
from nanoteach.stages import STAGES, Parts
from nanoteach.types import SamplingParams, Trace

open_notebook(4)

# %% [markdown]
# ## The waste
#
# The pages of notebook 03 let more requests into a batch. But the batch is still *static*: its
# requests start together, and it ends when the longest of them ends.
#
# Eight people ask. Each prompt has 5 tokens. The answers have 10, 20, 50, 100, 40, 60, 30 and 50.
# The machine has four slots, so the first four requests are one batch, and the other four the
# next. Here is what each slot does. A letter is two steps of a request; a dot is two steps in
# which the slot is held by somebody who is done already.

# %%
lengths = [10, 20, 50, 100, 40, 60, 30, 50]
requests = [Request(5, length) for length in lengths]
static = pictures.static_run(requests, batch_size=4)
static_stays = pictures.static_stays(static.steps, lengths)

for slot in range(4):
    line = ""
    for stay in static_stays:
        if stay.slot == slot:
            held = stay.last - stay.first + 1
            line += stay.name * (len(stay.working) // 2)
            line += "." * ((held - len(stay.working)) // 2)
    print(f"slot {slot}  {line}")
used = pictures.share_working(static_stays)
print(f"{len(static.steps)} steps; a slot works {used:.0%} of the time")

# %% [markdown]
# A is done after 10 steps and holds its slot for 90 more. E could have had it. Instead E waits:
# its first token comes in step 101.
#
# Nobody can choose better batches, because nobody knows how long an answer will be. The model
# decides that, one token at a time.
#
# The other way is to decide anew **at every step** who is in the batch. When A is done, E takes
# its slot in the very next step. This is *continuous batching*.
#
# ## Predict
#
# The eight answers have 360 tokens together. The second question is about *ragged* requests, whose
# prompts and answers have many different lengths. Say what you think, before you go on.

# %%
all_done = "eight requests, four slots, each free slot refilled at once: all eight done after"
gain = "H200, 128 ragged requests in 32 slots: how many times the static rate"
predict(all_done, ..., "steps")
predict(gain, ..., "times")

# %% [markdown]
# A lower bound needs no engine. A step gives each of four slots at most one token, so 360 tokens
# need at least 90 steps. The static batches took 160.
#
# For the second number the cost model must look at a whole run. 128 requests, with prompts of 20
# to 200 tokens and answers of 10 to 400, in 32 slots, on the virtual clock of notebook 00, an
# H200's:

# %%
draw = random.Random(0)
many = [Request(draw.randint(20, 200), draw.randint(10, 400)) for _ in range(128)]
num_outputs = sum(request.max_tokens for request in many)
runs = {
    "static": pictures.static_run(many, batch_size=32),
    "continuous": pictures.traced_run(many, max_num_seqs=32),
}
rates = {}
for name, run in runs.items():
    rates[name] = num_outputs / run.steps[-1].end
    print(f"{name:10} {len(run.steps):5} steps, {rates[name]:6,.0f} tokens/s (simulated, H200)")
reveal(gain, rates["continuous"] / rates["static"], "times")

# %% [markdown]
# About one and a half times the rate. And this is with everybody there from the beginning. Where
# requests come one by one, as they do in real life, a static batch also makes each newcomer wait
# for the batch to end.
#
# Here is the small run again, and below it what you are about to build.

# %% tags=["nbval-ignore-output"]
continuous = pictures.traced_run(requests, max_num_seqs=4)
pictures.slot_occupancy(static_stays, pictures.continuous_stays(continuous.trace))

# %%
reveal(all_done, len(continuous.steps), "steps")

# %% [markdown]
# E starts in step 11, not 101. 104 steps instead of 160, where 90 is the least possible.
#
# D alone needs 100 steps. In four more it waits, while the prompts of E, F, G and H are computed:
# 100 + 4. These are the thin hatched stripes. Keep them in mind; notebook 06 makes them go away.
#
# What must change in the engine? Three things, and they make four exercises:
#
# 1. A step must be able to compute **anything**: whole prompts of different lengths, or one token
#    of each of many requests. That is packing.
# 2. Somebody must **decide**, before every step, who comes in, and after it, who leaves. That is
#    the scheduler.
# 3. Requests grow while they run, so one day **the blocks run out**. Then somebody must give way.
#
# ## One request, one number
#
# First the idea that carries all the rest. A request is its tokens, and one number: how many of
# them are computed, which is to say, have their K/V in the cache. In the engine it is a
# `Sequence`, with `token_ids` and `num_computed_tokens`.
#
# Take a prompt of five tokens, and follow it by hand.

# %%
seq = Sequence("by hand", [11, 12, 13, 14, 15], SamplingParams(max_tokens=3))
print(f"new:            {len(seq.token_ids)} tokens, {seq.num_missing_tokens} missing")

seq.num_computed_tokens = 5  # a step has computed all of them ...
seq.token_ids.append(21)  # ... and sampled a sixth
print(f"after its 1st:  {len(seq.token_ids)} tokens, {seq.num_missing_tokens} missing")

seq.num_computed_tokens = 6
seq.token_ids.append(22)
print(f"after its 2nd:  {len(seq.token_ids)} tokens, {seq.num_missing_tokens} missing")

# %% [markdown]
# Look at the last two lines: one token is always missing. **The token that was sampled last has no
# K/V yet.** It came out of the model; it has not been in. It is the input of the next step. Many
# bugs in real engines come from forgetting this.
#
# So a *prefill* is a request with many missing tokens, and a *decode* is a request with one. There
# is no other difference. Nothing in the engine says "this is a prefill".
#
# The picture shows one request in five situations. You know the first two. You will build the
# last in this notebook; the other two come in notebooks 05 and 06, and they need no new idea.

# %% tags=["nbval-ignore-output"]
pictures.one_request(pictures.request_moments())

# %% [markdown]
# ## Packing
#
# What a step computes is a list of `Scheduled`: pairs of a request `seq` and a number `num_new`.
# It means: compute the next `num_new` tokens of this request. "Next" begins where
# `num_computed_tokens` ends.
#
# The model wants tensors. A batch of rows, padded to the longest, would compute padding. So we
# *pack*: we write the new tokens of all requests one after the other, `[num_tokens]`. Norms and
# matrix products treat each token by itself, so they never notice. Attention must know where one
# request ends and the next begins. Here are three prompts of 128, 256 and 64 tokens:

# %% tags=["nbval-ignore-output"]
three = pictures.traced_run([Request(128, 1), Request(256, 1), Request(64, 1)])
pictures.packed_prefill(three.runner.batches[0].cu_seqlens, three.steps[0].names)

# %% [markdown]
# Attention costs 128² + 256² + 64², not 448²: nobody looks at another's tokens.
#
# Write `pack`. It returns a `PackedBatch` of four lists of whole numbers:
#
# - `input_ids`, `[num_tokens]`: the new tokens of the first request, then of the second, ...
# - `positions`, `[num_tokens]`: for each new token, its place in *its own request*, which begins at
#   0. RoPE needs it.
# - `cu_seqlens`, `[num_requests + 1]`: the cumulative lengths. Request i has the tokens from
#   `cu_seqlens[i]` up to, and without, `cu_seqlens[i + 1]`.
# - `logit_indices`: which of the packed tokens need scores: the last new token of each request that
#   samples in this step. A request samples if all its tokens are computed after the step;
#   `part.gives_token` says so, for each `part` of the list.
#
# Change no request: `num_computed_tokens` grows after the step, elsewhere.
#
# An example with one of each kind. R is new. S has seven tokens, six computed. T has six, two
# computed, and gets only three more in this step, so one stays missing and T samples nothing.
#
# | request | token_ids | computed | num_new | gives a token |
# |---|---|---|---|---|
# | R | 50 51 52 53 54 | 0 | 5 | yes |
# | S | 60 61 62 63 64 65 66 | 6 | 1 | yes |
# | T | 70 71 72 73 74 75 | 2 | 3 | no |
#
# ```
# input_ids      50 51 52 53 54 | 66 | 72 73 74
# positions       0  1  2  3  4 |  6 |  2  3  4
# cu_seqlens     0, 5, 6, 9
# logit_indices  4, 5
# ```


# %%
@exercise("nanoteach.model_runner.pack")
def pack(scheduled: list[Scheduled]) -> PackedBatch:
    """Lay out a step's new tokens."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Go through the requests once, and let the four lists grow. Each request begins at
# `seq.num_computed_tokens`. Where does it end?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Tokens and positions are the same range, once as a slice of `seq.token_ids` and once as a
# `range`. `cu_seqlens` begins with 0, before any request. After each request, the length of what
# is packed so far is both the next boundary and, less one, the index of the request's last token.
#
# </details>

# %%
show("nanoteach.model_runner.pack")

# %%
params = SamplingParams(max_tokens=4)
r = Sequence("R", [50, 51, 52, 53, 54], params)
s = Sequence("S", [60, 61, 62, 63, 64, 65, 66], params, num_computed_tokens=6)
t = Sequence("T", [70, 71, 72, 73, 74, 75], params, num_computed_tokens=2)
batch = pack([Scheduled(r, 5), Scheduled(s, 1), Scheduled(t, 3)])
print("input_ids    ", batch.input_ids)
print("positions    ", batch.positions)
print("cu_seqlens   ", batch.cu_seqlens)
print("logit_indices", batch.logit_indices)

# %% [markdown]
# A prompt, a decode and a piece of a prompt, in one batch of nine tokens. Only two rows go through
# the LM head.
#
# ## The scheduler
#
# The scheduler keeps its requests in two places.
#
# - `waiting` is a queue, a `deque`, with the first to come at its front. `waiting[0]` is the front,
#   `popleft()` takes it out, and `remove(seq)` takes out anybody.
# - `running` is a list, in the order in which the requests were let in. So the oldest stands first.
#
# Before every step `schedule` is asked what to compute. Our first rule is simple:
#
# - If somebody in the queue can come in, let in as many as fit, and compute **their whole
#   prompts**.
# - Otherwise compute **one token of everybody who runs**.
#
# ### Who may come in
#
# You write the first half. `admit` takes requests from the front of `self.waiting`, one after the
# other, as long as there is
#
# - a **slot**: at most `self.max_num_seqs` requests run,
# - **budget**: a step computes at most `budget` tokens in all,
# - **memory**: blocks for every token that the request has.
#
# The first who does not fit ends it. Nobody overtakes, though a smaller one behind might fit.
# Otherwise a long request could wait for ever while short ones pass by.
#
# These are the parts that you need, for the request `seq` at the front of the queue:
#
# - `self.block_manager.match_prefix(seq)`: how many of its first tokens are in the cache already.
#   That is the request's `num_computed_tokens`. Here it is always 0. In notebook 05 it will not be,
#   and it may also give the request blocks. So ask it **before** you count what is missing.
# - `self.chunk(seq.num_missing_tokens, budget)`: how many of them this step takes on: here all or,
#   if they are more than `budget`, 0.
# - `self.block_manager.allocate(seq, len(seq.token_ids))` gets blocks for all its tokens. False,
#   and nothing has changed, if too few are free.
# - `self.release(seq)` gives back what it holds, and sets `num_computed_tokens` to 0. Whoever does
#   **not** come in must be released, because of `match_prefix`.
#
# Who comes in leaves `self.waiting`, stands at the end of `self.running`, and has the status
# `Status.RUNNING`. Return the list of `Scheduled(seq, num_new)`, and don't forget that each one
# makes the budget smaller.
#
# A little bookkeeping goes with it. It is no puzzle, so here it is, to copy in. (Its meaning comes
# in notebook 05.) Right after `match_prefix`:
#
# ```python
# if self.trace and seq.block_table:
#     self.trace.add("hit", seq.request_id, list(seq.block_table))
# ```
#
# And for each request that came in:
#
# ```python
# if seq.num_cached_tokens is None:
#     seq.num_cached_tokens = seq.num_computed_tokens
# self.num_prefix_queries += len(seq.token_ids)
# self.num_prefix_hits += seq.num_computed_tokens
# self.publish_prompt(seq, num_new)
# ```
#
# An example. The queue holds A with 5 tokens, B with 9 and C with 3; there are slots and blocks for
# all; the budget is 10. A comes in, and 5 is left. B does not fit. C would, but stands behind B. So
# the result is `[Scheduled(A, 5)]`, and B and C wait.


# %%
@exercise("nanoteach.scheduler.Scheduler.admit")
def admit(self, budget: int) -> list[Scheduled]:
    """Move requests from the queue to the running ones while slots, tokens and blocks last."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A `while` loop whose condition asks two things: is anybody waiting, and is a slot free? Inside it,
# look at `self.waiting[0]` without taking it out yet.
#
# </details>
# <details><summary>Hint 2</summary>
#
# In this order: match, chunk, allocate. If the chunk is 0 or the blocks are not there: release and
# `break`. Otherwise: out of the queue, into the running ones, status, bookkeeping, result, budget.
# `self.running` grows inside the loop, so its length counts those that you have just let in.
#
# </details>

# %%
show("nanoteach.scheduler.Scheduler.admit")

# %% [markdown]
# The other half of the rule, `continue_running`, is there already: it gives one token to each
# running request, and gets a block for those whose next token needs one. You will see it below.
#
# ### Who leaves
#
# After the step its outcome is booked. `commit` adds to `num_computed_tokens` what was computed,
# appends the sampled token, and asks whether the request is done. If it is, `commit` calls
# `retire(seq, reason)`, where `reason` is "stop" or "length".
#
# `retire` is also called from outside: a user closes the browser, and the request is aborted. That
# may happen while the request runs, or while it still waits.
#
# Write it. When it is over,
#
# - the request is neither in `waiting` nor in `running`, and the others are in their order,
# - it holds no blocks: `self.release(seq)` does that,
# - its `status` is `Status.FINISHED`, and its `finish_reason` is `reason`,
# - if `self.trace` is there, it has a new event, from
#   `self.trace.add("finished", seq.request_id, reason)`.
#
# An example. A, B and C run, D waits. After `retire(B, "length")`, A and C run, D waits, and B's
# blocks are free, in time for the very next step. After `retire(D, "abort")`, nobody waits.


# %%
@exercise("nanoteach.scheduler.Scheduler.retire")
def retire(self, seq: Sequence, reason: str) -> None:
    """A request is over, done or aborted: its slot and blocks are free at once."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In which of the two is the request? Something about the request itself says so.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Both have `remove`. Take care with the order: if you ask for the status after you have
# changed it, it does not say any more where the request was.
#
# </details>

# %%
show("nanoteach.scheduler.Scheduler.retire")

# %% [markdown]
# ## When the blocks run out
#
# A request comes in when there are blocks for the tokens it **has**. Nobody reserves blocks for
# the tokens it **will have**; that was the waste of notebook 02. So it may happen that everybody
# runs, everybody needs one more block, and none is free.
#
# Then one request is *preempted*: it gives back **all** its blocks, and goes to the **front** of
# the queue. What it has generated is not lost. Its tokens stay; only their K/V are gone. When
# there is room again it comes in like anybody else, and computes all its tokens anew, its own
# outputs among them, as if they were part of the prompt. This is called *preemption by
# recompute*.
#
# For the request nothing special must be written: it has all its tokens, and `num_computed_tokens`
# is 0. Admission, packing and decoding go on as before.
#
# ### Whom?
#
# Write `choose_victim`. It returns one of `self.running`, and changes nothing; `preempt` does the
# rest. Which one?
#
# - The newest has usually generated the least, so it has little to compute again. But that is not
#   what decides.
# - What decides: the oldest is never set aside for another. So it gets on, is done one day, and
#   makes room. The engine can never go round in circles.
# - A preempted request goes to the *front* of the queue. If the requests that give way are taken in
#   the reverse of the order in which they came in, the queue stays in its order.
#
# So: the one that was let in **last**. An example: A came in first, then B, then C. C is chosen,
# even if B holds more blocks, and even if all three arrived at the same moment.


# %%
@exercise("nanoteach.scheduler.Scheduler.choose_victim")
def choose_victim(self) -> Sequence:
    """The last one let in: so the oldest always gets on."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Where does `admit` put a request that it lets in?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `self.running` is in order of admission already. `preempt` will call `self.running.remove`, so the
# request must still be in there when you return it.
#
# </details>

# %%
show("nanoteach.scheduler.Scheduler.choose_victim")

# %% [markdown]
# Who calls it? In a step without prompts, `continue_running` goes through the running requests, the
# oldest first, and asks `make_room` for each.

# %%
show("nanoteach.scheduler.Scheduler.continue_running")

# %% [markdown]
# `make_room` asks for the blocks. As long as too few are free, it lets `preempt` set one request
# aside, the one that you chose, and asks again.

# %%
show("nanoteach.scheduler.Scheduler.make_room")
show("nanoteach.scheduler.Scheduler.preempt")

# %% [markdown]
# Now watch it. The pool has 5 blocks of 4 tokens. A has a prompt of 8 tokens and wants 6; B has 9
# and wants 4. Together they start with 2 + 3 = 5 blocks, which is all there is. A's first new token
# needs a sixth.

# %%
tight = pictures.traced_run(
    [Request(8, 6, name="A"), Request(9, 4, name="B")], block_size=4, num_blocks=5
)
for event in tight.trace.events:
    data = "" if event.data is None else event.data
    print(f"step {event.step}  {event.request_id or '':1}  {event.kind:9}  {data}")

# %% [markdown]
# Read step 2: B gives its three blocks back, one of them goes to A in the same step, and A gets
# on alone. Read step 7: B comes in again and computes **10** tokens, its 9 of the prompt and the
# one it had generated. It goes on from there; no token was generated twice.
#
# A would have had 9 tokens to compute again, one fewer. The newest is not always the cheapest. It
# is chosen because A, the oldest, then gets on.
#
# The pool in step 1 and in step 2:

# %% tags=["nbval-ignore-output"]
pictures.block_tables(tight.pools[0], title="step 1: no block is free")

# %% tags=["nbval-ignore-output"]
pictures.block_tables(tight.pools[1], title="step 2: B has stepped aside")

# %% [markdown]
# And if the newest itself needs the block? Now A has 9 tokens and room for 12. B has 8, and its
# first new token needs a sixth block.

# %%
itself = pictures.traced_run(
    [Request(9, 3, name="A"), Request(8, 3, name="B")], block_size=4, num_blocks=5
)
for event in itself.trace.events:
    if event.step == 2:
        data = "" if event.data is None else event.data
        print(f"step {event.step}  {event.request_id or '':1}  {event.kind:9}  {data}")

# %% [markdown]
# B is its own victim. `make_room` says False, and the step goes on without B.

# %% [markdown]
# Try it yourself: a pool of 24 blocks of 4 tokens. Add requests until it is full, step, and watch
# who gives way.

# %% tags=["nbval-ignore-output"]
widgets.block_table_explorer()

# %% [markdown]
# ## Plug it in
#
# All parts are there, yours among them. The loop around them is the `EngineCore`, and its `step`
# is three words: **schedule, execute, commit**. The scheduler decides, the `ModelRunner` packs
# and runs the model, the scheduler books the outcome. Stages 5 and 6 will change the parts, never
# the loop. Here is the inside of `step`; look for the three words.

# %%
show("nanoteach.engine_core.EngineCore.run_step")

# %% [markdown]
# `engine_of` builds a stage on `tiny`, with as many blocks as you say.

# %%
folder = resolve_model("tiny")
tokenizer = load_tokenizer(folder)
model = load_model(folder, "cpu", torch.float32)
eos = eos_token_ids(folder)


def engine_of(stage: int, num_blocks: int, slots: int = 6, clock=None, trace=None, model=model):
    """A stage of the course, on `tiny` or another model."""
    config = EngineConfig(
        block_size=8,
        max_num_seqs=slots,
        max_model_len=128,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=num_blocks,
    )
    return STAGES[stage - 1].build(Parts(model, config, eos, clock, trace))


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return list(tokenizer.encode(text, add_special_tokens=False))


# Request F, which you know from the notebooks before.
question = [{"role": "user", "content": "Tell me a story about a fox."}]
fox = encode(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True))
print(len(fox), "tokens:", tokenizer.decode(fox))

# %% [markdown]
# That is request F, which this course follows. (It is not the F of the picture at the beginning.)
# Three others are running already when it comes. It does not wait for them to be done.

# %%
trace = Trace()
core = engine_of(4, num_blocks=64, trace=trace)
for name, text, num_tokens in (
    ("A", "There was once a bear", 6),
    ("B", "What is 27 plus 48?", 12),
    ("C", "The", 30),
):
    core.add_request(name, encode(text), SamplingParams(max_tokens=num_tokens, ignore_eos=True))
for _ in range(4):
    core.step()
request_f = core.add_request("F", fox, SamplingParams(max_tokens=60))
while core.has_unfinished_requests():
    core.step()

for event in trace.events:
    if event.kind == "step" and event.step <= 16:
        print(f"step {event.step:2}  {event.data}")
    if event.kind == "finished":
        print(f"step {event.step:2}  {event.request_id} is done: {event.data}")

# %% [markdown]
# In step 5 the prompt of request F is computed, 16 tokens, and nothing else: A, B and C get no
# token in step 5. That is the hatched stripe of the picture. From step 6 on F decodes beside the
# others. A leaves after step 7, and the batch is one smaller. (The order inside a step is the
# engine's own: decodes of about one length stand together, so that attention takes them at once.)
#
# And this is what F got:

# %%
print(tokenizer.decode(request_f.output_token_ids))

# %% [markdown]
# ## Prove it
#
# Eleven ragged requests, request F first. transformers answers them one at a time. The engine
# has six slots, and pools of 200, 24 and 16 blocks. The small ones are too small for six requests
# that grow.

# %%
texts = [
    "There was once a bear",
    "What is 27 plus 48?",
    "The",
    "A dragon and a dog",
    "One day the mouse and the goat went to the river. The goat",
    "What is 3 plus 4?",
    "Once there was an otter who lived",
    "The sea",
    "There was once a fox. The fox had a friend",
    "Anna has a",
]
draw = random.Random(4)
prompts = [fox, *(encode(text) for text in texts)]
params = [SamplingParams(max_tokens=60)]
params += [SamplingParams(max_tokens=draw.randint(8, 60), ignore_eos=True) for _ in texts]
expected = references(folder, prompts, params, eos)

costs = []
for num_blocks in (200, 24, 16):
    core = engine_of(4, num_blocks)
    outputs = core.generate(prompts, params)
    preempted = core.scheduler.num_preemptions
    print(f"{num_blocks:3} blocks, {preempted} preemptions: {compare(expected, outputs)}")
    costs.append((num_blocks, core.num_computed_tokens, sum(core.batch_sizes.values())))

# %% [markdown]
# Not a token differs, whoever was set aside, and however often.
#
# What preemption costs is time. All tokens must be computed once, but for the last one of each
# request. What was computed beyond that was computed again:

# %%
needed = sum(len(p) + len(r.tokens) - 1 for p, r in zip(prompts, expected, strict=True))
for num_blocks, computed, steps in costs:
    again = computed - needed
    print(f"{num_blocks:3} blocks: {needed} tokens needed, {again:3} computed again, {steps} steps")

# %% [markdown]
# At 16 blocks there are also more steps, since fewer requests fit at once. An engine that
# preempts all the time has too little memory, or too many slots. vLLM [says so in its
# documentation](https://docs.vllm.ai/en/v0.14.0/configuration/optimization/) and counts
# preemptions in its metrics, as `num_preemptions` does here.
#
# ## Measure it
#
# The eight requests of the beginning, now with a real model, on this machine: stage 3, the static
# batch on pages, beside stage 4. Both have four slots and the same pool. The prediction is the cost
# model's, with the ceilings of this machine, for the very steps that were run.

# %%
live = timing_model()

# %% tags=["nbval-ignore-output"]
here = measure(live.device, live.dtype)
eight = [encode("There was once a bear")] * 8
eight_params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
rungs = []
for stage, name in ((3, "3 pages, static"), (4, "4 continuous")):
    make = partial(engine_of, stage, 128, 4, model=live)
    rungs.append(timed(name, live, here, make, eight, eight_params))
for rung in rungs:
    print(f"{rung.name:16} {rung.measured:6.0f} tokens/s, at most {rung.predicted:6.0f}")
print(f"gain: measured {rungs[1].measured / rungs[0].measured:.2f} times, ", end="")
print(f"predicted {rungs[1].predicted / rungs[0].predicted:.2f} times")

# %% [markdown]
# The predicted *rate* is a bound that is not reached: with a model as small as `tiny`, most of a
# step is Python. The *gain* is another matter. It comes from the number of steps, 104 instead of
# 160, and a step costs about as much in both. But not exactly, so the measured gain may lie to
# either side of the predicted one: stage 4 decides and packs anew in every step, and stage 3
# computes more rows. Count them, a row being
# one request in one step:

# %%
for name, run in (("static", static), ("continuous", continuous)):
    print(f"{name:10} {len(run.steps)} steps, {sum(len(s.work) for s in run.steps)} rows")

# %% [markdown]
# <details><summary>If your measured gain is larger than the predicted one</summary>
#
# A static batch computes four rows to its end, whoever is done. Stage 4 computes only those who are
# alive: that is 640 rows against 360. In the cost model a step costs what it takes to read the
# weights, and a row more is almost nothing. On your machine a row more takes Python some time.
#
# </details>
#
# The same two on an H200, as recorded, in the 24 requests of notebook 01 with eight slots:

# %%
on_h200 = recorded_stages(3, 4)
print(where("stages_h200"))
print(stage_table(on_h200))
before, after = on_h200
each = [1e3 * stage.seconds / stage.num_steps for stage in on_h200]
print(
    f"the gain: x {before.num_steps / after.num_steps:.2f} by fewer steps, "
    f"x {each[0] / each[1]:.2f} by the time of a step"
)

# %% tags=["nbval-ignore-output"]
pictures.ladder({"this machine": rungs, "an H200, recorded": [stage.rung for stage in on_h200]})

# %% [markdown]
# The steps are fewer, as here; with outputs of 16 to 64 tokens there is less to save than with your
# eight. The other factor is the time of a step. On a GPU a step costs what it takes to start its
# operations. In stage 4 decodes of about one length stand together, so that attention takes them at
# once, and there are fewer operations in each layer. The bound, which counts bytes and FLOPs, sees
# none of this. (How much of the second factor is attention, and how much is that the host of one
# run was faster than that of another, the record does not tell.)
#
# ## Bug clinic
#
# An engine on several GPUs has a process for each, and requests travel to them as messages. To keep
# messages short, somebody sends all tokens in a prefill, and only the last token in a decode.
#
# Here is that idea. `ShortMessages` is a runner that sends what it believes the model needs.


# %%
class ShortMessages(ModelRunner):
    """All tokens of a prompt at first; afterwards the last token alone."""

    def execute(self, scheduled: list[Scheduled]) -> list[int | None]:
        """See `ModelRunner.execute`."""
        return super().execute([self.message(seq, num_new) for seq, num_new in scheduled])

    def message(self, seq: Sequence, num_new: int) -> Scheduled:
        """What is sent of a request."""
        if seq.num_output_tokens == 0:
            return Scheduled(seq, num_new)
        decode = copy.copy(seq)
        decode.num_computed_tokens = len(seq.token_ids) - 1
        return Scheduled(decode, 1)


def try_runner(runner: type[ModelRunner], num_blocks: int) -> Trace:
    """Answer the eleven requests with another runner, and say who got other tokens."""
    trace = Trace()
    core = engine_of(4, num_blocks, trace=trace)
    core.runner = runner(model, core.runner.attention)
    outcome = compare(expected, core.generate(prompts, params))
    wrong = [mismatch.request for mismatch in outcome.mismatches]
    print(f"{num_blocks:3} blocks: {len(wrong)} of 11 requests wrong {wrong}")
    return trace


for num_blocks in (200, 24, 16):
    trace = try_runner(ShortMessages, num_blocks)

# %% [markdown]
# The symptom: all is well on the developer's machine, which has much memory. Under load some
# answers go wrong, and nothing raises. What does the trace of the last run say?

# %%
print("preempted:", sorted({int(e.request_id.split("-")[1]) for e in trace.of_kind("preempted")}))
admitted = {}
for event in trace.of_kind("step"):
    for request_id, num_new in event.data.items():
        if num_new > 1:
            admitted.setdefault(request_id, []).append(f"step {event.step}: {num_new} tokens")
for name in ("generate-1", "generate-4", "generate-9", "generate-10"):
    print(f"{name} came in at {', '.join(admitted[name])}")

for name in ("generate-4", "generate-9", "generate-10"):
    events = [e for e in trace.events if e.request_id == name and e.kind in ("freed", "taken")]
    for before, after in pairwise(events):
        if before.kind == "freed":
            print(f"{name} gave back {before.data}, and got {after.data} when it came again")

# %% [markdown]
# Before you unfold the answer:
#
# 1. Compare the two lists of requests. Which can go wrong, and which never?
# 2. `generate-9` came in twice. What did the scheduler order the second time, and what did
#    `message` send?
# 3. `generate-4` was preempted twice, and is right. Look at its blocks. Why?
# 4. `generate-10` is right as well, but for another reason. Which?
#
# <details><summary>What is wrong</summary>
#
# `message` asks "has it generated anything yet?" and takes a no for a prefill, a yes for a
# decode. That is right until the first preemption. A request that comes back has outputs **and**
# nothing computed. It was taken for a decode: one token was sent, and the K/V of all tokens
# before it were never written. It then attended to whatever its new blocks still held, of whoever
# had them before.
#
# The scheduler believed that all was computed, so the error stays for the rest of the answer.
#
# Only preempted requests can go wrong. `generate-4` was lucky: it got its own blocks back before
# anybody had written to them. They were all full, so only their order changed, and attention does
# not mind the order: a key carries its position in itself. `generate-9` got two blocks of
# strangers.
#
# `generate-10` had wrong K/V too: it got its second block back as its first, and a stranger's as
# its second. But it was nearly done. It generated only two more tokens, and these two came out
# right.
#
# So the fault depends on the load, and a test with a single preemption may well pass.
#
# nano-vLLM had this fault: [a report](https://github.com/GeeeekExplorer/nano-vllm/issues/144) (its
# first part), and [an earlier one](https://github.com/GeeeekExplorer/nano-vllm/pull/103). There the
# question was asked when a request was sent to the other processes. The missing tokens were
# noticed, and the process crashed. [This
# change](https://github.com/GeeeekExplorer/nano-vllm/pull/145) mended it.
#
# </details>
#
# Now mend it. Change `message` here, so that no request is wrong in the smallest pool.


# %%
class Mended(ShortMessages):
    """Yours."""

    def message(self, seq: Sequence, num_new: int) -> Scheduled:
        """What is sent of a request."""
        return super().message(seq, num_new)  # change this


trace = try_runner(Mended, 16)

# %% [markdown]
# <details><summary>A mend</summary>
#
# ```python
# def message(self, seq, num_new):
#     return Scheduled(seq, num_new)
# ```
#
# `num_new` says how many tokens are to be computed, and `num_computed_tokens` says from where.
# There is nothing to guess. If messages must be short, send those `num_new` tokens and no others:
# that is one token in a decode, and all of them in whatever kind of prefill. "How much is missing?"
# is the question; "Has it begun?" is not.
#
# </details>
#
# The plain `ModelRunner` does just that:

# %%
trace = try_runner(ModelRunner, 16)

# %% [markdown]
# ### A request that can never run
#
# A second fault, from [a report about vLLM](https://github.com/vllm-project/vllm/issues/39734): a
# request is shorter than the model's longest text, but needs more blocks than the **whole pool**
# has. `admit` looks at it, finds too few blocks, and stops; at the next step again, and so on for
# ever. Since nobody overtakes, all requests behind it wait as well, while the machine does
# nothing.
#
# No scheduler can mend that. It must be noticed at the door. `add_request` counts the blocks that
# the request may need at its longest:

# %%
core = engine_of(4, num_blocks=8)
try:
    core.add_request("too long", fox, SamplingParams(max_tokens=60))
except ValueError as error:
    print(error)

# %% [markdown]
# And if it comes in past the door, the engine says that it stands still:

# %%
core.scheduler.add(Sequence("too long", [1] * 70, SamplingParams(max_tokens=1)))
core.sequences["too long"] = core.scheduler.waiting[0]
try:
    core.step()
except RuntimeError as error:
    print(error)

# %% [markdown]
# This check is also why the oldest request always gets on: alone in the pool, it fits. So
# preemption needs two rules: the newest gives way, and no request is larger than the pool.
#
# ## What moved
#
# Slots are busy now, and memory is used to the last block. Two wastes are left. Both are in plain
# sight.
#
# **Prompts that begin alike are computed again and again.** A chat service puts the same
# instructions in front of every question. A preempted request computes again what was there a
# moment ago. That is notebook 05.
#
# **A long prompt stops everybody.** Three requests decode; after 5 ms somebody comes with 8,192
# tokens. On the virtual clock:

# %%
stall = pictures.traced_run([Request(16, 60)] * 3 + [Request(8192, 8, arrival=0.005)])
gaps = sorted(gap.seconds for gap in pictures.gaps(stall.steps) if gap.name != "D")
print(f"{stall.clock.label}: time between two tokens of A, B and C")
usual, longest = statistics.median(gaps), gaps[-1]
print(f"half of them at most {1000 * usual:.3f} ms, the longest {1000 * longest:.1f} ms")
print(f"{longest / usual:.0f} times as long")

# %% [markdown]
# For one token, three people wait some 70 times as long as usual. That is notebook 06.
#
# ### Where others do this
#
# - nano-vLLM,
#   [nanovllm/engine/scheduler.py](https://github.com/GeeeekExplorer/nano-vllm/blob/cde3fc22c2694ba8052f7df0b5e05ef7e10c8603/nanovllm/engine/scheduler.py):
#   the same two halves, prompts first, else decodes; the victim is the last of the running ones.
#   Packing is in
#   [model_runner.py](https://github.com/GeeeekExplorer/nano-vllm/blob/cde3fc22c2694ba8052f7df0b5e05ef7e10c8603/nanovllm/engine/model_runner.py),
#   one function for prefills and another for decodes. Ours needs one.
# - vLLM 0.14.0,
#   [vllm/v1/core/sched/scheduler.py](https://github.com/vllm-project/vllm/blob/v0.14.0/vllm/v1/core/sched/scheduler.py):
#   a request is its tokens and the number computed, as here. Running requests come first there, and
#   prompts in chunks; you get there in notebook 06. It preempts the last of the running ones, sets
#   its computed tokens to 0, and puts it at the front of the queue.
#
# ### To read
#
# - Yu et al., [Orca](https://www.usenix.org/conference/osdi22/presentation/yu) (2022): scheduling
#   at every step, the paper that began it. Read sections 3 and 4.
# - Kwon et al., [PagedAttention](https://arxiv.org/abs/2309.06180) (2023), section 4.5:
#   preemption by recompute and by swapping to the CPU's memory, and when each is the better.
#
# **Next:** [05 · Prefix caching](05_prefix_caching.ipynb): what was computed once is computed never
# again.
