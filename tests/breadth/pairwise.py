"""Settings combined so that every two values of different factors meet in some row: what CI runs of the breadth."""

from __future__ import annotations

import itertools
from typing import Any

from tests.breadth.settings import WIDE, Setting

_DROP = {"moe_expert_capacity_factor": 0.75}
_SHARED = {"moe_shared_expert_intermediate_size": 48}
_BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
}
# factor -> value -> what it changes in a Setting
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "routing": {
        "aux loss": {},
        "seq aux loss": {"config": {"moe_router_load_balancing_type": "seq_aux_loss"}},
        "bias and groups": {"config": _BIAS},
    },
    "layout": {
        "padded 1": {},
        "padded 8": {"ours": {"pad_multiple": 8}},
        "drop": {"config": _DROP, "ours": {"pad_multiple": 4}},
        "pad to capacity": {"config": _DROP | {"moe_pad_expert_input_to_capacity": True}},
        "binned": {"config": {"moe_expert_capacity_factor": 4.0}, "ours": {"layout": "binned"}},
    },
    "shared": {
        "no shared experts": {},
        "shared experts": {"config": _SHARED},
        "overlapped shared experts": {"config": _SHARED | {"moe_shared_expert_overlap": True}},
    },
    "recompute": {
        "no recompute": {},
        "recompute moe": {"config": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
        "full recompute": {
            "config": {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        },
    },
    "training": {
        "fp32": {},
        "bf16": {"config": {"bf16": True}, "low_precision": True},
        "distributed optimizer": {"train": {"distributed_optimizer": True}},
    },
    "ranks": {
        "one rank": {"layouts": {1: {}}},
        "EP 2": {"layouts": {2: {"ep": 2}}},
        "TP 2 x ETP 2": {"layouts": {2: {"tp": 2, "etp": 2}}},
        "EP 4": {"layouts": {4: WIDE[4]}},
        "TP 2 x EP 2": {"layouts": {4: {"tp": 2, "ep": 2}}},
    },
}


def rows() -> list[Setting]:
    """A covering set, chosen greedily: each row takes the combination that covers the most pairs still missing."""
    names = list(FACTORS)
    missing = {
        frozenset({(a, x), (b, y)}) for a, b in itertools.combinations(names, 2) for x in FACTORS[a] for y in FACTORS[b]
    }
    candidates = [dict(zip(names, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    chosen = []
    while missing:
        best = max(candidates, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        chosen.append(_setting(best))
    return chosen


def _pairs(row: dict[str, str]) -> set[frozenset]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def _setting(row: dict[str, str]) -> Setting:
    merged: dict[str, Any] = {"name": ", ".join(row.values())}
    for factor, value in row.items():
        for key, change in FACTORS[factor][value].items():
            merged[key] = merged.get(key, {}) | change if isinstance(change, dict) else change
    return Setting(**merged)
