"""What a learner has written so far, and the engine that runs on it.

A learner's folder holds their notebooks and `.nanoteach/`: one file for each right answer, named
after its target, and the predictions. Nothing else is ever written, and only there.

Knows: the folder; how to run a stage on the learner's parts and how to find a part that breaks it.
Does not know: what a right answer is.
"""

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanoteach.config import EngineConfig
from nanoteach.cost_model import VirtualClock
from nanoteach.course import parts
from nanoteach.course.checking import Check, all_checks
from nanoteach.course.limits import TimeUp, time_limit
from nanoteach.course.parts import Function
from nanoteach.hardware import HARDWARE
from nanoteach.hub import resolve_model
from nanoteach.loader import eos_token_ids, load_model, load_tokenizer
from nanoteach.reference import Comparison, Reference, compare, references
from nanoteach.stages import COURSE, Parts
from nanoteach.types import SamplingParams

FOLDER = ".nanoteach"
NAMES = {0: "measure first"} | {stage.number: stage.name.replace("_", " ") for stage in COURSE}


# --- the folder --------------------------------------------------------------------------------


def progress_folder() -> Path:
    """NANOTEACH_PROGRESS, or `.nanoteach` in this folder or the nearest one above that has it."""
    if os.environ.get("NANOTEACH_PROGRESS"):
        return Path(os.environ["NANOTEACH_PROGRESS"])
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / FOLDER).is_dir():
            return folder / FOLDER
    return here / FOLDER


def _part_file(target: str) -> Path:
    return progress_folder() / f"{target}.py"


