"""How long the GPU takes for something, without what it costs to launch it; and the options of the
commands that measure it.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from nanoteach.results import check_target


def graph_us(run: Callable[[], object], repeats: int, loops: int = 20) -> list[float]:
    """Microseconds on the GPU, for each repeat, from the replays of a graph of `run`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    samples = []
    for _ in range(repeats + 1):  # the first warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(loops):
            graph.replay()
        end.record()
        end.synchronize()
        samples.append(1000 * start.elapsed_time(end) / loops)
    return samples[1:]


def arguments(about: str | None, repeats: int | None = None) -> argparse.Namespace:
    """The options of a command for an NVIDIA GPU: save, and repeats where a default is given.

    about: the module's text; its first line is the command's. Ends the program where there is no
    GPU; raises OSError where the result could not be written.
    """
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, metavar="N")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a result file (JSON)")
    args = parser.parse_args()
    check_target(args.save)
    if not torch.cuda.is_available():
        parser.error("this needs an NVIDIA GPU")
    return args
