"""Sorting assignments by expert, by MegaBlocks' names. Integers only, no gradients, no device-to-host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ascend_moe import config

_INTEGERS = (torch.int16, torch.int32, torch.int64)


def sort(x: Tensor, end_bit: int | None = None) -> tuple[Tensor, Tensor]:
    """Stable ascending sort of nonnegative integers.

    Args:
        x: (N) int16, int32 or int64.
        end_bit: compare only the low `end_bit` bits; None compares all.

    Returns:
        the sorted values, and the position of each in `x`, both (N) of x's dtype.

    Raises:
        ValueError: x is no vector of these integers, or longer than its dtype can number.
    """
    _check_integers("sort", x, 1)
    if x.numel() > torch.iinfo(x.dtype).max:
        raise ValueError(f"sort: got {x.numel()} values of {x.dtype}, expected at most {torch.iinfo(x.dtype).max}")
    key = x if end_bit is None else x & ((1 << end_bit) - 1)
    order = torch.sort(key, stable=True).indices
    return x[order], order.to(x.dtype)


def histogram(x: Tensor, max_val: int) -> Tensor:
    """How often each of 0 … max_val - 1 occurs: (N) integer -> (max_val) int32, (B, N) -> (B, max_val).

    Values outside that range are undefined behaviour, as in MegaBlocks.
    """
    _check_integers("histogram", x, 1, 2)
    counts = torch.zeros(*x.shape[:-1], max_val, dtype=torch.int32, device=x.device)
    return counts.scatter_add_(-1, x.long(), torch.ones_like(x, dtype=torch.int32))


def inclusive_cumsum(x: Tensor, dim: int) -> Tensor:
    """Running sums along `dim`, each with its own element: integers, the same shape and dtype."""
    _check_integers("inclusive_cumsum", x, 1, 2)
    return x.cumsum(dim, dtype=x.dtype)


def indices_and_bins(
    top_expert: Tensor, num_experts: int, pad_to: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What gather and scatter need of a routing.

    Args:
        top_expert: integer expert ids in [0, num_experts), of any shape; (T, top_k) in practice.
        num_experts: E.
        pad_to: each expert's rows are rounded up to a multiple of it in `padded_bins`; 0 stays 0.

    Returns:
        indices (N), bin_ids (N), bins (E), padded_bins (E) and counts (E), all int32.

    Raises:
        ValueError: ids that are no integers, num_experts or pad_to below 1; in checked mode an id out of range.
    """
    if num_experts < 1 or pad_to < 1:
        raise ValueError(f"num_experts={num_experts}, pad_to={pad_to}: expected at least 1")
    experts = top_expert.flatten()
    _check_integers("indices_and_bins", experts, 1)
    if config.is_checked():
        _refuse_outside(experts, num_experts)
    experts = experts.to(torch.int32)
    bin_ids, indices = sort(experts)
    counts = histogram(experts, num_experts)
    padded_counts = (counts + pad_to - 1) // pad_to * pad_to
    return indices, bin_ids, inclusive_cumsum(counts, 0), inclusive_cumsum(padded_counts, 0), counts


def _check_integers(name: str, x: Tensor, *dims: int) -> None:
    if x.dim() not in dims or x.dtype not in _INTEGERS:
        raise ValueError(
            f"{name}: got {x.dtype} {tuple(x.shape)}, expected int16, int32 or int64 of {' or '.join(map(str, dims))} "
            "dimensions"
        )


def _refuse_outside(experts: Tensor, num_experts: int) -> None:
    outside = ((experts < 0) | (experts >= num_experts)).nonzero()
    if outside.numel():
        at = int(outside[0])
        raise ValueError(f"indices_and_bins: got expert {int(experts[at])} at {at}, expected 0 to {num_experts - 1}")
