"""The bytes of a decode step as the GPU's own counters have them, beside W + B * KV(T).

On an NVIDIA GPU with Nsight Compute, for B in 1, 16 and 128:

    ncu --metrics dram__bytes_read.sum,dram__bytes_write.sum --profile-from-start off \\
        --cache-control none --clock-control none --target-processes all --csv \\
        --log-file DIR/B.csv \\
        python -m nanoteach.bench.dram step B DIR
    python -m nanoteach.bench.dram read DIR --save FILE

`step` serves B requests with 1,024 tokens each up to a decode step, and lets the counters see that
one step, kernel by kernel: stage 8 without graphs, the kernels that its graphs hold. It leaves a
note of how long the histories were. `read` adds the counters up. Caches stay as they are between
kernels (--cache-control none), as in a run that nobody watches.

Knows: Nsight Compute's CSV. Does not know: what else it could count.
"""

import argparse
import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from nanoteach.bench.kernels import HISTORY, class_of
from nanoteach.bench.random_model import SHAPES, random_model
from nanoteach.bench.table import Row, table
from nanoteach.block_manager import blocks_needed
from nanoteach.config import EngineConfig
from nanoteach.cost_model import kv_bytes_per_token, weight_bytes_read
from nanoteach.results import check_target, save_result
from nanoteach.stages import Parts, build_graphs
from nanoteach.types import SamplingParams

SHAPE = "qwen3-0.6b"
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
WARM = 4


def watched_step(batch: int, folder: Path) -> None:
    """Serve up to a decode step of `batch` requests and let the counters see it."""
    model = random_model(SHAPE, "cuda", torch.bfloat16, max_model_len=2048)
    config = EngineConfig(
        max_num_seqs=batch, max_num_batched_tokens=16_384, max_model_len=2048,
        num_gpu_blocks_override=batch * blocks_needed(HISTORY + 100, 16),
        enable_prefix_caching=False, enforce_eager=True,
    )  # fmt: skip
    core = build_graphs(Parts(model, config))
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    seqs = [core.add_request(str(i), list(range(HISTORY)), params) for i in range(batch)]
    while not all(seq.token_times for seq in seqs):
        core.step()
    for _ in range(WARM):
        core.step()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    core.step()  # launches one step, and commits the one before
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    # What is launched counts as computed: these are the tokens whose K/V the step has moved.
    tokens = sum(seq.num_computed_tokens for seq in seqs)
    note = {"batch": batch, "tokens": tokens}
    (folder / f"{batch}.json").write_text(json.dumps(note) + "\n")


def counted(path: Path) -> tuple[Counter[str], Counter[str]]:
    """Bytes by class of kernel, and by direction ("read", "write"), from Nsight Compute's CSV.

    Raises ValueError, with what the file says, where it holds no counts.
    """
    text = path.read_text()
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    by_class, by_way = Counter[str](), Counter[str]()
    for row in csv.DictReader(lines[start:]):
        name, unit = row.get("Metric Name") or "", row.get("Metric Unit") or ""
        if name.startswith("dram__bytes_") and unit in UNITS:
            value = float(row["Metric Value"].replace(",", "")) * UNITS[unit]
            by_class[class_of(row["Kernel Name"])] += value  # type: ignore[assignment]
            by_way[name.split("_")[3].split(".")[0]] += value  # type: ignore[assignment]
    if not by_way:
        said = " | ".join(line for line in lines if line.startswith("==ERROR==")) or text[-200:]
        raise ValueError(f"{path} holds no counts of Nsight Compute. It says: {said.strip()}")
    return by_class, by_way


def dram_rows(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """GB of each step beside the model's count. Raises ValueError where there is none."""
    config, rows, data = SHAPES[SHAPE], [], {}
    notes = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    if not notes:
        raise ValueError(f"{folder} holds no notes of `step`: run it under ncu first")
    for note in sorted(notes, key=lambda note: int(note["batch"])):
        by_class, by_way = counted(folder / f"{note['batch']}.csv")
        weights, kv = weight_bytes_read(config), note["tokens"] * kv_bytes_per_token(config)
        name = f"DRAM, batch {note['batch']}"
        total = sum(by_way.values()) / 1e9
        rows.append(Row(name, "moved", "GB", [total], (weights + kv) / 1e9))
        rows.append(Row(name, "by attention", "GB", [by_class["attention"] / 1e9], kv / 1e9))
        others = total - by_class["attention"] / 1e9
        rows.append(Row(name, "by all else", "GB", [others], weights / 1e9))
        data[str(note["batch"])] = note | {"class": dict(by_class), "way": dict(by_way)}
    return rows, data


def main() -> None:
    """`step`, under ncu, or `read`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step", help="one decode step, for ncu to watch")
    step.add_argument("batch", type=int)
    read = commands.add_parser("read", help="add up what ncu has counted")
    read.add_argument("--save", type=Path, metavar="FILE", help="write a result file (JSON)")
    for command in (step, read):
        command.add_argument("folder", type=Path, help="where ncu writes B.csv")
    args = parser.parse_args()
    if args.command == "step":
        if not torch.cuda.is_available():
            parser.error("this needs an NVIDIA GPU")
        watched_step(args.batch, args.folder)
        return
    check_target(args.save)
    try:
        rows, data = dram_rows(args.folder)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(table(rows))
    if args.save:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        result = {"shape": SHAPE, "rows": [vars(row) for row in rows], "data": data}
        save_result(args.save, "python -m nanoteach.bench.dram read", device, result)


if __name__ == "__main__":
    main()
