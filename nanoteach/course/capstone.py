"""The capstone after notebook 06: a scheduler of one's own, judged on three workloads.

The engine is the real one, with the policy in it; the model is pretended and the time simulated,
so a score is the same on every machine. A policy finds the p99 ITL that a workload wants, in
seconds, in `self.target`. One that breaks a rule is told which, and not scored.

Knows: the workloads, the rules, the score. Does not know: how a policy decides.
"""

import random
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import ceil

from nanoteach.config import ModelConfig
from nanoteach.course.limits import TimeUp, time_limit
from nanoteach.course.pictures import (
    BLUE,
    LINE,
    ORANGE,
    REQUESTS,
    STALL,
    CounterRunner,
    Picture,
    Request,
    Run,
    canvas,
    drawing,
    gaps,
    say,
)
from nanoteach.scheduler import Scheduled, Scheduler

MOST_TOKENS = 8192  # a step's budget is at most this
MAX_NUM_SEQS = 64
OVERHEAD = 0.0002  # seconds that a step takes besides its bound: a real engine has this, too
LABEL = "simulated, H200, 0.2 ms overhead a step"
TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20)  # of a p99 ITL, in ms
BUDGETS = (64, 128, 192, 256, 288, 320, 384, 512, 768, 1024, 2048)
CHECK_EVERY = 50  # steps; walking all blocks takes a while
MOST_STEPS = 20_000


@dataclass(frozen=True)
class Workload:
    """What is to be served, and with how much.

    num_blocks: the pool, in blocks of 16 tokens. target: the p99 ITL that users of it want.
    patience: seconds after which a request that is not computed counts as starved.
    """

    name: str
    requests: tuple[Request, ...]
    num_blocks: int
    target: float
    patience: float

    @property
    def num_output_tokens(self) -> int:
        """Tokens that it generates."""
        return sum(request.max_tokens for request in self.requests)


def _draw(rng: random.Random, prompt: tuple[int, int], output: tuple[int, int], at: int) -> Request:
    """A request that arrives after `at` microseconds."""
    return Request(rng.randint(*prompt), rng.randint(*output), at / 1e6)


def _chat() -> Workload:
    """Prompts and answers of about one length, one request after the other."""
    rng, at, requests = random.Random(1), 0, []
    for _ in range(120):
        requests.append(_draw(rng, (50, 1500), (40, 160), at))
        at += rng.randint(0, 6000)
    return Workload("chat", tuple(requests), 8192, target=0.002, patience=1.0)


def _documents() -> Workload:
    """People in a conversation who want it quick, and long documents all the time."""
    rng, requests = random.Random(2), []
    for _ in range(32):
        requests.append(_draw(rng, (20, 100), (200, 300), rng.randint(0, 20_000)))
    for i in range(24):
        requests.append(_draw(rng, (3000, 8000), (5, 40), 14_000 * (i + 1)))
    return Workload("documents", tuple(requests), 8192, target=0.0009, patience=1.0)


def _burst() -> Workload:
    """Everybody at once, and too few blocks for all."""
    rng = random.Random(3)
    requests = tuple(_draw(rng, (100, 1200), (40, 160), 0) for _ in range(96))
    return Workload("burst", requests, 1536, target=0.0015, patience=2.0)


WORKLOADS = (_chat(), _documents(), _burst())


class Broken(Exception):
    """A policy has broken a rule; the words say which, who and when."""


class Referee(CounterRunner):
    """Looks at every step before it is computed. Raises Broken."""

    def __init__(self, config: ModelConfig, scheduler: Scheduler, budget: int) -> None:
        super().__init__(config)
        self.scheduler = scheduler
        self.budget = budget
        self.num_steps = 0
        self.worked: list[str] = []

    def execute(self, scheduled: list[Scheduled]) -> list[int | None]:
        """See `ModelRunner.execute`."""
        self.num_steps += 1
        step = f"step {self.num_steps}"
        names = [seq.request_id for seq, _ in scheduled]
        total = sum(num_new for _, num_new in scheduled)
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise Broken(f"{step} has {twice[0]} twice")
        if len(self.scheduler.running) > MAX_NUM_SEQS:
            raise Broken(f"{len(self.scheduler.running)} requests run in {step}, over the "
                         f"{MAX_NUM_SEQS} slots")  # fmt: skip
        size = self.scheduler.block_manager.block_size
        for seq, num_new in scheduled:
            name = seq.request_id
            if seq not in self.scheduler.running:
                raise Broken(f"{step} computes {name}, which is not among the running requests")
            if not 0 < num_new <= seq.num_missing_tokens:
                raise Broken(f"{step} gives {name} {num_new} tokens, and it is missing "
                             f"{seq.num_missing_tokens}")  # fmt: skip
            if seq.num_computed_tokens + num_new > len(seq.block_table) * size:
                raise Broken(f"{step} computes {num_new} tokens of {name} and has too few blocks "
                             "for them")  # fmt: skip
        if total > self.budget:
            raise Broken(f"{step} computes {total:,} tokens, over its budget of {self.budget:,}")
        self.worked = names
        return [self.next_token() if part.gives_token else None for part in scheduled]


