"""Text from tokens, a few at a time: as the tokenizer says to all of them, and never taken back."""

import itertools
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nanoteach.detokenizer import Detokenizer, text_of_token
from nanoteach.hub import resolve_model
from nanoteach.loader import load_tokenizer

KINDS = ("tiny", "byte_level", "byte_fallback", "own_decode")
TEXTS = (
    "A fox ran  over the snow. It   stopped.\n\n  Then it went on.",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈, 😀😀, é and e\u0301, ạ̈, café",
    "雪が降っていた。狐は走った。 한국어 العربية हिन्दी",
    " leading and trailing ",
    "\u200d\ufeff\u0301",
)


class Loud(PreTrainedTokenizerFast):
    """A tokenizer that decodes in a way of its own."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return str(super()._decode(*args, **kwargs)).upper()


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    """tiny's; a byte-level BPE that has merged parts of characters; Llama's kind; a loud one."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if kind == "tiny":
        return load_tokenizer(resolve_model("tiny"))
    special = ["<unk>", "<s>", "</s>"]
    if kind in ("byte_level", "own_decode"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(content=" ", left=1),
            ]
        )
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=special, show_progress=False, limit_alphabet=40
        )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    if kind == "byte_fallback":  # the bytes are plain tokens, not special ones
        spec = tokenizer.to_str()
        tokenizer = Tokenizer.from_str(without_special_bytes(spec))
    kind_of = Loud if kind == "own_decode" else PreTrainedTokenizerFast
    return kind_of(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def without_special_bytes(spec: str) -> str:
    """A tokenizer's file in which the tokens for bytes are in the vocabulary alone."""
    import json

    data = json.loads(spec)
    data["added_tokens"] = [t for t in data["added_tokens"] if not t["content"].startswith("<0x")]
    return json.dumps(data)


def whole(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """What the tokenizer itself says to all tokens at once."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def pieces(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], sizes: list[int]) -> list[str]:
    """The text after every few tokens; `sizes` says how many, again and again."""
    detokenizer, shown, start = Detokenizer(tokenizer), [""], 0
    for size in itertools.cycle(sizes):
        if start >= len(token_ids):
            break
        detokenizer.extend(token_ids[start : start + size])
        start += size
        shown.append(detokenizer.text)
    detokenizer.extend([], final=True)
    return [*shown, detokenizer.text]


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=40), sizes=SIZES)
@example(text=TEXTS[0], sizes=[1])
@example(text=TEXTS[1], sizes=[1])
@example(text=TEXTS[2], sizes=[1])
@example(text=TEXTS[3], sizes=[1])
@example(text=TEXTS[4], sizes=[2, 1])
@settings(max_examples=60, deadline=None)
def test_a_text_in_pieces_is_the_text(kind: str, text: str, sizes: list[int]) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    shown = pieces(tokenizer, token_ids, sizes)
    assert shown[-1] == whole(tokenizer, token_ids)
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before), "text was shown and taken back"


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), sizes=SIZES)
@settings(max_examples=150, deadline=None)
def test_tokens_that_are_no_text_come_out_as_the_tokenizer_has_them(
    kind: str, data: st.DataObject, sizes: list[int]
) -> None:
    """Half characters, wrong bytes, special tokens: a model may say anything."""
    tokenizer = tokenizer_of(kind)
    low = st.integers(0, min(len(tokenizer), 262) - 1)  # special tokens and single bytes
    token_ids = data.draw(st.lists(st.one_of(low, st.integers(0, len(tokenizer) - 1)), max_size=24))
    shown = pieces(tokenizer, token_ids, sizes)
    assert shown[-1] == whole(tokenizer, token_ids)
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before), "text was shown and taken back"


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    tokenizer = tokenizer_of("byte_level")
    token_ids = tokenizer.encode("one 😀 two")
    shown = pieces(tokenizer, token_ids, [1])
    assert [text for text in shown if "\ufffd" in text] == []
    assert len(set(shown)) > 5, "nothing was shown before the end"


def test_a_space_after_a_special_token_is_kept() -> None:
    """A window that held the special token alone would drop it."""
    tokenizer = tokenizer_of("byte_fallback")
    hello, there = (tokenizer.encode(word, add_special_tokens=False) for word in ("so", "it"))
    token_ids = [*hello, tokenizer.eos_token_id, *there]
    assert pieces(tokenizer, token_ids, [1])[-1] == whole(tokenizer, token_ids) == "so it"


def test_a_wrong_byte_in_a_run_of_bytes_takes_nothing_back() -> None:
    tokenizer = tokenizer_of("byte_fallback")
    run = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in (*"€".encode(), 0xFF)])
    shown = pieces(tokenizer, run, [1])
    assert shown == ["", "", "", "", "", "\ufffd" * 4]
    good = [*run[:3], *tokenizer.encode("so", add_special_tokens=False)]
    assert pieces(tokenizer, good, [1])[-1] == whole(tokenizer, good) == "€ so"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["words", "half characters", "special"])
def test_twice_the_tokens_take_no_more_than_twice_the_decoding(kind: str, what: str) -> None:
    """Counted in tokens decoded, so that no slow machine fails it."""
    tokenizer = tokenizer_of(kind)
    if what == "words":
        unit = tokenizer.encode("It stopped. ", add_special_tokens=False)
    elif what == "special":
        unit = [tokenizer.eos_token_id]
    else:
        byte = "<0xE2>" if kind == "byte_fallback" else "â"  # what byte-level BPE writes for 0xE2
        unit = [tokenizer.convert_tokens_to_ids(byte)]
        assert unit[0] is not None

    class Counting(Detokenizer):
        total = 0

        def decode(self, token_ids: list[int]) -> str:
            self.total += len(token_ids)
            return super().decode(token_ids)

    def cost(num_tokens: int) -> int:
        detokenizer = Counting(tokenizer)
        for i in range(num_tokens):
            detokenizer.extend([unit[i % len(unit)]])
        return detokenizer.total

    assert cost(4000) < 2.5 * cost(2000)
    assert cost(4000) < 4000 * 40


def test_a_long_text_is_quick() -> None:
    tokenizer = tokenizer_of("tiny")
    detokenizer = Detokenizer(tokenizer)
    tokens = tokenizer.encode("There was once a fox. " * 400)
    start = time.perf_counter()
    for token in tokens:
        detokenizer.extend([token])
    assert time.perf_counter() - start < len(tokens) * 2e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_of_single_tokens_keep_their_spaces(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode("A fox ran over the snow.", add_special_tokens=False)
    joined = "".join(text_of_token(tokenizer, token) for token in token_ids)
    assert joined.removeprefix(" ") == whole(tokenizer, token_ids)
    if kind != "byte_fallback":
        for token in range(len(tokenizer)):
            assert text_of_token(tokenizer, token) == tokenizer.decode([token])
