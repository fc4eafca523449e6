"""What a test does when the machine lacks a tool: a loud skip for a user, a failure in CI."""

import importlib.metadata
import importlib.util
import os
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skip the test with `reason` (shown in the summary), or fail it where the environment says CI=true."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"{reason} (a skip elsewhere, a failure in CI)", pytrace=False)
    pytest.skip(reason)


def megatron_training() -> None:
    """Skip where megatron-core is of the versions whose wheels have no training loop (the suite runs with newer ones
    too); where it should be there and is not, `missing`."""
    version = importlib.metadata.version("megatron-core")
    if importlib.util.find_spec("megatron.training") is not None:
        return
    if tuple(map(int, version.split(".")[:2])) < (0, 17):
        pytest.skip(f"megatron-core {version} has no megatron.training; tested with 0.19.2")
    missing("megatron.training is not installed")


def triton_ascend() -> None:
    """Skip beside upstream Triton: the two cannot share an environment, and these tests run in the one with
    triton-ascend. Where there is no Triton at all, the caller says what is missing."""
    if importlib.util.find_spec("triton") and not importlib.util.find_spec("triton.backends.ascend"):
        pytest.skip("this environment's triton is upstream Triton; Triton-Ascend is tested in its own")
