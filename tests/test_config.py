"""DispatchConfig and checked mode."""

import dataclasses
import pathlib
import subprocess
import sys
import types

import pytest

from megatron_ascend_moe.config import REFUSALS, DispatchConfig, check_host, checked, is_checked

README = pathlib.Path(__file__).parents[1] / "README.md"
TO_CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
QUANTIZED = {"moe_router_padding_for_quantization": True}
# (our settings, the host's, what the message says, what README's table calls it); every row of REFUSALS is here
REFUSED = [
    ({"layout": "binned"}, {}, "layout='binned' needs a capacity", "`layout=binned` without"),
    (
        {"layout": "binned", "pad_multiple": 8},
        {"moe_expert_capacity_factor": 1.0},
        "pad_multiple has no effect on layout='binned'",
        "`layout=binned` with a `pad_multiple`",
    ),
    ({"layout": "padded"}, TO_CAPACITY, "layout='padded' cannot serve", "`layout=padded` with"),
    ({"stage_times": True}, TO_CAPACITY | {"cuda_graph_impl": "local"}, "stage_times=True cannot", "`stage_times` with"),
    ({}, TO_CAPACITY | QUANTIZED, "the binned layout cannot pad", "`moe_router_padding_for_quantization` in the binned"),
    (
        {"layout": "binned"},
        {"moe_expert_capacity_factor": 1.0, "moe_router_padding_for_fp8": True},
        "the binned layout cannot pad",
        "`moe_router_padding_for_quantization` in the binned",
    ),
    (
        {},
        TO_CAPACITY | {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "moe_router,moe_preprocess"},
        "graph capture of moe_preprocess",
        "graph capture of `moe_preprocess`",
    ),
    (
        {},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "full"},
        "graph capture of a whole MoE layer",
        "graph capture of whole MoE layers",
    ),
    (
        {"layout": "padded"},
        {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []},
        "graph capture of a whole MoE layer",
        "graph capture of whole MoE layers",
    ),
]


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


def _host(**overrides):
    plain = {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False}
    return types.SimpleNamespace(**(plain | overrides))


@pytest.mark.parametrize(("ours", "host", "message", "documented"), REFUSED)
def test_pairs_of_settings_that_cannot_work_are_refused_and_documented(ours, host, message, documented):
    with pytest.raises(ValueError, match=message):
        check_host(DispatchConfig(**ours), _host(**host))
    assert documented in README.read_text()


def test_every_refusal_is_among_them():
    cases = [(DispatchConfig(**ours), _host(**host)) for ours, host, *_ in REFUSED]
    assert [refusal.message for refusal in REFUSALS if not any(refusal.applies(*case) for case in cases)] == []


@pytest.mark.parametrize(
    ("ours", "host"),
    [
        ({}, {}),
        ({}, TO_CAPACITY | {"cuda_graph_impl": "local", "cuda_graph_modules": []}),
        ({}, {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router"]}),
        ({}, {"cuda_graph_impl": "local", "moe_pad_experts_for_cuda_graph_inference": True}),
        ({}, {"cuda_graph_impl": "none", "cuda_graph_scope": "full"}),
        ({}, QUANTIZED),
        ({"layout": "binned"}, {"moe_expert_capacity_factor": 1.0}),
    ],
)
def test_what_works_is_not_refused(ours, host):
    check_host(DispatchConfig(**ours), _host(**host))


def test_checked_mode_nests_and_ends(monkeypatch):
    monkeypatch.delenv("MEGATRON_ASCEND_MOE_CHECKED", raising=False)
    assert not is_checked()
    with checked():
        with checked(False):
            assert is_checked(), "an inner block may not switch the check off"
        assert is_checked()
    assert not is_checked()
    for value, on in (("1", True), ("true", True), ("0", False), ("False", False), ("", False)):
        monkeypatch.setenv("MEGATRON_ASCEND_MOE_CHECKED", value)
        assert is_checked() == on, value


def test_importing_the_package_imports_no_backend():
    code = (
        "import sys, megatron_ascend_moe as m; m.DispatchConfig();"
        "print([n for n in sys.modules if n.split('.')[0] in ('triton', 'torch_npu', 'megatron')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
