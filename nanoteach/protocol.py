"""Stage 10. OpenAI's words: what a request may say, and how an answer is written.

What a client sends and this server can't do is refused where it would change the answer. Defaults
are OpenAI's: temperature 1, and 16 tokens for a completion. (The engine's own default is greedy.)
Beyond OpenAI's fields there are vLLM's top_k, stop_token_ids, ignore_eos, cache_salt and
return_token_ids.

Knows: JSON. Does not know: HTTP, engines.
"""

import time
import uuid
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from typing import Annotated, Any, Literal, overload

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from nanoteach.detokenizer import UNFINISHED
from nanoteach.types import CompletionOutput, Logprob, RequestOutput, SamplingParams

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields of OpenAI's and vLLM's that are not supported, and the values that ask for nothing."""

IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
}  # fmt: skip
"""Fields that never change an answer."""

LOWEST = -9999.0  # JSON has no word for minus infinity
SHORT_ANSWER = 16  # a completion's tokens, unless more are asked for
SHORT = 1000  # characters of a stop string, at most
# Prompts, messages or parts of one, at most. 4 MB may hold a million, and to make an object of each
# takes seconds, in which the event loop serves nobody.
MANY = 2048


def refusal(kind: str, name: str, what: str) -> PydanticCustomError:
    """An error that tells of a field of this name."""
    told = {"param": printable(name), "what": what}
    return PydanticCustomError(kind, "{param} is {what}: leave it out", told)


class Strict(BaseModel):
    """No field that is not known, and no text where a number is due."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown(cls, data: Any) -> Any:
        """Raise PydanticCustomError on the first field that is not known."""
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                raise refusal("unknown_parameter", name, "no field that is known here")
        return data


class StreamOptions(Strict):
    """include_usage: a last chunk counts tokens."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


def takes(forms: str) -> WrapValidator:
    """One error in our words, where pydantic would say of every form why it is not that one."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"this takes {forms}") from None

    return WrapValidator(check)


# fail_fast and `refuse_unknown`: a body of 4 MB may hold a million mistakes, and pydantic's list of
# them takes minutes and gigabytes.
Texts = Annotated[list[str], Field(max_length=MANY, fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
StopString = Annotated[str, Field(max_length=SHORT)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=16, fail_fast=True)] | None,
    takes(f"a string, or up to 16 of them, of up to {SHORT:,} characters each"),
]


class GenerationRequest(Strict):
    """What both kinds of request may say."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Stop = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported(cls, data: Any) -> Any:
        """Take out what is ignored or asks for nothing. Raises PydanticCustomError on the rest."""
        if not isinstance(data, dict):
            return data
        for name, neutral in NEUTRAL.items():
            value = data.get(name)
            if value is not None and value not in neutral:
                allowed = " or ".join(map(repr, neutral))
                beyond = f" beyond {allowed}" if neutral else ""
                raise refusal("unsupported_parameter", name, f"not supported{beyond}")
        return {k: v for k, v in data.items() if k not in IGNORED and k not in NEUTRAL}

    @model_validator(mode="after")
    def options_of_a_stream(self) -> "GenerationRequest":
        """Raise ValueError where options of a stream come without one."""
        if self.stream_options and not self.stream:
            raise ValueError("stream_options is for streams: set stream to true, or leave it out")
        return self

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """In the engine's words. Raises ValueError."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=self.seed,
            logprobs=logprobs,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            cache_salt=self.cache_salt,
        )


class CompletionRequest(GenerationRequest):
    """A text to go on with, or several; token ids will do as well."""

    prompt: Annotated[
        str | Texts | TokenIds | Annotated[list[TokenIds], Field(max_length=MANY, fail_fast=True)],
        takes(f"a text, a list of token ids, or up to {MANY:,} texts or such lists in a list"),
    ]
    max_tokens: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """A list, whatever came. Raises ValueError where it is empty."""
        prompt: Any = self.prompt
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if one else prompt

    @property
    def params(self) -> SamplingParams:
        """In the engine's words. Raises ValueError."""
        return self.sampling_params(
            SHORT_ANSWER if self.max_tokens is None else self.max_tokens, self.logprobs
        )


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn. What else an answer of this API has, such as `refusal`, is taken if it is null."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=MANY, fail_fast=True)] | None,
        takes(
            f"a text, or a list of up to {MANY:,} parts such as {{'type': 'text', 'text': 'Hi'}} "
            "and no others"
        ),
    ] = None
    name: str | None = None

    @model_validator(mode="after")
    def only_text(self) -> "ChatMessage":
        """Raise ValueError on what is no text, such as the call of a tool, or on nothing at all."""
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing: give the message's text")
        for name, value in (self.model_extra or {}).items():
            if value:
                raise ValueError(f"a message's {name} is not supported: it is text alone")
        return self

    @property
    def plain(self) -> dict[str, str]:
        """As chat templates know it. What is done with a name is up to the template."""
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in parts)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name else {})


class ChatRequest(GenerationRequest):
    """A conversation to go on with."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MANY, fail_fast=True)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def params(self) -> SamplingParams:
        """In the engine's words. Raises ValueError."""
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        newer = self.max_completion_tokens
        return self.sampling_params(
            self.max_tokens if newer is None else newer,
            (self.top_logprobs or 0) if self.logprobs else None,
        )


# --- answers -----------------------------------------------------------------------------------


