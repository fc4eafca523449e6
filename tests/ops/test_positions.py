"""The MegaBlocks-signature operations: goldens, and gradients by name against autograd through plain indexing."""

import pytest
import torch

from megatron_ascend_moe import ops

T, K, E, H, CAPACITY, PAD_TO = 13, 3, 5, 17, 6, 4
TOP_EXPERT = torch.rand(T, E, generator=torch.Generator().manual_seed(3)).topk(K).indices


def _rows_by_loops(layout: str) -> torch.Tensor:
    """The assignment id of each row of the layout, -1 where none."""
    by_expert = [[a for a, e in enumerate(TOP_EXPERT.flatten().tolist()) if e == expert] for expert in range(E)]
    rows = []
    for ids in by_expert:
        if layout == "binned":
            rows += (ids + [-1] * CAPACITY)[:CAPACITY]
        else:
            rows += ids + [-1] * (-len(ids) % (PAD_TO if layout == "padded" else 1))
    return torch.tensor(rows)


def _gather(layout, x):
    indices, bin_ids, bins, padded_bins, _ = ops.indices_and_bins(TOP_EXPERT, E, PAD_TO)
    if layout == "plain":
        return ops.gather(x, indices, bin_ids, bins, K)
    if layout == "padded":
        return ops.padded_gather(x, indices, bin_ids, bins, padded_bins, K)
    return ops.binned_gather(x, indices, bins, CAPACITY, K)


def _scatter(layout, rows, weights):
    indices, bin_ids, bins, padded_bins, _ = ops.indices_and_bins(TOP_EXPERT, E, PAD_TO)
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
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
