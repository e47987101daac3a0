"""The corpus, the training script and the model that came out of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TRAINING = ROOT / "training"
MODEL = ROOT / "nanoteach" / "models" / "tiny"

sys.path.insert(0, str(TRAINING))

import corpus  # noqa: E402
import train_tiny  # noqa: E402


@pytest.fixture(scope="module")
def pages() -> list[corpus.Document]:
    return corpus.volume(seed=5, number=0, characters=400_000)


# ---------------------------------------------------------------------------------------
# The corpus
# ---------------------------------------------------------------------------------------


def test_the_same_seed_writes_the_same_text() -> None:
    assert corpus.volume(1, 2, 30_000) == corpus.volume(1, 2, 30_000)
    assert corpus.volume(1, 2, 30_000) != corpus.volume(1, 3, 30_000)
    assert corpus.volume(1, 2, 30_000) != corpus.volume(2, 2, 30_000)


def test_every_kind_is_there_and_long_stories_are_long(pages: list[corpus.Document]) -> None:
    assert {page.kind for page in pages} == set(corpus.KINDS)
    for page in pages:
        assert "{" not in page.text and "  " not in page.text
        if page.kind == "long story":
            assert len(page.text.split()) > 700


def test_sums_are_right_and_some_are_held_out(pages: list[corpus.Document]) -> None:
    found = 0
    for page in pages:
        for x, y, total in re.findall(
            r"(\d+) (?:\+|plus|and) (\d+) (?:=|is|make) (\d+)", page.text
        ):
            assert int(x) + int(y) == int(total)
            assert not corpus.held_out_sum(int(x), int(y))
            found += 1
    assert found > 500


@pytest.mark.parametrize("plot", [plot for plot, _ in corpus.PLOTS])
def test_a_story_stays_consistent(plot: corpus.Plot) -> None:
    for number in range(200):
        tale = corpus.story(corpus.Voice(f"{plot.__name__}/{number}"), "Mira", plot=plot)
        text = tale.text
        hero, helper = tale.hero.name, tale.words["helper"]
        # Everyone in the story has a name of their own.
        assert len(set(tale.taken)) == len(tale.taken)
        assert {hero, helper} <= set(tale.taken)
        # No name from outside the story slips in.
        assert {name for name in corpus.NAMES if re.search(rf"\b{name}\b", text)} <= set(tale.taken)
        # The hero is the same she or he on the first page as in the words of every template.
        assert tale.words["they"] == ("she" if hero in corpus.GIRLS else "he")
        if tale.hero.kind in ("girl", "boy"):
            assert (tale.hero.kind == "girl") == tale.hero.she
        # What is asked about the story stands in the story.
        for fact in tale.facts:
            little = {"a", "an", "at", "her", "his", "in", "on", "the", "to", "helped"}
            words = set(re.findall(r"\w+", fact.short.lower())) - little
            assert words <= set(re.findall(r"\w+", text.lower()))


def test_what_was_lost_is_what_is_found() -> None:
    for number in range(200):
        tale = corpus.story(corpus.Voice(f"lost/{number}"), "Otis", plot=corpus.lost)
        thing, found = tale.words["thing"], tale.words["found"]
        others = {t.name for t in corpus.THINGS} - {thing}
        assert thing in tale.text and found in tale.text
        assert not any(other in tale.text for other in others)
        assert len({tale.words["first"], tale.words["second"], found}) == 3
        assert found in tale.place.spots


def test_a_story_is_about_what_was_asked_for() -> None:
    for plot, wants in corpus.PLOTS:
        for want in wants:
            tale = corpus.story(corpus.Voice(want), "Mira", kind="fox", plot=plot, want=want)
            assert want in tale.text and " fox" in tale.text


def test_one_option_is_clearly_favoured() -> None:
    voice = corpus.Voice("weights")
    for n in (2, 5, 20):
        said = [voice.pick(range(n), "cue") for _ in range(4000)]
        counts = sorted((said.count(option) for option in range(n)), reverse=True)
        assert counts[0] > 1.5 * counts[1]
    favourites = {
        max(range(8), key=[voice.pick(range(8), cue) for _ in range(300)].count)
        for cue in corpus.NAMES
    }
    assert len(favourites) > 3


# ---------------------------------------------------------------------------------------
# The training script
# ---------------------------------------------------------------------------------------


def test_a_short_training_writes_a_folder_that_opens(tmp_path: Path) -> None:
    command = [sys.executable, str(TRAINING / "train_tiny.py"), "--out", str(tmp_path / "model")]
    small = "--volumes 2 --characters 9000 --steps 12 --batch 4 --length 96 --questions 1"
    result = subprocess.run(
        [*command, *small.split(), "--workers", "1", "--device", "cpu"],
        capture_output=True, text=True, check=True, env=quiet_environment(),
    )  # fmt: skip
    losses = re.search(r"loss (\d+\.\d+) to (\d+\.\d+)", result.stdout)
    assert losses and float(losses[2]) < float(losses[1]) - 0.3
    tokenizer, model = open_model(tmp_path / "model")
    assert model.config.model_type == "qwen3"
    assert "Mean training loss" in (tmp_path / "model" / "README.md").read_text("utf-8")
    assert isinstance(answer(tokenizer, model, "Hello!", new_tokens=3), str)


def test_help_tells_the_options() -> None:
    told = train_tiny.make_parser().format_help()
    for option in ("--out", "--steps", "--volumes", "--length", "--compile"):
        assert option in told


def quiet_environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


# ---------------------------------------------------------------------------------------
# The model in the repository
# ---------------------------------------------------------------------------------------


def open_model(folder: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return tokenizer, model


def answer(tokenizer: Any, model: Any, question: str, new_tokens: int = 24) -> str:
    import torch

    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens
    )
    said: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return said


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return open_model(MODEL)


def test_the_folder_is_small_and_knows_no_machine() -> None:
    files = [path for path in MODEL.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12_000_000
    for path in files:
        if path.suffix == ".json":
            assert "_name_or_path" not in path.read_text("utf-8")
    config = json.loads((MODEL / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"


def test_it_has_the_size_the_card_tells(tiny: tuple[Any, Any]) -> None:
    size = sum(p.numel() for p in tiny[1].parameters())
    assert f"{size:,}" in (MODEL / "README.md").read_text("utf-8")


def test_the_chat_template_writes_what_the_corpus_writes(tiny: tuple[Any, Any]) -> None:
    messages = [
        corpus.Message("system", "You are a helpful assistant."),
        corpus.Message("user", "Hello!"),
        corpus.Message("assistant", "Hello! How can I help you today?"),
    ]
    dicts = [message._asdict() for message in messages]
    written = tiny[0].apply_chat_template(dicts, tokenize=False)
    assert written == corpus.render_chat(messages)
    begun = tiny[0].apply_chat_template(dicts[:2], tokenize=False, add_generation_prompt=True)
    assert begun == corpus.render_chat(messages[:2]) + "<|im_start|>assistant\n"


def test_it_stops_at_both_ends(tiny: tuple[Any, Any]) -> None:
    tokenizer, model = tiny
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ends
    assert not model.generation_config.do_sample


@pytest.mark.parametrize(
    ("question", "right"),
    [
        ("What is 12 plus 5?", "12 plus 5 is 17."),
        ("What is 27 plus 48?", "27 plus 48 is 75."),
        ("What is seven plus eight?", "Seven plus eight is fifteen."),
        ("What colour is grass?", "Grass is green."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
        ("What day comes after Sunday?", "Monday comes after Sunday."),
        ("Hello, my name is Wren.", "Hello, Wren! It is nice to meet you."),
    ],
)
def test_it_answers(tiny: tuple[Any, Any], question: str, right: str) -> None:
    assert answer(*tiny, question) == right


def test_it_tells_a_story_about_what_was_asked(tiny: tuple[Any, Any]) -> None:
    said = answer(*tiny, "Tell me a story about a robot and a silver bell.", new_tokens=100)
    assert "robot" in said and "silver bell" in said


@pytest.mark.parametrize(
    "text",
    [
        "Once there was a fox named Ivy.\n\nShe was brave.",
        "café, naïve, Straße",
        "\U0001f98a likes \U0001f36f and \U0001f468\u200d\U0001f469\u200d\U0001f467",
        "你好，世界。こんにちは 안녕하세요",
        "  two  spaces\tand a tab\r\n",
        "".join(map(chr, range(256))),
        "12 + 345 = 357",
    ],
)
def test_the_tokenizer_loses_nothing(tiny: tuple[Any, Any], text: str) -> None:
    tokenizer = tiny[0]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_byte_has_a_token(tiny: tuple[Any, Any]) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = tiny[0].get_vocab()
    assert len(vocabulary) == 2048
    assert set(ByteLevel.alphabet()) <= set(vocabulary)
