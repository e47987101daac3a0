"""What a step costs: its FLOPs, its bytes, and the least time that a machine can take for them.

Knows: a model's shape and what each request does in a step. Does not know: tensors, kernels, or
anything measured but a machine's ceilings. Counts are exact whole numbers, and nothing is added up
in parallel, so a virtual clock shows the same digits on every machine.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from nanoteach.config import ModelConfig
from nanoteach.hardware import Hardware

# Shapes to reckon with where no model folder is at hand.
SHAPES = {
    "qwen3-0.6b": ModelConfig(
        family="qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28,
        num_heads=16, num_kv_heads=8, head_dim=128, max_position=40_960, rms_norm_eps=1e-6,
        rope_theta=1e6, qk_norm=True, tie_word_embeddings=True,
    ),
}  # fmt: skip


class Work(NamedTuple):
    """What one request does in one step. A step is a sequence of these.

    `num_new` tokens are computed on top of `num_computed` that have their K/V already.
    `needs_logits`: the last new token's logits are wanted (not so in the middle of a prompt).
    """

    num_new: int
    num_computed: int
    needs_logits: bool = True


@dataclass(frozen=True)
class Cost:
    """FLOPs, and bytes to and from memory."""

    flops: int
    bytes: int

    def seconds(self, hardware: Hardware) -> float:
        """The bound: the slower of computing and moving, since a perfect program overlaps both.

        It takes the bandwidth of reading, because nearly all bytes of a step are read.
        """
        return max(self.flops / hardware.flops, self.bytes / hardware.read_bandwidth)

    def limit(self, hardware: Hardware) -> Literal["compute", "memory"]:
        """Which of the two sets the bound."""
        computing, moving = self.flops / hardware.flops, self.bytes / hardware.read_bandwidth
        return "compute" if computing > moving else "memory"


def layer_matrix_parameters(config: ModelConfig) -> int:
    """Values in one layer's seven matrices: q, k, v and o; gate, up and down."""
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    return attention + 3 * config.hidden_size * config.intermediate_size


def layer_parameters(config: ModelConfig) -> int:
    """All values of one layer: the matrices, their biases, and the weights of the norms."""
    vectors = 2 * config.hidden_size
    if config.qk_norm:
        vectors += 2 * config.head_dim
    if config.qkv_bias:
        vectors += config.q_size + 2 * config.kv_size
    if config.output_bias:
        vectors += config.hidden_size
    return layer_matrix_parameters(config) + vectors


def embedding_parameters(config: ModelConfig) -> int:
    """Values in one matrix of the vocabulary: the input embedding, or the LM head."""
    return config.vocab_size * config.hidden_size


def num_parameters(config: ModelConfig) -> int:
    """All values of the model. Tied, the input embedding and the LM head are one matrix."""
    vocabulary = (1 if config.tie_word_embeddings else 2) * embedding_parameters(config)
    return vocabulary + config.num_layers * layer_parameters(config) + config.hidden_size


def weight_bytes_read(config: ModelConfig, bytes_per_value: int = 2) -> int:
    """Bytes of weights that one step with logits reads, however many tokens it computes.

    Of an untied input embedding only a few rows are looked up, so it does not count.
    """
    looked_up = 0 if config.tie_word_embeddings else embedding_parameters(config)
    return (num_parameters(config) - looked_up) * bytes_per_value


def kv_bytes_per_token(config: ModelConfig, bytes_per_value: int = 2) -> int:
    """Bytes of one token's K and V in all layers."""
    return 2 * config.num_layers * config.kv_size * bytes_per_value


def max_requests(
    config: ModelConfig, kv_bytes: int, tokens_per_request: int, bytes_per_value: int = 2
) -> int:
    """How many requests of `tokens_per_request` tokens each `kv_bytes` of memory hold at once."""
    return kv_bytes // (tokens_per_request * kv_bytes_per_token(config, bytes_per_value))


def num_attended(work: Sequence[Work]) -> int:
    """Pairs of a new token and a token it attends to: itself and all before it, causally."""
    return sum(
        request.num_new * request.num_computed + request.num_new * (request.num_new + 1) // 2
        for request in work
    )


def attention_flops(config: ModelConfig, work: Sequence[Work]) -> int:
    """FLOPs of QK^T and PV: each is a multiply and an add for each pair, query head and value."""
    return 4 * config.num_layers * config.q_size * num_attended(work)


def step_flops(config: ModelConfig, work: Sequence[Work]) -> int:
    """FLOPs of a step's matrix products: the layers, attention, and the LM head.

    Left out is what is small beside them: norms, rotary, softmax, activation and sampling.
    """
    num_tokens = sum(request.num_new for request in work)
    num_logits = sum(request.needs_logits for request in work)
    layers = 2 * config.num_layers * layer_matrix_parameters(config) * num_tokens
    head = 2 * embedding_parameters(config) * num_logits
    return layers + attention_flops(config, work) + head


def step_bytes(config: ModelConfig, work: Sequence[Work], bytes_per_value: int = 2) -> int:
    """Bytes that a step must move: the weights once, K/V read for the history and written anew.

    The LM head is read only if someone wants logits. Left out are activations: a decode has few
    beside the weights, and a prefill, which has many, is bound by its FLOPs. A prefix that
    requests share counts once for each of them. A step without work moves nothing.
    """
    if not work:
        return 0
    weights = weight_bytes_read(config, bytes_per_value)
    if not any(request.needs_logits for request in work):
        weights -= embedding_parameters(config) * bytes_per_value
    num_tokens = sum(request.num_computed + request.num_new for request in work)
    return weights + num_tokens * kv_bytes_per_token(config, bytes_per_value)


def step_cost(config: ModelConfig, work: Sequence[Work], bytes_per_value: int = 2) -> Cost:
    """FLOPs and bytes of a step; `bytes_per_value` is the dtype's, 2 for bfloat16."""
    return Cost(step_flops(config, work), step_bytes(config, work, bytes_per_value))


class Clock(Protocol):
    """Time in seconds, from an origin of its own. `label` says what kind of time it is."""

    @property
    def label(self) -> str: ...

    def now(self) -> float:
        """Seconds since the clock's origin."""

    def tick(self, work: Sequence[Work]) -> None:
        """A step has been run."""

    def wait_until(self, t: float) -> None:
        """Let time pass until `now()` is `t`; return at once if it is that late already."""


class WallClock:
    """Real time, in seconds of `time.perf_counter`. It passes by itself; a step adds nothing."""

    label = "wall clock"

    def now(self) -> float:
        return time.perf_counter()

    def tick(self, work: Sequence[Work]) -> None:
        pass

    def wait_until(self, t: float) -> None:
        while (left := t - self.now()) > 0:
            time.sleep(left)


@dataclass(eq=False)
class VirtualClock:
    """Simulated time: each step takes its bound on `hardware`, and `overhead` seconds more.

    Starts at 0.0, and never goes back. Raises ValueError for an overhead below 0.
    """

    config: ModelConfig
    hardware: Hardware
    bytes_per_value: int = 2
    overhead: float = 0.0
    _now: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.overhead < 0:
            raise ValueError(f"overhead is seconds a step, at least 0, not {self.overhead!r}")

    @property
    def label(self) -> str:
        return f"simulated, {self.hardware.name}"

    def now(self) -> float:
        return self._now

    def tick(self, work: Sequence[Work]) -> None:
        cost = step_cost(self.config, work, self.bytes_per_value)
        self._now += cost.seconds(self.hardware) + self.overhead

    def wait_until(self, t: float) -> None:
        self._now = max(self._now, t)
