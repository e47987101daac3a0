"""Pictures that carry an idea, each drawn from something that really ran.

What draws takes data, most of it from `runs`, and returns a figure. Whatever `runs` offers can be
reached through here as well.

Knows: matplotlib. Does not know: engines, notebooks, widgets.
"""

import io
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import count, pairwise
from typing import Any, Literal, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nanoteach.block_manager import blocks_needed
from nanoteach.config import ModelConfig
from nanoteach.cost_model import Cost, Work, step_cost
from nanoteach.course.runs import *  # noqa: F403 -- notebooks find both in one place
from nanoteach.course.runs import (
    Held,
    Moment,
    Node,
    Pool,
    Rung,
    Stay,
    Step,
    letter,
    longest_gap,
    share_working,
)
from nanoteach.hardware import Hardware

# Okabe and Ito's colours, which differ for everybody.
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"
RED = "#D55E00"  # waste and waiting, and nothing else
STALL = "#B40426"  # the longest wait: told apart from orange bars beside it
PALE, LINE, TEXT = "#E6E9EC", "#9AA3AB", "#30363B"
REQUESTS = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#8C6D46", "#F0E442", "#4D4D4D")
SHARED = "#B4BBC1"  # what belongs to several requests
HATCHED = {"hatch": "////", "edgecolor": LINE, "lw": 0}  # held, and empty or idle
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "text.color": TEXT, "axes.labelcolor": TEXT, "axes.edgecolor": LINE, "xtick.color": TEXT,
    "ytick.color": TEXT, "axes.spines.top": False, "axes.spines.right": False,
    "hatch.linewidth": 0.6, "hatch.color": LINE,
}  # fmt: skip
WIDTH = 9.5  # inches, about a notebook's column
DPI = 100

Drawing = TypeVar("Drawing", bound=Callable[..., "Picture"])


class Picture(Figure):
    """A figure that a notebook shows by itself, without pyplot, which would show it twice."""

    def png(self) -> bytes:
        """The picture as a file. The same data give the same bytes."""
        out = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            if layout := self.get_layout_engine():
                layout.execute(self)
                self.set_layout_engine("none")  # a second layout may differ by a pixel
            self.savefig(out, format="png", metadata={"Software": None})
        return out.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png()


def drawing(function: Drawing) -> Drawing:
    """Decorator: draw in the course's style, whatever the notebook has set."""
    return matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE})(function)


def canvas(height: float) -> Picture:
    """An empty picture as wide as a notebook."""
    return Picture(figsize=(WIDTH, height), dpi=DPI, layout="constrained")


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each request, in the order in which they are named; they come round again."""
    return {name: REQUESTS[i % len(REQUESTS)] for i, name in enumerate(dict.fromkeys(names))}


def ink(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 120 else "white"


def box(
    axes: Axes, x: float, y: float, width: float, height: float, face: str, **more: Any
) -> None:
    """A rectangle."""
    # As an artist, for speed: axes have their limits from elsewhere, and make room for words only.
    axes.add_artist(Rectangle((x, y), width, height, facecolor=face, in_layout=False, **more))


def say(axes: Axes, x: float, y: float, text: str, colour: str = TEXT, **more: Any) -> None:
    """Text: small, and to the right of its place unless `more` says otherwise."""
    axes.text(x, y, text, **{"color": colour, "fontsize": 8, "va": "center", **more})


def centred(axes: Axes, x: float, y: float, text: str, colour: str = TEXT, **more: Any) -> None:
    """Text around its place."""
    say(axes, x, y, text, colour, ha="center", **more)


def bare(axes: Axes, width: tuple[float, float], height: tuple[float, float]) -> None:
    """No frame, no ticks: a sheet that spans from left to right, and from bottom to top."""
    axes.set_axis_off()
    axes.set_xlim(*width)
    axes.set_ylim(*height)


def lanes(axes: Axes, names: SequenceOf[str]) -> None:
    """A line for each name, from the top, and no frame at the left."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)


