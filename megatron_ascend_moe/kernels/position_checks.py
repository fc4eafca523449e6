"""Checks of the MegaBlocks-signature launches. Shapes and dtypes always; values, which cost device syncs, only in
checked mode (`megatron_ascend_moe.checked()` or MEGATRON_ASCEND_MOE_CHECKED=1)."""

import torch
from torch import Tensor

from megatron_ascend_moe import config
from megatron_ascend_moe.kernels.checks import MAX_INDEX, check_rows, check_vector


def check_positions(
    name: str,
    indices: Tensor,
    bin_ids: Tensor,
    bins: Tensor,
    top_k: int,
    *,
    padded_bins: Tensor | None = None,
    capacity: int | None = None,
    num_rows: int | None = None,
    weights: Tensor | None = None,
    tokens: Tensor | None = None,
    rows: Tensor | None = None,
    binned_rows: Tensor | None = None,
) -> int:
    """Check the arguments of the launch `name`; `positions_reference` states what they are.

    Args:
        num_rows: rows of the padded layout to make, where the caller states them.
        tokens: the (T, H) tensor in token order, an input or a gradient.
        rows: the (rows, H) tensor in expert order; N rows where there are no padded_bins.
        binned_rows: the (E, C, H) tensor in expert order.

    Returns:
        The expert capacity C of `binned_rows`, or `capacity`, or 0.

    Raises:
        ValueError: what is wrong, what was got, what was expected.
    """
    positions = check_vector(f"{name}: indices", indices, torch.int32)
    check_vector(f"{name}: bin_ids", bin_ids, torch.int32, positions)
    experts = check_vector(f"{name}: bins", bins, torch.int32)
    if experts < 1 or top_k < 1 or positions % top_k:
        raise ValueError(
            f"{name}: {experts} experts, top_k={top_k} and {positions} positions: expected at least one expert and "
            "a whole number of tokens of top_k positions"
        )
    if padded_bins is not None:
        check_vector(f"{name}: padded_bins", padded_bins, torch.int32, experts)
    if num_rows is not None and not 0 <= num_rows <= MAX_INDEX:
        raise ValueError(f"{name}: num_rows={num_rows}: expected 0 to {MAX_INDEX}")
    if weights is not None and (weights.shape != (positions,) or not weights.is_floating_point()):
        raise ValueError(
            f"{name}: weights {tuple(weights.shape)} of {weights.dtype}: expected ({positions}) floating, by assignment"
        )
    hidden = None
    if rows is not None:
        num_rows, hidden = check_rows(f"{name}: rows", rows)
        if padded_bins is None and num_rows != positions:
            raise ValueError(f"{name}: {num_rows} rows: expected one of each of the {positions} positions")
    if binned_rows is not None:
        if binned_rows.dim() != 3 or binned_rows.shape[0] != experts or not binned_rows.is_contiguous():
            raise ValueError(
                f"{name}: rows {tuple(binned_rows.shape)}, strides {binned_rows.stride()}: expected contiguous "
                f"({experts}, capacity, H)"
            )
        capacity, hidden = binned_rows.shape[1:]
        check_rows(f"{name}: rows", binned_rows.view(-1, hidden))
    if capacity is not None and not 0 <= capacity * experts <= MAX_INDEX:
        raise ValueError(f"{name}: capacity {capacity} of {experts} experts: expected 0 to {MAX_INDEX} rows in all")
    if tokens is not None:
        num_tokens, _ = check_rows(f"{name}: tokens", tokens, hidden)
        if num_tokens * top_k != positions:
            raise ValueError(
                f"{name}: {num_tokens} tokens of top_k={top_k}: expected {positions // top_k} tokens for "
                f"{positions} positions"
            )
    if config.is_checked():
        _check_values(name, indices, bin_ids, bins, padded_bins, num_rows)
    return capacity or 0


def _check_values(name, indices, bin_ids, bins, padded_bins, num_rows) -> None:
    """The rules of checked mode, in the order in which one rests on another."""
    positions, experts = indices.numel(), bins.numel()
    for label, ends in (("bins", bins), ("padded_bins", padded_bins)):
        if ends is not None:
            _refuse(f"{name}: {label} decrease", _starts(ends) > ends, ends, "nondecreasing cumulative counts")
    if int(bins[-1]) != positions:
        raise ValueError(f"{name}: bins end at {int(bins[-1])}: expected {positions}, the number of positions")
    _refuse(f"{name}: bin_ids out of range", (bin_ids < 0) | (bin_ids >= experts), bin_ids, f"0 to {experts - 1}")
    _refuse(f"{name}: bin_ids decrease", bin_ids[1:] < bin_ids[:-1], bin_ids[1:], "nondecreasing expert ids")
    order = torch.arange(positions, dtype=torch.int32, device=bins.device)
    expected = torch.searchsorted(bins, order, right=True)
    _refuse(f"{name}: bin_ids disagree with bins", bin_ids != expected, bin_ids, "the expert whose bin holds it")
    if padded_bins is not None:
        counts, padded = bins - _starts(bins), padded_bins - _starts(padded_bins)
        _refuse(f"{name}: padded segments shorter than their counts", padded < counts, padded, "at least the count")
        if num_rows is not None and int(padded_bins[-1]) > num_rows:
            raise ValueError(f"{name}: padded_bins end at {int(padded_bins[-1])}: expected at most {num_rows} rows")
    _refuse(
        f"{name}: indices out of range", (indices < 0) | (indices >= positions), indices, f"0 to {positions - 1}"
    )
    uses = torch.bincount(indices.long(), minlength=positions)
    _refuse(f"{name}: indices repeat an assignment", uses > 1, order, "each assignment id once")


def _starts(ends: Tensor) -> Tensor:
    return torch.cat([ends.new_zeros(1), ends[:-1]])


def _refuse(what: str, wrong: Tensor, values: Tensor, expected: str) -> None:
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(f"{what}: got {int(values[at])} at {at}, expected {expected}")
