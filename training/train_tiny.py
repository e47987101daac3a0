"""Trains `tiny`, the model that comes with nanoteach, from nothing.

    python training/train_tiny.py --out DIR

makes the corpus, trains a tokenizer on it, trains a small Qwen3 on the tokens, asks the
result some questions, and writes a folder that `transformers` opens. The defaults made the
model in `nanoteach/models/tiny`. They want a GPU. To see the whole path on a CPU, go small:

    python training/train_tiny.py --out DIR --volumes 4 --characters 60000 \\
        --steps 20 --batch 2 --length 256 --questions 4
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import corpus
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 2048
CONTEXT = 4096
SPECIAL = (corpus.END, corpus.IM_START, corpus.IM_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# In the words of the released Qwen3 configs, so that any reader of those reads this one.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 320,
    "initializer_range": 0.02,
    "intermediate_size": 960,
    "max_position_embeddings": CONTEXT,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}


# ---------------------------------------------------------------------------------------
# Tokenizer and tokens
# ---------------------------------------------------------------------------------------


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Byte-level BPE. Every digit is a token of its own, which makes sums learnable."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Tokens(NamedTuple):
    """A row of token ids, and for each the kind of document it is from."""

    ids: np.ndarray
    kinds: np.ndarray


def encode_volume(number: int, seed: int, characters: int, tokenizer_json: str) -> Tokens:
    """Writes one volume and turns it into tokens, each document ended by its own token."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    tokenizer = Tokenizer.from_str(tokenizer_json)
    pages = corpus.volume(seed, number, characters)
    encodings = tokenizer.encode_batch([page.text + corpus.END for page in pages])
    ids = [np.array(encoding.ids, dtype=np.int16) for encoding in encodings]
    kinds = [
        np.full(len(row), corpus.KINDS.index(page.kind), dtype=np.int8)
        for row, page in zip(ids, pages, strict=True)
    ]
    return Tokens(np.concatenate(ids), np.concatenate(kinds))


def encode_volumes(
    numbers: Sequence[int], seed: int, characters: int, tokenizer: Tokenizer, workers: int
) -> Tokens:
    job = partial(
        encode_volume, seed=seed, characters=characters, tokenizer_json=tokenizer.to_str()
    )
    if workers == 1:
        parts = [job(number) for number in numbers]
    else:
        with ProcessPoolExecutor(workers) as pool:
            parts = list(pool.map(job, numbers, chunksize=4))
    return Tokens(np.concatenate([p.ids for p in parts]), np.concatenate([p.kinds for p in parts]))


def rows(tokens: np.ndarray, length: int) -> Tensor:
    """Cuts the tokens into rows of `length` + 1: what to read, and one more to foretell."""
    count = (len(tokens) - 1) // length
    starts = np.arange(count)[:, None] * length
    return torch.from_numpy(tokens[starts + np.arange(length + 1)])


# ---------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------