def save_part(target: str, source: str) -> None:
    """Keep the source of a right answer."""
    path = _part_file(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


def has_part(target: str) -> bool:
    """Whether a right answer is kept."""
    return _part_file(target).is_file()


def saved_part(target: str) -> Function | None:
    """The kept answer to one exercise, as a function. If it can't be read, that is said."""
    if not has_part(target):
        return None
    path, place = _part_file(target), parts.resolve(target)
    try:
        return parts.build(place, path.read_text(), str(path))
    except (SyntaxError, ValueError) as error:
        print(f"{place.short}: what is kept of it can't be read: {error}")
        return None


def saved_parts() -> dict[str, Function]:
    """The kept answers, as functions."""
    kept = {check.target: saved_part(check.target) for check in all_checks()}
    return {target: part for target, part in kept.items() if part}


def open_notebook(number: int) -> None:
    """The first cell of a notebook: the learner's parts so far go into the engine."""
    torch.manual_seed(0)
    found = saved_parts()
    parts.reset_to(found)
    there = [check.target for check in all_checks() if check.notebook <= number]
    count = sum(target in found for target in there)
    yours = f"{count} of {len(there)}"
    print(f"Notebook {number:02d}. Parts of the engine that are yours so far: {yours}.")


def predict(name: str, value: Any, unit: str = "") -> None:
    """Keep a prediction. Put your number in the place of `...`."""
    if value is ... or value is None:
        print(f"No prediction yet: {name}.")
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        print(f"Not kept: {name}: write a number, such as 250, in the place of {value!r}.")
        return
    kept = predictions() | {name: value}
    progress_folder().mkdir(parents=True, exist_ok=True)
    (progress_folder() / "predictions.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(f"Kept: {name}: {value:,} {unit}".rstrip() + ".")


def reveal(name: str, value: float, unit: str = "") -> None:
    """Say how it is, beside what was predicted under this name."""

    def number(x: float) -> str:
        return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"

    said = predictions().get(name)
    you = f"you said {number(said)}; " if isinstance(said, (int, float)) else ""
    print(f"{name}: {you}it is {number(value)} {unit}".rstrip() + ".")


def predictions() -> dict[str, Any]:
    """All predictions that were made, by name."""
    path = progress_folder() / "predictions.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def start(folder: Path) -> int:
    """Copy the notebooks to a learner's folder, unpaired; what is there already stays as it is."""
    source = Path(__file__).resolve().parents[2] / "notebooks"
    notebooks = sorted(source.glob("[0-9][0-9]_*.ipynb"))
    if not notebooks:
        raise ValueError(
            "the notebooks are not here: run this from a clone of the repository, "
            "installed with pip install -e ."
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder, and it will be made")
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    copied = 0
    for notebook in notebooks:
        if not (folder / notebook.name).exists():
            content = json.loads(notebook.read_text(encoding="utf-8"))
            content["metadata"].pop("jupytext", None)
            text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
            (folder / notebook.name).write_text(text, encoding="utf-8")
            copied += 1
    print(f"{copied} notebooks copied to {folder}, {len(notebooks) - copied} were there already.")
    print(f"Begin:  cd {folder} && jupyter lab {notebooks[0].name}")
    return 0


def reset(yes: bool = False) -> int:
    """Remove what is kept, after saying what that is."""
    files = sorted(progress_folder().glob("*.py")) + sorted(progress_folder().glob("*.json"))
    if not files:
        print(f"Nothing is kept in {progress_folder()}.")
        return 0
    print(f"This removes from {progress_folder()}:")
    for path in files:
        print(f"  {path.name}")
    print("Your notebooks stay as they are.")
    if not yes:
        try:
            answer = input("Remove them? [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            print("Nothing was removed.")
            return 1
    for path in files:
        path.unlink()
    parts.reset_to({})
    print(f"{len(files)} files removed.")
    return 0


# --- the engine on the learner's parts ---------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A small workload on `tiny`: ragged, with shared beginnings, in a pool that runs out."""

    folder: Path
    prompts: list[list[int]]
    params: list[SamplingParams]
    expected: list[Reference]

    def config(self, stage: int) -> EngineConfig:
        """The same memory for every stage; stage 6 gets a budget smaller than a prompt."""
        return EngineConfig(
            block_size=8,
            max_num_seqs=6,
            max_model_len=160,
            num_gpu_blocks_override=20,
            max_num_batched_tokens=24 if stage >= 6 else 160,
        )

    def params_of(self, stage: int) -> list[SamplingParams]:
        """What stages 9 and 10 bring is asked for, in a way that changes no token."""
        more: dict[int, dict[str, Any]] = {
            9: {"temperature": 1.0, "top_k": 1, "top_p": 0.9, "logprobs": 1},
            10: {"stop": "no text has this"},
        }
        return [dataclasses.replace(p, **more.get(stage, {})) for p in self.params]


@dataclass(frozen=True)
class Run:
    """What a stage made of the trial. `error`: what stopped it."""

    comparison: Comparison | None
    seconds: float
    simulated: float
    error: str = ""

    @property
    def fault(self) -> str:
        """What is wrong, in one line; empty when all is well."""
        if self.error:
            return self.error
        assert self.comparison is not None
        return "" if self.comparison.exact else str(self.comparison.mismatches[0])


def make_trial() -> Trial:
    """The workload, and what transformers says to it."""
    folder = resolve_model("tiny")
    tokenizer = load_tokenizer(folder)
    beginning = "You are a friendly teller of small stories. There was once a "
    texts = [beginning + f"{who}. One day the {who}" for who in ("fox", "bear", "goat", "otter")]
    texts += ["What is 27 plus 48?", beginning * 3 + "mouse", "The", "A dragon and a dog", texts[0]]
    prompts = [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    params = [SamplingParams(max_tokens=8 + 7 * i % 33, ignore_eos=True) for i in range(len(texts))]
    return Trial(folder, prompts, params, references(folder, prompts, params))


def run_stage(trial: Trial, number: int, own: Mapping[str, Function], seconds: float = 0) -> Run:
    """Run a stage on these parts; `seconds` is a limit, 0 means none."""
    model_clock: VirtualClock | None = None
    began = time.perf_counter()
    try:
        with parts.installed(own), time_limit(seconds) if seconds else nullcontext():
            model = load_model(trial.folder, "cpu", torch.float32, max_model_len=160)
            model_clock = VirtualClock(model.config, HARDWARE["h200"], bytes_per_value=4)
            eos = eos_token_ids(trial.folder)
            tokenizer = load_tokenizer(trial.folder)
            stage = Parts(model, trial.config(number), eos, model_clock, tokenizer=tokenizer)
            began = time.perf_counter()
            build = next(one.build for one in COURSE if one.number == number)
            tokens = build(stage).generate(trial.prompts, trial.params_of(number))
            took = time.perf_counter() - began
            return Run(compare(trial.expected, tokens), took, model_clock.now())
    except TimeUp:
        return Run(None, seconds, 0.0, f"it did not end within {seconds:g} seconds")
    except Exception as error:
        took = time.perf_counter() - began
        return Run(None, took, 0.0, f"it raised {type(error).__name__}: {error}")


def blame(trial: Trial, number: int, own: Mapping[str, Function], seconds: float) -> list[str]:
    """The parts without which a stage that goes wrong is right, or which alone break it."""
    without = [
        target
        for target in own
        if not run_stage(
            trial, number, {t: f for t, f in own.items() if t != target}, seconds
        ).fault
    ]
    if without:
        return without
    return [t for t, f in own.items() if run_stage(trial, number, {t: f}, seconds).fault]


def report(own: Mapping[str, Function] | None = None) -> int:
    """How much of the engine is theirs, and whether it works. 1 if it does not."""
    own = saved_parts() if own is None else own
    checks = all_checks()
    print(f"Your parts of the engine ({progress_folder()}):\n")
    for number in sorted({check.notebook for check in checks}):
        print(_progress_line(number, [c for c in checks if c.notebook == number], own))
    mine = [check for check in checks if check.target in own]
    if not mine:
        print(
            "\nNothing is yours here yet: begin with notebook 00. If you have begun, "
            "run this in the folder of your notebooks."
        )
        return 0
    print(f"\nThe engine on your {len(mine)} parts, and on the package's own for the rest:\n")
    trial = make_trial()
    print(f"  {'stage':24} {'tokens as transformers':>22} {'seconds':>8} {'package':>8}")
    failed = False
    for number in sorted({stage for check in mine for stage in check.stages}):
        # Only the parts that the stage runs: nobody is blamed for another's fault.
        there = {check.target: own[check.target] for check in mine if number in check.stages}
        package = run_stage(trial, number, {})
        limit = 20 + 20 * package.seconds
        run = run_stage(trial, number, there, limit)
        count = f"all {run.comparison.num_tokens}" if run.comparison and not run.fault else "NO"
        name = f"{number} {NAMES[number]}"
        print(f"  {name:24} {count:>22} {run.seconds:8.2f} {package.seconds:8.2f}")
        if run.fault:
            failed = True
            guilty = blame(trial, number, there, limit)
            print(f"    {run.fault}")
            print(f"    the part: {', '.join(guilty) or 'none alone; several together'}")
        elif abs(run.simulated - package.simulated) > 1e-9:
            failed = True
            print(f"    the virtual clock shows {run.simulated:.6f} s, not {package.simulated:.6f}")
    return int(failed)


def _progress_line(number: int, checks: list[Check], own: Mapping[str, Function]) -> str:
    def names(mine: bool) -> str:
        return ", ".join(parts.resolve(c.target).short for c in checks if (c.target in own) is mine)

    count = sum(check.target in own for check in checks)
    line = f"  {number:02d} {NAMES.get(number, ''):22} {count} of {len(checks)}"
    if names(True):
        line += f"   yours: {names(True)}"
    return line + (f"   to do: {names(False)}" if names(False) else "")
