"""The MegaBlocks-signature operations, on each implementation: goldens, and gradients by name against autograd through
plain indexing."""

import contextlib

import pytest
import torch

import megatron_ascend_moe
from megatron_ascend_moe import kernels, ops
from megatron_ascend_moe.backend.device import interpreted_form
from tests.kernels.conftest import TRITON

T, K, E, H, CAPACITY, PAD_TO = 13, 3, 5, 17, 6, 4


@pytest.fixture(autouse=True, params=["torch", *TRITON])
def _launches(request, device, monkeypatch):
    """The launches behind the operations, which choose them by the device: each implementation in turn."""
    kind, _, form = request.param.partition("-")
    with interpreted_form(form) if form else contextlib.nullcontext():
        launches = kernels.select_positions(kind, device)
        monkeypatch.setattr(kernels, "select_positions", lambda choice, device: launches)
        yield


@pytest.fixture(autouse=True)
def _default_device(device):
    """Tensors of these tests live on the device under test."""
    with torch.device(device):
        yield


def _top_expert() -> torch.Tensor:
    """(T, K) expert ids, the same on every device."""
    scores = torch.rand(T, E, generator=torch.Generator("cpu").manual_seed(3), device="cpu")
    return scores.topk(K).indices.to(torch.get_default_device())


def _rows_by_loops(layout: str) -> torch.Tensor:
    """The assignment id of each row of the layout, -1 where none."""
    by_expert = [[a for a, e in enumerate(_top_expert().flatten().tolist()) if e == expert] for expert in range(E)]
    rows = []
    for ids in by_expert:
        if layout == "binned":
            rows += (ids + [-1] * CAPACITY)[:CAPACITY]
        else:
            rows += ids + [-1] * (-len(ids) % (PAD_TO if layout == "padded" else 1))
    return torch.tensor(rows)


def _gather(layout, x):
    indices, bin_ids, bins, padded_bins, _ = ops.indices_and_bins(_top_expert(), E, PAD_TO)
    if layout == "plain":
        return ops.gather(x, indices, bin_ids, bins, K)
    if layout == "padded":
        return ops.padded_gather(x, indices, bin_ids, bins, padded_bins, K)
    return ops.binned_gather(x, indices, bins, CAPACITY, K)


def _scatter(layout, rows, weights):
    indices, bin_ids, bins, padded_bins, _ = ops.indices_and_bins(_top_expert(), E, PAD_TO)
    if layout == "plain":
        return ops.scatter(rows, indices, bin_ids, weights, bins, K)
    if layout == "padded":
        return ops.padded_scatter(rows, indices, bin_ids, weights, bins, padded_bins, K)
    return ops.binned_scatter(rows.view(E, CAPACITY, H), indices, weights, bins, K)