def batches(data: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Rows in a new random order in every epoch, for ever."""
    generator = torch.Generator().manual_seed(seed)
    batch = min(batch, len(data))
    while True:
        order = torch.randperm(len(data), generator=generator).to(data.device)
        for chunk in order.split(batch):
            if len(chunk) == batch:
                yield data[chunk].long()


def token_losses(model: torch.nn.Module, batch: Tensor) -> Tensor:
    """The loss of every token of the batch, one row per row."""
    with torch.autocast("cuda", torch.bfloat16, enabled=batch.is_cuda):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.float().transpose(1, 2), batch[:, 1:], reduction="none"
    )


def held_out_losses(
    model: torch.nn.Module, tokens: Tokens, length: int, device: str
) -> dict[str, float]:
    """The mean loss for each kind of document, and for all of them."""
    ids, kinds = rows(tokens.ids, length), rows(tokens.kinds, length)[:, 1:]
    with torch.no_grad():
        losses = torch.cat(
            [token_losses(model, part.to(device).long()).cpu() for part in ids.split(4)]
        )
    found = {
        kind: losses[kinds == index].mean().item()
        for index, kind in enumerate(corpus.KINDS)
        if (kinds == index).any()
    }
    return found | {"all": losses.mean().item()}


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A short warm-up, then half a cosine down to nothing."""
    warmup = max(1, min(200, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(
    model: Qwen3ForCausalLM, data: Tensor, steps: int, batch: int, peak: float, seed: int, compiled: bool
) -> list[float]:  # fmt: skip
    """Trains the model in place and returns the loss of every step."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}],
        lr=peak, betas=(0.9, 0.95), fused=data.is_cuda,
    )  # fmt: skip
    forward: torch.nn.Module = torch.compile(model) if compiled else model  # type: ignore[assignment]
    losses: list[Tensor] = []
    feed = batches(data, batch, seed)
    bar = trange(steps, desc="training", unit="step", mininterval=2)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        loss = token_losses(forward, next(feed)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % 50 == 0 or step == steps - 1:
            bar.set_postfix(loss=f"{loss.item():.4f}")
    return torch.stack(losses).tolist()


# ---------------------------------------------------------------------------------------
# The folder
# ---------------------------------------------------------------------------------------


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model(out: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """Writes what `transformers` needs to open the model, the weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    end, _, im_end = (tokenizer.token_to_id(token) for token in SPECIAL)
    model.to(torch.bfloat16).save_pretrained(out)
    write_json(out / "config.json", CONFIG)
    write_json(
        out / "generation_config.json",
        {"do_sample": False, "eos_token_id": [im_end, end], "pad_token_id": end},
    )
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "bos_token": None,
            "eos_token": corpus.IM_END,
            "pad_token": corpus.END,
            "chat_template": CHAT_TEMPLATE,
        },
    )


# ---------------------------------------------------------------------------------------
# Asking the result
# ---------------------------------------------------------------------------------------

SAMPLES = (
    "Tell me a story about a fox.",
    "Tell me a story about a robot and a silver bell.",
    "What is 27 plus 48?",
    "What is the opposite of early?",
    "What is the capital of France?",
)


class Judge:
    """Opens the written folder as a reader would, in float32, and asks it things."""

    def __init__(self, folder: Path, device: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
        self.model.eval()
        self.device = device

    def chat_prompt(self, question: str) -> str:
        message = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        return text

    def complete(self, prompts: Sequence[str], new_tokens: int, batch: int = 100) -> list[str]:
        """Greedy answers, many prompts at a time."""
        answers: list[str] = []
        for i in range(0, len(prompts), batch):
            inputs = self.tokenizer(
                list(prompts[i : i + batch]), padding=True, padding_side="left", return_tensors="pt"
            ).to(self.device)
            output = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=new_tokens,
            )
            new = output[:, inputs["input_ids"].shape[1] :]
            answers += self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return answers

    def share_right(self, prompts: Sequence[str], answers: Sequence[str]) -> float:
        """The share of prompts whose first line of answer is exactly right."""
        said = self.complete(prompts, max(len(self.tokenizer(a)["input_ids"]) for a in answers) + 2)
        lines = [text.strip().split("\n")[0] for text in said]
        return sum(a == b for a, b in zip(lines, answers, strict=True)) / len(answers)

    def gaps(self, prompts: Sequence[Sequence[int]], steps: int) -> Tensor:
        """How far the likeliest token is ahead of the next one, at every greedy step.

        There is no stop token here, the way an engine is measured. If a gap were as small
        as a rounding error, two right engines could disagree.
        """
        inputs = self.tokenizer.pad(
            {"input_ids": [list(p) for p in prompts]}, padding_side="left", return_tensors="pt"
        ).to(self.device)
        settings = self.model.generation_config
        stop, settings.eos_token_id = settings.eos_token_id, None
        output = self.model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=steps,
            output_logits=True,
            return_dict_in_generate=True,
        )
        settings.eos_token_id = stop
        top = torch.stack(output.logits).topk(2).values
        return (top[..., 0] - top[..., 1]).flatten().cpu()


