"""Faults planted in the engine make the exactness comparison fail, so it would find real ones.

Each is a small change of the package, modelled on a slip that is easy to make.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import MODELS, RANDOM_MODELS
from pytest import MonkeyPatch
from settings import UNLIMITED, Setting, run
from torch import Tensor

from nanoteach import kv_cache, model, model_runner, paged_attention
from nanoteach.block_manager import BlockManager
from nanoteach.kv_cache import ContiguousKVCache
from nanoteach.model import Decoder, rope_table
from nanoteach.model_runner import PackedBatch, pack
from nanoteach.paged_attention import PagedAttention
from nanoteach.prefix_cache import PrefixCachingBlockManager, hash_block
from nanoteach.sequence import Sequence
from nanoteach.types import SamplingParams

CACHED = Setting("", 6, 16, UNLIMITED, "middling", True, 64)
ROOMY = CACHED._replace(pool="ample")
CHUNKED = Setting("", 6, 16, 64, "middling", False, 64)
STATIC = Setting("", 2, pool="ample", max_num_seqs=64)

Plant = Callable[[MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """A change of the package, the engine that must show it, and the models that do.

    (`tiny` takes ten times as long as the others, so it is asked for a few.)
    """

    plant: Plant
    setting: Setting
    models: tuple[str, ...] = RANDOM_MODELS

    def __str__(self) -> str:
        return self.plant.__name__


# --- positions -----------------------------------------------------------------------------------


def decoded_positions_off_by_one(patch: MonkeyPatch) -> None:
    """(If prompts were off by one too, nothing would show: rotary positions are relative.)"""

    def packed(scheduled: list[Any]) -> PackedBatch:
        batch = pack(scheduled)
        starts = [seq.num_computed_tokens for seq, num_new in scheduled for _ in range(num_new)]
        positions = [p + (start > 0) for p, start in zip(batch.positions, starts, strict=True)]
        return dataclasses.replace(batch, positions=positions)

    patch.setattr(model_runner, "pack", packed)


def rope_theta_doubled(patch: MonkeyPatch) -> None:
    plant_config(patch, lambda config: {"rope_theta": 2 * config.rope_theta})


def rope_scaling_ignored(patch: MonkeyPatch) -> None:
    plant_config(patch, lambda config: {"rope_scaling": None})


def plant_config(patch: MonkeyPatch, change: Callable[[Any], dict[str, Any]]) -> None:
    """Give every model that runs a rotary table made for another config."""

    def forward(self: Decoder, *args: Any) -> Tensor:
        changed = dataclasses.replace(self.config, **change(self.config))
        cos, sin = rope_table(changed, self.max_model_len)
        patch.setattr(self, "cos", cos)
        patch.setattr(self, "sin", sin)
        return correct(self, *args)

    correct = Decoder.forward
    patch.setattr(Decoder, "forward", forward)


# --- K/V -----------------------------------------------------------------------------------------


def change_stored(
    patch: MonkeyPatch, change: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]
) -> None:
    """Store something other than the new tokens' K/V."""

    def attend(
        self: PagedAttention, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: Any
    ) -> Tensor:
        return correct(self, layer, q, *change(k.clone(), v.clone(), metadata), metadata)

    correct = PagedAttention.attend
    patch.setattr(PagedAttention, "attend", attend)


