"""Cells whose oracle is not the stock dispatcher. Each check raises AssertionError, or returns nothing."""

from __future__ import annotations

import math

import torch


def replay_of_missing_ids(layout: dict[str, int]) -> None:
    """Ids of -1: the adapter keeps them, the plan gives them no row, and a layer's output sums the other ids."""
    from megatron_ascend_moe.routing import plan_routes, routing_map_to_indices
    from tests.breadth.whole_layer import Case, assert_matches_brute_force

    ids = torch.tensor([[0, 3], [-1, 2], [-1, -1], [1, -1], [2, 3]], dtype=torch.int32)
    routed = torch.zeros(5, 4, dtype=torch.bool)
    token, slot = (ids >= 0).nonzero(as_tuple=True)
    routed[token, ids[token, slot].long()] = True
    probs_TK, compact = routing_map_to_indices(torch.rand(5, 4) * routed, routed, 2)
    assert compact.tolist() == [[0, 3], [2, -1], [-1, -1], [1, -1], [2, 3]]
    assert (probs_TK[compact < 0] == 0).all()
    for plan in (plan_routes(ids, 4, 4), plan_routes(compact, 4, 4)):
        assert plan.counts_E.tolist() == [1, 1, 2, 2] and plan.padded_counts_E.tolist() == [4, 4, 4, 4]
    assert (plan_routes(ids, 4, 4).row_of_slot_TK[ids < 0] == -1).all()
    assert_matches_brute_force(Case(layout=layout, tokens=12, experts=8, topk=3, density=0.4, pad_multiple=4, seed=3))


def padding_for_quantization(layout: dict[str, int]) -> None:
    """The padded layout's multiple is the least common multiple of pad_multiple and what the quantized GEMM needs,
    and layers built so still match brute force."""
    from tests.breadth.whole_layer import Case, assert_matches_brute_force, build_dispatcher

    for recipe, align in (("delayed", 16), ("mxfp8", 32)):
        for multiple in (1, 24, 64):
            case = Case(
                layout=layout, tokens=20, experts=8, topk=2, pad_multiple=multiple, seed=multiple, fp8_recipe=recipe
            )
            with build_dispatcher(case) as dispatcher:
                assert dispatcher.pad_multiple == math.lcm(multiple, align)
            received = assert_matches_brute_force(case)
            assert received and all(count % math.lcm(multiple, align) == 0 for count in received)
