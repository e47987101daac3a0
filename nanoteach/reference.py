"""What transformers says, and how we compare with it.

Two implementations never agree to the last bit, so what "the same" means needs a rule:

- float32 is compared token for token. Where a request first differs, transformers itself decides:
  if its two best scores were closer than `TIE`, rounding may pick either; otherwise it is a fault.
  What comes after a difference is another text, so the request's comparison ends there.
- bfloat16 is compared by scores, both given the same tokens: see `judge_logits`.

Knows: transformers' own generation, one request at a time and in padded batches. Does not know:
how any stage makes its tokens.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nanoteach.types import SamplingParams, prepare_batch

TIE = 1e-4
"""Top-two gaps below this are ties, in float32."""

HFModel = Any
"""A transformers causal language model; its methods are annotated in part."""


@dataclass(frozen=True)
class Reference:
    """What transformers generates after one prompt.

    gaps: for each token, by how much its score was above that of the runner-up.
    """

    tokens: list[int]
    gaps: list[float]


def open_model(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> HFModel:
    """A model folder as transformers opens it."""
    from transformers import AutoModelForCausalLM  # slow to import, so only where it is needed
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # a bar for each weight says nothing to whoever compares tokens
    try:
        # The dtype goes in here: `.to(torch.bfloat16)` later would also round the rotary
        # frequencies.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    finally:
        if bars:
            logging.enable_progress_bar()
    return model.to(device).eval()


def references(
    model: HFModel | str | Path,
    prompts: SequenceOf[SequenceOf[int]],
    params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    eos_token_ids: SequenceOf[int] = (),
    progress: bool = False,
) -> list[Reference]:
    """Greedy continuations by transformers, one request at a time.

    A folder is opened in float32.
    """
    if isinstance(model, (str, Path)):
        model = open_model(model)
    settled = settle(model, prompts, params)
    result = []
    bar = tqdm(
        zip(prompts, settled, strict=True), "transformers", len(prompts), disable=not progress
    )
    for prompt, p in bar:
        stops = set(p.stop_token_ids) | set(() if p.ignore_eos else eos_token_ids)
        assert p.max_tokens is not None
        out = hf_generate(model, [prompt], p.max_tokens, stops, logits=True)
        top = torch.cat(out.logits).float().topk(2).values
        gaps: list[float] = (top[:, 0] - top[:, 1]).tolist()
        result.append(Reference(out.sequences[0, len(prompt) :].tolist(), gaps))
    return result


def static_batches(
    model: HFModel | str | Path,
    prompts: SequenceOf[SequenceOf[int]],
    params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    width: int = 8,
    eos_token_ids: SequenceOf[int] = (),
    progress: bool = False,
) -> list[list[int]]:
    """The same by transformers in left-padded batches of `width` requests, in their order.

    A batch runs to its longest `max_tokens`. Each request gets the tokens up to its own end.
    """
    if isinstance(model, (str, Path)):
        model = open_model(model)
    settled = settle(model, prompts, params)
    result = []
    for start in tqdm(range(0, len(prompts), width), "batches", disable=not progress):
        batch, batch_params = prompts[start : start + width], settled[start : start + width]
        longest = max(p.max_tokens or 0 for p in batch_params)
        rows = hf_generate(model, batch, longest).sequences[:, max(map(len, batch)) :].tolist()
        result += [cut(row, p, eos_token_ids) for row, p in zip(rows, batch_params, strict=True)]
    return result


def settle(
    model: HFModel,
    prompts: SequenceOf[SequenceOf[int]],
    params: SamplingParams | SequenceOf[SamplingParams] | None,
) -> list[SamplingParams]:
    """Checked parameters, one for each prompt."""
    config = model.config
    return prepare_batch(prompts, params, config.vocab_size, config.max_position_embeddings)


def cut(tokens: list[int], params: SamplingParams, eos_token_ids: SequenceOf[int]) -> list[int]:
    """A request's own tokens out of a row that went on."""
    for n, token in enumerate(tokens, start=1):
        if params.finish_reason(token, n, eos_token_ids):
            return tokens[:n]
    return tokens


@torch.inference_mode()
def hf_generate(
    model: HFModel,
    prompts: SequenceOf[SequenceOf[int]],
    max_tokens: int,
    stops: SequenceOf[int] | set[int] = (),
    logits: bool = False,
) -> Any:
    """transformers' `generate` on a left-padded batch: greedy, ended by `stops` alone.

    Scores are kept only if asked for, since keeping them takes time.
    """
    from transformers import GenerationConfig

    width = max(map(len, prompts))
    padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    # Always with a mask: without one, every token of a prompt that equals pad_token_id is masked.
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    # What the call leaves open is taken from the model's own settings (a penalty, an end token), so
    # ours stand in their place meanwhile.
    theirs, model.generation_config = (
        model.generation_config,
        GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=sorted(stops) or None,
            pad_token_id=0,
            output_logits=logits,
            return_dict_in_generate=True,
        ),
    )
    try:
        return model.generate(
            torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
        )
    finally:
        model.generation_config = theirs


