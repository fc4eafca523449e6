"""Device time of a call: CUDA graph replays where the device captures graphs, events or the clock elsewhere."""

import collections
import statistics
import time
from collections.abc import Callable

import torch

INPUT_SETS = 3  # rotated, so that a call finds nothing of its inputs in the cache
CALLS = 12  # of one measurement, each with inputs of its own turn: 3 inputs and 4 outputs meet in every pairing
KEPT_RESULTS = 3  # that live on while a call allocates its own
REPEATS = 7  # measurements, of which the median counts
WARM_UP_SECONDS = 0.03  # before them: after a pause an H200 runs the same kernel 10 % slower


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def graph_seconds(call: Callable[[int], object], device: torch.device) -> float:
    """Seconds of one call on the device alone: `call(i)` uses the i-th set of inputs, so that none is in the L2
    cache from the call before, and its result lies elsewhere than the last ones, so that no single distance in
    memory between what is read and what is written decides. Without graphs (NPU, CPU) the host's side counts too."""
    if device.type != "cuda":
        return call_seconds(call, device)
    call(0)
    synchronize(device)
    torch.cuda.empty_cache()  # of the graph before: nothing can be given back during a capture
    graph, results = torch.cuda.CUDAGraph(), collections.deque(maxlen=KEPT_RESULTS)
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            results.append(call(i))
    return _median_seconds(graph.replay, device) / CALLS


def call_seconds(call: Callable[[int], object], device: torch.device) -> float:
    """Seconds of one call, launched from the host as a program does."""

    def calls() -> None:
        for i in range(CALLS):
            call(i)

    return _median_seconds(calls, device) / CALLS


def seconds_in_turn(calls: list[Callable[[int], object]], device: torch.device) -> list[float]:
    """Seconds of one call of each, launched from the host in turn, so that a change of the machine's pace meets all."""

    def of_one_round(call: Callable[[int], object]) -> float:
        return _seconds(lambda: [call(i) for i in range(INPUT_SETS)], device) / INPUT_SETS

    rounds = [[of_one_round(call) for call in calls] for _ in range(REPEATS + 1)]
    return [statistics.median(seconds) for seconds in zip(*rounds[1:], strict=True)]  # the first warms up


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
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_SECONDS:
        run()
        synchronize(device)
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
            sources = [torch.randn(size // 4, device=self._device) for _ in range(INPUT_SETS)]
            by_copy = graph_seconds(lambda i: sources[i % INPUT_SETS].clone(), self._device)
            by_kernel = graph_seconds(lambda i: torch.neg(sources[i % INPUT_SETS]), self._device)
            self._seconds[size] = min(by_copy, by_kernel)
        return self._seconds[size]