@dataclass(frozen=True)
class Result:
    """How a policy did on a workload. If `broken` says something, the numbers are none."""

    workload: Workload
    tokens_per_second: float = 0.0
    p99_itl: float = 0.0
    broken: str = ""
    mean_ttft: float = 0.0  # not scored

    @property
    def points(self) -> float:
        """Tokens a second; less, in proportion, where the p99 ITL is over the target."""
        if self.broken:
            return 0.0
        return self.tokens_per_second * min(1.0, self.workload.target / self.p99_itl)


def percentile(values: SequenceOf[float], share: float) -> float:
    """The smallest value that is not below `share` of all of them."""
    return sorted(values)[ceil(share * len(values)) - 1]


def play(policy: type[Scheduler], workload: Workload, budget: int) -> Result:
    """Run one workload to its end under a policy that gets `budget` tokens a step."""
    if budget < 1:
        return Result(workload, broken=f"a budget is at least 1 token, not {budget}")
    if budget > MOST_TOKENS:
        return Result(workload, broken=f"a budget of {budget:,} tokens is over {MOST_TOKENS:,}")
    try:
        with time_limit(60):
            return _play(policy, workload, budget)
    except Broken as broken:
        return Result(workload, broken=str(broken))
    except TimeUp:
        return Result(workload, broken="it does not end: a minute has passed")
    except Exception as error:
        return Result(workload, broken=f"it raised {type(error).__name__}: {error}")


def _play(policy: type[Scheduler], workload: Workload, budget: int) -> Result:
    """See `play`. Raises Broken, and what the policy raises."""
    told = type(policy.__name__, (policy,), {"target": workload.target})
    run = Run(
        workload.requests,
        scheduler=told,
        num_blocks=workload.num_blocks,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=budget,
        overhead=OVERHEAD,
        max_model_len=MOST_TOKENS,
    )
    scheduler = run.core.scheduler
    referee = Referee(run.clock.config, scheduler, budget)
    run.core.runner = referee
    run.clock.watch = lambda: None
    last: dict[str, float] = {}
    going = True
    while going:
        going = run.step()
        now = run.clock.now()
        last.update(dict.fromkeys(referee.worked, now))
        for name, seq in run.core.sequences.items():
            waited = now - last.get(name, seq.arrival_time)
            if waited > workload.patience:
                raise Broken(f"{name} is starved: nothing of it was computed for {waited:.1f} s")
        if referee.num_steps > MOST_STEPS:
            raise Broken(f"it does not end: {MOST_STEPS:,} steps, and somebody still waits")
        if not going or referee.num_steps % CHECK_EVERY == 0:
            check_books(run, f"after step {referee.num_steps}")
    for name, seq in run.sequences.items():
        if seq.num_output_tokens != seq.params.max_tokens:
            raise Broken(f"{name} got {seq.num_output_tokens} of {seq.params.max_tokens} tokens")
    waits = [gap.seconds for gap in gaps(run.steps)]
    speed = workload.num_output_tokens / run.clock.now()
    firsts = [seq.token_times[0] - seq.arrival_time for seq in run.sequences.values()]
    return Result(
        workload, speed, percentile(waits, 0.99), mean_ttft=sum(firsts) / len(firsts)
    )  # fmt: skip


def check_books(run: Run, when: str) -> None:
    """Raises Broken if blocks are lost, or anything else is wrong inside."""
    held = {block for seq in run.core.scheduler.running for block in seq.block_table}
    lost = run.manager.num_blocks - run.manager.num_free - len(held)
    if lost > 0:
        raise Broken(f"{when} {lost} blocks are lost: nobody has them, and they were not freed")
    if problems := run.core.check():
        raise Broken(f"{when}: {problems[0]}")


def score(policy: type[Scheduler], budget: int = 512) -> list[Result]:
    """A policy on all workloads."""
    return [play(policy, workload, budget) for workload in WORKLOADS]


def points(results: SequenceOf[Result]) -> float:
    """Of all workloads together; none if a rule was broken."""
    return 0.0 if any(r.broken for r in results) else sum(r.points for r in results)


