"""What one dispatch moves: rows, padding and bytes, from the flags, for a balanced router."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ascend_moe.config import DispatchConfig
from megatron_ascend_moe.launch.layout import Layout
from megatron_ascend_moe.launch.shape import integer


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
    """Rows, padding and bytes of one dispatch, one row per route crossing the exchange.

    Padded layout: an expert's rows modulo the pad multiple M are taken as uniform, so (M - 1) / 2 pad rows an
    expert are expected. Binned layout: what is left of the capacity.

    Raises:
        ValueError: the binned layout without a capacity factor.
    """
    experts, topk = integer(flags, "num-experts"), integer(flags, "moe-router-topk", 2)
    tokens = integer(flags, "seq-length") * integer(flags, "micro-batch-size")
    tokens //= at.cp * (at.tp if flags.get("sequence-parallel") else 1)
    routes, local = tokens * topk, experts // at.ep
    rows = routes * at.etp
    if flags.get("moe-pad-expert-input-to-capacity") or flags.get("moe-ascend-layout") == "binned":
        if flags.get("moe-expert-capacity-factor") is None:
            raise ValueError(
                "a fixed capacity needs `moe-expert-capacity-factor`, got none: set it or drop the capacity"
            )
        capacity = math.ceil(routes / experts * float(flags["moe-expert-capacity-factor"]))
        expected = at_most = max(0, experts * capacity * at.etp - rows)
    else:
        multiple = integer(flags, "moe-ascend-pad-multiple", DispatchConfig.pad_multiple)
        filled = min(local, rows)
        expected, at_most = filled * (multiple - 1) / 2, filled * (multiple - 1)
    return Traffic(
        tokens=tokens,
        routes=routes,
        local_experts=local,
        expert_rows=rows,
        pad_rows_expected=expected,
        pad_rows_at_most=at_most,
        rows_sent=routes * (at.ep - 1) / at.ep,
        row_bytes=_row_bytes(flags),
    )


def _row_bytes(flags: Mapping[str, Any]) -> int:
    """A row and its fp32 probability."""
    width = integer(flags, "moe-latent-size", integer(flags, "hidden-size"))
    return width * (2 if flags.get("bf16") or flags.get("fp16") else 4) + 4
