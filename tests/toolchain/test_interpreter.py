"""The interpreter's bounds checks and extension operations, in processes of their own."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from megatron_ascend_moe.toolchain import locate
from tests.requirements import missing, triton_ascend


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from megatron_ascend_moe.toolchain import interpreter

    interpreter.register()


@pytest.fixture(scope="module")
def interpreter_pool():
    triton_ascend()
    try:
        locate.require_triton_ascend()
    except locate.MissingTool as error:
        missing(str(error))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_interpret) as pool:
        yield pool


def _launch(name, grid, tensors, **constants):
    from tests.toolchain import kernels_under_test as kernels

    try:
        getattr(kernels, name)[grid](*tensors, **constants)
    except Exception as error:
        return str(error)
    return tensors


def test_extension_operations(interpreter_pool):
    x, index = torch.randn(50, 100), torch.randint(0, 50, (37,), dtype=torch.int32)
    tensors = (x, index, torch.full((37, 100), float("nan")), 37)
    done = interpreter_pool.submit(_launch, "gather_rows", (5,), tensors, H=100, ROWS=8, COLUMNS=112).result()
    assert torch.equal(done[2], x[index.long()])
    x = torch.randn(8, 32)
    done = interpreter_pool.submit(
        _launch, "split_tile", (1,), (x, torch.empty(8, 32)), ROWS=8, COLUMNS=32, FROM=0
    ).result()
    assert torch.equal(done[1], x.flip(0))


def test_a_window_outside_its_tile_is_refused(interpreter_pool):
    tensors = (torch.randn(8, 32), torch.empty(8, 32))
    done = interpreter_pool.submit(_launch, "split_tile", (1,), tensors, ROWS=8, COLUMNS=32, FROM=1).result()
    assert "window [8, 9) leaves a dimension of 8 elements" in done


@pytest.mark.parametrize(("loaded", "stored", "kind"), [(64, 64, None), (63, 64, "load"), (64, 60, "store")])
def test_an_access_outside_the_tensors_of_the_launch_is_refused(interpreter_pool, loaded, stored, kind):
    tensors = (torch.zeros(loaded), torch.zeros(stored))
    done = interpreter_pool.submit(_launch, "copy_past_the_end", (1,), tensors, BLOCK=64).result()
    if kind is None:
        assert torch.equal(done[1], tensors[0])
    else:
        assert f"{kind} outside the tensors of the launch: {64 - min(loaded, stored)} of 64 elements" in done
