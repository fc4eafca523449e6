"""Named profiler ranges around the dispatcher's stages: mstx on an NPU, NVTX on CUDA, nothing on a CPU.

A range costs about a microsecond of host time when no profiler listens. mstx ranges have not run on an NPU.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch


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


def in_stage_range(stage: Callable) -> Callable:
    """Decorate a dispatcher stage: its range, named like the method, on the device of its first tensor."""

    @functools.wraps(stage)
    def ranged(self, hidden_states, *args):
        with stage_range(stage.__name__, hidden_states.device.type):
            return stage(self, hidden_states, *args)

    return ranged
