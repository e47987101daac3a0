"""Why the calibrated model misses a point: each cause with the measurement that shows it.

A cause is given only where its measurement is there, and then with its numbers.

Knows: what else was measured. Does not know: the model.
"""

from nanoteach.bench.recording import Judged, Recording

MISS = 0.25
LARGEST_GRAPH = 2048  # tokens; a larger step is launched kernel by kernel


def cause_of(row: Judged, found: Recording) -> str:
    """Why this point is missed by more than MISS; empty where it is not, or where nobody knows."""
    if abs(row.error) <= MISS:
        return ""
    case = row.case
    if case.startswith(("no cache", "KV cache", "no graphs", "kernel, ", "gather, ")):
        return launches(found)
    if row.experiment in ("batch", "graphs") and row.metric in ("output", "decode steps"):
        return products(found, int(case.split(" x ")[0].split()[-1]))
    return ""


def launches(found: Recording) -> str:
    """An engine without graphs waits for the host."""
    with_graphs, without = (
        found.rows.get((f"{words}, 1 x 1,024", "decode steps")) for words in ("graphs", "no graphs")
    )
    if not with_graphs or not without or not without.samples or not with_graphs.samples:
        return ""
    slow, fast = 1e6 / without.median, 1e6 / with_graphs.median
    return (
        f"kernel by kernel the host launches, and the GPU waits: the same decode step takes "
        f"{slow:,.0f} µs so and {fast:,.0f} µs as a graph"
    )


def products(found: Recording, batch: int) -> str:
    """The products of a step with few requests do not reach the bandwidth."""
    row = found.rows.get((f"kernels, batch {batch}", "products"))
    if not row or not row.samples or not row.bound:
        return ""
    return (
        f"the matrix products of {batch} tokens take {row.median:,.0f} µs, "
        f"where their bytes take {row.bound:,.0f}"
    )
