"""The same requests through vLLM and nano-vLLM, where they are installed.

    pip install vllm
    pip install git+https://github.com/GeeeekExplorer/nano-vllm
    nanoteach bench peers --shape qwen3-0.6b

Each in an environment of its own, since they pin their own torch.

Same token ids, same lengths, same metrics: both are driven a step at a time by their own engine's
`add_request` and `step`, as ours is. All at temperature 0.6, since nano-vLLM has no greedy
sampling. They want a checkpoint, so one of random weights is written, with `tiny`'s tokenizer,
which nobody asks. Without them there is a row that says so.

Knows: two foreign APIs. Does not know: our engine.
"""

import dataclasses
import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanoteach.bench.table import Row
from nanoteach.bench.workloads import METRICS, SPEED, Step, StepLog, Times, Workload
from nanoteach.config import EngineConfig, ModelConfig
from nanoteach.cost_model import WallClock
from nanoteach.model import Decoder

TEMPERATURE = 0.6
TOKENIZER = Path(__file__).parents[1] / "models" / "tiny"


def write_checkpoint(config: ModelConfig, dtype: torch.dtype, folder: Path) -> None:
    """A Hugging Face folder with random weights of this shape. Qwen3 alone (else ValueError)."""
    if config.family != "qwen3":
        raise ValueError(f"peers are measured on Qwen3's shapes, not on a {config.family} model")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    theirs = Qwen3Config(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size, num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim, max_position_embeddings=config.max_position,
        rms_norm_eps=config.rms_norm_eps, rope_theta=config.rope_theta,
        tie_word_embeddings=config.tie_word_embeddings,
    )  # fmt: skip
    Qwen3ForCausalLM(theirs).to(dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


def vllm_steps(folder: Path, config: EngineConfig) -> Callable[[Workload], Callable[[], int]]:
    """vLLM: queues a workload, and then gives how many new tokens each step brought."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    engine = LLM(
        model=str(folder), skip_tokenizer_init=True, enable_prefix_caching=False,
        max_model_len=config.max_model_len, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        gpu_memory_utilization=config.gpu_memory_utilization,
    ).llm_engine  # fmt: skip
    round_ = 0

    def queue(workload: Workload) -> Callable[[], int]:
        nonlocal round_
        round_ += 1
        seen: dict[str, int] = {}
        for i, (prompt, n) in enumerate(zip(workload.prompts, workload.output_lens, strict=True)):
            params = SamplingParams(
                temperature=TEMPERATURE, max_tokens=n, ignore_eos=True, detokenize=False
            )
            engine.add_request(f"{round_}-{i}", {"prompt_token_ids": prompt}, params)

        def step() -> int:
            before = sum(seen.values())
            for output in engine.step():
                seen[output.request_id] = len(output.outputs[0].token_ids)
            return sum(seen.values()) - before

        return step

    return queue


def nano_steps(folder: Path, config: EngineConfig) -> Callable[[Workload], Callable[[], int]]:
    """nano-vLLM, likewise. A prompt's step brings each of its requests a token."""
    from nanovllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    engine = LLM(
        str(folder), max_model_len=config.max_model_len, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        gpu_memory_utilization=config.gpu_memory_utilization,
    )  # fmt: skip

    def queue(workload: Workload) -> Callable[[], int]:
        for prompt, n in zip(workload.prompts, workload.output_lens, strict=True):
            engine.add_request(
                prompt, SamplingParams(temperature=TEMPERATURE, max_tokens=n, ignore_eos=True)
            )
        scheduler, finished = engine.scheduler, 0

        def done() -> int:
            seqs = (*scheduler.running, *scheduler.waiting)
            return finished + int(sum(seq.num_completion_tokens for seq in seqs))

        def step() -> int:
            nonlocal finished
            before = done()
            outputs, _ = engine.step()
            finished += sum(len(tokens) for _, tokens in outputs)
            return done() - before

        return step

    return queue


PEERS: dict[str, tuple[str, Callable[[Path, EngineConfig], Any]]] = {
    "vLLM": ("vllm", vllm_steps),
    "nano-vLLM": ("nanovllm", nano_steps),
}


def run(queue: Callable[[Workload], Callable[[], int]], workload: Workload) -> Times:
    """One run, timed as ours are: from the first request to the last token."""
    log = StepLog(WallClock())
    start, missing = log.now(), sum(workload.output_lens)
    step = queue(workload)
    while missing > 0:
        tokens = step()
        missing -= tokens
        log.steps.append(Step(log.now(), 0, 0, tokens))
    return Times(start, log.now(), log.steps, [])


def peer_rows(
    model: Decoder, config: EngineConfig, dtype: torch.dtype, repeats: int, small: bool
) -> list[Row]:
    """The workloads of SPEED on every peer; a row that says so for one that isn't installed."""
    rows = []
    asked = [w for make in SPEED.values() for w in make(model.config.vocab_size, small)]
    for name, (package, opened) in PEERS.items():
        if importlib.util.find_spec(package) is None:
            rows.append(Row(name, "output", "tok/s", [], note=f"not run: no {package} here"))
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(model.config, dtype, Path(folder))
            queue = opened(Path(folder), config)
            for workload in asked:
                warm = dataclasses.replace(workload.short(), temperature=TEMPERATURE)
                run(queue, warm)
                runs = [run(queue, workload) for _ in range(repeats)]
                for metric in ("output", "prompt", "decode", "first token"):
                    if metric in workload.metrics:
                        unit, value = METRICS[metric]
                        samples = [value(workload, times) for times in runs]
                        rows.append(Row(f"{name}: {workload.name}", metric, unit, samples))
    return rows
