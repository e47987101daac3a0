"""Second and wrong answers to the exercises of notebook 07; see course_cases.py."""

from course_cases import second, wrong

ATTEND = "nanoteach.tiled_attention.attend_tile"


@second(ATTEND)
def through_logarithms(running, scores, values):
    every = torch.cat((running.largest.unsqueeze(-1), scores), dim=-1)
    largest = every.amax(-1, keepdim=True)
    weights = (every - largest).exp()
    old, new = weights[..., :1], weights[..., 1:]
    total = (running.total.unsqueeze(-1) * old).squeeze(-1) + new.sum(-1)
    weighted = running.weighted * old + (new.unsqueeze(-1) * values.unsqueeze(-3)).sum(-2)
    return Running(largest.squeeze(-1), total, weighted)


@wrong(ATTEND, "both sums must be scaled down to the new one")
def never_rescales(running, scores, values):
    largest = torch.maximum(running.largest, scores.amax(-1))
    weights = torch.exp(scores - largest.unsqueeze(-1))
    return Running(largest, running.total + weights.sum(-1), running.weighted + weights @ values)


@wrong(ATTEND, "`total` is scaled to the new largest score, and `weighted` is not")
def rescales_total_only(running, scores, values):
    largest = torch.maximum(running.largest, scores.amax(-1))
    rescale = torch.exp(running.largest - largest)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    return Running(
        largest, running.total * rescale + weights.sum(-1), running.weighted + weights @ values
    )


@wrong(ATTEND, "`weighted` is scaled to the new largest score, and `total` is not")
def rescales_weighted_only(running, scores, values):
    largest = torch.maximum(running.largest, scores.amax(-1))
    rescale = torch.exp(running.largest - largest)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    return Running(
        largest,
        running.total + weights.sum(-1),
        running.weighted * rescale.unsqueeze(-1) + weights @ values,
    )


@wrong(ATTEND, "may be one of an earlier tile")
def the_tile_s_largest(running, scores, values):
    largest = scores.amax(-1)
    rescale = torch.exp(running.largest - largest)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    return Running(
        largest,
        running.total * rescale + weights.sum(-1),
        running.weighted * rescale.unsqueeze(-1) + weights @ values,
    )


@wrong(ATTEND, "exp(old - new), which is at most 1")
def upside_down(running, scores, values):
    largest = torch.maximum(running.largest, scores.amax(-1))
    rescale = torch.where(running.total > 0, torch.exp(largest - running.largest), 1.0)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    return Running(
        largest,
        running.total * rescale + weights.sum(-1),
        running.weighted * rescale.unsqueeze(-1) + weights @ values,
    )


@wrong(ATTEND, "nan: from -inf to the first score")
def upside_down_from_the_first(running, scores, values):
    largest = torch.maximum(running.largest, scores.amax(-1))
    rescale = torch.exp(largest - running.largest)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    return Running(
        largest,
        running.total * rescale + weights.sum(-1),
        running.weighted * rescale.unsqueeze(-1) + weights @ values,
    )


@wrong(ATTEND, "Return a Running(largest, total, weighted)")
def a_plain_tuple(running, scores, values):
    largest = torch.maximum(running.largest, scores.amax(-1))
    rescale = torch.exp(running.largest - largest)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    total = running.total * rescale + weights.sum(-1)
    return largest, total, running.weighted * rescale.unsqueeze(-1) + weights @ values


@wrong(ATTEND, "is a `return` missing?")
def returns_nothing(running, scores, values):
    largest = torch.maximum(running.largest, scores.amax(-1))
    weights = torch.exp(scores - largest.unsqueeze(-1))
    Running(largest, running.total + weights.sum(-1), running.weighted + weights @ values)


@wrong(ATTEND, "must go on counting")
def forgets_what_was(running, scores, values):
    largest = torch.maximum(running.largest, scores.amax(-1))
    weights = torch.exp(scores - largest.unsqueeze(-1))
    return Running(largest, weights.sum(-1), weights @ values)


@wrong(ATTEND, "Do not divide here")
def divides(running, scores, values):
    largest = torch.maximum(running.largest, scores.amax(-1))
    rescale = torch.exp(running.largest - largest)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    total = running.total * rescale + weights.sum(-1)
    weighted = running.weighted * rescale.unsqueeze(-1) + weights @ values
    return Running(largest, total, weighted / total.unsqueeze(-1))


