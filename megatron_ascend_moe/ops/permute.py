"""Permute: one row in, its K destinations out. Its backward is combine."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ascend_moe import kernels
from megatron_ascend_moe.routing.plan import RoutePlan


class PermuteRows(torch.autograd.Function):
    """(x_TH, scalars_TK) -> (rows_PH, scalars_P). Keeps the plan's row_of_slot for backward, no rows."""

    @staticmethod
    def forward(ctx, x_TH, scalars_TK, plan, num_rows, kernel_set):
        ctx.save_for_backward(plan.row_of_slot_TK)
        ctx.kernel_set = kernel_set
        ctx.set_materialize_grads(False)
        return kernel_set.permute_rows(
            x_TH, plan.row_of_slot_TK, plan.counts_E, plan.padded_bins_E, num_rows, scalars_TK
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows_PH, grad_scalars_P):
        (row_of_slot_TK,) = ctx.saved_tensors
        if grad_rows_PH is None:  # only the scalars were used: a row of no columns carries them
            if grad_scalars_P is None:
                return None, None, None, None, None
            grad_rows_PH = grad_scalars_P.new_empty(grad_scalars_P.shape[0], 0)
        grad_x_TH, grad_scalars_TK = ctx.kernel_set.combine_rows(
            unit_columns(grad_rows_PH),
            row_of_slot_TK,
            scalars_P=None if grad_scalars_P is None else grad_scalars_P.contiguous(),
        )
        return grad_x_TH if grad_x_TH.shape[1] else None, grad_scalars_TK, None, None, None


def permute_rows(
    x_TH: Tensor,
    plan: RoutePlan,
    scalars_TK: Tensor | None = None,
    num_rows: int | None = None,
    kernel_set: kernels.KernelSet | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Copy each row to the rows of its routes, bit-exactly; zero the layout's pad rows and only those.

    Args:
        x_TH: (T, H) fp16, bf16 or fp32.
        plan: where the rows go.
        scalars_TK: (T, K) fp32 values that ride along (probabilities), or None.
        num_rows: P, where the host knows the layout's exact size; by default the plan's bound (rows at and after
            padded_bins[-1] are then left unwritten).

    Returns:
        rows_PH: (P, H); scalars_P: (P) fp32, 0 on pad rows, or None.

    Raises:
        ValueError: shapes or dtypes that do not fit the plan.
    """
    if x_TH.dim() != 2 or x_TH.shape[0] != plan.row_of_slot_TK.shape[0]:
        raise ValueError(
            f"x has shape {tuple(x_TH.shape)}, expected [{plan.row_of_slot_TK.shape[0]}, hidden] as the plan's tokens"
        )
    if scalars_TK is not None and (
        scalars_TK.shape != plan.row_of_slot_TK.shape or scalars_TK.dtype != torch.float32
    ):
        raise ValueError(
            f"scalars is {scalars_TK.dtype} {tuple(scalars_TK.shape)}, expected float32 "
            f"{tuple(plan.row_of_slot_TK.shape)}"
        )
    kernel_set = kernel_set or kernels.select("auto", x_TH.device)
    num_rows = plan.num_rows if num_rows is None else num_rows
    return PermuteRows.apply(unit_columns(x_TH), scalars_TK, plan, num_rows, kernel_set)


def unit_columns(rows: Tensor) -> Tensor:
    """The same rows with unit stride along the columns (gradients of sums come expanded); whatever is not (rows, H)
    comes out contiguous."""
    strided = rows.dim() == 2 and rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]
    return rows if strided else rows.contiguous()