@drawing
def naive_triangle(naive: SequenceOf[Step], cached: SequenceOf[Step]) -> Picture:
    """The tokens that each step computes, without a cache and with one. One request in each."""
    figure = canvas(3.4)
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    titles = ("naive: everything again", "with a KV cache: only what is new")
    for axes, steps, title in zip(panels, (naive, cached), titles, strict=True):
        known = first = again = 0
        for x, step in enumerate(steps, 1):
            (work,) = step.work
            stop = work.num_computed + work.num_new
            known = max(known, work.num_computed)
            parts = ((0, work.num_computed, PALE), (work.num_computed, known, RED))
            for low, high, colour in (*parts, (known, stop, BLUE)):
                box(axes, x - 0.5, low, 1, high - low, colour, edgecolor="white", lw=0.3)
            again += known - work.num_computed
            first += stop - known
            known = stop
        lines = [(f"{first:,} tokens computed for the first time", BLUE)]
        if again:
            lines.append((f"{again:,} computed again, for nothing", RED))
        else:
            lines.append(("their K/V are read, not computed", "#6B747B"))
        for i, (line, colour) in enumerate(lines):
            y = 0.95 - 0.08 * i
            say(axes, 0.03, y, line, colour, fontsize=9, weight="bold", transform=axes.transAxes)
        axes.set_title(title)
        axes.set_xlabel("step, one output token each")
    longest = max(step.work[0].num_computed + step.work[0].num_new for step in naive)
    panels[0].set_xlim(0.5, len(naive) + 0.5)
    panels[0].set_ylim(0, 1.35 * longest)
    panels[0].set_ylabel("position in the text")
    return figure


@drawing
def reservation_and_pages(
    rows: SequenceOf[Mapping[str, Held]],
    pages: SequenceOf[Mapping[str, Held]],
    at: int | None = None,
    titles: tuple[str, str] = ("rows reserved to the longest", "pages taken as needed"),
) -> Picture:
    """Memory for K/V in two runs: above at step `at` (half-way if left out), below over time."""
    at = min(len(rows), len(pages)) // 2 if at is None else at
    names = list(dict.fromkeys((*rows[at], *pages[at])))
    colours = colours_of(name for moment in (*rows, *pages) for name in moment)
    widest = [max(h.held for h in history[at].values()) for history in (rows, pages)]
    zoom = max(1, widest[0] // widest[1])  # else pages are too small to be seen
    most = max(sum(h.held for h in moment.values()) for moment in (*rows, *pages))
    figure = canvas(5.0)
    panels = figure.subplots(2, 2, sharey="row")
    for column, (history, title) in enumerate(zip((rows, pages), titles, strict=True)):
        now, over_time = panels[0][column], panels[1][column]
        for name, (filled, held, piece) in history[at].items():
            y = names.index(name)
            box(now, 0, y - 0.38, held, 0.76, PALE, **HATCHED)
            box(now, 0, y - 0.38, filled, 0.76, colours[name])
            now.vlines(range(0, held + 1, piece), y - 0.38, y + 0.38, color=TEXT, lw=0.8)
            say(now, held, y, f"  {filled:,} of {held:,}")
        now.set_title(f"{title}: step {at + 1}")
        closer = column == 1 and zoom > 1
        now.set_xlabel(f"tokens, drawn {zoom} times as large" if closer else "tokens")
        now.set_xlim(0, widest[0] * 1.25 / (zoom if column else 1))

        filled_at = [sum(h.filled for h in moment.values()) for moment in history]
        held_at = [sum(h.held for h in moment.values()) for moment in history]
        steps = range(1, len(history) + 1)
        over_time.fill_between(steps, filled_at, color=BLUE, lw=0)
        over_time.fill_between(steps, filled_at, held_at, facecolor=PALE, **HATCHED)
        over_time.plot(steps, held_at, color=TEXT, lw=0.8)
        share = sum(filled_at) / sum(held_at)
        over_time.set_title(f"all steps: {share:.0%} of what is held is filled", weight="normal")
        over_time.set_xlabel("step")
        label_areas(over_time, filled_at, held_at, most)
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].set_ylim(len(names) - 0.5, -0.5)
    panels[1][0].set_ylim(0, most * 1.05)
    panels[1][0].set_ylabel("tokens, all requests")
    return figure


