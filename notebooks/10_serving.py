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
# # 10 · Serving
#
# **At the end the engine answers over HTTP, to many callers at once, a piece of text at a time; and
# you know how many requests a second it can bear.**
#
# 75 minutes. It needs notebook 04 (requests that come and go), 05 (prefixes) and 06 (the token
# budget). No GPU. If nanoteach was installed without its tools, the server needs
# `pip install -e '.[serve]' httpx openai`.

# %% tags=["nbval-ignore-output"]
import asyncio
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import decoders

from nanoteach import Engine
from nanoteach.async_engine import AsyncEngine, QueueFull
from nanoteach.bench.serve import LoadTest
from nanoteach.cost_model import SHAPES, VirtualClock, Work, step_cost
from nanoteach.course import (
    Live,
    exercise,
    open_notebook,
    pictures_10,
    predict,
    reveal,
    show,
    widgets,
)
from nanoteach.detokenizer import Detokenizer
from nanoteach.hardware import hardware_named
from nanoteach.hub import resolve_model
from nanoteach.loader import eos_token_ids
from nanoteach.reference import compare, references
from nanoteach.server import running
from nanoteach.types import SamplingParams

logging.disable(logging.WARNING)
open_notebook(10)

# %% [markdown]
# ## Waiting for the whole
#
# So far somebody called `generate`, and waited. **Request F** asks for a story about a fox. On the
# simulated clock of an H200 that runs Qwen3-0.6B, with the tokens of `tiny`:

# %%
qwen, h200 = SHAPES["qwen3-0.6b"], hardware_named("h200")
fox = [{"role": "user", "content": "Tell me a story about a fox."}]
slow = Engine("tiny", device="cpu", num_gpu_blocks_override=400, clock=VirtualClock(qwen, h200))
(output,) = slow.chat(fox, SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)
first, gaps = output.time_to_first_token, output.inter_token_times
print(
    f"the first token after {1e3 * first:.2f} ms, all 64 after {1e3 * (first + sum(gaps)):.1f} ms"
)

# %%
times = [first + sum(gaps[:i]) for i in range(len(gaps) + 1)]
pictures_10.waiting(times, times[-1])

# %% [markdown]
# The text was there, token by token, and the reader saw none of it. Nobody reads 64 tokens in 18
# milliseconds, but a long answer on a busy server takes half a minute. Two more things are wrong
# with `generate`. A second caller has to wait until the first one's call returns. And a caller who
# no longer wants the answer can't say so.
#
# A server has to do three things: turn tokens into text **while they come**, let callers **come and
# go** while steps are run, and **say no** when there are too many.
#
# How many is too many? Requests for Qwen3-0.6B come to the H200 at random times, each with 128 to
# 4,096 tokens in and 32 to 128 out, and from minute to minute there are more: 4, 8, 16, 32, 48, 64
# and 96 a second. A rate **holds** if 99 of 100 first tokens come within half a second, and at
# least 85% as many requests leave as come. The highest rate up to which all hold is called **the
# knee**. Before you read on: where is it?

# %%
predict(
    "H200: requests a second at the knee, 128 to 4,096 tokens in, 32 to 128 out", ..., "a second"
)

# %% [markdown]
# The cost model gives a bound. A request of medium length has 2,112 tokens in and 80 out. If 256 of
# them decode side by side, each pays for its own prefill and for a 256th of 80 decode steps:

# %%
decode = step_cost(qwen, [Work(1, 2112 + 40)] * 256).seconds(h200)
prefill = step_cost(qwen, [Work(2112, 0)]).seconds(h200)
each = prefill + 80 * decode / 256
print(f"a decode step of 256: {1e3 * decode:.2f} ms; one prompt: {1e3 * prefill:.2f} ms")
print(f"so a request takes {1e3 * each:.2f} ms of the GPU: at most {1 / each:,.0f} a second")

# %% [markdown]
# ## Text from tokens, while they come
#
# The easy way is to decode each token and send it. Look at what comes of it:

