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
# # 11 · Does the model match reality?
#
# **At the end you can say, of every optimisation in this course, what was predicted, what came on a
# real GPU, and which measurement shows where the difference lies.**
#
# 75 minutes. It needs notebook 00 (the cost model) and a look at all the others. No GPU: what was
# measured on one lies in this repository, and the schedulers run here on a virtual clock.

# %% tags=["nbval-ignore-output"]
import statistics
import time
from collections import Counter
from itertools import product

import torch

from nanoteach import SamplingParams
from nanoteach.bench.calibrated import Point
from nanoteach.bench.cases import EXPERIMENTS
from nanoteach.bench.kernels import CLASSES, class_of
from nanoteach.bench.recording import Recording, predictions
from nanoteach.bench.serving import NoModel, serve
from nanoteach.bench.speed import Bench
from nanoteach.bench.table import Row
from nanoteach.bench.workloads import COUNTS, StepLog, Workload, draw_prompts
from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.config import EngineConfig
from nanoteach.cost_model import SHAPES, VirtualClock, Work, step_cost
from nanoteach.course import (
    exercise,
    open_notebook,
    pictures_11,
    predict,
    quiz,
    reveal,
    show,
    widgets,
)
from nanoteach.engine_core import EngineCore
from nanoteach.hardware import hardware_named
from nanoteach.hub import resolve_model
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.reference import compare, references
from nanoteach.results import recorded
from nanoteach.sequence import Sequence
from nanoteach.stages import COURSE, Parts

open_notebook(11)

# %% [markdown]
# ## What you said
#
# Two of your predictions in notebook 00 were about an H200, and you saw what the cost model says.
# Now what an H200 did. The recording is of random weights with Qwen3-0.6B's shape: how fast a step
# is does not depend on what its numbers mean.

# %%
recording = Recording.of("experiments_h200", "engines_h200")
found = pictures_11.Evidence(recording, predictions())
qwen, h200 = SHAPES["qwen3-0.6b"], hardware_named("h200")
sweep = {pictures_11.batch_of(row): row for row in found.named("batch", "decode steps")}

reveal("H200, 64 requests of 1,024 tokens decode together", sweep[64].median, "tokens/s")
for requests in sweep:
    if twice := sweep.get(2 * requests):
        gain, said = twice.median / sweep[requests].median, twice.bound / sweep[requests].bound
        print(
            f"from {requests} to {2 * requests} requests: {gain - 1:.0%} more tokens/s, "
            f"by the cost model {said - 1:.0%}"
        )

# %% [markdown]
# (Each has 1,024 tokens of prompt and generates 256, so its history is 1,152 in the middle. The
# numbers are of decode steps alone.) Your second prediction was where another doubling gains less
# than 10%.

# %%
question = "H200, requests of 1,024 tokens until twice as many gain less than 10%"
doubled = {n: sweep[2 * n].median / sweep[n].median for n in sweep if 2 * n in sweep}
reveal(question, next(n for n, gain in doubled.items() if gain < 1.1), "requests")

# %% [markdown]
# That is later than the cost model says: what is far from the bound has more to gain.
#
# ## The gap
#
# The bound of notebook 00 takes two ceilings and nothing else. Here it stands beside what was
# measured. It is not wrong: nothing is faster. But see where it is near and where it is far.

# %%
print("requests   tokens/s      bound   reached   a step takes, µs")
for requests, row in sweep.items():
    step = 1e6 * requests / row.median
    print(f"{requests:8} {row.median:10,.0f} {row.bound:10,.0f} {row.share:9.0%} {step:18,.0f}")

# %% [markdown]
# With many requests most of the bound is reached, with few not even half of it. A prediction that
# is off by a factor of two here and by a fifth there does not say what to do next. Two things are
# missing in it: no kernel quite reaches the ceilings, and every step costs something that is
# neither bytes nor FLOPs, its *overhead*. Before we look: how many microseconds of a step, do you
# think, are overhead? And of the step of one request, in how much of the time does no kernel run at
# all?

# %%
predict("H200, overhead of a decode step of stage 8", ..., "µs")
predict("H200, of one request's decode step, without any kernel", ..., "%")

# %% [markdown]
# ## Read a trace
#
# A profiler writes down when each kernel began and how long it ran. This is the beginning of one
# decode step of stage 8, with one request:

# %%
events = recorded("timeline_h200")["steps"]["stage 8, graph"]["events"]
for event in events[:9]:
    stop = event["start_us"] + event["us"]
    kind = class_of(event["name"])
    print(f"{event['start_us']:8.2f} to {stop:7.2f} µs  {kind:10} {event['name'][:32]}")
print(f"... {len(events)} events in all")

# %% [markdown]
# After the copies and the embedding they overlap: a kernel is started while the one before it still
# runs (notebook 08). So their lengths do not add up to the time of the step. What you want to know
# is for how long *at least one* of them ran, and whose time that was.
#
# Write it. `events` is a list of dicts, in the order of `start_us`; each has `name`, `start_us` and
# `us`, its length. The result is a dict with a number for every class in `CLASSES`, and for
# `"rest"` (norms, the embedding and the like), in microseconds; 0 where there is none.
# `class_of(name)` gives a kernel's class. **The time that two kernels share belongs to the one that
# began first.**
#
# An example: a product from 0 to 4, attention from 3 to 7, a copy from 9 to 10. Products have 4,
# attention 3, copies 1. From 7 to 9 nobody ran.