def label_areas(axes: Axes, filled: SequenceOf[int], held: SequenceOf[int], most: int) -> None:
    """Name what is filled and what is held: inside where there is room, else above."""
    at = int(0.6 * len(filled))
    x, low, high = at + 1, filled[at], held[at]
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    if high < 0.3 * most:
        words = f"filled, and a little held and empty: {max(held):,} at most"
        centred(axes, x, high + 0.12 * most, words, fontsize=9)
        return
    if low > 0.15 * most:
        centred(axes, x, low / 2, "filled", "white", fontsize=9, weight="bold")
    else:
        style = {"fontsize": 9, "weight": "bold", "bbox": white}
        centred(axes, x, low + 0.09 * most, "filled", BLUE, **style)
        low += round(0.18 * most)
    if high - low > 0.12 * most:
        centred(axes, x, (low + high) / 2, "held, empty", fontsize=9, bbox=white)


@drawing
def slot_occupancy(static: SequenceOf[Stay], continuous: SequenceOf[Stay]) -> Picture:
    """Who is in which slot at each step, in static batches and with continuous batching."""
    figure = canvas(4.2)
    panels = figure.subplots(2, 1, sharex=True)
    colours = colours_of(sorted({stay.name for stay in (*static, *continuous)}))
    last = max(stay.last for stay in (*static, *continuous))
    titles = ("static batches", "continuous batching")
    for axes, stays, title in zip(panels, (static, continuous), titles, strict=True):
        for name, slot, first, end, working in stays:
            box(axes, first - 1, slot - 0.4, end - first + 1, 0.8, PALE, **HATCHED)
            for start, stop in stretches(working):
                box(axes, start - 1, slot - 0.4, stop - start + 1, 0.8, colours[name])
            axes.vlines(end, slot - 0.4, slot + 0.4, color="white", lw=1.5)
            # The letter and the number go where they have room.
            parts = stretches(working)
            wide = [start for start, stop in parts if stop - start > last / 20]
            text, x = f"{name}  {len(working)}", (wide or [first])[0]
            begin, stop = parts[0]
            if x > begin and stop > begin:
                middle, colour = (begin - 1 + stop) / 2, ink(colours[name])
                centred(axes, middle, slot, name, colour, weight="bold")
            say(axes, x + 0.2, slot, text, ink(colours[name]), weight="bold")
        end = max(stay.last for stay in stays)
        axes.axvline(end, color=TEXT, lw=1)
        used = f"slots in use {share_working(stays):.0%} of the time"
        axes.set_title(f"{title}: done after {end} steps, {used}")
        lanes(axes, [f"slot {i}" for i in range(1 + max(stay.slot for stay in stays))])
    panels[1].set_xlim(0, last * 1.01)
    key = "letter: request, number: its steps; hatched: it holds the slot and gets nothing done"
    panels[1].set_xlabel(f"step   ({key})")
    return figure


