"""Plain-torch twins of the row-map kernels: the same signatures, on any device. They are the oracle of the
Triton kernels' tests and the kernels of machines without Triton.

Notation: T tokens, E experts, K width of the routes, P rows of a layout, H hidden size, B programs that count.
Every function allocates its own outputs and mutates none of its inputs.
"""

import torch
from torch import Tensor

# Rows of the plan's `meta` buffer [5 E + 1] int32: five vectors over the experts, then the overflow counter.
# `counts` stands last so that counts and overflow are one contiguous vector for the counts' collective.
ROUTES, PADDED_COUNTS, BINS, PADDED_BINS, COUNTS = range(5)


def route_count(
    probs_TE: Tensor, routing_map_TE: Tensor, topk: int, drop_zero_probs: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compact the dense routing map into fixed-width routes and count them, in one read of the map.

    Args:
        probs_TE: (T, E) fp16, bf16, fp32 or fp64; read only where the map is set.
        routing_map_TE: (T, E) bool or integer, non-zero = route.
        topk: K, the width of the compact routes.
        drop_zero_probs: a route whose probability is exactly 0 is not a route (capacity fillers).

    Returns:
        probs_TK: (T, K) fp32, 0 where there is no route.
        expert_ids_TK: (T, K) int32, ascending in each row, -1 where there is no route.
        counts_BE: (B, E + 1) int32, routes of each expert by program (token blocks, ascending); the last
            column counts the rows that hold more than K routes (their first K are kept).
    """
    T, E = routing_map_TE.shape
    routed = routing_map_TE != 0
    if drop_zero_probs:
        routed = routed & (probs_TE != 0)
    slot_TE = routed.cumsum(1) - 1
    overflow = (routed.sum(1) > topk).sum(dim=0, keepdim=True, dtype=torch.int32)
    routed = routed & (slot_TE < topk)

    token, expert = routed.nonzero(as_tuple=True)
    slot = slot_TE[token, expert]
    expert_ids_TK = torch.full((T, topk), -1, dtype=torch.int32, device=routed.device)
    expert_ids_TK[token, slot] = expert.to(torch.int32)
    probs_TK = torch.zeros(T, topk, dtype=torch.float32, device=routed.device)
    probs_TK[token, slot] = probs_TE[token, expert].to(torch.float32)
    counts_E = routed.sum(0, dtype=torch.int32)
    return probs_TK, expert_ids_TK, torch.cat([counts_E, overflow]).unsqueeze(0)


def route_count_backward(
    grad_probs_TK: Tensor, expert_ids_TK: Tensor, num_experts: int, dtype: torch.dtype
) -> Tensor:
    """Dense gradient of the router's probabilities: (T, K) fp32, (T, K) int32 -> (T, E) of `dtype`."""
    T, K = expert_ids_TK.shape
    grad_TE = torch.zeros(T, num_experts, dtype=dtype, device=grad_probs_TK.device)
    token, slot = (expert_ids_TK >= 0).nonzero(as_tuple=True)
    grad_TE[token, expert_ids_TK[token, slot].long()] = grad_probs_TK[token, slot].to(dtype)
    return grad_TE


def id_count(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """Count compact routes: (T, K) int32 with -1 for none -> counts_BE (B, E + 1) int32 as `route_count`
    (the overflow column is 0)."""
    ids = expert_ids_TK[expert_ids_TK >= 0].long()
    counts_E = torch.bincount(ids, minlength=num_experts).to(torch.int32)
    return torch.cat([counts_E, counts_E.new_zeros(1)]).unsqueeze(0)


def route_place(
    expert_ids_TK: Tensor, counts_BE: Tensor, pad_multiple: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """Give every route its row: stable by (expert, token), no sort on the Triton side.

    Args:
        expert_ids_TK: (T, K) int32, -1 = no route; distinct within a row, in any order.
        counts_BE: (B, E + 1) int32 from `route_count` or `id_count` over the same ids.
        pad_multiple: M; each expert's segment is rounded up to it (0 stays 0). Ignored when binned.
        capacity: C > 0 for the binned layout (expert e owns rows [e C, (e + 1) C), later routes are
            dropped), 0 for the padded layout.

    Returns:
        row_of_slot_TK: (T, K) int32, -1 where there is no route or the route was dropped.
        meta: (5 E + 1) int32: routes asked for, padded_counts, bins, padded_bins, counts of real rows, and
            the overflow counter; see ROUTES … COUNTS.
    """
    T, K = expert_ids_TK.shape
    totals = counts_BE.sum(0, dtype=torch.int32)
    routes_E, overflow = totals[:-1], totals[-1:]
    E = routes_E.numel()
    if capacity:
        counts_E = routes_E.clamp(max=capacity)
        padded_counts_E = torch.full_like(routes_E, capacity)
    else:
        counts_E = routes_E
        padded_counts_E = (routes_E + pad_multiple - 1) // pad_multiple * pad_multiple
    bins_E = counts_E.cumsum(0, dtype=torch.int32)
    padded_bins_E = padded_counts_E.cumsum(0, dtype=torch.int32)

    ids = expert_ids_TK.reshape(-1).long()
    order = torch.sort(torch.where(ids < 0, E, ids), stable=True).indices  # routes by (expert, token, slot)
    starts_E = routes_E.cumsum(0) - routes_E
    rank = torch.empty_like(ids)
    rank[order] = torch.arange(ids.numel(), device=ids.device)
    safe = ids.clamp(min=0)
    if E and ids.numel():
        rank = rank - starts_E[safe]
        row = (padded_bins_E - padded_counts_E)[safe] + rank
        row = torch.where((ids >= 0) & (rank < counts_E[safe]), row, -1)
    else:
        row = ids
    meta = torch.cat([routes_E, padded_counts_E, bins_E, padded_bins_E, counts_E, overflow])
    return row.to(torch.int32).view(T, K), meta


def permute_rows(
    x_TH: Tensor,
    row_of_slot_TK: Tensor,
    counts_E: Tensor,
    padded_bins_E: Tensor,
    num_rows: int,
    scalars_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One row in, its K destinations out; the rows between an expert's real rows and its segment's end, and
    only those, are zeroed. Rows at and after padded_bins[-1] are left unwritten.

    Args:
        x_TH: (T, H) fp16, bf16 or fp32; rows may be strided (unit stride along H).
        row_of_slot_TK: (T, K) int32 in [-1, num_rows); each row at most once.
        counts_E: (E) int32, real rows of each expert's segment.
        padded_bins_E: (E) int32, inclusive ends of the segments.
        num_rows: P, rows of the output.
        scalars_TK: (T, K) fp32 values that ride along (probabilities), or None.

    Returns:
        rows_PH: (P, H) of x's dtype; scalars_P: (P) fp32, 0 on pad rows, or None.
    """
    rows_PH = x_TH.new_empty(num_rows, x_TH.shape[1])
    scalars_P = None if scalars_TK is None else scalars_TK.new_empty(num_rows)
    token, slot = (row_of_slot_TK >= 0).nonzero(as_tuple=True)
    row = row_of_slot_TK[token, slot].long()
    rows_PH[row] = x_TH[token]
    pad = _pad_rows(counts_E, padded_bins_E)
    rows_PH[pad] = 0
    if scalars_P is not None:
        scalars_P[row] = scalars_TK[token, slot]
        scalars_P[pad] = 0
    return rows_PH, scalars_P


def _pad_rows(counts_E: Tensor, padded_bins_E: Tensor) -> Tensor:
    """Indices of the pad rows of all segments."""
    ends = padded_bins_E.tolist()
    starts = [0, *ends[:-1]]
    spans = [
        torch.arange(start + count, end)
        for start, count, end in zip(starts, counts_E.tolist(), ends, strict=True)
    ]
    return torch.cat(spans).to(counts_E.device) if spans else torch.empty(0, dtype=torch.long)


def combine_rows(
    rows_PH: Tensor,
    row_of_slot_TK: Tensor,
    weights_TK: Tensor | None = None,
    scalars_P: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """K rows in, one row out: out[t] = sum over k, in slot order and in fp32, of rows[row_of_slot[t, k]]
    (times weights[t, k]), rounded once. Slots of -1 contribute nothing and their rows are not read.

    Args:
        rows_PH: (P, H) fp16, bf16 or fp32; rows may be strided (unit stride along H).
        row_of_slot_TK: (T, K) int32 in [-1, P).
        weights_TK: (T, K) fp32 or None.
        scalars_P: (P) fp32 values gathered along (gradients of probabilities), or None.

    Returns:
        out_TH: (T, H) of rows' dtype; scalars_TK: (T, K) fp32, 0 where there is no row, or None.
    """
    T, K = row_of_slot_TK.shape
    out_TH = torch.zeros(T, rows_PH.shape[1], dtype=torch.float32, device=rows_PH.device)
    scalars_TK = None if scalars_P is None else scalars_P.new_zeros(T, K)
    for k in range(K):
        token = (row_of_slot_TK[:, k] >= 0).nonzero().squeeze(1)
        row = row_of_slot_TK[token, k].long()
        term = rows_PH[row].to(torch.float32)
        if weights_TK is not None:
            term = term * weights_TK[token, k].unsqueeze(1)
        out_TH[token] += term
        if scalars_TK is not None:
            scalars_TK[token, k] = scalars_P[row]
    return out_TH.to(rows_PH.dtype), scalars_TK


def combine_rows_backward(
    grad_TH: Tensor,
    rows_PH: Tensor,
    row_of_slot_TK: Tensor,
    weights_TK: Tensor,
    counts_E: Tensor,
    padded_bins_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """Backward of the weighted combine in one pass: dgrad rows, the weights' gradient and zeroed pad rows.

    Returns:
        grad_rows_PH: (P, H) of rows' dtype, grad[t] * weights[t, k] at row_of_slot[t, k], 0 on pad rows.
        grad_weights_TK: (T, K) fp32, dot(grad[t], rows[row_of_slot[t, k]]) in fp32, 0 where there is no row.
    """
    grad_rows_PH = torch.empty_like(rows_PH)
    grad_weights_TK = torch.zeros_like(weights_TK)
    token, slot = (row_of_slot_TK >= 0).nonzero(as_tuple=True)
    row = row_of_slot_TK[token, slot].long()
    grad = grad_TH[token].to(torch.float32)
    grad_rows_PH[row] = (grad * weights_TK[token, slot].unsqueeze(1)).to(rows_PH.dtype)
    grad_rows_PH[_pad_rows(counts_E, padded_bins_E)] = 0
    grad_weights_TK[token, slot] = (grad * rows_PH[row].to(torch.float32)).sum(1)
    return grad_rows_PH, grad_weights_TK