@wrong(ATTEND, "Leave the arguments as they are")
def in_place(running, scores, values):
    largest = torch.maximum(running.largest, scores.amax(-1))
    rescale = torch.exp(running.largest - largest)
    weights = torch.exp(scores - largest.unsqueeze(-1))
    running.total.mul_(rescale).add_(weights.sum(-1))
    running.weighted.mul_(rescale.unsqueeze(-1)).add_(weights @ values)
    return Running(largest, running.total, running.weighted)


COMBINE = "nanoteach.tiled_attention.combine"


@second(COMBINE)
def by_logsumexp(outs, log_sums):
    share = (log_sums - torch.logsumexp(log_sums, dim=0, keepdim=True)).exp()
    return torch.einsum("s...,s...d->...d", share, outs)


@wrong(COMBINE, "The splits don't count alike")
def plain_mean(outs, log_sums):
    return outs.mean(0)


@wrong(COMBINE, "inf / inf is nan")
def overflows(outs, log_sums):
    weights = log_sums.exp().unsqueeze(-1)
    return (outs * weights).sum(0) / weights.sum(0)


@wrong(COMBINE, "take `exp` first")
def logarithms_for_weights(outs, log_sums):
    weights = log_sums.unsqueeze(-1)
    return (outs * weights).sum(0) / weights.sum(0)


@wrong(COMBINE, "divide by the sum of all")
def never_divides(outs, log_sums):
    return (outs * log_sums.exp().unsqueeze(-1)).sum(0)


@wrong(COMBINE, "must add up to 1: divide by their sum")
def takes_off_the_largest_and_never_divides(outs, log_sums):
    weights = torch.exp(log_sums - log_sums.amax(0))
    return (outs * weights.unsqueeze(-1)).sum(0)


@wrong(COMBINE, "These are their logarithms")
def logarithms_of_the_shares(outs, log_sums):
    return (outs * torch.log_softmax(log_sums, 0).unsqueeze(-1)).sum(0)


@wrong(COMBINE, "not the rows: dimension 0")
def over_rows(outs, log_sums):
    return (outs * torch.softmax(log_sums, dim=-1).unsqueeze(-1)).sum(0)


@wrong(COMBINE, "What is the share of each")
def adds_averages(outs, log_sums):
    return outs.sum(0)


@wrong(COMBINE, "An empty split has the log sum -inf")
def empty_is_nan(outs, log_sums):
    return (outs * (torch.softmax(log_sums, 0) + 0 * log_sums).unsqueeze(-1)).sum(0)


SPLITS = "nanoteach.tiled_attention.choose_splits"