LAYOUTS = ("plain", "padded", "binned")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_and_its_gradient(layout):
    ids = _rows_by_loops(layout)
    x = torch.randn(T, H, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    rows = _gather(layout, x)
    expected = twin[ids.clamp(min=0) // K] * (ids >= 0)[:, None]
    torch.testing.assert_close(rows.reshape(-1, H), expected, rtol=0, atol=0)
    grad = torch.randn_like(expected)
    rows.backward(grad.view_as(rows))
    expected.backward(grad)
    torch.testing.assert_close(x.grad, twin.grad)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scatter_and_its_gradients(layout, weights_dtype):
    ids = _rows_by_loops(layout)
    rows = torch.randn(len(ids), H, requires_grad=True)
    weights = torch.rand(T * K).to(weights_dtype).requires_grad_()
    twin_rows, twin_weights = rows.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
    out = _scatter(layout, rows, weights)
    kept = ids >= 0
    terms = twin_rows[kept] * twin_weights[ids[kept]].float()[:, None]
    expected = torch.zeros(T, H).index_add(0, ids[kept] // K, terms)
    torch.testing.assert_close(out, expected)
    grad = torch.randn(T, H)
    out.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(rows.grad, twin_rows.grad)
    assert weights.grad.dtype == weights_dtype
    torch.testing.assert_close(weights.grad, twin_weights.grad)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scatter_without_weights(layout):
    ids = _rows_by_loops(layout)
    rows = torch.randn(len(ids), H, requires_grad=True)
    out = _scatter(layout, rows, None)
    kept = ids >= 0
    torch.testing.assert_close(out, torch.zeros(T, H).index_add(0, ids[kept] // K, rows.detach()[kept]))
    out.sum().backward()  # an expanded gradient, of stride 0
    torch.testing.assert_close(rows.grad, kept.float()[:, None].expand(-1, H))


# T, K, E, H, capacity
ODD_SHAPES = {
    "no tokens": (0, 2, 4, 8, 3),
    "one of everything": (1, 1, 1, 1, 1),
    "one column": (5, 2, 3, 1, 2),
    "one expert": (6, 1, 1, 7, 4),
    "more assignments of a token than experts": (5, 5, 2, 3, 4),
    "no capacity": (6, 2, 3, 7, 0),
    "no capacity, one assignment a token": (6, 1, 3, 7, 0),
    "overflow, one assignment a token": (6, 1, 3, 7, 1),
    "capacity beyond every count": (6, 2, 3, 7, 100),
    "more experts than assignments": (4, 3, 50, 9, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ODD_SHAPES.values(), ids=list(ODD_SHAPES))
def test_a_round_trip_of_odd_shapes(shape, layout):
    """Gather, then scatter with weights: each token times the sum of its kept weights, and the gradients of that."""
    tokens, top_k, experts, hidden, capacity = shape
    top_expert = torch.randint(0, experts, (tokens, top_k))
    indices, bin_ids, bins, padded_bins, _ = ops.indices_and_bins(top_expert, experts, PAD_TO)
    x = torch.randn(hidden, tokens).t().requires_grad_()  # columns apart
    weights = torch.rand(tokens * top_k, requires_grad=True)
    with megatron_ascend_moe.checked():
        if layout == "plain":
            rows = ops.gather(x, indices, bin_ids, bins, top_k)
            out = ops.scatter(rows, indices, bin_ids, weights, bins, top_k)
        elif layout == "padded":
            rows = ops.padded_gather(x, indices, bin_ids, bins, padded_bins, top_k)
            out = ops.padded_scatter(rows, indices, bin_ids, weights, bins, padded_bins, top_k)
        else:
            rows = ops.binned_gather(x, indices, bins, capacity, top_k)
            out = ops.binned_scatter(rows, indices, weights, bins, top_k)
        grad = torch.randn(tokens, hidden)
        out.backward(grad)
    kept = torch.ones(tokens * top_k)
    if layout == "binned":
        seen = [0] * experts
        for assignment, expert in enumerate(top_expert.flatten().tolist()):
            kept[assignment] = seen[expert] < capacity
            seen[expert] += 1
    scale = (weights.detach() * kept).view(tokens, top_k).sum(1, keepdim=True)
    torch.testing.assert_close(out, x.detach() * scale)
    torch.testing.assert_close(x.grad, grad * scale)
    dots = (x.detach() * grad).sum(1).repeat_interleave(top_k)
    torch.testing.assert_close(weights.grad, dots * kept)


def test_a_gradient_is_made_only_where_it_is_needed():
    for x_needs, weights_need in ((True, False), (False, True)):
        rows = torch.randn(T * K, H, requires_grad=x_needs)
        weights = torch.rand(T * K, dtype=torch.float64, requires_grad=weights_need)
        _scatter("plain", rows, weights).sum().backward()
        assert (rows.grad is not None) == x_needs
        assert (weights.grad is not None) == weights_need
        assert weights.grad is None or weights.grad.dtype == torch.float64


def test_second_derivatives_are_refused():
    x = torch.randn(T, H, requires_grad=True)
    weights = torch.rand(T * K, requires_grad=True)
    for out in (_gather("plain", x), _scatter("plain", torch.randn(T * K, H), weights)):
        wanted = x if out.shape[0] == T * K else weights
        (grad,) = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            grad.sum().backward()


def test_rows_are_not_kept_for_backward_where_the_weights_need_no_gradient():
    rows = torch.randn(T * K, H, requires_grad=True)
    out = _scatter("plain", rows, torch.rand(T * K))
    assert all(saved is None or saved.dim() == 1 for saved in out.grad_fn.saved_tensors)


def test_indices_and_bins_of_a_golden():
    # top-2 of four tokens: experts [0, 2], [1, 2], [0, 3], [0, 1]
    top_expert = torch.tensor([[0, 2], [1, 2], [0, 3], [0, 1]])
    indices, bin_ids, bins, padded_bins, counts = ops.indices_and_bins(top_expert, 4, pad_to=4)
    assert (indices // 2).tolist() == [0, 2, 3, 1, 3, 0, 1, 2]
    assert bin_ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 3]
    assert counts.tolist() == [3, 2, 2, 1]
    assert bins.tolist() == [3, 5, 7, 8]
    assert padded_bins.tolist() == [4, 8, 12, 16]
    assert {t.dtype for t in (indices, bin_ids, bins, padded_bins, counts)} == {torch.int32}


def test_capacity_drops_the_last_assignments_of_an_expert():
    top_expert = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 2]])
    indices, _, bins, _, _ = ops.indices_and_bins(top_expert, 4)
    x = torch.arange(1.0, 5.0)[:, None]
    rows = ops.binned_gather(x, indices, bins, 2, 2)
    assert rows.squeeze(2).tolist() == [[1, 2], [1, 2], [3, 4], [0, 0]]
    back = ops.binned_scatter(torch.ones(4, 2, 1), indices, None, bins, 2)
    assert back.squeeze(1).tolist() == [2, 2, 1, 1]  # assignments 4 and 6 were dropped


def test_empty_experts_take_no_padding():
    _, _, _, padded_bins, _ = ops.indices_and_bins(torch.tensor([0, 0, 0, 1, 1, 2, 2, 3]), 6, pad_to=4)
    assert padded_bins.tolist() == [4, 8, 12, 16, 16, 16]
    _, _, _, padded_bins, _ = ops.indices_and_bins(torch.tensor([0] * 44 + [2]), 3, pad_to=32)
    assert padded_bins.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist() == [64, 0, 32]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_sort_is_stable_and_keeps_the_dtype(dtype):
    x = torch.tensor([5, 1, 3, 1, 5, 0], dtype=dtype)
    values, positions = ops.sort(x)
    assert values.tolist() == [0, 1, 1, 3, 5, 5] and positions.tolist() == [5, 1, 3, 2, 0, 4]
    assert values.dtype == positions.dtype == dtype
    values, positions = ops.sort(x, 1)  # the lowest bit only
    assert positions.tolist() == [5, 0, 1, 2, 3, 4]


def test_histogram_and_cumulative_sums():
    x = torch.tensor([[0, 2, 2, 1], [3, 3, 3, 0]], dtype=torch.int32)
    assert ops.histogram(x[0], 4).tolist() == [1, 1, 2, 0]
    assert ops.histogram(x, 4).tolist() == [[1, 1, 2, 0], [1, 0, 0, 3]]
    assert ops.inclusive_cumsum(x, 1).tolist() == [[0, 2, 4, 5], [3, 6, 9, 9]]
    assert ops.inclusive_cumsum(x, 0).dtype == torch.int32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.sort(torch.rand(3)), "sort: got torch.float32 .3,., expected int16, int32 or int64 of 1"),
        (lambda: ops.histogram(torch.zeros(1, 1, 1, dtype=torch.int32), 2), "histogram: .* of 1 or 2 dimensions"),
        (lambda: ops.inclusive_cumsum(torch.rand(3), 0), "inclusive_cumsum: got torch.float32"),
        (lambda: ops.indices_and_bins(torch.tensor([0]), 0), "num_experts=0, pad_to=1: expected at least 1"),
        (lambda: ops.binned_scatter(torch.rand(3, 4), None, None, None, 1), "x has shape .3, 4., expected"),
        (lambda: ops.sort(torch.zeros(2**15, dtype=torch.int16)), "sort: got 32768 values of torch.int16, expected at"),
        (lambda: _gather("plain", torch.rand(T)), "gather: tokens .13,. of torch.float32"),
        (lambda: _scatter("plain", torch.rand(T * K), None), "scatter: rows .39,. of torch.float32"),
        (lambda: ops.binned_gather(torch.rand(2, 4), _ints(0, 1), _ints(2).long(), 1, 1), "bins .1,. of torch.int64"),
        (lambda: ops.binned_gather(torch.rand(2, 4), _ints(0, 1), _ints(2)[None], 1, 1), "bins .1, 1. of torch.int32"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("expert", [-1, 3])
def test_checked_mode_refuses_an_expert_out_of_range(expert):
    with (
        megatron_ascend_moe.checked(),
        pytest.raises(ValueError, match=f"indices_and_bins: got expert {expert} at 1, expected 0 to 2"),
    ):
        ops.indices_and_bins(_ints(0, expert), 3)


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)
