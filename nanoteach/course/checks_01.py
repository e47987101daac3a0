"""Checks of notebook 01: the decoder's parts, and the greedy loop."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoteach.course.checking import (
    Likely,
    Wrong,
    case,
    check,
    current_case,
    describe,
    expect,
    expect_equal,
)
from nanoteach.model import Decoder
from nanoteach.naive import NaiveGenerator
from nanoteach.types import SamplingParams


def expect_untouched(
    name: str,
    function: Callable[..., Any],
    x: Tensor,
    *args: Any,
    to_be: Tensor,
    likely: Likely,
    if_raised: str | None = None,
) -> None:
    """As `expect`, and `x` is what it was."""
    given = x.clone()
    expect(name, lambda *args: function(given, *args), *args,
           to_be=to_be, likely=likely, if_raised=if_raised)  # fmt: skip
    if not torch.equal(given, x):
        raise Wrong(
            name, "x as it was", "x changed",
            "Your function changed x, which others still need. In float32, x.float() is x itself, "
            "and a slice of x lies in x: write `y = y * ...`, not `y *= ...`.",
        )  # fmt: skip


@check("nanoteach.model.rms_norm", "RMS norm")
def check_rms_norm(rms_norm: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """torch's own; and by hand in float16, where 300 squared is too large."""
    weight = torch.tensor([1.0, 0.5, 2.0, 3.0, -1.0])
    for name, x, eps in (
        ("two rows of 5 values", torch.randn(2, 5) * torch.tensor([[1.0], [20.0]]) + 1, 1e-6),
        ("an eps of 0.5, large so that its place shows", torch.randn(3, 5), 0.5),
        ("2 tokens, 3 heads, 5 values", torch.randn(2, 3, 5) + 1, 1e-6),
        ("a row of zeros", torch.zeros(1, 5), 1e-6),
    ):
        square = x.pow(2).mean(-1, keepdim=True)
        centred = x - x.mean(-1, keepdim=True)
        total = x.pow(2).sum(-1, keepdim=True)
        wrong = [
            (x / (square + eps).sqrt(), "Each value is multiplied by its weight at the end."),
            (x / (square.sqrt() + eps) * weight, "eps goes to the mean square, under the root."),
            (x / square.sqrt() * weight, "eps is missing under the root."),
            (x / (total + eps).sqrt() * weight, "Take the mean of the squares, not their sum."),
            (x / (square + eps) * weight, "Divide by the root of the mean square."),
            (x / (x.pow(2).mean() + eps).sqrt() * weight,
             "Each row is scaled by itself: the mean is over the last dimension only."),
            (centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight,
             "That is LayerNorm. RMS norm does not subtract the mean."),
        ]  # fmt: skip
        right = F.rms_norm(x, (5,), weight, eps)
        expect_untouched(name, rms_norm, x, weight, eps, to_be=right, likely=wrong)
    half = torch.tensor([[300.0, -300.0, 300.0, 300.0]], dtype=torch.float16)
    name, ones = "values of 300 in float16", torch.ones(4, dtype=torch.float16)
    # The mean square is 90,000, its root 300.
    right = torch.tensor([[1.0, -1.0, 1.0, 1.0]], dtype=torch.float16)
    expect(
        name, rms_norm, half, ones, 1e-6, to_be=right,
        likely="300 squared is more than float16 holds: square in float32, x.float().",
    )  # fmt: skip
    got = rms_norm(half.clone(), ones, 1e-6)
    if got.dtype != torch.float16:
        raise Wrong(
            name, "float16", str(got.dtype).removeprefix("torch."),
            "Give back the dtype that x came with: .to(x.dtype). After `x = x.float()` x was "
            "overwritten, and its first dtype is lost: give the new tensor another name.",
        )  # fmt: skip


