"""Notebook 11, answered: each exercise with its reasoning."""

from nanoteach.course import exercise

# A kernel may start while the one before it still runs, so lengths do not add up. Walk through the
# events in order and keep the latest end so far: of each event only what lies behind that end is
# new. Common wrong turns: adding up lengths; taking the time from one start to the next, which
# counts the gaps; comparing with the end of the event before, which may lie inside an older one.


@exercise("nanoteach.bench.kernels.covered_us")
def covered_us(events) -> dict[str, float]:
    """For how long at least one kernel ran, by class. `events` is in order of start."""
    found = dict.fromkeys((*CLASSES, "rest"), 0.0)
    busy_until = float("-inf")
    for event in events:
        start, stop = event["start_us"], event["start_us"] + event["us"]
        if stop > busy_until:
            found[class_of(event["name"])] += stop - max(start, busy_until)
            busy_until = stop
    return found


# Both steps have the same overhead, so it drops out of their difference: what is left is so many
# bytes more in so many seconds more. Then a step's own bytes, at that rate, are taken off its own
# seconds. A common wrong turn is to divide the bytes of one step by its seconds: the overhead is in
# those seconds, and the bandwidth comes out too low.


@exercise("nanoteach.bench.calibrated.line_through")
def line_through(few: Point, many: Point) -> tuple[float, float]:
    """Seconds of overhead, and bytes/s, of the line through two steps that bytes limit."""
    more_bytes = many.cost.bytes - few.cost.bytes
    bandwidth = more_bytes / (many.seconds - few.seconds)
    return many.seconds - many.cost.bytes / bandwidth, bandwidth


# Amdahl's law, part by part. The step gets shorter by what the part takes above its bound, and by
# no more: whoever makes a tenth of a step infinitely fast gains 11%. Common wrong turns: how much
# faster the part becomes; forgetting the bound; a gain below 1 where a part beats its bound.


@exercise("nanoteach.bench.calibrated.possible_gains")
def possible_gains(seconds, bounds) -> dict[str, float]:
    """How many times as fast a step would be at most, if one of its parts took only its bound."""
    whole = sum(seconds.values())
    gains = {}
    for part, taken in seconds.items():
        saved = max(taken - bounds.get(part, 0.0), 0.0)
        gains[part] = whole / (whole - saved)
    return gains
