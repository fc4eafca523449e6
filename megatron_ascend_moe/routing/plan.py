"""Where every route's row stands: the plan that permute and combine follow, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ascend_moe import kernels
from megatron_ascend_moe.config import is_checked
from megatron_ascend_moe.kernels.reference import BINS, COUNTS, PADDED_BINS, PADDED_COUNTS, ROUTES


@dataclass(frozen=True)
class RoutePlan:
    """Rows of a layout, by route. Frozen, no autograd: what passes between dispatch and combine.

    It is not a permutation: slots without a route have no row, and pad rows have no slot.
    """

    row_of_slot_TK: Tensor  # (T, K) int32, -1 where there is no route or the route was dropped
    counts_E: Tensor  # (E) int32, real rows of each expert
    padded_counts_E: Tensor  # (E) int32, rows of each expert's segment
    bins_E: Tensor  # (E) int32, inclusive cumulative counts
    padded_bins_E: Tensor  # (E) int32, inclusive cumulative padded_counts: where each segment ends
    routes_E: Tensor  # (E) int32, routes asked for, before any drop
    num_rows: int  # rows of the layout: exact (binned), or a static bound (padded) until the host knows better
    pad_multiple: int | None  # M of the padded layout
    capacity: int | None  # C of the binned layout
    meta: Tensor  # (5 E + 1) int32: the buffer that the five vectors view; its last value is the overflow counter

    @property
    def counts_and_overflow(self) -> Tensor:
        """(E + 1) int32: counts_E and, last, the number of rows with more routes than the plan's width."""
        return self.meta[COUNTS * self.counts_E.numel() :]


def static_rows(num_tokens: int, topk: int, num_experts: int, pad_multiple: int) -> int:
    """Rows that a padded layout can never exceed, whatever the routes."""
    routes = num_tokens * topk
    most = routes + min(num_experts, routes) * (pad_multiple - 1)
    return -(-most // pad_multiple) * pad_multiple


def plan_routes(
    expert_ids_TK: Tensor,
    num_experts: int,
    pad_multiple: int = 1,
    capacity: int | None = None,
    counts_BE: Tensor | None = None,
    kernel_set: kernels.KernelSet | None = None,
) -> RoutePlan:
    """Plan a padded (`capacity=None`) or binned layout from compact routes.

    Row order inside an expert is token order: the order of a stable sort by (expert, token). Empty experts take
    no rows in the padded layout and `capacity` rows in the binned one; a binned expert's routes beyond
    `capacity` are dropped, last tokens first.

    Args:
        expert_ids_TK: (T, K) int32, -1 = no route, distinct within a row.
        num_experts: E.
        pad_multiple: M, rows to which a padded segment is rounded up.
        capacity: C, rows of every expert in the binned layout.
        counts_BE: counts of the same routes by program, where the adapter made them; otherwise counted here.
        kernel_set: which kernels; by default those for the device of the ids.

    Raises:
        ValueError: dtype, shape or bounds that do not fit; in checked mode an id outside -1..E-1.
    """
    if expert_ids_TK.dtype != torch.int32 or expert_ids_TK.dim() != 2:
        raise ValueError(
            f"expert_ids is {expert_ids_TK.dtype} of shape {tuple(expert_ids_TK.shape)}, expected int32 [tokens, topk]"
        )
    if pad_multiple < 1 or (capacity is not None and capacity < 0):
        raise ValueError(f"pad_multiple={pad_multiple}, capacity={capacity}: expected >= 1 and >= 0 rows")
    if is_checked():
        _check_ids(expert_ids_TK, num_experts)
    T, K = expert_ids_TK.shape
    num_rows = static_rows(T, K, num_experts, pad_multiple) if capacity is None else num_experts * capacity
    if num_rows >= 2**31:
        raise ValueError(f"the layout needs up to {num_rows} rows, expected fewer than 2^31 (row indices are int32)")

    kernel_set = kernel_set or kernels.select("auto", expert_ids_TK.device)
    if counts_BE is None:
        counts_BE = kernel_set.id_count(expert_ids_TK, num_experts)
    # A capacity of 0 leaves room for no route at all; only a rank without tokens has it, and then the padded
    # layout has no rows either.
    if capacity == 0 and T:
        raise ValueError(f"capacity=0 with {T} tokens: every route would be dropped; raise the capacity factor")
    row_of_slot_TK, meta = kernel_set.route_place(expert_ids_TK, counts_BE, pad_multiple, capacity or 0)
    return _plan(row_of_slot_TK, meta, num_rows, pad_multiple if capacity is None else None, capacity)


def _plan(row_of_slot_TK: Tensor, meta: Tensor, num_rows: int, pad_multiple: int | None, capacity: int | None):
    vector = meta[:-1].view(5, -1).unbind()
    return RoutePlan(
        row_of_slot_TK,
        counts_E=vector[COUNTS],
        padded_counts_E=vector[PADDED_COUNTS],
        bins_E=vector[BINS],
        padded_bins_E=vector[PADDED_BINS],
        routes_E=vector[ROUTES],
        num_rows=num_rows,
        pad_multiple=pad_multiple,
        capacity=capacity,
        meta=meta,
    )


def _check_ids(expert_ids_TK: Tensor, num_experts: int) -> None:
    if expert_ids_TK.numel() and not -1 <= int(expert_ids_TK.min()) <= int(expert_ids_TK.max()) < num_experts:
        low, high = int(expert_ids_TK.min()), int(expert_ids_TK.max())
        raise ValueError(f"expert ids span {low}..{high}, expected -1 (no route) to {num_experts - 1}")
