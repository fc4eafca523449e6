"""The torch norm under sequence parallel: same gradients as on one rank, and it can be taken back."""

import numpy as np
import pytest


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_gradients_under_sequence_parallel_equal_one_rank(distributed_pool, normalization):
    job = "tests.host.norm_jobs:norm_gradients"
    (whole,) = distributed_pool(1).submit(job, tensor_parallel_size=1, normalization=normalization)
    split = distributed_pool(2).submit(job, tensor_parallel_size=2, normalization=normalization)
    assert len(whole) >= 5  # two in each of two layers and the final one
    for gradients in split:
        assert gradients.keys() == whole.keys()
        for name in whole:
            np.testing.assert_allclose(gradients[name], whole[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_stock_norm_refuses_sequence_parallel(distributed_pool):
    """The reason for the module: when Megatron stops refusing, it can go."""
    (refusal,) = distributed_pool(1).submit("tests.host.norm_jobs:stock_refusal")
    assert "sequence parallel not supported" in refusal


def test_withdrawing_restores_the_identical_object(distributed_pool):
    (found,) = distributed_pool(1).submit("tests.host.norm_jobs:provide_and_withdraw")
    assert found == {"replaced": True, "restored": True, "unmarked": True}