def stretches(numbers: SequenceOf[int]) -> list[tuple[int, int]]:
    """Runs of numbers that follow one another, each as its first and last."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1] = runs[-1][0], n
        else:
            runs.append((n, n))
    return runs


@drawing
def packed_prefill(cu_seqlens: SequenceOf[int], names: SequenceOf[str] | None = None) -> Picture:
    """A packed batch of prompts, its boundaries, and what attention computes of it."""
    names = list(names or [letter(i) for i in range(len(cu_seqlens) - 1)])
    colours, total = colours_of(names), cu_seqlens[-1]
    sizes = [stop - start for start, stop in pairwise(cu_seqlens)]
    figure = canvas(4.9)
    places: Any = [["strip", "strip"], ["square", "bars"]]
    panels: dict[str, Axes] = figure.subplot_mosaic(places, height_ratios=(1, 4.2))
    strip, square, bars = panels["strip"], panels["square"], panels["bars"]

    bare(strip, (-4, total + 4), (-1.3, 1))
    strip.set_title(f"one packed batch of {total} tokens, no padding")
    bare(bars, (0, total**2), (-0.9, 1.8))
    bars.set_title("pairs of query and key")
    box(square, 0, 0, total, total, PALE)
    pairs = 0
    for name, start, size in zip(names, cu_seqlens, sizes, strict=False):
        stop, colour = start + size, colours[name]
        box(strip, start, 0, size, 1, colour, edgecolor="white")
        text = f"{name}: positions 0 to {size - 1}" if size > total / 5 else name
        centred(strip, start + size / 2, 0.5, text, ink(colour), fontsize=9)
        box(square, start, start, size, size, "white", edgecolor=colour, lw=1)
        square.fill([start, stop, start], [start, stop, stop], color=colour)
        say(square, stop + 6, start + size / 2, f"{size}²", fontsize=9, weight="bold")
        box(bars, pairs, 0.75, size**2, 0.5, colour, edgecolor="white")
        pairs += size**2
    for edge in cu_seqlens:
        centred(strip, edge, -0.3, str(edge))
    say(strip, 0, -0.9, "cu_seqlens: where each request starts, and where the last one ends")

    square.set_title("who attends to whom")
    say(square, total * 0.97, total * 0.1, "never computed:\nother requests", ha="right")
    square.set(xlim=(0, total), ylim=(total, 0), aspect="equal", xlabel="key", ylabel="query")
    square.set_xticks(list(cu_seqlens))
    square.set_yticks(list(cu_seqlens))

    box(bars, 0, -0.25, total**2, 0.5, PALE)
    sums = " + ".join(f"{size}²" for size in sizes)
    say(bars, 0, 1.38, f"{sums} = {pairs:,}", fontsize=9, weight="bold")
    say(bars, 0, 0.38, f"{total}² = {total**2:,}, {total**2 / pairs:.2f} times as many", fontsize=9)
    say(bars, 0, -0.45, "The causal mask halves both.")
    return figure


@drawing
def prefix_tree(
    nodes: SequenceOf[Node], words: Callable[[SequenceOf[int]], str] | None = None
) -> Picture:
    """Cached blocks, each beside the one before it; `words` says what a block's tokens are."""
    words = words or (lambda token_ids: f"{token_ids[0]} … {token_ids[-1]}")
    places = tree_places(nodes)
    columns = max([4, *(1 + x for x, _ in places.values())])
    rows = 1 + max((y for _, y in places.values()), default=0)
    figure = canvas(0.75 + 0.72 * rows)
    axes = figure.subplots()
    bare(axes, (-0.02, columns), (rows - 0.55, -0.55))
    for node in nodes:
        x, y = places[node.block]
        if node.parent in places:
            px, py = places[node.parent]
            axes.plot([px + 0.86, px + 0.93, px + 0.93, x], [py, py, y, y], color=LINE, zorder=0)
        held = node.ref_count > 0
        face = GREEN if node.ref_count > 1 else BLUE if held else PALE
        box(axes, x, y - 0.36, 0.86, 0.72, face, edgecolor=LINE, ls="-" if held else "--")
        state = f"free, place {node.place} in line"
        if held:
            state = f"held by {node.ref_count}: {', '.join(node.holders)}"
        colour = ink(face) if held else "#596066"
        say(axes, x + 0.03, y - 0.21, f"block {node.block}", colour, weight="bold")
        for dy, text in ((0.01, words(node.token_ids)), (0.23, state)):
            room = 112 // columns
            text = text if len(text) <= room else text[: room - 1] + "…"
            say(axes, x + 0.03, y + dy, text, colour)
    if not nodes:
        say(axes, 0, 0, "nothing is cached yet", fontsize=9)
    key = (
        "green: shared, blue: held once, pale: free but still cached (the lowest place goes first)"
    )
    axes.set_title(f"cached blocks   {key}", weight="normal", fontsize=9)
    return figure


def tree_places(nodes: SequenceOf[Node]) -> dict[int, tuple[int, float]]:
    """For each block its column (blocks before it) and its row, half-way between its children."""
    known = {node.block for node in nodes}
    children: dict[int | None, list[int]] = {}
    for node in nodes:
        children.setdefault(node.parent if node.parent in known else None, []).append(node.block)
    places: dict[int, tuple[int, float]] = {}
    leaves = count()

    def place(block: int, column: int) -> float:
        under = [place(child, column + 1) for child in children.get(block, [])]
        row = (under[0] + under[-1]) / 2 if under else float(next(leaves))
        places[block] = column, row
        return row

    for root in children.get(None, []):
        place(root, 0)
    return places


