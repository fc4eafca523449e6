"""Launch grids and targets: pure Python, no kernel runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ascend_moe import kernels
from megatron_ascend_moe.backend import device, launch
from megatron_ascend_moe.backend.soc import find_soc

ASCEND = device.Target("ascend", 48, find_soc("Ascend910B1").ub_bytes, True, True)
CUDA = device.Target("cuda", 132, 0, True, False)


@settings(deadline=None)
@given(tokens=st.integers(0, 2**20), programs=st.integers(1, 2**20))
def test_token_ranges_cover_the_tokens(tokens, programs):
    count, each = launch.token_ranges(tokens, programs)
    assert 1 <= count <= min(programs, launch.MAX_PROGRAMS)
    assert each == launch.ceil_div(tokens, count)  # what route_place derives from the counts' programs
    assert count * each >= tokens
    assert tokens == 0 or (count - 1) * each < tokens


@pytest.mark.parametrize("target", [ASCEND, CUDA], ids=lambda target: target.form)
@settings(deadline=None)
@given(
    tokens=st.integers(0, 2**20),
    hidden=st.integers(1, 2**14),
    experts=st.integers(1, 512),
    pads=st.integers(-(10 * 2**20), 2**27),
)
def test_grids_stay_within_the_limit(target, tokens, hidden, experts, pads):
    rows = pytest.importorskip("megatron_ascend_moe.kernels.rows", reason="needs triton")
    tuning = pytest.importorskip("megatron_ascend_moe.kernels.tuning")
    tile = tuning.row_tile("permute_rows", target, hidden, 10, 2)
    grid = rows._grid(target, tokens * launch.ceil_div(hidden, tile.columns), experts, pads)
    assert 1 <= grid.programs <= launch.MAX_PROGRAMS
    assert 1 <= grid.token_programs <= grid.programs
    assert 0 <= grid.first_pad_program < grid.programs
    assert tuning.route_programs(target, tokens, experts) <= launch.MAX_PROGRAMS


def test_a_grid_beyond_the_limit_is_refused():
    with pytest.raises(ValueError, match="launch grid of 65536 programs: expected 1 to 65535"):
        launch.launch(None, CUDA, torch.device("cpu"), 65_536, (), ())


def test_interpreted_form_is_chosen_and_restored(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(device, "_emulated_soc", None)
    before = device.target_of(torch.device("cpu"))
    for form in device.FORMS:
        with device.interpreted_form(form):
            target = device.target_of(torch.device("cpu"))
            assert target.form == form
            assert not target.compiled
    assert device.target_of(torch.device("cpu")) == before
    with (
        pytest.raises(ValueError, match="form 'other': expected one of 'ascend', 'cuda'"),
        device.interpreted_form("other"),
    ):
        pass


def test_an_emulated_soc_is_the_target(monkeypatch):
    monkeypatch.setattr(device, "_emulated_soc", "Ascend910_9382")
    target = device.target_of(torch.device("cpu"))
    assert (target.form, target.cores, target.compiled) == ("ascend", 48, True)
    assert target.ub_bytes == find_soc("Ascend910_9382").ub_bytes


def test_selection(monkeypatch):
    cpu = torch.device("cpu")
    assert kernels.select("auto", cpu).name == "torch"
    with pytest.raises(ValueError, match="kernels='cuda': expected one of 'auto', 'triton', 'torch'"):
        kernels.select("cuda", cpu)
    monkeypatch.setattr(device, "_emulated_soc", None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="kernels='triton' cannot run on device 'cpu': .*TRITON_INTERPRET=1"):
        kernels.select("triton", cpu)


def test_triton_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setattr(device, "_import_failure", lambda: "ModuleNotFoundError: No module named 'triton'")
    with pytest.raises(RuntimeError, match="triton cannot be imported .*install triton-ascend on Ascend"):
        kernels.select("triton", "cuda")
    assert kernels.select("auto", "cuda").name == "torch"
