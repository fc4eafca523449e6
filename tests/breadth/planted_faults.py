"""Faults that test_fuzz.py plants in the dispatcher, to see the fuzz find them."""

from __future__ import annotations

import contextlib
from unittest import mock

from megatron_ascend_moe import dispatcher as code
from tests.breadth.whole_layer import Case, assert_matches_brute_force


def _changing_result(name: str, change):
    """Replace a function that the dispatcher calls by one whose result is changed."""
    original = getattr(code, name)
    return mock.patch.object(code, name, lambda *args, **kwargs: change(original(*args, **kwargs)))


def _swap_two_rows(rows):
    return rows if len(rows) < 2 else rows[[1, 0, *range(2, len(rows))]]


def _lose_a_route(compacted):
    probs_TK, ids_TK, _ = compacted
    ids_TK = ids_TK.clone()
    live = (ids_TK >= 0).nonzero()
    if len(live):
        ids_TK[tuple(live[-1])] = -1
    return probs_TK, ids_TK, None


def _lose_the_probabilities_gradient(permuted):
    rows, probs = permuted
    return rows, probs.detach()


def _move_a_row_to_the_next_expert():
    original = code.AscendTokenDispatcher.dispatch_postprocess

    def moved(self, *args):
        rows, counts, probs = original(self, *args)
        if len(counts) > 1 and counts[0]:
            counts = counts.clone()
            counts[0] -= 1
            counts[1] += 1
        return rows, counts, probs

    return mock.patch.object(code.AscendTokenDispatcher, "dispatch_postprocess", moved)


FAULTS = {
    "combine swaps two rows": lambda: _changing_result("combine_rows", _swap_two_rows),
    "a lost route": lambda: _changing_result("compact_routes", _lose_a_route),
    "no gradient of the probabilities": lambda: _changing_result("permute_rows", _lose_the_probabilities_gradient),
    "a row given to the next expert": _move_a_row_to_the_next_expert,
}


def mismatch(case: Case, fault: str | None) -> str | None:
    """What the comparison says of one case with the fault in place: None if it sees nothing."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        try:
            assert_matches_brute_force(case)
        except (AssertionError, RuntimeError) as error:
            return str(error)
    return None
