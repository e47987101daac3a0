"""The ladder: every stage on one workload, proved against transformers and timed beside it."""

import dataclasses
import random
import statistics
import textwrap
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from nanoteach.config import EngineConfig, check_positive
from nanoteach.cost_model import WallClock, Work
from nanoteach.hub import default_device, resolve_model
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.reference import (
    Comparison,
    Reference,
    compare,
    open_model,
    references,
    static_batches,
)
from nanoteach.stages import LADDER, Generator, Parts, stages_here
from nanoteach.types import SamplingParams

SYSTEM = (
    "You are a friendly teller of small stories. You answer in short, clear sentences. "
    "You are kind to everybody, and you never make a story longer than it has to be."
)
HEROES = ("a fox", "a bear", "a mouse", "an otter", "a cat", "a goat", "a dog", "a dragon")

WIDTH = 16  # requests side by side, in every stage and in transformers' static batches
MAX_MODEL_LEN = 1024
POOL_TOKENS = 6 * MAX_MODEL_LEN  # K/V memory of every stage: 6 requests, if each is reserved a row
SLOW = 20.0
CHUNK_BUDGET = 128  # tokens a step in stage 6; the stages before it must take whole prompts


@dataclass(frozen=True)
class Workload:
    """The same for every row of the table. End tokens are ignored: all generate `max_tokens`."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def num_output_tokens(self) -> int:
        """Tokens that one run generates."""
        return sum(p.max_tokens or 0 for p in self.params)


def make_workload(tokenizer: Any, num_requests: int, seed: int = 0) -> Workload:
    """Chats under one system prompt, every third in mid-conversation; 8 to 128 tokens out."""
    rng = random.Random(seed)
    prompts, params = [], []
    for i in range(num_requests):
        messages = [{"role": "system", "content": SYSTEM}]
        if i % 3 == 2:
            for _ in range(rng.randint(1, 8)):
                a, b = rng.randint(1, 40), rng.randint(1, 40)
                messages += [
                    {"role": "user", "content": f"What is {a} plus {b}?"},
                    {"role": "assistant", "content": f"{a} plus {b} is {a + b}."},
                ]
        messages.append({"role": "user", "content": f"Tell me a story about {rng.choice(HEROES)}."})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(list(tokenizer.encode(text, add_special_tokens=False)))
        params.append(SamplingParams(max_tokens=rng.randint(8, 128), ignore_eos=True))
    return Workload(prompts, params)


class StepClock(WallClock):
    """A wall clock that keeps the longest step: how long somebody waited for the next token."""

    def __init__(self, on_tokens: Callable[[int], object]) -> None:
        self.on_tokens = on_tokens
        self.longest = 0.0
        self.last = self.now()

    def tick(self, work: SequenceOf[Work]) -> None:
        """A step is over."""
        now = self.now()
        self.longest = max(self.longest, now - self.last)
        self.last = now
        self.on_tokens(sum(part.needs_logits for part in work))


@dataclass
class Row:
    """One line of the table; `stage` None is transformers. Seconds of every run."""

    name: str
    stage: int | None = None
    seconds: list[float] = field(default_factory=list)
    longest_steps: list[float] = field(default_factory=list)
    comparison: Comparison | None = None
    text: str = ""

    @property
    def verdict(self) -> str:
        """Whether the tokens are those of transformers."""
        if self.comparison is None:
            return "the reference"
        if not self.comparison.exact:
            return f"NO, {len(self.comparison.mismatches)} differ"
        return f"yes, {len(self.comparison.ties)} ties" if self.comparison.ties else "yes"


class Ladder:
    """Loads a model twice, ours and transformers', both in float32, and climbs."""

    def __init__(
        self, model: str, num_requests: int = 24, repeats: int = 3, progress: bool = True
    ) -> None:
        check_positive("requests", num_requests)
        check_positive("repeats", repeats)
        folder = resolve_model(model, progress)
        self.name = model
        self.repeats = repeats
        self.progress = progress
        self.device = default_device()
        self.eos = eos_token_ids(folder)
        self.tokenizer = load_tokenizer(folder)
        self.workload = make_workload(self.tokenizer, num_requests)
        self.model = load_model(folder, self.device, torch.float32, max_model_len=MAX_MODEL_LEN)
        self.theirs = open_model(folder, device=self.device)
        self.config = EngineConfig(
            max_num_seqs=WIDTH,
            max_model_len=MAX_MODEL_LEN,
            num_gpu_blocks_override=POOL_TOKENS // EngineConfig.block_size,
        )

    @property
    def stages_here(self) -> list[int]:
        """The numbers of the stages that are worth timing on this machine."""
        return [stage.number for stage in stages_here(self.model, self.config)]

    def run(self, stages: SequenceOf[int]) -> list[Row]:
        """Prove and time everything; the first row is what the others are compared with.

        It runs once, the others `repeats` times, each in turn, so that a machine whose speed drifts
        does it to all of them. A row that took over SLOW seconds is not run again.
        """
        first = Row("transformers, one by one")
        rows = [Row(f"transformers, batches of {WIDTH}")]
        rows += [Row(LADDER[n - 1].title, stage=n) for n in stages]
        num_runs = 1 + self.repeats * len(rows)
        total = num_runs * self.workload.num_output_tokens
        with tqdm(total=total, unit=" tokens", disable=None if self.progress else True) as bar:
            expected = self.run_reference(first, bar)
            for _ in range(self.repeats):
                for row in rows:
                    if row.seconds and row.seconds[0] > SLOW:
                        bar.update(self.workload.num_output_tokens)
                    else:
                        self.run_once(row, expected, bar)
        return [first, *rows]

    def run_reference(self, row: Row, bar: Any) -> list[Reference]:
        """What transformers says, request by request."""
        bar.set_description(row.name)
        expected, prompts, params = [], self.workload.prompts, self.workload.params
        start = time.perf_counter()
        for prompt, p in zip(prompts, params, strict=True):
            expected += references(self.theirs, [prompt], p, self.eos)
            bar.update(p.max_tokens)
        row.seconds.append(time.perf_counter() - start)
        row.text = self.longest_text([reference.tokens for reference in expected])
        return expected

    def run_once(self, row: Row, expected: list[Reference], bar: Any) -> None:
        """Run the workload as the row says, from nothing: no prefix is cached yet."""
        bar.set_description(row.name)
        end = bar.n + self.workload.num_output_tokens
        clock = StepClock(lambda num_tokens: bar.update(min(num_tokens, end - bar.n)))
        generate: Callable[..., list[list[int]]]
        if row.stage is None:
            generate = partial(static_batches, self.theirs, width=WIDTH)
        else:
            generate = self.build(row.stage, clock).generate
        start = clock.last = time.perf_counter()
        tokens = generate(self.workload.prompts, self.workload.params)
        row.seconds.append(time.perf_counter() - start)
        row.longest_steps.append(clock.longest)
        row.comparison = compare(expected, tokens)
        row.text = self.longest_text(tokens)
        bar.update(end - bar.n)

    def build(self, number: int, clock: StepClock) -> Generator:
        """A stage with this ladder's model and memory."""
        budget = CHUNK_BUDGET if number >= 6 else MAX_MODEL_LEN
        config = dataclasses.replace(self.config, max_num_batched_tokens=budget)
        return LADDER[number - 1].build(Parts(self.model, config, self.eos, clock))

    def longest_text(self, outputs: list[list[int]]) -> str:
        """What the request with the longest output came to."""
        tokens = max(outputs, key=len)
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def table(self, rows: list[Row]) -> str:
        """The rows as text."""
        num_tokens = self.workload.num_output_tokens
        lines = [
            f"{self.name}, {len(self.workload.prompts)} requests, {num_tokens} output tokens, "
            f"{self.device}, float32; the median of {self.repeats}",
            "",
            f"{'':30} {'tokens/s':>9} {'step up':>8} {'longest step':>13}  same tokens?",
        ]
        before = None
        for row in rows:
            speed = num_tokens / statistics.median(row.seconds)
            gain = f"x {speed / before:.2f}" if row.stage and before else ""
            before = speed if row.stage else None
            step = f"{1000 * statistics.median(row.longest_steps):.0f} ms" if row.stage else ""
            lines.append(f"{row.name:30} {speed:9.1f} {gain:>8} {step:>13}  {row.verdict}")
        for text in dict.fromkeys(row.text for row in rows):
            writers = [row.name for row in rows if row.text == text]
            who = f"All {len(rows)}" if len(writers) == len(rows) else ", ".join(writers)
            lines += ["", f"{who} wrote, among others:", "", *textwrap.wrap(text, 84)[:5]]
        return "\n".join(lines)

    def result(self, rows: list[Row]) -> dict[str, Any]:
        """The rows as data, every sample kept."""
        return {
            "model": self.name,
            "requests": len(self.workload.prompts),
            "prompt_tokens": sum(map(len, self.workload.prompts)),
            "output_tokens": self.workload.num_output_tokens,
            "width": WIDTH,
            "rows": [
                {
                    "name": row.name,
                    "stage": row.stage,
                    "seconds": row.seconds,
                    "longest_steps": row.longest_steps,
                    "verdict": row.verdict,
                }
                for row in rows
            ],
        }
