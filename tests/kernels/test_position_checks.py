"""What the MegaBlocks-signature launches refuse: shapes always, values in checked mode; one failing input for each rule
and launch, of the twins and of Triton's."""

import pytest
import torch

import megatron_ascend_moe
from megatron_ascend_moe import kernels
from megatron_ascend_moe.kernels import position_checks

T, K, E, H, C = 4, 2, 3, 8, 5


def good_arguments() -> dict:
    """Arguments by name that every launch accepts: counts [3, 4, 1], padded to multiples of 2."""
    return {
        "tokens": torch.randn(T, H),
        "indices": torch.tensor([0, 2, 4, 1, 3, 6, 7, 5], dtype=torch.int32),
        "bin_ids": torch.tensor([0, 0, 0, 1, 1, 1, 1, 2], dtype=torch.int32),
        "weights": torch.rand(T * K),
        "bins": torch.tensor([3, 7, 8], dtype=torch.int32),
        "padded_bins": torch.tensor([4, 8, 10], dtype=torch.int32),
        "rows": torch.randn(T * K, H),
        "padded_rows": torch.randn(10, H),
        "binned_rows": torch.randn(E, C, H),
        "capacity": C,
        "top_k": K,
    }


WHERE = ("indices", "bin_ids", "weights", "bins")
LAUNCHES = {
    "gather": ("tokens", *WHERE, "top_k"),
    "padded_gather": ("tokens", *WHERE, "padded_bins", "top_k"),
    "binned_gather": ("tokens", *WHERE, "capacity", "top_k"),
    "scatter": ("rows", *WHERE, "top_k"),
    "padded_scatter": ("padded_rows", *WHERE, "padded_bins", "top_k"),
    "binned_scatter": ("binned_rows", *WHERE, "top_k"),
    "scatter_wgrad": ("rows", "tokens", "indices", "bin_ids", "bins", "top_k"),
    "padded_scatter_wgrad": ("padded_rows", "tokens", "indices", "bin_ids", "bins", "padded_bins", "top_k"),
    "binned_scatter_wgrad": ("binned_rows", "tokens", "indices", "bin_ids", "bins", "top_k"),
}


@pytest.fixture(params=["torch", "triton"])
def call(request, _kernel_tier, device):
    """call(name, **changes): a launch with good arguments but for the changes, on the device under test."""
    launches = kernels.select_positions(request.param, device)

    def run(name: str, **changes):
        arguments = good_arguments() | changes
        return getattr(launches, name)(*(_on(device, arguments[key]) for key in LAUNCHES[name]))

    return run


def _on(device, value):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


# rule: (changed argument, its values, the message)
VALUE_RULES = {
    "cumulative counts that decrease": (
        "bins", integers(7, 3, 8), "bins decrease: got 3 at 1, expected nondecreasing cumulative counts"
    ),
    "padded counts that decrease": (
        "padded_bins", integers(4, 2, 10), "padded_bins decrease: got 2 at 1, expected nondecreasing cumulative counts"
    ),
    "a last count that is not the number of positions": (
        "bins", integers(3, 7, 9), "bins end at 9: expected 8, the number of positions"
    ),
    "an expert id out of range": (
        "bin_ids", integers(0, 0, 0, 1, 1, 1, 1, 3), "bin_ids out of range: got 3 at 7, expected 0 to 2"
    ),
    "a negative expert id": (
        "bin_ids", integers(-1, 0, 0, 1, 1, 1, 1, 2), "bin_ids out of range: got -1 at 0, expected 0 to 2"
    ),
    "expert ids that decrease": (
        "bin_ids", integers(0, 0, 0, 1, 0, 1, 1, 2), "bin_ids decrease: got 0 at 3, expected nondecreasing expert ids"
    ),
    "expert ids that disagree with the counts": (
        "bin_ids", integers(0, 0, 1, 1, 1, 1, 1, 2), "bin_ids disagree with bins: got 1 at 2, expected the expert"
    ),
    "a padded segment shorter than its count": (
        "padded_bins", integers(4, 6, 10), "padded segments shorter than their counts: got 2 at 1, expected at least"
    ),
    "an assignment id out of range": (
        "indices", integers(0, 2, 4, 1, 3, 6, 8, 5), "indices out of range: got 8 at 6, expected 0 to 7"
    ),
    "a repeated assignment id": (
        "indices", integers(0, 2, 4, 1, 3, 6, 6, 5), "indices repeat an assignment: got 6 at 6, expected each"
    ),
}  # fmt: skip
SHAPE_RULES = {
    "indices of int64": (
        "indices", torch.zeros(8, dtype=torch.int64), "indices (8,) of torch.int64: expected contiguous (N) of torch.int32"
    ),
    "indices of two dimensions": (
        "indices", torch.zeros(4, 2, dtype=torch.int32), "indices (4, 2) of torch.int32: expected contiguous (N)"
    ),
    "another number of bin_ids": ("bin_ids", integers(0, 0), "bin_ids (2,) of torch.int32: expected contiguous (8)"),
    "bins of int64": ("bins", integers(3, 7, 8).long(), "bins (3,) of torch.int64: expected contiguous (N)"),
    "no experts": ("bins", integers(), "0 experts, top_k=2 and 8 positions: expected at least one expert"),
    "no whole number of tokens": ("top_k", 3, "3 experts, top_k=3 and 8 positions: expected at least one expert and a"),
    "top_k of 0": ("top_k", 0, "3 experts, top_k=0 and 8 positions: expected at least one expert and a"),
    "another number of weights": ("weights", torch.rand(7), "weights (7,) of torch.float32: expected (8) floating"),
    "integer weights": ("weights", integers(*range(8)), "weights (8,) of torch.int32: expected (8) floating"),
    "another number of padded_bins": (
        "padded_bins", integers(4, 8), "padded_bins (2,) of torch.int32: expected contiguous (3) of torch.int32"
    ),
    "another number of tokens": (
        "tokens", torch.randn(3, H), "3 tokens of top_k=2: expected 4 tokens for 8 positions"
    ),
    "tokens of fp64": ("tokens", torch.randn(T, H).double(), "tokens (4, 8) of torch.float64, strides (8, 1): expected"),
    "tokens of no columns": ("tokens", torch.randn(T, 0), "tokens (4, 0) of torch.float32"),
    "columns apart": ("tokens", torch.randn(H, T).t(), "tokens (4, 8) of torch.float32, strides (1, 4): expected"),
    "another number of rows": ("rows", torch.randn(7, H), "7 rows: expected one of each of the 8 positions"),
    "rows of one dimension": ("padded_rows", torch.randn(10), "rows (10,) of torch.float32"),
    "rows of other experts": ("binned_rows", torch.randn(2, C, H), "rows (2, 5, 8), strides (40, 8, 1): expected contig"),
    "bins that are not adjacent": (
        "binned_rows", torch.randn(C, E, H).transpose(0, 1), "rows (3, 5, 8), strides (8, 24, 1): expected contiguous"
    ),
    "a negative capacity": ("capacity", -1, "capacity -1 of 3 experts: expected 0 to 2147483647 rows in all"),
    "a capacity beyond int32": ("capacity", 2**30, "capacity 1073741824 of 3 experts: expected 0 to 2147483647 rows"),
}  # fmt: skip


