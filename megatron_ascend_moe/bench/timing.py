"""Device time of a call: CUDA graph replays where the device captures graphs, events or the clock elsewhere."""

import statistics
import time
from collections.abc import Callable

import torch

CALLS = 12  # of one measurement, each with inputs of its own turn
REPEATS = 7  # measurements, of which the median counts


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def graph_seconds(call: Callable[[int], object], device: torch.device) -> float:
    """Seconds of one call on the device alone: `call(i)` uses the i-th set of inputs, so that none is in the L2
    cache from the call before. Without graphs (NPU, CPU) the host's side counts too."""
    if device.type != "cuda":
        return call_seconds(call, device)
    call(0)
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    graph.replay()
    return _median_seconds(graph.replay, device) / CALLS


def call_seconds(call: Callable[[int], object], device: torch.device) -> float:
    """Seconds of one call, launched from the host as a program does."""

    def calls() -> None:
        for i in range(CALLS):
            call(i)

    calls()
    return _median_seconds(calls, device) / CALLS


def host_seconds(call: Callable[[int], object], device: torch.device) -> float:
    """Seconds that the host is busy with one call, before the device has finished it."""
    call(0)
    seconds = []
    for _ in range(REPEATS):
        synchronize(device)
        start = time.perf_counter()
        for i in range(CALLS):
            call(i)
        seconds.append((time.perf_counter() - start) / CALLS)
    synchronize(device)
    return statistics.median(seconds)


def _median_seconds(run: Callable[[], None], device: torch.device) -> float:
    return statistics.median(_seconds(run, device) for _ in range(REPEATS))


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    event = getattr(torch, device.type).Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    run()
    end.record()
    synchronize(device)
    return start.elapsed_time(end) / 1e3


class Copies:
    """Seconds of a copy that moves as many bytes, measured once for each size."""

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds: dict[int, float] = {}

    def seconds(self, moved_bytes: int) -> float:
        """A copy that reads half of `moved_bytes` and writes as many; the faster of torch's copy of bytes and its
        element-wise kernel, since the driver's copy is slow at some sizes."""
        size = max(moved_bytes // 2 // 512 * 512, 512)
        if size not in self._seconds:
            pairs = [
                (torch.zeros(size // 4, device=self._device), torch.empty(size // 4, device=self._device))
                for _ in range(2)
            ]
            for source, _ in pairs:
                source.normal_()
            by_copy = graph_seconds(lambda i: pairs[i % 2][1].copy_(pairs[i % 2][0]), self._device)
            by_kernel = graph_seconds(lambda i: torch.neg(pairs[i % 2][0], out=pairs[i % 2][1]), self._device)
            self._seconds[size] = min(by_copy, by_kernel)
        return self._seconds[size]
