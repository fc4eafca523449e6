"""Rows over the expert-tensor-parallel group: every rank of it sees all rows, and partial outputs are summed.

Parts are padded to the group's largest and moved with the tensor forms of the collectives: uneven list forms fail
on gloo. Sums are taken in fp32 and rounded once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def _all_gather(x: Tensor, part_rows: int, group) -> Tensor:
    if x.shape[0] < part_rows:
        padded = x.new_zeros(part_rows, *x.shape[1:])
        padded[: x.shape[0]] = x
        x = padded
    gathered = x.new_empty(part_rows * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered


def _reduce_scatter(x: Tensor, rows: int, group) -> Tensor:
    part = torch.empty(x.shape[0] // group.size(), *x.shape[1:], dtype=torch.float32, device=x.device)
    dist.reduce_scatter_tensor(part, x.to(torch.float32).contiguous(), group=group)
    return part[:rows].to(x.dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, part_rows, group):
        ctx.rows, ctx.group = x.shape[0], group
        return _all_gather(x, part_rows, group)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.rows, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, group):
        ctx.part_rows, ctx.group = x.shape[0] // group.size(), group
        return _reduce_scatter(x, rows, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.part_rows, ctx.group), None, None


def gather_parts(x: Tensor, part_rows: int, group: dist.ProcessGroup) -> Tensor:
    """(N, …) on each rank -> (ETP * part_rows, …): each rank's rows, then zeros up to part_rows >= N.
    Backward sums the parts' gradients in fp32."""
    return x if group.size() == 1 else _Gather.apply(x, part_rows, group)


def reduce_scatter_parts(x: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """(ETP * part_rows, …) partial sums on each rank -> (rows, …), this rank's part, summed in fp32."""
    return x if group.size() == 1 else _ReduceScatter.apply(x, rows, group)
