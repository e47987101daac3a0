"""What is run: requests of token ids, and the least time in which they can be served.

Knows: lengths, seeds, and the cost model's clock. Does not know: engines, devices, tables.
"""

import dataclasses
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from nanoteach.config import ModelConfig
from nanoteach.cost_model import Clock, VirtualClock, Work
from nanoteach.hardware import Hardware
from nanoteach.types import SamplingParams

WARM_TOKENS = 16
TOKENS = 10_000  # prompts hold tokens 0 to this, as far as the vocabulary goes


class Step(NamedTuple):
    """A step that is over: when, and how many requests, new tokens and samples it had."""

    time: float
    requests: int
    tokens: int
    samples: int

    @property
    def has_prompts(self) -> bool:
        """Whether somebody computed more than one token in it."""
        return self.tokens > self.requests


class Served(NamedTuple):
    """A request's arrival, and when each of its tokens came."""

    arrival: float
    times: list[float]

    @property
    def first_token(self) -> float:
        """Seconds from its arrival to its first token (TTFT)."""
        return self.times[0] - self.arrival

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(when it ended, seconds) of every wait between two tokens (ITL)."""
        return [(b, b - a) for a, b in pairwise(self.times)]


class Times(NamedTuple):
    """A run: seconds on one clock, real or virtual, and what was counted.

    steps: all of them, in order. requests: in the workload's order; empty where an engine does not
    tell (stages 1 to 3). The counts stay 0 where an engine has no such thing. host: for how
    many seconds the host itself worked in each turn of the driver (see `StepLog.turn`).
    """

    start: float
    end: float
    steps: list[Step]
    requests: list[Served]
    computed: int = 0
    queries: int = 0
    hits: int = 0
    preemptions: int = 0
    host: SequenceOf[float] = ()

    @property
    def first(self) -> float:
        """When the first token came."""
        return next(step.time for step in self.steps if step.samples)

    def seconds_of(self, prompts: bool) -> float:
        """Of all steps with prompts in them, or of all without."""
        ends = [self.start, *(step.time for step in self.steps)]
        lasted = (b - a for a, b in pairwise(ends))
        pairs = zip(lasted, self.steps, strict=True)
        return sum(seconds for seconds, step in pairs if step.has_prompts is prompts)


class StepLog:
    """A clock that keeps what its steps were. Every stage tells its clock of every step.

    waited: how many of its seconds the host has only waited for the device, as far as it was told.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.label = clock.label
        self.steps: list[Step] = []
        self.host: list[float] = []
        self.waited = 0.0

    def begin(self) -> None:
        """A run begins: forget the one before."""
        self.steps, self.host = [], []

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A turn of the driver, which adds a request or takes a step."""
        start = self.now() - self.waited
        yield
        self.host.append(self.now() - self.waited - start)

    def launched(self) -> None:
        """A simulated engine has launched a step, which will end some time after this."""

    def now(self) -> float:
        """See `Clock`."""
        return self.clock.now()

    def tick(self, work: SequenceOf[Work]) -> None:
        """A step is over."""
        self.clock.tick(work)
        tokens = sum(part.num_new for part in work)
        samples = sum(part.needs_logits for part in work)
        self.steps.append(Step(self.clock.now(), len(work), tokens, samples))

    def wait_until(self, t: float) -> None:
        """See `Clock`."""
        self.clock.wait_until(t)


@dataclass(frozen=True)
class Workload:
    """Requests, of which the last `late` come when all others have `after` tokens; 0: all at once.

    End tokens are ignored: outputs are as long as they say. prompts: token ids; output_lens: tokens
    to generate, one number for each prompt; metrics: names in METRICS.
    """

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    metrics: tuple[str, ...] = ("output",)
    temperature: float = 0.0
    late: int = 0
    after: int = 0

    @property
    def params(self) -> list[SamplingParams]:
        """One for each prompt."""
        return [
            SamplingParams(max_tokens=n, temperature=self.temperature, ignore_eos=True)
            for n in self.output_lens
        ]

    @property
    def early(self) -> int:
        """How many requests are there from the start."""
        return len(self.prompts) - self.late

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(p) + n for p, n in zip(self.prompts, self.output_lens, strict=True))

    @property
    def computed(self) -> int:
        """Tokens that an engine computes which computes none twice: all but each one's last."""
        return sum(map(len, self.prompts)) + sum(self.output_lens) - len(self.prompts)

    def short(self) -> "Workload":
        """The same with few output tokens, to warm up."""
        output_lens = [min(n, WARM_TOKENS) for n in self.output_lens]
        return dataclasses.replace(self, output_lens=output_lens, after=min(self.after, 2))


def first_tokens(workload: Workload, times: Times) -> list[float]:
    """TTFT of those that come late, or of all where nobody does."""
    first = workload.early if workload.late else 0
    return [request.first_token for request in times.requests[first:]]


