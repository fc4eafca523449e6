"""The offline tool chain itself: kernels with known answers, lowered by Triton-Ascend and run on the CPU."""

import pytest
import torch

SOC = "Ascend910B3"
LARGEST_H = 4096


def _emulator(**options):
    from megatron_ascend_moe.toolchain import emulator

    return emulator.activate(SOC, **options)


def _gather(dtype, hidden, rows):
    from tests.toolchain import kernels_under_test as kernels

    chip = _emulator()
    columns = -(-hidden // 16) * 16
    x = torch.randn(50, hidden).to(dtype)
    index = torch.randint(0, 50, (37,), dtype=torch.int32)
    out = torch.full((37, hidden), float("nan")).to(dtype)
    grid = (-(-37 // rows),)
    kernels.gather_rows[grid](x, index, out, 37, H=hidden, ROWS=rows, COLUMNS=columns, multibuffer=True)
    return x, index, out, chip.launches[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_gather_is_exact_and_every_access_is_counted(compile_pool, dtype):
    x, index, out, launch = compile_pool.submit(_gather, dtype, 100, 8).result()
    assert torch.equal(out, x[index.long()])
    assert launch.kernel == "gather_rows" and launch.grid == (5, 1, 1)
    assert (launch.constants["H"], launch.constants["COLUMNS"]) == (100, 112)
    assert launch.accesses["x_ptr"].elements == {"dma_load": 3700, "dma_store": 0, "scalar_load": 0, "scalar_store": 0}
    assert launch.accesses["x_ptr"].count["dma_load"] == 37
    assert launch.accesses["out_ptr"].elements["dma_store"] == 3700
    assert launch.accesses["out_ptr"].count["dma_store"] == 5
    assert launch.accesses["index_ptr"].count["dma_load"] == 5


def test_the_memory_plan_of_a_gather(compile_pool):
    plan = compile_pool.submit(_gather, torch.bfloat16, 100, 8).result()[-1].plan
    row = 112 * 2
    assert plan.reported and not plan.multibuffer_dropped
    assert plan.ub_bytes == 8 * row + 8 * 4 + 2 * row  # the tile, the indices, a row twice
    rows = [buffer for buffer in plan.buffers if buffer.type == "1x112xbf16"]
    assert rows and all(len(buffer.offsets) == 2 for buffer in rows)


def test_a_whole_row_is_loaded_into_its_tile_without_a_buffer_of_its_own(compile_pool):
    plan = compile_pool.submit(_gather, torch.bfloat16, 4096, 4).result()[-1].plan
    assert plan.ub_bytes == 4 * 4096 * 2 + 4 * 4


def _overflow():
    from megatron_ascend_moe.toolchain.memory_plan import UnifiedBufferOverflow

    try:
        _gather(torch.float32, LARGEST_H, 16)
    except UnifiedBufferOverflow as error:
        return str(error)
    return None


def test_an_overflow_raises_with_the_numbers(compile_pool):
    message = compile_pool.submit(_overflow).result()
    assert message is not None and message.startswith("Ascend910B3: needs ") and "196608 B" in message


def _split(first):
    from tests.toolchain import kernels_under_test as kernels

    _emulator(compile=False)
    x, out = torch.randn(8, 32), torch.empty(8, 32)
    kernels.split_tile[(1,)](x, out, ROWS=8, COLUMNS=32, FROM=first)
    return x, out


def test_rows_taken_out_of_a_tile(compile_pool):
    x, out = compile_pool.submit(_split, 0).result()
    assert torch.equal(out, x.flip(0))


def _sum(dtype, axis, reverse):
    from tests.toolchain import kernels_under_test as kernels

    _emulator(compile=False)
    x = torch.randint(-9, 9, (8, 16)).to(dtype)
    out = torch.empty_like(x)
    kernels.running_sums[(1,)](x, out, ROWS=8, COLUMNS=16, AXIS=axis, REVERSE=reverse)
    return x, out


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
def test_cumulative_sums(compile_pool, dtype, axis, reverse):
    x, out = compile_pool.submit(_sum, dtype, axis, reverse).result()
    expected = x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)
    assert torch.equal(out, expected.to(dtype))


def _round(dtype):
    from tests.toolchain import kernels_under_test as kernels

    _emulator(compile=False)
    x = torch.cat([torch.randn(1021) * 3, torch.tensor([float("nan"), float("inf"), -0.0])])
    out = torch.empty(1024, dtype=dtype)
    kernels.round_to_half[(1,)](x, out, BLOCK=1024)
    return x, out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_is_to_nearest_even(compile_pool, dtype):
    x, out = compile_pool.submit(_round, dtype).result()
    torch.testing.assert_close(out, (x * 1.0009765625).to(dtype), rtol=0, atol=0, equal_nan=True)


def _overrun(loaded, stored):
    from tests.toolchain import kernels_under_test as kernels

    _emulator(compile=False)
    memory = torch.zeros(2, 128)  # room for what strays
    try:
        kernels.copy_past_the_end[(1,)](memory[0, :loaded], memory[1, :stored], BLOCK=64)
    except IndexError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("loaded", "stored", "fault"),
    [
        (64, 64, None),
        (63, 64, "copy_past_the_end: a dma_load of run-time argument 0 touches elements 0..63 of a tensor of 63"),
        (64, 60, "copy_past_the_end: a dma_store of run-time argument 1 touches elements 0..63 of a tensor of 60"),
    ],
)
def test_an_access_outside_a_tensor_is_found(compile_pool, loaded, stored, fault):
    assert compile_pool.submit(_overrun, loaded, stored).result() == fault
