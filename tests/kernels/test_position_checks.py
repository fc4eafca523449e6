"""What the MegaBlocks-signature launches refuse: shapes always, values in checked mode; one failing input a rule."""

import pytest
import torch

import megatron_ascend_moe
from megatron_ascend_moe.kernels import positions_reference

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


def call(name: str, **changes):
    arguments = good_arguments() | changes
    return getattr(positions_reference, name)(*(arguments[key] for key in LAUNCHES[name]))


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
VALUE_CASES = [
    (name, rule) for name in LAUNCHES for rule, (argument, *_) in VALUE_RULES.items() if argument in LAUNCHES[name]
]


@pytest.mark.parametrize("name", LAUNCHES)
def test_good_arguments_pass_in_checked_mode(name):
    with megatron_ascend_moe.checked():
        call(name)


@pytest.mark.parametrize(("name", "rule"), VALUE_CASES, ids=[f"{name}: {rule}" for name, rule in VALUE_CASES])
def test_checked_mode_refuses(name, rule):
    argument, values, message = VALUE_RULES[rule]
    with megatron_ascend_moe.checked(), pytest.raises(ValueError) as refusal:
        call(name, **{argument: values})
    assert str(refusal.value).startswith(f"{name}: {message}")


def test_checked_mode_refuses_more_padded_rows_than_there_are():
    with megatron_ascend_moe.checked(), pytest.raises(ValueError, match="padded_bins end at 12: expected at most 10"):
        call("padded_scatter", padded_bins=integers(4, 8, 12))


def test_values_are_not_read_outside_checked_mode(monkeypatch):
    monkeypatch.delenv("MEGATRON_ASCEND_MOE_CHECKED", raising=False)
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a value was read"))
    call("gather", indices=integers(0, 2, 4, 1, 3, 6, 6, 5))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gather", {"indices": torch.zeros(8, dtype=torch.int64)}, "indices .8,. of torch.int64: expected contiguous"),
        ("gather", {"bin_ids": integers(0, 0)}, "bin_ids .2,. of torch.int32: expected contiguous .8. of torch.int32"),
        ("gather", {"top_k": 3}, "3 experts, top_k=3 and 8 positions: expected at least one expert and a whole"),
        ("gather", {"tokens": torch.randn(3, H)}, "3 tokens of top_k=2: expected 4 tokens for 8 positions"),
        ("gather", {"weights": torch.rand(7)}, "weights .7,. of torch.float32: expected .8. floating, by assignment"),
        ("padded_gather", {"padded_bins": integers(4, 8)}, "padded_bins .2,. of torch.int32: expected contiguous .3."),
        ("binned_gather", {"capacity": -1}, "capacity -1 of 3 experts: expected 0 to 2147483647 rows"),
        ("scatter", {"rows": torch.randn(7, H)}, "7 rows: expected one of each of the 8 positions"),
        ("binned_scatter", {"binned_rows": torch.randn(2, C, H)}, "expected contiguous .3, capacity, H."),
        ("scatter_wgrad", {"tokens": torch.randn(T, H + 1)}, "tokens .4, 9. .* expected .rows, 8. of fp16"),
    ],
)
def test_shapes_are_always_checked(name, changes, message):
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        call(name, **changes)
