"""Checks of notebook 00: what a step costs. The numbers were worked out by hand, or counted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from nanoteach.config import ModelConfig
from nanoteach.cost_model import SHAPES, Cost, Work
from nanoteach.course.checking import Likely, Wrong, check, describe, expect
from nanoteach.hardware import Hardware

QWEN = SHAPES["qwen3-0.6b"]
# Every size is another prime, so that no two wrong turns meet in one number.
ODD = ModelConfig(
    family="qwen3", vocab_size=101, hidden_size=17, intermediate_size=31, num_layers=3,
    num_heads=10, num_kv_heads=2, head_dim=7, max_position=128, rms_norm_eps=1e-6,
    rope_theta=1e4, tie_word_embeddings=True,
)  # fmt: skip
UNTIED = replace(ODD, tie_word_embeddings=False)


def expect_count(
    name: str, function: Callable[..., Any], *args: Any, to_be: int, likely: Likely
) -> None:
    """As `expect`, and no float: it is exact only up to 2**53."""
    expect(name, function, *args, to_be=to_be, likely=likely)
    if isinstance(got := function(*args), float):
        raise Wrong(
            name, describe(to_be), describe(got), "A count is a whole number: use //, not /."
        )


@check("nanoteach.cost_model.kv_bytes_per_token", "Bytes that one token leaves in the cache")
def check_kv_bytes(kv_bytes_per_token: Callable[..., int]) -> None:
    """By hand: K and V, 28 layers, 8 heads of 128 values, 2 bytes: 114,688."""
    for name, config, width in (
        # 1 byte comes first: with 4, a 2 in its place looks as if K or V were missing.
        ("3 layers, 10 query heads, 2 K/V heads of 7 values, 1 byte each", ODD, 1),
        ("Qwen3-0.6B in float32", QWEN, 4),
        ("Qwen3-0.6B in bfloat16", QWEN, 2),
    ):
        heads, dim, layers = config.num_kv_heads, config.head_dim, config.num_layers
        # Count what is really stored: one value at a time.
        one_layer = sum(torch.empty(heads, dim).numel() for _ in ("K", "V"))
        right = one_layer * layers * width
        expect_count(
            name, kv_bytes_per_token, config, width, to_be=right,
            likely=[
                (2 * one_layer * layers, "bytes_per_value is not used."),
                (4 * one_layer * layers, "bytes_per_value is not used."),
                (right // 2, "K and V are two: each layer keeps both."),
                (right // layers, "Every layer keeps its own K and V."),
                (
                    right * config.num_heads // heads,
                    "Only the K/V heads are kept. The query heads, of which there are more, "
                    "are used once and forgotten.",
                ),
                (right // width, "These are values. How many bytes does each take?"),
                (2 * layers * config.hidden_size * width,
                 "hidden_size is the width of the residual stream; K is num_kv_heads * head_dim."),
            ],
        )  # fmt: skip


@check("nanoteach.cost_model.num_attended", "Pairs of tokens that attention looks at")
def check_num_attended(num_attended: Callable[[Sequence[Work]], int]) -> None:
    """Counted pair by pair."""
    for name, work in (
        ("3 new tokens on 10 of history", [Work(3, 10)]),
        ("one decode on 10 tokens of history", [Work(1, 10)]),
        ("a prompt of 4 tokens", [Work(4, 0)]),
        ("three prompts: 128, 256 and 64 tokens", [Work(128, 0), Work(256, 0), Work(64, 0)]),
        ("a decode beside a chunk", [Work(1, 1024), Work(7, 20, needs_logits=False)]),
        ("an empty step", []),
    ):
        right = sum(
            key <= request.num_computed + query
            for request in work
            for query in range(request.num_new)
            for key in range(request.num_computed + request.num_new)
        )
        new = sum(request.num_new for request in work)
        total = sum(request.num_new + request.num_computed for request in work)
        expect_count(
            name, num_attended, work, to_be=right,
            likely=[
                (right - new, "A token also attends to itself."),
                (sum(key <= work[0].num_computed + query
                     for query in range(work[0].num_new)
                     for key in range(work[0].num_computed + work[0].num_new)) if work else None,
                 "That is the first request alone. Is the `return` inside the loop?"),
                (sum(r.num_new * (r.num_computed + r.num_new) for r in work),
                 "Causal: a new token does not see the new tokens after it."),
                (sum(r.num_new * r.num_computed for r in work),
                 "New tokens see each other too, each those before it and itself."),
                (new * (new + 1) // 2,
                 "Requests do not see each other, and each has its own history."),
                (sum((r.num_new + r.num_computed) * (r.num_new + r.num_computed + 1) // 2
                     for r in work),
                 "The history's own pairs were computed in earlier steps: count only what new "
                 "tokens look at."),
                (total * (total + 1) // 2,
                 "Requests do not see each other, and the history's own pairs are computed "
                 "already: count only what new tokens look at."),
            ],
        )  # fmt: skip


def counted_flops(config: ModelConfig, work: Sequence[Work]) -> tuple[int, int, int]:
    """What torch's FLOP counter sees when a step's products are done: layers, attention, head."""

    def product(rows: int, inner: int, columns: int) -> int:
        with FlopCounterMode(display=False) as counter:
            torch.mm(torch.zeros(rows, inner), torch.zeros(inner, columns))
        return int(counter.get_total_flops())

    new, hidden, middle = sum(r.num_new for r in work), config.hidden_size, config.intermediate_size
    shapes = [(hidden, config.q_size), (hidden, config.kv_size), (hidden, config.kv_size)]
    shapes += [(config.q_size, hidden), (hidden, middle), (hidden, middle), (middle, hidden)]
    layers = config.num_layers * sum(product(new, *shape) for shape in shapes)
    attention = 0
    for request in work:
        for query in range(request.num_new):  # one query, its keys, every head: QK^T, then PV
            keys = request.num_computed + query + 1
            attention += config.num_heads * (
                product(1, config.head_dim, keys) + product(1, keys, config.head_dim)
            )
    head = product(sum(r.needs_logits for r in work), hidden, config.vocab_size)
    return layers, attention * config.num_layers, head


@check("nanoteach.cost_model.step_flops", "FLOPs of a step")
def check_step_flops(step_flops: Callable[..., int]) -> None:
    """torch's own FLOP counter is the oracle."""
    for name, config, work in (
        ("a decode on 5 tokens of history", ODD, [Work(1, 5)]),
        ("a prompt of 4 tokens", ODD, [Work(4, 0)]),
        ("the middle of a prompt: nobody wants logits", ODD, [Work(3, 2, needs_logits=False)]),
        ("two decodes beside a chunk", ODD, [Work(1, 5), Work(1, 2), Work(3, 4, False)]),
        ("untied embeddings", UNTIED, [Work(2, 3)]),
    ):
        layers, attention, head = counted_flops(config, work)
        new = sum(r.num_new for r in work)
        whole = sum(r.num_new + r.num_computed for r in work)
        right = layers + attention + head
        one_head = 2 * config.vocab_size * config.hidden_size
        wrong = [
            (right // 2, "A product of matrices multiplies and adds: 2 FLOPs for each value."),
            (layers + attention + one_head * new,
             "Logits are wanted after each request's last new token, not after every token."),
            (layers + attention + one_head,
             "The LM head works once for each request that needs logits."),
            (layers + attention, "The LM head is missing: 2 FLOPs for each of its values and row."),
            (layers + head, "Attention itself is missing: QK^T and PV grow with the history."),
            (layers // new + attention + head, "Every new token goes through every layer."),
            (layers // new * whole + attention + head,
             "The history went through the layers in earlier steps: only new tokens do now."),
            (layers + attention * config.num_layers + head,
             "attention_flops counts all layers already."),
            (layers + attention * 2 + head, "attention_flops has its factor 2 already."),
            (layers // config.num_layers + attention + head,
             "layer_matrix_parameters is one layer's; the model has num_layers of them."),
            (layers // 2 + attention + head // 2,
             "A product of matrices multiplies and adds: 2 FLOPs for each value and row."),
            (layers // 2 + attention + head,
             "A product of matrices multiplies and adds: 2 FLOPs for each value and token."),
        ]  # fmt: skip
        expect_count(name, step_flops, config, work, to_be=right, likely=wrong)


@check("nanoteach.cost_model.step_bytes", "Bytes that a step must move")
def check_step_bytes(step_bytes: Callable[..., int]) -> None:
    """By hand, for Qwen3-0.6B: weights 1,192,099,840 bytes, K/V of a token 114,688."""
    weights, kv, head = 1_192_099_840, 114_688, 2 * 155_582_464
    for name, work, width, right in (
        ("one decode on 1,024 tokens", [Work(1, 1024)], 2, weights + 1025 * kv),
        ("two decodes, 1,024 and 100 tokens", [Work(1, 1024), Work(1, 100)], 2,
         weights + (1025 + 101) * kv),
        ("a prompt of 512 tokens", [Work(512, 0)], 2, weights + 512 * kv),
        ("the middle of a prompt: nobody wants logits", [Work(256, 512, needs_logits=False)], 2,
         weights - head + 768 * kv),
        ("the middles of two prompts", [Work(256, 512, False), Work(100, 0, False)], 2,
         weights - head + (768 + 100) * kv),
        ("a decode beside the beginning of a prompt", [Work(1, 1024), Work(512, 0, False)], 2,
         weights + (1025 + 512) * kv),
        ("one decode in float32", [Work(1, 1024)], 4, 2 * (weights + 1025 * kv)),
        ("an empty step", [], 2, 0),
    ):  # fmt: skip
        read = sum(r.num_computed for r in work)
        written = sum(r.num_new for r in work)
        scale = width // 2
        pairs = sum(r.num_new * r.num_computed + r.num_new * (r.num_new + 1) // 2 for r in work)
        without = sum(not r.needs_logits for r in work)
        wrong = [
            (right + head // 2 * scale,
             "embedding_parameters gives values. How many bytes does each take?"),
            (right - head * scale,
             "The head is read once if anyone wants logits, else not at all."),
            (scale * (weights - head * without + (read + written) * kv),
             "The head is read once if anyone wants logits, else not at all."),
            (right + scale * written * kv,
             "The new tokens' K/V count once: as they are written."),
            (right + scale * (pairs - read - written) * kv,
             "Pairs are counted for FLOPs. Here count tokens: each has its K/V once."),
            (scale * (weights + (read + written) * kv),
             "With no logits wanted, the LM head is not read; with no work, nothing is."),
            (scale * (weights * len(work) + (read + written) * kv),
             "The weights are read once a step, however many requests share it."),
            (scale * (weights * written + (read + written) * kv),
             "The weights are read once a step, however many tokens it computes."),
            (scale * (weights + read * kv), "The new tokens' K/V are written: count them too."),
            (scale * (weights + written * kv),
             "Each decode reads the K/V of its whole history: count num_computed too."),
            (scale * weights, "K/V are missing: the history's are read, the new ones written."),
            (right // scale,
             "Count with bytes_per_value, for the weights and for K/V."),
        ]  # fmt: skip
        expect_count(name, step_bytes, QWEN, work, width, to_be=right, likely=wrong)


@check("nanoteach.cost_model.Cost.seconds", "The bound: which of the two binds")
def check_seconds(seconds: Callable[[Cost, Hardware], float]) -> None:
    """By hand, on a toy machine of 100 FLOP/s, 10 bytes/s read and 5 bytes/s copied."""
    toy = Hardware("toy", flops=100.0, read_bandwidth=10.0, copy_bandwidth=5.0, source="by hand")
    for name, cost, right in (
        ("300 FLOPs and 20 bytes", Cost(300, 20), 3.0),
        ("200 FLOPs and 30 bytes", Cost(200, 30), 3.0),
        ("700 FLOPs and 50 bytes", Cost(700, 50), 7.0),
        ("nothing", Cost(0, 0), 0.0),
    ):
        computing, moving = cost.flops / 100, cost.bytes / 10
        wrong = [
            (max(100 / cost.flops, 10 / cost.bytes) if cost.flops else None,
             "Upside down: FLOPs ÷ FLOPs a second are seconds, and so for bytes."),
            (computing + moving,
             "A perfect program computes while it moves bytes: the times overlap."),
            (max(computing, cost.bytes / 5),
             "Nearly all bytes of a step are read: take read_bandwidth."),
            (min(computing, moving),
             "A step is over when the slower of the two is done: here that is "
             + ("moving the bytes." if moving > computing else "computing.")),
        ]  # fmt: skip
        expect(name, seconds, cost, toy, to_be=right, likely=wrong)
