"""Combine: K rows in, one row out, summed in fp32 in slot order. Its backward is permute."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ascend_moe import kernels
from megatron_ascend_moe.ops.permute import unit_columns
from megatron_ascend_moe.routing.plan import RoutePlan


class CombineRows(torch.autograd.Function):
    """rows_PH -> out_TH, the plain sum. Keeps the plan for backward, no rows."""

    @staticmethod
    def forward(ctx, rows_PH, plan, kernel_set):
        ctx.save_for_backward(plan.row_of_slot_TK, plan.counts_E, plan.padded_bins_E)
        ctx.num_rows, ctx.kernel_set = rows_PH.shape[0], kernel_set
        return kernel_set.combine_rows(rows_PH, plan.row_of_slot_TK)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TH):
        grad_rows_PH, _ = ctx.kernel_set.permute_rows(unit_columns(grad_TH), *ctx.saved_tensors, ctx.num_rows)
        return grad_rows_PH, None, None


class WeightedCombineRows(torch.autograd.Function):
    """(rows_PH, weights_TK) -> out_TH. Keeps the rows: the weights' gradient is their dot with the output's."""

    @staticmethod
    def forward(ctx, rows_PH, weights_TK, plan, kernel_set):
        ctx.save_for_backward(rows_PH, plan.row_of_slot_TK, weights_TK, plan.counts_E, plan.padded_bins_E)
        ctx.kernel_set = kernel_set
        return kernel_set.combine_rows(rows_PH, plan.row_of_slot_TK, weights_TK)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TH):
        grads = ctx.kernel_set.combine_rows_backward(unit_columns(grad_TH), *ctx.saved_tensors)
        return *grads, None, None


def combine_rows(
    rows_PH: Tensor,
    plan: RoutePlan,
    weights_TK: Tensor | None = None,
    kernel_set: kernels.KernelSet | None = None,
) -> Tensor:
    """out[t] = sum over k of weights[t, k] * rows[row_of_slot[t, k]], in fp32 and slot order, rounded once.

    Args:
        rows_PH: (P, H) fp16, bf16 or fp32; pad rows are never read, and their gradient is exactly 0.
        plan: the plan that laid the rows out.
        weights_TK: (T, K) fp32, or None for the plain sum.

    Returns:
        (T, H) of rows' dtype; tokens without a route get 0.

    Raises:
        ValueError: shapes or dtypes that do not fit the plan.
    """
    if rows_PH.dim() != 2:
        raise ValueError(f"rows has shape {tuple(rows_PH.shape)}, expected [rows, hidden]")
    kernel_set = kernel_set or kernels.select("auto", rows_PH.device)
    if weights_TK is None:
        return CombineRows.apply(unit_columns(rows_PH), plan, kernel_set)
    if weights_TK.shape != plan.row_of_slot_TK.shape or weights_TK.dtype != torch.float32:
        raise ValueError(
            f"weights is {weights_TK.dtype} {tuple(weights_TK.shape)}, expected float32 "
            f"{tuple(plan.row_of_slot_TK.shape)}"
        )
    return WeightedCombineRows.apply(unit_columns(rows_PH), weights_TK.contiguous(), plan, kernel_set)
