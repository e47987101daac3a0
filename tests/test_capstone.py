"""The capstone: the score is the same everywhere, rules hold, and policies are told what broke."""

import ast
import dataclasses
from collections import deque
from typing import ClassVar

import pytest
from course_cases import ROOT

from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.course import capstone
from nanoteach.course.capstone import WORKLOADS, Result, percentile, play, score
from nanoteach.course.pictures import Request
from nanoteach.scheduler import Scheduler

SMALL = dataclasses.replace(
    WORKLOADS[0],
    name="small",
    requests=(*[Request(20, 30)] * 6, Request(900, 5, 0.001), Request(40, 20, 0.002)),
    num_blocks=80,
)


def on_time() -> type[Scheduler]:
    """The policy out of the solutions, without running the answers beside it."""
    tree = ast.parse((ROOT / "solutions/06_chunked_prefill.py").read_text(encoding="utf-8"))
    kept = [node for node in tree.body if isinstance(node, (ast.ImportFrom, ast.ClassDef))]
    names: dict[str, type[Scheduler]] = {}
    exec(compile(ast.Module(kept, []), "solutions", "exec"), names)
    return names["OnTime"]


@pytest.fixture(scope="module")
def scores() -> dict[str, list[Result]]:
    return {
        "prompts first": score(Scheduler, 8192),
        "stage 6, 512": score(ChunkedPrefillScheduler, 512),
        "on time": score(on_time(), 640),
    }


@pytest.fixture(scope="module")
def fixed() -> dict[int, list[Result]]:
    """Stage 6 with each budget that the notebook tries."""
    return {budget: score(ChunkedPrefillScheduler, budget) for budget in capstone.BUDGETS}


def test_the_baselines_play_by_the_rules_and_the_better_policy_wins(scores):
    assert not [r.broken for results in scores.values() for r in results if r.broken]
    points = {name: capstone.points(results) for name, results in scores.items()}
    assert points["prompts first"] < points["stage 6, 512"] < points["on time"]
    for first, chunked in zip(scores["prompts first"], scores["stage 6, 512"], strict=True):
        assert chunked.p99_itl < first.p99_itl / 2


def test_no_fixed_budget_is_right_for_all_and_a_policy_beats_the_best(scores, fixed):
    def best(place: int) -> int:
        return max(fixed, key=lambda budget: fixed[budget][place].points)

    assert min(capstone.BUDGETS) == 64 and max(capstone.BUDGETS) == 2048
    assert (best(0), best(1), best(2)) == (768, 256, 512)
    most = max(capstone.points(results) for results in fixed.values())
    assert capstone.points(scores["on time"]) > 1.07 * most
    of_each = sum(fixed[best(place)][place].points for place in range(3))
    assert capstone.points(scores["on time"]) > of_each
    assert capstone.points(score(on_time(), 1024)) > 1.05 * most  # and not by that one number


def test_the_points_of_each_budget_are_shown_with_the_best_ones_starred(fixed):
    lines = capstone.points_table(fixed).splitlines()
    assert lines[0].split() == ["budget", "chat", "documents", "burst", "together"]
    assert len(lines) == len(capstone.BUDGETS) + 2
    starred = [line.split() for line in lines[1:-1] if "*" in line]
    assert [row[0] for row in starred] == ["256", "288", "512", "768"]
    assert sum("*" in cell for row in starred for cell in row) == 4


def test_a_policy_is_told_the_target():
    class Asks(ChunkedPrefillScheduler):
        seen: ClassVar[list[float]] = []

        def schedule(self):
            self.seen.append(self.target)
            return super().schedule()

    assert not play(Asks, SMALL, 64).broken
    assert set(Asks.seen) == {SMALL.target}


def test_the_ttft_is_told_and_not_scored(scores):
    first, chunked = scores["prompts first"][1], scores["stage 6, 512"][1]
    assert 0 < first.mean_ttft < chunked.mean_ttft
    assert dataclasses.replace(chunked, mean_ttft=9.0).points == chunked.points


def test_the_same_score_twice(scores):
    assert play(ChunkedPrefillScheduler, WORKLOADS[2], 512) == scores["stage 6, 512"][2]


def test_the_workloads_are_what_the_notebook_says():
    chat, documents, burst = WORKLOADS
    assert [w.name for w in WORKLOADS] == ["chat", "documents", "burst"]
    assert all(50 <= r.prompt_len <= 1500 for r in chat.requests)
    assert sum(3000 <= r.prompt_len <= 8000 for r in documents.requests) == 24
    assert len(burst.requests) == 96 and {r.arrival for r in burst.requests} == {0.0}
    asked = sum(r.prompt_len + r.max_tokens for r in burst.requests)
    assert 2 < asked / (16 * burst.num_blocks) < 4
    longest = max(r.prompt_len + r.max_tokens for w in WORKLOADS for r in w.requests)
    assert longest <= capstone.MOST_TOKENS


def test_points_are_cut_in_proportion_to_the_target():
    on_target = Result(WORKLOADS[0], 1000.0, WORKLOADS[0].target)
    assert on_target.points == 1000
    assert dataclasses.replace(on_target, p99_itl=2 * WORKLOADS[0].target).points == 500
    assert dataclasses.replace(on_target, p99_itl=WORKLOADS[0].target / 9).points == 1000
    assert dataclasses.replace(on_target, broken="a rule").points == 0
    assert percentile(list(range(1, 101)), 0.99) == 99
    assert percentile([5.0], 0.99) == 5


