"""The MegaBlocks-signature launches on Triton: check, allocate, choose tile and grid, launch `position_kernels`.
`positions_reference` states the contract of each.

Scatter sums the K assignments of a token, which lie in K different places of the sorted order. MegaBlocks writes all
T K rows and sums them in a second pass: (3 T K + T) H elements moved, rounded twice. Neither atomics nor several
programs adding to one row would be reproducible, so for K > 1 the positions are turned into a map row_of_slot[T, K]
(8 T K bytes) and the token-major `combine_rows` sums in fp32 and slot order: (T K + T) H elements, rounded once. For
K = 1 every output row has one source and the copy kernel writes it.

Weights and their gradients belong to assignments, not to positions: element accesses at scattered addresses, which
no Ascend core does fast. They are permuted once outside the kernels (4 T K bytes each way), which see vectors.
"""

import functools

import torch
from torch import Tensor

from megatron_ascend_moe.backend.device import Target, target_of
from megatron_ascend_moe.backend.launch import MAX_PROGRAMS, Variant, ceil_div, launch
from megatron_ascend_moe.kernels.position_checks import check_positions
from megatron_ascend_moe.kernels.position_kernels import copy_positions_kernel, weight_gradient_kernel
from megatron_ascend_moe.kernels.position_tiles import position_tile
from megatron_ascend_moe.kernels.positions_reference import row_of_position, row_of_slot
from megatron_ascend_moe.kernels.rows import combine_rows