def new_sums(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Sums that the corpus never shows."""
    pairs = [(x, y) for x in range(100) for y in range(100) if corpus.held_out_sum(x, y)]
    pairs = Random(seed).sample(pairs, min(count, len(pairs)))
    return (
        [f"What is {x} plus {y}?" for x, y in pairs],
        [f"{x} plus {y} is {x + y}." for x, y in pairs],
    )


def story_questions(kind: str, count: int, seed: int) -> tuple[list[str], list[str]]:
    """New stories up to their first question, and the answers to these."""
    prompts: list[str] = []
    answers: list[str] = []
    for page in corpus.documents(seed, 0):
        if page.kind == kind and "\nAnswer: " in page.text:
            prompt, rest = page.text.split("\nAnswer: ", 1)
            prompts.append(f"{prompt}\nAnswer:")
            answers.append(rest.split("\n")[0])
        if len(prompts) == count:
            break
    return prompts, answers


def judge_scores(judge: Judge, count: int, seed: int) -> dict[str, float]:
    """How often the model is right, on text made from another seed."""
    sums, totals = new_sums(count, seed)
    voice = corpus.Voice(f"{seed}/facts")
    asked = {}
    for number in range(50 * count):
        topic = voice.random.choice(corpus.TOPICS)
        q = corpus.fact_question(voice, str(number), topic)
        asked[q.question] = q.answer
        if len(asked) == count:
            break
    short = [(x, y) for x in range(10) for y in range(10)][: count * 10]
    scores = {
        "`What is 3 plus 4?`, all 100 sums of one digit": judge.share_right(
            [judge.chat_prompt(f"What is {x} plus {y}?") for x, y in short],
            [f"{x} plus {y} is {x + y}." for x, y in short],
        ),
        "`What is 3 + 4?`, the same 100": judge.share_right(
            [judge.chat_prompt(f"What is {x} + {y}?") for x, y in short],
            [f"{x} + {y} = {x + y}" for x, y in short],
        ),
        "sums never shown": judge.share_right([judge.chat_prompt(q) for q in sums], totals),
        "facts": judge.share_right([judge.chat_prompt(q) for q in asked], list(asked.values())),
    }
    for kind in ("story", "long story"):
        scores[f"questions about a new {kind}"] = judge.share_right(
            *story_questions(kind, count, seed)
        )
    return scores


def random_cuts(tokens: np.ndarray, count: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to 300 tokens, cut from the text anywhere."""
    random = Random(seed)
    cuts: list[list[int]] = []
    for _ in range(count):
        length = random.randint(1, 300)
        start = random.randrange(max(1, len(tokens) - length))
        cuts.append(tokens[start : start + length].tolist())
    return cuts


# ---------------------------------------------------------------------------------------
# The model card
# ---------------------------------------------------------------------------------------

CARD = """---
license: mit
library_name: transformers
pipeline_tag: text-generation
language: en
---

# tiny

A very small language model. It comes with nanoteach, so that an engine has something real
to serve with nothing to download. It tells short stories, adds numbers below 100, answers
questions about a small closed world, and chats. It knows nothing else.

The architecture is that of Qwen3 (`Qwen3ForCausalLM`), so an engine that serves this model
serves the large ones too. The weights are our own, trained from nothing on text that
`training/corpus.py` writes. `transformers` opens this folder.

| | |
| --- | --- |
{facts}

## How it was made

`python training/train_tiny.py{command}`

{how}

| kind of document | share of the tokens | held-out loss |
| --- | --- | --- |
{kinds}

The loss is in nats per token. Mean training loss of the last {tail} steps: {train_loss:.4f}.
The held-out text is made from another seed. It is new text, but from the same grammar, so
the held-out loss says that the model has learned the grammar, not that it knows the world.
Much of the loss that is left is the choice that the grammar makes by chance.

## How good it is

Greedy answers in float32, exactly right or wrong:

| {questions} of each, if not told otherwise | right |
| --- | --- |
{scores}

One pair of numbers in eleven is kept out of the corpus. `sums never shown` asks those.

Greedy decoding is meant to be decided: wherever the grammar chooses, one option is clearly
favoured. Measured over {cuts} prompts of 1 to 300 tokens, cut from held-out text, with
{gap_steps} greedy tokens each and no stop token, in float32 ({gap_count:,} steps): the two
largest logits were less than 0.0001 apart in {gap4} steps, less than 0.001 in {gap3}, and
less than 0.01 in {gap2}. The smallest gap was {gap_min:.2g}.

## Samples

Greedy, with the chat template:

{samples}

## Limits

The model has seen only our own made-up text: a few hundred words, {heroes} kinds of heroes,
{plots} plots. Asked about anything else it says that it does not know, or makes something
up. Now and then it slips: it copies a digit wrong, or two people in a story bear one name.
It writes English only. It is for teaching and testing, not for use.

## Licence

MIT, like the rest of nanoteach.
"""


def table(pairs: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in pairs)


def quoted(text: str) -> str:
    return "\n".join(f"> {line}" if line else ">" for line in text.split("\n"))


# ---------------------------------------------------------------------------------------
# The whole path
# ---------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train the model `tiny`: corpus, tokenizer, weights and model card.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--steps", type=int, default=2600, help="training steps")
    parser.add_argument("--batch", type=int, default=16, help="rows in a step")
    parser.add_argument("--length", type=int, default=CONTEXT, help="tokens in a row")
    parser.add_argument("--volumes", type=int, default=640, help="volumes of the corpus")
    parser.add_argument("--characters", type=int, default=250_000, help="characters in a volume")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=1, help="of the corpus and the weights")
    parser.add_argument("--questions", type=int, default=200, help="of each kind, to judge by")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes that write text"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train"
    )
    return parser


