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
# # 09 · Sampling
#
# **At the end each request draws its tokens as it wants to: from all, from the best few, or from a
# nucleus. It can be told how likely they were. And with a seed it draws the same, whoever runs
# beside it.**
#
# 60 minutes. It needs notebook 01 (scores, the best token), 04 (requests that come and go) and, for
# its last part, 08 (the recorded step). No GPU.

# %% tags=["nbval-ignore-output"]
import math
import random
import time
from collections import Counter
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanoteach import Engine
from nanoteach.bench import sampling as bench
from nanoteach.config import EngineConfig
from nanoteach.cost_model import SHAPES, Work, step_cost
from nanoteach.course import (
    exercise,
    installed,
    open_notebook,
    pictures_09,
    predict,
    reveal,
    show,
    widgets,
)
from nanoteach.course.timing import where
from nanoteach.hardware import hardware_named
from nanoteach.hub import resolve_model
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.model import AttentionMetadata
from nanoteach.naive import CausalAttention
from nanoteach.reference import compare, open_model, references
from nanoteach.sampler import philox, uniform
from nanoteach.sampling_filters import Rules, Scores, pick
from nanoteach.sampling_tail import SLICE
from nanoteach.stages import COURSE, Parts, build_graphs
from nanoteach.step_inputs import bucket
from nanoteach.types import SamplingParams

open_notebook(9)

# %% [markdown]
# ## The best token, again and again
#
# So far every stage takes the token with the highest score. Ask **request F** three times, "Tell me
# a story about a fox.":

# %%
folder = resolve_model("tiny")
tokenizer, eos = load_tokenizer(folder), eos_token_ids(folder)
model = load_model(folder, "cpu", torch.float32)


