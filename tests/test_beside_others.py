"""The plugin beside what users have installed: nothing, TransformerEngine, or torch_npu with transfer_to_npu. The last
two are stand-ins (tests/stand_ins): no GPU and no NPU is involved."""

import functools
import json
import os
import subprocess
import sys

import pytest


@functools.cache
def beside(stand_in):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.beside_others", stand_in],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("FOUND ")]
    assert process.returncode == 0 and len(lines) == 1, process.stderr[-3000:]
    return json.loads(lines[0].removeprefix("FOUND "))


@pytest.mark.parametrize("stand_in", ["npu", "te"])
def test_the_layer_computes_the_same(stand_in):
    alone, found = beside("none"), beside(stand_in)
    assert alone["layers served"] == found["layers served"] == 2
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert len(alone["gradients"]) == 17 and any(alone["gradients"])
    assert found["gradients"] == pytest.approx(alone["gradients"], rel=1e-4, abs=1e-9)


def test_the_stand_ins_stand_in():
    assert beside("te")["transformer_engine"] and not beside("none")["transformer_engine"]
    npu = beside("npu")
    assert npu["is_cuda is an alias"] and not npu["has_triton"]


def test_triton_is_probed_by_import_and_devices_by_their_type():
    assert beside("npu")["kernels on an NPU"] == "triton"
    assert beside("npu")["kernels on a CPU"] == beside("none")["kernels on a CPU"] == "torch"