# %%
@exercise("nanoteach.bench.kernels.covered_us")
def covered_us(events) -> dict[str, float]:
    """For how long at least one kernel ran, by class. `events` is in order of start."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Walk through the events once. What is the one number that you must remember of all events so far?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The latest end so far. Of the next event, only what lies behind that end is new: it may be all of
# it, a part, or nothing. It may begin behind a gap, which belongs to nobody.
#
# </details>

# %%
show("nanoteach.bench.kernels.covered_us")

# %%
steps = recorded("timeline_h200")["steps"]
for name in ("stage 7, eager", "stage 8, eager", "stage 8, graph"):
    events = steps[name]["events"]
    lengths = sum(event["us"] for event in events)
    covered = sum(covered_us(events).values())
    wall = statistics.median(steps[name]["wall_us"])
    idle = max(0.0, 1 - covered / wall)
    print(
        f"{name}: {len(events):5,} events of {lengths:5,.0f} µs together, one running for "
        f"{covered:5,.0f}; the step without a profiler {wall:6,.0f}: idle {idle:3.0%}"
    )

# %% tags=["nbval-ignore-output"]
reveal(
    "H200, of one request's decode step, without any kernel",
    100 * idle,
    "%",
)

# %% [markdown]
# (*Eager* is kernel by kernel, without a graph.) Name the bottleneck, from these lines alone:

# %% tags=["nbval-ignore-output"]
quiz(
    "1. In stage 7 the GPU is idle most of the time of a step. What is it waiting for?",
    ["for memory: K/V are far apart", "for the host, which launches kernels", "for the sampler"],
    answer=1,
    because="Over a thousand kernels of some 2 µs each, and the host needs many times as long to "
    "launch one. In the graph the same GPU does the step in a fraction of the time.",
)
quiz(
    "2. In the last line it is hardly idle at all. Is the step as fast as it can be?",
    ["yes: a kernel is always running", "no: a running kernel may be waiting, too"],
    answer=1,
    because="A kernel that waits for memory, or for the kernel before it, runs. Hold its time "
    "beside what its bytes take.",
)

# %% [markdown]
# The same, by class of kernel and for more requests: green is attention, blue the matrix products,
# and the black line is what the bytes (or FLOPs) of that class take. (The steps were watched at
# other lengths than those of the table above, and in other runs: they differ by up to a tenth.)

# %%
pictures_11.kernels(found)

# %% [markdown]
# ## A line through two steps
#
# Now a second prediction, beside the bound: the *calibrated model*. It has the cost model's form,
# with three numbers that are not on any datasheet:
#
# $$\text{seconds} = \text{overhead} + \max\left(\frac{\text{FLOPs}}{\text{reached FLOP/s}},
# \frac{\text{bytes}}{\text{reached bytes/s}}\right)$$
#
# Decode steps are limited by bytes, so there the time is a straight line over the bytes. Two steps
# give the line. An example by hand: 1 GB took 1.5 s, and 3 GB took 2.5 s. So 2 GB more took 1 s
# more: 2 GB/s. At that rate 1 GB takes 0.5 s. It took 1.5, so 1 s is overhead.
#
# `few` and `many` are `Point`s: `few.cost.bytes`, `few.seconds`. Return the overhead in seconds,
# and the bytes a second.


# %%
@exercise("nanoteach.bench.calibrated.line_through")
def line_through(few: Point, many: Point) -> tuple[float, float]:
    """Seconds of overhead, and bytes/s, of the line through two steps that bytes limit."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Both steps have the same overhead. What is left if you subtract one from the other?
#
# </details>
# <details><summary>Hint 2</summary>
#
# First the rate, from the two differences. Then take the time of one step's own bytes off its own
# seconds.
#
# </details>

# %%
show("nanoteach.bench.calibrated.line_through")

# %% [markdown]
# The two steps are those of 1 and of 128 requests. One more point, 16 prompts of 1,024 tokens,
# gives the FLOP rate that prompts reach. Nothing else is fitted.

# %%
few, many = (recording.decode_point(f"batch {n} x (1,024 + 256)") for n in (1, 128))
overhead, bandwidth = line_through(few, many)
model = recording.calibrated()
print(f"overhead        {1e6 * overhead:6.0f} µs a step")
print(
    f"bandwidth       {bandwidth / 1e9:6,.0f} GB/s, {bandwidth / h200.read_bandwidth:.0%} of H200's"
)
print(f"prompts reach   {model.hardware.flops / 1e12:6.0f} TFLOP/s, of {h200.flops / 1e12:.0f}")

# %% tags=["nbval-ignore-output"]
reveal("H200, overhead of a decode step of stage 8", 1e6 * overhead, "µs")

# %% [markdown]
# What *is* the overhead? If it were a fudge factor we would not know when it holds. So it was
# measured apart: a graph of small kernels that have next to nothing to do, a norm of one row each.

