"""Jobs of test_repairs.py: what a wheel-installed Megatron without TransformerEngine lacks."""

from megatron.core.datasets import utils
from megatron.core.transformer.moe import moe_utils

from megatron_ascend_moe.host import dataset_helpers, router_gemm

MISSING = "missing"


def router_gemm_names() -> list:
    """`te_general_gemm` as Megatron has it, as provided (twice), and as withdrawn (twice)."""
    router_gemm.withdraw_router_gemm_name()  # the pools provide it for the stock dispatcher
    found = [getattr(moe_utils, "te_general_gemm", MISSING)]
    try:
        router_gemm.provide_router_gemm_name()
        router_gemm.provide_router_gemm_name()
        found.append(getattr(moe_utils, "te_general_gemm", MISSING))
        router_gemm.withdraw_router_gemm_name()
        router_gemm.withdraw_router_gemm_name()
        found.append(getattr(moe_utils, "te_general_gemm", MISSING))
    finally:
        router_gemm.provide_router_gemm_name()
    return found


def dataset_helper_builds(makefile_exists: bool) -> bool:
    """Whether Megatron's own function that runs `make` is still in place after `use_built_helpers`."""
    stock, exists = utils.compile_helpers, dataset_helpers.os.path.exists
    dataset_helpers.os.path.exists = lambda path: makefile_exists
    try:
        dataset_helpers.use_built_helpers()
        return utils.compile_helpers is stock
    finally:
        dataset_helpers.os.path.exists = exists
        utils.compile_helpers = stock
