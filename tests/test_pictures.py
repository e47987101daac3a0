"""The pictures: what they are drawn from is what really ran, and they can be read."""

import functools
from itertools import combinations

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text

from nanoteach.block_manager import blocks_needed
from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.config import EngineConfig
from nanoteach.cost_model import Work, step_cost
from nanoteach.course import pictures
from nanoteach.course.pictures import (
    QWEN3,
    Held,
    Picture,
    RecordingClock,
    Request,
    Run,
    Rung,
    static_run,
    traced_run,
)
from nanoteach.hardware import HARDWARE
from nanoteach.hub import resolve_model
from nanoteach.loader import load_model
from nanoteach.prefix_cache import PrefixCachingBlockManager
from nanoteach.stages import STAGES, Parts
from nanoteach.types import SamplingParams, Trace

H200 = HARDWARE["h200"]
FOUR_AND_FOUR = [Request(5, n) for n in (10, 20, 50, 100, 40, 60, 30, 50)]
STALL = [*[Request(16, 60)] * 3, Request(8192, 8, arrival=0.005)]
GROWING = [Request(20, 30), Request(50, 60), Request(9, 100), Request(35, 45)]


def prefix_run() -> Run:
    """Two requests that share two blocks and run, and one that shares one and is over."""
    shared = list(range(8))
    run = Run(
        [
            Request([*shared, 20, 21, 22, 23, 24], 9),
            Request([*shared, 30, 31, 32, 33, 34], 9),
            Request([*shared[:4], 60, 61, 62, 63, 64], 1),
        ],
        manager=PrefixCachingBlockManager,
        block_size=4,
        num_blocks=24,
    )
    run.step()
    run.step()
    return run


def nodes_of(run: Run) -> list[pictures.Node]:
    assert isinstance(run.manager, PrefixCachingBlockManager)
    return pictures.prefix_nodes(run.manager, run.sequences.values())


@functools.cache
def all_pictures() -> dict[str, Picture]:
    """Drawn once, for tests that only look."""
    return draw_all()


def draw_all() -> dict[str, Picture]:
    """One of each."""
    naive = static_run([Request(12, 24)], stage="naive").steps
    cached = static_run([Request(12, 24)], batch_size=1).steps
    prompts = traced_run([Request(128, 1), Request(256, 1), Request(64, 1)])
    first = traced_run(STALL)
    chunked = traced_run(STALL, scheduler=ChunkedPrefillScheduler, max_num_batched_tokens=512)
    points = {"1 decode": [Work(1, 1023)], "a prompt": [Work(2048, 0)]}
    rungs = [Rung("1 naive", 3.1, 4), Rung("2 KV cache", 40, 55), Rung("3 paged", None, 120)]
    return {
        "naive_triangle": pictures.naive_triangle(naive, cached),
        "reservation_and_pages": pictures.reservation_and_pages(
            static_run(GROWING, row_len=256).memory,
            static_run(GROWING, row_len=256, stage="pages").memory,
        ),
        "slot_occupancy": pictures.slot_occupancy(
            pictures.static_stays(
                static_run(FOUR_AND_FOUR).steps, [r.max_tokens for r in FOUR_AND_FOUR]
            ),
            pictures.continuous_stays(traced_run(FOUR_AND_FOUR, max_num_seqs=4).trace),
        ),
        "packed_prefill": pictures.packed_prefill(
            prompts.runner.batches[0].cu_seqlens, prompts.steps[0].names
        ),
        "prefix_tree": pictures.prefix_tree(nodes_of(prefix_run())),
        "step_timeline": pictures.step_timeline(
            {"prompts first": first.steps, "512 tokens a step": chunked.steps}, first.clock.label
        ),
        "block_tables": pictures.block_tables(prefix_run().pool(), "B", "stage 5"),
        "roofline": pictures.roofline(QWEN3, H200, points, {"1 decode": 9e-4}, here=(32, 1024)),
        "one_request": pictures.one_request(pictures.request_moments()),
        "ladder": pictures.ladder({"this machine": rungs, "recorded, H200": rungs}),
    }


def said(figure: Figure) -> str:
    """All the words of a figure."""
    return "\n".join(text.get_text() for text in figure.findobj(Text) if text.get_visible())


# --- runs ---------------------------------------------------------------------------------------


