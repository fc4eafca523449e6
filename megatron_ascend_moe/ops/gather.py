"""Gather: tokens to expert order, by MegaBlocks' signatures. Its backward is scatter without weights.

Shapes: x (T, H) fp16, bf16 or fp32; N = T top_k sorted positions. indices (N) int32, the assignment id
token * top_k + slot at each position; bin_ids (N) int32, its expert, nondecreasing; bins and padded_bins (E) int32,
inclusive cumulative counts. Each operation raises ValueError for shapes and dtypes that do not fit and, in checked
mode, for values that do not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ascend_moe.ops.permute import unit_columns
from megatron_ascend_moe.ops.position_layouts import Positions, bin_ids_of


class GatherPositions(torch.autograd.Function):
    """x (T, H) -> rows in expert order. Keeps the positions for backward, no rows."""

    @staticmethod
    def forward(ctx, x, positions):
        ctx.positions = positions
        return positions.gather(unit_columns(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.positions.scatter(unit_columns(grad)), None


def gather(x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
    """Rows of the tokens in sorted order: (T, H) -> (N, H)."""
    return GatherPositions.apply(x, Positions(indices, bin_ids, bins, top_k))


def padded_gather(
    x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, padded_bins: Tensor, top_k: int
) -> Tensor:
    """Rows of the tokens in sorted order, each expert's segment padded with zeros: (T, H) -> (padded_bins[-1], H).

    NOTE: one device-to-host sync, in the forward: the number of rows is on the device.
    """
    return GatherPositions.apply(x, Positions(indices, bin_ids, bins, top_k, padded_bins=padded_bins))


def binned_gather(x: Tensor, indices: Tensor, bins: Tensor, expert_capacity: int, top_k: int) -> Tensor:
    """The first `expert_capacity` rows of each expert, zeros in unused capacity: (T, H) -> (E, C, H)."""
    positions = Positions(indices, bin_ids_of(indices, bins), bins, top_k, expert_capacity=expert_capacity)
    return GatherPositions.apply(x, positions)
