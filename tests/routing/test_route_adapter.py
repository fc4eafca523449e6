"""The adapter: map -> fixed-width routes, and its gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ascend_moe import checked
from megatron_ascend_moe.routing import routing_map_to_indices

GOLDEN_MAP = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 0, 0]])
GOLDEN_IDS = [[0, 2], [1, 2], [0, 3], [0, 1]]


@pytest.mark.parametrize("map_dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_golden_map(map_dtype, dtype):
    probs = torch.arange(1, 17).view(4, 4).to(dtype) / 16
    probs_TK, ids_TK = routing_map_to_indices(probs, GOLDEN_MAP.to(map_dtype), 2)
    assert ids_TK.dtype == torch.int32 and ids_TK.tolist() == GOLDEN_IDS
    assert probs_TK.dtype == torch.float32
    assert torch.equal(probs_TK, probs.gather(1, torch.tensor(GOLDEN_IDS)).float())


@given(
    T=st.integers(0, 40),
    shape=st.sampled_from([(5, 1), (5, 5), (8, 2), (60, 6), (160, 3), (192, 7), (384, 8), (512, 10), (64, 33)]),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_map_to_ids_to_map_is_the_identity(T, shape, density, seed):
    E, K = shape
    generator = torch.Generator().manual_seed(seed)
    routed = torch.rand(T, E, generator=generator).argsort(1).argsort(1) < K  # K of E
    routed &= torch.rand(T, E, generator=generator) < density  # then fewer, down to none
    probs_TK, ids_TK = routing_map_to_indices(torch.rand(T, E, generator=generator), routed, K)

    back = torch.zeros(T, E + 1, dtype=torch.bool).scatter(1, torch.where(ids_TK < 0, E, ids_TK).long(), True)
    assert torch.equal(back[:, :E], routed)
    kept = ids_TK >= 0
    assert torch.equal(kept.sum(1), routed.sum(1))
    assert not (~kept[:, :-1] & kept[:, 1:]).any(), "routes come first in their row"
    assert (ids_TK.diff(dim=1)[kept[:, 1:]] > 0).all(), "experts ascend"
    assert (probs_TK[~kept] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradient_is_dense_and_in_the_dtype_of_probs(dtype):
    routed = GOLDEN_MAP.bool().clone()
    routed[1] = False  # a token without a route
    probs = torch.rand(4, 4, dtype=dtype, requires_grad=True)
    probs_TK, _ = routing_map_to_indices(probs, routed, 2)
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    (probs_TK * weights).sum().backward()
    expected = torch.tensor([[1, 0, 2, 0], [0, 0, 0, 0], [5, 0, 0, 6], [7, 8, 0, 0]], dtype=dtype)
    assert probs.grad.dtype == dtype and torch.equal(probs.grad, expected)


def test_a_route_of_probability_zero_is_a_route():
    probs = torch.zeros(1, 4, requires_grad=True)
    probs_TK, ids_TK = routing_map_to_indices(probs, torch.tensor([[False, True, False, True]]), 2)
    assert ids_TK.tolist() == [[1, 3]]
    probs_TK.sum().backward()
    assert probs.grad.tolist() == [[0, 1, 0, 1]]


def test_non_contiguous_inputs_and_no_mutation():
    probs, routed = torch.rand(4, 6).T, (torch.rand(4, 6) < 0.4).T
    before = probs.clone(), routed.clone()
    with checked():
        got = routing_map_to_indices(probs, routed, 4)
    assert torch.equal(got[0], routing_map_to_indices(before[0].contiguous(), before[1].contiguous(), 4)[0])
    assert torch.equal(probs, before[0]) and torch.equal(routed, before[1])


def test_no_tokens():
    probs = torch.zeros(0, 8, requires_grad=True)
    probs_TK, ids_TK = routing_map_to_indices(probs, torch.zeros(0, 8, dtype=torch.bool), 2)
    assert probs_TK.shape == ids_TK.shape == (0, 2)
    probs_TK.sum().backward()
    assert probs.grad.shape == (0, 8)


@pytest.mark.parametrize(
    ("probs", "routed", "topk", "message"),
    [
        (torch.rand(4, 4), torch.rand(4, 4), 2, "routing_map has dtype torch.float32, expected bool or an integer"),
        (torch.ones(4, 4).int(), GOLDEN_MAP, 2, "probs has dtype torch.int32, expected fp16, bf16, fp32 or fp64"),
        (torch.rand(4, 5), GOLDEN_MAP, 2, r"probs has shape \(4, 5\) and routing_map \(4, 4\), expected both"),
        (torch.rand(4), GOLDEN_MAP[0], 2, r"probs has shape \(4,\)"),
        (torch.rand(4, 4), GOLDEN_MAP, 0, "topk=0, expected 1 to 4"),
        (torch.rand(4, 4), GOLDEN_MAP, 5, "topk=5, expected 1 to 4"),
    ],
)
def test_bad_input_is_refused(probs, routed, topk, message):
    with pytest.raises(ValueError, match=message):
        routing_map_to_indices(probs, routed, topk)


def test_too_many_routes_raise_in_checked_mode():
    with checked(), pytest.raises(ValueError, match="4 rows of the routing map hold more than moe_router_topk=1"):
        routing_map_to_indices(torch.rand(4, 4), GOLDEN_MAP, 1)
