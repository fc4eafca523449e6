"""Two things that plain megatron-core wheels lack, put in place and taken back."""

import importlib.metadata

import pytest

CORE = tuple(int(part) for part in importlib.metadata.version("megatron-core").split(".")[:2])


def test_router_gemm_name_is_bound_where_missing_and_withdrawn_again(distributed_pool):
    (found,) = distributed_pool(1).submit("tests.host.repair_jobs:router_gemm_names")
    stock = "missing" if CORE <= (0, 16) else None
    assert found == [stock, None, stock]


@pytest.mark.parametrize("makefile_exists", [True, False])
def test_dataset_helper_is_built_only_where_there_is_something_to_build_with(distributed_pool, makefile_exists):
    job = "tests.host.repair_jobs:dataset_helper_builds"
    assert distributed_pool(1).submit(job, makefile_exists=makefile_exists) == [makefile_exists]
