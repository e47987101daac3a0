"""Result files: a measurement with everything that is needed to judge it, or to repeat it."""

import hashlib
import json
import platform
import shutil
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parent
RESULTS = PACKAGE.parent / "figures" / "results"


def recorded(name: str) -> dict[str, Any]:
    """A result file of the repository, by its name without the ending."""
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return data


def source_hash() -> str:
    """A hash of the engine's sources: a result is older than its code when this has changed.

    The course's own modules run in no measurement, so they do not count.
    """
    digest = hashlib.sha256()
    for path in sorted(set(PACKAGE.rglob("*.py")) - set((PACKAGE / "course").rglob("*.py"))):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def environment(device: torch.device) -> dict[str, Any]:
    """What a measurement ran on."""
    import transformers

    found = {
        "date": date.today().isoformat(),
        "machine": processor_name(),
        "cores": torch.get_num_threads(),
        "device": str(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": output_of("git", "-C", str(PACKAGE), "rev-parse", "--short", "HEAD"),
        "sources": source_hash(),
    }
    if device.type == "cuda":
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found |= {"gpu": torch.cuda.get_device_name(device), "driver": output_of(*query)}
    return found


def processor_name() -> str:
    """The processor's own name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    names = [
        line.split(":")[1].strip()
        for line in (info.read_text().splitlines() if info.is_file() else [])
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


def output_of(*command: str) -> str | None:
    """What a command prints, or None where there is no such command or it fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def check_target(path: Path | None) -> None:
    """Raise OSError before the work, not after it, where a result could not be written."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if path.stat().st_size == 0:
            path.unlink()


def save_result(path: Path, command: str, device: torch.device, data: dict[str, Any]) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"command": command, "environment": environment(device), **data}
    path.write_text(json.dumps(result, indent=1) + "\n")
