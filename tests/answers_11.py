"""Answers to notebook 11 for the tests: other right ones, and wrong ones with what is said."""

from course_cases import second, wrong

COVERED = "nanoteach.bench.kernels.covered_us"


@second(COVERED)
def by_stretches(events):
    found = {kind: 0.0 for kind in [*CLASSES, "rest"]}
    ends = []
    for event in events:
        begin = max([event["start_us"], *ends])
        found[class_of(event["name"])] += max(event["start_us"] + event["us"] - begin, 0.0)
        ends.append(event["start_us"] + event["us"])
    return found


@wrong(COVERED, "it must count once")
def adds_lengths(events):
    found = dict.fromkeys((*CLASSES, "rest"), 0.0)
    for event in events:
        found[class_of(event["name"])] += event["us"]
    return found


@wrong(COVERED, "there may be gaps")
def from_start_to_start(events):
    found = dict.fromkeys((*CLASSES, "rest"), 0.0)
    for event, following in zip(events, [*events[1:], None], strict=True):
        stop = following["start_us"] if following else event["start_us"] + event["us"]
        found[class_of(event["name"])] += stop - event["start_us"]
    return found


@wrong(COVERED, "Look at the latest end so far")
def the_one_before(events):
    found = dict.fromkeys((*CLASSES, "rest"), 0.0)
    last = float("-inf")
    for event in events:
        stop = event["start_us"] + event["us"]
        found[class_of(event["name"])] += max(0.0, stop - max(event["start_us"], last))
        last = stop
    return found


@wrong(COVERED, "0 at least")
def below_zero(events):
    found, last = dict.fromkeys((*CLASSES, "rest"), 0.0), float("-inf")
    for event in events:
        stop = event["start_us"] + event["us"]
        found[class_of(event["name"])] += stop - max(event["start_us"], last)
        last = max(last, stop)
    return found


@wrong(COVERED, "also with 0")
def only_those_that_ran(events):
    found, last = {}, float("-inf")
    for event in events:
        stop, kind = event["start_us"] + event["us"], class_of(event["name"])
        new = max(0.0, stop - max(event["start_us"], last))
        if new:
            found[kind] = found.get(kind, 0.0) + new
        last = max(last, stop)
    return found


@wrong(COVERED, "In a gap nobody runs")
def counts_the_gaps(events):
    found, last = dict.fromkeys((*CLASSES, "rest"), 0.0), 0.0
    for event in events:
        stop = event["start_us"] + event["us"]
        found[class_of(event["name"])] += max(0.0, stop - last)
        last = max(last, stop)
    return found


@wrong(COVERED, "`rest` is in the result")
def rest_where_there_is_some(events):
    found, last = dict.fromkeys(CLASSES, 0.0), float("-inf")
    for event in events:
        stop, kind = event["start_us"] + event["us"], class_of(event["name"])
        found[kind] = found.get(kind, 0.0) + max(0.0, stop - max(event["start_us"], last))
        last = max(last, stop)
    return found


LINE = "nanoteach.bench.calibrated.line_through"


@second(LINE)
def by_two_equations(few, many):
    a, b = few.cost.bytes, many.cost.bytes
    overhead = (few.seconds * b - many.seconds * a) / (b - a)
    return overhead, (b - a) / (many.seconds - few.seconds)


@wrong(LINE, "The overhead comes first")
def the_other_way_round(few, many):
    bandwidth = (many.cost.bytes - few.cost.bytes) / (many.seconds - few.seconds)
    return bandwidth, few.seconds - few.cost.bytes / bandwidth


@wrong(LINE, "The overhead in seconds")
def in_microseconds(few, many):
    bandwidth = (many.cost.bytes - few.cost.bytes) / (many.seconds - few.seconds)
    return 1e6 * (few.seconds - few.cost.bytes / bandwidth), bandwidth


@wrong(LINE, "bytes a second")
def seconds_a_byte(few, many):
    slope = (many.seconds - few.seconds) / (many.cost.bytes - few.cost.bytes)
    return few.seconds - few.cost.bytes * slope, slope


@wrong(LINE, "take their time off")
def all_of_the_first(few, many):
    return few.seconds, (many.cost.bytes - few.cost.bytes) / (many.seconds - few.seconds)


@wrong(LINE, "the overhead is in those seconds")
def one_step_alone(few, many):
    bandwidth = many.cost.bytes / many.seconds
    return few.seconds - few.cost.bytes / bandwidth, bandwidth


GAINS = "nanoteach.bench.calibrated.possible_gains"


@second(GAINS)
def added_up_anew(seconds, bounds):
    gains = {}
    for part in seconds:
        others = sum(taken for name, taken in seconds.items() if name != part)
        least = min(seconds[part], bounds.get(part, 0.0))
        gains[part] = sum(seconds.values()) / (others + least)
    return gains


@wrong(GAINS, "How much faster is the whole step?")
def of_the_part(seconds, bounds):
    return {
        part: taken / min(taken, bounds[part]) if bounds.get(part) else 0.0
        for part, taken in seconds.items()
    }


@wrong(GAINS, "only what is above it can be saved")
def all_of_it(seconds, bounds):
    whole = sum(seconds.values())
    return {part: whole / (whole - taken) for part, taken in seconds.items()}


@wrong(GAINS, "gains nothing: 1, and not less")
def below_one(seconds, bounds):
    whole = sum(seconds.values())
    return {p: whole / (whole - taken + bounds.get(p, 0.0)) for p, taken in seconds.items()}


@wrong(GAINS, "turn it over")
def times_as_long(seconds, bounds):
    whole = sum(seconds.values())
    return {
        part: (whole - max(0.0, taken - bounds.get(part, 0.0))) / whole
        for part, taken in seconds.items()
    }


@wrong(GAINS, "its bound is 0")
def only_with_a_bound(seconds, bounds):
    whole = sum(seconds.values())
    return {
        part: whole / (whole - max(0.0, taken - bounds[part]))
        for part, taken in seconds.items()
        if part in bounds
    }


@wrong(GAINS, "Its bound is 0")
def without_get(seconds, bounds):
    whole = sum(seconds.values())
    return {p: whole / (whole - max(0.0, taken - bounds[p])) for p, taken in seconds.items()}


@wrong(GAINS, "no faster is 1")
def percent_more(seconds, bounds):
    whole = sum(seconds.values())
    return {
        part: whole / (whole - max(0.0, taken - bounds.get(part, 0.0))) - 1
        for part, taken in seconds.items()
    }


@wrong(GAINS, "the share that is saved")
def share_saved(seconds, bounds):
    whole = sum(seconds.values())
    return {p: max(0.0, taken - bounds.get(p, 0.0)) / whole for p, taken in seconds.items()}
