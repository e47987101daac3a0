"""The server on `tiny`, with OpenAI's own client: every feature, streamed and not; the errors.

Faults are in test_server_faults.py.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import workload
from openai.types.chat import ChatCompletion
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from test_detokenizer import KINDS, tokenizer_of, whole

from nanoteach.core_process import engine_around_process
from nanoteach.engine import Engine
from nanoteach.protocol import ChatRequest, CompletionAnswer, CompletionRequest, token_fields
from nanoteach.server import running
from nanoteach.types import CompletionOutput, Logprob, RequestOutput, SamplingParams

PROMPT = "There was once a fox"
CHAT: Any = [{"role": "user", "content": "What is 27 plus 48?"}]
PARTS = [{"type": "text", "text": ""}]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine("tiny", device="cpu", num_gpu_blocks_override=2000)


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with running(engine) as address:
        yield address
    assert engine.check() == [] and engine.requests == {}
    assert engine.stats().num_used_blocks == 0


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def said(engine_text: str, **options: Any) -> str:
    """What another engine of the same model says, greedily."""
    engine = Engine("tiny", device="cpu", num_gpu_blocks_override=500)
    params = SamplingParams(**{"max_tokens": 16} | options)
    return engine.generate(engine_text, params, use_tqdm=False)[0].outputs[0].text


# --- features ----------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "nanoteach"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert choice.text == said(PROMPT) and choice.finish_reason == "length"
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 16)
    assert answer.usage.total_tokens == 21


def test_null_is_the_default(url: str) -> None:
    fields = ("max_tokens", "top_p", "seed", "stop", "stream", "logprobs", "ignore_eos")
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, **dict.fromkeys(fields)}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"] == said(PROMPT)
    assert answer["usage"]["completion_tokens"] == 16


def test_a_completion_in_chunks(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == said(PROMPT)
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 3
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_every_form(client: openai.OpenAI, engine: Engine, stream: bool) -> None:
    texts = [PROMPT, "What is 3 plus 4?", "b"]
    ids = [engine.tokenizer.encode(text) for text in texts]
    forms: list[tuple[Any, list[str]]] = [
        (texts[0], texts[:1]), (ids[0], texts[:1]), (texts, texts), (ids, texts)
    ]  # fmt: skip
    for form, expected in forms:
        answer: Any = client.completions.create(
            model="tiny", prompt=form, temperature=0, max_tokens=6, stream=stream
        )
        got = [""] * len(expected)
        for part in answer if stream else [answer]:
            for choice in part.choices:
                got[choice.index] += choice.text
        assert got == [said(text, max_tokens=6) for text in expected]


def test_a_chat(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0)
    message = answer.choices[0].message
    assert (message.role, answer.choices[0].finish_reason) == ("assistant", "stop")
    assert "75" in str(message.content)
    # The answer goes back as it came, and in every form that a message may have.
    more: Any = [*CHAT, message, {"role": "user", "content": [{"type": "text", "text": "And"}]}]
    more += [{"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Hm"}]
    again = client.chat.completions.create(
        model="tiny", messages=more, temperature=0, max_completion_tokens=3
    )
    assert again.usage and again.usage.completion_tokens <= 3
    details = again.usage.prompt_tokens_details
    assert details and details.cached_tokens and details.cached_tokens >= 16
    plain = [{"role": "user", "content": "What is 27 plus 48?"}]
    plain += [{"role": "assistant", "content": str(message.content)}]
    plain += [{"role": "user", "content": "And"}, {"role": "system", "content": "Be brief."}]
    plain += [{"role": "system", "content": "Hm"}]
    assert again.usage.prompt_tokens == len(engine.apply_chat_template(plain))


def test_a_speakers_name_reaches_the_chat_template() -> None:
    engine = Engine("tiny", device="cpu", num_gpu_blocks_override=100)
    engine.tokenizer.chat_template = "{% for m in messages %}{{ m.name or 'Nobody' }}{% endfor %}"
    with running(engine) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for extra, name in (({"name": "Bob"}, "Bob"), ({"name": None}, "Nobody"), ({}, "Nobody")):
            messages: Any = [{**CHAT[0], **extra}]
            answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
            tokens = engine.tokenizer.encode(name, add_special_tokens=False)
            assert answer.usage and answer.usage.prompt_tokens == len(tokens)


def test_a_chat_in_chunks(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=CHAT, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    whole = client.chat.completions.create(model="tiny", messages=CHAT, temperature=0)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-2].choices[0].finish_reason == "stop"
    usage = chunks[-1].usage
    assert usage and whole.usage and usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details is not None  # what was cached depends on the tests before
    again = whole.usage.prompt_tokens_details
    assert again and again.cached_tokens


@pytest.mark.parametrize(
    ("path", "prompt"), [("completions", {"prompt": "b"}), ("chat/completions", {"messages": CHAT})]
)
def test_usage_is_null_until_the_last_chunk(url: str, path: str, prompt: dict[str, Any]) -> None:
    for asked in (False, True):
        body = {"model": "tiny", "max_tokens": 5, "ignore_eos": True, "stream": True, **prompt}
        options = {"stream_options": {"include_usage": True}} if asked else {}
        answer = httpx.post(f"{url}/v1/{path}", json=body | options, timeout=60)
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
        if asked:
            last = events.pop()
            assert last["usage"]["completion_tokens"] == 5 and last["choices"] == []
        told = {event.get("usage", "left out") for event in events}
        assert told == {None if asked else "left out"}


def test_stop_strings_that_straddle_tokens(client: openai.OpenAI, engine: Engine) -> None:
    full = said(PROMPT, max_tokens=40)
    tokens = [engine.tokenizer.decode([t]) for t in engine.tokenizer.encode(full)]
    start = len("".join(tokens[:8])) - 2  # ends of one token, beginnings of the next
    for stop in (full[start : start + 4], [full[start : start + 7], "no such text"]):
        first = min(full.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in full)
        arguments: Any = {
            "model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 40, "stop": stop,
        }  # fmt: skip
        answer = client.completions.create(**arguments)
        assert answer.choices[0].text == full[:first]
        assert answer.choices[0].finish_reason == "stop"
        pieces = [c.choices[0] for c in client.completions.create(**arguments, stream=True)]
        assert "".join(piece.text for piece in pieces) == full[:first]
        assert pieces[-1].finish_reason == "stop"


def test_vllms_own_fields(client: openai.OpenAI, engine: Engine) -> None:
    def ask(**extra: Any) -> Any:
        return client.completions.create(
            model="tiny", prompt=PROMPT * 8, max_tokens=12, extra_body=extra, temperature=0
        )

    full = ask().choices[0].text
    token = engine.tokenizer.encode(full)[4]
    stopped = ask(stop_token_ids=[token])
    assert stopped.choices[0].finish_reason == "stop" and full.startswith(stopped.choices[0].text)
    assert len(stopped.choices[0].text) < len(full)
    cached = [
        ask(cache_salt=salt).usage.prompt_tokens_details.cached_tokens
        for salt in ("a", "b", "a", "b")
    ]
    assert cached[:2] == [0, 0] and min(cached[2:]) > 0
    chat = client.chat.completions.create(
        model="tiny", messages=CHAT, temperature=0, max_tokens=40, extra_body={"ignore_eos": True}
    )
    assert chat.usage and chat.usage.completion_tokens == 40
    # Drawn at a great heat, but from the best token alone.
    hot = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=5, extra_body={"top_k": 1}
    )
    assert hot.choices[0].text == said(PROMPT)
    every = [
        client.completions.create(model="tiny", prompt=PROMPT, seed=3, extra_body={"top_k": top_k})
        for top_k in (0, 2**31, 10**40)
    ]
    assert len({answer.choices[0].text for answer in every}) == 1


def test_a_seed_draws_the_same_and_one_is_the_temperature(client: openai.OpenAI) -> None:
    def ask(**options: Any) -> str:
        answer = client.completions.create(
            model="tiny", prompt="b", max_tokens=24, extra_body={"ignore_eos": True}, **options
        )
        return answer.choices[0].text

    assert ask(seed=5) == ask(seed=5, temperature=1, top_p=1) != ask(seed=6)
    chunks = client.completions.create(
        model="tiny", prompt="b", max_tokens=24, seed=5, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks) == ask(seed=5)
    assert len({ask() for _ in range(4)}) > 1


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    arguments: Any = {
        "model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 6, "logprobs": 2,
    }  # fmt: skip
    answer = client.completions.create(**arguments).choices[0]
    told = answer.logprobs
    assert told and told.tokens and told.top_logprobs and told.token_logprobs
    assert "".join(told.tokens) == answer.text
    assert told.text_offset == [len("".join(told.tokens[:i])) for i in range(6)]
    for token, logprob, top in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert len(top) == 2 and top[token] == logprob == max(top.values()) <= 0
    chunks = [c.choices[0].logprobs for c in client.completions.create(**arguments, stream=True)]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [x for chunk in chunks if chunk for x in getattr(chunk, field)]
        assert joined == getattr(told, field)
    plain: Any = {**arguments, "logprobs": 0}
    none = client.completions.create(**plain).choices[0].logprobs
    assert none and none.token_logprobs == pytest.approx(told.token_logprobs, abs=1e-4)


def test_a_chunk_looks_at_its_own_tokens_alone() -> None:
    """All of them for each chunk made a stream of 4,000 tokens 5 s of work for the event loop."""
    answer = CompletionAnswer("tiny", ["a", "b"])

    def offsets(request_id: str, *texts: str | None) -> list[int]:
        logprobs: Any = [t and {i: Logprob(-1.0, 1, t)} for i, t in enumerate(texts)]
        completion = CompletionOutput("", list(range(len(texts))), logprobs=logprobs)
        output = RequestOutput(request_id, None, [1], [completion], False)
        told: list[int] = answer.chunk(output)["choices"][0]["logprobs"]["text_offset"]
        return told

    assert offsets("a", "once", " a") == [0, 4]
    assert offsets("b", "and") == [0]
    assert offsets("a", None, None, " fox", " ran") == [6, 10]
    assert offsets("a", None, None, None, None, ".") == [14]
    assert offsets("b", None, " so") == [3]


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    def ask(**options: Any) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=CHAT, temperature=0, max_tokens=6, logprobs=True, **options
        )

    answer: ChatCompletion = ask(top_logprobs=3)
    told = answer.choices[0].logprobs
    assert told and told.content and len(told.content) == 6
    for each in told.content:
        assert len(each.top_logprobs) == 3 and bytes(each.bytes or []).decode() == each.token
        assert each.top_logprobs[0].token == each.token
    chunks = [c.choices[0].logprobs for c in ask(top_logprobs=3, stream=True)]
    assert [x.token for c in chunks if c for x in c.content] == [x.token for x in told.content]
    assert token_fields(Logprob(-1.0, 1, "\ufffd"))["bytes"] is None  # half a character
    (first, *_) = ask().choices[0].logprobs.content
    assert first.top_logprobs == []
    assert first.logprob == pytest.approx(told.content[0].logprob, abs=1e-4)  # it may be cached now


def test_the_async_client_and_raw_events(url: str) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = await client.completions.create(
                model="tiny", prompt=PROMPT, temperature=0, stream=True
            )
            assert "".join([chunk.choices[0].text async for chunk in stream]) == said(PROMPT)

    asyncio.run(main())
    body = {"model": "tiny", "prompt": PROMPT, "stream": True, "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(line.removeprefix("data: ")) for line in lines[:-2])


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"n": 2}, "n is not supported beyond 1: leave it out"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [5000]}, "no token id"),
        ({"prompt": ["b"] * 2049}, "prompt: this takes .* or up to 2,048 texts or such lists"),
        ({"prompt": [[1]] * 2049}, "prompt: this takes .* or up to 2,048 texts or such lists"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_model_len"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop: this takes a string, or up to 16"),
        ({"stop": "x" * 1001}, "stop: this takes a string, or up to 16"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
        ({"stream_options": {"include_usage": True}}, "stream"),
    ],
)
def test_a_bad_request_is_told_why(
    client: openai.OpenAI, changes: dict[str, Any], word: str
) -> None:
    arguments: Any = {"model": "tiny", "prompt": "b", "max_tokens": 1, **changes}
    with pytest.raises(openai.BadRequestError, match=word) as caught:
        client.completions.create(**arguments)
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts such as"),
        ({"messages": CHAT * 2049}, "messages: this takes up to 2,048: send fewer"),
        ({"messages": [{"role": "user", "content": PARTS * 2049}]}, "a list of up to 2,048 parts"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "tool_calls"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogates"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_a_bad_chat_is_told_why(url: str, changes: dict[str, Any], word: str) -> None:
    body = json.dumps({"model": "tiny", "messages": CHAT, "max_tokens": 1, **changes})
    answer = httpx.post(
        f"{url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"tools": [{}]}, "tools", "unsupported_parameter"),
        ({"no_such": 1}, "no_such", "unknown_parameter"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"prompt": ["b", 1]}, "prompt", None),
        ({"stop": 5}, "stop", None),
        ({"seed": 1.5}, "seed", None),
    ],
)
def test_an_error_names_its_field(
    url: str, changes: dict[str, Any], param: str, code: str | None
) -> None:
    body = {"model": "tiny", "prompt": "b", "max_tokens": 1, **changes}
    error = httpx.post(f"{url}/v1/completions", json=body).json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_what_is_too_long_has_openais_code(url: str, client: openai.OpenAI) -> None:
    for prompt in ("b " * 9000, "b" * 100_000, [1] * 4096, [-1] * 4096):
        with pytest.raises(openai.BadRequestError, match="max_model_len") as caught:
            client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=CHAT * 1000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


MANY = 10_000


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (CompletionRequest, {"prompt": [1.5] * MANY}),
        (CompletionRequest, {"prompt": [[None] * MANY]}),
        (CompletionRequest, {"stop": [1] * MANY}),
        (CompletionRequest, {"stop_token_ids": [None] * MANY}),
        (CompletionRequest, {f"no_such_{i}": 1 for i in range(MANY)}),
        (CompletionRequest, {"stream_options": {f"no_such_{i}": 1 for i in range(MANY)}}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    ],
)
def test_of_many_mistakes_one_is_told(
    kind: type[CompletionRequest] | type[ChatRequest], changes: dict[str, Any]
) -> None:
    """To list all of them, a million in 4 MB, took minutes in which nobody was served."""
    right = {"prompt": "b"} if kind is CompletionRequest else {"messages": CHAT}
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"model": "tiny", **right, **changes})
    assert caught.value.error_count() <= 2  # one more where something is missing, too


def test_a_body_that_is_no_json_object_is_told_so(url: str) -> None:
    for content, kind in ((b"", "application/json"), (b'{"model": "tiny"}', "text/plain")):
        answer = httpx.post(
            f"{url}/v1/completions", content=content, headers={"content-type": kind}
        )
        assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_neutral_and_ignored_fields_are_taken(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=1, n=1, presence_penalty=0, logit_bias={},
        tool_choice="none", response_format={"type": "text"}, user="me", metadata={"a": "b"},
        store=False, stop=None,
    )  # fmt: skip
    assert answer.usage and answer.usage.completion_tokens == 1


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b"null", b"[]", b'"x"',
        b'{"model": "tiny", "prompt": "\\ud800"}', b'{"\\ud800": 1}',
        b'{"model": "tiny", "prompt": "b", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "b", "seed": 1e400}',
        b'{"model": "tiny", "prompt": [1, "b"]}', b'{"model": "tiny", "prompt": [[]]}',
        b'{"model": "tiny", "prompt": [true]}', b'{"model": "tiny", "prompt": {"a": [[[]]]}}',
    ],
    ids=range(16),
)  # fmt: skip
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_what_is_no_request_is_a_400(url: str, path: str, body: bytes) -> None:
    answer = httpx.post(
        f"{url}/v1/{path}", content=body, headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_other_errors_have_openais_shape(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-5", prompt="b")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/completions", 405)):
        answer = httpx.request(method, url + path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (
            status, "invalid_request_error"
        )  # fmt: skip
    with pytest.raises(openai.NotFoundError, match="no /models here: the API is at /v1"):
        openai.OpenAI(base_url=url, api_key="none", max_retries=0).models.list()
    huge = b'{"model": "tiny", "prompt": "' + b"b" * 2**23 + b'"}'
    answer = httpx.post(
        f"{url}/v1/completions", content=huge, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413 and "error" in answer.json()


def test_an_api_key_is_asked_for() -> None:
    engine = Engine("tiny", device="cpu", num_gpu_blocks_override=100)
    with running(engine, api_key="Schlüssel") as url:
        shown = {"Authorization": "Bearer Schlüssel".encode()}
        assert httpx.get(f"{url}/v1/models", headers=shown).status_code == 200
    engine = Engine("tiny", device="cpu", num_gpu_blocks_override=100)
    with running(engine, api_key="secret") as url:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
        assert httpx.get(f"{url}/v1/models").status_code == 401
        # Nobody's body is read who does not show it, whatever is in there.
        kind = {"content-type": "application/json"}
        for body in (b"{", b"{}", b"b" * 2**23):
            for path in ("completions", "chat/completions"):
                answer = httpx.post(f"{url}/v1/{path}", content=body, headers=kind)
                assert answer.status_code == 401, answer.text
                assert answer.headers["www-authenticate"] == "Bearer"
        schema = httpx.get(f"{url}/openapi.json").json()
        assert schema["paths"]["/v1/completions"]["post"]["security"] == [{"HTTPBearer": []}]
        assert openai.OpenAI(base_url=f"{url}/v1", api_key="secret").models.list().data
        assert httpx.get(f"{url}/health").status_code == 200


# --- health, metrics ---------------------------------------------------------------------------


def test_metrics_count_what_was_done(url: str, client: openai.OpenAI) -> None:
    def samples() -> dict[str, float]:
        text = httpx.get(f"{url}/metrics").text
        return {
            sample.name.removeprefix("nanoteach:")
            + "".join(f",{v}" for k, v in sample.labels.items() if k != "le"): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }

    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.head(f"{url}/health").status_code == 200
    client.completions.create(model="tiny", prompt=PROMPT * 9, max_tokens=2)  # now it is cached
    before = samples()
    client.completions.create(model="tiny", prompt=PROMPT * 9, max_tokens=7, temperature=0)
    after = samples()
    moved = {key: after[key] - before.get(key, 0) for key in after}
    assert moved["generation_tokens_total"] == 7
    assert moved["prompt_tokens_total"] == moved["prefix_cache_queries_total"] > 30
    assert 16 <= moved["prefix_cache_hits_total"] < moved["prompt_tokens_total"]
    assert moved["request_success_total,length"] == 1
    assert moved["time_to_first_token_seconds_count"] == 1
    assert moved["inter_token_latency_seconds_count"] == 6
    assert moved["e2e_request_latency_seconds_count"] == 1
    assert (
        moved["e2e_request_latency_seconds_sum"]
        >= moved["time_to_first_token_seconds_sum"]
        + moved["inter_token_latency_seconds_sum"]
        - 1e-6
    )
    idle = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [after[name] for name in idle] == [0, 0, 0]
    assert "num_preemptions_total" in after


# --- the description, and anything that follows it ---------------------------------------------


def test_schemathesis_finds_no_5xx(url: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {
        "/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics"
    }  # fmt: skip
    statuses: set[int] = set()
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        def try_it(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict) and case.body.get("max_tokens") is None:
                case.body["max_tokens"] = 4  # a chat to the model's end takes long
            answer = case.call(timeout=60)
            statuses.add(answer.status_code)
            assert answer.status_code < 500, answer.text

        try_it()
    assert 200 in statuses and 404 in statuses


# --- text in pieces ----------------------------------------------------------------------------


class Echo:
    """In the place of the model runner: a request's next token is the next one of its prompt."""

    def __init__(self, runner: Any) -> None:
        self.model = runner.model

    def execute(self, scheduled: Any) -> list[tuple[int, None] | None]:
        return [
            seq.token_ids[seq.num_output_tokens] if num_new == seq.num_missing_tokens else None
            for seq, num_new in scheduled
        ]


