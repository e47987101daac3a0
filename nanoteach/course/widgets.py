"""Widgets: knobs on what really runs, each with a still picture for pages that cannot turn them.

An explorer is a plain object: its attributes are the knobs, its methods the buttons, `picture` and
`text` show where it is. A `Panel` puts controls on one.

Knows: ipywidgets, if it is installed. Does not know: how anything is drawn or scheduled.
"""

import base64
import functools
import html
import importlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from nanoteach.chunked_prefill import ChunkedPrefillScheduler
from nanoteach.cost_model import Work, kv_bytes_per_token, step_cost, weight_bytes_read
from nanoteach.course import pictures
from nanoteach.course.pictures import QWEN3, Picture, Request, Run, longest_gap, traced_run
from nanoteach.hardware import HARDWARE, hardware_named
from nanoteach.prefix_cache import PrefixCachingBlockManager

# --- explorers ----------------------------------------------------------------------------------


class Explorer(Protocol):
    """What a panel shows."""

    def picture(self) -> Picture:
        """How it stands."""
        ...

    def text(self) -> str:
        """The same in a few lines of words."""
        ...


@dataclass
class RooflineExplorer:
    """A decode step of Qwen3-0.6B: how fast can it be, and why not faster?"""

    batch: int = 32
    context: int = 1024
    gpu: str = "h200"

    @property
    def tokens_per_second(self) -> float:
        """At most."""
        return pictures.decode_speed(QWEN3, hardware_named(self.gpu), self.batch, self.context)[0]

    @property
    def limit(self) -> Literal["compute", "memory"]:
        """What sets that bound."""
        return pictures.decode_speed(QWEN3, hardware_named(self.gpu), self.batch, self.context)[1]

    def picture(self) -> Picture:
        """See `Explorer.picture`."""
        name = "1 decode" if self.batch == 1 else f"{self.batch} decodes"
        step = {name: [Work(1, self.context - 1)] * self.batch}
        return pictures.roofline(
            QWEN3,
            hardware_named(self.gpu),
            step,
            contexts=sorted({128, 1024, 8192, self.context}),
            here=(self.batch, self.context),
        )

    def text(self) -> str:
        """See `Explorer.text`."""
        hardware = hardware_named(self.gpu)
        cost = step_cost(QWEN3, [Work(1, self.context - 1)] * self.batch)
        weights = weight_bytes_read(QWEN3) / hardware.read_bandwidth
        history = self.batch * self.context * kv_bytes_per_token(QWEN3) / hardware.read_bandwidth
        what = "Reading K/V" if history > weights else "Reading the weights"
        if self.limit == "compute":
            what = "Computing"
        return (
            f"Qwen3-0.6B, bf16, {hardware.name}: at most {self.tokens_per_second:,.0f} tokens/s, "
            f"{1e3 * cost.seconds(hardware):.2f} ms a step. {what} limits it.\n"
            f"Reading weights {1e3 * weights:.2f} ms + K/V {1e3 * history:.2f} ms; "
            f"computing {1e3 * cost.flops / hardware.flops:.2f} ms."
        )


class BlockTableExplorer:
    """A small engine, stepped by hand, and who owns which block of its pool."""

    def __init__(self) -> None:
        self.run = Run(block_size=4, num_blocks=24, max_num_seqs=6, max_model_len=64)
        self.prompt = 10
        self.max_tokens = 8
        self.request = ""
        self.num_steps = 0
        self.done = "Nothing has happened yet."

    @property
    def requests(self) -> list[str]:
        """Those that wait or run."""
        return [*(coming[1] for coming in self.run.coming), *self.run.core.sequences]

    def add(self) -> None:
        """Queue a request of `prompt` tokens that generates `max_tokens`."""
        name = self.run.add(Request(self.prompt, self.max_tokens))
        self.request = self.request if self.request in self.requests else name
        self.done = f"{name} is in the queue, with {self.prompt} prompt tokens."

    def step(self) -> None:
        """One step of the engine."""
        if not self.requests:
            self.done = "There is nothing to do: add a request."
            return
        before = len(self.run.trace.events)
        self.run.step()
        self.num_steps += 1
        told = []
        for _, _, kind, name, data in self.run.trace.events[before:]:
            if kind == "step":
                told.append("computed " + ", ".join(f"{n} of {who}" for who, n in data.items()))
            else:
                told.append(f"{name} {kind}" + (f" {data}" if data else ""))
        self.done = "; ".join(told)

    def abort(self) -> None:
        """End the chosen request."""
        if self.request in self.requests:
            self.run.abort(self.request)
            self.done = f"{self.request} is aborted, and its blocks are free."

    def picture(self) -> Picture:
        """See `Explorer.picture`."""
        title = f"after step {self.num_steps}"
        return pictures.block_tables(self.run.pool(), self.request or None, title)

    def text(self) -> str:
        """See `Explorer.text`."""
        waiting = [coming[1] for coming in self.run.coming]
        waiting += [seq.request_id for seq in self.run.core.scheduler.waiting]
        free = ", ".join(map(str, self.run.manager.free_blocks)) or "none"
        queue = ", ".join(waiting) or "empty"
        return f"{self.done}\nFree blocks, next first: {free}\nQueue: {queue}"