# %%
llm = Engine("tiny", device="cpu", num_gpu_blocks_override=1200)
text = "A fox: 🦊, and a café."
tokens = llm.tokenizer.encode(text)
print("token by token:", "|".join(llm.tokenizer.decode([token]) for token in tokens))
print("all together:  ", llm.tokenizer.decode(tokens))

# %% [markdown]
# `tiny` has tokens for bytes, and the fox is four of them. Half a fox is no character: a decoder
# writes a replacement character, U+FFFD, and what was sent can't be taken back. Llama's
# tokenizer has a second habit. Its tokens carry the space *before* a word (as "▁"), and its decoder
# drops the space at the start of a text. And a third: where it has no token for a character it has
# one for each byte, and a run of such bytes in which one is wrong comes out as replacement
# characters, *all of it*. Its decoder, built by hand:

# %%
spaces, start = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
llama = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), start])
words, fox_bytes = ["▁A", "▁fox", "▁ran"], ["<0xF0>", "<0x9F>", "<0xA6>", "<0x8A>"]
print("token by token:", "".join(llama.decode([word]) for word in words))
print("all together:  ", llama.decode(words))
print("the fox's four:", llama.decode(fox_bytes))
print("and a wrong one:", llama.decode([*fox_bytes, "<0xFF>"]))

# %% [markdown]
# So one asks another question. Not "what is this token's text?" but "**what did these tokens add to
# the text?**" Decode some tokens before them (the context), decode the context and the new ones
# together, and cut off what was there already. And one shows it only when nothing that may come can
# change it:
#
# ```
# context  pending           context's text   text of both   so
# [▁A]     [▁fox]            "A"              "A fox"        " fox" is the piece
# [▁A]     [F0 9F]           "A"              "A" and half   wait
# [▁A]     [F0 9F, A6 8A]    "A"              "A🦊"          "🦊" is the piece
# ```
#
# ### Write it
#
# `new_text(self, final)` of a `Detokenizer` says what the pending tokens add, or None.
#
# - `self.context` and `self.pending` are lists of token ids. `self.decode(token_ids)` gives a text.
# - `self.is_settled(text)` says whether the text *of context and pending tokens together* stays as
#   it is, whatever comes next.
# - None: nothing was added yet, or it may still change. With `final` no more tokens will come: then
#   the piece is what is there, half a character and the empty text included.
# - Change nothing: the caller moves the tokens on and writes the text.


# %%
@exercise("nanoteach.detokenizer.Detokenizer.new_text")
def new_text(self, final: bool):
    """What the pending tokens add to the text, or None if it is to wait for more of them."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two calls of `decode`. The longer text begins with the shorter one.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Three reasons decide. `final`: give what there is. The longer text is no longer than the other:
# wait. It is not settled: wait.
#
# </details>

# %%
show("nanoteach.detokenizer.Detokenizer.new_text")

# %%
detokenizer = Detokenizer(llm.tokenizer)
pieces = []
for token in tokens:
    before = len(detokenizer.text)
    detokenizer.extend([token])
    pieces.append(detokenizer.text[before:])
print("pieces:", "|".join(pieces))
print("joined:", "".join(pieces) == text)

# %% [markdown]
# ## A stop string has no respect for tokens
#
# A caller may say: stop when the text has "\n\nUser:" in it, and give me what comes before. The
# string may begin in the middle of one token and end in the middle of another. If the text so far
# is "Yes.\n\nUse", the last five characters must not be shown: with "r:" they become the stop
# string, and the reader would have seen half of it.
#
# It is safe to hold back always as many characters as the stop string has, less one. But then every
# reader is some characters behind, all of the time, for a string that may never come. What must
# wait is only what **could become** the stop string: an end of the text that is a beginning of it.
#
# ### Write it
#
# `overlap(text, stop)`: how many characters at the end of `text` are the first ones of `stop`?
#
# - The longest such beginning counts. It is shorter than `stop`: one that is there as a whole is
#   found elsewhere.
# - An example: "The EN" and "END" give 2; "EN END" would have ended before; "The END." gives 0.


# %%
@exercise("nanoteach.engine.overlap")
def overlap(text: str, stop: str) -> int:
    """How many characters at the text's end could become `stop`, which is not in it yet."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `text.endswith(...)` asks about one beginning of `stop`. How many are there?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Try them from the longest to the shortest, and take the first that fits.