# %%
launches = recording.found["data"]["kernels"]["launches"]["1"]
empty = found.row("a chain of small kernels", "one kernel, its start overlapped").median
waits = found.row("kernels, batch 1", "GPU idle").median
attention = found.row("kernels, batch 1", "attention")
starts = sum(launches.values()) * empty
print("            takes  its bytes  more | kernels  if they did nothing")
for kind in (*CLASSES, "rest"):
    row, count = found.row("kernels, batch 1", kind), launches[kind]
    read = (row.bound or 0) * h200.read_bandwidth / bandwidth  # µs, as fast as the line says
    print(
        f"{kind:10} {row.median:6.0f} {read:10.0f} {row.median - read:5.0f} | "
        f"{count:7} {count * empty:11.0f} µs"
    )
print(
    f"a kernel without work {empty:.2f} µs, so {sum(launches.values())} of them {starts:.0f} µs: "
    f"{starts / (1e6 * overhead):.0%} of the overhead"
)
print(f"no kernel at all, from one step to the next: {waits:.0f} µs")

# %% [markdown]
# A step of one request is a chain of kernels, each of which waits for the one before. To be
# started, to wait, to write: that is a good part of a microsecond each, whatever the kernel does,
# and one after the other it would be about half of the overhead. But see the column *more*. It
# adds up to the overhead, as it must: both are the step less the time of its bytes. So a kernel
# runs nearly all the time, and the host has hardly a share in the overhead any more. The products
# seem to take hardly more than their bytes, less than their starts would be, and attention seems
# to have nearly all of the overhead. But by our rule the time that two kernels share counts for
# the one that began first, and the products begin to load their weights while attention still
# runs. So the two can't be told apart here. What attention waits for, memory or the kernel
# before, was not measured.
#
# ### Turn the knobs
#
# Overhead 0 and all of the bandwidth is the bound. Can you find two numbers with which no point is
# missed by more than a quarter? The cell after the widget has the answer.

# %% tags=["nbval-ignore-output"]
explorer = pictures_11.CalibrationExplorer(found)
widgets.Panel(
    explorer,
    widgets.Control("slider", "overhead", "overhead, µs", range(0, 501, 25)),
    widgets.Control("slider", "bandwidth", "% of the bandwidth", range(50, 101, 2)),
)


# %%
def tried(pair):
    """The model with these knobs: µs of overhead, and % of the bandwidth."""
    return pictures_11.CalibrationExplorer(found, *pair)


def worst(pair):
    """By how much it misses the point that it misses most."""
    return max(abs(error) for error in tried(pair).errors.values())


line = (round(1e6 * overhead), round(100 * bandwidth / h200.read_bandwidth))
best = min(product(range(0, 501, 25), range(50, 101, 2)), key=worst)
for name, pair in (("the bound", (0, 100)), ("the line", line), ("the best pair", best)):
    print(f"{name}: {tried(pair).text()}")
for requests, error in tried(best).errors.items():
    print(f"    {requests:3} at once: {error:+.0%}")

# %% [markdown]
# There are such pairs. But look at the best one. It is too slow for one request and for many, so
# that it is not much too fast for a few: the error is shared out, and nothing is explained. What
# explains it is in the blue bars above:

# %%
for row in found.named("kernels, batch", "products"):
    ratio = row.median / row.bound
    print(f"{row.workload:18} the products take {ratio:.1f} times what their bytes take")

# %% [markdown]
# One row reads the weights at most of the full rate; notebook 08 has its kernel. With a few rows
# the same bytes take much longer, and a line over the bytes has no place for that.
# This is what a model is for: where it misses, there is something to find.
#
# ## What could be gained
#
# Where should the next week go? If a part of a step took only its bound, and everything else
# stayed, how much faster would the *whole* be? That is Amdahl's law.
#
# `seconds` has the time of each part of a step, one after the other; `bounds` has the least that a
# part can take. A part that is not in `bounds` could be gone altogether: its bound is 0. A part
# that is faster than its bound gains nothing. For each part of `seconds`, give how many times as
# fast the step would be.
#
# By hand: parts of 6, 3 and 1. The first could take 2. Then the step takes 6 instead of 10: 1.67
# times as fast.