def test_a_run_is_a_real_one() -> None:
    run = Run(GROWING, block_size=4, num_blocks=40, scheduler=ChunkedPrefillScheduler)
    while run.step():
        assert run.core.check() == []
    for request, seq in zip(GROWING, run.sequences.values(), strict=True):
        assert seq.num_prompt_tokens == request.prompt_len
        assert seq.num_output_tokens == request.max_tokens
    # Each token but the last was computed, and again after a preemption.
    assert run.core.scheduler.num_preemptions > 0
    assert sum(step.num_new for step in run.steps) > sum(
        r.prompt_len + r.max_tokens - 1 for r in GROWING
    )
    seconds = [step_cost(QWEN3, step.work).seconds(H200) for step in run.steps]
    assert [step.end - step.start for step in run.steps] == pytest.approx(seconds)


def test_requests_come_at_their_time() -> None:
    run = traced_run([Request(8, 2, arrival=2.0), Request(8, 2), Request(8, 2, arrival=1e-5)])
    assert list(run.sequences) == ["B", "C", "A"]
    assert run.steps[0].names == ("B",)
    arrivals = [seq.arrival_time for seq in run.sequences.values()]
    assert arrivals[0] == 0 and arrivals[1] == run.steps[0].end and arrivals[2] == 2.0


def test_a_request_that_can_never_be_served_says_so_at_once() -> None:
    with pytest.raises(ValueError, match="the whole pool has 2"):
        Run([Request(40, 2)], num_blocks=2)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        Run([Request(40, 2)], max_num_batched_tokens=16)