def main() -> None:
    args = make_parser().parse_args()
    device: str = args.device
    hardware = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    began = time.perf_counter()

    sample = [p.text for n in range(min(24, args.volumes))
              for p in corpus.volume(args.seed, n, args.characters)]  # fmt: skip
    tokenizer = train_tokenizer(sample)
    workers = min(args.workers, args.volumes)
    tokens = encode_volumes(range(args.volumes), args.seed, args.characters, tokenizer, workers)
    held = encode_volumes(range(4), args.seed + 1000, args.characters, tokenizer, 1)
    shares = np.bincount(tokens.kinds, minlength=len(corpus.KINDS)) / len(tokens.kinds)
    wrote = time.perf_counter()
    print(f"corpus: {len(tokens.ids):,} tokens in {wrote - began:.0f} s", flush=True)

    torch.manual_seed(args.seed)
    config = Qwen3Config(
        **{k: v for k, v in CONFIG.items() if k not in ("model_type", "torch_dtype")}
    )
    model = Qwen3ForCausalLM(config).float().to(device)
    size = sum(p.numel() for p in model.parameters())
    data = rows(tokens.ids, args.length).to(device)
    losses = train(model, data, args.steps, args.batch, args.lr, args.seed, args.compile)
    took = time.perf_counter() - wrote
    tail = min(100, args.steps // 2 or 1)
    train_loss = sum(losses[-tail:]) / tail
    held_losses = held_out_losses(model, held, args.length, device)
    print(
        f"trained in {took:.0f} s, loss {losses[0]:.3f} to {train_loss:.4f}, held-out {held_losses}"
    )

    write_model(args.out, model, tokenizer)
    judge = Judge(args.out, device)
    scores = judge_scores(judge, args.questions, args.seed + 2000)
    print(scores, flush=True)
    cuts = random_cuts(held.ids, min(64, args.questions), args.seed)
    gap_steps, sample_tokens = (100, 300) if args.questions >= 64 else (5, 5)
    gaps = judge.gaps(cuts, gap_steps)
    said = judge.complete([judge.chat_prompt(q) for q in SAMPLES], sample_tokens)

    changed = "".join(
        f" --{name} {value}"
        for name, value in vars(args).items()
        if name in ("steps", "batch", "length", "volumes", "characters", "lr", "seed")
    )
    per_step = min(args.batch, len(data)) * args.length
    card = CARD.format(
        facts=table([
            ("parameters", f"{size:,} (embeddings shared with the output)"),
            ("weights", "bfloat16"),
            ("layers, width, MLP", "{num_hidden_layers}, {hidden_size}, {intermediate_size}".format(**CONFIG)),
            ("heads, KV heads, head size", "{num_attention_heads}, {num_key_value_heads}, {head_dim}".format(**CONFIG)),
            ("vocabulary", f"{VOCABULARY:,}, byte-level BPE, every digit a token"),
            ("context", f"{CONTEXT:,} tokens"),
            ("stop tokens", f"`{corpus.IM_END}` and `{corpus.END}`"),
        ]),
        command=changed + (" --compile" if args.compile else ""),
        how=(
            f"{len(tokens.ids):,} tokens of corpus, {args.steps:,} steps of {per_step:,} tokens"
            f" ({args.steps * per_step / len(tokens.ids):.1f} passes over the corpus), AdamW,"
            f" bfloat16 autocast, in {took:.0f} seconds on one {hardware}."
            f" Writing and encoding the text took another {wrote - began:.0f} seconds."
        ),
        kinds=table([
            *((kind, f"{share:.1%}", f"{held_losses.get(kind, math.nan):.4f}")
              for kind, share in zip(corpus.KINDS, shares, strict=True)),
            ("all", "100%", f"{held_losses['all']:.4f}"),
        ]),
        tail=tail, train_loss=train_loss, questions=args.questions,
        scores=table([(name, f"{score:.1%}") for name, score in scores.items()]),
        cuts=len(cuts), gap_steps=gap_steps, gap_count=len(gaps), gap_min=gaps.min().item(),
        gap4=int((gaps < 1e-4).sum()), gap3=int((gaps < 1e-3).sum()), gap2=int((gaps < 1e-2).sum()),
        samples="\n\n".join(f"**{q}**\n\n{quoted(s)}" for q, s in zip(SAMPLES, said, strict=True)),
        heroes=len(corpus.HEROES), plots=len(corpus.PLOTS),
    )  # fmt: skip
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(card)


if __name__ == "__main__":
    main()