def decoded_kv_zeroed(patch: MonkeyPatch) -> None:
    def change(k: Tensor, v: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
        decodes = decoded(metadata)
        k[decodes], v[decodes] = 0, 0
        return k, v

    change_stored(patch, change)


def prompt_v_scrambled(patch: MonkeyPatch) -> None:
    def change(k: Tensor, v: Tensor, metadata: Any) -> tuple[Tensor, Tensor]:
        prompts = ~decoded(metadata)
        v[prompts] = v[prompts].roll(1, dims=0)
        return k, v

    change_stored(patch, change)


def decoded(metadata: Any) -> Tensor:
    """Which of a step's new tokens are alone in their request's part of it."""
    alone = [new == 1 for new in metadata.query_lens for _ in range(new)]
    return torch.tensor(alone)


# --- blocks --------------------------------------------------------------------------------------


def block_reused_while_it_is_read(patch: MonkeyPatch) -> None:
    """A prefix hit leaves its blocks among the free ones."""

    def match_prefix(self: PrefixCachingBlockManager, owner: Sequence) -> int:
        owner.block_table = self.longest_prefix(owner)
        for block in owner.block_table:
            self.ref_counts[block] += 1
        return len(owner.block_table) * self.block_size

    patch.setattr(PrefixCachingBlockManager, "match_prefix", match_prefix)


def slot_in_the_block_before(patch: MonkeyPatch) -> None:
    """The first token of a new block goes where the table of the step before would have put it."""

    def slot_mapping(table: list[int], size: int, start: int, stop: int) -> list[int]:
        stale = table[: max(1, -(-start // size))] if stop - start == 1 else table
        return [stale[min(p // size, len(stale) - 1)] * size + p % size for p in range(start, stop)]

    patch.setattr(paged_attention, "slot_mapping", slot_mapping)


def reused_block_keeps_its_name(patch: MonkeyPatch) -> None:
    """A block's name outlives what was in it."""
    patch.setattr(PrefixCachingBlockManager, "take_free_block", BlockManager.take_free_block)


# --- prefixes ------------------------------------------------------------------------------------


def prefix_one_block_too_long(patch: MonkeyPatch) -> None:
    """The block after the last that matches is taken on trust."""

    def longest_prefix(self: PrefixCachingBlockManager, seq: Sequence) -> list[int]:
        blocks = correct(self, seq)
        room = (len(seq.token_ids) - 1) // self.block_size
        others = [block for block in self.name_of if block not in blocks]
        return blocks + others[:1] if blocks and len(blocks) < room else blocks

    correct = PrefixCachingBlockManager.longest_prefix
    patch.setattr(PrefixCachingBlockManager, "longest_prefix", longest_prefix)


def name_without_history(patch: MonkeyPatch) -> None:
    """Blocks of the same tokens count as the same, whatever came before."""
    patch.setattr(
        "nanoteach.prefix_cache.hash_block", lambda parent, tokens: hash_block(b"", tokens)
    )


# --- attention -----------------------------------------------------------------------------------


def chunk_sees_one_token_ahead(patch: MonkeyPatch) -> None:
    def mask(query_len: int, seq_len: int) -> Tensor:
        return torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len + 1)

    patch.setattr(model, "causal_mask", mask)


def chunk_does_not_see_itself(patch: MonkeyPatch) -> None:
    def mask(query_len: int, seq_len: int) -> Tensor:
        return torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len - 1)

    patch.setattr(model, "causal_mask", mask)


def decode_sees_one_slot_more(patch: MonkeyPatch) -> None:
    def mask(seq_lens: list[int], width: int) -> Tensor:
        return torch.arange(width) <= torch.tensor(seq_lens)[:, None]

    patch.setattr(kv_cache, "decode_mask", mask)


def heads_read_the_wrong_kv_head(patch: MonkeyPatch) -> None:
    """Query heads take K/V heads in turn, not side by side."""

    def interleaved(num_heads: int, num_kv_heads: int) -> list[int]:
        return [head % num_kv_heads for head in range(num_heads)]

    patch.setattr(model, "kv_head_map", interleaved)


# --- rows and ends -------------------------------------------------------------------------------


def row_written_one_slot_late(patch: MonkeyPatch) -> None:
    """A decoded token goes one slot after its own, where the step's mask doesn't reach."""

    def append(self: ContiguousKVCache, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        correct(self, layer, k, v, slots + 1 if len(slots) <= self.rows else slots)

    correct = ContiguousKVCache.append
    patch.setattr(ContiguousKVCache, "append", append)


def end_token_passed_over(patch: MonkeyPatch) -> None:
    """A wrong length is found although every token is right."""

    def finish_reason(self: SamplingParams, last: int, num_tokens: int, eos: Any) -> str | None:
        return "length" if num_tokens == self.max_tokens else None

    patch.setattr(SamplingParams, "finish_reason", finish_reason)


FAULTS = [
    Fault(decoded_positions_off_by_one, CHUNKED, MODELS),
    Fault(rope_theta_doubled, CHUNKED),
    Fault(rope_scaling_ignored, CHUNKED, ("llama",)),
    Fault(decoded_kv_zeroed, CHUNKED, MODELS),
    Fault(prompt_v_scrambled, CHUNKED, MODELS),
    Fault(block_reused_while_it_is_read, CACHED, MODELS),
    Fault(slot_in_the_block_before, CHUNKED),
    Fault(reused_block_keeps_its_name, CACHED),
    Fault(prefix_one_block_too_long, CACHED),
    Fault(name_without_history, ROOMY),
    Fault(chunk_sees_one_token_ahead, CHUNKED),
    Fault(chunk_does_not_see_itself, CHUNKED),
    Fault(decode_sees_one_slot_more, STATIC),
    Fault(heads_read_the_wrong_kv_head, CHUNKED),
    Fault(row_written_one_slot_late, STATIC),
    Fault(end_token_passed_over, CHUNKED),
]
CASES = [(fault, name) for fault in FAULTS for name in fault.models]


@pytest.mark.parametrize("fault, name", CASES, ids=[f"{fault}-{name}" for fault, name in CASES])
def test_a_planted_fault_is_found(fault: Fault, name: str, monkeypatch: MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    comparison, _ = run(fault.setting._replace(model=name))
    assert not comparison.exact


@pytest.mark.parametrize("setting", [CACHED, ROOMY, CHUNKED, STATIC], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_without_a_fault_the_same_engines_are_exact(setting: Setting, name: str) -> None:
    comparison, _ = run(setting._replace(model=name))
    assert comparison.exact, str(comparison)
