"""How long the GPU takes for something, without what it costs to launch it."""

from collections.abc import Callable

import torch


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