@dataclass
class SchedulerExplorer:
    """Three requests that decode, and a long prompt that arrives: prompts first, or in chunks?

    `arrival` is in milliseconds, `budget` in tokens a step of the chunked scheduler.
    """

    budget: int = 512
    arrival: int = 5
    prompt: int = 8192

    def runs(self) -> tuple[Run, Run]:
        """The same requests under both schedulers."""
        return run_both(self.budget, self.arrival, self.prompt)

    @property
    def longest_waits(self) -> tuple[float, float]:
        """Seconds between two tokens, at most, prompts first and chunked."""
        first, chunked = (longest_gap(run.steps) for run in self.runs())
        assert first and chunked
        return first.seconds, chunked.seconds

    @property
    def first_tokens(self) -> tuple[float, float]:
        """Seconds from the long prompt's arrival to its first token (TTFT), likewise."""
        first, chunked = (
            pictures.token_times(run.steps)["D"][0] - self.arrival / 1e3 for run in self.runs()
        )
        return first, chunked

    def picture(self) -> Picture:
        """See `Explorer.picture`."""
        first, chunked = self.runs()
        panels = {"prompts first": first.steps, f"{self.budget:,} tokens a step": chunked.steps}
        return pictures.step_timeline(panels, first.clock.label)

    def text(self) -> str:
        """See `Explorer.text`."""
        waits, first_tokens = self.longest_waits, self.first_tokens
        return (
            f"Longest wait between two tokens: {1e3 * waits[0]:.2f} ms prompts first, "
            f"{1e3 * waits[1]:.2f} ms in chunks.\nFrom D's arrival to its first token: "
            f"{1e3 * first_tokens[0]:.2f} ms and {1e3 * first_tokens[1]:.2f} ms (simulated, H200)."
        )


@functools.lru_cache(maxsize=1)
def run_both(budget: int, arrival: int, prompt: int) -> tuple[Run, Run]:
    """See `SchedulerExplorer`, which asks for them several times."""
    requests = [*[Request(16, 60)] * 3, Request(prompt, 8, arrival=arrival / 1e3)]
    chunked = {"scheduler": ChunkedPrefillScheduler, "max_num_batched_tokens": budget}
    return traced_run(requests), traced_run(requests, **chunked)


PROMPTS = (
    "you are a kind teller of stories . tell me about a fox",
    "you are a kind teller of stories . tell me about a bear and a goat",
    "you are a kind teller of stories . sing a song about the sea",
    "you are a strict teacher of numbers . what is 2 plus 3 ?",
    "once upon a time there was a small dragon who was afraid of fire",
)


