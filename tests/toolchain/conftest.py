"""Processes that compile: they run Triton-Ascend's compiler, whichever tier the test session itself runs in."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from megatron_ascend_moe.toolchain import locate
from tests.requirements import missing, triton_ascend


def _leave_the_interpreter() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def compile_pool():
    """`compile_pool.submit(function, …)` of a module-level function, in a process without the interpreter."""
    triton_ascend()
    try:
        locate.check_all()
    except locate.MissingTool as error:
        missing(str(error))
    context = multiprocessing.get_context("spawn")
    workers = min(2, os.cpu_count() or 1)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_leave_the_interpreter)
    yield pool
    pool.shutdown(cancel_futures=True)  # what a selection of tests did not wait for