@drawing
def step_timeline(
    panels: Mapping[str, SequenceOf[Step]], label: str = "simulated, H200", mark: str | None = None
) -> Picture:
    """Runs under one another on one time axis: prompts, decodes, the longest wait for a token.

    `label` says whose time it is (a clock's `label`); `mark` names the request whose wait to show,
    that of the longest wait if left out.
    """
    names = list(dict.fromkeys(n for steps in panels.values() for s in steps for n in s.names))
    figure = canvas(0.7 + len(panels) * (0.75 + 0.24 * len(names)))
    sheets = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    end = 1e3 * max(steps[-1].end for steps in panels.values())
    for axes, (title, steps) in zip(sheets, panels.items(), strict=True):
        for step in steps:
            start, width = 1e3 * step.start, 1e3 * (step.end - step.start)
            for name, work in zip(step.names, step.work, strict=True):
                y, face = names.index(name), BLUE if work.num_new == 1 else ORANGE
                box(axes, start, y - 0.36, width, 0.72, face, edgecolor="white", lw=0.4)
                if work.num_new > 1 and width > 0.035 * end:
                    centred(axes, start + width / 2, y, f"{work.num_new:,}", ink(face))
        axes.set_title(f"{title}: all done after {1e3 * steps[-1].end:.1f} ms")
        gap = longest_gap(steps, mark)
        if gap:
            y = names.index(gap.name)
            ends = [1e3 * gap.start, 1e3 * gap.end]
            axes.plot(ends, [y, y], color=STALL, lw=2.2, marker="|", markersize=10)
            wait = f"longest wait between two tokens: {1e3 * gap.seconds:.2f} ms"
            axes.set_title(wait, loc="right", color=STALL)
        lanes(axes, names)
    sheets[-1].set_xlim(0, end * 1.01)
    key = "orange: prompt tokens, with their number, blue: one token"
    sheets[-1].set_xlabel(f"milliseconds ({label})   {key}")
    return figure


@drawing
def block_tables(pool: Pool, highlight: str | None = None, title: str = "") -> Picture:
    """The pool as a grid of blocks, and the tables that lead into it; one request stands out."""
    colours, columns = colours_of(sorted(pool.tables)), 8
    rows = max(blocks_needed(pool.num_blocks, columns), len(pool.tables), 2)
    widest = max([columns - 2, *map(len, pool.tables.values())])
    figure = canvas(0.75 + 0.46 * rows)
    grid, tables = figure.subplots(1, 2, width_ratios=(1, 1.25))
    bare(grid, (-0.1, columns + 0.1), (rows, -0.1))
    bare(tables, (-0.8 - 0.1 * max(map(len, pool.tables), default=0), widest + 3.2), (rows, -0.1))
    followed = highlight in pool.tables

    def cell(axes: Axes, x: float, y: float, block: int, owner: str | None) -> str:
        strong = followed and owner == highlight
        owners = pool.owners(block)
        faint = followed and owner is not None and highlight not in owners
        face = colours[owner] if owner else PALE if block in pool.cached else "#FFFFFF"
        face = SHARED if len(owners) > 1 else face
        edge = {"edgecolor": TEXT, "lw": 1.8} if strong else {"edgecolor": LINE, "lw": 0.8}
        box(axes, x + 0.04, y + 0.06, 0.92, 0.88, face, alpha=0.35 if faint else 1, **edge)
        colour = TEXT if faint else ink(face)
        weight = "bold" if strong else "normal"
        centred(axes, x + 0.5, y + 0.5, str(block), colour, fontsize=9, weight=weight)
        return colour

    for block in range(pool.num_blocks):
        x, y, owners = block % columns, block // columns, pool.owners(block)
        colour = cell(grid, x, y, block, highlight if highlight in owners else (*owners, None)[0])
        if len(owners) > 1:
            say(grid, x + 0.9, y + 0.22, f"×{len(owners)}", colour, ha="right")
    head = f"{title}: " if title else ""
    grid.set_title(f"{head}{len(pool.free)} of {pool.num_blocks} blocks free", fontsize=9)

    for y, (name, table) in enumerate(pool.tables.items()):
        weight = "bold" if name == highlight else "normal"
        say(tables, -0.15, y + 0.5, name, ha="right", fontsize=9, weight=weight)
        computed, size = pool.computed[name], pool.block_size
        for i, block in enumerate(table):
            colour = cell(tables, i, y, block, name)
            filled = min(max(computed - i * size, 0), size)
            box(tables, i + 0.12, y + 0.75, 0.76 * filled / size, 0.1, colour)
        room = f"{computed} of {len(table) * size} tokens"
        say(tables, len(table) + 0.15, y + 0.5, room, weight=weight)
    key = f"bar: places filled of {pool.block_size}"
    if any(len(pool.owners(block)) > 1 for block in range(pool.num_blocks)):
        key += "; grey: shared"
    tables.set_title(f"tables, in the order of the text ({key})", weight="normal", fontsize=9)
    if not pool.tables:
        say(tables, 0, 0.5, "nobody runs", fontsize=9)
    return figure


