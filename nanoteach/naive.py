"""Stage 1. Generation as the definition has it: read everything again for every new token.

Knows: the loop predict, append, repeat. Does not know: caches, batches. Its cost grows with the
square of the length, which is what every later stage is about.
"""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from nanoteach.cost_model import Clock, WallClock, Work
from nanoteach.model import AttentionMetadata, Decoder, causal_attention
from nanoteach.sampler import greedy
from nanoteach.types import SamplingParams, prepare_batch


class CausalAttention:
    """Attention without memory: every sequence's K/V are among the tokens just given."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        parts = zip(*(x.split(metadata.query_lens) for x in (q, k, v)), strict=True)
        return torch.cat([causal_attention(*part) for part in parts])


class NaiveGenerator:
    """One request after the other, each token from the whole text so far."""

    def __init__(
        self,
        model: Decoder,
        eos_token_ids: SequenceOf[int] = (),
        clock: Clock | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self.model = model
        self.eos_token_ids = tuple(eos_token_ids)
        self.clock = clock or WallClock()
        self.max_model_len = max_model_len or model.max_model_len
        self.attention = CausalAttention()

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[list[int]]:
        """The tokens generated after each prompt (prompts are token ids)."""
        vocab_size = self.model.config.vocab_size
        settled = prepare_batch(prompts, params, vocab_size, self.max_model_len)
        return [self.generate_one(prompt, p) for prompt, p in zip(prompts, settled, strict=True)]

    def generate_one(self, prompt: SequenceOf[int], params: SamplingParams) -> list[int]:
        """The greedy loop."""
        output: list[int] = []
        while True:
            output.append(self.next_token([*prompt, *output]))
            if params.finish_reason(output[-1], len(output), self.eos_token_ids):
                return output

    @torch.inference_mode()
    def next_token(self, token_ids: list[int]) -> int:
        """The most likely token after `token_ids`, computed from nothing."""
        num_tokens, device = len(token_ids), self.model.device
        hidden = self.model.forward(
            torch.tensor(token_ids, device=device),
            torch.arange(num_tokens, device=device),
            self.attention,
            AttentionMetadata(query_lens=[num_tokens], seq_lens=[num_tokens]),
        )
        token = int(greedy(self.model.logits(hidden[-1:])))
        self.clock.tick([Work(num_new=num_tokens, num_computed=0)])
        return token
