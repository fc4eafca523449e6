"""Row kernels: bitwise against the twin, on poisoned memory, over kinds of shapes."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import TIER
from tests.kernels.cases import Case, layout, rows

SHAPES = [
    Case(T=5, E=1, K=1, H=1, M=1),
    Case(T=9, E=5, K=3, H=7, M=8, dtype=torch.float32),
    Case(T=37, E=8, K=2, H=64, C=3),
    Case(T=9, E=60, K=6, H=123, M=1, dtype=torch.float16),
    Case(T=7, E=160, K=10, H=129, C=1),
    Case(T=5, E=256, K=8, H=64, M=3),
    Case(T=0, E=8, K=2, H=7, M=4),
    Case(T=0, E=8, K=2, H=7, C=5),
    # Widths of rows: narrower than a block of 32 bytes, no power of two, split into column tiles.
    Case(T=6, E=4, K=4, H=4, M=2),
    Case(T=6, E=4, K=3, H=100, C=2, dtype=torch.float16),
    Case(T=6, E=8, K=5, H=200, M=4, dtype=torch.float32),
    Case(T=5, E=8, K=7, H=768, M=4),
    Case(T=5, E=6, K=4, H=2880, M=8, dtype=torch.float32),
    Case(T=4, E=8, K=6, H=5120, M=1),
    Case(T=4, E=6, K=2, H=5200, C=2, dtype=torch.float16),
    Case(T=4, E=12, K=8, H=7168, M=2, dtype=torch.float32),
    Case(T=4, E=12, K=9, H=7168, M=2),
]


def check_against_twin(triton_kernels, twin, device, case):
    plan = layout(case, device)
    x_TH = rows(case, case.T, device)
    segments = (plan.counts_E, plan.padded_bins_E)
    permute = (x_TH, plan.row_of_slot_TK, *segments, plan.num_rows, plan.probs_TK)
    rows_PH, scalars_P = triton_kernels.permute_rows(*permute)
    expected_rows_PH, expected_scalars_P = twin.permute_rows(*permute)
    assert torch.equal(rows_PH, expected_rows_PH)
    assert torch.equal(scalars_P, expected_scalars_P)

    y_PH = rows(case, plan.num_rows, device, seed=2)
    for weights_TK in (None, plan.probs_TK):
        out_TH, scalars_TK = triton_kernels.combine_rows(y_PH, plan.row_of_slot_TK, weights_TK, scalars_P)
        expected = twin.combine_rows(y_PH, plan.row_of_slot_TK, weights_TK, scalars_P)
        assert torch.equal(out_TH, expected[0])
        assert torch.equal(scalars_TK, expected[1])

    grad_TH = rows(case, case.T, device, seed=3)
    backward = (grad_TH, y_PH, plan.row_of_slot_TK, plan.probs_TK, *segments)
    grad_rows_PH, grad_weights_TK = triton_kernels.combine_rows_backward(*backward)
    expected = twin.combine_rows_backward(*backward)
    assert torch.equal(grad_rows_PH, expected[0])
    torch.testing.assert_close(grad_weights_TK, expected[1], rtol=1e-5, atol=1e-4)
    return rows_PH, scalars_P, out_TH, scalars_TK, grad_rows_PH, grad_weights_TK


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes_equal_the_twin(triton_kernels, twin, device, case):
    check_against_twin(triton_kernels, twin, device, case)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_layouts_equal_the_twin(triton_kernels, twin, device, data):
    case = Case(
        T=data.draw(st.integers(0, 20)),
        E=data.draw(st.integers(1, 12)),
        K=data.draw(st.integers(1, 6)),
        H=data.draw(st.integers(1, 140)),
        M=data.draw(st.sampled_from([1, 3, 16])),
        C=data.draw(st.sampled_from([0, 0, 1, 4])),
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        seed=data.draw(st.integers(0, 2**16)),
    )
    check_against_twin(triton_kernels, twin, device, case)


@pytest.mark.parametrize("case", [Case(T=11, E=4, K=3, H=33, M=8), Case(T=11, E=4, K=3, H=33, C=5)], ids=str)
def test_poisoned_memory_is_overwritten_and_repeats_are_equal(triton_kernels, twin, device, poisoned_memory, case):
    first = check_against_twin(triton_kernels, twin, device, case)
    second = check_against_twin(triton_kernels, twin, device, case)
    assert all(not values.isnan().any() for values in first)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_by_loop(implementation, device):
    """Each row by hand: copies, zero pads, and sums in slot order."""
    case = Case(T=6, E=3, K=2, H=5, M=4, dtype=torch.float32)
    plan = layout(case, device)
    x_TH = rows(case, case.T, device)
    rows_PH, scalars_P = implementation.permute_rows(
        x_TH, plan.row_of_slot_TK, plan.counts_E, plan.padded_bins_E, plan.num_rows, plan.probs_TK
    )
    source = {row: (t, k) for t, slots in enumerate(plan.row_of_slot_TK.tolist()) for k, row in enumerate(slots)}
    for row in range(plan.num_rows):
        t, k = source.get(row, (None, None))
        assert rows_PH[row].tolist() == ([0.0] * 5 if t is None else x_TH[t].tolist())
        assert float(scalars_P[row]) == (0.0 if t is None else float(plan.probs_TK[t, k]))
    out_TH, _ = implementation.combine_rows(rows_PH, plan.row_of_slot_TK, plan.probs_TK)
    for t, slots in enumerate(plan.row_of_slot_TK.tolist()):
        total = torch.zeros(5)
        for k, row in enumerate(slots):
            if row >= 0:
                total = total + rows_PH[row].cpu() * plan.probs_TK[t, k].cpu()
        assert torch.equal(out_TH[t].cpu(), total)


def test_rows_after_the_last_segment_are_left_alone(triton_kernels, device, poisoned_memory):
    case = Case(T=4, E=3, K=2, H=9, M=2)
    plan = layout(case, device)
    rows_PH, scalars_P = triton_kernels.permute_rows(
        rows(case, 4, device),
        plan.row_of_slot_TK,
        plan.counts_E,
        plan.padded_bins_E,
        plan.num_rows + 3,
        plan.probs_TK,
    )
    assert rows_PH[plan.num_rows :].isnan().all()
    assert scalars_P[plan.num_rows :].isnan().all()
    assert not rows_PH[: plan.num_rows].isnan().any()


def test_strided_rows(triton_kernels, twin, device):
    case = Case(T=7, E=4, K=2, H=20, M=4)
    plan = layout(case, device)
    segments = (plan.counts_E, plan.padded_bins_E)
    wide = torch.randn(plan.num_rows + 7, 32, device=device).to(case.dtype)
    x_TH, grad_TH, y_PH = wide[:7, 4:24], wide[:7, 2:22], wide[7:, 8:28]
    plain = [t.contiguous() for t in (x_TH, grad_TH, y_PH)]
    got, _ = triton_kernels.permute_rows(x_TH, plan.row_of_slot_TK, *segments, plan.num_rows)
    assert torch.equal(got, twin.permute_rows(plain[0], plan.row_of_slot_TK, *segments, plan.num_rows)[0])
    got, scalars = triton_kernels.combine_rows(y_PH, plan.row_of_slot_TK)
    assert torch.equal(got, twin.combine_rows(plain[2], plan.row_of_slot_TK)[0])
    assert scalars is None
    got, _ = triton_kernels.combine_rows_backward(grad_TH, y_PH, plan.row_of_slot_TK, plan.probs_TK, *segments)
    expected, _ = twin.combine_rows_backward(plain[1], plain[2], plan.row_of_slot_TK, plan.probs_TK, *segments)
    assert torch.equal(got, expected)


SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 1e-30, -1e-30, 6e4]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_of_zeros_infinities_and_nans_are_the_twins_to_the_sign(triton_kernels, twin, device, dtype, weighted):
    """Every pair of special values, also alone and beside a slot without a row."""
    pairs = torch.tensor([(a, b) for a in SPECIAL for b in SPECIAL]).T  # (2, 100): two rows of every column's pair
    y_PH = torch.cat([pairs, pairs]).to(device, dtype)
    row_of_slot_TK = torch.tensor([[0, 1], [2, -1], [-1, 3], [-1, -1]], dtype=torch.int32, device=device)
    weights_TK = torch.tensor([[1.0, -2.0], [-1.0, 0.0], [0.0, 0.5], [1.0, 1.0]], device=device) if weighted else None
    got, _ = triton_kernels.combine_rows(y_PH, row_of_slot_TK, weights_TK)
    expected, _ = twin.combine_rows(y_PH, row_of_slot_TK, weights_TK)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    numbers = ~expected.isnan()
    assert torch.equal(got.signbit() & numbers, expected.signbit() & numbers)


def test_a_nan_row_or_weight_stays_with_its_token(implementation, device):
    row_of_slot_TK = torch.tensor([[0, 1], [2, -1], [-1, 3]], dtype=torch.int32, device=device)
    y_PH = torch.ones(4, 3, device=device)
    y_PH[1] = float("nan")
    weights_TK = torch.tensor([[1.0, 1.0], [0.5, float("nan")], [float("nan"), 2.0]], device=device)
    out_TH, _ = implementation.combine_rows(y_PH, row_of_slot_TK, weights_TK)
    assert out_TH[0].isnan().all()
    assert out_TH[1:].tolist() == [[0.5] * 3, [2.0] * 3]


def test_a_slot_without_a_row_has_no_gradient_even_of_a_nan_gradient(implementation, device):
    row_of_slot_TK = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32, device=device)
    counts_E = torch.tensor([3], dtype=torch.int32, device=device)
    grad_TH = torch.tensor([[1.0] * 3, [float("inf"), float("nan"), 1.0]], device=device)
    y_PH, weights_TK = torch.ones(3, 3, device=device), torch.ones(2, 2, device=device)
    _, grad_weights_TK = implementation.combine_rows_backward(
        grad_TH, y_PH, row_of_slot_TK, weights_TK, counts_E, counts_E
    )
    assert grad_weights_TK[0].tolist() == [3.0, 3.0]
    assert grad_weights_TK[1, 0].isnan()
    assert grad_weights_TK[1, 1] == 0


ROW_ARGUMENTS = {
    "permute_rows": ("x", "row_of_slot", "counts", "padded_bins", "num_rows", "scalars_TK"),
    "combine_rows": ("rows", "row_of_slot", "weights", "scalars_P"),
    "combine_rows_backward": ("x", "rows", "row_of_slot", "weights", "counts", "padded_bins"),
}
WIDTH = r"expected \(rows, (H|8)\) of fp16, bf16 or fp32 with unit stride along H"
# rule: (argument, what becomes of the good one, the message), for each operation that takes the argument
ROW_RULES = {
    "tokens with columns apart": ("x", lambda x: x.t().contiguous().t(), WIDTH),
    "tokens of fp64": ("x", lambda x: x.double(), WIDTH),
    "tokens of one dimension": ("x", lambda x: x.flatten(), WIDTH),
    "rows of no columns": ("rows", lambda rows: rows[:, :0], WIDTH),
    "rows of integers": ("rows", lambda rows: rows.int(), WIDTH),
    "slots of int64": ("row_of_slot", lambda slots: slots.long(), r"row_of_slot .* of torch.int64.*: expected contiguous"),
    "slots that are not contiguous": ("row_of_slot", lambda s: s.t().contiguous().t(), "row_of_slot .*expected contiguous"),
    "weights of bf16": ("weights", lambda w: w.bfloat16(), r"weights .*expected contiguous \(4, 2\) of torch.float32"),
    "weights of other tokens": ("weights", lambda w: w[:3], r"weights .*expected contiguous \(4, 2\)"),
    "scalars of other slots": ("scalars_TK", lambda s: s[:, :1], r"scalars .*expected contiguous \(4, 2\)"),
    "scalars of other rows": ("scalars_P", lambda s: s[1:], r"scalars .*: expected contiguous \(\d+\) of torch.float32"),
    "counts of int64": ("counts", lambda counts: counts.long(), "counts .*: expected contiguous .* of torch.int32"),
    "bins of other experts": ("padded_bins", lambda bins: bins[:2], r"padded_bins .*: expected contiguous \(3\)"),
    "fewer rows than none": ("num_rows", lambda rows: -1, "num_rows=-1: expected 0 to 2147483647"),
    "more rows than int32 counts": ("num_rows", lambda rows: 2**31, "num_rows=2147483648: expected 0 to 2147483647"),
}


@pytest.mark.parametrize(
    ("operation", "rule"),
    [(name, rule) for name in ROW_ARGUMENTS for rule in ROW_RULES if ROW_RULES[rule][0] in ROW_ARGUMENTS[name]],
)
def test_row_kernels_refuse(triton_kernels, device, operation, rule):
    case = Case(T=4, E=3, K=2, H=8)
    plan = layout(case, device)
    arguments = {
        "x": rows(case, 4, device), "rows": rows(case, plan.num_rows, device), "row_of_slot": plan.row_of_slot_TK,
        "counts": plan.counts_E, "padded_bins": plan.padded_bins_E, "num_rows": plan.num_rows,
        "weights": plan.probs_TK, "scalars_TK": plan.probs_TK, "scalars_P": torch.zeros(plan.num_rows, device=device),
    }  # fmt: skip
    argument, change, message = ROW_RULES[rule]
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=message):
        getattr(triton_kernels, operation)(*(arguments[name] for name in ROW_ARGUMENTS[operation]))


def test_row_kernels_refuse_tensors_that_do_not_fit_each_other(triton_kernels, device):
    case = Case(T=4, E=3, K=2, H=8)
    plan = layout(case, device)
    x_TH, segments = rows(case, 4, device), (plan.counts_E, plan.padded_bins_E)
    with pytest.raises(ValueError, match=r"row_of_slot .*expected contiguous \(4, K\)"):
        triton_kernels.permute_rows(x_TH, plan.row_of_slot_TK[:3], *segments, plan.num_rows)
    with pytest.raises(ValueError, match=r"grad .*\(rows, 8\)"):
        triton_kernels.combine_rows_backward(x_TH[:, :4], x_TH, plan.row_of_slot_TK, plan.probs_TK, *segments)
    with pytest.raises(ValueError, match=r"row_of_slot .*expected contiguous \(3, K\)"):
        triton_kernels.combine_rows_backward(x_TH[:3], x_TH, plan.row_of_slot_TK, plan.probs_TK, *segments)


@pytest.mark.skipif(TIER != "device", reason="needs a device with 20 GiB of memory")
def test_more_elements_than_int32_counts(triton_kernels, device):
    """299,600 rows of 7,168: the last rows lie beyond element 2^31."""
    T, K, H = 37_450, 8, 7168
    ids_TK = torch.arange(K, dtype=torch.int32, device=device).repeat(T, 1)
    row_of_slot_TK, meta = triton_kernels.route_place(ids_TK, triton_kernels.id_count(ids_TK, K), 1, 0)
    segments = (meta[4 * K : 5 * K], meta[3 * K : 4 * K])
    x_TH = torch.randn(T, H, device=device).to(torch.bfloat16)
    rows_PH, _ = triton_kernels.permute_rows(x_TH, row_of_slot_TK, *segments, T * K)
    assert rows_PH.numel() > 2**31
    assert torch.equal(rows_PH[-8:], x_TH[-8:])
    out_TH, _ = triton_kernels.combine_rows(rows_PH, row_of_slot_TK)
    assert torch.equal(out_TH[-8:], (x_TH[-8:].float() * 8).to(torch.bfloat16))
    weights_TK = torch.full((T, K), 0.5, device=device)
    args = (x_TH, rows_PH, row_of_slot_TK, weights_TK, *segments)
    grad_rows_PH, grad_weights_TK = triton_kernels.combine_rows_backward(*args)
    assert torch.equal(grad_rows_PH[-8:], x_TH[-8:] * 0.5)
    expected = x_TH[-8:].float().square().sum(1, keepdim=True).expand(8, K)
    torch.testing.assert_close(grad_weights_TK[-8:], expected, rtol=1e-4, atol=0)
