"""What one dispatch moves: rows, padding and bytes, from the flags, for a balanced router."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ascend_moe.config import DispatchConfig
from megatron_ascend_moe.launch.layout import Layout
from megatron_ascend_moe.launch.shape import integer

ROW_ALIGNMENT = 32  # bytes: rows travel with their probabilities and ids at a pitch rounded up to this


@dataclass(frozen=True)
class Traffic:
    """One dispatch of one MoE layer on one rank. Rows in rows, bytes in bytes, one direction of the forward."""

    tokens: int
    routes: int
    local_experts: int
    expert_rows: int  # rows that this rank's experts compute when the load is balanced, without padding
    pad_rows_expected: float
    pad_rows_at_most: int
    rows_sent: float  # to other ranks
    row_bytes: int

    @property
    def bytes_sent(self) -> float:
        return self.rows_sent * self.row_bytes


def dispatch_traffic(flags: Mapping[str, Any], at: Layout) -> Traffic:
    """Rows, padding and bytes of one dispatch.

    Padded layout: an expert's rows modulo the pad multiple M are taken as uniform, so (M - 1) / 2 pad rows an
    expert are expected. Binned layout: what is left of the capacity. Per-rank exchange: K distinct experts drawn
    uniformly meet EP (1 - C(E - E/EP, K) / C(E, K)) ranks.
    """
    experts, topk = integer(flags, "num-experts"), integer(flags, "moe-router-topk", 2)
    tokens = integer(flags, "seq-length") * integer(flags, "micro-batch-size")
    tokens //= at.cp * (at.tp if flags.get("sequence-parallel") else 1)
    routes, local = tokens * topk, experts // at.ep
    rows = routes * at.etp
    if flags.get("moe-pad-expert-input-to-capacity") or flags.get("moe-ascend-layout") == "binned":
        capacity = math.ceil(routes / experts * float(flags["moe-expert-capacity-factor"]))
        expected = at_most = max(0, experts * capacity * at.etp - rows)
    else:
        multiple = integer(flags, "moe-ascend-pad-multiple", DispatchConfig.pad_multiple)
        filled = min(local, rows)
        expected, at_most = filled * (multiple - 1) / 2, filled * (multiple - 1)
    per_rank = flags.get("moe-ascend-exchange", DispatchConfig.exchange) == "per-rank"
    sent = tokens * _ranks_met(experts, topk, at.ep) if per_rank else routes
    return Traffic(
        tokens=tokens,
        routes=routes,
        local_experts=local,
        expert_rows=rows,
        pad_rows_expected=expected,
        pad_rows_at_most=at_most,
        rows_sent=sent * (at.ep - 1) / at.ep,
        row_bytes=_row_bytes(flags, topk if per_rank else 1),
    )


def _ranks_met(experts: int, topk: int, ep: int) -> float:
    """Expected number of ranks that hold at least one of K distinct experts drawn uniformly."""
    return ep * (1 - math.comb(experts - experts // ep, topk) / math.comb(experts, topk))


def _row_bytes(flags: Mapping[str, Any], slots: int) -> int:
    """A row, then a fp32 probability and an int32 id for each slot, rounded up."""
    width = integer(flags, "moe-latent-size", integer(flags, "hidden-size"))
    size = width * (2 if flags.get("bf16") or flags.get("fp16") else 4) + 8 * slots
    return -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT
