"""Rows over the expert-parallel group: one row per route, there and back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    """First-dimension all-to-all. The input may be longer than what is sent; its tail gets no gradient written,
    because nothing upstream reads it (permute's backward follows the plan)."""

    @staticmethod
    def forward(ctx, x, receive, send, group):
        ctx.receive, ctx.send, ctx.group, ctx.rows = receive, send, group, x.shape[0]
        return _exchange(x[: sum(send)], x.new_empty(sum(receive), *x.shape[1:]), receive, send, group)

    @staticmethod
    def backward(ctx, grad):
        grad_x = grad.new_empty(ctx.rows, *grad.shape[1:])
        _exchange(grad, grad_x[: sum(ctx.send)], ctx.send, ctx.receive, ctx.group)
        return grad_x, None, None, None


def _exchange(source: Tensor, target: Tensor, receive: list[int], send: list[int], group) -> Tensor:
    dist.all_to_all_single(target, source.contiguous(), receive, send, group=group)
    return target


def all_to_all(x: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows between the ranks of `group`, differentiably.

    Args:
        x: (>= sum(send), …), rows for rank 0 first.
        receive, send: rows from and to each rank.

    Returns:
        (sum(receive), …), rows from rank 0 first.
    """
    if group.size() == 1:
        return x.narrow(0, 0, sum(send)) if x.shape[0] != sum(send) else x
    return _AllToAll.apply(x, receive, send, group)
