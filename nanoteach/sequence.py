"""Stage 4. A request inside the engine: its tokens, and how many of them are computed.

That one pair says everything. Here is a prompt of five tokens that has generated two:

    token_ids   p p p p p g g
    computed    # # # # # # .      num_computed_tokens = 6

The last sampled token has no K/V yet: it is the input of the next step. So a decode is one missing
token, a prefill or a chunk is several, a prefix hit starts with some computed, and a preempted
request has none and computes its own outputs again as if they were prompt.
"""

from dataclasses import dataclass, field
from enum import Enum

from nanoteach.types import Logprob, SamplingParams


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)  # slots: a step reads these for every running request
class Sequence:
    """One request. `token_ids` holds the prompt, then what has been generated."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    arrival_time: float = 0.0
    status: Status = Status.WAITING
    finish_reason: str | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    """Tokens that a prefix hit spared, when the request was first admitted."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Stage 5's memory of the hashes of the full blocks of `token_ids`, as far as asked for."""
    token_times: list[float] = field(default_factory=list)
    """When each output token was committed, in seconds on the engine's clock."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Of each output token, if they were asked for."""

    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens whose K/V are still to be computed; 1 for a decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many those are."""
        return len(self.token_ids) - self.num_prompt_tokens
