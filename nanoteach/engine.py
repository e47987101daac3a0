"""`Engine`: the best of every stage, with text in and text out, under vLLM's names."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from numbers import Integral
from operator import index
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from tqdm import tqdm

from nanoteach.config import EngineConfig, check_flag, option_names, refuse_unknown
from nanoteach.cost_model import Clock
from nanoteach.detokenizer import Detokenizer, text_of_token
from nanoteach.engine_core import EngineCore
from nanoteach.hub import check_device, default_device, default_model, resolve_model
from nanoteach.loader import check_dtype, eos_token_ids, load_model, load_tokenizer
from nanoteach.sequence import Sequence
from nanoteach.stages import Parts, build_engine
from nanoteach.types import (
    CompletionOutput,
    EngineStats,
    Logprob,
    RequestOutput,
    SamplingParams,
    TooLong,
    Trace,
    one_for_each,
)

Prompt = str | SequenceOf[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's `{"prompt_token_ids": [...]}` or `{"prompt": "..."}`."""
Message = Mapping[str, str]
MOST_TOGETHER = 8
"""Steps whose news `Engine.step` takes beside the first's. Without an end, one who is always slower
would tell nothing before all requests are over."""


@dataclass
class Request:
    """A request as the text side sees it."""

    seq: Sequence
    prompt: str | None
    detokenizer: Detokenizer
    text_of: Callable[[int], str]
    """One token's text."""
    owner: str
    """"step" if its outputs go to `step`; else whoever waits for it: "generate" or "stream"."""
    stopped_at: int | None = None
    """Where a stop string begins in the text."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Those of `seq`, with the tokens' texts."""
    cumulative_logprob: float = 0.0
    prompt_token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = self.seq.token_ids[: self.seq.num_prompt_tokens]

    def update(self) -> None:
        """Bring the text up to the tokens, and look for stop strings in what is new."""
        seq, detokenizer, reason = self.seq, self.detokenizer, self.seq.finish_reason
        # The token that stopped it is not part of the text.
        last = len(seq.token_ids) - (reason == "stop" and self.stopped_at is None)
        before = len(detokenizer.text)
        seen = seq.num_prompt_tokens + detokenizer.num_tokens
        detokenizer.extend(seq.token_ids[seen:last], final=reason is not None)
        for logprobs in seq.logprobs[len(self.logprobs) :]:
            token = seq.token_ids[seq.num_prompt_tokens + len(self.logprobs)]
            self.cumulative_logprob += logprobs[token].logprob
            self.logprobs.append(
                {i: Logprob(x.logprob, x.rank, self.text_of(i)) for i, x in logprobs.items()}
            )
        if self.stopped_at is None and (stops := seq.params.stop):
            text = detokenizer.text
            starts = (text.find(stop, max(0, before - len(stop) + 1)) for stop in stops)
            self.stopped_at = min((start for start in starts if start >= 0), default=None)

    @property
    def text(self) -> str:
        """The text so far, up to a stop string. What may become one is held back."""
        text, stops = self.detokenizer.text, self.seq.params.stop
        if self.stopped_at is not None:
            return text[: self.stopped_at]
        if self.seq.finish_reason or not stops:
            return text
        return text[: len(text) - max(overlap(text, stop) for stop in stops)]

    def output(self) -> RequestOutput:
        """What it has come to so far."""
        seq, times = self.seq, self.seq.token_times
        reason = "stop" if self.stopped_at is not None else seq.finish_reason
        completion = CompletionOutput(self.text, seq.output_token_ids, reason)
        if seq.params.logprobs is not None:
            completion.cumulative_logprob = self.cumulative_logprob
            completion.logprobs = list(self.logprobs)
        return RequestOutput(
            request_id=seq.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=reason is not None,
            num_cached_tokens=seq.num_cached_tokens or 0,
            time_to_first_token=times[0] - seq.arrival_time if times else None,
            token_times=times,  # a copy for every token would take longer than all the rest
        )


