"""Notebook 09: other right answers, and plausible wrong ones."""

import torch
from course_cases import second, wrong

from nanoteach.sampler import greedy, uniform
from nanoteach.sampling_filters import Scores
from nanoteach.types import MAX_LOGPROBS

RACE = "nanoteach.sampler.race"


@second(RACE)
def by_arrival_times(logits, temperatures, seeds, positions):
    winners = []
    for row, temperature, seed, position in zip(
        logits.double(), temperatures, seeds, positions, strict=True
    ):
        if temperature == 0:
            winners.append(int(row.argmax()))
            continue
        u = uniform(seed.view(1, 1), position.view(1, 1), torch.arange(len(row)))[0].double()
        rates = (row / temperature).softmax(0)
        winners.append(int((-u.log() / rates).argmin()))
    return torch.tensor(winners)


@wrong(RACE, "where is the noise?")
def takes_the_best(logits, temperatures, seeds, positions):
    return greedy(logits)


@wrong(RACE, "Where both are divided")
def cools_the_noise(logits, temperatures, seeds, positions):
    u = uniform(seeds[:, None], positions[:, None], torch.arange(logits.shape[1]))
    heat = torch.where(temperatures == 0, 1.0, temperatures)[:, None]
    noise = torch.where(temperatures[:, None] == 0, 0.0, -torch.log(-torch.log(u)))
    return greedy((logits + noise) / heat)


@wrong(RACE, "Its logarithm belongs to the scores")
def one_logarithm(logits, temperatures, seeds, positions):
    u = uniform(seeds[:, None], positions[:, None], torch.arange(logits.shape[1]))
    return greedy(logits / temperatures[:, None] - torch.log(u))


@wrong(RACE, "a small arrival time is to give a large number")
def upside_down(logits, temperatures, seeds, positions):
    u = uniform(seeds[:, None], positions[:, None], torch.arange(logits.shape[1]))
    return greedy(logits / temperatures[:, None] + torch.log(-torch.log(u)))


@wrong(RACE, "can't be divided by")
def divides_by_nothing(logits, temperatures, seeds, positions):
    u = uniform(seeds[:, None], positions[:, None], torch.arange(logits.shape[1]))
    return greedy(logits / temperatures[:, None] - torch.log(-torch.log(u)))


@wrong(RACE, "a seed and a position of its own")
def one_noise_for_all(logits, temperatures, seeds, positions):
    u = uniform(seeds[:1, None], positions[:1, None], torch.arange(logits.shape[1]))
    heat = torch.where(temperatures == 0, 1.0, temperatures)[:, None]
    noise = torch.where(temperatures[:, None] == 0, 0.0, -torch.log(-torch.log(u)))
    return greedy(logits / heat + noise)


@wrong(RACE, "nothing else may come in")
def dice_of_its_own(logits, temperatures, seeds, positions):
    u = torch.rand_like(logits)
    return greedy(logits / temperatures[:, None].clamp(min=1e-9) - torch.log(-torch.log(u)))


@wrong(RACE, "wants them as [rows, 1]")
def flat_seeds(logits, temperatures, seeds, positions):
    u = uniform(seeds, positions, torch.arange(logits.shape[1]))
    return greedy(logits / temperatures[:, None] - torch.log(-torch.log(u)))


@wrong(RACE, "no noise there")
def next_to_nothing(logits, temperatures, seeds, positions):
    u = uniform(seeds[:, None], positions[:, None], torch.arange(logits.shape[1]))
    return greedy(logits / temperatures[:, None].clamp(min=1e-5) - torch.log(-torch.log(u)))


@wrong(RACE, "The winner's id is wanted")
def how_far_it_came(logits, temperatures, seeds, positions):
    u = uniform(seeds[:, None], positions[:, None], torch.arange(logits.shape[1]))
    return (logits / temperatures[:, None] - torch.log(-torch.log(u))).amax(dim=-1)


TOP_K = "nanoteach.sampling_filters.keep_top_k"