def window(workload: Workload, times: Times) -> tuple[float, float]:
    """The time of interference: from the late requests' arrival to the last one's first token."""
    late = times.requests[workload.early :]
    if not late:
        return times.start, times.end
    return late[0].arrival, max(request.times[0] for request in late)


def gaps(workload: Workload, times: Times, inside: bool = True) -> list[float]:
    """Sorted ITL of the early requests: of the waits that touch the window, or of the others."""
    begin, end = window(workload, times)
    return sorted(
        gap
        for request in times.requests[: workload.early]
        for when, gap in request.gaps
        if (begin < when and when - gap < end) is inside
    )


def longest_two(workload: Workload, times: Times) -> float:
    """The longest time that an early request needs for two tokens in a row."""
    return max(
        c - a
        for request in times.requests[: workload.early]
        for a, c in zip(request.times, request.times[2:], strict=False)
    )


def percentile(values: list[float], percent: int) -> float:
    """Of sorted values: the smallest that so many percent do not exceed."""
    return values[-(-percent * len(values) // 100) - 1]


def decode_speed(times: Times) -> float:
    """Tokens/s of the steps that compute no prompt."""
    tokens = sum(step.samples for step in times.steps if not step.has_prompts)
    return tokens / times.seconds_of(prompts=False)


METRICS: dict[str, tuple[str, Callable[[Workload, Times], float]]] = {
    "output": ("tok/s", lambda w, t: sum(w.output_lens) / (t.end - t.start)),
    "prompt": ("tok/s", lambda w, t: sum(map(len, w.prompts)) / (t.end - t.start)),
    # Of one request: its first token belongs to the prompt's step.
    "decode": ("tok/s", lambda w, t: (sum(w.output_lens) - 1) / (t.end - t.first)),
    "first token": ("s", lambda w, t: t.first - t.start),
    "decode steps": ("tok/s", lambda w, t: decode_speed(t)),
    "time with prompts": ("%", lambda w, t: 100 * t.seconds_of(prompts=True) / (t.end - t.start)),
    "TTFT": ("s", lambda w, t: statistics.median(first_tokens(w, t))),
    "ITL p50": ("s", lambda w, t: percentile(gaps(w, t), 50)),
    "ITL p99": ("s", lambda w, t: percentile(gaps(w, t), 99)),
    "ITL max": ("s", lambda w, t: gaps(w, t)[-1]),
    "two tokens": ("s", longest_two),
    "ITL p50 outside": ("s", lambda w, t: percentile(gaps(w, t, inside=False), 50)),
    "window": ("s", lambda w, t: window(w, t)[1] - window(w, t)[0]),
    "steps": ("steps", lambda w, t: len(t.steps)),
    "largest step": ("tokens", lambda w, t: max(step.tokens for step in t.steps)),
    "rows": ("rows", lambda w, t: sum(step.requests for step in t.steps) / len(t.steps)),
    "computed": ("tokens", lambda w, t: t.computed),
    "hit rate": ("%", lambda w, t: 100 * t.hits / max(1, t.queries)),
    "preemptions": ("times", lambda w, t: t.preemptions),
}
"""Unit, and how it follows from a run. The bound follows from a virtual clock's run likewise."""

COUNTS = ("steps", "largest step", "rows", "computed", "hit rate", "preemptions")
"""Those that no clock changes."""


def perfect_times(
    workload: Workload,
    config: ModelConfig,
    hardware: Hardware,
    bytes_per_value: int,
    max_num_seqs: int,
) -> Times:
    """The times of a perfect engine: every step takes the cost model's bound, and nothing else.

    Up to `max_num_seqs` requests run at once, and one that leaves makes room for the next. A prompt
    is computed whole in the step that lets its request in; then every step gives it a token. This
    is notebook 00's schedule. Spreading prompts over the decode steps, where the arithmetic units
    are idle, can beat it a little.
    """
    log = StepLog(VirtualClock(config, hardware, bytes_per_value))
    waiting = deque(enumerate(zip(map(len, workload.prompts), workload.output_lens, strict=True)))
    served = [Served(0.0, []) for _ in workload.prompts]
    running: list[tuple[int, int, int, int]] = []  # who; tokens computed, missing, outputs to come
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            who, (prompt_len, output_len) = waiting.popleft()
            running.append((who, 0, prompt_len, output_len))
        log.tick([Work(missing, computed) for _, computed, missing, _ in running])
        for who, *_ in running:
            served[who].times.append(log.now())
        running = [(who, done + new, 1, left - 1) for who, done, new, left in running if left > 1]
    return Times(0.0, log.now(), log.steps, served, workload.computed)


def draw_prompts(lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random prompts. The same numbers are drawn for every vocabulary, and folded into it."""
    rng = random.Random(seed)
    return [[rng.randint(0, TOKENS) % vocab_size for _ in range(n)] for n in lengths]


def nano(vocab_size: int, small: bool) -> list[Workload]:
    """nano-vLLM's bench.py, with its draws in their order."""
    requests, low, high = (8, 4, 32) if small else (256, 100, 1024)
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, TOKENS) % vocab_size for _ in range(rng.randint(low, high))]
        for _ in range(requests)
    ]
    output_lens = [rng.randint(low, high) for _ in range(requests)]
    return [Workload(f"nano, {requests} requests", prompts, output_lens, temperature=0.6)]


