"""Plain-torch twins of the MegaBlocks-signature launches in `positions`: the same signatures, on any device.

Notation: T tokens, K = top_k assignments of a token, N = T K sorted positions, E experts, H hidden size, P rows of
a layout, C expert capacity. An assignment id is token * K + slot.

Arguments that several functions share:
    indices: (N) int32, the assignment id at each sorted position.
    bin_ids: (N) int32, the expert of each position, nondecreasing.
    weights: (N) floating, by assignment id, or None.
    bins: (E) int32, inclusive cumulative counts of positions.
    padded_bins: (E) int32, inclusive cumulative rows of the experts' segments, each at least its count.
    expert_capacity: C; expert e owns rows e C … e C + C - 1, its later positions are dropped.
"""

import torch
from torch import Tensor

from megatron_ascend_moe.kernels.position_checks import check_positions
from megatron_ascend_moe.kernels.reference import combine_rows


def gather(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    """Rows of the tokens in sorted order, times their weights: x (T, H) -> (N, H)."""
    check_positions("gather", indices, bin_ids, bins, top_k, weights=weights, tokens=x)
    rows = row_of_position(bin_ids, bins, bins)
    return _gather_rows(x, indices, rows, weights, indices.numel(), top_k)


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
    """As `gather`, each expert's rows at the start of its padded segment, zeros elsewhere: x (T, H) -> (P, H).

    `num_rows` is P, at least padded_bins[-1]; None reads padded_bins[-1], a device-to-host sync.
    """
    given = {"padded_bins": padded_bins, "num_rows": num_rows, "weights": weights}
    check_positions("padded_gather", indices, bin_ids, bins, top_k, tokens=x, **given)
    num_rows = int(padded_bins[-1]) if num_rows is None else num_rows
    return _gather_rows(x, indices, row_of_position(bin_ids, bins, padded_bins), weights, num_rows, top_k)


def binned_gather(
    x: Tensor,
    indices: Tensor,
    bin_ids: Tensor,
    weights: Tensor | None,
    bins: Tensor,
    expert_capacity: int,
    top_k: int,
) -> Tensor:
    """As `gather`, the first C rows of each expert, zeros in unused capacity: x (T, H) -> (E, C, H)."""
    check_positions("binned_gather", indices, bin_ids, bins, top_k, capacity=expert_capacity, weights=weights, tokens=x)
    rows = row_of_position(bin_ids, bins, None, expert_capacity)
    out = _gather_rows(x, indices, rows, weights, bins.numel() * expert_capacity, top_k)
    return out.view(bins.numel(), expert_capacity, x.shape[1])


def scatter(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    """The weighted sum of each token's rows, in fp32 and in slot order, rounded once: x (N, H) -> (T, H)."""
    check_positions("scatter", indices, bin_ids, bins, top_k, weights=weights, rows=x)
    return _scatter_rows(x, indices, row_of_position(bin_ids, bins, bins), weights, top_k)


def padded_scatter(
    x: Tensor,
    indices: Tensor,
    bin_ids: Tensor,
    weights: Tensor | None,
    bins: Tensor,
    padded_bins: Tensor,
    top_k: int,
) -> Tensor:
    """As `scatter`, from padded segments: x (P, H) -> (T, H)."""
    check_positions("padded_scatter", indices, bin_ids, bins, top_k, padded_bins=padded_bins, weights=weights, rows=x)
    return _scatter_rows(x, indices, row_of_position(bin_ids, bins, padded_bins), weights, top_k)


def binned_scatter(
    x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int
) -> Tensor:
    """As `scatter`, from bins of capacity C; dropped assignments contribute nothing: x (E, C, H) -> (T, H)."""
    check_positions("binned_scatter", indices, bin_ids, bins, top_k, weights=weights, binned_rows=x)
    rows = row_of_position(bin_ids, bins, None, x.shape[1])
    return _scatter_rows(x.reshape(-1, x.shape[2]), indices, rows, weights, top_k)


def scatter_wgrad(x: Tensor, grad: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
    """Gradient of `scatter`'s weights, dot(x's row, grad of its token) in fp32: x (N, H), grad (T, H) -> (N)."""
    check_positions("scatter_wgrad", indices, bin_ids, bins, top_k, rows=x, tokens=grad)
    return _dot_rows(x, grad, indices, row_of_position(bin_ids, bins, bins), top_k)


def padded_scatter_wgrad(
    x: Tensor, grad: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, padded_bins: Tensor, top_k: int
) -> Tensor:
    """As `scatter_wgrad`, from padded segments: x (P, H), grad (T, H) -> (N) fp32."""
    check_positions("padded_scatter_wgrad", indices, bin_ids, bins, top_k, padded_bins=padded_bins, rows=x, tokens=grad)
    return _dot_rows(x, grad, indices, row_of_position(bin_ids, bins, padded_bins), top_k)


def binned_scatter_wgrad(
    x: Tensor, grad: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int
) -> Tensor:
    """As `scatter_wgrad`, from bins of capacity C, 0 for dropped assignments: x (E, C, H), grad (T, H) -> (N)."""
    check_positions("binned_scatter_wgrad", indices, bin_ids, bins, top_k, binned_rows=x, tokens=grad)
    rows = row_of_position(bin_ids, bins, None, x.shape[1])
    return _dot_rows(x.reshape(-1, x.shape[2]), grad, indices, rows, top_k)


def row_of_position(bin_ids: Tensor, bins: Tensor, padded_bins: Tensor | None, expert_capacity: int = 0) -> Tensor:
    """The layout's row of each sorted position: (N) int32, -1 where capacity drops it.

    The layout is given by `padded_bins`, or by `expert_capacity` where that is None.
    """
    expert = bin_ids.long()
    zero = bins.new_zeros(1)
    rank = torch.arange(bin_ids.numel(), device=bin_ids.device) - torch.cat([zero, bins])[expert]
    if padded_bins is not None:
        return (torch.cat([zero, padded_bins])[expert] + rank).to(torch.int32)
    row = expert * expert_capacity + rank
    return torch.where(rank < expert_capacity, row, -1).to(torch.int32)


def row_of_slot(indices: Tensor, row_of_position: Tensor, top_k: int) -> Tensor:
    """The same by assignment: (T, K) int32. `indices` is a permutation, so no slot is left unwritten."""
    rows = torch.empty_like(row_of_position)
    rows[indices.long()] = row_of_position
    return rows.view(-1, top_k)


def _gather_rows(x, indices, rows, weights, num_rows, top_k):
    out = x.new_zeros(num_rows, x.shape[1])
    kept = (rows >= 0).nonzero().squeeze(1)
    assignment = indices[kept].long()
    values = x[assignment // top_k]
    if weights is not None:
        values = (values.float() * weights[assignment].float().unsqueeze(1)).to(x.dtype)
    out[rows[kept].long()] = values
    return out


def _scatter_rows(x, indices, rows, weights, top_k):
    weights_TK = None if weights is None else weights.float().view(-1, top_k)
    return combine_rows(x, row_of_slot(indices, rows, top_k), weights_TK)[0]


def _dot_rows(x, grad, indices, rows, top_k):
    out = torch.zeros(indices.numel(), dtype=torch.float32, device=x.device)
    kept = (rows >= 0).nonzero().squeeze(1)
    assignment = indices[kept].long()
    out[assignment] = (x[rows[kept].long()].float() * grad[assignment // top_k].float()).sum(1)
    return out
