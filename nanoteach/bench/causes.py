"""Why the calibrated model misses a point: each cause with the measurement that shows it.

A cause is given only where its measurement is there, and then with its numbers. `bench/kernels.py`
has measured the steps; `graphs` has switched the graphs off.

Knows: what else was measured. Does not know: the model.
"""

import math

from nanoteach.bench.kernels import BATCHES, MIXED, PROMPTS
from nanoteach.bench.recording import Judged, Recording

MISS = 0.25
NO_GRAPHS = ("no cache, ", "KV cache, ", "no graphs, ", "kernel, ", "gather, ")
DECODES = {"static": 16, "preemption": 32, "nano": 256}
"""About how many requests decode at once in these experiments."""


def cause_of(row: Judged, found: Recording) -> str:
    """Why this point is missed by more than MISS; empty where it is not, or where nobody knows."""
    if abs(row.error) <= MISS:
        return ""
    case = row.case
    if case.startswith(NO_GRAPHS):
        return launches(found)
    if row.experiment in ("batch", "graphs") and row.metric in ("output", "decode steps"):
        return products(found, int(case.split(" x ")[0].split()[-1]))
    if row.experiment in DECODES:
        return products(found, DECODES[row.experiment])
    if case.startswith("plain loop"):
        return host_after(found)
    if row.experiment == "chunked":
        if row.metric in ("ITL p50 outside", "output"):
            return products(found, 16)
        if "unlimited" in case:
            return two_commits(found)
        if case.startswith("prompts first"):
            return prompts(found, 1, 256)
        return step(found, f"kernels, {MIXED[0]} decodes and {MIXED[1] - MIXED[0]} of a prompt")
    if (case, row.metric) == ("prefix caching on", "TTFT"):
        return names(found, case)
    if case.startswith("mixed reuse"):
        return prompts(found, 1, 256)
    return prompts(found, *shape_of(case))


def shape_of(case: str) -> tuple[int, int]:
    """How many prompts of what length are in a step of `context`, `prefill`, `packed`, `prefix`."""
    numbers = [int(word.replace(",", "")) for word in case.split() if word[0].isdigit()]
    if case.startswith(("context", "one by one")):
        return 1, numbers[0] if case.startswith("context") else numbers[-1]
    if case.startswith("prefix"):
        return (2, 1024) if case.endswith("on") else (16, 1024)
    count, length = numbers
    return count, length


def launches(found: Recording) -> str:
    """An engine without graphs waits for the host."""
    slow, fast = (
        found.rows.get((f"{words}, 1 x 1,024", "decode steps")) for words in ("no graphs", "graphs")
    )
    if not slow or not fast or not slow.samples or not fast.samples:
        return ""
    return (
        "the host launches kernel by kernel, and the GPU waits: a decode step of 1 takes "
        f"{1e6 / slow.median:,.0f} µs so, and {1e6 / fast.median:,.0f} as a graph"
    )


def products(found: Recording, batch: int) -> str:
    """The products of a step with few requests do not reach the bandwidth."""
    near = min(BATCHES, key=lambda size: abs(math.log(size / batch)))
    row = found.rows.get((f"kernels, batch {near}", "products"))
    if not row or not row.samples or not row.bound:
        return ""
    return (
        f"few rows read the weights slowly: the products of a decode step of {near} take "
        f"{row.median:,.0f} µs, and their bytes {row.bound:,.0f}"
    )


def prompts(found: Recording, count: int, length: int) -> str:
    """A step of cold prompts of about so many tokens, in about so many prompts."""
    near, each = nearest_prompts(count, count * length)
    return step(found, f"kernels, prompts {near} x {each:,}")


def nearest_prompts(count: int, tokens: int) -> tuple[int, int]:
    """The watched step of prompts with about so many tokens, and of these in so many prompts."""

    def distance(shape: tuple[int, int]) -> tuple[float, float]:
        near, length = shape
        return abs(math.log(near * length / tokens)), abs(math.log(near / count))

    return min(PROMPTS, key=distance)


def step(found: Recording, name: str) -> str:
    """Where the time of a watched step went."""
    names = ("step", "GPU busy", "GPU idle", "products", "attention")
    rows = [found.rows.get((name, metric)) for metric in names]
    if not all(row and row.samples for row in rows):
        return ""
    whole, busy, idle, linear, attention = (row.median for row in rows if row)
    bound = rows[0].bound if rows[0] else None
    return (
        f"small steps are far from the bound: {name.removeprefix('kernels, ')} take "
        f"{whole:,.0f} µs" + (f", the bound is {bound:,.0f}" if bound else "") + ": products "
        f"{linear:,.0f}, attention {attention:,.0f}, other kernels "
        f"{busy - linear - attention:,.0f}, no kernel {idle:,.0f}"
    )


def names(found: Recording, case: str) -> str:
    """Prompts that are cached wait until the host has looked them up."""
    turns = found.host.get(case)
    if not turns:
        return ""
    adds = len(found.workload(case).prompts)
    first, longest = sum(turns[:adds]) / 1000, max(turns[adds:]) / 1000
    return (
        "the host comes first, and the GPU waits: it adds the requests in "
        f"{first:.1f} ms, and the step in which it names all blocks of their prompts takes it "
        f"{longest:.1f}"
    )


def host_after(found: Recording) -> str:
    """The plain loop has the host's part after each step."""
    rows = [
        found.rows.get((f"{loop}, unlimited", "ITL p50 outside"))
        for loop in ("plain loop", "decodes first")
    ]
    if not all(row and row.samples for row in rows):
        return ""
    plain, ahead = (1e6 * row.median for row in rows if row)
    return (
        "in the plain loop the GPU waits for the host between two steps: decode steps of 16 take "
        f"{plain:,.0f} µs, and {ahead:,.0f} where the next one is prepared meanwhile"
    )


def two_commits(found: Recording) -> str:
    """The overlapped loop shows one long step as two waits."""
    waits = [
        found.rows.get((f"{loop}, unlimited", metric))
        for loop in ("decodes first", "plain loop")
        for metric in ("ITL max", "two tokens")
    ]
    turns = found.host.get("decodes first, unlimited")
    if not turns or not all(row and row.samples for row in waits):
        return ""
    ahead, ahead_two, plain, plain_two = (1000 * row.median for row in waits if row)
    launch = max(turns) / 1000
    return (
        "a step is committed when the next one is launched, which takes the host "
        f"{launch:.1f} ms where that is the large one. So one long step shows as two waits: "
        f"{ahead:.1f} ms at most and {ahead_two:.1f} for two tokens; in the plain loop "
        f"{plain:.1f} and {plain_two:.1f}"
    )
