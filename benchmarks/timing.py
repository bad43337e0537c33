"""Times on a GPU: replay of a CUDA graph that holds many calls over different slots, and host time of eager calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence

import torch

POOL_BYTES = 4 << 30
"""Far larger than any L2."""


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 12) -> float:
    """Microseconds of one call on the GPU: all calls in one graph, median over replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def eager_us(calls: Sequence[Callable[[], object]], rounds: int = 30) -> tuple[float, float]:
    """Microseconds of one eager call: host time until it returns, and wall time until the GPU is done."""
    for call in calls:
        call()
    host, wall = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for call in calls:
            call()
        host.append((time.perf_counter() - start) / len(calls))
        torch.cuda.synchronize()
        wall.append((time.perf_counter() - start) / len(calls))
    return statistics.median(host) * 1e6, statistics.median(wall) * 1e6


def slot_sets(batch: int, slots: int, most: int = 24) -> list[torch.Tensor]:
    """Disjoint random slots of several calls."""
    order = torch.randperm(slots, device="cuda").to(torch.int32)
    count = max(1, min(slots // batch, most))
    return [order[i * batch : (i + 1) * batch].clone() for i in range(count)]
