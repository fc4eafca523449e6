"""Permute and combine as autograd operations, against index arithmetic that torch differentiates itself."""

import pytest
import torch

from megatron_ascend_moe.ops.combine import combine_rows
from megatron_ascend_moe.ops.permute import permute_rows
from megatron_ascend_moe.routing import plan_routes, routing_map_to_indices

LAYOUTS = {"multiple 1": {}, "multiple 8": {"pad_multiple": 8}, "binned": {"capacity": 5}}


def routes(T, E, K, seed=0):
    generator = torch.Generator().manual_seed(seed)
    routed = (torch.rand(T, E, generator=generator).argsort(1).argsort(1) < K) & (
        torch.rand(T, E, generator=generator) < 0.8
    )
    if T:
        routed[0] = routed[-1] = False
    return routing_map_to_indices(torch.rand(T, E, generator=generator, requires_grad=True), routed, K)


def exact_rows(plan):
    return int(plan.padded_counts_E.sum())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "E", "K", "H"), [(17, 8, 2, 7), (33, 5, 3, 64), (0, 8, 2, 16), (4, 1, 1, 1)])
def test_round_trip_and_gradients(layout, dtype, T, E, K, H):
    probs_TK, ids = routes(T, E, K)
    probs_TK = probs_TK.detach().requires_grad_()
    plan = plan_routes(ids, E, **LAYOUTS[layout])
    x = torch.randn(T, H).to(dtype).requires_grad_()
    rows, scalars = permute_rows(x, plan, probs_TK, exact_rows(plan))

    # the same by indexing, which autograd differentiates
    kept = plan.row_of_slot_TK >= 0
    token, slot = kept.nonzero(as_tuple=True)
    row = plan.row_of_slot_TK[token, slot].long()
    x2, p2 = x.detach().clone().requires_grad_(), probs_TK.detach().clone().requires_grad_()
    rows2 = torch.zeros(exact_rows(plan), H, dtype=dtype).index_put((row,), x2[token])
    scalars2 = torch.zeros(exact_rows(plan)).index_put((row,), p2[token, slot])
    assert torch.equal(rows, rows2) and torch.equal(scalars, scalars2)

    out = combine_rows(rows * rows, plan)
    out2 = torch.zeros(T, H).index_add(0, token, (rows2 * rows2)[row].float()).to(dtype)
    torch.testing.assert_close(out, out2, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    grad = torch.randn(T, H).to(dtype)
    torch.autograd.backward([out, scalars], [grad, torch.arange(scalars.numel(), dtype=torch.float32)])
    torch.autograd.backward([out2, scalars2], [grad, torch.arange(scalars.numel(), dtype=torch.float32)])
    torch.testing.assert_close(x.grad, x2.grad, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-5)
    assert torch.equal(probs_TK.grad, p2.grad)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weighted_combine_gradients(layout):
    T, E, K, H = 17, 8, 2, 9
    probs_TK, ids = routes(T, E, K)
    plan = plan_routes(ids, E, **LAYOUTS[layout])
    rows = torch.randn(exact_rows(plan), H, requires_grad=True)
    weights = probs_TK.detach().requires_grad_()
    out = combine_rows(rows, plan, weights)
    token, slot = (plan.row_of_slot_TK >= 0).nonzero(as_tuple=True)
    row = plan.row_of_slot_TK[token, slot].long()
    rows2, weights2 = rows.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
    out2 = torch.zeros(T, H).index_add(0, token, rows2[row] * weights2[token, slot].unsqueeze(1))
    torch.testing.assert_close(out, out2)
    grad = torch.randn(T, H)
    out.backward(grad)
    out2.backward(grad)
    torch.testing.assert_close(rows.grad, rows2.grad)
    torch.testing.assert_close(weights.grad, weights2.grad)


def test_only_the_scalars_are_used():
    probs_TK, ids = routes(9, 4, 2)
    plan = plan_routes(ids, 4)
    leaf = probs_TK.detach().requires_grad_()
    x = torch.randn(9, 3, requires_grad=True)
    _, scalars = permute_rows(x, plan, leaf, exact_rows(plan))
    scalars.sum().backward()
    assert torch.equal(leaf.grad, (plan.row_of_slot_TK >= 0).float()) and x.grad is None


def test_expanded_gradients_and_strided_rows():
    _, ids = routes(9, 4, 2)
    plan = plan_routes(ids, 4)
    x = torch.randn(9, 8, requires_grad=True)
    rows, _ = permute_rows(x[:, :5], plan, num_rows=exact_rows(plan))
    rows.sum().backward()
    expected = (plan.row_of_slot_TK >= 0).sum(1).float().unsqueeze(1).expand(9, 5)
    assert torch.equal(x.grad[:, :5], expected) and (x.grad[:, 5:] == 0).all()


def test_a_nan_in_one_token_stays_there():
    probs_TK, ids = routes(9, 4, 2)
    plan = plan_routes(ids, 4, pad_multiple=4)
    x = torch.randn(9, 8)
    clean = combine_rows(permute_rows(x, plan)[0], plan)
    x[3] = float("nan")
    dirty = combine_rows(permute_rows(x, plan)[0], plan)
    others = torch.arange(9) != 3
    assert torch.equal(clean[others], dirty[others]) and dirty[3].isnan().all()


def test_memory_kept_for_backward_is_the_plan():
    T, E, K, H = 64, 8, 2, 128
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    probs = torch.rand(T, E, requires_grad=True)
    x = torch.randn(T, H, requires_grad=True)
    routed = torch.zeros(T, E, dtype=torch.bool).scatter(1, torch.rand(T, E).topk(K).indices, True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        probs_TK, ids = routing_map_to_indices(probs, routed, K)
        plan = plan_routes(ids, E)
        rows, _ = permute_rows(x, plan, probs_TK)
        combine_rows(rows, plan)
    assert 0 < sum(kept.values()) <= 8 * T * K + 2 * 4 * (5 * E + 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda plan: permute_rows(torch.rand(3, 4), plan), r"x has shape \(3, 4\), expected \[9, hidden\]"),
        (lambda plan: permute_rows(torch.rand(9, 4), plan, torch.rand(9, 3)), r"scalars is .*\(9, 3\), expected"),
        (lambda plan: combine_rows(torch.rand(18), plan), r"rows has shape \(18,\), expected \[rows, hidden\]"),
        (lambda plan: combine_rows(torch.rand(18, 4), plan, torch.rand(9, 2).double()), "weights is torch.float64"),
    ],
)
def test_bad_input_is_refused(call, message):
    _, ids = routes(9, 4, 2)
    with pytest.raises(ValueError, match=message):
        call(plan_routes(ids, 4))