@drawing
def roofline(
    config: ModelConfig,
    hardware: Hardware,
    points: Mapping[str, SequenceOf[Work]],
    measured: Mapping[str, float] | None = None,
    contexts: SequenceOf[int] = (128, 1024, 8192),
    here: tuple[int, int] | None = None,
) -> Picture:
    """What limits a step: its FLOPs for each byte, and tokens/s of decodes against their number.

    points: steps by their label; measured: seconds that some of these really took; here: a batch
    size and a context to mark on the right.
    """
    figure = canvas(3.9)
    roof, decoding = figure.subplots(1, 2)
    costs = {label: step_cost(config, work) for label, work in points.items()}
    bandwidth, peak = hardware.read_bandwidth / 1e12, hardware.flops / 1e12
    ridge = peak / bandwidth
    low = min([1.0, *map(intensity, costs.values())]) / 2
    high = max([ridge, *map(intensity, costs.values())]) * 6
    roof.loglog([low, ridge, high], [bandwidth * low, peak, peak], color=TEXT, lw=1.5)
    roof.axvline(ridge, color=LINE, lw=0.8, ls=":")
    say(roof, ridge * 1.12, bandwidth * low * 1.4, f"{ridge:.0f} FLOPs\nfor each byte")
    for label, cost in costs.items():
        x, y = intensity(cost), cost.flops / cost.seconds(hardware) / 1e12
        under = cost.limit(hardware) == "memory"
        roof.plot(x, y, "o", color=BLUE if under else ORANGE, ms=7)
        beside(roof, x, y, label, (9, -7) if under else (-4, 9))
        if measured and label in measured:
            real = cost.flops / measured[label] / 1e12
            roof.plot([x, x], [y, real], color=RED, lw=1)
            roof.plot(x, real, "x", color=RED, ms=7)
            beside(roof, x, real, "measured", (9, 0), RED)
    reals = [costs[label].flops / seconds / 1e12 for label, seconds in (measured or {}).items()]
    roof.set(xlim=(low, high), ylim=(min([bandwidth * low, *reals]) / 1.5, peak * 3.5))
    roof.set_title(f"{hardware.name}: the roof")
    roof.set_xlabel("FLOPs for each byte moved   (blue: memory limits, orange: computing)")
    roof.set_ylabel("TFLOP/s, at most")

    batches = [2**i for i in range(11)]
    for context in contexts:
        decodes = [decode_speed(config, hardware, batch, context) for batch in batches]
        decoding.loglog(batches, [speed for speed, _ in decodes], color=BLUE, lw=1.5)
        computing = [i for i, (_, limit) in enumerate(decodes) if limit == "compute"]
        orange = [decodes[i][0] for i in computing]
        decoding.loglog([batches[i] for i in computing], orange, color=ORANGE, lw=3)
        say(decoding, batches[-1] * 1.15, decodes[-1][0], f"context\n{context:,}")
    if here:
        speed, limit = decode_speed(config, hardware, *here)
        decoding.plot(here[0], speed, "o", color=BLUE if limit == "memory" else ORANGE, ms=8)
        beside(decoding, here[0], speed, f"{number(speed)} tokens/s", (9, -9), weight="bold")
    decoding.set_xlim(0.8, batches[-1] * 4)
    decoding.set_xticks(batches[::2], [str(batch) for batch in batches[::2]])
    decoding.minorticks_off()
    decoding.set_title("decoding: tokens/s, at most")
    decoding.set_xlabel("requests in the batch")
    return figure


