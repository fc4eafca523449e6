"""Which device runs the kernels, whether Triton can run there, and in which form the kernels are written for it.

Devices are told apart by `tensor.device.type` and Triton is probed by import: on an NPU
`torch_npu.contrib.transfer_to_npu` makes `is_cuda` and `has_triton()` lie.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_ascend_moe.backend.soc import Soc, find_soc

ACCELERATORS = ("npu", "cuda")
FORMS = ("ascend", "cuda")

INTERPRETED_CORES = 3  # few programs, so that small cases reach the loops over tokens, experts and programs
REFERENCE_SOC = "Ascend910B3"  # whose Unified Buffer shapes the tiles of the interpreted Ascend form


def interpreting() -> bool:
    """True when Triton's interpreter runs the kernels (TRITON_INTERPRET=1, read when a kernel is defined)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


_emulated_soc: str | None = None
_interpreted_form: str | None = None


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


@dataclass(frozen=True, eq=False)
class Target:
    """What the launcher must know of the machine that runs a kernel; one object a machine, compared by identity so
    that it is a cheap key.

    Attributes:
        form: "ascend" (one program a vector core, rows by DMA through the Unified Buffer) or "cuda".
        cores: vector cores of the NPU, multiprocessors of the GPU.
        ub_bytes: Unified Buffer of one vector core, 0 in the CUDA form.
        compiled: False in the interpreter, which takes no compile options.
        any_tile_width: whether tiles need not be powers of two (Triton-Ascend).
    """

    form: str
    cores: int
    ub_bytes: int
    compiled: bool
    any_tile_width: bool

    @property
    def ascend(self) -> bool:
        return self.form == "ascend"

    @property
    def has_fp64(self) -> bool:
        """Ascend's vector cores have no fp64, and Triton-Ascend refuses it in its interpreter too."""
        return not (self.ascend or self.any_tile_width)


def target_of(device: torch.device) -> Target:
    """The target that runs kernels on tensors of `device`; cached."""
    return _target(device, _interpreted_form, _emulated_soc)


@contextlib.contextmanager
def interpreted_form(form: str) -> Iterator[None]:
    """Interpret the kernels in this form ("ascend" or "cuda") on CPU tensors, whichever triton is installed."""
    global _interpreted_form
    if form not in FORMS:
        raise ValueError(f"form {form!r}: expected one of {', '.join(map(repr, FORMS))}")
    before, _interpreted_form = _interpreted_form, form
    try:
        yield
    finally:
        _interpreted_form = before


@functools.cache
def _target(device: torch.device, interpreted: str | None, soc_name: str | None) -> Target:
    kind, index = device.type, device.index
    if kind == "cuda":
        return Target("cuda", torch.cuda.get_device_properties(index or 0).multi_processor_count, 0, True, False)
    if kind == "npu":
        soc = _npu_soc(index or 0)
        return Target("ascend", soc.vector_cores, soc.ub_bytes, True, True)
    if soc_name is not None:
        soc = find_soc(soc_name)
        return Target("ascend", soc.vector_cores, soc.ub_bytes, True, True)
    if not interpreting():
        raise RuntimeError(f"Triton kernels cannot run on {kind!r}: {triton_obstacle(device)}")
    ascend_triton = importlib.util.find_spec("triton.backends.ascend") is not None
    form = interpreted or ("ascend" if ascend_triton else "cuda")
    return Target(form, INTERPRETED_CORES, find_soc(REFERENCE_SOC).ub_bytes, False, ascend_triton)


def _npu_soc(index: int) -> Soc:
    """The NPU of this index: vector cores by the driver, the Unified Buffer by the table of its SoC."""
    driver = importlib.import_module("triton.runtime.driver").driver.active
    cores = driver.utils.get_device_properties(index)["num_vectorcore"]
    return dataclasses.replace(find_soc(driver.get_current_target().arch), vector_cores=cores)
