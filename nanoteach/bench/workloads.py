"""What is run: requests of token ids, and the least time in which they can be served.

Knows: lengths, seeds, and the cost model's clock. Does not know: engines, devices, tables.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from nanoteach.config import ModelConfig
from nanoteach.cost_model import VirtualClock, Work
from nanoteach.hardware import Hardware
from nanoteach.types import SamplingParams

WARM_TOKENS = 16
TOKENS = 10_000  # prompts hold tokens 0 to this, as far as the vocabulary goes


class Times(NamedTuple):
    """When a run began, had its first token, and ended: seconds on one clock, real or virtual."""

    start: float
    first: float
    end: float


@dataclass(frozen=True)
class Workload:
    """Requests that come all at once. End tokens are ignored: outputs are as long as they say.

    prompts: token ids; output_lens: tokens to generate, one number for each prompt; metrics: names
    in METRICS.
    """

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    metrics: tuple[str, ...] = ("output",)
    temperature: float = 0.0

    @property
    def params(self) -> list[SamplingParams]:
        """One for each prompt."""
        return [
            SamplingParams(max_tokens=n, temperature=self.temperature, ignore_eos=True)
            for n in self.output_lens
        ]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(p) + n for p, n in zip(self.prompts, self.output_lens, strict=True))

    def short(self) -> "Workload":
        """The same with few output tokens, to warm up."""
        output_lens = [min(n, WARM_TOKENS) for n in self.output_lens]
        return dataclasses.replace(self, output_lens=output_lens)


METRICS: dict[str, tuple[str, Callable[[Workload, Times], float]]] = {
    "output": ("tok/s", lambda w, t: sum(w.output_lens) / (t.end - t.start)),
    "prompt": ("tok/s", lambda w, t: sum(map(len, w.prompts)) / (t.end - t.start)),
    # Of one request: its first token belongs to the prompt's step.
    "decode": ("tok/s", lambda w, t: (sum(w.output_lens) - 1) / (t.end - t.first)),
    "first token": ("s", lambda w, t: t.first - t.start),
}
"""Unit, and how it follows from the times. The bound follows from a virtual clock's likewise."""


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
    clock = VirtualClock(config, hardware, bytes_per_value)
    waiting = deque(zip(map(len, workload.prompts), workload.output_lens, strict=True))
    running: list[tuple[int, int, int]] = []  # tokens computed, tokens missing, outputs to come
    first = 0.0
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append((0, *waiting.popleft()))
        clock.tick([Work(missing, computed) for computed, missing, _ in running])
        first = first or clock.now()
        running = [(done + new, 1, left - 1) for done, new, left in running if left > 1]
    return Times(0.0, first, clock.now())


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
    """One request after prompts of several lengths."""
    lengths, out = ((8, 32, 96), 16) if small else ((256, 1024, 3072), 512)
    return [
        alike(f"context {n:,} + {out}", 1, n, out, vocab_size, "decode", "first token")
        for n in lengths
    ]


def batch(vocab_size: int, small: bool) -> list[Workload]:
    """Several requests at once."""
    sizes, n, out = ((1, 4), 32, 8) if small else ((1, 4, 16, 64, 128, 256), 1024, 256)
    return [
        alike(f"batch {size} x ({n:,} + {out})", size, n, out, vocab_size, "output")
        for size in sizes
    ]


def prefill(vocab_size: int, small: bool) -> list[Workload]:
    """Prompts alone: one output token each."""
    shapes = ((4, 32), (2, 128)) if small else ((16, 1024), (4, 4096))
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
"""Those that share one engine."""

NAMES = {
    "nano": "nano-vLLM's benchmark, 256 requests of 100 to 1,024 tokens in and out: output tok/s",
    "context": "one request after 256, 1,024 and 3,072 tokens: decode tok/s and the first token",
    "batch": "1,024 tokens in and 256 out, 1 to 256 requests at once: output tok/s",
    "prefill": "16 prompts of 1,024 tokens and 4 of 4,096: prompt tok/s",
    "startup": "from an engine's construction, weights loaded, to its first token: seconds",
    "stages": "every stage that runs here on one small workload: output tok/s and step up",
    "all": "all of them",
}


def chosen(names: SequenceOf[str]) -> list[str]:
    """The workloads named, in the order of NAMES. Raises ValueError that lists the names."""
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        what = f"no workload is named {unknown[0]!r}" if unknown else "name one or more workloads"
        lines = [f"  {name:9} {text}" for name, text in NAMES.items()]
        raise ValueError("\n".join([f"{what}; these are:", *lines]))
    return [name for name in NAMES if name != "all" and ("all" in names or name in names)]
