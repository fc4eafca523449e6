"""The tier of the kernel tests, prepared once. Test files do not know which one they run in.

interpret   Triton's interpreter with bounds checks and, under Triton-Ascend, its extension operations.
compiled    Triton-Ascend's IR for Ascend910B3, executed on the CPU with bounds checks.
device      nothing to prepare: kernels run where torch finds an accelerator.
"""

import contextlib

import pytest
import torch

from megatron_ascend_moe import kernels
from megatron_ascend_moe.backend.device import FORMS, interpreted_form
from tests.conftest import TIER

# What kernel tests run: Triton in the form of the tier's device; the interpreter, which has no device, runs both.
TRITON = [f"triton-{form}" for form in FORMS] if TIER == "interpret" else ["triton"]


@pytest.fixture(scope="session", autouse=True)
def _kernel_tier(tier):
    if tier == "interpret":
        from megatron_ascend_moe.toolchain import interpreter

        interpreter.register()
    elif tier == "compiled":
        from megatron_ascend_moe.toolchain import emulator

        emulator.activate("Ascend910B3", compile=False)


@contextlib.contextmanager
def _kernel_set(name: str, device):
    form = name.partition("-")[2]
    with interpreted_form(form) if form else contextlib.nullcontext():
        yield kernels.select(name.partition("-")[0], device)


@pytest.fixture(scope="module", params=["torch", *TRITON])
def implementation(request, _kernel_tier, device):
    """Each implementation in turn, for tests against golden values and independent loops."""
    with _kernel_set(request.param, device) as kernel_set:
        yield kernel_set


@pytest.fixture(scope="module", params=TRITON)
def triton_kernels(request, _kernel_tier, device):
    """Triton's kernels, for tests against the twin."""
    with _kernel_set(request.param, device) as kernel_set:
        yield kernel_set


@pytest.fixture(scope="session")
def twin():
    return kernels.select("torch", "cpu")


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Every float buffer that torch.empty hands out is full of NaN, every integer buffer of a wild value."""

    def poisoned(*args, **kwargs):
        buffer = allocate(*args, **kwargs)
        return buffer.fill_(float("nan") if buffer.is_floating_point() else -(2**31) + 7)

    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", poisoned)
