"""A load test: requests arrive at random at a server, faster and faster, until it can't follow.

Arrivals are a Poisson process: the next one comes after an exponential time, whatever the server is
doing, as users do who know nothing of each other. A client that waited for answers before it asked
again would slow down with the server, and hide that it is slow. For the same reason times count
from when a request was due, not from when this client got round to sending it.

Knows: arrivals, percentiles, the knee. Does not know: engines; it speaks HTTP alone.
"""

import asyncio
import itertools
import json
import math
import multiprocessing
import random
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx

from nanoteach.config import check_positive

VOCABULARY = 500  # token ids that every model has
SHARED_TOKENS = 512  # of the system prompt that all requests of "shared" begin with
TURNS, THINK_SECONDS = 3, 1.0  # of a conversation in "chat"
KEEPS_UP = 0.85  # completed over offered requests a second, at least; a short run has some noise
WARM_REQUESTS = 4
STALLED = 300.0  # seconds without a word from the server, after which nobody waits for more
LATE = 0.1  # of the limit for a first token: a client this late has a part in what it measures
START_SECONDS = 0.1  # for the clients to be there when the first request is due


@dataclass
class Ask:
    """One request: `num_output` tokens after `prompt`. `then`: what its user says next, if any."""

    prompt: list[int]
    num_output: int
    then: list["Ask"] = field(default_factory=list)


Span = tuple[int, int]
"""The least and the most of a length; all in between are as likely."""


def tokens(rng: random.Random, span: Span) -> list[int]:
    """A text of a random length."""
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(*span))]


def random_lengths(rng: random.Random, inputs: Span, outputs: Span) -> Callable[[], Ask]:
    """Nothing in common but the spans of their lengths."""
    return lambda: Ask(tokens(rng, inputs), rng.randint(*outputs))


def shared_prefix(rng: random.Random, inputs: Span, outputs: Span) -> Callable[[], Ask]:
    """One system prompt for all, and something of each request's own."""
    system = tokens(rng, (SHARED_TOKENS, SHARED_TOKENS))
    return lambda: Ask(system + tokens(rng, inputs), rng.randint(*outputs))


def conversations(rng: random.Random, inputs: Span, outputs: Span) -> Callable[[], Ask]:
    """Users who read, think and ask again: each turn's prompt is all that was said before it."""

    def first() -> Ask:
        turns = [Ask(tokens(rng, inputs), rng.randint(*outputs)) for _ in range(TURNS)]
        return Ask(turns[0].prompt, turns[0].num_output, turns[1:])

    return first


WORKLOADS = {"random": random_lengths, "shared": shared_prefix, "chat": conversations}


# --- what came ---------------------------------------------------------------------------------


@dataclass
class Record:
    """One request as its user saw it; times in seconds from when it was due.

    due: counted from the beginning of its rate. sent: how late this client was. gaps: between two
    pieces of text, which may be several tokens each. error: why it came to nothing.
    """

    due: float
    sent: float = 0.0
    first: float | None = None
    end: float | None = None
    num_tokens: int = 0
    num_cached: int = 0
    num_prompt: int = 0
    gaps: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def seconds_per_token(self) -> float:
        """After the first token, on average."""
        assert self.first is not None and self.end is not None
        return (self.end - self.first) / max(1, self.num_tokens - 1)


def percentiles(values: SequenceOf[float]) -> dict[str, float]:
    """The value under which half, 90% and 99% of them are; empty where there are none."""
    if not values:
        return {}
    cuts = statistics.quantiles(
        values if len(values) > 1 else [*values] * 2, n=100, method="inclusive"
    )
    return {f"p{q}": cuts[q - 1] for q in (50, 90, 99)}


@dataclass
class Level:
    """One rate, and what came of it. Rates are requests (or tokens) a second.

    goodput: completed requests a second that met both limits.
    """

    rate: float
    offered: float
    completed: float
    output_tokens: float
    goodput: float
    ttft: dict[str, float]
    itl: dict[str, float]
    e2e: dict[str, float]
    num_requests: int
    num_errors: int
    cached_share: float
    client_lag: float
    samples: dict[str, list[float]]
    error: str | None = None
    """The most frequent one."""

    def holds(self, ttft_limit: float) -> bool:
        """Whether the server followed: no errors, first tokens in time, as many out as in."""
        return (
            not self.num_errors
            and self.ttft.get("p99", float("inf")) <= ttft_limit
            and self.completed >= KEEPS_UP * self.offered
        )


