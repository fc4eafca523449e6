"""Plans of rows that came from other ranks: chunks by (source, local expert), to be laid out by expert.

Sources are ordered (ETP rank, EP rank) and each sends its rows in (expert, token) order, so that row order inside
an expert stays token order, rank after rank.
"""

import torch
from torch import Tensor

from megatron_ascend_moe.routing.plan import RoutePlan, _plan


def plan_received_chunks(
    received: Tensor, rows_per_tp_rank: int, pad_multiple: int, device: torch.device
) -> tuple[RoutePlan, list[int]]:
    """Padded layout of received rows.

    Args:
        received: (ETP, EP, e) int64 on the CPU: rows from each source for each local expert.
        rows_per_tp_rank: rows that each ETP rank's part of the buffer takes (its real rows come first).
        pad_multiple: M.
        device: where the rows live; everything here is computed from host counts and copied there once.

    Returns:
        The plan over the buffer's ETP * rows_per_tp_rank rows (K = 1), and padded_counts as a host list.
    """
    etp, ep, e = received.shape
    chunks = received.reshape(etp, ep * e)
    counts = received.sum((0, 1))
    padded_counts = (counts + pad_multiple - 1) // pad_multiple * pad_multiple
    bins, padded_bins = counts.cumsum(0), padded_counts.cumsum(0)

    by_source = received.reshape(etp * ep, e)
    first_row = (padded_bins - padded_counts) + by_source.cumsum(0) - by_source  # destination of each chunk
    first_slot = chunks.cumsum(1) - chunks + torch.arange(etp).unsqueeze(1) * rows_per_tp_rank
    shift = first_row.reshape(etp, ep * e) - first_slot  # destination - position, one value a chunk
    # each ETP rank's unused tail is one more chunk, shifted below every row
    tail = rows_per_tp_rank - chunks.sum(1, keepdim=True)
    shift = torch.cat([shift, torch.full_like(tail, -(2**31) + 1)], 1).reshape(-1)
    lengths = torch.cat([chunks, tail], 1).reshape(-1)

    meta = torch.cat([counts, padded_counts, bins, padded_bins, counts, counts.new_zeros(1)])
    table = torch.cat([meta, shift, lengths]).to(device=device, dtype=torch.int32, non_blocking=True)
    meta, shift, lengths = table.split([meta.numel(), shift.numel(), lengths.numel()])
    slots = etp * rows_per_tp_rank
    row_of_slot = torch.repeat_interleave(shift, lengths, output_size=slots)
    row_of_slot = (row_of_slot + torch.arange(slots, dtype=torch.int32, device=device)).clamp(min=-1)
    plan = _plan(row_of_slot.unsqueeze(1), meta, int(padded_counts.sum()), pad_multiple, None)
    return plan, padded_counts.tolist()


def plan_received_bins(num_sources: int, num_local_experts: int, capacity: int, device: torch.device) -> RoutePlan:
    """Binned layout of received bins: [source, expert, C] -> [expert, source, C], static, no host sync.

    An expert's segment is num_sources * capacity rows, all of them received (unused capacity came as zeros).
    """
    S, e, C = num_sources, num_local_experts, capacity
    int32 = {"dtype": torch.int32, "device": device}
    row_of_slot = torch.arange(e * S * C, **int32).view(e, S, C).transpose(0, 1).reshape(-1, 1)
    counts = torch.full((e,), S * C, **int32)
    bins = torch.arange(1, e + 1, **int32) * (S * C)
    meta = torch.cat([counts, counts, bins, bins, counts, torch.zeros(1, **int32)])
    return _plan(row_of_slot, meta, e * S * C, None, S * C)
