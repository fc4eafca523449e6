"""What the dispatchers count: kept on the device until a step logs, then brought to the host once for all layers.

Counts are summed over microbatches and over the ranks of a pipeline stage since the last reading. Formulae:
max_vio = (max - mean) / mean of tokens per expert; overload = most loaded EP rank / mean EP rank; dropped share =
dropped routes / routes asked for; padding share = rows in the experts' layout / real rows - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ascend_moe.kernels.reference import COUNTS, ROUTES
from megatron_ascend_moe.routing.route_adapter import check_overflow


@dataclass(frozen=True)
class LayerLoad:
    """One layer's load over a logging interval, summed over microbatches and ranks."""

    tokens_per_expert: list[int]  # (E) routes kept
    max_vio: float  # 0 is perfect balance
    overload: float  # 1 is perfect balance
    dropped_share: float
    padding_share: float
    bytes_sent: int  # to other ranks, there and back, probabilities included
    stage_ms: dict[str, float] = field(default_factory=dict)  # of this rank's last forward, where stage_times is on


class LoadCounter:
    """Running sums of one dispatcher: one small device addition a forward, no sync.

    Only forwards with gradients enabled count: not evaluation, and under Megatron's recompute the one that runs
    inside backward, so each microbatch once. (Checkpoints that keep gradients enabled in both runs, as torch's
    use_reentrant=False does, count twice.)
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._meta: Tensor | None = None  # (5 E + 1) int64, sums of the plans' meta
        self._rows = 0  # rows handed to the experts, pads included
        self._bytes_sent = 0  # to other ranks, there and back

    def add(self, meta: Tensor, rows: int, bytes_sent: int) -> None:
        """Count one forward: the source plan's meta (5 E + 1) int32, the experts' rows, the bytes sent."""
        if not torch.is_grad_enabled():
            return
        if self._meta is None:
            self._meta = torch.zeros(meta.numel(), dtype=torch.int64, device=meta.device)
        self._meta += meta
        self._rows += rows
        self._bytes_sent += bytes_sent

    def take(self, device: torch.device) -> Tensor:
        """(2 E + 3) int64 on the device: routes asked for and kept by expert, rows of the map with more routes than
        the width, rows, bytes; and start anew."""
        E = self.num_experts
        meta = self._meta if self._meta is not None else torch.zeros(5 * E + 1, dtype=torch.int64, device=device)
        host = torch.tensor([self._rows, self._bytes_sent]).to(device, non_blocking=True)
        routes, kept = meta[ROUTES * E : (ROUTES + 1) * E], meta[COUNTS * E : (COUNTS + 1) * E]
        taken = torch.cat([routes, kept, meta[-1:], host])
        self._meta, self._rows, self._bytes_sent = None, 0, 0
        return taken


def read_loads(
    dispatchers: Sequence, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[LayerLoad]:
    """Loads of these layers since the last reading: one all-reduce and one device-to-host copy for all of them.

    Args:
        dispatchers: AscendTokenDispatchers of this pipeline stage, in the same order on every rank of `group`.
        device: where the counts live.
        group: ranks to sum over: those of the stage (tensor x data x context parallel), or None for this rank.

    Raises:
        ValueError: on every rank, if a map's row held more routes than the width. Layouts that sync have raised
            before; in the binned one this is the first time that the host can know.
    """
    if not dispatchers:
        return []
    sums = torch.stack([d.load.take(device) for d in dispatchers])
    if group is not None and group.size() > 1:
        dist.all_reduce(sums, group=group)
    rows = list(zip(dispatchers, sums.tolist(), strict=True))
    for dispatcher, row in rows:
        check_overflow(row[2 * dispatcher.num_experts], dispatcher.config.moe_router_topk)
    return [_layer_load(row, dispatcher) for dispatcher, row in rows]


def _layer_load(sums: list[int], dispatcher: Any) -> LayerLoad:
    num_experts, ep_size = dispatcher.num_experts, dispatcher.ep_size
    asked, kept = sum(sums[:num_experts]), sums[num_experts : 2 * num_experts]
    _, rows, bytes_sent = sums[2 * num_experts :]
    real, local = sum(kept), num_experts // ep_size
    by_rank = [sum(kept[r * local : (r + 1) * local]) for r in range(ep_size)]
    return LayerLoad(
        tokens_per_expert=kept,
        max_vio=max(kept) * num_experts / real - 1 if real else 0.0,
        overload=max(by_rank) * ep_size / real if real else 1.0,
        dropped_share=(asked - real) / asked if asked else 0.0,
        padding_share=rows / (real * dispatcher.tp_size) - 1 if real else 0.0,  # all ETP ranks compute the same rows
        bytes_sent=bytes_sent,
        stage_ms={} if dispatcher.stage_times is None else dispatcher.stage_times.read(),
    )
