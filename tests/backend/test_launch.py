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


class _StubKernel:
    """Takes down what it is compiled and launched with."""

    arg_names = ["x_ptr", "y_ptr", "n", "H", "K"]

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def first_launch(*args, **options):
            self.compiled.append((grid, args, options))
            return _StubCompiled(self.launched)

        return first_launch


class _StubCompiled:
    def __init__(self, launched):
        self.launched = launched

    def __getitem__(self, grid):
        return lambda *args: self.launched.append((grid, args))


def test_a_variant_compiles_once_for_a_kind_of_arguments():
    stub = _StubKernel()
    variant = launch.Variant(stub, {"K": 2, "H": 64}, 4)
    memory = torch.zeros(64)
    x, y = memory[:16], memory[16:32]
    for n in (48, 32, 0):  # multiples of 16 are one kind
        variant.launch_on_cuda(7, (x, y), (n,))
    (grid, args, options) = stub.compiled[0]
    assert len(stub.compiled) == 1 and grid == (7,) and args[2] == 48
    assert options == {"K": 2, "H": 64, "num_warps": 4, "enable_fp_fusion": False}
    addresses = (x.data_ptr(), y.data_ptr())
    assert stub.launched == [((7, 1, 1), (*addresses, n, 64, 2)) for n in (32, 0)]  # constants in the kernel's order


@pytest.mark.parametrize("kind", ["type", "alignment", "absence", "one", "odd", "wide", "wide and odd"])
def test_a_variant_compiles_anew_for_another_kind(kind):
    stub = _StubKernel()
    variant = launch.Variant(stub, {"K": 2, "H": 64}, 4)
    x = torch.zeros(64)
    other = {"type": x.int(), "alignment": x[1:], "absence": None}.get(kind, x)
    number = {"one": 1, "odd": 17, "wide": 2**31, "wide and odd": 2**31 + 1}.get(kind, 16)
    for arguments in (((x, x), (16,)), ((x, other), (number,)), ((x, x), (16,)), ((x, other), (number,))):
        variant.launch_on_cuda(1, *arguments)
    assert len(stub.compiled) == len(stub.launched) == 2
    assert stub.launched[1][1][1] == (None if other is None else other.data_ptr())


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
