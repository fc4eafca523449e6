"""The MegaBlocks-signature launches against their plain-torch twins and against loops over assignments.

Fresh memory is NaN, so that an element left unwritten shows; rows that hold no assignment are NaN too, so that one
that is read shows.
"""

import contextlib

import pytest
import torch

from megatron_ascend_moe import kernels
from megatron_ascend_moe.backend.device import interpreted_form
from megatron_ascend_moe.kernels import positions_reference
from tests.kernels.conftest import TRITON
from tests.kernels.position_cases import (
    CASES,
    LAYOUTS,
    Case,
    expected_gather,
    expected_scatter,
    expected_weight_gradient,
    make_inputs,
)


@pytest.fixture(autouse=True)
def _poison_fresh_memory():
    """torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def repeats(tier):
    """Bitwise equal from run to run; the interpreter, which takes its time, runs once."""
    return 1 if tier == "interpret" else 3


@pytest.fixture(scope="module", params=["torch", *TRITON])
def launches(request, _kernel_tier, device):
    """Each implementation in turn: the twins, Triton in each form that this tier can run."""
    kind, _, form = request.param.partition("-")
    with interpreted_form(form) if form else contextlib.nullcontext():
        yield kernels.select_positions(kind, device)


def run_gather(launches, inputs, layout):
    case = inputs.case
    where = (inputs.tokens, inputs.indices, inputs.bin_ids, inputs.weights, inputs.bins)
    if layout == "plain":
        return launches.gather(*where, case.K)
    if layout == "padded":
        return launches.padded_gather(*where, inputs.padded_bins, case.K)
    return launches.binned_gather(*where, case.capacity, case.K)


def run_scatter(launches, inputs, layout, rows):
    where = (rows, inputs.indices, inputs.bin_ids, inputs.weights, inputs.bins)
    if layout == "padded":
        return launches.padded_scatter(*where, inputs.padded_bins, inputs.case.K)
    return (launches.scatter if layout == "plain" else launches.binned_scatter)(*where, inputs.case.K)


def run_weight_gradient(launches, inputs, layout, rows):
    where = (rows, inputs.tokens, inputs.indices, inputs.bin_ids, inputs.bins)
    if layout == "padded":
        return launches.padded_scatter_wgrad(*where, inputs.padded_bins, inputs.case.K)
    return (launches.scatter_wgrad if layout == "plain" else launches.binned_scatter_wgrad)(*where, inputs.case.K)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gather(case, launches, device, repeats):
    inputs = make_inputs(case, device)
    for layout in LAYOUTS:
        for _ in range(repeats):
            rows = run_gather(launches, inputs, layout)
            torch.testing.assert_close(rows.cpu(), expected_gather(inputs, layout), rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scatter(case, launches, device, repeats):
    inputs = make_inputs(case, device)
    for layout in LAYOUTS:
        rows = inputs.rows(layout)
        for _ in range(repeats):
            out = run_scatter(launches, inputs, layout, rows)
            torch.testing.assert_close(out.cpu(), expected_scatter(inputs, layout, rows), rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weight_gradient(case, launches, device, repeats):
    inputs = make_inputs(case, device)
    for layout in LAYOUTS:
        rows = inputs.rows(layout)
        grad = run_weight_gradient(launches, inputs, layout, rows)
        assert grad.dtype == torch.float32 and grad.shape == (case.T * case.K,)
        expected = expected_weight_gradient(inputs, layout, rows)
        torch.testing.assert_close(grad.cpu(), expected, rtol=1e-5, atol=1e-6 * case.H)
        for _ in range(repeats - 1):
            assert torch.equal(grad, run_weight_gradient(launches, inputs, layout, rows))


def test_rows_beyond_the_padded_bins_are_zeroed(launches, device):
    inputs = make_inputs(CASES[0], device)
    rows = int(inputs.padded_bins[-1])
    where = (inputs.tokens, inputs.indices, inputs.bin_ids, inputs.weights, inputs.bins, inputs.padded_bins)
    out = launches.padded_gather(*where, inputs.case.K, num_rows=rows + 9).cpu()
    torch.testing.assert_close(out[:rows], expected_gather(inputs, "padded"), rtol=0, atol=0)
    assert torch.equal(out[rows:], torch.zeros(9, inputs.case.H, dtype=inputs.case.dtype))


def test_strided_rows_are_read_in_place(launches, device):
    inputs = make_inputs(CASES[0], device)
    wide = torch.full((inputs.case.T, 2 * inputs.case.H), float("nan"), dtype=inputs.case.dtype, device=device)
    wide[:, : inputs.case.H] = inputs.tokens
    strided = wide[:, : inputs.case.H]
    where = (inputs.indices, inputs.bin_ids, inputs.weights, inputs.bins, inputs.case.K)
    assert torch.equal(launches.gather(strided, *where), launches.gather(inputs.tokens, *where))


def test_strided_and_expanded_weights(launches, device):
    expert = torch.tensor([0, 1, 1, 0, 2, 1], device=device)
    bin_ids, indices = torch.sort(expert.int(), stable=True)
    bins = torch.tensor([2, 5, 6], dtype=torch.int32, device=device)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(device)
    for weights in (torch.arange(12.0, device=device)[::2], torch.tensor([0.5], device=device).expand(6)):
        for top_k in (1, 2):
            got, expected = (
                launches.scatter(x, indices.int(), bin_ids, given, bins, top_k) for given in (weights, weights.clone())
            )
            assert torch.equal(got, expected)


def test_a_large_routing(device, tier):
    """16,384 tokens of 768 columns to the best 4 of 128 experts; smaller where every element is interpreted."""
    launches = kernels.select_positions("triton", device)
    tokens = 64 if tier == "interpret" else 16_384
    case = Case("large", T=tokens, K=4, E=128, H=768, pad_to=32, capacity=tokens * 4 // 128, weighted=False)
    inputs = make_inputs(case, device)
    for layout in LAYOUTS:
        ids = torch.tensor(inputs.assignment_of_row[layout], device=device)
        rows = run_gather(launches, inputs, layout)
        expected = torch.where(ids[:, None] >= 0, inputs.tokens[ids.clamp(min=0) // case.K], 0)
        assert torch.equal(rows.view(-1, case.H), expected)
        back = run_scatter(launches, inputs, layout, rows)
        assert torch.equal(back, run_scatter(positions_reference, inputs, layout, rows))
        grad = run_weight_gradient(launches, inputs, layout, rows)
        expected = (rows.view(-1, case.H).double() * expected.double()).sum(1)[ids >= 0]
        torch.testing.assert_close(grad[ids[ids >= 0]], expected.float(), rtol=1e-5, atol=1e-6 * case.H)
        assert int((grad == 0).sum()) >= case.T * case.K - int((ids >= 0).sum())