def _cases(rules: dict) -> list:
    """Each rule with each launch that takes its argument."""
    return [
        pytest.param(name, rule, id=f"{name}: {rule}")
        for name in LAUNCHES
        for rule, (argument, *_) in rules.items()
        if argument in LAUNCHES[name]
    ]


@pytest.mark.parametrize("name", LAUNCHES)
def test_good_arguments_pass_in_checked_mode(call, name):
    with megatron_ascend_moe.checked():
        call(name)


@pytest.mark.parametrize(("name", "rule"), _cases(SHAPE_RULES))
def test_shapes_are_always_checked(call, name, rule):
    argument, value, message = SHAPE_RULES[rule]
    with pytest.raises(ValueError) as refusal:
        call(name, **{argument: value})
    assert str(refusal.value).startswith(f"{name}: {message}")


@pytest.mark.parametrize(("name", "rule"), _cases(VALUE_RULES))
def test_checked_mode_refuses(call, name, rule):
    argument, values, message = VALUE_RULES[rule]
    with megatron_ascend_moe.checked(), pytest.raises(ValueError) as refusal:
        call(name, **{argument: values})
    assert str(refusal.value).startswith(f"{name}: {message}")


@pytest.mark.parametrize("name", ["padded_scatter", "padded_scatter_wgrad"])
def test_checked_mode_refuses_more_padded_rows_than_there_are(call, name):
    with megatron_ascend_moe.checked(), pytest.raises(ValueError, match="padded_bins end at 12: expected at most 10"):
        call(name, padded_bins=integers(4, 8, 12))


def test_a_number_of_rows_to_make_is_checked(device):
    good = {key: _on(device, value) for key, value in good_arguments().items()}
    for choice in ("torch", "triton"):
        launch = kernels.select_positions(choice, device).padded_gather
        where = [good[key] for key in LAUNCHES["padded_gather"]]
        with pytest.raises(ValueError, match="padded_gather: num_rows=-1: expected 0 to 2147483647"):
            launch(*where, num_rows=-1)
        with megatron_ascend_moe.checked(), pytest.raises(ValueError, match="padded_bins end at 10: expected at most 9"):
            launch(*where, num_rows=9)


def test_gradients_of_another_width_are_refused(call):
    for name in ("scatter_wgrad", "padded_scatter_wgrad", "binned_scatter_wgrad"):
        with pytest.raises(ValueError, match=rf"{name}: tokens \(4, 9\) .* expected \(rows, 8\) of fp16"):
            call(name, tokens=torch.randn(T, H + 1))


@pytest.mark.parametrize("name", LAUNCHES)
def test_values_are_read_in_checked_mode_only(call, name, monkeypatch):
    monkeypatch.delenv("MEGATRON_ASCEND_MOE_CHECKED", raising=False)
    monkeypatch.setattr(position_checks, "_check_values", lambda *values: pytest.fail("values were checked"))
    call(name)
    with megatron_ascend_moe.checked(), pytest.raises(pytest.fail.Exception, match="values were checked"):
        call(name)


def test_the_checks_of_shapes_read_no_value(monkeypatch):
    monkeypatch.delenv("MEGATRON_ASCEND_MOE_CHECKED", raising=False)
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a value was read"))
    good = good_arguments()
    wrong = integers(0, 2, 4, 1, 3, 6, 6, 5)
    where = (wrong, good["bin_ids"], good["bins"], K)
    position_checks.check_positions("gather", *where, tokens=good["tokens"], weights=good["weights"])
    position_checks.check_positions("padded_scatter", *where, rows=good["padded_rows"], padded_bins=good["padded_bins"])