class PrefixExplorer:
    """Prompts, a word a token, and the blocks that they leave in a cache of 12 blocks."""

    first_word = 100_000  # below are the tokens that are generated

    def __init__(self) -> None:
        self.run = Run(
            manager=PrefixCachingBlockManager, block_size=4, num_blocks=12, max_model_len=48
        )
        assert isinstance(self.run.manager, PrefixCachingBlockManager)
        self.manager = self.run.manager
        self.vocabulary: list[str] = []
        self.prompt = PROMPTS[0]
        self.keep = True
        self.done = "Nothing has happened yet."

    @property
    def running(self) -> list[str]:
        """Requests that hold blocks, the oldest first."""
        return [seq.request_id for seq in self.run.core.scheduler.running]

    @property
    def free_order(self) -> list[int]:
        """Free blocks, least recently used first: the order in which they are reused."""
        return list(self.manager.free_blocks)

    def send(self) -> None:
        """Compute the prompt. It goes on running if `keep`, else it is done after one token."""
        words = self.prompt.split()
        if not words:
            raise ValueError("the prompt is empty: write a few words")
        self.vocabulary += [w for w in dict.fromkeys(words) if w not in self.vocabulary]
        tokens = [self.first_word + self.vocabulary.index(word) for word in words]
        before = dict(self.manager.name_of)
        name = self.run.add(Request(tokens, 2 if self.keep else 1))
        self.run.step()
        waited = not self.run.sequences[name].num_output_tokens
        # It waits where too few blocks are free, until somebody who runs is done.
        while not self.run.sequences[name].num_output_tokens:
            self.run.step()
        num_cached = self.run.sequences[name].num_cached_tokens or 0
        now = self.manager.name_of
        gone = [f"block {block}" for block in sorted(before) if now.get(block) != before[block]]
        self.done = (
            f"{name}: {num_cached} of {len(words)} tokens were in the cache, "
            f"{len(words) - num_cached} computed."
        )
        if waited:
            self.done += " It had to wait for blocks until others were done."
        if gone:
            self.done += f" Lost from the cache: {', '.join(gone)}."

    def finish(self) -> None:
        """The oldest running request is over: its blocks are free, and stay cached."""
        if not self.running:
            self.done = "Nobody runs."
            return
        name = self.running[0]
        self.run.abort(name)
        self.done = f"{name} is over. Its full blocks stay in the cache until they are needed."

    def words(self, token_ids: SequenceOf[int]) -> str:
        """A block's tokens as words."""
        known = [t - self.first_word for t in token_ids if t >= self.first_word]
        rest = " …" if len(known) < len(token_ids) else ""
        return " ".join(self.vocabulary[i] for i in known) + rest

    def picture(self) -> Picture:
        """See `Explorer.picture`."""
        nodes = pictures.prefix_nodes(self.manager, self.run.sequences.values())
        return pictures.prefix_tree(nodes, self.words)

    def text(self) -> str:
        """See `Explorer.text`."""
        cached = self.manager.name_of
        order = ", ".join(f"{b}{' (cached)' if b in cached else ''}" for b in self.free_order)
        running = ", ".join(self.running) or "nobody"
        return f"{self.done}\nRunning: {running}\nFree blocks, next first: {order or 'none'}"


# --- panels -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Control:
    """A knob for the explorer's attribute `name`, or a button for its method.

    A choice with a string for `options` takes them from the attribute of that name.
    """

    kind: Literal["slider", "choice", "text", "tick", "button"]
    name: str
    label: str
    options: SequenceOf[Any] | str = ()