#
# </details>

# %%
show("nanoteach.engine.overlap")

# %% [markdown]
# The package's version does not try every length: a client may send stop strings of a thousand
# characters, and every token of every request asks. It goes from one place where `stop` could begin
# to the next.
#
# F's story with two stop strings. A line for each token: the token, and the end of the text that
# the reader has. " lived" could become the first stop string, so it waits, until " in" comes. The
# second one could begin with the "a" of " a", and does begin in the middle of " mountain":

# %%
prompt = llm.apply_chat_template(fox)
params = SamplingParams(max_tokens=40, stop=[" lived on", "ain valley"])
for step in llm.stream(prompt, params):
    output = step.outputs[0]
    if len(output.token_ids) > 8:
        token = llm.tokenizer.decode(output.token_ids[-1])
        print(f"{token!r:12} {output.text[-21:]!r:24} {output.finish_reason or ''}")

# %% [markdown]
# ## Two threads and a queue
#
# The engine has no locks: one thread at a time. A web server has an **event loop**: one thread too,
# which serves thousands of connections by never waiting for any of them. A step takes milliseconds,
# and in that time the loop would answer nobody. So the engine gets a thread of its own, and the two
# exchange notes:
#
# ```
# event loop (all callers)                     engine thread
#
#   open ----- add these requests ------->  +----------+
#   close ---- abort this one ----------->  | commands |  all of them, then a step, then all ...
#   call ----- what are your counts? ---->  +----------+
#   Stream <-- what the step gave ---------  for everybody at once
# ```
#
# `AsyncEngine` is that bridge. A caller holds a `Stream`, and waits in it for the **newest** output
# of a request. Each output has all of the text so far, so a slow reader skips some and misses
# nothing, and nothing piles up for him.
#
# A notebook's cells have an event loop around them already, so we run ours in another thread:


# %%
def run(work):
    """Run a coroutine to its end, on an event loop of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


async def two_callers():
    """A long story and a short one, side by side."""
    async with AsyncEngine(llm) as async_engine:

        async def ask(name, prompt, max_tokens):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            async for output in async_engine.generate(prompt, params):
                text = output.outputs[0].text
            order.append(name)
            return text

        order = []
        texts = await asyncio.gather(
            ask("long", "There was once a fox", 60), ask("short", "There was once a bear", 8)
        )
        return order, texts


order, texts = run(two_callers())
print("done:", order)
print(texts[1])

# %% [markdown]
# ### Who may come in
#
# More callers than the engine can run wait in its queue. A queue without an end is a bad thing. If
# more come than are served, it grows for as long as that lasts, and *everybody* waits longer and
# longer, those included who gave up long ago. It is kinder to say no at once: "429, try again in a
# second". Turn the knobs. Eight requests run at once, an answer takes a second on average, so eight
# a second can be answered. What is waiting like at 7, at 7.8, at 9? And with room for 8 in the
# queue?

# %% tags=["nbval-ignore-output"]
widgets.Panel(
    pictures_10.QueueExplorer(rate=7.8),
    widgets.Control(
        "slider", "rate", "requests a second", [2.0, 4.0, 6.0, 7.0, 7.5, 7.8, 8.0, 9.0, 12.0]
    ),
    widgets.Control("slider", "room", "how many may wait (0: any)", [0, 1, 2, 4, 8, 16, 64]),
)

# %% [markdown]
# The same queue, asked for all six:

# %%
for room in (0, 8):
    for rate in (7.0, 7.8, 9.0):
        line = pictures_10.QueueExplorer(rate, room).line
        print(
            f"{rate} a second, {f'room for {room}' if room else 'no limit':10}: "
            f"the median waits {line.wait(0.5):5.2f} s, one of a hundred over "
            f"{line.wait(0.99):5.2f} s, {line.refused_share:4.1%} are refused"
        )

# %% [markdown]
# Just below what can be answered, chance alone makes a long queue. Above it the queue grows without
# end: of these 2,000 requests the later ones wait longer, and more of them would wait longer still.
# With room for 8 few are refused, and nobody waits long.
#
# ### Write it
#
# `admit(self, count)` of `AsyncEngine` decides whether `count` more requests may come in. (One HTTP
# request may bring several prompts: all come in, or none.)
#
# - `self.streams` has an entry for each open request, running or waiting. `self.max_open` is how
#   many may be open: `max_num_seqs` of the engine and `max_queue` together.
# - If `self.accepting` is False, the server is about to end: raise `EngineStopped`, however much
#   room there is. Else, if more than `max_open` would be open: raise `QueueFull`. Else return
#   nothing.
# - An example: 7 may be open, 5 are. Two more may come in, three may not.


# %%
@exercise("nanoteach.async_engine.AsyncEngine.admit")
def admit(self, count: int) -> None:
    """Whether `count` more requests may come in: all of them, or none."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Both exceptions are there, in the module in which your function runs; each takes a text.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Compare what there would be with what may be. Equal is allowed.
