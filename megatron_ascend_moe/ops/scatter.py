"""Scatter: rows in expert order back to tokens, summing each token's assignments, by MegaBlocks' signatures. Its
backward is a weighted gather, and the dot product of rows for the weights.

Shapes: as in `gather`; weights (N) floating by assignment id, or None. A token's rows are summed in fp32 and in slot
order and rounded once; the weights' gradient is computed in fp32 and returned in the weights' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ascend_moe.ops.permute import unit_columns
from megatron_ascend_moe.ops.position_layouts import Positions, bin_ids_of


class ScatterPositions(torch.autograd.Function):
    """(rows in expert order, weights) -> (T, H). Keeps the rows only where the weights need a gradient."""

    @staticmethod
    def forward(ctx, x, weights, positions):
        x = unit_columns(x)
        ctx.positions, ctx.num_rows = positions, x.shape[0]
        ctx.save_for_backward(weights, x if ctx.needs_input_grad[1] else None)
        return positions.scatter(x, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weights, x = ctx.saved_tensors
        grad = unit_columns(grad)
        grad_x = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.positions.gather(grad, weights, ctx.num_rows)
        if ctx.needs_input_grad[1]:
            grad_weights = ctx.positions.weight_gradient(x, grad).to(weights.dtype)
        return grad_x, grad_weights, None


def scatter(
    x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int
) -> Tensor:
    """The weighted sum of each token's rows: (N, H) -> (T, H)."""
    return ScatterPositions.apply(x, weights, Positions(indices, bin_ids, bins, top_k))


def padded_scatter(
    x: Tensor,
    indices: Tensor,
    bin_ids: Tensor,
    weights: Tensor | None,
    bins: Tensor,
    padded_bins: Tensor,
    top_k: int,
) -> Tensor:
    """The weighted sum of each token's rows, out of padded segments: (P, H) -> (T, H)."""
    return ScatterPositions.apply(x, weights, Positions(indices, bin_ids, bins, top_k, padded_bins=padded_bins))


def binned_scatter(x: Tensor, indices: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    """The weighted sum of each token's rows that capacity kept: (E, C, H) -> (T, H)."""
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected [experts, expert_capacity, hidden]")
    positions = Positions(indices, bin_ids_of(indices, bins), bins, top_k, expert_capacity=x.shape[1])
    return ScatterPositions.apply(x, weights, positions)