def points_table(rows: Mapping[int, SequenceOf[Result]]) -> str:
    """The points of each workload by the budget, a star at the best of each column."""
    columns = {w.name: [r[i].points for r in rows.values()] for i, w in enumerate(WORKLOADS)}
    columns["together"] = [points(results) for results in rows.values()]
    lines = [("budget" + "".join(f"{name:>12} " for name in columns)).rstrip()]
    for k, budget in enumerate(rows):
        cells = [f"{v[k]:>12,.0f}{'*' if v[k] == max(v) else ' '}" for v in columns.values()]
        lines.append((f"{budget:6,}" + "".join(cells)).rstrip())
    return "\n".join([*lines, f"(* the best of its column; {LABEL})"])


def table(rows: Mapping[str, SequenceOf[Result]]) -> str:
    """Policies under one another, the rules they broke in words."""
    names = [workload.name for workload in WORKLOADS]
    wide = max(20, *map(len, rows))
    lines = [
        " " * wide + "".join(f"{name:>22}" for name in names) + f"{'points':>9}",
        " " * wide + f"{'tokens/s':>11}{'p99 ITL':>11}" * len(names),
        f"{'target':{wide}}" + "".join(f"{1e3 * w.target:>19.2f} ms" for w in WORKLOADS),
    ]
    for name, results in rows.items():
        cells = [
            f"{'not scored':>22}" if r.broken
            else f"{r.tokens_per_second:>11,.0f} {1e3 * r.p99_itl:>7.2f} ms"
            for r in results
        ]  # fmt: skip
        broken = [f"    {r.workload.name}: {r.broken}" for r in results if r.broken]
        total = "none" if broken else f"{points(results):,.0f}"
        lines += [f"{name:{wide}}" + "".join(cells) + f"{total:>9}", *broken]
    return "\n".join([*lines, f"({LABEL})"])


@drawing
def picture(rows: Mapping[str, SequenceOf[Result]]) -> Picture:
    """Tokens a second over the p99 ITL, a panel for each workload: up and left is better.

    Equal runs are rings around one another, the first row's the widest.
    """
    figure = canvas(3.2)
    sheets = figure.subplots(1, len(WORKLOADS))
    for i, (axes, workload) in enumerate(zip(sheets, WORKLOADS, strict=True)):
        results = {name: r[i] for name, r in rows.items() if not r[i].broken}
        speeds = [r.tokens_per_second for r in results.values()] or [1.0]
        target = 1e3 * workload.target
        waits = [target, *(1e3 * r.p99_itl for r in results.values())]
        low, high = min(speeds), max(speeds)
        room = max(0.15 * (high - low), 0.01 * high)
        axes.axvline(target, color=STALL, lw=1, ls="--")
        say(axes, target, low - 0.5 * room, " target", STALL)
        for k, (name, r) in enumerate(results.items()):
            style = {"color": REQUESTS[k % len(REQUESTS)], "ms": max(4, 15 - 4 * k), "mew": 1.8}
            point = 1e3 * r.p99_itl, r.tokens_per_second
            axes.plot(*point, "o", label=name, fillstyle="none", **style)
        axes.set_xscale("log")
        axes.set_xlim(0.7 * min(waits), 1.5 * max(waits))
        ticks = [t for t in TICKS if 0.7 * min(waits) < t < 1.5 * max(waits)]
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
        axes.set_ylim(low - room, high + room)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_title(workload.name)
        axes.set_xlabel("p99 ITL, ms")
        axes.grid(color=LINE, alpha=0.3)
    sheets[0].set_ylabel("tokens/s (not from 0)")
    marks, labels = sheets[0].get_legend_handles_labels()
    figure.legend(marks, labels, loc="outside lower center", ncols=4, frameon=False,
                  title=LABEL, title_fontsize=8)  # fmt: skip
    return figure


@drawing
def trade(points: Mapping[int, tuple[float, float]], label: str) -> Picture:
    """The longest ITL and the long prompt's TTFT, in seconds, by the budget of a step."""
    figure = canvas(2.8)
    axes = figure.subplots()
    budgets = list(points)
    for place, name, colour in ((0, "longest ITL of the others", BLUE),
                                (1, "TTFT of the long prompt", ORANGE)):  # fmt: skip
        values = [1e3 * points[budget][place] for budget in budgets]
        axes.plot(budgets, values, "o-", color=colour)
        say(axes, budgets[-1] * 1.08, values[-1] * (0.8 if place == 0 else 1.25), name, colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    axes.set_yticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
    axes.minorticks_off()
    axes.set_xlim(budgets[0] * 0.8, budgets[-1] * 4)
    axes.set_xlabel(f"tokens a step   ({label})")
    axes.set_ylabel("milliseconds")
    axes.grid(color=LINE, alpha=0.3)
    return figure