#
# </details>

# %%
show("nanoteach.async_engine.AsyncEngine.admit")

# %% [markdown]
# ### And who has left
#
# A reader closes the page, a program runs into its timeout. Nobody will read the answer, and the
# engine goes on computing it: every step pays for that row, and its blocks are missing to others.
# Whoever holds a stream must therefore close it in the end, however that comes about.
#
# ### Write it
#
# `close(self, stream)`:
#
# - `stream.request_ids` lists its requests. Those that are still this stream's in `self.streams` (a
#   dict from id to stream) are taken out of it, so that their places are free.
# - The engine is to abort them: `self._abort(request_id)` does that, and must run on the engine's
#   thread. `self.commands.put(function)` sends a function there, which is called without arguments.
# - Whoever is not in `streams` any more is left alone: to close twice does no harm.


# %%
@exercise("nanoteach.async_engine.AsyncEngine.close")
def close(self, stream) -> None:
    """Nobody reads this stream any more: forget its requests, and abort what still runs."""
    ...


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two things for each id: out of the dict, and a function into the queue.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A `lambda` in a loop sees the loop's variable as it is when it runs, not as it was when it was
# made. `partial(self._abort, request_id)` keeps today's value; `partial` is imported there.
#
# </details>

# %%
show("nanoteach.async_engine.AsyncEngine.close")


# %%
async def leaves_early():
    """Read three pieces of a long answer, and go."""
    async with AsyncEngine(llm) as async_engine:
        outputs = async_engine.generate(
            "There was once a fox", SamplingParams(max_tokens=2000, ignore_eos=True)
        )
        count = 0
        async for _ in outputs:
            count += 1
            if count == 3:
                break
        held = (await async_engine.call(Engine.stats)).num_used_blocks
        await outputs.aclose()
        after = (await async_engine.call(Engine.stats)).num_used_blocks
        return held, after


held, after = run(leaves_early())
print(f"blocks while it ran: {'some' if held else 'none'}; after: {after}")

# %% [markdown]
# ## Plug it in: HTTP
#
# What is left is words. OpenAI's API has become what everybody's client speaks, so the server
# speaks it: `POST /v1/chat/completions` with a JSON body; the answer is a JSON object or, with
# `stream` true, a list of **server-sent events**: lines that begin with `data: `, each a chunk,
# and an empty line after each. Here is a server, started in this notebook on a free port. (In a
# shell: `nanoteach serve --model tiny`.) And F, by hand:

