"""The ladder: every stage on one workload, proved against transformers and timed beside it."""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanoteach.config import EngineConfig
from nanoteach.cost_model import WallClock, Work
from nanoteach.hub import default_device, resolve_model
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.reference import compare, load_reference_model, references, static_batches
from nanoteach.results import save_result
from nanoteach.stages import STAGES, Generator, Parts
from nanoteach.types import SamplingParams

SYSTEM = "You are a friendly teller of small stories. You answer with short, clear sentences."
REQUESTS = (
    "Tell me a story about a {}.",
    "What is {} plus {}?",
    "Tell me a long story about a {} and a {}.",
    "Hello! Do you know a story about a {}?",
)
THINGS = ("fox", "boat", "lamp", "bear", "bridge", "kite", "owl", "garden", "key", "river")
WIDTH = 16  # requests that run side by side, here and in transformers' static batches
MAX_MODEL_LEN = 1024
POOL_TOKENS = 8 * MAX_MODEL_LEN  # K/V memory of every stage: 8 requests, if reserved to the limit
CHUNK_BUDGET = 128  # tokens a step in stage 6


@dataclass(frozen=True)
class Workload:
    """The same for every row of the table: prompts of token ids, and how long each goes on."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def num_output_tokens(self) -> int:
        """Tokens that a run generates; end tokens are ignored, so each request has its full length."""
        return sum(p.max_tokens or 0 for p in self.params)


@dataclass
class Row:
    """One line of the table. `seconds` has every run's time."""

    name: str
    seconds: list[float] = field(default_factory=list)
    longest_step: float | None = None
    agrees: str = ""
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The middle run's time."""
        return statistics.median(self.seconds)


class StepClock(WallClock):
    """A wall clock that remembers the longest step: how long anybody waited for a next token."""

    def __init__(self, on_tick: Callable[[int], object] | None = None) -> None:
        self.on_tick = on_tick
        self.start()

    def start(self) -> None:
        """Forget what was."""
        self.last = self.now()
        self.longest = 0.0

    def tick(self, work: SequenceOf[Work]) -> None:
        """A step is over."""
        now = self.now()
        self.longest = max(self.longest, now - self.last)
        self.last = now
        if self.on_tick:
            self.on_tick(sum(part.needs_logits for part in work))


def make_workload(tokenizer: Any, num_requests: int, seed: int = 0) -> Workload:
    """Chats with one system prompt in common; every third carries an earlier story along.

    Outputs take 8 to 128 tokens.
    """
    rng = random.Random(seed)
    prompts, params = [], []
    for i in range(num_requests):
        question = REQUESTS[i % len(REQUESTS)].format(*rng.sample(THINGS, 2))
        if "plus" in question:
            question = f"What is {rng.randint(2, 40)} plus {rng.randint(2, 40)}?"
        messages = [{"role": "system", "content": SYSTEM}]
        if i % 3 == 2:
            hero, thing = rng.sample(THINGS, 2)
            story = f"The {hero} looked for the {thing} all day. " * rng.randint(8, 40)
            messages += [
                {"role": "user", "content": REQUESTS[0].format(hero)},
                {"role": "assistant", "content": story.strip()},
            ]
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(list(tokenizer.encode(text, add_special_tokens=False)))
        params.append(SamplingParams(max_tokens=rng.randint(8, 128), ignore_eos=True))
    return Workload(prompts, params)


class Ladder:
    """Loads a model twice, ours and transformers', and climbs."""

    def __init__(
        self, model: str, num_requests: int = 32, repeats: int = 3, progress: bool = True
    ) -> None:
        self.name = model
        self.repeats = repeats
        self.progress = progress
        self.device = default_device()
        folder = resolve_model(model, progress)
        self.eos = eos_token_ids(folder)
        self.tokenizer = load_tokenizer(folder)
        self.workload = make_workload(self.tokenizer, num_requests)
        self.model = load_model(folder, self.device, torch.float32, max_model_len=MAX_MODEL_LEN)
        self.reference_model = load_reference_model(folder, self.device)
        self.config = EngineConfig(
            max_num_seqs=WIDTH,
            max_num_batched_tokens=MAX_MODEL_LEN,
            max_model_len=MAX_MODEL_LEN,
            num_gpu_blocks_override=POOL_TOKENS // EngineConfig.block_size,
        )

    def build(self, number: int, clock: StepClock) -> Generator:
        """A stage with this ladder's model and memory."""
        config = self.config
        if number >= 6:
            config = dataclasses.replace(config, max_num_batched_tokens=CHUNK_BUDGET)
        return STAGES[number - 1].build(Parts(self.model, config, self.eos, clock))

    def run(
        self, stages: SequenceOf[int] = (1, 2, 3, 4, 5, 6), one_by_one: bool = True
    ) -> list[Row]:
        """Time everything. transformers one by one is also what the others are compared with."""
        prompts, params = self.workload.prompts, self.workload.params
        num_rows = len(stages) + 2
        total = num_rows * self.workload.num_output_tokens
        with tqdm(total=total, unit="tok", disable=None if self.progress else True) as bar:
            rows = []
            bar.set_description("transformers, one by one")
            first = Row("transformers, one by one")
            start = time.perf_counter()
            expected = references(
                self.reference_model,
                prompts,
                params,
                self.eos,
                on_request=lambda r: bar.update(len(r.tokens)),
            )
            first.seconds.append(time.perf_counter() - start)
            rows.append(first)

            static = Row(f"transformers, static batches of {WIDTH}")
            bar.set_description(static.name)
            self.repeat(
                static, lambda: static_batches(self.reference_model, prompts, params, WIDTH)
            )
            static.agrees = str(compare(expected, static.tokens).verdict)
            bar.update(2 * self.workload.num_output_tokens - bar.n)
            rows.append(static)

            for number in stages:
                stage = STAGES[number - 1]
                row = Row(f"{number} {stage.name.replace('_', ' ')}")
                bar.set_description(f"stage {row.name}")
                done = bar.n
                limit = done + self.workload.num_output_tokens
                clock = StepClock(lambda n, limit=limit: bar.update(min(n, limit - bar.n)))

                def generate(number: int = number, clock: StepClock = clock) -> list[list[int]]:
                    generator = self.build(number, clock)  # anew, so that no prefix is cached yet
                    clock.start()
                    return generator.generate(prompts, params)

                self.repeat(row, generate)
                row.longest_step = clock.longest
                row.agrees = str(compare(expected, row.tokens).verdict)
                bar.update(limit - bar.n)
                rows.append(row)
        return rows

    def repeat(self, row: Row, generate: Callable[[], list[list[int]]]) -> None:
        """Run up to `repeats` times, but a slow one (over ten seconds) only once."""
        for _ in range(self.repeats):
            start = time.perf_counter()
            row.tokens = generate()
            row.seconds.append(time.perf_counter() - start)
            if sum(row.seconds) > 10:
                break