@second(SPLITS)
def the_largest_that_fits(num_seqs, num_kv_heads, longest):
    def fits(n):
        enough = num_seqs * num_kv_heads * n <= 528 and (n // 2) * TILE_KEYS < longest
        return n == 1 or (n <= MAX_SPLITS and enough)

    return max(n for n in (1, 2, 4, 8, 16, 32) if fits(n))


@wrong(SPLITS, "ask this rule of the number that you double to")
def looks_before_doubling(num_seqs, num_kv_heads, longest):
    splits = 1
    while (
        splits < MAX_SPLITS
        and num_seqs * num_kv_heads * splits <= 528
        and splits * TILE_KEYS < longest
    ):
        splits *= 2
    return splits


@wrong(SPLITS, "The third rule is about half the parts: 16 x 64 = 1,024 is not less than 200")
def whatever_the_history(num_seqs, num_kv_heads, longest):
    splits = 1
    while splits < MAX_SPLITS and num_seqs * num_kv_heads * splits * 2 <= 528:
        splits *= 2
    return splits


@wrong(SPLITS, "programs are more than 528")
def whatever_the_batch(num_seqs, num_kv_heads, longest):
    splits = 1
    while splits < MAX_SPLITS and splits * TILE_KEYS < longest:
        splits *= 2
    return splits


@wrong(SPLITS, "Never more than MAX_SPLITS")
def without_end(num_seqs, num_kv_heads, longest):
    splits = 1
    while num_seqs * num_kv_heads * splits * 2 <= 528 and splits * TILE_KEYS < longest:
        splits *= 2
    return splits


@wrong(SPLITS, "2 x 64 = 128 is less than 200")
def third_rule_of_the_doubled_number(num_seqs, num_kv_heads, longest):
    splits = 1
    while (
        splits < MAX_SPLITS
        and num_seqs * num_kv_heads * splits * 2 <= 528
        and splits * 2 * TILE_KEYS < longest
    ):
        splits *= 2
    return splits


@wrong(SPLITS, "2 x 64 = 128 is not less than 128")
def third_rule_with_equality(num_seqs, num_kv_heads, longest):
    splits = 1
    while (
        splits < MAX_SPLITS
        and num_seqs * num_kv_heads * splits * 2 <= 528
        and splits * TILE_KEYS <= longest
    ):
        splits *= 2
    return splits


@wrong(SPLITS, "2 x 64 = 128 is less than 129")
def no_more_parts_than_tiles(num_seqs, num_kv_heads, longest):
    tiles, splits = -(-longest // TILE_KEYS), 1
    while splits * 2 <= min(MAX_SPLITS, tiles) and num_seqs * num_kv_heads * splits * 2 <= 528:
        splits *= 2
    return splits


@wrong(SPLITS, "It never is 0")
def nothing_where_nothing_is_cut(num_seqs, num_kv_heads, longest):
    fits = [n for n in (2, 4, 8, 16, 32)
            if num_seqs * num_kv_heads * n <= 528 and n // 2 * TILE_KEYS < longest]  # fmt: skip
    return max(fits, default=0)


@wrong(SPLITS, "give an int")
def not_counted(num_seqs, num_kv_heads, longest):
    splits = 1
    while (
        splits < MAX_SPLITS
        and num_seqs * num_kv_heads * splits * 2 <= 528
        and splits * TILE_KEYS < longest
    ):
        splits *= 2
    return splits / 1


@wrong(SPLITS, "3 is not a power of two")
def no_power_of_two(num_seqs, num_kv_heads, longest):
    tiles = -(-longest // TILE_KEYS)
    return min(MAX_SPLITS, tiles, max(1, 528 // max(1, num_seqs * num_kv_heads)))


@wrong(SPLITS, "don't divide by `num_seqs`")
def divides_by_the_sequences(num_seqs, num_kv_heads, longest):
    splits = 1
    while (
        splits < MAX_SPLITS
        and splits * 2 <= 528 // (num_seqs * num_kv_heads)
        and splits * TILE_KEYS < longest
    ):
        splits *= 2
    return splits


TILES = "nanoteach.tiled_attention.tiles_of"


@second(TILES)
def by_counting_tiles(query_lens, first_seq, tile_tokens):
    found = []
    for seq in range(len(query_lens)):
        for tile in range(-(-query_lens[seq] // tile_tokens)):
            found += [(seq + first_seq, tile * tile_tokens)]
    return found


@wrong(TILES, "may be partly full")
def only_full_ones(query_lens, first_seq, tile_tokens):
    return [
        (first_seq + i, tile * tile_tokens)
        for i, n in enumerate(query_lens)
        for tile in range(n // tile_tokens)
    ]


@wrong(TILES, "need no tile more")
def one_too_many(query_lens, first_seq, tile_tokens):
    return [
        (first_seq + i, tile * tile_tokens)
        for i, n in enumerate(query_lens)
        for tile in range(n // tile_tokens + 1)
    ]


@wrong(TILES, "the decodes before it")
def numbers_from_0(query_lens, first_seq, tile_tokens):
    return [(seq, start) for seq, n in enumerate(query_lens) for start in range(0, n, tile_tokens)]


@wrong(TILES, "not the tile's number")
def numbers_of_tiles(query_lens, first_seq, tile_tokens):
    return [
        (first_seq + i, tile)
        for i, n in enumerate(query_lens)
        for tile in range(-(-n // tile_tokens))
    ]


@wrong(TILES, "each sequence begins a new one")
def through_the_step(query_lens, first_seq, tile_tokens):
    found, begin = [], 0
    ends = [sum(query_lens[: i + 1]) for i in range(len(query_lens))]
    for begin in range(0, sum(query_lens), tile_tokens):
        seq = next(i for i, end in enumerate(ends) if begin < end)
        found.append((first_seq + seq, begin))
    return found


@wrong(TILES, "the decodes are not in it")
def leaves_out_decodes_that_are_not_there(query_lens, first_seq, tile_tokens):
    return [
        (seq, start)
        for seq, n in enumerate(query_lens[first_seq:], first_seq)
        for start in range(0, n, tile_tokens)
    ]


@wrong(TILES, "Return a list of pairs")
def a_generator(query_lens, first_seq, tile_tokens):
    for i, n in enumerate(query_lens):
        for start in range(0, n, tile_tokens):
            yield first_seq + i, start


@wrong(TILES, "Count the new tokens of each sequence from 0")
def counted_through(query_lens, first_seq, tile_tokens):
    found, before = [], 0
    for seq, n in enumerate(query_lens, first_seq):
        found += [(seq, before + start) for start in range(0, n, tile_tokens)]
        before += n
    return found