# %% tags=["nbval-ignore-output"]
server = running(llm)
url = server.__enter__()
print(url)

# %% tags=["nbval-ignore-output"]
body = {"model": "tiny", "messages": fox, "temperature": 0, "max_tokens": 6, "stream": True}
with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            print("data:", choice["delta"], choice["finish_reason"] or "")
        elif line:
            print(line)

# %% [markdown]
# Six tokens; which of them share a chunk depends on who was quicker. The official client does not
# know that this is not OpenAI:

# %%
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
sum_of = [{"role": "user", "content": "What is 27 plus 48?"}]
answer = client.chat.completions.create(model="tiny", messages=sum_of, temperature=0)
print(answer.choices[0].message.content)
again = client.chat.completions.create(
    model="tiny", messages=sum_of, temperature=0, logprobs=True, top_logprobs=2, max_tokens=2
)
print("of", again.usage.prompt_tokens, "prompt tokens, in the cache:",
      again.usage.prompt_tokens_details.cached_tokens)  # fmt: skip
print([entry.token for entry in again.choices[0].logprobs.content[0].top_logprobs])

# %%
for wrong in ({"max_tokens": 9999}, {"n": 3}, {"stop": [""]}, {"model": "gpt-5"}):
    try:
        client.chat.completions.create(**{"model": "tiny", "messages": sum_of} | wrong)
    except openai.APIStatusError as error:
        print(error.status_code, error.body["message"])

# %% [markdown]
# A request that would be answered wrongly is refused with a reason; one field that is quietly
# ignored costs somebody a day.
#
# ## Prove it
#
# 24 ragged requests at once, over HTTP, greedy. `return_token_ids` is vLLM's: the tokens come with
# the text. (transformers takes some seconds for the same, one request after the other.)

# %%
folder = resolve_model("tiny")
animals = ("fox", "bear", "mouse", "otter", "goat", "dragon")
prompts = [llm.apply_chat_template([{"role": "user", "content": f"Tell me a story about a {a}."}])
           for a in animals] * 4  # fmt: skip
wishes = [SamplingParams(max_tokens=3 + 2 * i) for i in range(len(prompts))]


async def all_at_once():
    """The tokens of every answer, streamed."""

    async def ask(client, prompt, params):
        stream = await client.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=params.max_tokens, stream=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        return [token async for chunk in stream for token in chunk.choices[0].token_ids]

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:
        return await asyncio.gather(*map(ask, [client] * len(prompts), prompts, wishes))


print(compare(references(folder, prompts, wishes, eos_token_ids(folder)), run(all_at_once())))

# %% [markdown]
# ## Measure it
#
# What do the words cost? The same 24 requests, by `generate` and over HTTP. Server and client share
# this process here, so it is more than on a real server:

# %% tags=["nbval-ignore-output"]
alone = Engine("tiny", device="cpu", num_gpu_blocks_override=1200)
marks = [time.perf_counter()]
alone.generate(prompts, wishes, use_tqdm=False)
marks.append(time.perf_counter())
run(all_at_once())
marks.append(time.perf_counter())
print(f"by generate {marks[1] - marks[0]:.2f} s, over HTTP {marks[2] - marks[1]:.2f} s")

# %% [markdown]
# ### Metrics, while a load runs
#
# The page /metrics tells Prometheus what goes on, under vLLM's names. Here a load runs in the
# background: conversations of three turns begin at random times, and again and again we ask. Later
# turns find their history in the prefix cache: watch the green line.