def gather(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    check_positions("gather", indices, bin_ids, bins, top_k, weights=weights, tokens=x)
    return _gather_rows(x, indices, bin_ids, weights, bins, bins, 0, top_k, indices.numel())


def padded_gather(
    x: Tensor,
    indices: Tensor,
    bin_ids: Tensor,
    weights: Tensor | None,
    bins: Tensor,
    padded_bins: Tensor,
    top_k: int,
    num_rows: int | None = None,
) -> Tensor:
    given = {"padded_bins": padded_bins, "num_rows": num_rows, "weights": weights}
    check_positions("padded_gather", indices, bin_ids, bins, top_k, tokens=x, **given)
    num_rows = int(padded_bins[-1]) if num_rows is None else num_rows
    return _gather_rows(x, indices, bin_ids, weights, bins, padded_bins, 0, top_k, num_rows)


def binned_gather(
    x: Tensor,
    indices: Tensor,
    bin_ids: Tensor,
    weights: Tensor | None,
    bins: Tensor,
    expert_capacity: int,
    top_k: int,
) -> Tensor:
    check_positions("binned_gather", indices, bin_ids, bins, top_k, capacity=expert_capacity, weights=weights, tokens=x)
    num_rows = bins.numel() * expert_capacity
    out = _gather_rows(x, indices, bin_ids, weights, bins, None, expert_capacity, top_k, num_rows)
    return out.view(bins.numel(), expert_capacity, x.shape[1])


def scatter(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    check_positions("scatter", indices, bin_ids, bins, top_k, weights=weights, rows=x)
    return _scatter_rows(x, indices, bin_ids, weights, bins, bins, 0, top_k)


def padded_scatter(
    x: Tensor,
    indices: Tensor,
    bin_ids: Tensor,
    weights: Tensor | None,
    bins: Tensor,
    padded_bins: Tensor,
    top_k: int,
) -> Tensor:
    check_positions("padded_scatter", indices, bin_ids, bins, top_k, padded_bins=padded_bins, weights=weights, rows=x)
    return _scatter_rows(x, indices, bin_ids, weights, bins, padded_bins, 0, top_k)


def binned_scatter(
    x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int
) -> Tensor:
    capacity = check_positions("binned_scatter", indices, bin_ids, bins, top_k, weights=weights, binned_rows=x)
    return _scatter_rows(x.reshape(-1, x.shape[2]), indices, bin_ids, weights, bins, None, capacity, top_k)


def scatter_wgrad(x: Tensor, grad: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
    check_positions("scatter_wgrad", indices, bin_ids, bins, top_k, rows=x, tokens=grad)
    return _weight_gradient(x, grad, indices, bin_ids, bins, bins, 0, top_k)


def padded_scatter_wgrad(
    x: Tensor, grad: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, padded_bins: Tensor, top_k: int
) -> Tensor:
    check_positions("padded_scatter_wgrad", indices, bin_ids, bins, top_k, padded_bins=padded_bins, rows=x, tokens=grad)
    return _weight_gradient(x, grad, indices, bin_ids, bins, padded_bins, 0, top_k)


def binned_scatter_wgrad(
    x: Tensor, grad: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int
) -> Tensor:
    capacity = check_positions("binned_scatter_wgrad", indices, bin_ids, bins, top_k, binned_rows=x, tokens=grad)
    return _weight_gradient(x.reshape(-1, x.shape[2]), grad, indices, bin_ids, bins, None, capacity, top_k)


def _gather_rows(x, indices, bin_ids, weights, bins, padded_bins, capacity, top_k, num_rows):
    out = x.new_empty(num_rows, x.shape[1])
    _copy(x, out, indices, bin_ids, weights, bins, padded_bins, capacity, num_rows, top_k, gather=True)
    return out


def _scatter_rows(x, indices, bin_ids, weights, bins, padded_bins, capacity, top_k):
    if top_k > 1:
        rows = row_of_position(bin_ids, bins, padded_bins, capacity)
        weights_TK = None if weights is None else weights.float().contiguous().view(-1, top_k)
        return combine_rows(x, row_of_slot(indices, rows, top_k), weights_TK)[0]
    out = x.new_empty(indices.numel(), x.shape[1])
    _copy(x, out, indices, bin_ids, weights, bins, padded_bins, capacity, x.shape[0], 1, gather=False)
    return out


def _copy(x, out, indices, bin_ids, weights, bins, padded_bins, capacity, num_rows, top_k, *, gather):
    if out.numel() == 0:
        return
    target = target_of(x.device)
    scale = None if weights is None else weights.float()[indices.long()]
    variant = _copy_variant(target, x.shape[1], x.element_size(), top_k, gather, padded_bins is None, scale is not None)
    tensors = (x, out, indices, bin_ids, scale, bins, padded_bins)
    numbers = (x.stride(0), indices.numel(), bins.numel(), capacity, num_rows)
    launch(variant, target, x.device, _programs(target, variant, indices.numel()), tensors, numbers)


@functools.cache
def _copy_variant(
    target: Target, H: int, itemsize: int, top_k: int, gather: bool, binned: bool, scaled: bool
) -> Variant:
    kernel = ("scaled_" if scaled else "") + ("gather" if gather else "scatter")
    tile = position_tile(kernel, target, H, itemsize)
    constants = {"ASCEND": target.ascend, "BLOCK": tile.block, "ROWS": tile.rows, "COLUMNS": tile.columns, "H": H}
    constants |= {"TOP_K": top_k, "GATHER": gather, "BINNED": binned, "SCALED": scaled}
    return Variant(copy_positions_kernel, constants, tile.num_warps)


def _weight_gradient(x, grad, indices, bin_ids, bins, padded_bins, capacity, top_k):
    positions = indices.numel()
    by_position = torch.empty(positions, dtype=torch.float32, device=x.device)
    by_assignment = torch.empty_like(by_position)
    if positions == 0:
        return by_assignment
    target = target_of(x.device)
    variant = _weight_gradient_variant(target, x.shape[1], x.element_size(), top_k, padded_bins is None)
    tensors = (x, grad, by_position, indices, bin_ids, bins, padded_bins)
    numbers = (x.stride(0), grad.stride(0), positions, capacity)
    launch(variant, target, x.device, _programs(target, variant, positions), tensors, numbers)
    by_assignment[indices.long()] = by_position
    return by_assignment


@functools.cache
def _weight_gradient_variant(target: Target, H: int, itemsize: int, top_k: int, binned: bool) -> Variant:
    tile = position_tile("weight_gradient", target, H, itemsize)
    constants = {"ASCEND": target.ascend, "BLOCK": tile.block, "COLUMNS": tile.columns, "H": H}
    return Variant(weight_gradient_kernel, {**constants, "TOP_K": top_k, "BINNED": binned}, tile.num_warps)


def _programs(target: Target, variant: Variant, positions: int) -> int:
    """One program a vector core; on CUDA enough to fill the device, each with some blocks of positions."""
    if target.ascend:
        return target.cores
    return min(MAX_PROGRAMS, max(target.cores, ceil_div(positions, variant.constants["BLOCK"])))