# %%
@exercise("nanoteach.bench.calibrated.possible_gains")
def possible_gains(seconds, bounds) -> dict[str, float]:
    """How many times as fast a step would be at most, if one of its parts took only its bound."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How long does the step take now? By how much would it get shorter?
#
# </details>
# <details><summary>Hint 2</summary>
#
# It gets shorter by what the part takes *above* its bound, and never by less than nothing.
# `bounds.get(part, 0.0)` knows the parts without a bound.
#
# </details>

# %%
show("nanoteach.bench.calibrated.possible_gains")

# %%
for requests in (1, 16, 256):  # for each part, how many times as fast the whole step would be
    parts = [found.row(f"kernels, batch {requests}", kind) for kind in (*CLASSES, "rest")]
    gains = possible_gains(
        {row.metric: row.median for row in parts},
        {row.metric: row.bound for row in parts if row.bound},
    )
    best = sorted(gains.items(), key=lambda gain: -gain[1])
    print(f"{requests:4} at once: " + ", ".join(f"{kind} {gain:.2f}" for kind, gain in best))

# %% [markdown]
# Choose the next optimisation:

# %% tags=["nbval-ignore-output"]
quiz(
    "3. One request at a time, for a voice assistant. Where do you begin?",
    ["with attention at batch 1", "with the products", "with the sampling"],
    answer=0,
    because=f"Its bytes would take {attention.bound / attention.median:.0%} of its time, which "
    f"{launches['attention']} short kernels share. Some of that time is the products', which load "
    "weights meanwhile, so the gain is an upper limit. What the kernels wait for is to be measured "
    "first; fewer of them, each with more to do, are worth a try.",
)
many_kv, many_step = (found.row("kernels, batch 256", name) for name in ("attention", "step"))
quiz(
    "4. 256 requests, all day. Where do you begin?",
    [
        "with a better attention kernel, since attention has most of the time",
        "with the LM head's share of the products",
        "with fewer bytes: K/V in 8 bits",
    ],
    answer=2,
    because=f"Attention takes {many_kv.median / many_kv.bound:.2f} times its bound, so the best "
    "kernel gains little (the line above says how much). Only a smaller bound helps, and K/V are "
    f"{many_kv.bound / many_step.bound:.0%} of the bytes.",
)

# %% [markdown]
# ## Plug it in
#
# Stage 11 is the engine with this notebook around it. After a run it tells what its own steps say,
# by `covered_us`, `line_through` and `possible_gains`, yours if you wrote them. Here it runs on
# `tiny` and the virtual clock of notebook 00. That clock has no overhead, and reads at the H200's
# full rate. Does the line through two of its steps find that out?

# %%
folder = resolve_model("tiny")
tokenizer, eos = load_tokenizer(folder), eos_token_ids(folder)
tiny = load_model(folder, "cpu", torch.float32)
clock = VirtualClock(tiny.config, h200, bytes_per_value=4)
config = EngineConfig(max_num_seqs=8, max_model_len=512, num_gpu_blocks_override=256)
stage_11 = next(stage for stage in COURSE if stage.number == 11)
engine = stage_11.build(Parts(tiny, config, eos, clock))
texts = ["Tell me a story about a fox.", "What is 27 plus 48?", "Who are you?", "Once", "A dog and"]
prompts = [list(tokenizer.encode(text)) for text in texts]
params = [SamplingParams(max_tokens=10 + 9 * i, ignore_eos=True) for i in range(len(prompts))]
tokens = engine.generate(prompts, params)
print(engine.told.splitlines()[1])
print(f"the clock reads at {h200.read_bandwidth / 1e9:,.0f} GB/s")

# %% [markdown]
# And it changes no token:

# %%
print(compare(references(folder, prompts, params), tokens))

# %% [markdown]
# ## Every experiment
#
# Each switches one thing on and off, under the same requests in the same order. The whole of it is
# data: what is compared stands in `nanoteach/bench/cases.py`, and the command runs it on any
# machine. It refuses a number whose precondition failed: a cache hit in a cold run, a preemption in
# a clean one.
#
# ```console
# nanoteach bench chunked prefix --shape toy --small
# ```

# %%
for name, make in EXPERIMENTS.items():
    print(f"{name:11} {len(make(qwen.vocab_size, False)):2} cases")

# %% [markdown]
# In most pictures blue is measured on the H200. Where there are diamonds, they are the calibrated
# model, and the grey tick or line is the bound. Both predictions are the engine's own scheduler on
# a virtual clock, so they know about waiting, chunks and preemptions. What they do not know is how
# long a step really takes.
#
# **A · Cold prompts.** The green line is the layers' matrix products alone, at that number of
# tokens: what attention, norms and the host do not touch.

# %%
pictures_11.prefill(found)

# %% [markdown]
# Where prompts were watched kernel by kernel, their time went here:

# %%
for row in found.named("kernels, prompts", "step"):
    name = row.workload
    busy, rest = (found.row(name, kind).median / row.median for kind in ("GPU busy", "rest"))
    pair = [found.row(name, kind) for kind in ("products", "attention")]
    linear, attending = (part.median / part.bound for part in pair)
    print(
        f"{name.removeprefix('kernels, '):18} {row.median / 1000:5.1f} ms, kernels run {busy:.0%} "
        f"of it, norms and the like {rest:4.0%}; times their bound: products {linear:.1f}, "
        f"attention {attending:4.1f}"
    )

# %% [markdown]
# A single short prompt is far below the bound. Its few tokens do not fill the GPU: its products
# take three times their bound, its attention far more than that, and the green line falls, too.
# And for more than a quarter of the time no kernel runs, while the host prepares the step. With
# more tokens the products come to their bound. What keeps long prompts from it is attention, at
# two times its bound and more, the small kernels between the products, and the host, which still
# has 5 to 10% of it.
#
# One thing does not fit: in the large watched steps the products come close to the bound, and
# alone (the green line) they do not. Alone they run without a pause. And what is multiplied
# matters: when all tokens of the watched prompts were the same, in the recording before this one
# (commit 82fffd1), the products took a few percent less. A GPU that clocks lower under a heavier
# load would explain both. Its clock was not measured.
#
# **B · One request, over its context.** The model was fitted at 1,024 + 128 tokens, with the batch
# and not the context changing. It holds for the decode steps of all contexts: the orange marks lie
# under the blue ones. (Of eight cases the picture has the five that generate 1,024 tokens.)

# %%
pictures_11.context(found)

# %%
errors = [r.error for r in found.judged if (r.experiment, r.metric) == ("context", "decode")]
print(f"{len(errors)} contexts: the model is off by {min(errors):+.1%} to {max(errors):+.1%}")

# %% [markdown]
# **C · Over the batch.** There is a trap in numbers like 'tokens/s at batch 128': those of a whole
# run have the prompts' time in them. From a tenth of the time on it is marked.

# %%
pictures_11.batch(found)

# %%
for row in found.named("batch", "time with prompts"):
    mark = "  <- no decode speed any more" if row.median >= pictures_11.CONTAMINATED else ""
    print(f"{row.workload}: {row.median:4.1f}% of the time in steps with prompts{mark}")

# %% [markdown]
# Our engine on the requests of nano-vLLM's own benchmark: up to 256 at once, with prompts of 100 to
# 1,024 tokens between their decodes. Most of the time goes to decode steps of many requests, where
# the model is good:

# %%
pictures_11.nano(found)

# %% [markdown]
# **Static against continuous batching** (notebook 04). The same kernels and graphs; only when a
# waiting request may come in differs. In a static batch seats stay empty, so it needs more steps.
# Those are counted, not modelled, and so the gain comes out about as predicted.

# %%
pictures_11.static(found)

# %% [markdown]
# **Packed against one by one** (notebook 04). Sixteen prompts in one step, or in sixteen. Packed
# always reads more tokens a second. But all sixteen wait for the one step: from some length on, the
# median first token comes later than one by one.

# %%
pictures_11.packed(found)


# %%
def times(metric, slow, fast):
    """How many times as much the first is."""
    return found.row(slow, metric).median / found.row(fast, metric).median


for row in found.named("packed", "prompt"):
    pair = row.workload, row.workload.replace("packed", "one by one")
    low, high = min(row.samples), max(row.samples)
    print(
        f"{row.workload:18} {times('prompt', *pair):4.1f} times the tokens/s of one by one, "
        f"{times('TTFT', *pair):4.2f} times its TTFT; {low:,.0f} to {high:,.0f} tokens/s"
    )

# %% [markdown]
# **Pages** (notebook 03). No GPU needed: counts are counts. A request wastes half a block on
# average, less half a slot. That is 7.5 slots with blocks of 16.

# %%
pictures_11.paged(found)

# %% [markdown]
# **Prefix caching** (notebook 05). On the right, what happens when the prefixes in use do not fit:
# the hit rate was predicted exactly, since the same scheduler was asked.

# %%
pictures_11.prefix(found)

# %%
off, on = "prefix caching off", "prefix caching on"
print(f"tokens computed: {times('computed', off, on):.1f} times fewer, decodes included")
print(f"median TTFT:     {times('TTFT', off, on):.1f} times less")

# %% [markdown]
# **Chunked prefill** (notebook 06). Sixteen requests decode; then six prompts of 2,048 tokens come
# at once. The numbers are of the time in which they are read (the *window*), but for those
# marked *outside*.
# *Decodes first* is the scheduler of notebook 06; what it saves you from is *prompts first*, with
# the same budget. The *plain loop* is the one without the overlap of notebook 08. The overlap makes
# two gaps of one long step, and the plain loop shows it as one. So the wait for two tokens is there
# as well.

# %%
pictures_11.chunked(found)

# %%
for loop in ("decodes first", "plain loop"):
    pair = f"{loop}, unlimited", f"{loop}, 256"
    if found.row(pair[1], "ITL max"):
        print(
            f"{loop}: the longest gap is {times('ITL max', *pair):.1f} times less at 256, and that "
            f"of two tokens in a row {times('two tokens', *pair):.1f} times"
        )
        print(f"   TTFT of the six: {1 / times('TTFT', *pair):.1f} times as much, the price of it")

# %% [markdown]
# **Preemption** (notebook 04). What too small a pool costs: tokens that are computed twice, and
# steps with fewer requests in them, so more steps. Their number grows far more than that of tokens.

# %%
pictures_11.preemption(found)

# %% [markdown]
# **KV cache, CUDA graphs, the attention kernel** (notebooks 02, 08, 07). All of these engines but
# the blue bars of the second picture are without graphs, and there both predictions are far too
# fast: they know nothing of launches. See the first picture. With a cache a step computes 1 token
# instead of some 530, and one short request gains *nothing* on this GPU: the step is as long as its
# launches, whatever it computes. At 8,192 tokens there is something to save.

# %%
pictures_11.kv_cache(found)

# %%
pictures_11.graphs(found)

# %%
pictures_11.backends(found)

# %%
for metric, slow, fast in (
    ("decode", "no cache", "KV cache"),
    ("decode steps", "no graphs", "graphs"),
    ("decode steps", "gather", "kernel"),
):
    for row in found.named(f"{fast}, ", metric):
        before = row.workload.replace(fast, slow, 1)
        spread = max(max(r.samples) / min(r.samples) for r in (row, found.row(before, metric)))
        print(
            f"{row.workload:20} {times(metric, row.workload, before):5.2f} times as fast as "
            f"{slow}; the same run again was up to {spread:.1f} times as fast"
        )

# %% [markdown]
# Engines of plain PyTorch wait for the host, and there the same case may take several times as long
# in one run as in another: the last number of each line. In most of these cases the first run is
# much slower than the others, and we don't know why. So what counts is whether the runs of one side
# overlap with those of the other:

# %%
for metric, slow, fast in (
    ("decode", "no cache", "KV cache"),
    ("decode steps", "gather", "kernel"),
):
    for row in found.named(f"{fast}, ", metric):
        other = found.row(row.workload.replace(fast, slow, 1), metric)
        apart = min(row.samples) > max(other.samples) or max(row.samples) < min(other.samples)
        print(f"{row.workload:20} {'apart from' if apart else 'overlaps with'} {slow}")

# %% [markdown]
# It is sure that graphs gain, most where a step is short; that our attention kernel is ahead of the
# gather with few requests; and that the cache gains at 8,192 tokens. Of the others nothing is sure.
#
# Where the host's time goes, by named range. All bars are stage 8, but the second, `kernel`, which
# is stage 7 without graphs: nearly all of its time launches the model's kernels. A step of stage 8
# is prepared while the one before runs, so *waiting* is good news: the GPU is busy. A trace of your
# own engine is one option of `nanoteach bench` away, `--profile`, and opens in
# [Perfetto](https://ui.perfetto.dev).

# %%
pictures_11.profiles(found)

# %%
seen = recording.found["profiles"]["graphs"]
usual = 1e6 / found.row(seen["case"], "decode steps").median
print(
    f"{seen['case']}: {1e6 * seen['wall'] / seen['steps']:,.0f} µs a step with the profiler, "
    f"{usual:,.0f} without"
)

# %% [markdown]
# The profiler slows the host down, so without it there is more waiting than the bars have.
#
# ### Is it the bytes, really?
#
# One doubt is left. We *count* the bytes of a step: the weights, W, and for each of B requests the
# K/V of its T tokens, KV(T). Does the GPU move as many? Its own counters were read, with Nsight
# Compute, for one decode step:

# %%
moved = [Row(**row) for row in recorded("dram_h200")["rows"]]
pictures_11.dram(moved)

# %%
for row in moved:
    print(
        f"{row.workload:15} {row.metric:13} {row.median:7.3f} GB, {row.median / row.bound - 1:+.1%}"
    )

# %% [markdown]
# In all, within a few percent. The last line stands out: at 128 requests everything but attention
# moves more than the weights. That is scores. With several requests the LM head writes one for
# every request and token of the vocabulary, two bytes each, and the sampler reads them:

# %%
for batch in (16, 128):
    (row,) = (r for r in moved if (r.workload, r.metric) == (f"DRAM, batch {batch}", "by all else"))
    scores = 2 * batch * qwen.vocab_size * 2 / 1e9
    print(f"batch {batch:3}: {row.median - row.bound:.3f} GB too many, {scores:.3f} GB of scores")

# %% [markdown]
# That is most of it. The model of the bytes is right; what it does not know is how fast they come.
#
# ## All points
#
# Rings are round the fitted ones. In the grey band a prediction is off by about a quarter at most.

# %%
pictures_11.errors(found.judged)

# %%
points = [row for row in recorded("predictions_h200")["rows"] if not row["fitted"]]
missed = [row for row in points if abs(row["calibrated"] / row["measured"] - 1) > 0.25]
causes = Counter(row["cause"] for row in missed)
print(f"{len(points) - len(missed)} of {len(points)} points within 25%. Missed, and why:")
for cause, count in causes.most_common():
    where = dict.fromkeys(row["experiment"] for row in missed if row["cause"] == cause)
    print(f"\n{count:3} in {', '.join(where)}:\n    {cause or 'unknown'}")

# %% [markdown]
# Each miss has a measurement beside it that shows where such a step's time goes. Is that *enough*?
# A cause can be true and still be half of the matter. So one more test: run the schedulers once
# more, on a clock that has two hands (`figures/watched.py`).
#
# - *The GPU's.* Every step takes longer (or shorter) than the model says by as much as the nearest
#   watched step of its kind. Watched were steps of stage 8, apart from the experiments: with
#   decodes, with prompts, and one with decodes and a part of a prompt.
# - *The host's.* Whenever it adds a request or takes a step it works for as long as it did then in
#   the experiment. What it waited for the GPU is left out.
#
# A step with a graph begins when the host has launched it and the step before is over. A step of
# more than 4,096 tokens has no graph: the GPU works while the host still launches. Nobody recorded
# when the first launch came. The clock lets such a step begin with the host's turn and last at
# least as long, which is the choice that favours it.

# %%
tested = [row for row in points if row["watched"]]


def off(row, by, limit=0.25):
    """Whether it misses the measurement by more."""
    return abs(row[by] / row["measured"] - 1) > limit


for by in ("calibrated", "gpu alone", "host alone", "watched"):
    counts = [sum(off(row, by, limit) for row in tested) for limit in (0.25, 0.1, 0.05)]
    words = {"watched": "both hands", "calibrated": "the model"}.get(by, by)
    print(f"{words:10}  by more than 25%: {counts[0]:3}, 10%: {counts[1]:3}, 5%: {counts[2]:3}")
print(f"missed, of {len(tested)} points of stage 8")
for row in tested:
    if off(row, "watched"):
        error = row["watched"] / row["measured"] - 1
        print(f"missed by both hands: {row['case']}, {row['metric']} {error:+.0%}")

# %% [markdown]
# What does that show? Less than it seems to.
#
# - The host's hand predicts nothing, since its times are of the very runs that are judged. It shows
#   that these times suffice. The GPU's hand alone brings most points right.
# - Many watched steps are of the experiments' own kind. There the test says that a step takes the
#   same time twice. It is harder for static batches, small pools and mixed reuse, whose steps
#   nobody watched.
# - Within a quarter nothing large is missing. Something small is: half of the points are off by
#   more than 5%. The times of *decodes first, 256* come out 5 to 18% too short, all of them.
#   Pauses inside a step are not on the clock, and there may be others.

# %%
counted = [row for row in recording.rows.values() if row.metric in COUNTS and row.samples]
exact = sum(row.median == row.bound for row in counted)
print(f"{exact} of {len(counted)} counts are exactly as predicted")

for metric, before, after in (
    ("output", "static batches", "continuous batching"),
    ("output", "pool of 512 blocks", "pool of 1,536 blocks"),
    ("prompt", "one by one, 16 x 64", "packed, 16 x 64"),
    ("TTFT", "prefix caching off", "prefix caching on"),
    ("ITL max", "decodes first, unlimited", "decodes first, 256"),
    ("TTFT", "decodes first, unlimited", "decodes first, 256"),
):
    old, new = found.predicted[before, metric], found.predicted[after, metric]
    real, said = new.measured / old.measured, new.calibrated / old.calibrated
    print(f"{metric:8} {real:5.2f} times, predicted {said:5.2f}: {after} against {before}")

# %% [markdown]
# **What the model gets right.** Decode steps whose time is bytes: one request with any context, 64
# requests and more, and nano-vLLM's benchmark, which is made of those. Everything that is counted,
# exactly. And about what continuous batching gains: its steps are of one kind before and after, so
# both sides are wrong by about as much.
#
# **Where it fails.** Small steps. Its overhead is one number, and belongs to a decode step of one
# request; a prompt of 256 tokens has other kernels, and more of the host. So it promises too much
# of whatever makes steps small, such as prefix caching and chunked prefill, and does not see what
# they cost: by the last line above (TTFT, *decodes first, 256*) chunks bring first tokens *sooner*.
# It values a larger pool too low, since the steps of a small one have fewer rows. From 4 rows on
# products read the weights slower than one row does; from 64 on the bytes of attention are so many
# that it hardly shows. And it fails for every engine without graphs, whose steps cost what their
# launches cost.
#
# **What stays unresolved.** One point that the model gets right is missed by both hands: of 2,048
# tokens in 16 prompts the nearest watched step is a single prompt, and its attention probably
# takes longer. And where the time goes is shown, but why it goes there is often not. Why do
# products with 4 rows and more read at less than half of the bandwidth? What does attention wait
# for, at batch 1 and where decodes and a part of a prompt share a step? Of engines without graphs
# single steps of stages 7 and 8 were traced, above, and none of stages 1 to 6. That the host
# launches is their cause in kind; the number is of stage 8, and the others launch many times as
# much. One GPU, one model, one driver; nobody has tried whether the three numbers carry over to
# another card.
#
# The host has a hand in more than launches. *Prefix caching on* shows it best. Nearly all of its
# tokens come from the cache, so the GPU has little to do. But the host must add 32 requests, and
# name every block of their prompts, before it can look them up:

# %%
turns = recording.host["prefix caching on"]
adding, naming = sum(turns[:32]) / 1000, max(turns[32:]) / 1000
ttft = 1000 * found.row("prefix caching on", "TTFT").median
print(f"adding 32 requests: {adding:.1f} ms; the host's longest step, the first: {naming:.1f} ms")
print(f"median TTFT, from a request's own arrival: {ttft:.1f} ms")

# %% [markdown]
# So for about half of that time the GPU has not begun. (The first step schedules and launches, too.
# Most of it is probably naming; below it is timed alone.) The rest is two steps of the GPU, of the
# first prompt and of what the others have of their own.
#
# ## On this machine
#
# What it takes here to name the blocks of 32 prompts of 1,056 tokens (a SHA-256 each):

# %% tags=["nbval-ignore-output"]
manager = PrefixCachingBlockManager(num_blocks=4096, block_size=16)
seqs = [Sequence(str(i), [i, *range(1055)], SamplingParams()) for i in range(32)]
start = time.perf_counter()
for seq in seqs:
    manager.longest_prefix(seq)
names = sum(len(seq.block_hashes) for seq in seqs)
print(f"{names:,} names in {1e3 * (time.perf_counter() - start):.1f} ms")

# %% [markdown]
# The counts hold anywhere. Here are those of prefix caching, small, on `tiny`, beside what the
# scheduler without a model has said:

# %%
bench = Bench(["prefix"], model="tiny", device="cpu", repeats=1, small=True)
for row in bench.run():
    if row.unit in ("tokens", "%"):
        print(f"{row.workload:26} {row.metric:9} {row.median:6.1f}, predicted {row.bound:6.1f}")

# %% [markdown]
# ## Bug clinic
#
# The patient is a benchmark. It measures how fast prompts are read: 1, 2, 4 and up to 128 of them,
# one size after the other on the same engine, as one does. The engine is ours with prefix caching
# on, as is usual, on the virtual clock: prompts of 512 tokens, 16 seats, a pool of 1,100 blocks.
# This is what it reports.

# %%
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def curve(prompts_of_cell):
    """Of every size: thousand prompt tokens a second, and tokens that were found in the cache."""
    log = StepLog(VirtualClock(qwen, h200))
    scheduler = ChunkedPrefillScheduler(PrefixCachingBlockManager(1100, 16), 16, 16_384)
    core, cells = EngineCore(scheduler, NoModel(qwen), 1024, clock=log), []
    for cell, size in enumerate(SIZES):
        before = scheduler.num_prefix_hits
        workload = Workload("cell", prompts_of_cell(size, cell), [1] * size)
        run = serve(core, workload, log)
        speed = 512 * size / (run.end - run.start) / 1000
        cells.append((size, speed, scheduler.num_prefix_hits - before))
    return cells


def prompts_of_patient(size, cell):
    """Random prompts of 512 tokens; the seed is fixed, so that a run can be repeated."""
    return draw_prompts([512] * size, qwen.vocab_size, seed=0)


for size, speed, _ in curve(prompts_of_patient):
    print(f"{size:4} prompts: {speed:7,.0f} thousand tokens/s")

# %% [markdown]
# Hold it beside the bound of notebook 00, for these prompts on this GPU:

# %%
bound = 512 / step_cost(qwen, [Work(512, 0)]).seconds(h200) / 1000
print(f"at most {bound:,.0f} thousand tokens/s")

# %% [markdown]
# A clock that takes exactly the bound for every step can't be faster than the bound. Where is the
# curve too good? Which number would give it away? And why not in the last line? Write your
# diagnosis down. Then mend the function, and run the cell.


# %%
def prompts_mended(size, cell):
    """Change what is wrong."""
    return draw_prompts([512] * size, qwen.vocab_size, seed=0)


for size, speed, hits in curve(prompts_mended):
    print(f"{size:4} prompts: {speed:7,.0f} thousand tokens/s, {hits:6,} tokens found in the cache")
ill = any(hits for _, _, hits in curve(prompts_mended))
print("still ill: it measures the cache" if ill else "well again: every prompt was computed")

# %% [markdown]
# <details><summary>The diagnosis</summary>
#
# The seed is fixed, so every size begins with the prompts of the one before: of 4 prompts, 2 were
# computed a moment ago. The engine finds them in its cache, and the bench measures that: nearly
# half of all tokens are found. Only with 128 prompts the curve is honest, by chance. The pool holds
# some 34 prompts; of the 64 before, those are the last ones, and they are forgotten before their
# turn comes again. So the curve is not shifted, it is bent: whoever reads it believes that 128
# prompts are read at half the speed of 64.
#
# Either other prompts for every size:
#
# ```python
#     return draw_prompts([512] * size, qwen.vocab_size, seed=cell)
# ```
#
# or an empty cache, or caching off. And whatever you do: refuse a number when the counter of hits
# is not what it should be. Ours does, see `check_counts`.
#
# </details>
#
# It is a real one. vLLM's own benchmark draws its random prompts from a fixed seed, and a server
# keeps prefixes by default, so a sweep in a loop measured its cache: [issue
# 52884](https://github.com/vllm-project/vllm/issues/52884) reports up to 86% too much throughput,
# and [issue 54227](https://github.com/vllm-project/vllm/issues/54227) a TTFT that was 49 times too
# short, with the largest error in the middle of the sweep. The
# [mend](https://github.com/vllm-project/vllm/pull/53920) reads the hit counters before and after,
# and warns.
#
# ## What moved
#
# - A bound says what is possible, a calibrated model what to expect. Where the second misses,
#   measure once more: the miss is information.
# - Overhead is a thing: so many kernels, each with a start and an end.
# - Before you make a part faster, ask what the whole would gain.
# - A number without its precondition (cold? preempted? graphs?) is a number of something else.
#
# ### In other engines
#
# - **nano-vLLM**,
#   [bench.py](https://github.com/GeeeekExplorer/nano-vllm/blob/cde3fc22c2694ba8052f7df0b5e05ef7e10c8603/bench.py):
#   one workload, one number. It is the one that everybody compares.
# - **vLLM** 0.20.2,
#   [vllm/benchmarks](https://github.com/vllm-project/vllm/tree/v0.20.2/vllm/benchmarks): latency,
#   throughput, serving, sweeps. Our `nanoteach/bench/peers.py` runs the same requests on both,
#   where they are installed.
#
# ### To read
#
# - Williams, Waterman and Patterson, [Roofline](https://dl.acm.org/doi/10.1145/1498765.1498785)
#   (2009).
# - Agrawal and others, [Vidur](https://arxiv.org/abs/2405.05465) (2024): a simulator of whole
#   clusters, which predicts steps from measured kernels, as the next model after ours would.
# - `notes/reality.md`: every number of the experiments, with both errors.
