"""The dispatcher's stages, seen from outside: profiler ranges always, times where asked for.

Ranges are mstx on an NPU, NVTX on CUDA and nothing on a CPU; one costs about a microsecond of host time when no profiler
listens. Times are device events (host clock on a CPU), read on steps that log. Neither has run on an NPU.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator

import torch

_UNTIMED = contextlib.nullcontext()


@contextlib.contextmanager
def _mstx_range(name: str) -> Iterator[None]:
    mstx = torch.npu.mstx
    identifier = mstx.range_start(name, torch.npu.current_stream())
    try:
        yield
    finally:
        mstx.range_end(identifier)


def stage_range(name: str, device_type: str) -> contextlib.AbstractContextManager:
    """A range called `moe_ascend.<name>` in the profiler of `device_type` ("npu", "cuda", anything else: none)."""
    name = f"moe_ascend.{name}"
    if device_type == "npu":
        return _mstx_range(name)
    if device_type == "cuda":
        return torch.cuda.nvtx.range(name)
    return contextlib.nullcontext()


class _HostEvent:
    """The part of a device event that is used, by the host's clock."""

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "_HostEvent") -> float:
        return 1e3 * (end._seconds - self._seconds)


class StageTimes:
    """Times of one dispatcher's stages in its last forward. Recording waits for nothing; reading waits for the device."""

    def __init__(self) -> None:
        self._events: dict[str, tuple] = {}

    @contextlib.contextmanager
    def measure(self, name: str, device_type: str) -> Iterator[None]:
        """Time the block on the current stream."""
        if name not in self._events:
            self._events[name] = _event(device_type), _event(device_type)
        start, end = self._events[name]
        start.record()
        yield
        end.record()

    def read(self) -> dict[str, float]:
        """Milliseconds by stage, in the order of the stages."""
        for _, end in self._events.values():
            end.synchronize()
        return {name: start.elapsed_time(end) for name, (start, end) in self._events.items()}


def _event(device_type: str):
    if device_type == "npu":
        return torch.npu.Event(enable_timing=True)
    if device_type == "cuda":
        return torch.cuda.Event(enable_timing=True)
    return _HostEvent()


def in_stage_range(stage: Callable) -> Callable:
    """Decorate a dispatcher stage: its range, and its time where `self.stage_times` is there to take it, on the device of
    its first tensor."""

    @functools.wraps(stage)
    def ranged(self, hidden_states, *args):
        device_type = hidden_states.device.type
        timed = _UNTIMED if self.stage_times is None else self.stage_times.measure(stage.__name__, device_type)
        with stage_range(stage.__name__, device_type), timed:
            return stage(self, hidden_states, *args)

    return ranged
