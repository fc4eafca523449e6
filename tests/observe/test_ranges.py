"""Profiler ranges: mstx on an NPU, NVTX on CUDA, none on a CPU, around every stage. The NPU's calls are stand-ins."""

import contextlib
import types

import pytest
import torch

from megatron_ascend_moe.observe import ranges

STAGES = ["dispatch_preprocess", "token_dispatch", "dispatch_postprocess"]
STAGES += ["combine_preprocess", "token_combine", "combine_postprocess"]


@pytest.fixture
def calls(monkeypatch):
    """What the profilers were told, in order."""
    told = []
    mstx = types.SimpleNamespace(
        range_start=lambda name, stream: told.append(("mstx start", name)) or 7,
        range_end=lambda identifier: told.append(("mstx end", identifier)),
    )
    npu = types.SimpleNamespace(mstx=mstx, current_stream=lambda: None)
    monkeypatch.setattr(torch, "npu", npu, raising=False)

    @contextlib.contextmanager
    def nvtx_range(name):
        told.append(("nvtx", name))
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    return told


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("npu", [("mstx start", "moe_ascend.token_dispatch"), ("mstx end", 7)]),
        ("cuda", [("nvtx", "moe_ascend.token_dispatch")]),
        ("cpu", []),
    ],
)
def test_each_device_has_its_profiler(calls, device, expected):
    with ranges.stage_range("token_dispatch", device):
        pass
    assert calls == expected


def test_a_range_ends_when_its_stage_raises(calls):
    with pytest.raises(RuntimeError, match="in the stage"), ranges.stage_range("token_combine", "npu"):
        raise RuntimeError("in the stage")
    assert [kind for kind, _ in calls] == ["mstx start", "mstx end"]


def test_every_stage_has_a_range_of_its_name(distributed_pool):
    ((names, devices),) = distributed_pool(1).submit("tests.metrics_jobs:ranges_of_a_layer")
    assert names == STAGES and devices == {"cpu"}