class Engine:
    """Serves a model. One thread at a time: it has no locks.

    model: `tiny`, `smollm2-135m`, a folder, or a hub id (default: NANOTEACH_MODEL, or `tiny`).
    device: cpu, cuda or mps (default: NANOTEACH_DEVICE, or the best there is).
    dtype: float32 on a CPU and the checkpoint's elsewhere, unless given.
    trace: record events in `engine.trace`.
    clock: what times are read from; a `VirtualClock` simulates a named GPU.
    options: see `EngineConfig`; they have vLLM's names. Unlike vLLM, greedy is the default.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        trace: bool = False,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        own = ("model", "device", "dtype", "trace", "clock")
        refuse_unknown("Engine", options, (*own, *option_names(EngineConfig)))
        self.config = EngineConfig(**options)
        check_flag("trace", trace)
        if clock is not None and not hasattr(clock, "now"):
            raise ValueError(f"clock is a WallClock or a VirtualClock, not {clock!r}")
        device = default_device() if device is None else check_device(device)
        dtype = check_dtype(dtype)
        if dtype is None and device.type == "cpu":
            dtype = torch.float32
        folder = resolve_model(default_model() if model is None else model)
        self.trace = Trace() if trace else None
        decoder = load_model(folder, device, dtype, max_model_len=self.config.max_model_len)
        tokenizer, eos = load_tokenizer(folder), eos_token_ids(folder)
        parts = Parts(decoder, self.config, eos, clock, self.trace, tokenizer=tokenizer)
        self._set_up(build_engine(parts), tokenizer)

    @classmethod
    def from_parts(cls, parts: Parts) -> "Engine":
        """An engine on parts that are there already, a tokenizer among them."""
        if parts.tokenizer is None:
            raise ValueError("an engine that speaks text needs a tokenizer: Parts(tokenizer=...)")
        return cls.around(build_engine(parts), parts.tokenizer, parts.config)

    @classmethod
    def around(cls, core: EngineCore, tokenizer: Any, config: EngineConfig) -> "Engine":
        """An engine on a core that is there already."""
        engine = cls.__new__(cls)
        engine.config, engine.trace = config, core.trace
        engine._set_up(core, tokenizer)
        return engine

    def _set_up(self, core: EngineCore, tokenizer: Any) -> None:
        self.core, self.tokenizer = core, tokenizer
        self.text_of = cache(partial(text_of_token, tokenizer))  # 20 a token, with logprobs=20
        self.requests: dict[str, Request] = {}
        self.changed: dict[str, Request] = {}
        """Requests of `step`'s whose news it has not delivered yet."""
        self.ids = itertools.count()

    # --- all at once ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt or a list of them; one output for each, in their order.

        Raises ValueError, with nothing queued, if any of them can't be served.
        """
        batch = as_list(prompts)
        params = one_for_each(sampling_params, len(batch))
        requests = self._add_all(batch, params, owner="generate")
        bar = tqdm(total=len(requests), desc="Requests", disable=None if use_tqdm else True)
        try:
            with bar:
                while unfinished := [r for r in requests if not r.seq.finish_reason]:
                    bar.update(len(requests) - len(unfinished) - bar.n)
                    self._advance()
                bar.update(len(requests) - bar.n)
        finally:
            self._drop(requests)
        for request in requests:
            request.update()
        return [request.output() for request in requests]

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, by the model's chat template."""
        if not messages or not isinstance(messages, SequenceOf) or isinstance(messages, str):
            raise ValueError(f"chat takes a list of messages, at least one, not {messages!r}")
        one = isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        prompts = [self.apply_chat_template(c) for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def apply_chat_template(self, messages: SequenceOf[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant speaks."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("this model has no chat template: use generate")
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise ValueError(
                    "a message is a dict such as {'role': 'user', 'content': 'Hi'}, "
                    f"not {message!r}"
                )
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:  # such as: roles must take turns
            raise ValueError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
        return self._encode(text, add_special_tokens=False)  # the template has written them

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, if it came as text, and its token ids."""
        if isinstance(prompt, Mapping):
            keys = [key for key in ("prompt_token_ids", "prompt") if key in prompt]
            if not keys or prompt.keys() - {"prompt_token_ids", "prompt"}:
                raise ValueError(
                    "a prompt in a dict has the key 'prompt' or 'prompt_token_ids' and no others, "
                    f"not {list(prompt)} (cache_salt goes into SamplingParams)"
                )
            prompt = prompt[keys[0]]
        if isinstance(prompt, str):
            return prompt, self._encode(prompt)
        return None, as_token_ids(prompt)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """The output after every token, each with all of the text so far.

        The request is queued at once. Closing the iterator early aborts it.
        """
        requests = self._add_all([prompt], one_for_each(sampling_params, 1), owner="stream")
        outputs = self._stream(requests[0])
        next(outputs)  # closing a generator that never started would not run its `finally`
        return outputs

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        output = request.output()
        try:
            yield output  # to `stream`
            while not output.finished:
                # Others who step the engine may have brought it on, or to its end, in between.
                seen = len(output.outputs[0].token_ids)
                while request.seq.num_output_tokens == seen and not request.seq.finish_reason:
                    self._advance()
                request.update()
                output = request.output()
                yield output
        finally:
            self._drop([request])

    # --- step by step --------------------------------------------------------------------------

    def add_request(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> None:
        """Queue a request whose outputs `step` returns. Raises ValueError if it can't be served."""
        if not isinstance(request_id, str):
            raise ValueError(f"a request id is a string, not {request_id!r}")
        if request_id in self.requests:  # it may be done and have news for `step` still
            raise ValueError(f"request id {request_id!r} is in use: give each request its own")
        (params,) = one_for_each(sampling_params, 1)
        text, token_ids = self.tokenize(prompt)
        self.queue(self.core.prepare(request_id, token_ids, params), text, owner="step")

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the added requests that got a token since the last call."""
        if not any(request.seq.finish_reason for request in self.changed.values()):
            self._advance()
        for _ in range(MOST_TOGETHER):  # who is slower than the steps takes several together
            if not self.core.has_news:
                break
            self._advance()
        changed = list(self.changed.values())
        for request in changed:
            request.update()
        outputs = [request.output() for request in changed]
        self.changed.clear()  # not before all is told: what a fault keeps back comes next time
        self._drop([request for request in changed if request.seq.finish_reason])
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has more to give."""
        return any(request.owner == "step" for request in self.requests.values())

    def abort_request(self, request_id: str | SequenceOf[str]) -> None:
        """End requests now and give up their blocks. Ids that are not there are passed over."""
        ids = [request_id] if isinstance(request_id, str) else request_id
        if not isinstance(ids, Iterable):
            raise ValueError(f"a request id is a string, not {request_id!r}")
        self._drop([self.requests[i] for i in ids if i in self.requests])

    # --- looking inside ------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counts of blocks, requests and tokens."""
        return self.core.stats()

    def check(self) -> list[str]:
        """Walk every block and every table: what is wrong, in words; empty when all is well."""
        return self.core.check()

    # --- inside --------------------------------------------------------------------------------

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises ValueError on half a surrogate pair, and on what can't ever fit."""
        longest = self.core.max_model_len * self.longest_token
        if len(text) > longest:  # found in no time, where tokenizing takes seconds
            raise TooLong(
                f"the prompt has {len(text):,} characters, and max_model_len = "
                f"{self.core.max_model_len:,} tokens can't have over {longest:,}: shorten it"
            )
        text.encode()
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _add_all(
        self, prompts: list[Prompt], params: list[SamplingParams], owner: str
    ) -> list[Request]:
        """Queue all requests, or none of them if one can't be served."""
        tokenized = [self.tokenize(prompt) for prompt in prompts]
        seqs = [
            self.core.prepare(self._new_id(owner), token_ids, p)
            for (_, token_ids), p in zip(tokenized, params, strict=True)
        ]
        return [
            self.queue(seq, text, owner) for seq, (text, _) in zip(seqs, tokenized, strict=True)
        ]

    def _new_id(self, owner: str) -> str:
        """An id that no request has, whatever the user's own are."""
        names = (f"{owner}-{i}" for i in self.ids)
        return next(name for name in names if name not in self.requests)

    def queue(self, seq: Sequence, text: str | None, owner: str) -> Request:
        """Let a checked request wait for its turn. text: of its prompt, if it came as text."""
        self.core.queue(seq)
        request = Request(seq, text, Detokenizer(self.tokenizer), self.text_of, owner)
        self.requests[seq.request_id] = request
        return request

    def _advance(self) -> None:
        """Run one step for everybody, and stop those whose text has a stop string now."""
        moved = {seq.request_id: self.requests[seq.request_id] for seq in self.core.step()}
        self.changed.update((i, request) for i, request in moved.items() if request.owner == "step")
        for request_id, request in moved.items():
            if request.seq.params.stop:
                request.update()
                if request.stopped_at is not None:
                    self.core.abort_request(request_id, reason="stop")

    def _drop(self, requests: list[Request]) -> None:
        """Forget requests, and end those that still run."""
        for request in requests:
            self.core.abort_request(request.seq.request_id)
            self.requests.pop(request.seq.request_id, None)
            self.changed.pop(request.seq.request_id, None)


def overlap(text: str, stop: str) -> int:
    """How many characters at the text's end could become `stop`, which is not in it yet."""
    end = text[max(0, len(text) - len(stop) + 1) :]  # no more than that
    while not stop.startswith(end):
        # Not at every place, of which a long `stop` has many: where its first character is next.
        _, first, rest = end[1:].partition(stop[0])
        end = first + rest
    return len(end)


def as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A list of prompts, from one or several. A list of whole numbers is one prompt."""
    if hasattr(prompts, "tolist"):  # an array or a tensor
        prompts = prompts.tolist()
    if isinstance(prompts, (str, bytes, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"a prompt is a text or a list of token ids, not {prompts!r}")
    batch = list(prompts)
    if batch and all(isinstance(item, Integral) for item in batch):
        return [batch]  # type: ignore[list-item]
    return batch  # type: ignore[return-value]


def as_token_ids(prompt: Any) -> list[int]:
    """Token ids as plain ints, from whole numbers of any kind."""
    try:
        if isinstance(prompt, (bytes, str, Mapping)):
            raise TypeError
        # True and False stay what they are, to be refused: they are a mask in the wrong place.
        return [token if isinstance(token, bool) else index(token) for token in prompt]
    except TypeError:
        raise ValueError(f"a prompt is a text or a list of token ids, not {prompt!r}") from None
