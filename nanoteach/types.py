"""What goes into an engine, what comes out, and what a trace of it records.

Knows: the words of the public API, which are vLLM's. Does not know: how tokens are made.
"""

import dataclasses
import itertools
import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from nanoteach.config import check_flag, check_positive, reject_unknown_options

COLDEST, HOTTEST = 1e-5, 1_000_000
MAX_LOGPROBS = 20


class TooLong(ValueError):
    """A request needs more tokens than the model takes, or than the whole pool has room for."""


@reject_unknown_options
@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued.

    max_tokens: most tokens to generate; None means up to the model's length, or to what the whole
        pool can hold.
    temperature: 0, the default, takes the best token, as does anything under 1e-5; above it, tokens
        are drawn. vLLM's default is 1.
    top_k: draw from the so many best tokens alone; 0 or -1: from all.
    top_p: draw from the fewest best tokens that have this much of the probability between them
        (nucleus sampling, Holtzman et al., 2019), after temperature and top_k; 1: from all.
    seed: of the draws, a whole number; 32 bits of it count. With the same seed a request draws the
        same, whatever runs beside it. None: a new one every time.
    logprobs: tell each token's log probability, and those of the so many best, up to 20, whatever
        the temperature and the filters. None: tell none.
    stop: strings that end the text when they appear; the text is cut before them.
    stop_token_ids: tokens that end it, besides the model's own end-of-text tokens.
    ignore_eos: go on past the model's end-of-text tokens (`stop_token_ids` still count).
    cache_salt: requests share cached prefixes only with requests of the same salt.
    """

    max_tokens: int | None = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    stop: str | SequenceOf[str] = ()
    stop_token_ids: SequenceOf[int] = ()
    ignore_eos: bool = False
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_positive("max_tokens", self.max_tokens)
        if not is_number(self.temperature) or not 0 <= self.temperature <= HOTTEST:
            raise ValueError(
                f"temperature is a number from 0 (greedy) to {HOTTEST:,}, not {self.temperature!r}"
            )
        if not is_list_of(int, [self.top_k]) or self.top_k < -1:
            raise ValueError(
                f"top_k is a whole number of tokens, or 0 or -1 for all, not {self.top_k!r}"
            )
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is a number above 0, up to 1 for all, not {self.top_p!r}")
        if self.logprobs is not None and not (
            is_list_of(int, [self.logprobs]) and 0 <= self.logprobs <= MAX_LOGPROBS
        ):
            raise ValueError(
                f"logprobs is a whole number from 0 to {MAX_LOGPROBS}, or None, "
                f"not {self.logprobs!r}"
            )
        if self.seed is not None and not is_list_of(int, [self.seed]):
            raise ValueError(f"seed is a whole number, or None for any, not {self.seed!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not is_list_of(str, stop) or not all(stop):
            raise ValueError(
                f"stop takes one or more strings, none of them empty, not {self.stop!r}"
            )
        stop_ids = self.stop_token_ids or ()
        if not is_list_of(int, stop_ids):
            raise ValueError(f"stop_token_ids takes a list of token ids, not {stop_ids!r}")
        check_flag("ignore_eos", self.ignore_eos)
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise ValueError(f"cache_salt is a string, not {self.cache_salt!r}")
        # So cold, the best token wins anyway, and scores over the temperature would overflow.
        temperature = float(self.temperature) if self.temperature >= COLDEST else 0.0
        object.__setattr__(self, "temperature", temperature)
        # The best token is among the best, however few: without a draw there is nothing to filter.
        # No vocabulary has over 2**31 tokens, and no tensor takes a number of any size.
        object.__setattr__(self, "top_k", min(max(0, self.top_k), 2**31) if temperature else 0)
        object.__setattr__(self, "top_p", float(self.top_p) if temperature else 1.0)
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(stop_ids))

    @cached_property  # asked of every request in every step
    def is_plain(self) -> bool:
        """Whether stage 9 is not needed: no filters and no logprobs."""
        return not self.top_k and self.top_p == 1 and self.logprobs is None

    def finish_reason(
        self, last_token: int, num_output_tokens: int, eos_token_ids: SequenceOf[int]
    ) -> str | None:
        """ "stop" after an end token, "length" at max_tokens, None while there is more to come."""
        if last_token in self.stop_token_ids or (
            not self.ignore_eos and last_token in eos_token_ids
        ):
            return "stop"
        return "length" if num_output_tokens == self.max_tokens else None


def prepare_request(
    prompt_token_ids: SequenceOf[int], params: SamplingParams, vocab_size: int, max_model_len: int
) -> SamplingParams:
    """The request's parameters with `max_tokens` and, where it is needed, `seed` settled.

    Raises ValueError, saying what to change, on a request that could never be served.
    """
    if len(prompt_token_ids) == 0:
        raise ValueError("the prompt is empty: give at least one token")
    room = max_model_len - len(prompt_token_ids)
    if room < (params.max_tokens or 1):
        raise TooLong(
            f"{len(prompt_token_ids)} prompt tokens and max_tokens = {params.max_tokens} do not "
            f"fit into max_model_len = {max_model_len}: shorten the prompt or lower max_tokens"
        )
    for token in prompt_token_ids:
        # Of type int, not an instance: True is one, and a long prompt is checked in half the time.
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(
                f"{token!r} is no token id of this model: they run from 0 to {vocab_size - 1}"
            )
    if params.max_tokens and (params.seed is not None or not params.temperature):
        return params
    seed = random.getrandbits(32) if params.seed is None else params.seed
    return dataclasses.replace(params, max_tokens=params.max_tokens or room, seed=seed)


def prepare_batch(
    prompts: SequenceOf[SequenceOf[int]],
    params: SamplingParams | SequenceOf[SamplingParams] | None,
    vocab_size: int,
    max_model_len: int,
) -> list[SamplingParams]:
    """Checked parameters for every prompt, for the stages that know argmax alone."""
    settled = [
        prepare_request(prompt, p, vocab_size, max_model_len)
        for prompt, p in zip(prompts, params_of_tokens(params, len(prompts)), strict=True)
    ]
    if any(p.temperature for p in settled):
        raise ValueError("stages 1 to 3 are greedy: for a temperature use stage 4 or later")
    for p in settled:
        require_plain(p)
    return settled


def require_plain(params: SamplingParams) -> None:
    """Raise ValueError on what stage 9 brings, in the stages before it."""
    if not params.is_plain:
        raise ValueError("top_k, top_p and logprobs come with stage 9: use it, or Engine")


def params_of_tokens(
    params: SamplingParams | SequenceOf[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Parameters for every prompt, where prompts are token ids: nobody there can look for text."""
    each = one_for_each(params, num_prompts)
    if any(p.stop for p in each):
        raise ValueError("stop strings need text, and this stage has tokens only: use Engine")
    return each