class Answer:
    """An answer as it is written, whole or chunk by chunk. What differs is in the subclasses."""

    id_prefix: str
    object: str
    chunk_object: str

    def __init__(
        self, model: str, request_ids: SequenceOf[str], return_token_ids: bool = False
    ) -> None:
        self.return_token_ids = return_token_ids
        self.index = {request_id: i for i, request_id in enumerate(request_ids)}
        self.outputs: dict[str, RequestOutput] = {}
        self.head = {
            "id": self.id_prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model
        }  # fmt: skip

    def message(self, text: str) -> dict[str, Any]:
        """What a choice holds in an answer that comes at once."""
        raise NotImplementedError

    def delta(self, text: str) -> dict[str, Any]:
        """What it holds in a chunk."""
        raise NotImplementedError

    def logprobs(
        self, index: int, completion: CompletionOutput, start: int
    ) -> dict[str, Any] | None:
        """Log probabilities of this choice's tokens from `start` on, if they were asked for."""
        raise NotImplementedError

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        return []

    def chunk(self, output: RequestOutput) -> dict[str, Any]:
        """What is new since this request's last chunk."""
        completion = output.outputs[0]
        before = self.outputs.get(output.request_id)
        known = before.outputs[0] if before else CompletionOutput("", [])
        self.outputs[output.request_id] = output
        start = len(known.token_ids)
        fields = self.delta(completion.text[len(known.text) :])
        index = self.index[output.request_id]
        return self.chunk_of(
            index,
            fields | self.token_ids(completion, start),
            self.logprobs(index, completion, start),
            completion.finish_reason,
        )

    def token_ids(self, completion: CompletionOutput, start: int) -> dict[str, Any]:
        """The tokens from `start` on, if they were asked for."""
        return {"token_ids": completion.token_ids[start:]} if self.return_token_ids else {}

    def chunk_of(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        """A chunk with one choice."""
        choice = {"index": index, **delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self.head, "object": self.chunk_object, "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk, where it was asked for."""
        return {**self.head, "object": self.chunk_object, "choices": [], "usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        """All of it at once; `outputs` has the last output of every request."""
        choices = []
        for request_id, index in self.index.items():
            completion = self.outputs[request_id].outputs[0]
            choice = {
                "index": index,
                **self.message(completion.text),
                **self.token_ids(completion, 0),
                "logprobs": self.logprobs(index, completion, 0),
                "finish_reason": completion.finish_reason,
            }
            choices.append(choice)
        return {**self.head, "object": self.object, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens in, tokens out, and how many of those in were found in the prefix cache."""
        outputs = self.outputs.values()
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(len(output.outputs[0].token_ids) for output in outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(output.num_cached_tokens for output in outputs)
            },
        }


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"

    def message(self, text: str) -> dict[str, Any]:
        """See `Answer.message`."""
        return {"text": text}

    delta = message

    def __init__(
        self, model: str, request_ids: SequenceOf[str], return_token_ids: bool = False
    ) -> None:
        super().__init__(model, request_ids, return_token_ids)
        self.told = [0] * len(request_ids)  # characters of each choice's tokens so far

    def logprobs(
        self, index: int, completion: CompletionOutput, start: int
    ) -> dict[str, Any] | None:
        """See `Answer.logprobs`: one list for each kind of fact."""
        if completion.logprobs is None:
            return None
        new = completion.logprobs[start:]
        own = [each[token] for token, each in zip(completion.token_ids[start:], new, strict=True)]
        lengths = (len(text_of(logprob)) for logprob in own)
        *starts, self.told[index] = accumulate(lengths, initial=self.told[index])
        return {
            "tokens": [text_of(logprob) for logprob in own],
            "token_logprobs": [finite(logprob) for logprob in own],
            "top_logprobs": [
                {text_of(logprob): finite(logprob) for logprob in each.values()} for each in new
            ],
            "text_offset": starts,
        }


class ChatAnswer(Answer):
    """Of /v1/chat/completions. top_logprobs: how many of the best tokens are told."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, model: str, request_ids: SequenceOf[str], return_token_ids: bool, top_logprobs: int
    ) -> None:
        super().__init__(model, request_ids, return_token_ids)
        self.top_logprobs = top_logprobs

    def message(self, text: str) -> dict[str, Any]:
        """See `Answer.message`."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        """See `Answer.delta`."""
        return {"delta": {"content": text}}

    def opening(self) -> list[dict[str, Any]]:
        """Who speaks."""
        return [self.chunk_of(0, {"delta": {"role": "assistant", "content": ""}})]

    def logprobs(
        self, index: int, completion: CompletionOutput, start: int
    ) -> dict[str, Any] | None:
        """See `Answer.logprobs`: one object for each token."""
        if completion.logprobs is None:
            return None
        content = []
        for token, each in zip(
            completion.token_ids[start:], completion.logprobs[start:], strict=True
        ):
            best = sorted(each.values(), key=lambda logprob: logprob.rank or 0)
            content.append(
                {
                    **token_fields(each[token]),
                    "top_logprobs": [token_fields(x) for x in best[: self.top_logprobs]],
                }
            )
        return {"content": content, "refusal": None}


def token_fields(logprob: Logprob) -> dict[str, Any]:
    """A token in a chat's logprobs. Of a part of a character the text does not tell the bytes."""
    text = text_of(logprob)
    known = None if UNFINISHED in text else list(text.encode())
    return {"token": text, "logprob": finite(logprob), "bytes": known}


def text_of(logprob: Logprob) -> str:
    """The token's text."""
    return logprob.decoded_token or ""


def finite(logprob: Logprob) -> float:
    """The log probability, as far as JSON can write it."""
    return max(logprob.logprob, LOWEST)


def error_body(
    message: str, kind: str = "invalid_request_error", param: str | None = None,
    code: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@overload
def printable(text: str) -> str: ...
@overload
def printable(text: str | None) -> str | None: ...
def printable(text: str | None) -> str | None:
    """The text with \\uXXXX for what UTF-8 can't write."""
    return text and text.encode(errors="backslashreplace").decode()