def beside(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    move: tuple[int, int],
    colour: str = TEXT,
    **more: Any,
) -> None:
    """Text some points away from its place."""
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "va": "center", **more}
    axes.annotate(text, (x, y), move, color=colour, **style)


def intensity(cost: Cost) -> float:
    """FLOPs for each byte."""
    return cost.flops / cost.bytes


def decode_speed(
    config: ModelConfig, hardware: Hardware, batch: int, context: int
) -> tuple[float, Literal["compute", "memory"]]:
    """Tokens/s, at most, of so many decodes with so many tokens each, and what limits them."""
    cost = step_cost(config, [Work(1, context - 1)] * batch)
    return batch / cost.seconds(hardware), cost.limit(hardware)


@drawing
def one_request(moments: Mapping[str, Moment]) -> Picture:
    """A request's tokens and how many are computed, in several situations; see sequence.py."""
    figure = canvas(0.7 + 0.5 * len(moments))
    axes = figure.subplots()
    longest = max(moment.num_tokens for moment in moments.values())
    bare(axes, (-7.6, longest + 5), (len(moments) + 0.05, -0.05))
    for y, (label, moment) in enumerate(moments.items()):
        say(axes, -0.3, y + 0.5, label, ha="right", fontsize=9)
        computed, stop = moment.num_computed, moment.num_computed + moment.num_new
        for i in range(moment.num_tokens):
            face = PALE if i < computed else BLUE if i < stop else "#FFFFFF"
            box(axes, i + 0.04, y + 0.12, 0.92, 0.76, face, edgecolor=LINE)
            kind = "p" if i < moment.num_prompt else "g"
            centred(axes, i + 0.5, y + 0.5, kind, ink(face), fontsize=9)
        text = f"{computed} computed + {moment.num_new} new"
        say(axes, moment.num_tokens + 0.3, y + 0.5, text)
    key = "grey: K/V are kept, blue: this step computes them, white: no K/V yet"
    axes.set_title(f"{key}   (p: prompt, g: generated)", weight="normal", fontsize=9)
    return figure


@drawing
def ladder(panels: Mapping[str, SequenceOf[Rung]]) -> Picture:
    """Tokens/s of the stages so far, a panel for each machine: bars measured, ticks the bound."""
    figure = canvas(0.8 + 0.36 * max(map(len, panels.values())))
    sheets = figure.subplots(1, len(panels), squeeze=False)[0]
    colours = [BLUE, *[SKY] * len(panels)]
    for axes, colour, (title, rungs) in zip(sheets, colours, panels.items(), strict=False):
        most = max((n or 0 for rung in rungs for n in rung[1:]), default=0) or 1
        right = most * (1.05 + 0.35 * len(panels))
        letter_width = 0.07 * right / (WIDTH / len(panels) - 1.2)  # of 8 points, in tokens/s
        for y, (_, measured, predicted) in enumerate(rungs):
            end, gap = measured or 0, 0.015 * right
            box(axes, 0, y - 0.3, end, 0.6, colour)
            text = "not measured" if measured is None else number(measured)
            width = len(text) * letter_width + gap
            # The number belongs to the bar: in its end if a tick is in the way behind it.
            blocked = predicted is not None and end <= predicted < end + width + gap
            inside = blocked and end > width
            if inside:
                say(axes, end - gap, y, text, ink(colour), ha="right")
            elif not blocked:
                say(axes, end + gap, y, text)
            if predicted is not None:
                axes.vlines(predicted, y - 0.4, y + 0.4, color=TEXT, lw=2)
                bound = f"bound {number(predicted)}"
                if blocked and not inside:
                    bound = f"{text}, {bound}"
                over = end + gap + width if end > predicted else 0  # measured past its bound
                say(axes, max(predicted + gap, over), y, bound, "#596066")
        lanes(axes, [rung.name for rung in rungs])
        axes.set_xlim(0, right)
        axes.set_title(f"tokens/s, {title}")
        axes.spines["bottom"].set_visible(False)
        axes.spines["left"].set_visible(True)
        axes.tick_params(bottom=False, labelbottom=False, labelsize=9)
    return figure


def number(value: float) -> str:
    """A number with about three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
