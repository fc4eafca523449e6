"""Reports name each fault of a kernel: one kernel without, and with each of them, through the real compiler."""

import pytest

SOCS = ("Ascend910B3", "Ascend950PR_9589")  # programs with loops and in blocks


FAULTS = {
    "": (),
    "a scalar load in the loop over columns": ("scalar global-memory access inside a loop over columns",),
    "element by element": (
        "rows of x_ptr are moved by no DMA of the program",
        "scalar global-memory access inside a loop over columns",
        "18944 elements of rows are moved one by one",
    ),
    "a mask made of data": (
        "an output is read back: unlocked read-modify-write",
        "moves 227328 B of rows, floor 151552 B",
    ),
    "a row stored twice": ("moves 227328 B of rows, floor 151552 B",),
}
INTEGERS = ("integers are compared: scalar code on Ascend",)  # told of A2 and A3 only
MASKED = ("element by element", "a mask made of data")  # their masks are vectors, made by comparing column numbers
TOO_WIDE = 65_536  # columns of fp32: a row alone is larger than any Unified Buffer
WIDE = 32_768  # fits once, not twice: 1.2.0 then drops double buffering


def _report(soc_name, fault, columns=128, multibuffer=True):
    """The report of a copy of 37 fp32 rows, of 512 columns unless `columns` asks for more."""
    import torch

    from megatron_ascend_moe.backend.soc import find_soc
    from megatron_ascend_moe.toolchain import emulator
    from megatron_ascend_moe.toolchain.compile import plan_of
    from megatron_ascend_moe.toolchain.report import report
    from tests.toolchain import kernels_under_test as kernels

    hidden = max(512, columns)
    chip = emulator.activate(soc_name, compile=False)
    x, out = torch.randn(50, hidden), torch.empty(37, hidden)
    index = torch.randint(0, 50, (max(37, hidden),), dtype=torch.int32)
    constants = {"H": hidden, "COLUMNS": columns, "BLOCK": 16, "FAULT": fault}
    kernels.copy_rows[(3,)](x, index, out, 37, **constants, multibuffer=multibuffer)
    launch, soc = chip.launches[-1], find_soc(soc_name)
    shape = {"hidden": hidden, "experts": 1, "topk": 1, "dtype": "fp32"}
    return report(launch, plan_of(chip, launch, soc), soc, shape, "copy_rows", 2 * 37 * hidden * 4)


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault or "none")
def test_a_fault_is_named(compile_pool, soc, fault):
    one = compile_pool.submit(_report, soc, fault).result()
    assert one.problems == FAULTS[fault] + (INTEGERS if soc == "Ascend910B3" and fault in MASKED else ())
    assert one.double_buffered == (fault != "element by element")


def test_integers_compared_as_scalars_are_named(compile_pool):
    one = compile_pool.submit(_report, "Ascend910B3", "integers compared").result()
    assert one.problems == INTEGERS


@pytest.mark.parametrize("soc", SOCS)
def test_row_buffers_of_one_copy_are_named(compile_pool, soc):
    one = compile_pool.submit(_report, soc, "", multibuffer=False).result()
    assert one.problems == ("2 row DMAs are not double-buffered",) and one.double_buffered is False


def test_dropped_double_buffering_is_named(compile_pool):
    one = compile_pool.submit(_report, "Ascend910B3", "", WIDE).result()
    assert one.problems == ("multibuffer dropped by the compiler", "2 row DMAs are not double-buffered")
    assert one.multibuffer_dropped and one.double_buffered is False


@pytest.mark.parametrize(("soc", "available"), [("Ascend910B3", 196608), ("Ascend950PR_9589", 253952)])
def test_an_overflow_is_named_with_the_numbers(compile_pool, soc, available):
    one = compile_pool.submit(_report, soc, "", TOO_WIDE).result()
    needed = int(one.problems[0].split()[2])
    assert one.problems == (f"{soc}: needs {needed} B of the Unified Buffer's {available} B",)
    assert needed >= TOO_WIDE * 4 and one.ub_bytes is None
