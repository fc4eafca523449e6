"""The frame of the suite: the tier that kernel tests run in, where tensors live, and the distributed pools.

MEGATRON_ASCEND_MOE_TEST_TIER   interpret   Triton's interpreter (default where there is no accelerator)
                                compiled    Triton-Ascend's IR, run on the CPU by the project's tool chain
                                device      the GPU or NPU that torch finds (default where there is one)
"""

import os

import pytest

TIERS = ("interpret", "compiled", "device")


def _accelerator() -> str | None:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "npu" if hasattr(torch, "npu") and torch.npu.is_available() else None


def _choose_tier() -> str:
    tier = os.environ.get("MEGATRON_ASCEND_MOE_TEST_TIER") or ("device" if _accelerator() else "interpret")
    if tier not in TIERS:
        raise pytest.UsageError(f"MEGATRON_ASCEND_MOE_TEST_TIER={tier!r}: expected one of {', '.join(TIERS)}")
    if tier == "device" and _accelerator() is None:
        raise pytest.UsageError("MEGATRON_ASCEND_MOE_TEST_TIER=device, but torch finds no GPU and no NPU")
    return tier


TIER = _choose_tier()
if TIER == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any kernel is imported
os.environ["MEGATRON_ASCEND_MOE_TEST_TIER"] = TIER


@pytest.fixture(scope="session")
def tier() -> str:
    """Which of `TIERS` this session runs the kernels in; tests use it to size shapes, not to choose code."""
    return TIER


@pytest.fixture(scope="session")
def device():
    """The torch.device on which kernel tests make their tensors."""
    import torch

    return torch.device(_accelerator() if TIER == "device" else "cpu")


@pytest.fixture(scope="session")
def distributed_pool():
    """`distributed_pool(world_size).submit("package.module:function", **kwargs)` -> one result a rank."""
    from tests.distributed_pool import Pools

    pools = Pools()
    yield pools
    pools.close()