class OverBudget(ChunkedPrefillScheduler):
    def schedule(self):
        self.max_num_batched_tokens += 1
        return super().schedule()


class Twice(ChunkedPrefillScheduler):
    def schedule(self):
        step = super().schedule()
        return [*step, step[0]]


class TooMuch(ChunkedPrefillScheduler):
    def schedule(self):
        return [part._replace(num_new=part.num_new + 1) for part in super().schedule()]


class NoBlocks(ChunkedPrefillScheduler):
    def make_room(self, seq, num_new):
        return True


class TooMany(ChunkedPrefillScheduler):
    def __init__(self, *args):
        super().__init__(*args)
        self.max_num_seqs = 1000


class Outsider(ChunkedPrefillScheduler):
    def schedule(self):
        step = super().schedule()
        self.running.clear()
        return step


class Leaves(ChunkedPrefillScheduler):
    def release(self, seq):
        seq.block_table, seq.num_computed_tokens = [], 0


class Starves(ChunkedPrefillScheduler):
    """The newest always first, and one at a time."""

    def schedule(self):
        self.block_manager.begin_step()
        if self.running:
            return self.continue_running(
                [min(seq.num_missing_tokens, 64) if seq is self.running[-1] else 0
                 for seq in self.running]
            )  # fmt: skip
        self.waiting = deque(reversed(self.waiting))
        return self.admit(64)[:1]


class Idles(ChunkedPrefillScheduler):
    def schedule(self):
        return []


class Loops(ChunkedPrefillScheduler):
    def schedule(self):
        while True:
            pass


class Raises(ChunkedPrefillScheduler):
    def admit(self, budget):
        return {}["seq"]


class Cheats(ChunkedPrefillScheduler):
    def commit(self, scheduled, tokens, eos_token_ids, now):
        super().commit(scheduled, tokens, eos_token_ids, now)
        for seq in list(self.running):
            if seq.num_output_tokens:
                seq.finish_reason = seq.finish_reason or "length"
                self.retire(seq, "length")


class Thrashes(ChunkedPrefillScheduler):
    """Preempts whoever has just been computed."""

    def commit(self, *args):
        super().commit(*args)
        for seq in list(self.running):
            self.preempt(seq)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (OverBudget, "over its budget of 64"),
        (Twice, "has A twice"),
        (TooMuch, "tokens, and it is missing"),
        (NoBlocks, "too few blocks"),
        (Outsider, "not among the running requests"),
        (Leaves, "blocks are lost: nobody has them"),
        (Starves, "is starved"),
        (Idles, "found nothing to do while requests wait"),
        (Raises, "it raised KeyError: 'seq'"),
        (Cheats, "of 30 tokens"),
        (Thrashes, "it does not end"),
    ],
)
def test_a_broken_rule_is_told_in_words(policy, words, monkeypatch):
    monkeypatch.setattr(capstone, "MOST_STEPS", 400)
    workload = dataclasses.replace(SMALL, patience=0.01) if policy is Starves else SMALL
    if policy is Leaves:
        workload = dataclasses.replace(SMALL, num_blocks=1000)
    result = play(policy, workload, 64)
    assert words in result.broken
    assert result.points == 0


def test_too_many_and_endless_are_told_too(monkeypatch):
    crowd = dataclasses.replace(SMALL, requests=(Request(4, 4),) * 80)
    assert "over the 64 slots" in play(TooMany, crowd, 512).broken
    limit = capstone.time_limit
    monkeypatch.setattr(capstone, "time_limit", lambda seconds: limit(0.3))
    assert "does not end" in play(Loops, SMALL, 64).broken


def test_a_budget_has_limits():
    assert "is over 8,192" in play(ChunkedPrefillScheduler, SMALL, 10_000).broken
    assert "at least 1" in play(ChunkedPrefillScheduler, SMALL, 0).broken
    assert "must be at least" in play(Scheduler, SMALL, 512).broken


def test_the_table_tells_rules_and_scores(scores):
    rows = {**scores, "bad": score(OverBudget, 512)}
    text = capstone.table(rows)
    assert "not scored" in text and "over its budget of 512" in text
    assert text.count("none") == 1 and "simulated, H200" in text
    assert f"{sum(r.points for r in scores['stage 6, 512']):,.0f}" in text


def test_the_pictures_are_drawn(scores):
    figure = capstone.picture(scores)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["chat", "documents", "burst"]
    assert [len(axes.lines) for axes in figure.axes] == [4, 4, 4]  # three policies and a target
    for axes in figure.axes:  # every point is inside, and the panel is not mostly empty
        speeds = [line.get_ydata()[0] for line in axes.lines[1:]]
        low, high = axes.get_ylim()
        assert low < min(speeds) and max(speeds) < high
        assert high - low < 3 * max(max(speeds) - min(speeds), 0.01 * max(speeds))
    assert capstone.trade({64: (0.001, 0.02), 512: (0.002, 0.01)}, "simulated, H200").png()
