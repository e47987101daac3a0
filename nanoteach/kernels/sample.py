"""From hidden states to the next tokens, without writing the scores where it can be helped.

At a temperature of 0 the token with the highest score wins. Above it, every token runs a race: it
draws a time from an exponential distribution whose rate is its probability, and the earliest wins.
Taking logarithms, that is the largest of score / temperature - log(-log(u)): no sum over the
vocabulary, no second pass, and each block of the vocabulary can find its own best.

The noise u depends on the request's seed, the token's position and the token id alone (Philox,
Salmon et al., 2011), so a request samples the same whatever else is in its batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoteach.kernels.thin_linear import input_row
from nanoteach.triton_launch import options, wait_for_inputs


@triton.jit
def race(scores, tokens, seed, position, temperature):
    """Each token's place in the race: the largest wins."""
    bits, _, _, _ = tl.philox(
        seed.to(tl.uint32, bitcast=True).to(tl.uint64),
        tokens.to(tl.uint32),
        position.to(tl.uint32),
        0,
        0,
    )
    u = tl.maximum(tl.uint_to_uniform_float(bits), 1e-10)
    greedy = temperature == 0.0
    noise = tl.where(greedy, 0.0, -tl.log(-tl.log(u)))
    return scores / tl.where(greedy, 1.0, temperature) + noise


@triton.jit
def lm_head_kernel(
    hidden, weight, norm, seeds, positions, temperatures, best, best_token, eps,
    IN: tl.constexpr, VOCAB: tl.constexpr, BLOCK_IN: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For one request. Program: every so many rows of the vocabulary, and the best of them.

    Few programs that go on and on, each with the next rows on their way: the scores of one row
    are a sum over its 1,024 products, and waiting for it must not hold up the reading.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_IN)
    inside = columns < IN
    norm_row = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    value = input_row(hidden, norm_row, columns, inside, eps, IN, True)
    seed, position, temperature = tl.load(seeds), tl.load(positions), tl.load(temperatures)
    best_scores = tl.full([ROWS], float("-inf"), tl.float32)
    best_rows = tl.zeros([ROWS], tl.int32)
    for block in tl.range(program, tl.cdiv(VOCAB, ROWS), num_programs, num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)
        mask = (rows < VOCAB)[:, None] & inside[None, :]
        w_at = weight + rows[:, None].to(tl.int64) * IN + columns[None, :]
        scores = tl.sum(tl.load(w_at, mask=mask, other=0.0).to(tl.float32) * value[None, :], 1)
        scores = race(scores, rows, seed, position, temperature)
        better = (scores > best_scores) & (rows < VOCAB)
        best_scores = tl.where(better, scores, best_scores)
        best_rows = tl.where(better, rows, best_rows)
    top, index = tl.max(best_scores, 0, return_indices=True)
    tl.store(best + program, top)
    tl.store(best_token + program, tl.sum(tl.where(tl.arange(0, ROWS) == index, best_rows, 0), 0))


@triton.jit
def scores_kernel(
    logits, seeds, positions, temperatures, best, best_token,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (request, block of the vocabulary)."""
    row, block = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    logits_at = logits + row.to(tl.int64) * VOCAB + tokens
    scores = tl.load(logits_at, mask=tokens < VOCAB, other=0.0).to(tl.float32)
    scores = race(
        scores, tokens, tl.load(seeds + row), tl.load(positions + row), tl.load(temperatures + row)
    )
    # A score that is no number (a padded row's, say) never wins: it would make any place the best.
    scores = tl.where((tokens < VOCAB) & (scores == scores), scores, float("-inf"))
    top, index = tl.max(scores, 0, return_indices=True)
    tl.store(best + row * tl.num_programs(1) + block, top)
    tl.store(best_token + row * tl.num_programs(1) + block, block * BLOCK + index)


@triton.jit
def best_kernel(best, best_token, out, num_blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (request): the best of the blocks' best."""
    row, blocks = tl.program_id(0), tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    best_at = best + row * num_blocks + blocks
    scores = tl.load(best_at, mask=blocks < num_blocks, other=float("-inf"))
    _, index = tl.max(scores, 0, return_indices=True)
    tl.store(out + row, tl.load(best_token + row * num_blocks + index))


def pick(best: Tensor, best_token: Tensor, out: Tensor, pdl: bool) -> None:
    """The best of the blocks' best `[requests, blocks]`."""
    num_blocks = best.shape[1]
    best_kernel[(best.shape[0],)](
        best,
        best_token,
        out,
        num_blocks,
        BLOCK=triton.next_power_of_2(num_blocks),
        num_warps=8,
        **options(pdl),
    )


def lm_head_and_sample(
    hidden: Tensor, weight: Tensor, norm: Tensor, eps: float, seeds: Tensor, positions: Tensor,
    temperatures: Tensor, out: Tensor, pdl: bool = False, rows: int = 2, num_warps: int = 1,
    programs: int = 2112, stages: int = 4,
) -> None:  # fmt: skip
    """For one request: the scores are never written. Its token id goes to out, int32 `[1]`."""
    vocab, width = weight.shape
    programs = min(programs, triton.cdiv(vocab, rows))
    best = torch.empty(1, programs, dtype=torch.float32, device=hidden.device)
    best_token = torch.empty(1, programs, dtype=torch.int32, device=hidden.device)
    lm_head_kernel[(programs,)](
        hidden, weight, norm, seeds, positions, temperatures, best, best_token, eps, IN=width,
        VOCAB=vocab, BLOCK_IN=triton.next_power_of_2(width), ROWS=rows, STAGES=stages,
        num_warps=num_warps, **options(pdl),
    )  # fmt: skip
    pick(best, best_token, out, pdl)


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, out: Tensor,
    pdl: bool = False,
) -> None:  # fmt: skip
    """From scores `[requests, vocab]`: token ids go to out, int32 `[requests]`."""
    requests, vocab = logits.shape
    block = min(8192, triton.next_power_of_2(vocab))
    num_blocks = triton.cdiv(vocab, block)
    best = torch.empty(requests, num_blocks, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(requests, num_blocks, dtype=torch.int32, device=logits.device)
    scores_kernel[(requests, num_blocks)](
        logits, seeds, positions, temperatures, best, best_token, VOCAB=vocab, BLOCK=block,
        num_warps=8, **options(pdl),
    )  # fmt: skip
    pick(best, best_token, out, pdl)