def level_of(rate: float, records: SequenceOf[Record], limits: tuple[float, float]) -> Level:
    """Sum up the requests of one rate. limits: seconds to the first token, and for each more."""
    done = [r for r in records if r.error is None and r.first is not None and r.end is not None]
    first = [r.first for r in done if r.first is not None]
    end = [r.end for r in done if r.end is not None]
    start = min(r.due for r in records)
    span = max([r.due + (r.end or 0) for r in records], default=start) - start or 1.0
    arrivals = max(r.due for r in records) - start
    ends = sorted(r.due + t for r, t in zip(done, end, strict=True))
    good = [
        r for r, ttft in zip(done, first, strict=True)
        if ttft <= limits[0] and r.seconds_per_token <= limits[1]
    ]  # fmt: skip
    errors = Counter(r.error for r in records if r.error)
    return Level(
        rate=rate,
        offered=(len(records) - 1) / arrivals if arrivals else rate,
        # From the first to the last of them, so that a request's own time takes nothing away.
        completed=(len(done) - 1) / (ends[-1] - ends[0]) if len(done) > 1 else 0.0,
        output_tokens=sum(r.num_tokens for r in done) / span,
        goodput=len(good) / span,
        ttft=percentiles(first),
        itl=percentiles([gap for r in done for gap in r.gaps]),
        e2e=percentiles(end),
        num_requests=len(records),
        num_errors=len(records) - len(done),
        cached_share=sum(r.num_cached for r in done) / max(1, sum(r.num_prompt for r in done)),
        client_lag=max(r.sent for r in records),
        samples={
            "due": [round(r.due - start, 4) for r in done],
            "ttft": [round(t, 5) for t in first],
            "e2e": [round(t, 5) for t in end],
            "tokens": [r.num_tokens for r in done],
            "longest_gap": [round(max(r.gaps, default=0), 5) for r in done],
        },
        error=errors.most_common(1)[0][0] if errors else None,
    )


def knee(levels: SequenceOf[Level], ttft_limit: float) -> float | None:
    """The highest rate up to which every rate holds, or None if not even the first does."""
    found = None
    for level in sorted(levels, key=lambda level: level.rate):
        if not level.holds(ttft_limit):
            break
        found = level.rate
    return found


# --- the client --------------------------------------------------------------------------------