# %%
def metrics():
    """What /metrics says: some gauges, and the share of looked-up tokens that were found."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    told = {
        sample.name.removeprefix("nanoteach:"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    hits, queries = told["prefix_cache_hits_total"], told["prefix_cache_queries_total"]
    return told | {"seconds": time.perf_counter() - began, "hit_rate": hits / max(1, queries)}


# %% tags=["nbval-ignore-output"]
began, samples = time.perf_counter(), []
load = LoadTest(url, [3], "chat", duration=4, input_len=(16, 48), output_len=(8, 24))
thread = threading.Thread(target=lambda: asyncio.run(load.run()))
thread.start()
place = Live()
while thread.is_alive() and time.perf_counter() - began < 60:
    samples.append(metrics())
    if len(samples) % 5 == 0:  # to draw takes time too
        place.update(pictures_10.over_time(samples, []))
    time.sleep(0.2)
thread.join()
place.update(pictures_10.over_time(samples, []))

# %% [markdown]
# The green line climbs: a later turn's prompt begins with all that was said before it, and those
# tokens are found. The axis is longer than the four seconds in which conversations begin: some come
# before, to warm up, and those that have begun take their further turns, with a second to think
# before each.
#
# ## The knee
#
# Now the question from the beginning. Requests arrive by a **Poisson process**, as from users who
# know nothing of each other, first at a low rate, then faster and faster. Three numbers for each
# rate. **TTFT**: from when a request was *due* to its first token. (Not from when the client sent
# it: a client that is late itself would hide how slow the server is.) **ITL**: from one piece of
# text to the next. And **goodput**: the requests a second that were quick enough to be of use; here
# that is a first token within 1 second and, on average, each further one within 0.1.
#
# With more requests a second a server first gets a little slower: more of them share its steps.
# Past its capacity it gets slower without end: the queue grows for as long as the load lasts. So
# the knee is the highest rate up to which 99 of 100 first tokens come in time, and requests leave
# as fast as they arrive. (At least 85% as fast: a short test has some noise.)


# %% tags=["nbval-ignore-output"]
def tell(level):
    """A rate's line, as soon as it is measured."""
    median, tail = (1e3 * level.ttft[share] for share in ("p50", "p99"))
    print(f"{level.rate:2g} a second: {level.offered:4.1f} came, {level.completed:4.1f} left, "
          f"first token p50 {median:7.1f} ms, p99 {tail:7.1f} ms")  # fmt: skip


sizes = {"input_len": (16, 48), "output_len": (4, 12)}
test = LoadTest(url, [4, 8, 16, 24, 60], duration=3, **sizes, on_level=tell)
run(test.run())
print(test.verdict)

# %% tags=["nbval-ignore-output"]
pictures_10.latency_against_load({"here": test.result()})

# %% [markdown]
# (`nanoteach bench serve` does this with more patience, against a server in its own process.)
#
# And on the H200, with the shape of Qwen3-0.6B and prompts of 128 to 4,096 tokens (`--slo-itl
# 0.05`). With a second for the first token nearly every rate that was tried held, so here it has
# half of one. Three servers. The steps of the first compute up to 8,192 tokens, those of the second
# up to 512. Notebook 06 said what to expect: small steps are short, so decodes never wait long, and
# a large prompt takes many of them. Large steps finish prompts sooner, and everybody who decodes
# waits meanwhile. What the third one is comes below.

# %% tags=["nbval-ignore-output"]
loads = pictures_10.recorded_loads(ttft_limit=0.5)
pictures_10.latency_against_load(loads)

# %% tags=["nbval-ignore-output"]
for name, result in loads.items():
    tried = ", ".join(f"{level['rate']:g}" for level in result["levels"])
    print(f"{name}: of {tried} requests a second the knee is {result['knee']:g}")
    for level in result["levels"]:
        if level["rate"] in (32, 64):
            first, half, tail = (
                1e3 * level[key][share]
                for key, share in (("ttft", "p50"), ("itl", "p50"), ("itl", "p99"))
            )
            print(f"    {level['rate']:g} a second: first token p50 {first:5.1f} ms, "
                  f"next piece p50 {half:4.1f}, p99 {tail:5.1f} ms")  # fmt: skip
reveal("H200: requests a second at the knee, 128 to 4,096 tokens in, 32 to 128 out",
       loads["steps of up to 8,192 tokens"]["knee"], "a second")  # fmt: skip