def test_an_abort_ends_requests_that_wait_run_or_are_yet_to_come() -> None:
    run = Run([Request(4, 9), Request(4, 9), Request(4, 9, arrival=1.0)], max_num_seqs=1)
    run.step()
    for name in "ABC":
        run.abort(name)
    assert not run.step() and run.core.check() == [] and run.pool().tables == {}


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6])
def test_the_pretended_model_changes_nothing_but_the_tokens(number: int) -> None:
    """The tiny model makes the same steps, block for block."""
    requests = [Request(7, 5), Request(20, 9), Request(3, 12)]
    model = load_model(resolve_model("tiny"), torch.device("cpu"), torch.float32)
    clock, trace = RecordingClock(QWEN3, H200), Trace()
    config = EngineConfig(
        max_num_seqs=2,
        max_model_len=32,
        num_gpu_blocks_override=4,
        max_num_batched_tokens=32 if number < 6 else 8,
    )
    stage = STAGES[number - 1].build(Parts(model, config, (), clock, trace))
    prompts = [[i + 9 for i in range(r.prompt_len)] for r in requests]
    stage.generate(prompts, [SamplingParams(max_tokens=r.max_tokens) for r in requests])
    if number < 4:
        names = {1: "naive", 2: "rows", 3: "pages"}
        kind = names[number]
        run = static_run(requests, stage=kind, batch_size=2, row_len=32)  # type: ignore[arg-type]
        assert [step.work for step in run.steps] == [step.work for step in clock.steps]
        return
    scheduler = {4: pictures.Scheduler, 6: ChunkedPrefillScheduler}[number]
    again = traced_run(
        requests,
        scheduler=scheduler,
        manager=PrefixCachingBlockManager if number > 4 else pictures.BlockManager,
        num_blocks=4,
        max_num_seqs=2,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    assert [step.work for step in again.steps] == [step.work for step in clock.steps]
    kinds = [(event.step, event.kind) for event in trace.events]
    assert [(event.step, event.kind) for event in again.trace.events] == kinds
    assert set(pictures.named_steps(clock, trace)[0].names) == {"generate-0", "generate-1"}


# --- what a picture needs -----------------------------------------------------------------------


def test_memory_is_what_the_requests_hold() -> None:
    rows = static_run(GROWING, row_len=256).memory
    pages = static_run(GROWING, row_len=256, stage="pages").memory
    assert rows[0]["B"] == Held(50, 256, 256) and rows[40]["B"] == Held(90, 256, 256)
    assert pages[0]["B"] == Held(50, 64, 16) and pages[40]["B"] == Held(90, 96, 16)
    for moment in pages:
        assert all(h.held == 16 * blocks_needed(h.filled, 16) for h in moment.values())
    run = traced_run(GROWING)
    held = pictures.memory_of_pages(run.pools)
    assert held[0]["B"] == Held(50, 64, 16) and "A" not in held[-1]
    # A batch with fewer requests leaves rows empty, and reserved.
    last = static_run(GROWING[:3], batch_size=2).memory[-1]
    assert last["row 1"].filled == 0 and last["row 1"].held == last["C"].held == 110


def test_four_requests_and_what_joins_in_their_place() -> None:
    wanted = [r.max_tokens for r in FOUR_AND_FOUR]
    static = pictures.static_stays(static_run(FOUR_AND_FOUR).steps, wanted)
    assert [(s.name, s.slot, s.first, s.last) for s in static[:5]] == [
        ("A", 0, 1, 100), ("B", 1, 1, 100), ("C", 2, 1, 100), ("D", 3, 1, 100), ("E", 0, 101, 160),
    ]  # fmt: skip
    run = traced_run(FOUR_AND_FOUR, max_num_seqs=4)
    continuous = {s.name: s for s in pictures.continuous_stays(run.trace)}
    assert [len(continuous[name].working) for name in "ABCDEFGH"] == wanted
    assert [len(s.working) for s in static] == wanted
    assert continuous["E"].slot == 0 and continuous["E"].first == continuous["A"].last + 1 == 11
    assert pictures.share_working(static) == 360 / 640
    assert max(s.last for s in continuous.values()) == 104  # 4 steps of prefill on the way


def test_a_preempted_request_leaves_its_slot_and_comes_back() -> None:
    run = traced_run([Request(8, 6), Request(9, 4)], block_size=4, num_blocks=5)
    stays = pictures.continuous_stays(run.trace)
    assert [stay.name for stay in stays] == ["A", "B", "B"]
    assert stays[1].last < stays[2].first
    unfinished = Run([Request(8, 6)])
    unfinished.step()
    assert pictures.continuous_stays(unfinished.trace)[0].last == 1


def test_the_tree_is_the_managers() -> None:
    run = prefix_run()
    by_tokens = {node.token_ids: node for node in nodes_of(run)}
    root, second = by_tokens[0, 1, 2, 3], by_tokens[4, 5, 6, 7]
    assert root.parent is None and second.parent == root.block
    assert root.holders == second.holders == ("A", "B")
    assert root.ref_count == 2 and root.place is None
    leaf, over = by_tokens[20, 21, 22, 23], by_tokens[60, 61, 62, 63]
    assert (leaf.parent, leaf.holders) == (second.block, ("A",))
    assert (over.parent, over.ref_count, over.holders) == (root.block, 0, ())
    assert list(run.manager.free_blocks)[over.place or 0] == over.block
    assert {node.block for node in nodes_of(run)} == run.pool().cached


def test_no_block_of_the_tree_is_drawn_over_another() -> None:
    places = pictures.tree_places(nodes_of(prefix_run()))
    for (x, y), (x2, y2) in combinations(places.values(), 2):
        assert x != x2 or abs(y - y2) >= 1


def test_a_pool_is_as_it_was_in_the_step() -> None:
    run = traced_run([Request(10, 3), Request(5, 3)], block_size=4, num_blocks=12)
    assert run.pools[0].tables == {"A": [0, 1, 2], "B": [3, 4]}
    assert run.pools[0].computed == {"A": 10, "B": 5}
    assert run.pools[0].owners(1) == ["A"] and run.pools[0].owners(9) == []
    assert run.pools[0].free == list(range(5, 12))
    assert run.pools[-1].computed == {"A": 12, "B": 7}
    assert run.pool().tables == {} and len(run.pool().free) == 12


def test_chunks_take_the_stall_away() -> None:
    first = traced_run(STALL)
    chunked = traced_run(STALL, scheduler=ChunkedPrefillScheduler, max_num_batched_tokens=512)
    long, short = (pictures.longest_gap(run.steps) for run in (first, chunked))
    assert long and short and long.name == "A"
    assert long.start <= STALL[3].arrival + 3e-4 and long.seconds > 10 * short.seconds
    prefill = step_cost(QWEN3, [Work(8192, 0)]).seconds(H200)
    assert long.seconds == pytest.approx(prefill, rel=0.05)
    times = pictures.token_times(chunked.steps)
    assert {name: len(got) for name, got in times.items()} == {"A": 60, "B": 60, "C": 60, "D": 8}
    assert times["D"] == chunked.sequences["D"].token_times
    assert pictures.longest_gap(traced_run([Request(4, 1)]).steps) is None


def test_one_request_is_met_in_five_ways() -> None:
    moments = [tuple(moment)[1:] for moment in pictures.request_moments().values()]
    # prompt, tokens, computed, new
    assert moments == [(9, 9, 0, 9), (9, 11, 10, 1), (9, 9, 8, 1), (9, 9, 4, 4), (9, 10, 0, 10)]


# --- drawing ------------------------------------------------------------------------------------


def test_every_picture_can_be_read() -> None:
    for name, figure in all_pictures().items():
        figure.draw_without_rendering()
        assert figure.bbox.width <= 1000, name
        texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
        boxes = {}
        for text in texts:
            assert text.get_fontsize() >= 8, f"{name}: {text.get_text()!r} is too small"
            extent = text.get_window_extent()
            # Ticks outside of an axis' limits have a text and are not drawn.
            if not text.get_clip_on() and extent.width:
                boxes[text] = extent
        for text, extent in boxes.items():
            inside = extent.x0 >= -2 and extent.x1 <= figure.bbox.width + 2
            inside &= extent.y0 >= -2 and extent.y1 <= figure.bbox.height + 2
            assert inside, f"{name}: {text.get_text()!r} leaves the picture"


def test_words_do_not_cover_each_other() -> None:
    for name, figure in all_pictures().items():
        figure.draw_without_rendering()
        labels = [t for axes in figure.axes for t in axes.texts if t.get_text().strip()]
        titles = [
            t for axes in figure.axes
            for t in (axes.title, axes._left_title, axes._right_title, axes.xaxis.label)
            if t.get_text()
        ]  # fmt: skip
        for a, b in combinations([*labels, *titles], 2):
            first, second = (t.get_window_extent().padded(-1) for t in (a, b))
            assert not first.overlaps(second), f"{name}: {a.get_text()!r} on {b.get_text()!r}"


def test_the_same_data_give_the_same_picture_whatever_the_notebook_has_set() -> None:
    before = {name: figure.png() for name, figure in draw_all().items()}
    with matplotlib.rc_context({"font.size": 21, "axes.facecolor": "black", "figure.dpi": 30}):
        after = {name: figure.png() for name, figure in draw_all().items()}
    assert before == after
    assert all(png.startswith(b"\x89PNG") for png in before.values())
    assert max(map(len, before.values())) < 100_000


def test_the_numbers_in_the_pictures() -> None:
    words = {name: said(figure) for name, figure in all_pictures().items()}
    assert "529 computed again, for nothing" in words["naive_triangle"]  # 12 + 13 + ... + 34
    assert words["naive_triangle"].count("35 tokens computed for the first time") == 2
    assert "128² + 256² + 64² = 86,016" in words["packed_prefill"]
    assert "448² = 200,704, 2.33 times as many" in words["packed_prefill"]
    assert "static batches: done after 160 steps" in words["slot_occupancy"]
    assert "continuous batching: done after 104 steps" in words["slot_occupancy"]
    assert "milliseconds (simulated, H200)" in words["step_timeline"]
    assert "held by 2: A, B" in words["prefix_tree"]
    assert "free, place" in words["prefix_tree"]
    assert "×2" in words["block_tables"]
    assert "27,868 tokens/s" in words["roofline"]
    assert "not measured" in words["ladder"] and "bound 120" in words["ladder"]


def test_a_measured_number_stands_at_its_bar_and_the_bound_at_its_tick() -> None:
    rungs = [Rung("rows", 100, 506), Rung("pages", 300, 310), Rung("slow", 3, 9)]
    figure = pictures.ladder({"here": rungs})
    figure.draw_without_rendering()
    axes = figure.axes[0]
    places = {text.get_text(): text for text in axes.texts}
    assert 100 < places["100"].get_position()[0] < 130
    assert places["bound 506"].get_position()[0] > 506
    inside = places["300"].get_window_extent()
    assert inside.x1 <= axes.transData.transform((300, 0))[0]
    assert "3, bound 9" in places  # no room between the two


def test_what_is_filled_has_its_name_however_little_it_is() -> None:
    rows = [{"A": Held(5 + step, 1000, 1000)} for step in range(50)]
    pages = [{"A": Held(5 + step, 64, 16)} for step in range(50)]
    figure = pictures.reservation_and_pages(rows, pages)
    figure.draw_without_rendering()
    _, near, left, right = figure.axes
    (name,) = (text for text in left.texts if text.get_text() == "filled")
    assert name.get_position()[1] > 60 and name.get_color() == pictures.BLUE
    assert "64 at most" in right.texts[0].get_text()
    assert near.get_xlabel() == "tokens, drawn 15 times as large" and near.get_xlim()[1] < 100


def test_empty_things_can_be_drawn() -> None:
    run = Run(manager=PrefixCachingBlockManager, num_blocks=8)
    assert "nobody runs" in said(pictures.block_tables(run.pool()))
    assert "nothing is cached yet" in said(pictures.prefix_tree(nodes_of(run)))