# --- tokens ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mismatch:
    """Where a request first differs. None stands for a text that has ended already.

    gap: transformers' top-two gap at this step; None where transformers had ended.
    """

    request: int
    step: int
    expected: int | None
    got: int | None
    gap: float | None

    def __str__(self) -> str:
        expected, got = ("the end" if t is None else t for t in (self.expected, self.got))
        gap = "" if self.gap is None else f" (its two best are {self.gap:.2g} apart)"
        return (
            f"request {self.request}, step {self.step}: "
            f"transformers has {expected}{gap}, here it is {got}"
        )


@dataclass
class Comparison:
    """How outputs compare with transformers' own. `num_tokens` counts those that are the same."""

    num_requests: int = 0
    num_tokens: int = 0
    ties: list[Mismatch] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether nothing differs but ties."""
        return not self.mismatches

    def __str__(self) -> str:
        lines = [
            f"{self.num_tokens} tokens of {self.num_requests} requests are those of transformers"
        ]
        lines += [f"  tie: {tie}" for tie in self.ties]
        shown = self.mismatches[:10]
        lines += [f"  DIFFERENT: {mismatch}" for mismatch in shown]
        if len(self.mismatches) > len(shown):
            lines.append(f"  ... and {len(self.mismatches) - len(shown)} more requests differ")
        return "\n".join(lines)


def compare(references: SequenceOf[Reference], outputs: SequenceOf[SequenceOf[int]]) -> Comparison:
    """Compare outputs with references, request by request, each up to its first difference."""
    result = Comparison(num_requests=len(references))
    for i, (reference, output) in enumerate(zip(references, outputs, strict=True)):
        steps = zip_longest(reference.tokens, output, reference.gaps)
        for step, (expected, got, gap) in enumerate(steps):
            if expected == got:
                result.num_tokens += 1
                continue
            difference = Mismatch(i, step, expected, got, gap)
            # A text that is too short or too long is no tie, whatever the gap.
            tie = expected is not None and got is not None and gap < TIE
            (result.ties if tie else result.mismatches).append(difference)
            break
    return result


# --- scores ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """How logits compare with those of transformers in float32.

    rms_error, their_rms_error: ours, and that of transformers in our dtype, over all positions and
    the whole vocabulary. num_differing: tokens that are not the float32 argmax. unexplained: the
    positions of those among them where our error is too small to explain it.
    """

    num_tokens: int
    rms_error: float
    their_rms_error: float
    num_differing: int
    unexplained: list[int]

    @property
    def ok(self) -> bool:
        """Whether we are as good as transformers in the same dtype: an error within 1.5 times."""
        return self.rms_error <= 1.5 * self.their_rms_error and not self.unexplained

    def __str__(self) -> str:
        return (
            f"{self.num_tokens} tokens: RMS error of the logits {self.rms_error:.3g}, that of "
            f"transformers {self.their_rms_error:.3g}; {self.num_differing} tokens are not the "
            f"float32 argmax, {len(self.unexplained)} of them unexplained"
        )


def judge_logits(
    ours: Tensor, theirs: Tensor, exact: Tensor, tokens: SequenceOf[int] | None = None
) -> Judgement:
    """Judge logits `[num_tokens, vocab_size]`, all three given the same tokens as input.

    theirs: transformers in our dtype; exact: transformers in float32. tokens: what we chose at each
    position, if not the argmax of `ours`. A choice that is not the exact argmax is explained where
    the exact top-two gap is within our largest error at that position.
    """
    ours, theirs, exact = (x.double() for x in (ours, theirs, exact))
    error = (ours - exact).abs()
    chosen = ours.argmax(-1) if tokens is None else torch.tensor(tokens, device=ours.device)
    top = exact.topk(2).values
    gap = top[:, 0] - top[:, 1]
    differs = chosen != exact.argmax(-1)
    return Judgement(
        num_tokens=len(ours),
        rms_error=float(error.square().mean().sqrt()),
        their_rms_error=float((theirs - exact).square().mean().sqrt()),
        num_differing=int(differs.sum()),
        unexplained=(differs & ~(gap <= error.amax(-1))).nonzero().flatten().tolist(),
    )