@check("nanoteach.model.apply_rotary", "RoPE at a position")
def check_apply_rotary(apply_rotary: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """A turn in the plane is a product with a complex number of length 1."""
    try:  # a half of 32, as the notebook's model has it, whatever the size of x
        apply_rotary(torch.zeros(1, 1, 64), torch.ones(1, 1, 32), torch.zeros(1, 1, 32))
        if_raised = "A head has 4 values here, not 64. The half is x.shape[-1] // 2, not 32."
    except Exception:
        if_raised = None
    cases = [
        ("the example: one token, one head [1, 2, 3, 4], a quarter turn and none",
         torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[[torch.pi / 2, 0.0]]])),
        ("3 tokens, 2 heads of 6 values", torch.randn(3, 2, 6), torch.randn(3, 1, 3)),
        ("a token at position 0: all angles are 0", torch.randn(1, 2, 6), torch.zeros(1, 1, 3)),
        ("no token at all", torch.randn(0, 2, 6), torch.zeros(0, 1, 3)),
    ]  # fmt: skip
    for name, x, angles in cases:
        cos, sin = angles.cos(), angles.sin()
        half = x.shape[-1] // 2
        points = torch.complex(x[..., :half], x[..., half:])
        turned = points * torch.polar(torch.ones_like(angles), angles)
        back = points * torch.polar(torch.ones_like(angles), -angles)
        neighbours = torch.complex(x[..., ::2], x[..., 1::2])
        neighbours = neighbours * torch.polar(torch.ones_like(angles), angles)
        a, b = x[..., :half], x[..., half:]
        wrong = [
            (halves(back), "Turned the wrong way round: which of the two products with sin is "
                           "subtracted?"),
            (torch.view_as_real(neighbours).flatten(-2),
             "That pairs neighbours. Here dimension i goes with dimension i + head_dim / 2."),
            (halves(neighbours),
             "That pairs neighbours. Here dimension i goes with dimension i + head_dim / 2."),
            (torch.cat((a * cos + b * sin, b * cos + a * sin), -1),
             "A turn keeps a point's length: one of the two products with sin is subtracted."),
            (torch.cat((a * cos - b * sin, b * cos - a * sin), -1),
             "A turn keeps a point's length: only one of the products with sin is subtracted."),
            (torch.cat((a * cos - b * sin, (a * cos - b * sin) * sin + b * cos), -1),
             "The second half is made from the new first half: use the old one for both."),
            (torch.cat((a * cos, b * sin), -1),
             "Each new value is made of both old ones: the point moves in its plane."),
            (torch.stack((turned.real, turned.imag), -1).flatten(-2),
             "Right pairs, wrong places: all first values come first, then all second ones."),
            (torch.cat((turned.imag, turned.real), -1),
             "The two halves have changed places."),
        ]  # fmt: skip
        expect_untouched(
            name, apply_rotary, x, cos, sin,
            to_be=halves(turned), likely=wrong, if_raised=if_raised,
        )  # fmt: skip


def halves(points: Tensor) -> Tensor:
    """Complex numbers as a first half of real and a second half of imaginary parts."""
    return torch.cat((points.real, points.imag), dim=-1)


