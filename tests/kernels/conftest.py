"""The tier of the kernel tests, prepared once. Test files do not know which one they run in.

interpret   Triton's interpreter with bounds checks and, under Triton-Ascend, its extension operations.
compiled    Triton-Ascend's IR for Ascend910B3, executed on the CPU with bounds checks.
device      nothing to prepare: kernels run where torch finds an accelerator.
"""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _kernel_tier(tier):
    if tier == "interpret":
        from megatron_ascend_moe.toolchain import interpreter

        interpreter.register()
    elif tier == "compiled":
        from megatron_ascend_moe.toolchain import emulator

        emulator.activate("Ascend910B3", compile=False)
