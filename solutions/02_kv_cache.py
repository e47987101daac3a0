"""Notebook 02, answered. `python solutions/02_kv_cache.py` checks every answer."""

from nanoteach.course import exercise
from nanoteach.kv_cache import ContiguousMetadata

# Assigning to `self.k[layer][slot_mapping]` writes into the cache: `self.k[layer]` is a view, and
# an assignment to chosen rows of a view changes what it views. Common wrong turns: keeping K and
# forgetting V; `self.k[layer][slot_mapping].copy_(k)`, which selects first, so copies, and then
# changes the copy; and one slice from the first slot on, which is right for one row, and wrong as
# soon as two rows decode, since their slots do not follow one another.


@exercise("nanoteach.kv_cache.ContiguousKVCache.append")
def append(self, layer: int, k, v, slot_mapping) -> None:
    """Write the new tokens' K/V `[num_tokens, num_kv_heads, head_dim]` to their slots."""
    self.k[layer][slot_mapping] = k
    self.v[layer][slot_mapping] = v


# The newest token sees its whole row, itself included, and nothing that lies behind the row's end.
# Common wrong turns: is_causal's answer, key 0 alone, since with one query the causal triangle is
# lined up at the top left; one key too many (`<=`), which lets in what an older request left there;
# one too few, which hides the token from itself; a mask of 0.0 and 1.0, which SDPA adds to the
# scores.


@exercise("nanoteach.kv_cache.decode_mask")
def decode_mask(seq_lens: list[int], width: int):
    """True where row i has a token: `[rows, width]`."""
    columns = torch.arange(width)[None, :]
    lengths = torch.tensor(seq_lens)[:, None]
    return columns < lengths


# Row i begins at slot i * row_len, and its new tokens are the last of its seq_lens[i] tokens.
# Common wrong turns: positions from 0 on for a decoded token, which writes it over the prompt's
# first; one slot late, by taking seq_lens[i] for the new token's position, where it is the count;
# and rows as close together as they are long now, which moves them from step to step.


@exercise("nanoteach.kv_cache.ContiguousKVCache.plan")
def plan(self, query_lens: list[int], seq_lens: list[int]) -> ContiguousMetadata:
    """Find a slot for each new token: row i grows to `seq_lens[i]`."""
    slots = []
    for row, (num_new, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        start = row * self.row_len
        slots += range(start + length - num_new, start + length)
    device = self.k.device
    mask = decode_mask(seq_lens, max(seq_lens)).to(device)
    slot_mapping = torch.tensor(slots, device=device)
    return ContiguousMetadata(query_lens, seq_lens, slot_mapping=slot_mapping, mask=mask)
