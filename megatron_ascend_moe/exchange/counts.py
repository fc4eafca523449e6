"""The counts' collective: every rank learns how many rows each rank sends to each expert, and the host learns it
once. All splits of all later collectives are partial sums of what this brings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ascend_moe.routing.route_adapter import check_overflow


@dataclass(frozen=True)
class Splits:
    """Row counts of one dispatch on this rank, known to the host."""

    send: list[int]  # to each EP rank
    receive: list[int]  # from each EP rank
    rows_per_tp_rank: int  # rows that every ETP rank contributes to the all-gather: the group's maximum
    received: Tensor  # (ETP, EP, e) int64 on the CPU: rows from each source for each local expert


class CountsCollective:
    """An all-gather of counts_and_overflow in flight. It overlaps with the permute that follows its start."""

    def __init__(self, counts_and_overflow: Tensor, tp_ep_group: dist.ProcessGroup, topk: int) -> None:
        self._topk = topk
        self._gathered = counts_and_overflow.new_empty(tp_ep_group.size() * counts_and_overflow.numel())
        self._work = dist.all_gather_into_tensor(
            self._gathered, counts_and_overflow, group=tp_ep_group, async_op=True
        )

    def finish(self, ep_size: int, ep_rank: int, tp_size: int, tp_rank: int) -> Splits:
        """Wait, read the counts on the host, and derive this rank's splits.

        Raises:
            ValueError: on every rank, if any rank's map held a row with more routes than the width.
        """
        self._work.wait()
        # NOTE: the dispatch's single device-to-host sync.
        gathered = self._gathered.cpu().long().view(ep_size, tp_size, -1)
        check_overflow(int(gathered[..., -1].sum()), self._topk)
        # ranks of the TP x EP group are ordered EP-major
        per_rank = gathered[..., :-1].reshape(ep_size, tp_size, ep_size, -1)  # source EP, source ETP, dest EP, e
        received = per_rank[:, :, ep_rank].transpose(0, 1)
        return Splits(
            send=per_rank[ep_rank, tp_rank].sum(1).tolist(),
            receive=received[tp_rank].sum(1).tolist(),
            rows_per_tp_rank=int(received.sum((1, 2)).max()),
            received=received,
        )


def even_splits(num_local_experts: int, capacity: int, ep_size: int, tp_size: int) -> Splits:
    """Splits of the binned layout: e * C rows between any two ranks, so no collective and no sync."""
    rows = num_local_experts * capacity
    return Splits(
        send=[rows] * ep_size,
        receive=[rows] * ep_size,
        rows_per_tp_rank=rows * ep_size,
        received=torch.full((tp_size, ep_size, num_local_experts), capacity),
    )