# %% [markdown]
# So it is, at 32 a second: with small steps the worst gaps are about a quarter, and first tokens
# come later. But small steps are also the first to be too few. At 64 a second prompts queue for
# them.
#
# ### The core in a process of its own
#
# The third server is the first one again, with all of it in a single process. It was tried at 32,
# 64 and 96 alone: 32 held and 64 did not. (48 was not tried, so its knee may lie above 32, but
# below the first one's 64.) At 64 a second the next piece comes ten times as late, from the same
# GPU.
#
# Of two Python threads in a process, one runs at a time: the one that has the global interpreter
# lock (GIL). For every token of every stream the event loop makes JSON and a system call, and
# meanwhile the engine's thread can't launch the next step. So the GPU waits for whoever writes to
# sockets. That is why, where there is a GPU, `nanoteach serve` runs the engine's core in a process
# of its own, as [vLLM
# does](https://github.com/vllm-project/vllm/blob/v0.20.2/vllm/v1/engine/core_client.py). The engine
# stays here, with text, streams and HTTP. What stands in the core's place here has the same
# methods; its `step` waits until the other process says what a step gave.
#
# A message is a list of `News`, one for each request of the step (its number, its token, when it
# came, why it ended if it did), or a `Failure`: the numbers of those that were in a step that
# raised. `inbox` has the messages that came before the answer to a question, and `has_news` says
# whether any lies ready. `by_number` has the request of every number. `woken` waits for a message,
# or for somebody here who wants something first: a new request, say, must be over there before the
# next step begins.

# %%
show("nanoteach.core_process.CoreProcess.step")

# %% [markdown]
# A number is the request's name over there. An id may be used again while news of its first use are
# still in the pipe, and a number is not. A request that was aborted here is no longer known when
# its last news come: they are dropped.
#
# If this process is the slower one, news of several steps lie ready. Then the engine takes them all
# before it makes text: several tokens, one piece, one system call. So it catches up.
#
# The bound from the beginning was for an engine that reaches the GPU's limits in every step, with
# no host beside it, and for requests that may wait as long as it takes:

# %%
bound, knee = 1 / each, loads["steps of up to 8,192 tokens"]["knee"]
print(f"{bound:.0f} a second was the bound, {knee:g} the knee: {knee / bound:.0%} of it")

# %% [markdown]
# ## Bug clinic
#
# Another server, another handler. For answers that come at once it opens a stream, collects, closes
# it, and returns. Its tests pass. In production, after an hour, it refuses everybody, although the
# load is low. `max_open` is 6 here:


# %%
async def patient(async_engine, prompt, params):
    """The whole answer to a request."""
    stream = await async_engine.open([prompt], params)
    async for outputs in stream:
        last = outputs[-1]
    async_engine.close(stream)
    return last.outputs[0].text


async def an_hour(handler):
    """Six callers who leave, then one with a short question; what the metrics said."""
    trace = []
    engine = Engine("tiny", device="cpu", num_gpu_blocks_override=1200, max_num_seqs=5)
    long = SamplingParams(max_tokens=3000, ignore_eos=True)
    async with AsyncEngine(engine, max_queue=1) as async_engine:

        async def in_engine():
            stats = await async_engine.call(Engine.stats)
            return stats.num_running + stats.num_waiting

        for _ in range(6):
            before = await in_engine()
            caller = asyncio.create_task(handler(async_engine, "There was once a fox", long))
            while await in_engine() == before and not caller.done():
                await asyncio.sleep(0.01)
            caller.cancel()
            await asyncio.gather(caller, return_exceptions=True)
            trace.append(("a caller has left", len(async_engine.streams), await in_engine()))
        short = SamplingParams(max_tokens=3)
        try:
            what = f"answered {await handler(async_engine, 'There was once a fox', short)!r}"
        except QueueFull:
            what = "refused"
        trace.append((what, len(async_engine.streams), await in_engine()))
    return trace