@second(TOP_K)
def row_by_row(top_k, vocab_size):
    mask = torch.ones(len(top_k), vocab_size, dtype=torch.bool)
    for row, k in enumerate(top_k.tolist()):
        if k:
            mask[row, k:] = False
    return mask


@wrong(TOP_K, "Places are counted from 0")
def one_more(top_k, vocab_size):
    return (torch.arange(vocab_size) <= top_k[:, None]) | (top_k[:, None] == 0)


@wrong(TOP_K, "0 leaves all of them")
def nothing_left(top_k, vocab_size):
    return torch.arange(vocab_size) < top_k[:, None]


@wrong(TOP_K, "give it a second dimension")
def without_columns(top_k, vocab_size):
    places = torch.arange(vocab_size).expand(len(top_k), vocab_size)
    return (places < top_k) | (top_k == 0)


@wrong(TOP_K, "True is for what stays")
def the_other_way_round(top_k, vocab_size):
    return (torch.arange(vocab_size) >= top_k[:, None]) & (top_k[:, None] != 0)


@wrong(TOP_K, "The result is a mask")
def ones_and_zeros(top_k, vocab_size):
    return ((torch.arange(vocab_size) < top_k[:, None]) | (top_k[:, None] == 0)).int()


TOP_P = "nanoteach.sampling_filters.keep_top_p"


@second(TOP_P)
def by_counting(probabilities, top_p):
    rows, vocab_size = probabilities.shape
    mask = torch.zeros(rows, vocab_size, dtype=torch.bool)
    for row in range(rows):
        limit, so_far = float(top_p[row]), 0.0
        for place in range(vocab_size):
            if place and limit < 1 and so_far >= limit:
                break
            mask[row, place] = True
            so_far += float(probabilities[row, place])
    return mask


@second(TOP_P)
def by_searching(probabilities, top_p):
    limit = top_p[:, None]
    count = torch.searchsorted(probabilities.cumsum(-1), limit) + 1
    return (torch.arange(probabilities.shape[1]) < count) | (limit >= 1)


@wrong(TOP_P, "The result is a mask")
def ones_and_zeros_again(probabilities, top_p):
    before = probabilities.cumsum(-1).roll(1, -1)
    before[:, 0] = -1
    return ((before < top_p[:, None]) | (top_p[:, None] >= 1)).float()


@wrong(TOP_P, "Here they have as much")
def one_more_where_it_is_just_enough(probabilities, top_p):
    before = probabilities.cumsum(-1) - probabilities
    return (before <= top_p[:, None]) | (top_p[:, None] >= 1)


@wrong(TOP_P, "Before the first token there is nothing")
def rolled_and_left(probabilities, top_p):
    return (probabilities.cumsum(-1).roll(1, -1) < top_p[:, None]) | (top_p[:, None] >= 1)


@wrong(TOP_P, "all of its own row")
def one_for_all(probabilities, top_p):
    before = probabilities.cumsum(-1).roll(1, -1)
    before[:, 0] = -1
    return (before < top_p[:, None]) | (top_p >= 1).any()


@wrong(TOP_P, "The token that reaches top_p stays")
def drops_the_one_that_crosses(probabilities, top_p):
    keep = probabilities.cumsum(-1) <= top_p[:, None]
    keep[:, 0] = True
    return keep | (top_p[:, None] >= 1)


@wrong(TOP_P, "The token that reaches top_p stays")
def may_keep_nothing(probabilities, top_p):
    return probabilities.cumsum(-1) <= top_p[:, None]


@wrong(TOP_P, "Add up from the best one on")
def from_the_wrong_end(probabilities, top_p):
    return probabilities.flip(-1).cumsum(-1).flip(-1) > top_p[:, None]


@wrong(TOP_P, "not each one")
def each_by_itself(probabilities, top_p):
    return probabilities >= top_p[:, None]


@wrong(TOP_P, "1 leaves them all")
def one_cuts_off_the_rare(probabilities, top_p):
    keep = probabilities.cumsum(-1) - probabilities < top_p[:, None]
    keep[:, 0] = True
    return keep


@wrong(TOP_P, "The first token always stays")
def too_small_a_limit(probabilities, top_p):
    before = probabilities.cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    return (before < top_p[:, None]) | (top_p[:, None] >= 1)


