"""DispatchConfig and checked mode."""

import dataclasses
import subprocess
import sys

import pytest

from megatron_ascend_moe.config import DispatchConfig, checked, is_checked


def test_frozen_with_the_documented_defaults():
    config = DispatchConfig()
    assert (config.layout, config.pad_multiple, config.kernels, config.checked) == ("auto", 1, "auto", False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.layout = "binned"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"layout": "sorted"}, "layout='sorted' is unknown: choose one of auto, padded, binned"),
        ({"exchange": "per-node"}, "exchange='per-node' is unknown: choose one of per-"),
        ({"kernels": "cuda"}, "kernels='cuda' is unknown: choose one of auto, triton, torch"),
        ({"pad_multiple": 0}, "pad_multiple=0: expected a whole number of rows, at least 1"),
        ({"pad_multiple": 1.5}, "pad_multiple=1.5"),
    ],
)
def test_unknown_values_are_refused(field, message):
    with pytest.raises(ValueError, match=message):
        DispatchConfig(**field)


def test_checked_mode_nests_and_ends(monkeypatch):
    monkeypatch.delenv("MEGATRON_ASCEND_MOE_CHECKED", raising=False)
    assert not is_checked()
    with checked():
        with checked(False):
            assert is_checked(), "an inner block may not switch the check off"
        assert is_checked()
    assert not is_checked()
    monkeypatch.setenv("MEGATRON_ASCEND_MOE_CHECKED", "1")
    assert is_checked()
    monkeypatch.setenv("MEGATRON_ASCEND_MOE_CHECKED", "0")
    assert not is_checked()


def test_importing_the_package_imports_no_backend():
    code = (
        "import sys, megatron_ascend_moe as m; m.DispatchConfig();"
        "print([n for n in sys.modules if n.split('.')[0] in ('triton', 'torch_npu', 'megatron')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