class Panel:
    """An explorer with its controls, and a still picture of how it starts.

    `controls` are ipywidgets by the names of what they turn; without ipywidgets there are none.
    """

    def __init__(self, explorer: Explorer, *controls: Control) -> None:
        self.explorer = explorer
        self.specs = {control.name: control for control in controls}
        self.still = explorer.picture()
        self.controls: dict[str, Any] = {}
        self.box: Any = None
        self.updating = False
        try:
            self.ipywidgets: Any = importlib.import_module("ipywidgets")
        except ImportError:
            return
        self.controls = {control.name: self.make(control) for control in controls}
        self.image = self.ipywidgets.Image(format="png", layout={"max_width": "100%"})
        self.words = self.ipywidgets.HTML()
        row = {"flex_flow": "wrap", "grid_gap": "0 12px"}
        knobs = self.ipywidgets.HBox(list(self.controls.values()), layout=row)
        self.box = self.ipywidgets.VBox([knobs, self.words, self.image])
        self.show(self.still)

    def options(self, control: Control) -> list[Any]:
        """What a control lets one choose from."""
        options = control.options
        return list(getattr(self.explorer, options) if isinstance(options, str) else options)

    def make(self, control: Control) -> Any:
        """The widget of a control."""
        widgets = self.ipywidgets
        if control.kind == "button":
            button = widgets.Button(description=control.label)
            button.on_click(lambda _: self.act(getattr(self.explorer, control.name)))
            return button
        style = {"description_width": "auto"}
        settings: dict[str, Any] = {"description": control.label, "style": style}
        settings["value"] = getattr(self.explorer, control.name)
        options, narrow = self.options(control), {"width": "max-content"}
        if control.kind == "slider":
            knob = widgets.SelectionSlider(options=options, continuous_update=False, **settings)
        elif control.kind == "choice":
            knob = widgets.Dropdown(options=options, layout=narrow, **settings)
        elif control.kind == "tick":
            knob = widgets.Checkbox(indent=False, layout=narrow, **settings)
        else:
            knob = widgets.Combobox(options=options, layout={"width": "30em"}, **settings)
        knob.observe(lambda change: self.turn(control.name, change["new"]), names="value")
        return knob

    def turn(self, name: str, value: Any) -> None:
        """A knob was turned."""
        if not self.updating:
            self.act(lambda: setattr(self.explorer, name, value))

    def act(self, action: Any) -> None:
        """Do something to the explorer, and show what came of it; a ValueError is shown as text."""
        try:
            action()
        except ValueError as error:
            self.words.value = f"<pre>{html.escape(str(error))}</pre>"
            return
        self.show(self.explorer.picture())

    def show(self, picture: Picture) -> None:
        """Bring the widgets up to date."""
        self.updating = True
        for name, control in self.specs.items():
            if control.kind == "choice":
                value, options = getattr(self.explorer, name), self.options(control)
                self.controls[name].options = options
                self.controls[name].value = value if value in options else None
        self.updating = False
        self.image.value = picture.png()
        self.words.value = f"<pre>{html.escape(self.explorer.text())}</pre>"

    def _ipython_display_(self) -> None:
        """One output with both: a page that can't turn the knobs takes the still picture."""
        display: Any = importlib.import_module("IPython.display").display
        if self.box is None:
            print("This widget needs ipywidgets (pip install ipywidgets). How it starts:")
            display(self.still)
            return
        picture = base64.b64encode(self.still.png()).decode()
        still = {"text/plain": repr(self.still), "image/png": picture}
        display(self.box._repr_mimebundle_() | still, raw=True)


def powers(first: int, last: int) -> list[int]:
    """Powers of two, from first to last."""
    return [2**i for i in range(first.bit_length() - 1, last.bit_length())]


def roofline() -> Panel:
    """Batch, context and GPU: the most tokens/s that a decode step gives, and what limits it."""
    return Panel(
        RooflineExplorer(),
        Control("slider", "batch", "requests", powers(1, 1024)),
        Control("slider", "context", "tokens each", powers(16, 32_768)),
        Control("choice", "gpu", "GPU", list(HARDWARE)),
    )


def block_table_explorer() -> Panel:
    """Step a small engine, add requests and abort them, and watch its pool of blocks."""
    explorer = BlockTableExplorer()
    for explorer.prompt in (6, 13, 9):
        explorer.add()
    explorer.request = "B"
    for _ in range(3):
        explorer.step()
    return Panel(
        explorer,
        Control("button", "step", "step"),
        Control("button", "add", "add a request"),
        Control("slider", "prompt", "prompt tokens", range(1, 41)),
        Control("choice", "request", "follow", "requests"),
        Control("button", "abort", "abort it"),
    )


def scheduler_timeline() -> Panel:
    """A long prompt meets three decodes: move its arrival, and the budget of a chunked step."""
    return Panel(
        SchedulerExplorer(),
        Control("slider", "budget", "tokens a step", powers(64, 8192)),
        Control("slider", "arrival", "arrives at, ms", range(0, 16)),
        Control("slider", "prompt", "prompt tokens", powers(512, 16_384)[:-1]),
    )


def prefix_cache_explorer() -> Panel:
    """Send prompts and see which blocks they share, who holds these, and which are lost first."""
    explorer = PrefixExplorer()
    for explorer.prompt, explorer.keep in zip(PROMPTS[:3], (True, True, False), strict=True):
        explorer.send()
    explorer.keep = True
    return Panel(
        explorer,
        Control("text", "prompt", "prompt", PROMPTS),
        Control("tick", "keep", "keep it running"),
        Control("button", "send", "send"),
        Control("button", "finish", "finish the oldest"),
    )
