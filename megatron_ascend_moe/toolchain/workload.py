"""One launch of every kernel for a model shape, by the very launchers of training, on a small batch of tokens.

A kernel's IR depends on H, E, K and the dtype, not on the number of tokens, so a small batch shows the kernel that
training runs. Floors are rows: what an operation must read and write of H columns each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TOKENS = 64
TOKENS_OF_PROGRAM = 2  # as 32 programs count them
PAD_MULTIPLE = 2


@dataclass(frozen=True)
class Operation:
    """A launch to make: `floor_rows` rows of H columns are the least that it can move, 0 where it moves none."""

    name: str
    floor_rows: int
    launch: Callable[[], object]


def operations(hidden: int, experts: int, topk: int, dtype: torch.dtype) -> Iterator[Operation]:
    """Every operation of the package that launches a kernel."""
    routing = _Routing(experts, topk)
    yield from _route_operations(routing)
    yield from _row_map_operations(routing, hidden, dtype)
    yield from _position_operations(routing, hidden, dtype)


class _Routing:
    """TOKENS tokens routed to `topk` of `experts` experts at random, in both forms that kernels take."""

    def __init__(self, experts: int, topk: int):
        from megatron_ascend_moe.kernels import reference

        generator = torch.Generator().manual_seed(0)
        self.experts, self.topk = experts, topk
        self.probs_TE = torch.rand(TOKENS, experts, generator=generator)
        self.map_TE = torch.zeros(TOKENS, experts, dtype=torch.bool)
        self.map_TE.scatter_(1, self.probs_TE.topk(topk).indices, True)
        self.probs_TK, self.ids_TK, _ = reference.route_count(self.probs_TE, self.map_TE, topk)
        ranges = zip(self.probs_TE.split(TOKENS_OF_PROGRAM), self.map_TE.split(TOKENS_OF_PROGRAM), strict=True)
        self.counts_BE = torch.cat([reference.route_count(*tokens, topk)[2] for tokens in ranges])
        self.row_of_slot_TK, meta = reference.route_place(self.ids_TK, self.counts_BE, PAD_MULTIPLE, 0)
        self.counts_E = meta[reference.COUNTS * experts : (reference.COUNTS + 1) * experts].contiguous()
        self.padded_bins_E = meta[reference.PADDED_BINS * experts :][:experts].contiguous()
        self.num_rows = int(self.padded_bins_E[-1])
        self.capacity = max(1, TOKENS * topk // experts)


def _route_operations(routing: _Routing) -> Iterator[Operation]:
    from megatron_ascend_moe.kernels import route

    r = routing
    yield Operation("route_count", 0, lambda: route.route_count(r.probs_TE, r.map_TE, r.topk))
    yield Operation(
        "route_count_backward",
        0,
        lambda: route.route_count_backward(r.probs_TK, r.ids_TK, r.experts, torch.float32),
    )
    yield Operation("id_count", 0, lambda: route.id_count(r.ids_TK, r.experts))
    counts_BE = r.counts_BE
    yield Operation("route_place, padded", 0, lambda: route.route_place(r.ids_TK, counts_BE, PAD_MULTIPLE, 0))
    yield Operation("route_place, binned", 0, lambda: route.route_place(r.ids_TK, counts_BE, 1, r.capacity))


def _row_map_operations(routing: _Routing, hidden: int, dtype: torch.dtype) -> Iterator[Operation]:
    from megatron_ascend_moe.kernels import rows

    r, routes = routing, TOKENS * routing.topk
    tokens, expert_rows = _rows(TOKENS, hidden, dtype), _rows(r.num_rows, hidden, dtype)
    where = (r.row_of_slot_TK, r.counts_E, r.padded_bins_E)
    yield Operation(
        "permute_rows", TOKENS + r.num_rows, lambda: rows.permute_rows(tokens, *where, r.num_rows, r.probs_TK)
    )
    yield Operation("combine_rows", routes + TOKENS, lambda: rows.combine_rows(expert_rows, r.row_of_slot_TK))
    yield Operation(
        "combine_rows, weighted",
        routes + TOKENS,
        lambda: rows.combine_rows(expert_rows, r.row_of_slot_TK, r.probs_TK),
    )
    yield Operation(
        "combine_rows, scalars",
        routes + TOKENS,
        lambda: rows.combine_rows(expert_rows, r.row_of_slot_TK, scalars_P=torch.zeros(r.num_rows)),
    )
    yield Operation(
        "combine_rows_backward",
        routes + r.num_rows + TOKENS,
        lambda: rows.combine_rows_backward(tokens, expert_rows, where[0], r.probs_TK, *where[1:]),
    )


def _position_operations(routing: _Routing, hidden: int, dtype: torch.dtype) -> Iterator[Operation]:
    from megatron_ascend_moe import ops
    from megatron_ascend_moe.kernels import positions

    experts, capacity, topk = routing.experts, routing.capacity, routing.topk
    tokens = _rows(TOKENS, hidden, dtype)
    indices, bin_ids, bins, padded_bins, counts = ops.indices_and_bins(routing.ids_TK, experts, PAD_MULTIPLE)
    routes, kept = TOKENS * topk, int(counts.clamp(max=capacity).sum())
    weights = routing.probs_TK.flatten()
    binned = _rows(experts * capacity, hidden, dtype).view(experts, capacity, hidden)
    for label, scale in (("", None), (", weighted", weights)):
        yield Operation(
            f"padded_gather{label}",
            routes + int(padded_bins[-1]),
            lambda scale=scale: positions.padded_gather(
                tokens, indices, bin_ids, scale, bins, padded_bins, topk, int(padded_bins[-1])
            ),
        )
        yield Operation(
            f"binned_gather{label}",
            kept + experts * capacity,
            lambda scale=scale: positions.binned_gather(tokens, indices, bin_ids, scale, bins, capacity, topk),
        )
    yield Operation(
        "scatter_wgrad",
        2 * routes,
        lambda: positions.scatter_wgrad(_rows(routes, hidden, dtype), tokens, indices, bin_ids, bins, topk),
    )
    yield Operation(
        "binned_scatter_wgrad",
        2 * kept,
        lambda: positions.binned_scatter_wgrad(binned, tokens, indices, bin_ids, bins, topk),
    )
    yield from _single_scatter_operations(routing, tokens, binned)


def _single_scatter_operations(routing: _Routing, tokens: Tensor, binned: Tensor) -> Iterator[Operation]:
    """Scatter of one assignment a token; of several it is combine_rows."""
    from megatron_ascend_moe import ops
    from megatron_ascend_moe.kernels import positions

    indices, bin_ids, bins, _, counts = ops.indices_and_bins(routing.ids_TK[:, :1], routing.experts)
    kept = int(counts.clamp(max=routing.capacity).sum())
    for label, scale in (("", None), (", weighted", routing.probs_TK[:, 0].contiguous())):
        yield Operation(
            f"scatter, top_k=1{label}",
            2 * TOKENS,
            lambda scale=scale: positions.scatter(tokens, indices, bin_ids, scale, bins, 1),
        )
        yield Operation(
            f"binned_scatter, top_k=1{label}",
            kept + TOKENS,
            lambda scale=scale: positions.binned_scatter(binned, indices, bin_ids, scale, bins, 1),
        )


def _rows(count: int, hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(count, hidden, dtype=dtype)
