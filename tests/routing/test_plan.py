"""Plans against an independent definition: a stable sort by (expert, token), one Python loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ascend_moe import checked
from megatron_ascend_moe.routing import plan_routes, routing_map_to_indices
from megatron_ascend_moe.routing.plan import static_rows
from megatron_ascend_moe.routing.received_plan import plan_received_bins, plan_received_chunks

GOLDEN_IDS = torch.tensor([[0, 2], [1, 2], [0, 3], [0, 1]], dtype=torch.int32)


def loop_plan(ids, num_experts, multiple, capacity):
    """Row of every slot, real and padded counts, by walking tokens in order."""
    rows, counts, padded = [[-1] * len(row) for row in ids], [], []
    start = 0
    for expert in range(num_experts):
        routes = [(t, k) for t, row in enumerate(ids) for k, e in enumerate(row) if e == expert]
        kept = routes if capacity is None else routes[:capacity]
        for rank, (t, k) in enumerate(kept):
            rows[t][k] = start + rank
        counts.append(len(kept))
        padded.append(-(-len(kept) // multiple) * multiple if capacity is None else capacity)
        start += padded[-1]
    return rows, counts, padded


@given(
    T=st.integers(0, 30),
    shape=st.sampled_from([(1, 1), (5, 3), (8, 2), (60, 6)]),
    multiple=st.sampled_from([1, 4, 8, 128]),
    capacity=st.sampled_from([None, None, 1, 3, 100]),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=80, deadline=None)
def test_plan_equals_the_loop(T, shape, multiple, capacity, density, seed):
    E, K = shape
    generator = torch.Generator().manual_seed(seed)
    routed = (torch.rand(T, E, generator=generator).argsort(1).argsort(1) < K) & (
        torch.rand(T, E, generator=generator) < density
    )
    _, ids = routing_map_to_indices(torch.rand(T, E), routed, K)
    with checked():
        plan = plan_routes(ids, E, multiple, capacity)
    rows, counts, padded = loop_plan(ids.tolist(), E, multiple, capacity)
    assert plan.row_of_slot_TK.tolist() == rows
    assert plan.counts_E.tolist() == counts
    assert plan.routes_E.tolist() == routed.sum(0).tolist()
    assert plan.padded_counts_E.tolist() == padded
    assert plan.bins_E.tolist() == torch.tensor(counts).cumsum(0).tolist()
    assert plan.padded_bins_E.tolist() == torch.tensor(padded).cumsum(0).tolist()
    assert plan.num_rows >= sum(padded) and (capacity is None or plan.num_rows == sum(padded))
    assert plan.counts_and_overflow.tolist() == [*counts, 0]
    taken = plan.row_of_slot_TK[plan.row_of_slot_TK >= 0]
    assert taken.unique().numel() == taken.numel() == sum(counts), "no two routes share a row"


def test_golden_padded():
    plan = plan_routes(GOLDEN_IDS, 4, pad_multiple=4)
    assert plan.counts_E.tolist() == [3, 2, 2, 1]
    assert plan.padded_bins_E.tolist() == [4, 8, 12, 16]
    source = {row: token for token, rows in enumerate(plan.row_of_slot_TK.tolist()) for row in rows}
    assert [source[row] for row in sorted(source)] == [0, 2, 3, 1, 3, 0, 1, 2]


def test_golden_binned_drops_the_last_tokens():
    ids = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 2]], dtype=torch.int32)
    plan = plan_routes(ids, 4, capacity=2)
    assert plan.row_of_slot_TK.tolist() == [[0, 2], [1, 3], [-1, 4], [-1, 5]]  # assignments 4 and 6 dropped
    assert plan.counts_E.tolist() == [2, 2, 2, 0] and plan.routes_E.tolist() == [4, 2, 2, 0]


@pytest.mark.parametrize(
    ("counts", "multiple", "padded"), [([3, 2, 2, 1, 0, 0], 4, [4, 4, 4, 4, 0, 0]), ([44, 0, 1], 32, [64, 0, 32])]
)
def test_empty_experts_take_no_rows(counts, multiple, padded):
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(torch.int32).unsqueeze(1)
    assert plan_routes(ids, len(counts), multiple).padded_counts_E.tolist() == padded


@pytest.mark.parametrize(("T", "K", "E", "M"), [(0, 2, 8, 16), (1, 2, 8, 16), (7, 3, 5, 1), (100, 8, 4, 128)])
def test_static_bound_holds_for_the_worst_routes(T, K, E, M):
    """The worst: every expert that can have a row has one more than a multiple of M."""
    routes = T * K
    spread = [routes // E + (e < routes % E) for e in range(E)]
    worst = sum(-(-n // M) * M for n in spread)
    assert worst <= static_rows(T, K, E, M) <= routes + min(E, routes) * (M - 1) + M - 1


@pytest.mark.parametrize("pad_multiple", [1, 4])
def test_received_chunks_equal_a_stable_sort(pad_multiple):
    generator = torch.Generator().manual_seed(3)
    for etp, ep, e in [(1, 2, 4), (2, 3, 2), (2, 2, 1), (1, 4, 3)]:
        received = torch.randint(0, 5, (etp, ep, e), generator=generator)
        received[0, 0] = 0  # a source that sends nothing
        rows = int(received.sum((1, 2)).max()) + 2  # the largest rank's tail is unused, too
        plan, padded = plan_received_chunks(received, rows, pad_multiple, torch.device("cpu"))
        position = 0
        ids = []
        for tp in range(etp):
            part = [j for r in range(ep) for j in range(e) for _ in range(int(received[tp, r, j]))]
            ids += part + [-1] * (rows - len(part))
        expected, counts, padded_counts = loop_plan([[i] for i in ids], e, pad_multiple, None)
        assert plan.row_of_slot_TK.tolist() == expected, (etp, ep, e, position)
        assert plan.counts_E.tolist() == counts and padded == plan.padded_counts_E.tolist() == padded_counts
        assert plan.padded_bins_E.tolist() == torch.tensor(padded_counts).cumsum(0).tolist()
        assert plan.num_rows == sum(padded_counts)


def test_received_bins_are_transposed():
    plan = plan_received_bins(num_sources=2, num_local_experts=3, capacity=2, device=torch.device("cpu"))
    assert plan.row_of_slot_TK.flatten().tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert plan.counts_E.tolist() == plan.padded_counts_E.tolist() == [4, 4, 4]
    assert plan.padded_bins_E.tolist() == [4, 8, 12]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"expert_ids_TK": GOLDEN_IDS.long()}, "expert_ids is torch.int64 .* expected int32"),
        ({"pad_multiple": 0}, "pad_multiple=0"),
        ({"capacity": 0}, "capacity=0 with 4 tokens: every route would be dropped"),
        ({"num_experts": 3}, "expert ids span 0..3, expected -1 .* to 2"),
        ({"pad_multiple": 2**30}, r"needs up to \d+ rows, expected fewer than 2\^31"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with checked(), pytest.raises(ValueError, match=message):
        plan_routes(**{"expert_ids_TK": GOLDEN_IDS, "num_experts": 4, **arguments})
