"""From scores to tokens: argmax for now."""

from torch import Tensor


def greedy(logits: Tensor) -> Tensor:
    """The highest-scoring token of each row: `[rows, vocab_size]` to `[rows]`."""
    return logits.argmax(dim=-1)