def chat(text):
    """A prompt's tokens, in the chat template."""
    message = [{"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def parts(**options):
    """What an engine on `tiny` is built from."""
    defaults = {"max_num_seqs": 16, "max_model_len": 256, "num_gpu_blocks_override": 256,
                "max_num_batched_tokens": 64, "block_size": 8}  # fmt: skip
    return Parts(model, EngineConfig(**defaults | options), eos)


def engine(**options):
    """Stage 9 on `tiny`."""
    return COURSE[8].build(parts(**options))


fox = chat("Tell me a story about a fox.")
for tokens in engine().generate([fox] * 3, SamplingParams(max_tokens=20)):
    print(tokenizer.decode(tokens))

# %% [markdown]
# One story, three times. And it is not that the model knew no other. Here are its scores at a place
# of that story where it can go on in several ways:


# %%
@torch.inference_mode()
def scores_after(token_ids):
    """The scores of the next token, computed from nothing as in notebook 01."""
    count = len(token_ids)
    hidden = model.forward(
        torch.tensor(token_ids), torch.arange(count), CausalAttention(),
        AttentionMetadata(query_lens=[count], seq_lens=[count]),
    )  # fmt: skip
    return model.logits(hidden[-1:])[0]


beginning = "There was once a fox called Ivy. She lived in a mountain valley. She was the most"
logits = scores_after(fox + list(tokenizer.encode(beginning, add_special_tokens=False)))
words = [tokenizer.decode([token]).strip() or "..." for token in range(len(logits))]
probabilities = logits.softmax(-1)
for token in logits.argsort(descending=True)[:8].tolist():
    print(f"{words[token]:10} {probabilities[token]:.2f}")
print(f"and {len(logits) - 8:,} other tokens")

# %% [markdown]
# A softmax of the scores is a distribution. To take its largest value is to throw the rest away.
# Where many answers are right, one would rather **draw**: "clever" half of the time, "gentle" once
# in a while, nonsense never. Here the four best tokens have 90% of the probability. How many have
# it when all scores are halved? And how long is a step whose scores are sorted and filtered before
# the draw? Before you read on:

# %%
predict("tokens that have 90% of the probability when all scores are halved", ..., "of 2,048")
predict("H200, 64 requests: a step with top-k and top-p, in greedy steps", ..., "steps")

# %% [markdown]
# What could it cost? A decode step of 64 requests with 256 tokens of history each, on Qwen3-0.6B,
# by its bytes. And beside it, filters that sort each row of scores: a radix sort of 32-bit numbers
# with their token ids goes over them four times, and reads and writes 12 bytes of each.

# %%
qwen, h200 = SHAPES["qwen3-0.6b"], hardware_named("h200")
step = step_cost(qwen, [Work(1, 255)] * 64).seconds(h200)
sort = 4 * 2 * 12 * qwen.vocab_size / h200.copy_bandwidth  # of one row
print(f"the step              {1e3 * step:.2f} ms   ({h200.name}, bounds)")
print(f"sorting {qwen.vocab_size:,} x 64  {1e3 * 64 * sort:.2f} ms")
print(f"both, in such steps   {1 + 64 * sort / step:.2f}")

# %% [markdown]
# ## A race
#
# How does one draw from a distribution? The textbook's way: add the probabilities up, one after the
# other, throw a dart between 0 and 1, and see in whose part it landed. That takes a **cumulative
# sum**. It needs all of the row: first the largest score, then the sum of the exponentials, then
# the running sum, then a search.
#
# There is another way. Let the tokens run a race. Token $i$ arrives after a random time from an
# exponential distribution whose rate is its probability $p_i$. Such a time is easy to get from a
# uniform random number $u$ between 0 and 1: it is $-\ln(u) / p_i$. Likely tokens tend to be early.
# **The first to arrive is drawn**, and it is token $i$ with probability exactly $p_i$.
#
# An example by hand. Three tokens with the probabilities 0.5, 0.3 and 0.2, and the random numbers
# 0.2, 0.7 and 0.9:
#
# | token | $-\ln(u)$ | arrives at $-\ln(u)/p$ | $\ln p - \ln(-\ln u)$ |
# |---|---|---|---|
# | a | 1.609 | 3.22 | -1.17 |
# | b | 0.357 | 1.19 | -0.17 |
# | c | 0.105 | **0.53** | **0.64** |
#
# c is drawn, though it was the least likely. The last column says the same in logarithms, with the
# sign turned: the earliest has the *largest* number. And now something falls away. $\ln p$ is the
# score, less a number that is the same for the whole row. What is the same for all changes no
# winner. So take the score itself: no softmax, no sum, only a largest value.
#
# A **temperature** $T$ divides the scores before the softmax. Under 1 it makes likely tokens more
# likely, over 1 it evens them out. Here it divides the score, and not the noise.
#
# Where does $u$ come from? From a function: `uniform(seeds, positions, tokens)`. It gives a number
# for each request's seed, each position in its text, and each token id, and for the same three
# always the same one. We come back to it.
#
# ### Write it
#
# `race(logits, temperatures, seeds, positions)` draws a token for each row.
#
# - `logits`: `[rows, vocab_size]`, of any dtype; `temperatures`, `seeds`, `positions`: `[rows]`.
# - `uniform` takes seeds and positions as `[rows, 1]` and token ids as `[vocab_size]`. It returns
#   `[rows, vocab_size]`, all above 0 and below 1.
# - A row with a temperature of 0 takes its best token, without noise.
# - Scores may be `-inf`: such a token never wins.
# - The result: the ids of the drawn tokens, `[rows]`.


# %%
@exercise("nanoteach.sampler.race")
def race(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The drawn token of each row, or the best one at a temperature of 0: `[rows]`."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The last column of the table is all there is to it, with the score over the temperature in the
# place of $\ln p$. `torch.arange(vocab_size)` has the token ids, and `unsqueeze(1)` gives a row's
# number a dimension.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Rows with a temperature of 0 must not be divided by it. `torch.where` can put a 1 in its place,
# and a 0 in the place of the noise. Or do the others alone, by their places in the batch.
#
# </details>

# %%
show("nanoteach.sampler.race")

# %% [markdown]
# Three races of the tokens from above, as they ran:

# %% tags=["nbval-ignore-output"]
best = logits.argsort(descending=True)[:6].tolist()
u = uniform(torch.tensor([[7]] * 3), torch.tensor([[20], [21], [22]]), torch.tensor(best))
arrivals = -u.log() / probabilities[best]
pictures_09.race_lanes(
    {words[t]: float(probabilities[t]) for t in best},
    {words[t]: arrivals[:, i].tolist() for i, t in enumerate(best)},
)

# %% [markdown]
# What is it good for that no sum is needed? A largest value can be found **in pieces**. Cut the
# vocabulary into blocks, let each find its own best, and take the best of these. Nobody needs to
# know the others. On the GPU of notebook 08 that is how it is done: at one request, 2,112 programs
# read the rows of the LM head, and each keeps the best token that it has seen. The 151,936 scores
# are never written anywhere. With a running sum, block 2 would have to wait for block 1.


# %%
def race_in_blocks(row, seed, position, size=512):
    """The winner of a race, block by block."""
    winners = []
    for start in range(0, len(row), size):
        ids = torch.arange(start, start + size)
        noise = -torch.log(
            -torch.log(uniform(torch.tensor([[seed]]), torch.tensor([[position]]), ids))
        )
        place = (row[ids] + noise[0]).argmax()
        winners.append((float(row[ids][place] + noise[0, place]), int(ids[place])))
    return max(winners)[1]


rows = torch.randn(100, 2048, generator=torch.Generator().manual_seed(0))
seeds, positions = torch.full((100,), 5), torch.arange(100)
whole = race(rows, torch.ones(100), seeds, positions).tolist()
pieces = [race_in_blocks(row, 5, position) for position, row in enumerate(rows)]
print("the same winners in blocks of 512:", whole == pieces)

# %% [markdown]
# ## A seed for each request
#
# Random numbers of a computer usually come from a **generator**: a state that moves on with each
# number. Then what a request draws depends on how many numbers were taken before. In an engine that
# means: on who else is in the batch, in which row it is, whether it was preempted. A user who asks
# twice with the same seed gets two texts.
#
# `uniform` has no state. It is Philox ([Salmon and others,
# 2011](https://doi.org/10.1145/2063384.2063405)): a cipher, of which one wants nothing but that its
# output looks random. The seed is the key (its lowest 32 bits); the position and the token are what
# is enciphered. Ten rounds of multiplying and mixing:

# %%
key, token, position = torch.tensor([7]), torch.tensor([300]), torch.tensor([20])
for name, triple in {
    "seed 7, token 300, position 20": (key, token, position),
    "the same once more": (key, token, position),
    "token 301": (key, token + 1, position),
    "position 21": (key, token, position + 1),
    "seed 8": (key + 1, token, position),
}.items():
    print(f"{name:32} {philox(*triple).item():10}")

# %% [markdown]
# Whoever asks for the noise of (seed, position, token), in whatever batch, gets the same. A request
# that is preempted computes its tokens again, and draws again only at its new position. Nothing
# must be kept for it and nothing rewound. What does it cost? That comes at the end.
#
# ## Temperature
#
# The same scores at four temperatures. The last bar is all that have no bar of their own.

# %% tags=["nbval-ignore-output"]
pictures_09.temperatures(logits, words, (0.5, 1.0, 1.5, 2.5))

# %% [markdown]
# At a high temperature the tail comes up. Each of its tokens is unlikely, but there are two
# thousand of them, and almost all are wrong. One such token, and the story goes astray. What F says
# with one seed at four temperatures:

# %%
for temperature in (0.6, 1.2, 1.8, 2.5):
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=5)
    print(f"{temperature}: {tokenizer.decode(engine().generate([fox], params)[0])!r}")

# %% [markdown]
# ## Cutting the tail
#
# Two filters cut it off. Both are easy to say for a row of scores that is **sorted**, best first:
# they keep its beginning. (What goes gets the score `-inf`, and the race takes care of the rest.)
# So the row is sorted once, for both.
#
# **top-k** keeps the `top_k` best tokens.
#
# ### Write it
#
# `keep_top_k(top_k, vocab_size)` says which places of the sorted rows stay.
#
# - `top_k`: `[rows]`, whole numbers; each row has its own. 0 means that all stay, and so does a
#   number over `vocab_size`.
# - The result: bool, `[rows, vocab_size]`; place 0 is the best token of its row.
#
# An example: `top_k` of 2 and 0, with 4 tokens: `[[True, True, False, False], [True] * 4]`.


# %%
@exercise("nanoteach.sampling_filters.keep_top_k")
def keep_top_k(top_k: Tensor, vocab_size: int) -> Tensor:
    """Which places of a sorted row top-k leaves, bool `[rows, vocab_size]`; 0 leaves them all."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `torch.arange(vocab_size)` has the places. Compare them with each row's number, which needs a
# dimension to be compared along.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Two conditions, joined by `|`: the place is among the first ones, or this row's number is 0.
#
# </details>

# %%
show("nanoteach.sampling_filters.keep_top_k")

# %% [markdown]
# How large should k be? After "She was the most" eight tokens make sense, after "There was" one
# does. A fixed number is too few in one place and too many in another. **top-p**, or nucleus
# sampling ([Holtzman and others, 2019](https://arxiv.org/abs/1904.09751)), asks for a share: keep
# the fewest best tokens that have `top_p` of the probability between them.
#
# An example: 0.5, 0.3, 0.15, 0.05 and a `top_p` of 0.7. The first has 0.5, which is not enough. The
# first two have 0.8, and that is. So two stay. **The token that crosses the line stays**; without
# it the share would not be reached. Said from the other side: a token stays while those *before*
# it have less than `top_p`.
#
# ### Write it
#
# `keep_top_p(probabilities, top_p)`:
#
# - `probabilities`: `[rows, vocab_size]`, each row sorted, best first. `top_p`: `[rows]`.
# - The result: bool, `[rows, vocab_size]`.
# - The first token always stays, however small `top_p` is.
# - A `top_p` of 1 keeps all. Take care: a sum of float32 numbers may reach 1 before its end.


# %%
@exercise("nanoteach.sampling_filters.keep_top_p")
def keep_top_p(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Which places of a sorted row top-p leaves, bool, as `probabilities` `[rows, vocab_size]`."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `cumsum(-1)` has at each place the sum up to it, the place itself included. You want the sum of
# those before. It stands in the same tensor, elsewhere.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `roll(1, dims=-1)` moves every place one to the right; what falls out at the end comes in at the
# front, and must be put right there. The two special rows, a tiny `top_p` and one of 1, can be
# joined with `|`, or by what you write at the front.
#
# </details>

# %%
show("nanoteach.sampling_filters.keep_top_p")

# %%
ranked = probabilities.sort(descending=True).values
for share in (0.5, 0.9, 0.99, 0.999):
    count = int(keep_top_p(ranked[None], torch.tensor([share])).sum())
    print(f"top_p {share}: {count} of {len(ranked):,} tokens")

# %% tags=["nbval-ignore-output"]
halved = int(keep_top_p((ranked.log() / 2).softmax(-1)[None], torch.tensor([0.9])).sum())
reveal("tokens that have 90% of the probability when all scores are halved", halved, "of 2,048")

# %% [markdown]
# `filter_ranked` puts the two together, on sorted scores. It divides by the temperature for top-p
# alone; what it returns is not divided, since the race does that. Afterwards each score goes back
# to its token's place.

# %%
show("nanoteach.sampling_filters.filter_ranked")

# %% [markdown]
# **The order counts.** First the temperature, then top-k, then top-p, on what top-k has left. With
# the temperature last, a hot request would draw from the nucleus of a cold one. Both exist: vLLM
# has the temperature first, llama.cpp has it last ([a user
# asks](https://github.com/ggml-org/llama.cpp/issues/4091)). What that is worth here:

# %%
for heat in (0.5, 1.0, 2.0):
    counts = [
        int((pictures_09.filtered(logits / before, 1.0, 0, 0.9) > 0).sum()) for before in (heat, 1)
    ]
    print(
        f"temperature {heat}, top_p 0.9: {counts[0]:3} tokens stay; temperature last: {counts[1]}"
    )

# %% [markdown]
# Turn the knobs. The pale bars are what the temperature makes of the scores, the blue ones what is
# drawn from.

# %% tags=["nbval-ignore-output"]
widgets.Panel(
    pictures_09.SamplingExplorer(logits, words, temperature=1.5, top_p=0.9),
    widgets.Control("slider", "temperature", "temperature", [0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0]),
    widgets.Control("slider", "top_k", "top_k (0: off)", [0, 1, 2, 3, 5, 10, 20, 50]),
    widgets.Control("slider", "top_p", "top_p", [0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 1.0]),
)

# %% [markdown]
# ## Drawn and compared
#
# Is it right? The filters can be compared with loops (the tests do). For the draws as a whole there
# is a way that trusts nobody: draw 2,000 times and count. `pick` is all of the stage for some rows:
# sort, filters, race. `Rules` has what each row asks for. Each draw has a position of its own, as
# in a text of 2,000 tokens.

# %%
COUNT = 2000
SETTINGS = {"temperature 2": (2.0, 0, 1.0), "top_k 5": (1.0, 5, 1.0), "top_p 0.8": (1.0, 0, 0.8)}
shown = [words[token] for token in logits.argsort(descending=True)[:7].tolist()] + ["others"]


def drawn(temperature, top_k, top_p):
    """How often each of the 7 best tokens was drawn, and how often another one."""
    found = Counter()
    for positions in torch.arange(COUNT).split(200):
        rows = len(positions)
        rules = Rules(
            seeds=torch.full((rows,), 11),
            positions=positions,
            top_k=torch.full((rows,), top_k),
            temperatures=torch.full((rows,), temperature),
            top_p=torch.full((rows,), top_p),
        )
        tokens, _ = pick(logits.expand(rows, -1), rules, race)
        found.update(tokens.tolist())
    best = [found[token] for token in logits.argsort(descending=True)[:7].tolist()]
    return [*best, COUNT - sum(best)]


def expected(temperature, top_k, top_p):
    """The same as probabilities, by loops over the sorted tokens, in Python's floats."""
    weights = sorted((math.exp(x / temperature) for x in logits.double().tolist()), reverse=True)
    weights = weights[: top_k or len(weights)]
    kept, total = [], sum(weights)
    while not kept or (len(kept) < len(weights) and sum(kept) < top_p * total):
        kept.append(weights[len(kept)])
    shares = [weight / sum(kept) for weight in kept] + [0.0] * 7
    return [*shares[:7], sum(shares[7:])]


found = {name: drawn(*setting) for name, setting in SETTINGS.items()}
right = {name: expected(*setting) for name, setting in SETTINGS.items()}

# %% tags=["nbval-ignore-output"]
pictures_09.compared(shown, {name: (right[name], found[name]) for name in SETTINGS})

# %% [markdown]
# The dots lie at the tops of the bars, as far as 2,000 draws can tell; the line through a dot is
# twice its standard error to each side. Is that near enough? The **chi-squared**
# statistic adds up, for each token, the squared distance between count and expectation, over the
# expectation. Tables say what a right sampler stays under in 999 of 1,000 cases. That a test like
# this can fail is shown on a sampler with the most common slip, a top-p without the token that
# crosses the line:

# %%
LIMITS = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}  # by tokens - 1


def verdict(found, right):
    """Whether these counts may come from these probabilities."""
    if any(n and not p for n, p in zip(found, right, strict=True)):
        return "no: it drew what must not be drawn"
    possible = [(n, COUNT * p) for n, p in zip(found, right, strict=True) if p]
    statistic = sum((n - wanted) ** 2 / wanted for n, wanted in possible)
    limit = LIMITS[len(possible) - 1]
    return f"yes, under {limit}" if statistic < limit else f"no, over {limit}"


for name in SETTINGS:
    print(f"{name:14} {verdict(found[name], right[name])}")


def too_narrow(probabilities, top_p):
    """Drops the token that crosses the line."""
    keep = probabilities.cumsum(-1) <= top_p[:, None]
    keep[:, 0] = True
    return keep | (top_p[:, None] >= 1)


with installed({"nanoteach.sampling_filters.keep_top_p": too_narrow}):
    print(f"one too few    {verdict(drawn(*SETTINGS['top_p 0.8']), right['top_p 0.8'])}")

# %% [markdown]
# ## How likely it was
#
# Some users want to know not only the token but its **logprob**, the logarithm of its probability,
# and those of the best tokens beside it: to see where the model was in doubt, or to compare two
# answers by their sums. They are those of the scores as the model gives them, before temperature
# and filters.
#
# In a sorted row they are easy, too. The best tokens are the first places. And the **rank** of the
# drawn token, 1 for the best, is its place plus one.
#
# ### Write it
#
# `score(ranked, order, tokens)` returns a `Scores` of three tensors, `[rows, 1 + best]` each.
#
# - `ranked`: `[rows, vocab_size]`, sorted scores; `order`: which token is in each place; `tokens`:
#   `[rows]`, the drawn ones.
# - `best` is `MAX_LOGPROBS`, which is 20, or all tokens where there are fewer.
# - In each row of the result, the drawn token comes first, and after it the best ones in their
#   order, whether it is among them or not. `Scores(tokens, ranks, logprobs)`.
#
# An example with 3 tokens: their scores are $\ln 1$, $\ln 4$ and $\ln 3$, so `order` is
# `[1, 2, 0]`. Token 2 was drawn. Tokens `[2, 1, 2, 0]`, ranks `[2, 1, 2, 3]`, and as logprobs the
# logarithms of 0.375, 0.5, 0.375 and 0.125.


# %%
@exercise("nanoteach.sampling_filters.score")
def score(ranked: Tensor, order: Tensor, tokens: Tensor) -> Scores:
    """Log probabilities before temperature and filters, of `tokens` `[rows]` and of the best."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Think in places. Which places of the sorted row does the result want? The best ones are 0, 1, 2
# and so on. With a tensor of places, `gather(1, places)` takes tokens out of `order`, and logprobs
# out of a log-softmax of `ranked`.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The place of the drawn token is where `order` equals it: a row of one True among False. `argmax`
# of it (as int) says where. `torch.cat` puts it before the others; `expand` gives every row the
# same best places.
#
# </details>

# %%
show("nanoteach.sampling_filters.score")

# %% [markdown]
# ## Plug it in
#
# `Engine` has all of it, under vLLM's names. F, with a seed, a nucleus, and logprobs: those of the
# two best tokens of each place, and of the drawn one where it is a third.

# %%
llm = Engine("tiny", device="cpu")
params = SamplingParams(max_tokens=14, temperature=0.9, top_p=0.95, seed=5, logprobs=2)
(output,) = llm.generate([fox], params, use_tqdm=False)
completion = output.outputs[0]
for token, told in zip(completion.token_ids, completion.logprobs, strict=True):
    mine, *others = told[token], *(told[t] for t in told if t != token)
    beside = ", ".join(f"{x.decoded_token!r} {math.exp(x.logprob):.2f}" for x in others)
    print(
        f"{mine.decoded_token!r:10} {math.exp(mine.logprob):.2f} rank {mine.rank}; beside {beside}"
    )

# %% [markdown]
# ### In the recorded step
#
# A GPU's step is recorded (notebook 08). It takes the best token, or runs the race over all of
# them, inside the graph. Filters and logprobs are not in it: a sort of every row would cost those
# who want none. So the graph stays as it is, and leaves behind what came out of the last layer.
# After it, for the rows that ask for more, `SamplingTail` computes the scores once more, sorts,
# filters, draws, and puts its token in the place of the graph's own.
#
# This tail is graphs, too: one each for 1, 4, 16 and 32 rows. The rows go through in slices of at
# most 32. A slice is copied to where the graphs read, and takes the smallest that has room for it;
# what its padding draws is not used. All of that is launched without waiting: the next step, which
# has been promised these tokens, reads them on the GPU.
#
# Without a GPU the same code runs around a slow decoder, with a `Rerun` for each graph. Three
# requests, one of them without filters and logprobs, on the runner of stage 6 and on that of stage
# 8, which is told that there are filters, and has room for 16 requests:

# %%
wishes = [
    SamplingParams(10, temperature=1.0, top_k=20, top_p=0.9, seed=1, logprobs=3, ignore_eos=True),
    SamplingParams(10, temperature=1.3, seed=2, ignore_eos=True),
    SamplingParams(10, temperature=0.8, top_p=0.7, seed=3, ignore_eos=True),
]
plain = engine().generate([fox] * 3, wishes)
core = build_graphs(replace(parts(), filters=True))
graphs = core.generate([fox] * 3, wishes)
sizes = sorted(core.runner.tail.recorded)
print("stage 6's runner and stage 8's draw the same:", plain == graphs)
print("rows that its tail is recorded for:", sizes, "and 2 rows take", bucket(sizes, 2))

# %% [markdown]
# ## Prove it
#
# **The greedy ones.** Ragged requests that want the best token, beside others that draw. The first
# must give the tokens of transformers, as in every notebook:

# %%
animals = ("fox", "bear", "mouse", "otter", "goat", "dragon")
prompts = [chat(f"Tell me a story about a {animal}.") for animal in animals]
prompts += [chat("What is 27 plus 48?"), list(tokenizer.encode("The")), prompts[0] * 2]
greedy = [SamplingParams(max_tokens=5 + 4 * i) for i in range(len(prompts))]
hot = SamplingParams(max_tokens=20, temperature=1.2, top_k=50, logprobs=1, ignore_eos=True)
core = engine(num_gpu_blocks_override=24)
outputs = core.generate([*prompts, *prompts], [*greedy, *[hot] * len(prompts)])
print(compare(references(folder, prompts, greedy, eos), outputs[: len(prompts)]),
      f"({core.scheduler.num_preemptions} preemptions)")  # fmt: skip

# %% [markdown]
# **The seeded ones.** Four requests, each alone. Then all of them in 20 random batches, with others
# that have no seed, in chunks of at most 24 tokens, with prefixes from the cache, and in a pool so
# small that somebody is preempted:

# %%
mine = [
    (fox, SamplingParams(12, temperature=0.8, seed=1)),
    (fox, SamplingParams(12, temperature=1.5, top_k=40, seed=2**40 + 5)),
    (chat("Who are you?"), SamplingParams(12, temperature=1.0, top_p=0.9, seed=1)),
    (prompts[-1], SamplingParams(12, temperature=2.0, top_p=0.95, top_k=100, seed=4)),
]
alone = [engine().generate([prompt], params)[0] for prompt, params in mine]
rng, core = random.Random(0), engine(num_gpu_blocks_override=22, max_num_batched_tokens=24)
same = 0
for _ in range(20):
    others = [(rng.choice(prompts), hot) for _ in range(rng.randint(0, 5))]
    batch = rng.sample([*mine, *others], len(mine) + len(others))
    drawn_now = core.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    same += sum(
        drawn_now[batch.index(request)] == text for request, text in zip(mine, alone, strict=True)
    )
print(f"{same} of {20 * len(mine)} are what they were alone")
print("somebody was preempted:", core.scheduler.num_preemptions > 0)
print("somebody found a prefix:", core.scheduler.num_prefix_hits > 0)

# %% [markdown]
# This holds in float32. In bfloat16 the *scores* depend on the batch: a product of another shape is
# added up in another order. The noise is the same, but where two tokens are almost level, another
# one may win. vLLM, too, [promises no
# repetition](https://github.com/vllm-project/vllm/blob/v0.20.2/docs/usage/reproducibility.md) by
# default; in a mode of its own, batch invariance, its scores do not depend on the batch.
#
# **The logprobs.** Beside those of transformers, for F's 14 tokens from above:

# %%
theirs = open_model(folder)
with torch.inference_mode():
    text = torch.tensor([fox + completion.token_ids])
    reference = theirs(text).logits[0, len(fox) - 1 : -1].log_softmax(-1)
gaps = [
    abs(told[token].logprob - float(row[token]))
    for row, told in zip(reference, completion.logprobs, strict=True)
    for token in told
]
print(f"{len(gaps)} logprobs, the largest difference is under 0.001: {max(gaps) < 1e-3}")

# %% [markdown]
# ## What it costs
#
# On this machine: a decode step of a toy with 512 tokens, one request and four, by what they ask
# for. (`python -m nanoteach.bench.sampling` measures it for the shape of Qwen3-0.6B on a GPU.)

# %% tags=["nbval-ignore-output"]
core = bench.build("toy", torch.device("cpu"), 4, 64)
for batch in (1, 4):
    for name, wish in bench.WISHES.items():
        took = median(bench.step_times(core, batch, 12, 9, **wish))
        print(f"batch {batch}, {name:13} {took:6.2f} ms")

# %% [markdown]
# And the noise alone, for 64 rows of 2,048 tokens: a generator for each request, as PyTorch has
# them, and the function of (seed, position, token):

# %% tags=["nbval-ignore-output"]
generators = [torch.Generator().manual_seed(seed) for seed in range(64)]
noise = torch.empty(64, 2048)


def by_generators():
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)


def by_function():
    return uniform(torch.arange(64)[:, None], torch.arange(64)[:, None], torch.arange(2048))


for name, run in (("64 generators", by_generators), ("a function", by_function)):
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    print(f"{name:14} {1e3 * median(samples):6.2f} ms")

# %% [markdown]
# Here the function loses. PyTorch has no operation for Philox, so ours is made of many, each over
# the whole matrix. Count them, as in notebook 08:


# %%
class Calls(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


with Calls() as calls:
    by_function()
print(f"a matrix of noise is about {round(calls.count, -2)} operations")

# %% [markdown]
# In a kernel all of that happens in registers, beside a score that is being read anyway. A
# generator for each request costs a GPU something else: a launch for each row, 256 of them in a
# step of 256. Decode steps with about 256 tokens of history, as they were recorded:

# %% tags=["nbval-ignore-output"]
costs = pictures_09.recorded_costs()
base = {cost.batch: cost.step_ms for cost in costs if cost.wish == "greedy"}
print(where("sampling_h200"))
for cost in costs:
    steps = cost.step_ms / base[cost.batch]
    print(f"batch {cost.batch:3}, {cost.wish:13} {cost.step_ms:6.2f} ms, {steps:.2f} greedy steps")
    if (cost.batch, cost.wish) == (64, "top-k, top-p"):
        of_64 = steps
reveal("H200, 64 requests: a step with top-k and top-p, in greedy steps", of_64, "steps")

# %% [markdown]
# A temperature costs next to nothing. Filters and logprobs cost many times the bytes of a sort.
# Why? At first the tail was not recorded: the host launched its operations one by one, for each
# slice anew. How many `pick` has, with the race in one kernel:

# %%
rules = Rules(*torch.ones(3, SLICE).long(), *torch.ones(2, SLICE))
with Calls() as calls:
    pick(torch.zeros(SLICE, 2048), rules, lambda scores, *draws: scores.argmax(-1))
print(f"about {round(calls.count, -1)} operations a slice")

# %% [markdown]
# That looked like notebook 08's waste. We predicted that in graphs 256 requests with filters would
# come down to 7 or 8 ms, and recorded the tail. The step before and after, what each slice adds to
# the greedy step now, and what sorting it would take at best:

# %% tags=["nbval-ignore-output"]
print(f"launched: {where('sampling_launched_h200')}")
for before, cost in zip(pictures_09.recorded_costs("sampling_launched_h200"), costs, strict=True):
    if cost.wish in ("top-k, top-p", "logprobs"):
        slices, rows = math.ceil(cost.batch / SLICE), min(cost.batch, SLICE)
        added = (cost.step_ms - base[cost.batch]) / slices
        print(f"batch {cost.batch:3}, {cost.wish:12}  {before.step_ms:5.2f} to {cost.step_ms:5.2f} "
              f"ms; {slices} x {rows:2} rows, {added:.2f} ms each; "
              f"to sort them {1e3 * rows * sort:.3f}")  # fmt: skip

# %% [markdown]
# One request gained a third and more. From 16 on, filters take nearly what they took: **the
# prediction was wrong**. To replay a graph costs the host the same for one row as for 32. So in a
# slice of 32 rows no more than what one row takes can be launches. The rest is the GPU's own work,
# and while it was busy, the host had launched what came next. It is not the bytes of a sort either.
# Which operations take the time, we have not measured.
#
# Logprobs gained more, a third at 256 requests. But an earlier run of the launched tail was as fast
# as the graphs there (`notes/gpu.md`): how long launches take is not the same in every run.

# %% [markdown]
# ## Bug clinic
#
# A patient. It found `uniform` slow, too, and gave each row of the batch a generator of its own. It
# was careful: a generator goes on where it was, and when another request comes into the row, or one
# begins anew, the row gets a new generator from the request's seed.


# %%
def patient():
    """A race with a generator for each row."""
    generators, last = {}, {}

    def race_by_rows(logits, temperatures, seeds, positions):
        noise = torch.zeros(logits.shape)
        requests = zip(seeds.tolist(), positions.tolist(), strict=True)
        for row, (seed, position) in enumerate(requests):
            if last.get(row) != (seed, position - 1):  # somebody else was here
                generators[row] = torch.Generator().manual_seed(seed)
            last[row] = seed, position
            u = torch.rand(logits.shape[1], generator=generators[row]).clamp(1e-10, 1 - 1e-7)
            noise[row] = -torch.log(-torch.log(u))
        heat = temperatures[:, None]
        drawn = logits.float() / torch.where(heat == 0, 1, heat) + torch.where(heat == 0, 0, noise)
        return drawn.argmax(-1)

    return race_by_rows


# %% [markdown]
# Its tests: the distribution is right, and the same request twice gives the same text. Then a user
# complains: "I have a seed, and most of the time I get my text. Sometimes it begins as always and
# then turns into another one."
#
# Here is that user's request U beside another one, A, that ends after some tokens. For each step:
# who is in which row.


# %%
def watched(race, others, seed=50):
    """U's text beside requests with these numbers of tokens, and who was in which row.

    U's seed is 7, and those of the others begin at `seed`.
    """
    with installed({"nanoteach.sampler.race": race}):
        core = engine()
        hot = SamplingParams(12, temperature=2.5, top_k=40, seed=7, ignore_eos=True)
        for i, count in enumerate(others):
            core.add_request(
                "ABC"[i], prompts[1 + i], replace(hot, max_tokens=count, seed=seed + i)
            )
        seq, trace = core.add_request("U", fox, hot), []
        execute = core.runner.execute

        def told(scheduled):
            trace.append("".join(part.seq.request_id for part in scheduled))
            return execute(scheduled)

        core.runner.execute = told
        while core.has_unfinished_requests():
            core.step()
    return seq.output_token_ids, trace


ill = patient()
usual, _ = watched(ill, [])
print(f"alone: {tokenizer.decode(usual)!r}, and again: {watched(ill, [])[0] == usual}")
for others in ([20], [5], [5, 9]):
    text, trace = watched(patient(), others)
    print(f"others with {others} tokens: {tokenizer.decode(text)!r}")
    print("   rows, step by step:", " ".join(trace[:13]))

# %% [markdown]
# Up to where is U's text the usual one, and what happened then? What is written down for a row, and
# what should it be written down for? Mend it: as it stands this is the patient.


# %%
def mended():
    """Your mend."""
    return patient()


# %%
def examine(make):
    """Whether U has its text in any company."""
    usual, _ = watched(make(), [])
    texts = [watched(make(), others)[0] for others in ([20], [5], [5, 9], [1, 1, 1])]
    texts.append(watched(make(), [5, 9], seed=6)[0])  # B has U's seed
    return "well again" if all(text == usual for text in texts) else "still ill"


print(examine(mended))

# %% [markdown]
# <details><summary>The diagnosis</summary>
#
# The state belongs to a row, and a request does not. When A ends, U moves up from row 1 to row 0.
# Row 0 has last seen A, so it takes U for a newcomer and begins its noise anew, from the seed. From
# there on U draws with the random numbers of its own first tokens. Until A ends, all is as usual,
# and where A outlives U nothing is seen at all.
#
# One mend is to keep the generators by request, and to move them whenever rows move, to keep them
# through a preemption, and to throw them away in the end. (To keep them by seed is not enough: two
# requests may have the same.) The other is to keep nothing. What a generator would have by now must
# be a function of the seed and the position:
#
# ```python
# def mended():
#     def race_by_place(logits, temperatures, seeds, positions):
#         noise = torch.zeros(logits.shape)
#         requests = zip(seeds.tolist(), positions.tolist(), strict=True)
#         for row, (seed, position) in enumerate(requests):
#             generator = torch.Generator().manual_seed(seed * 2**20 + position)
#             u = torch.rand(logits.shape[1], generator=generator).clamp(1e-10, 1 - 1e-7)
#             noise[row] = -torch.log(-torch.log(u))
#         heat = temperatures[:, None]
#         cold = heat == 0
#         drawn = logits.float() / torch.where(cold, 1, heat) + torch.where(cold, 0, noise)
#         return drawn.argmax(-1)
#
#     return race_by_place
# ```
#
# `uniform` is this without the generators.
#
# </details>
#
# All of it has happened. On Tenstorrent's accelerators a model [kept its seeds by
# slot](https://github.com/tenstorrent/tt-metal/issues/46350): "seeded requests with uneven length
# will cause misalignment" when vLLM moves rows up. In vLLM's first engine a preempted request [got
# a new generator](https://github.com/vllm-project/vllm/pull/19940) when it came back, and its noise
# began anew. And on a CPU a seed was [ignored when anybody else in the batch had
# none](https://github.com/vllm-project/vllm/issues/51226), because of a fast path for the batch as
# a whole. (The code above is ours, and not theirs.)
#
# Test a seed in company: others that come, that leave, that have none, and a pool that runs out.
#
# ## What moved
#
# - Each request draws in its own way, in one batch. The rows that ask for filters or logprobs are
#   sorted, once. The others are not; but who shares a step with them waits for its end.
# - Noise is a function of seed, position and token. Nothing is kept for a request, so nothing can
#   be lost.
# - The tail is recorded like the step. That helps where launches were the limit: with one request.
# - **The bottleneck now**: without filters the speed is what it was; with them a larger step waits
#   for the GPU's own work on all of the scores. And what the engine lacks is a way in. Requests
#   still come from a Python list: notebook 10 puts a server in front.
#
# ### In other engines
#
# - **nano-vLLM**,
#   [nanovllm/layers/sampler.py](https://github.com/GeeeekExplorer/nano-vllm/blob/cde3fc22c2694ba8052f7df0b5e05ef7e10c8603/nanovllm/layers/sampler.py):
#   the same race, in four compiled lines, with a temperature and PyTorch's own generator.
# - **vLLM** 0.20.2,
#   [vllm/v1/sample/ops/topk_topp_sampler.py](https://github.com/vllm-project/vllm/blob/v0.20.2/vllm/v1/sample/ops/topk_topp_sampler.py):
#   filters and the race; a request with a seed has a `torch.Generator`, and a call for its row.
#   From 8 rows on
#   [a kernel](https://github.com/vllm-project/vllm/blob/v0.20.2/vllm/v1/sample/ops/topk_topp_triton.py)
#   filters, without a sort.
#   [sampler.py](https://github.com/vllm-project/vllm/blob/v0.20.2/vllm/v1/sample/sampler.py) has
#   the order of all steps in its docstring.
#
# ### To read
#
# - Holtzman and others, [The Curious Case of Neural Text
#   Degeneration](https://arxiv.org/abs/1904.09751) (2019): why the best token makes dull text, and
#   the nucleus.
# - Salmon and others, [Parallel Random Numbers: As Easy as 1, 2,
#   3](https://doi.org/10.1145/2063384.2063405) (2011): noise without a state.
# - Maddison and others, [A* Sampling](https://arxiv.org/abs/1411.0030) (2014), section 2: the race
#   in its other form, with Gumbel noise.
# - `sampling_filters.py` and `sampling_tail.py`: all of this stage.
