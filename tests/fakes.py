"""Stand-ins for a trained model: one that only keeps books, and one with random weights.

`ShadowRunner` takes the place of the model runner. It computes nothing, but it writes to slots and
reads through block tables as attention does, and what it writes names the whole history of a token.
So a stale block, a block that two requests write, or one published before it was written is seen at
the first read, in microseconds and without a model.
"""

import json
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import SimpleNamespace

import torch

from nanoteach.block_manager import BlockManager, slot_mapping
from nanoteach.engine_core import EngineCore
from nanoteach.scheduler import Scheduled, Scheduler
from nanoteach.types import SamplingParams

VOCAB_SIZE = 4
EOS = 0

Content = tuple[str | None, int]
"""What a slot holds: the salt of the request and a hash of its tokens up to this one."""


class Fault(Exception):
    """Planted."""


def chain(token_ids: SequenceOf[int]) -> list[int]:
    """For each token, a hash of it and all before it."""
    hashes, last = [], 1
    for token in token_ids:
        last = hash((last, token))
        hashes.append(last)
    return hashes


def next_token(history: int) -> int:
    """What the fake model says after a history."""
    return history // 7 % VOCAB_SIZE


def expected_tokens(prompt: SequenceOf[int], params: SamplingParams) -> list[int]:
    """The fake model's continuation, without any engine."""
    tokens: list[int] = []
    while True:
        tokens.append(next_token(chain([*prompt, *tokens])[-1]))
        if params.finish_reason(tokens[-1], len(tokens), [EOS]):
            return tokens


class ShadowRunner:
    """Has `ModelRunner.execute`, and raises AssertionError where a real one would go wrong.

    fault: raised by the next step, after it has written garbage where it should have written K/V.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB_SIZE))
        self.scheduler = scheduler
        self.block_size = scheduler.block_manager.block_size
        self.slots: dict[int, Content | None] = {}
        self.holders: dict[int, set[str]] = {}
        """For each block, who held it when the last step ended."""
        self.last_step: dict[str, int] = {}
        self.first_seen: list[str] = []
        self.fault: BaseException | None = None

    def execute(self, scheduled: list[Scheduled]) -> list[int | None]:
        """See `ModelRunner.execute`."""
        self.last_step = {seq.request_id: num_new for seq, num_new in scheduled}
        assert len(self.last_step) == len(scheduled), "a request is in the step twice"
        for seq in self.scheduler.running:
            if seq.request_id in self.last_step and seq.request_id not in self.first_seen:
                self.first_seen.append(seq.request_id)
        # Every layer stores the K/V of all new tokens before anyone attends: write, then read.
        self.write(scheduled)
        if self.fault:
            fault, self.fault = self.fault, None
            self.holders = {}
            raise fault
        return [self.read(part) for part in scheduled]

    def write(self, scheduled: list[Scheduled]) -> None:
        """Store the new tokens' contents."""
        holders: dict[int, set[str]] = {}
        for seq in self.scheduler.running:
            for block in seq.block_table:
                holders.setdefault(block, set()).add(seq.request_id)
        written: set[int] = set()
        for seq, num_new in scheduled:
            start, stop = seq.num_computed_tokens, seq.num_computed_tokens + num_new
            assert 0 < num_new <= seq.num_missing_tokens, f"{num_new} new tokens"
            histories = chain(seq.token_ids)
            for position, slot in enumerate(
                slot_mapping(seq.block_table, self.block_size, start, stop), start
            ):
                block = slot // self.block_size
                others = self.holders.get(block, set()) & holders[block] - {seq.request_id}
                assert not others, f"{seq.request_id} writes to block {block} of {others}"
                assert slot not in written, f"two requests write to slot {slot}"
                written.add(slot)
                content = (seq.params.cache_salt, histories[position])
                self.slots[slot] = None if self.fault else content
        self.holders = holders

    def read(self, part: Scheduled) -> int | None:
        """Attend: look at every slot of the history, then sample."""
        seq, length = part.seq, part.seq.num_computed_tokens + part.num_new
        slots = slot_mapping(seq.block_table, self.block_size, 0, length)
        for position, history in enumerate(chain(seq.token_ids[:length])):
            found = self.slots.get(slots[position])
            wanted = (seq.params.cache_salt, history)
            assert found == wanted, f"{seq.request_id} reads {found} at {position}, not {wanted}"
        return next_token(history) if part.gives_token else None


def fake_core(
    scheduler_class: type[Scheduler],
    manager_class: type[BlockManager],
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    budget: int,
    max_model_len: int,
) -> tuple[EngineCore, ShadowRunner]:
    """An engine core whose model is a `ShadowRunner`."""
    manager = manager_class(num_blocks, block_size)
    scheduler = scheduler_class(manager, max_num_seqs, budget)
    runner = ShadowRunner(scheduler)
    return EngineCore(scheduler, runner, max_model_len, [EOS]), runner  # type: ignore[arg-type]


# --- a real model, with random weights --------------------------------------------------------

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_random_model(folder: Path, max_position: int = 2048) -> Path:
    """Write a small Qwen3 whose weights are large enough to make every token count.

    Its tokenizer has a token for each ASCII character, and the bytes of "é€": its texts are noise,
    with a character of several tokens, or a piece of one, here and there.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    known = "".join(map(chr, range(32, 127))) + "é€"
    letters = sorted({letter for text, _ in split.pre_tokenize_str(known) for letter in text})
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
        max_position_embeddings=max_position, initializer_range=0.3,
        eos_token_id=fast.eos_token_id, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": fast.eos_token_id}))
    return folder