def alike(
    name: str, size: int, prompt_len: int, output_len: int, vocab_size: int, *metrics: str
) -> Workload:
    """`size` requests of the same lengths."""
    prompts = draw_prompts([prompt_len] * size, vocab_size)
    return Workload(name, prompts, [output_len] * size, metrics)


def context(vocab_size: int, small: bool) -> list[Workload]:
    """One request after prompts of several lengths: the peers' outputs of 512, ours of 1,024."""
    shapes = [(8, 16), (32, 16), (96, 16)]
    if not small:
        shapes = [(n, 512) for n in (256, 1024, 3072)]
        shapes += [(n, 1024) for n in (256, 512, 1024, 2048, 3072)]
    return [
        alike(f"context {n:,} + {out:,}", 1, n, out, vocab_size, "decode", "first token")
        for n, out in shapes
    ]


def batch(vocab_size: int, small: bool) -> list[Workload]:
    """Several requests at once."""
    sizes, n, out = ((1, 4), 32, 8) if small else ((1, 4, 16, 64, 128, 256), 1024, 256)
    metrics = ("output", "decode steps", "time with prompts")
    return [
        alike(f"batch {size} x ({n:,} + {out})", size, n, out, vocab_size, *metrics)
        for size in sizes
    ]


def prefill(vocab_size: int, small: bool) -> list[Workload]:
    """Prompts alone: one output token each."""
    shapes = [(4, 32), (2, 128)]
    if not small:
        shapes = [(1, n) for n in (256, 512, 1024, 2048, 4096)] + [(4, 1024), (16, 1024), (4, 4096)]
    return [
        alike(f"prefill {size} x {n:,}", size, n, 1, vocab_size, "prompt") for size, n in shapes
    ]


def stage_workload(vocab_size: int, small: bool) -> Workload:
    """For the stages, few and short requests, since one without a cache has to do them too."""
    requests, prompt_lens, output_lens = (
        (4, (8, 24), (2, 8)) if small else (24, (64, 512), (16, 64))
    )
    rng = random.Random(0)
    lengths = [rng.randint(*prompt_lens) for _ in range(requests)]
    return Workload(
        "stages",
        draw_prompts(lengths, vocab_size),
        [rng.randint(*output_lens) for _ in range(requests)],
    )


SPEED = {"nano": nano, "context": context, "batch": batch, "prefill": prefill}
"""Those whose bound is a perfect engine's, whatever an engine does."""

NAMES = {
    "nano": "nano-vLLM's benchmark, 256 requests of 100 to 1,024 tokens in and out: output tok/s",
    "context": "one request after 256 to 3,072 tokens: decode tok/s and the first token",
    "batch": "1,024 tokens in and 256 out, 1 to 256 requests at once: output tok/s",
    "prefill": "1 to 16 prompts of 256 to 4,096 tokens: prompt tok/s",
    "gemm": "the layers' own matrix products beside a square one: TFLOP/s",
    "static": "a batch that ends together against requests that come and go",
    "packed": "16 prompts in one step against one in each",
    "paged": "blocks of 1 to 256 tokens against reserved rows: slots held for nothing (counts)",
    "prefix": "32 requests with one beginning, prefix caching off and on; pools that must forget",
    "chunked": "six long prompts come while 16 requests decode: budgets, and who goes first",
    "preemption": "pools that are too small: what computing again costs",
    "kv_cache": "one request with a KV cache and without: stages 2 and 1",
    "graphs": "decode steps with CUDA graphs and without",
    "backends": "attention by our kernel and by the gather: stages 7 and 6",
    "kernels": "the kernels of a decode step by class, 1 to 256 requests (NVIDIA GPU)",
    "startup": "from an engine's construction, weights loaded, to its first token: seconds",
    "stages": "every stage that runs here on one small workload: output tok/s and step up",
    "peers": "the same on vLLM and nano-vLLM, where they are installed (see bench/peers.py)",
    "all": "all of them but peers",
}


def chosen(names: SequenceOf[str]) -> list[str]:
    """The workloads named, in the order of NAMES. Raises ValueError that lists the names."""
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        what = f"no workload is named {unknown[0]!r}" if unknown else "name one or more workloads"
        raise ValueError(f"{what}; these are:\n{listed()}")
    every = [name for name in NAMES if name not in ("all", "peers")] if "all" in names else []
    return [name for name in NAMES if name in (*every, *names) and name != "all"]


def listed() -> str:
    """The names and what they are, a line each."""
    return "\n".join(f"  {name:10} {text}" for name, text in NAMES.items())