SCORE = "nanoteach.sampling_filters.score"


@second(SCORE)
def token_by_token(ranked, order, tokens):
    import math

    best = min(MAX_LOGPROBS, ranked.shape[1])
    told = ([], [], [])
    for scores, ids, token in zip(ranked.tolist(), order.tolist(), tokens.tolist(), strict=True):
        total = scores[0] + math.log(sum(math.exp(s - scores[0]) for s in scores))
        places = [ids.index(token), *range(best)]
        told[0].append([ids[place] for place in places])
        told[1].append([place + 1 for place in places])
        told[2].append([scores[place] - total for place in places])
    return Scores(*(torch.tensor(column) for column in told))


@wrong(SCORE, "The drawn token comes first")
def the_best_alone(ranked, order, tokens):
    best = min(MAX_LOGPROBS, ranked.shape[1])
    ranks = torch.arange(1, best + 1).expand(len(ranked), -1)
    return Scores(order[:, :best], ranks, ranked.log_softmax(-1)[:, :best])


@wrong(SCORE, "The drawn token comes first")
def the_drawn_one_last(ranked, order, tokens):
    own = (order == tokens[:, None]).int().argmax(-1, keepdim=True)
    best = torch.arange(min(MAX_LOGPROBS, ranked.shape[1])).expand(len(own), -1)
    places = torch.cat([best, own], 1)
    return Scores(order.gather(1, places), places + 1, ranked.log_softmax(-1).gather(1, places))


@wrong(SCORE, "where `order` equals it")
def a_token_for_a_place(ranked, order, tokens):
    best = torch.arange(min(MAX_LOGPROBS, ranked.shape[1])).expand(len(order), -1)
    places = torch.cat([order.gather(1, tokens[:, None]), best], 1)
    return Scores(order.gather(1, places), places + 1, ranked.log_softmax(-1).gather(1, places))


@wrong(SCORE, "fewer tokens than MAX_LOGPROBS")
def always_twenty(ranked, order, tokens):
    own = (order == tokens[:, None]).int().argmax(-1, keepdim=True)
    places = torch.cat([own, torch.arange(MAX_LOGPROBS).expand(len(own), -1)], 1)
    return Scores(order.gather(1, places), places + 1, ranked.log_softmax(-1).gather(1, places))


@wrong(SCORE, "Ranks are counted from 1")
def ranks_from_0(ranked, order, tokens):
    own = (order == tokens[:, None]).int().argmax(-1, keepdim=True)
    best = torch.arange(min(MAX_LOGPROBS, ranked.shape[1])).expand(len(own), -1)
    places = torch.cat([own, best], 1)
    return Scores(order.gather(1, places), places, ranked.log_softmax(-1).gather(1, places))


@wrong(SCORE, "These are scores")
def scores_for_logprobs(ranked, order, tokens):
    own = (order == tokens[:, None]).int().argmax(-1, keepdim=True)
    best = torch.arange(min(MAX_LOGPROBS, ranked.shape[1])).expand(len(own), -1)
    places = torch.cat([own, best], 1)
    return Scores(order.gather(1, places), places + 1, ranked.gather(1, places))


@wrong(SCORE, "not over what is picked")
def over_what_is_told(ranked, order, tokens):
    own = (order == tokens[:, None]).int().argmax(-1, keepdim=True)
    best = torch.arange(min(MAX_LOGPROBS, ranked.shape[1])).expand(len(own), -1)
    places = torch.cat([own, best], 1)
    picked = ranked.gather(1, places)
    return Scores(order.gather(1, places), places + 1, picked.log_softmax(-1))


@wrong(SCORE, "`order` has the tokens")
def places_for_tokens(ranked, order, tokens):
    own = (order == tokens[:, None]).int().argmax(-1, keepdim=True)
    best = torch.arange(min(MAX_LOGPROBS, ranked.shape[1])).expand(len(own), -1)
    places = torch.cat([own, best], 1)
    return Scores(places, places + 1, ranked.log_softmax(-1).gather(1, places))