@pytest.fixture(scope="module", params=KINDS)
def echo(request: pytest.FixtureRequest) -> Iterator[tuple[Any, openai.OpenAI]]:
    """A server that says what it is told, with one of three kinds of tokenizer."""
    engine = Engine("tiny", device="cpu", num_gpu_blocks_override=200)
    engine.tokenizer = tokenizer_of(request.param)
    engine.core.runner = Echo(engine.core.runner)  # type: ignore[assignment]
    with running(engine) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        yield engine.tokenizer, client


@given(data=st.data())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_chunks_joined_are_the_text(echo: tuple[Any, openai.OpenAI], data: st.DataObject) -> None:
    """Emoji, combining marks, CJK, right-to-left, lone bytes; with and without a stop string."""
    tokenizer, client = echo
    parts = st.sampled_from(
        [
            "👩‍👩‍👧‍👦",
            "🏳️‍🌈",
            "😀",
            "e\u0301",
            "ạ̈",
            "雪が",
            "한국",
            "مرحبا",
            " a",
            "  ",
            "\n",
            "\u200d",
            "€",
        ]
    )
    text = "".join(data.draw(st.lists(parts | st.text(max_size=3), min_size=1, max_size=8)))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    tokens += data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=6))
    told = whole(tokenizer, tokens)
    stop = data.draw(
        st.none() | st.sampled_from([told[i : i + 3] for i in range(len(told))] or [None])
    )
    arguments: Any = {
        "model": "tiny", "prompt": tokens, "max_tokens": len(tokens), "stop": stop,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    at_once = client.completions.create(**arguments).choices[0].text
    chunks = [c.choices[0].text for c in client.completions.create(**arguments, stream=True)]
    assert "".join(chunks) == at_once
    if stop is None:
        assert at_once == told
    else:
        assert at_once == told[: told.index(stop)]


# --- the same as transformers ------------------------------------------------------------------


@pytest.mark.parametrize("core", ["here", "in a process of its own"])
def test_greedy_over_http_is_transformers_for_64_at_once(core: str) -> None:
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 512}
    with ExitStack() as stack:
        if core == "here":
            engine = Engine("tiny", **options)
        else:
            engine = stack.enter_context(engine_around_process("tiny", **options))
        check_greedy(engine)


def check_greedy(engine: Engine) -> None:
    work, decode = workload("tiny"), engine.tokenizer.decode

    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        params = work.params[i]
        stream = await client.completions.create(
            model="tiny", prompt=work.prompts[i], temperature=0, max_tokens=params.max_tokens,
            stream=True, timeout=300, extra_body={
                "ignore_eos": params.ignore_eos, "stop_token_ids": list(params.stop_token_ids),
            },
        )  # fmt: skip
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, i) for i in range(len(work.prompts))))

    with running(engine) as url:
        texts = asyncio.run(main(url))
    assert len(texts) == 64
    for text, reference, params in zip(texts, work.references, work.params, strict=True):
        tokens = list(reference.tokens)
        if len(tokens) < (params.max_tokens or 0) or (
            tokens[-1] in params.stop_token_ids
            or (tokens[-1] in work.eos_token_ids and not params.ignore_eos)
        ):
            tokens = tokens[:-1]  # what ended it is not part of the text
        assert text == decode(tokens, skip_special_tokens=True)
    assert engine.check() == []