@check("nanoteach.model.kv_head_map", "The K/V head of each query head")
def check_kv_head_map(kv_head_map: Callable[[int, int], list[int]]) -> None:
    """Each K/V head, written down as often as it is read."""
    for heads, kv_heads in ((6, 2), (14, 2), (8, 4), (4, 4), (3, 1), (40, 8)):
        right = [kv_head for kv_head in range(kv_heads) for _ in range(heads // kv_heads)]

        def likely(got: Any, heads: int = heads, kv_heads: int = kv_heads) -> str | None:
            if isinstance(got, Tensor):
                return "A list is wanted, not a tensor: .tolist()."
            if not isinstance(got, (list, tuple)):
                return "A list is wanted, with one K/V head for each query head."
            got = list(got)
            if any(isinstance(part, float) for part in got):
                return "These are numbers of heads, so whole numbers: use //, not /."
            if got == [head % kv_heads for head in range(heads)]:
                return "Neighbours share a K/V head. This deals them out in turn."
            if got == [head // kv_heads for head in range(heads)]:
                return (
                    "Divided by the number of K/V heads. Divide by the size of a group: the "
                    "query heads that share one."
                )
            if len(got) != heads:
                return f"There are {heads} query heads: the list has an entry for each."
            if max(got) >= kv_heads:
                return f"The K/V heads are numbered from 0 to {kv_heads - 1}."
            return None

        name = f"{heads} query heads, {kv_heads} K/V heads"
        expect(name, kv_head_map, heads, kv_heads, to_be=right, likely=likely)
        got = kv_head_map(heads, kv_heads)
        if any(isinstance(part, float) for part in got):  # 1.0 equals 1, and is no index
            raise Wrong(name, describe(right), describe(got), likely(got))


def pretended(token_ids: Any) -> int:
    """The next token, which depends on every token so far and on their order."""
    state = 0
    for token in token_ids:
        state = (31 * state + token + 7) % 101
    return state


@check("nanoteach.naive.NaiveGenerator.generate_one", "The greedy loop", stages=(1,))
def check_generate_one(generate_one: Callable[..., list[int]]) -> None:
    """The model is pretended, so that every right loop has one possible result."""
    prompt = [5, 17, 42]
    free = [pretended(prompt)]
    while len(free) < 12:
        free.append(pretended([*prompt, *free]))
    # Found by calling it: free is 12 different tokens, none of which stands in the prompt.
    end, also_end = free[4], free[7]
    for name, params, eos, right in (
        ("5 tokens, and no end token", SamplingParams(max_tokens=5), (), free[:5]),
        ("1 token", SamplingParams(max_tokens=1), (), free[:1]),
        ("an end token as the 5th", SamplingParams(max_tokens=9), (end,), free[:5]),
        ("two end tokens, the second of them as the 5th", SamplingParams(max_tokens=9),
         (also_end, end), free[:5]),
        ("an end token as the very last that was asked for", SamplingParams(max_tokens=5), (end,),
         free[:5]),
        ("ignore_eos, and an end token as the 5th",
         SamplingParams(max_tokens=9, ignore_eos=True), (end,), free[:9]),
        ("stop_token_ids with the 8th token",
         SamplingParams(max_tokens=12, stop_token_ids=[also_end]), (), free[:8]),
    ):  # fmt: skip
        case(name)
        asked: list[list[int]] = []
        generator = pretending_generator(eos, asked, params)
        own = list(prompt)
        got = generator.generate_one(own, params)
        if own != prompt:
            raise Wrong(name, f"the prompt as it was, {prompt}", f"the prompt {describe(own)}",
                        "The prompt is the caller's: make a new list, do not append to it."
                        )  # fmt: skip
        expect_equal(name, right, got, likely_of_loop(prompt, right, asked, params, eos))


def pretending_generator(
    eos: tuple[int, ...], asked: list[list[int]], params: SamplingParams
) -> NaiveGenerator:
    """A generator whose model is pretended, notes what it is asked, and does not go on forever."""
    most = params.max_tokens or 0

    def next_token(token_ids: Any) -> int:
        if len(asked) == most + 5:
            raise Wrong(
                current_case()[0], f"at most {most} tokens",
                f"a loop that asks for token {most + 6}",
                "max_tokens never stopped it: ask params.finish_reason after each token, with the "
                "number of output tokens, and stop at \"length\" too.",
            )  # fmt: skip
        asked.append(list(token_ids))
        return pretended(token_ids)

    model = cast(Decoder, type("NoModel", (), {"max_model_len": 100})())
    generator = NaiveGenerator(model, eos)
    generator.next_token = next_token  # type: ignore[method-assign]
    return generator


def likely_of_loop(
    prompt: list[int],
    right: list[int],
    asked: list[list[int]],
    params: SamplingParams,
    eos: tuple[int, ...],
) -> Callable[[Any], str | None]:
    """What is wrong with a loop, from what it asked the model and what it returned."""

    def likely(got: Any) -> str | None:
        if not isinstance(got, (list, tuple)):
            return "A list of token ids is wanted."
        got = list(got)
        if got[: len(prompt)] == prompt:
            return "Return the generated tokens alone, without the prompt, and count them alone."
        if got == right[:-1] and right[-1] in (*eos, *params.stop_token_ids):
            return "The end token belongs to the output: append first, then ask if it is over."
        if len(asked) > 1 and asked[1] == asked[0]:
            return "The model must see what it has generated: it remembers nothing."
        if len(asked) > 1 and len(asked[1]) == 1:
            return (
                "The model was asked about one token alone. It remembers nothing: give it the "
                "prompt and all of the output."
            )
        if len(asked) > 1 and asked[1][:3] != prompt:
            return "The model must see the prompt first, then the output, at every step."
        if got[: len(right)] == right and params.ignore_eos is False and right[-1] in eos:
            return (
                "It went on past an end token. There may be several of them: let "
                "params.finish_reason look at self.eos_token_ids."
            )
        if got[: len(right)] == right and right[-1] in params.stop_token_ids:
            return "A request has end tokens of its own: let params.finish_reason decide."
        if len(got) < len(right) and params.ignore_eos and got == right[: len(got)]:
            return "This request ignores the end token: let params.finish_reason decide."
        if len(got) == len(right) + 1:
            return "One too many: finish_reason counts the output tokens, the last one included."
        if len(got) == len(right) - 1:
            return "One too few: the prompt's last token gives an output token as well."
        return None

    return likely