def is_number(value: Any) -> bool:
    """Whether `value` is a number. (True and False count as none.)"""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_list_of(kind: type, value: Any) -> bool:
    """Whether `value` is a list or tuple of nothing else. (True and False count as no numbers.)"""
    return isinstance(value, (list, tuple)) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )


def one_for_each(
    params: SamplingParams | SequenceOf[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """Sampling parameters for every prompt, from one for all or a list of as many."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not is_list_of(SamplingParams, params):
        raise ValueError(
            f"sampling parameters are one SamplingParams, or a list of them, not {params!r}"
        )
    if len(params) != num_prompts:
        raise ValueError(
            f"{num_prompts} prompts came with {len(params)} sampling parameters: "
            "give one for all, or one for each"
        )
    return list(params)


@dataclass(slots=True)
class Logprob:
    """A token's log probability, its rank among all tokens, 1 for the best, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One continuation: its text and tokens, and why it ended ("stop", "length", "abort").

    logprobs: where they were asked for, for each token of the output those of the best tokens and
        its own, by token id. cumulative_logprob: the sum of the tokens' own.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    index: int = 0
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass
class RequestOutput:
    """What a request has come to so far. Times are in seconds on the engine's clock.

    token_times: when each output token came; time_to_first_token counts from the request's arrival.
        It is the request's own list, and grows with it; all else here stays as it is.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    time_to_first_token: float | None = None
    token_times: list[float] = field(default_factory=list)

    @property
    def inter_token_times(self) -> list[float]:
        """From each output token to the next."""
        return [b - a for a, b in itertools.pairwise(self.token_times)]


@dataclass(frozen=True)
class EngineStats:
    """What the engine holds now and has done so far.

    num_cached_blocks counts the free blocks that a prefix hit could still use; num_prefix_queries
    and num_prefix_hits are tokens looked up and found, and prefix_hit_rate is their ratio;
    batch_sizes says how many steps had how many requests.
    """

    num_blocks: int
    num_used_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_computed_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    prefix_hit_rate: float
    batch_sizes: dict[int, int]


class Event(NamedTuple):
    """One line of a trace. `kind` says how to read `data`.

    step: {request id: tokens computed}; taken, freed, hit: block ids; preempted, finished: None.
    """

    time: float
    step: int
    kind: str
    request_id: str | None
    data: Any


class Trace:
    """A list of events. The engine holds None in its place when tracing is off."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.step = 0
        self.time = 0.0

    def add(self, kind: str, request_id: str | None = None, data: Any = None) -> None:
        """Record one event at the current step and time."""
        self.events.append(Event(self.time, self.step, kind, request_id, data))

    def of_kind(self, kind: str) -> list[Event]:
        """The events of one kind, in order."""
        return [event for event in self.events if event.kind == kind]