for what, streams, requests in run(an_hour(patient)):
    print(f"{what:20} open streams {streams}, requests in the engine {requests}")

# %% [markdown]
# Six callers have left, and there is nobody on the line. What does the engine think? At which line
# of `patient` was each of them when it left? Mend it: as it stands this is the patient.


# %%
async def mended(async_engine, prompt, params):
    """Your mend."""
    return await patient(async_engine, prompt, params)


# %%
def examine(handler):
    """Whether those who left are gone, and the last one is answered."""
    try:
        trace = run(asyncio.wait_for(an_hour(handler), 30))
    except asyncio.TimeoutError:
        return "worse: somebody waits for ever"
    gone = all(streams == requests == 0 for _, streams, requests in trace)
    return "well again" if gone and "answered" in trace[-1][0] else "still ill"


print(examine(mended))

# %% [markdown]
# <details><summary>The diagnosis</summary>
#
# A caller who leaves is told to the handler as an exception, raised where it waits: in the `async
# for`. What stands after the loop is not reached, so nobody closes the stream. Each of them keeps
# its place among the open ones and computes up to 3,000 tokens for nobody.
#
# It is the same whether the caller leaves, a deadline passes or a step fails: what must happen in
# any case belongs into a `finally`. (`except Exception` does not see it: a task that is cancelled
# raises asyncio's CancelledError, which is no `Exception`.)
#
# ```python
# async def mended(async_engine, prompt, params):
#     stream = await async_engine.open([prompt], params)
#     try:
#         async for outputs in stream:
#             last = outputs[-1]
#         return last.outputs[0].text
#     finally:
#         async_engine.close(stream)
# ```
#
# It happens to real servers: [ATOM's pull request
# 1562](https://github.com/ROCm/ATOM/pull/1562) frees blocks that leaked when a client of an answer
# that comes at once hung up. There the handler was not even told, since the web framework ends only
# *streamed* answers by itself. So a second task has to wait beside the handler until the client
# has left, and then cancel it: `until_left` in `server.py`, and in vLLM since [pull request
# 11190](https://github.com/vllm-project/vllm/pull/11190).
#
# </details>

# %%
server.__exit__(None, None, None)
print("what check() finds:", llm.check(), "blocks held:", llm.stats().num_used_blocks)

# %% [markdown]
# ## What moved
#
# The GPU is no longer the only thing that is busy: over HTTP the 24 requests took longer. Each
# token of each stream is decoded, put into JSON and written to a socket, by Python. In the same
# process that made the GPU wait; in another one it does not. The next limit is the HTTP process
# itself, which makes all of that text on one core: vLLM can have [several HTTP processes](https://github.com/vllm-project/vllm/blob/v0.11.0/vllm/entrypoints/cli/serve.py).
#
# Where others do this:
#
# - vLLM: [async_llm.py](https://github.com/vllm-project/vllm/blob/v0.20.2/vllm/v1/engine/async_llm.py)
#   is the bridge, [detokenizer.py](https://github.com/vllm-project/vllm/blob/v0.20.2/vllm/v1/engine/detokenizer.py)
#   the text. It always holds back as many characters as the longest stop string has, less one.
# - nano-vLLM has no server: `generate` is all.
#
# To read:
#
# - [vLLM's pull request 984](https://github.com/vllm-project/vllm/pull/984), from 2023: a space was
#   missing after a full stop.
# - [TensorRT-LLM's pull request 14312](https://github.com/NVIDIA/TensorRT-LLM/pull/14312), from
#   2026: with eight tokens in a piece, the space between "logs" and "and" was missing where one
#   piece ended and the next began. It is not an easy thing.
# - [DistServe](https://arxiv.org/abs/2401.09670), Zhong and others, 2024: goodput, and prompts and
#   decodes on GPUs of their own.
#
# The package: `async_engine.py`, `core_process.py`, `protocol.py`, `server.py` and `metrics.py` are
# all of this stage. `detokenizer.py` turns tokens into text.
