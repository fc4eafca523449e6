"""The router's dense [T, E] map and probabilities, compacted to K fixed-width routes per token, differentiably."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ascend_moe import kernels
from megatron_ascend_moe.config import is_checked


class RoutingMapToIndices(torch.autograd.Function):
    """(probs_TE, routing_map_TE) -> (probs_TK fp32, expert_ids_TK int32, counts_BE int32).

    Only probs_TK is differentiable; backward writes the dense gradient in the dtype of probs_TE. What backward
    keeps is expert_ids_TK: 4 T K bytes.
    """

    @staticmethod
    def forward(ctx, probs_TE, routing_map_TE, topk, drop_zero_probs, kernel_set):
        probs_TK, expert_ids_TK, counts_BE = kernel_set.route_count(
            probs_TE, routing_map_TE, topk, drop_zero_probs
        )
        ctx.save_for_backward(expert_ids_TK)
        ctx.num_experts, ctx.dtype, ctx.kernel_set = probs_TE.shape[1], probs_TE.dtype, kernel_set
        ctx.mark_non_differentiable(expert_ids_TK, counts_BE)
        return probs_TK, expert_ids_TK, counts_BE

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_probs_TK, *_):
        (expert_ids_TK,) = ctx.saved_tensors
        grad_TE = ctx.kernel_set.route_count_backward(
            grad_probs_TK.contiguous(), expert_ids_TK, ctx.num_experts, ctx.dtype
        )
        return grad_TE, None, None, None, None


def compact_routes(
    probs_TE: Tensor, routing_map_TE: Tensor, topk: int, drop_zero_probs: bool, kernel_set: kernels.KernelSet
) -> tuple[Tensor, Tensor, Tensor]:
    """Validate, then compact; see `RoutingMapToIndices`. Row order of counts_BE is that of token blocks, its last
    column counts rows with more routes than `topk`.

    Raises:
        ValueError: shapes or dtypes that do not fit; in checked mode also a row with more than `topk` routes.
    """
    check_routing(probs_TE, routing_map_TE, topk)
    probs_TK, expert_ids_TK, counts_BE = RoutingMapToIndices.apply(
        probs_TE, routing_map_TE, topk, drop_zero_probs, kernel_set
    )
    if is_checked():
        check_overflow(int(counts_BE[:, -1].sum()), topk)
    return probs_TK, expert_ids_TK, counts_BE


def routing_map_to_indices(probs: Tensor, routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Compact a dense routing map: the inverse of scattering top-k indices into a map.

    Args:
        probs: (T, E) fp16, bf16, fp32 or fp64; need not be contiguous; T may be 0.
        routing_map: (T, E) bool or integer. A route exists where it is non-zero, whatever its probability.
        topk: K, the width of the result.

    Returns:
        probs: (T, K) fp32 and indices: (T, K) int32, experts ascending in each row; rows with fewer routes are
        filled with index -1 and probability 0. The gradient of probs is dense, in the dtype of the input.

    Raises:
        ValueError: a float map, shapes that do not match, K outside 1..E; in checked mode a row with more than
            K routes (unchecked, its first K are kept; the dispatcher counts such rows and raises at its sync).
    """
    probs_TK, expert_ids_TK, _ = compact_routes(
        probs, routing_map, topk, drop_zero_probs=False, kernel_set=kernels.select("auto", probs.device)
    )
    return probs_TK, expert_ids_TK


def check_routing(probs_TE: Tensor, routing_map_TE: Tensor, topk: int) -> None:
    """Refuse routing tensors of the wrong dtype or shape (reads no data, so it costs no sync)."""
    if routing_map_TE.dtype.is_floating_point or routing_map_TE.dtype.is_complex:
        raise ValueError(
            f"routing_map has dtype {routing_map_TE.dtype}, expected bool or an integer dtype: pass the "
            "router's map, not its probabilities (map = probs > 0 would lose routes of probability 0)"
        )
    if not probs_TE.dtype.is_floating_point:
        raise ValueError(f"probs has dtype {probs_TE.dtype}, expected fp16, bf16, fp32 or fp64")
    if probs_TE.dim() != 2 or probs_TE.shape != routing_map_TE.shape:
        raise ValueError(
            f"probs has shape {tuple(probs_TE.shape)} and routing_map {tuple(routing_map_TE.shape)}, "
            "expected both [tokens, experts]"
        )
    if not 1 <= topk <= max(probs_TE.shape[1], 1):
        raise ValueError(f"topk={topk}, expected 1 to {probs_TE.shape[1]} (the number of experts)")


def check_overflow(rows: int, topk: int) -> None:
    """Raise if any row held more routes than the dispatcher's width."""
    if rows:
        raise ValueError(
            f"{rows} rows of the routing map hold more than moe_router_topk={topk} routes, expected at most "
            "that many: nothing may be truncated silently; raise moe_router_topk or mend the router"
        )