@dataclass
class Client:
    """One process that sends its share of a load. The settings are `LoadTest`'s.

    Every client draws all arrivals and all requests, and sends each `of`-th: the load is the same
    however many share it.
    """

    url: str
    headers: dict[str, str]
    workload: str
    duration: float
    input_len: Span
    output_len: Span
    seed: int
    share: int = 0
    of: int = 1
    model: str = ""

    def asks(self, label: object) -> Callable[[], Ask]:
        """A source of requests that no other label's has in common with this one."""
        rng = random.Random(f"{self.seed} {label}")
        return WORKLOADS[self.workload](rng, self.input_len, self.output_len)

    async def get_model(self) -> str:
        """The name of the model that is served. Raises httpx's errors, and RuntimeError."""
        async with self.connect() as http:
            answer = await http.get("/v1/models")
        answer.raise_for_status()
        try:
            name: str = answer.json()["data"][0]["id"]
        except (LookupError, TypeError, ValueError) as error:
            raise RuntimeError(f"{self.url}/v1/models names no model: {error!r}") from error
        return name

    async def warm_up(self) -> None:
        """Some requests that do not count. Raises RuntimeError if none of them is served."""
        ask = self.asks(f"warm {self.share}")
        async with self.connect() as http:
            now = time.perf_counter()
            warmed = await asyncio.gather(
                *(self.talk(http, ask(), now) for _ in range(WARM_REQUESTS))
            )
        errors = [records[-1].error for records in warmed]
        if all(errors):
            raise RuntimeError(f"{self.url} served none of the first requests: {errors[0]}")

    async def run(self, rate: float, start: float) -> list[Record]:
        """Send what arrives from `start` (of `time.time`) on, and wait for all of it."""
        rng, ask = random.Random(f"{self.seed} arrivals {rate}"), self.asks(rate)
        tasks = list[asyncio.Task[list[Record]]]()
        due = begin = time.perf_counter() + start - time.time()
        async with self.connect() as http:
            for i in itertools.count():
                due, request = due + rng.expovariate(rate), ask()
                if due > begin + self.duration and i:
                    break
                if i % self.of == self.share:
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))  # few tasks wait
                    tasks.append(asyncio.create_task(self.talk(http, request, due)))
            records = [record for task in tasks for record in await task]
        for record in records:
            record.due -= begin
        return records

    def connect(self) -> httpx.AsyncClient:
        """As many connections as it takes, and patience with them."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            base_url=self.url, headers=self.headers, timeout=STALLED, limits=limits
        )

    async def talk(self, http: httpx.AsyncClient, ask: Ask, due: float) -> list[Record]:
        """A request, and those that follow on its answer."""
        records, history = list[Record](), list[int]()
        for turn in [ask, *ask.then]:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            history += turn.prompt
            record = Record(due)
            records.append(record)
            try:
                history += await self.send(http, history, turn.num_output, record)
            except (httpx.HTTPError, RuntimeError) as error:
                record.error = str(error) or type(error).__name__
                break
            except (LookupError, TypeError, ValueError) as error:
                record.error = f"not an answer as nanoteach's server gives it: {error!r}"
                break
            due = time.perf_counter() + THINK_SECONDS
        return records

    async def send(
        self, http: httpx.AsyncClient, prompt: list[int], num_output: int, record: Record
    ) -> list[int]:
        """One request; its output's tokens. Raises RuntimeError with what the server says."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": num_output, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }  # fmt: skip
        record.sent = time.perf_counter() - record.due
        output: list[int] = []
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code} {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                data, now = json.loads(line[6:]), time.perf_counter() - record.due
                if "error" in data:
                    raise RuntimeError(data["error"]["message"])
                if usage := data.get("usage"):
                    record.num_prompt = usage["prompt_tokens"]
                    record.num_cached = usage["prompt_tokens_details"]["cached_tokens"]
                for choice in data["choices"]:
                    output += choice["token_ids"]
                    if record.first is None:
                        record.first = now
                    else:
                        record.gaps.append(now - (record.end or 0))
                    record.end = now
        record.num_tokens = len(output)
        if len(output) != num_output:  # the stream was cut, however politely
            raise RuntimeError(f"{len(output)} tokens came of {num_output}")
        return output


def in_process(client: Client, work: str, *args: Any) -> Any:
    """What a client's coroutine of this name gives, in a process that does nothing else."""
    return asyncio.run(getattr(client, work)(*args))


class LoadTest:
    """A server's address, a workload, and the limits that a user would set.

    rates: requests a second, for "chat" new conversations a second; duration: seconds of arrivals
    at each. ttft_limit, itl_limit: seconds. clients: processes that send; one of them reads a few
    thousand pieces of text a second, and a client that is slower than the server would measure
    itself. Raises ValueError.
    """

    def __init__(
        self,
        url: str,
        rates: SequenceOf[float],
        workload: str = "random",
        duration: float = 20.0,
        input_len: Span = (32, 256),
        output_len: Span = (16, 64),
        ttft_limit: float = 1.0,
        itl_limit: float = 0.1,
        seed: int = 0,
        clients: int = 1,
        api_key: str | None = None,
        on_level: Callable[[Level], None] = lambda level: None,
    ) -> None:
        if workload not in WORKLOADS:
            raise ValueError(f"--workload is one of {', '.join(WORKLOADS)}, not {workload!r}")
        if not rates or not all(0 < rate < float("inf") for rate in rates):
            raise ValueError(f"--rates are requests a second, above 0, not {list(rates)}")
        for name, value in (
            ("duration", duration),
            ("slo-ttft", ttft_limit),
            ("slo-itl", itl_limit),
        ):
            if not 0 < value < float("inf"):
                raise ValueError(f"--{name} is seconds, above 0, not {value}")
        for name, (low, high) in (("input-len", input_len), ("output-len", output_len)):
            check_positive(name, low)
            if high < low:
                raise ValueError(f"--{name} is the least and the most, not {low} and {high}")
        check_positive("clients", clients)
        self.rates, self.num_clients = sorted(rates), clients
        self.limits = (ttft_limit, itl_limit)
        self.on_level = on_level
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        url = url.rstrip("/").removesuffix("/v1")
        self.client = Client(url, headers, workload, duration, input_len, output_len, seed)
        self.levels: list[Level] = []

    async def run(self) -> list[Level]:
        """All rates, the lowest first; it ends early when two in a row were too much.

        Raises httpx's errors and RuntimeError where nothing is served at all.
        """
        self.client.model = await self.client.get_model()
        with ExitStack() as stack:
            send = self.sender(stack)
            await send("warm_up")
            over = 0
            for rate in self.rates:
                records = await send("run", rate, time.time() + START_SECONDS)
                level = level_of(rate, [r for share in records for r in share], self.limits)
                self.levels.append(level)
                self.on_level(level)
                over = 0 if level.holds(self.limits[0]) else over + 1
                if over == 2:
                    break
        return self.levels

    def sender(self, stack: ExitStack) -> Callable[..., Awaitable[Any]]:
        """What has each client do its share of a work, and gives what each of them gave."""
        count = self.num_clients
        if count == 1:
            return lambda work, *args: asyncio.gather(getattr(self.client, work)(*args))
        clients = [replace(self.client, share=i, of=count) for i in range(count)]
        spawn = multiprocessing.get_context("spawn")  # a fork would take our threads' locks along
        pool = stack.enter_context(ProcessPoolExecutor(count, mp_context=spawn))
        submit = asyncio.get_running_loop().run_in_executor
        return lambda work, *args: asyncio.gather(
            *(submit(pool, in_process, client, work, *args) for client in clients)
        )

    @property
    def knee(self) -> float | None:
        """See `knee`."""
        return knee(self.levels, self.limits[0])

    @property
    def verdict(self) -> str:
        """The knee, in words."""
        limit = f"(first token p99 within {self.limits[0]:g} s)"
        if self.knee is None:
            return f"Not even {self.rates[0]:g} requests a second held {limit}."
        if self.knee == self.rates[-1]:
            return f"All rates held, up to {self.knee:g} requests a second {limit}."
        return f"The knee: {self.knee:g} requests a second held, and no higher rate {limit}."

    def result(self) -> dict[str, Any]:
        """All of it as data."""
        return {
            "model": self.client.model,
            "workload": self.client.workload,
            "duration": self.client.duration,
            "input_len": self.client.input_len,
            "output_len": self.client.output_len,
            "seed": self.client.seed,
            "clients": self.num_clients,
            "limits": {"ttft": self.limits[0], "itl": self.limits[1]},
            "knee": self.knee,
            "levels": [asdict(level) for level in self.levels],
        }


TABLE_HEAD = (
    "   rate  completed  goodput   tok/s  TTFT p50       p99   ITL p50       p99   E2E p50"
    "       p99  cached"
)


def line_of(level: Level, ttft_limit: float) -> str:
    """One level as a line of the table; times in milliseconds."""
    spreads = (level.ttft, level.itl, level.e2e)
    times = [f"{1e3 * s.get(q, math.nan):8,.1f}" for s in spreads for q in ("p50", "p99")]
    note = "" if level.holds(ttft_limit) else "too much"
    if level.client_lag > LATE * ttft_limit:
        late = f"{1e3 * level.client_lag:,.0f} ms late"
        note += f", this client sent up to {late}: try more --clients"
    if level.num_errors:
        note += f", {level.num_errors} errors: {textwrap.shorten(level.error or '', 120)}"
    numbers = f"{level.rate:7g}  {level.completed:9.2f}  {level.goodput:7.2f}"
    numbers += f"  {level.output_tokens:6,.0f}  {'  '.join(times)}  {level.cached_share:6.0%}"
    return f"{numbers}  {note.removeprefix(', ')}".rstrip()


@contextmanager
def server_process(*options: str) -> Iterator[str]:
    """`nanoteach serve` on a free port, in a process of its own; gives its address.

    Raises RuntimeError if it does not start; what it says is on stderr.
    """
    command = [sys.executable, "-m", "nanoteach", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            found = re.search(r"http://[^/]+", process.stdout.readline())
            if not found:
                raise RuntimeError(f"the server did not start: {' '.join(command[1:])}")
            yield found[0]
        finally:
            process.send_signal(signal.SIGTERM)
