"""Which device runs the kernels, whether Triton can run there, and in which form the kernels are written for it.

Devices are told apart by `tensor.device.type` and Triton is probed by import: on an NPU
`torch_npu.contrib.transfer_to_npu` makes `is_cuda` and `has_triton()` lie.
"""

import functools
import importlib
import os

import torch

ACCELERATORS = ("npu", "cuda")


def interpreting() -> bool:
    """True when Triton's interpreter runs the kernels (TRITON_INTERPRET=1, read when a kernel is defined)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


_emulated_soc: str | None = None


def emulate(soc: str | None) -> None:
    """Declare that kernels on CPU tensors run as the IR compiled for `soc` (None: no longer)."""
    global _emulated_soc
    _emulated_soc = soc


def emulated_soc() -> str | None:
    """The SoC whose compiled IR runs on CPU tensors, or None."""
    return _emulated_soc


def triton_obstacle(device: torch.device) -> str | None:
    """Why Triton cannot run on `device` and how to mend it, or None where it can."""
    failure = _import_failure()
    if failure is not None:
        return (
            f"triton cannot be imported ({failure}): install triton-ascend on Ascend or triton on CUDA, "
            "or use kernels='torch'"
        )
    if device.type in ACCELERATORS or interpreting() or _emulated_soc is not None:
        return None
    return (
        f"Triton has no backend for {device.type!r}: move the tensors to an NPU or a GPU, use kernels='torch', "
        "or set TRITON_INTERPRET=1 before the first import to interpret the kernels"
    )


@functools.cache
def _import_failure() -> str | None:
    try:
        importlib.import_module("triton.language")
    except Exception as error:  # a broken driver stack raises anything, not only ImportError
        return f"{type(error).__name__}: {error}"
    return None
