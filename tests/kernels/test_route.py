"""Routing kernels: against independent loops and golden values, against the twin, on poisoned memory."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ascend_moe.kernels import reference
from tests.kernels.cases import Case, probabilities, routing_map

SHAPES = [
    Case(T=5, E=1, K=1, M=1),
    Case(T=13, E=5, K=3, M=8),
    Case(T=37, E=8, K=2, C=3),
    Case(T=9, E=60, K=6, M=1),
    Case(T=7, E=160, K=10, C=1),
    Case(T=6, E=256, K=8, M=128),
    Case(T=0, E=8, K=2, M=4),
    Case(T=0, E=8, K=2, C=5),
]
GOLDEN_MAP = [[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 0, 0]]


def ids_by_loop(routed: torch.Tensor, K: int) -> list[list[int]]:
    ids = [[e for e, hit in enumerate(row) if hit][:K] for row in routed.tolist()]
    return [row + [-1] * (K - len(row)) for row in ids]


def plan_by_loop(ids: list[list[int]], E: int, M: int, C: int) -> tuple[list[list[int]], dict[str, list[int]]]:
    """Row of every slot and the vectors of `meta`, by walking the tokens of one expert after another."""
    rows = [[-1] * len(row) for row in ids]
    routes, padded, counts = [], [], []
    for e in range(E):
        slots = [(t, k) for t, row in enumerate(ids) for k, i in enumerate(row) if i == e]
        kept = slots[:C] if C else slots
        for rank, (t, k) in enumerate(kept):
            rows[t][k] = sum(padded) + rank
        routes.append(len(slots))
        counts.append(len(kept))
        padded.append(C if C else -(-len(slots) // M) * M)
    return rows, {"routes": routes, "padded": padded, "counts": counts}


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_adapter_and_plan_equal_loops(implementation, device, case):
    routed, probs = routing_map(case, device), probabilities(case, device)
    probs_TK, ids_TK, counts_BE = implementation.route_count(probs, routed, case.K)
    ids = ids_by_loop(routed, case.K)
    rows, vectors = plan_by_loop(ids, case.E, case.M, case.C)
    row_of_slot_TK, meta = implementation.route_place(ids_TK, counts_BE, case.M, case.C)

    assert ids_TK.tolist() == ids
    picked = [[float(probs[t, e]) if e >= 0 else 0.0 for e in row] for t, row in enumerate(ids)]
    assert probs_TK.tolist() == picked
    assert row_of_slot_TK.tolist() == rows
    by_name = meta[: 5 * case.E].view(5, case.E)
    assert by_name[reference.ROUTES].tolist() == vectors["routes"]
    assert by_name[reference.COUNTS].tolist() == vectors["counts"]
    assert by_name[reference.PADDED_COUNTS].tolist() == vectors["padded"]
    assert by_name[reference.BINS].tolist() == torch.tensor(vectors["counts"]).cumsum(0).tolist()
    assert by_name[reference.PADDED_BINS].tolist() == torch.tensor(vectors["padded"]).cumsum(0).tolist()
    assert meta[-1] == 0
    assert torch.equal(implementation.id_count(ids_TK, case.E).sum(0), counts_BE.sum(0))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_maps_equal_the_twin(triton_kernels, twin, device, data):
    case = Case(
        T=data.draw(st.integers(0, 40)),
        E=data.draw(st.integers(1, 40)),
        K=data.draw(st.integers(1, 10)),
        M=data.draw(st.sampled_from([1, 3, 16, 128])),
        C=data.draw(st.sampled_from([0, 0, 1, 4])),
        seed=data.draw(st.integers(0, 2**16)),
    )
    routed = routing_map(case, device, max_routes=case.E)  # rows of 0..E routes: more than K overflow
    probs = probabilities(case, device) * (routing_map(case, device, max_routes=case.E // 2) == 0)
    drop = data.draw(st.booleans())
    got, expected = (k.route_count(probs, routed, case.K, drop) for k in (triton_kernels, twin))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert torch.equal(got[2].sum(0), expected[2][0])
    assert torch.equal(triton_kernels.id_count(got[1], case.E)[:, :-1].sum(0), expected[2][0, :-1])
    placed, expected_place = (
        k.route_place(ids, counts, case.M, case.C) for k, (_, ids, counts) in ((triton_kernels, got), (twin, expected))
    )
    assert torch.equal(placed[0], expected_place[0])
    assert torch.equal(placed[1], expected_place[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", [Case(T=9, E=60, K=6), Case(T=4, E=8, K=3), Case(T=0, E=5, K=2)], ids=str)
def test_adapter_backward_equals_the_twin(triton_kernels, twin, device, case, dtype):
    probs = probabilities(case, device, dtype)
    probs_TK, ids_TK, _ = triton_kernels.route_count(probs, routing_map(case, device), case.K)
    assert torch.equal(probs_TK, twin.route_count(probs, routing_map(case, device), case.K)[0])
    grad = torch.randn(case.T, case.K, generator=case.generator()).to(device)
    got = triton_kernels.route_count_backward(grad, ids_TK, case.E, dtype)
    expected = twin.route_count_backward(grad, ids_TK, case.E, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, expected)


def test_map_to_ids_to_map_is_the_identity(implementation, device):
    for K, E in ((1, 5), (3, 60), (6, 192), (33, 64)):
        routed = routing_map(Case(T=6, E=E, K=K, seed=K), device)
        _, ids_TK, counts_BE = implementation.route_count(torch.ones(6, E, device=device), routed, K)
        dense = implementation.route_count_backward(torch.ones(6, K, device=device), ids_TK, E, torch.float32)
        assert torch.equal(dense.bool(), routed)
        assert int(counts_BE.sum()) == int(routed.sum())


def test_golden_map(implementation, device):
    routed = torch.tensor(GOLDEN_MAP, device=device, dtype=torch.bool)
    _, ids_TK, counts_BE = implementation.route_count(torch.rand(4, 4, device=device), routed, 2)
    assert ids_TK.tolist() == [[0, 2], [1, 2], [0, 3], [0, 1]]
    row_of_slot_TK, meta = implementation.route_place(ids_TK, counts_BE, 1, 0)
    token_of_row = sorted((row, t) for t, rows in enumerate(row_of_slot_TK.tolist()) for row in rows)
    assert [t for _, t in token_of_row] == [0, 2, 3, 1, 3, 0, 1, 2]
    assert meta[:4].tolist() == [3, 2, 2, 1]
    _, meta = implementation.route_place(ids_TK, counts_BE, 4, 0)
    assert meta[4 * reference.PADDED_BINS : 4 * reference.PADDED_BINS + 4].tolist() == [4, 8, 12, 16]


def test_golden_capacity(implementation, device):
    ids_TK = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 2]], device=device, dtype=torch.int32)
    counts_BE = implementation.id_count(ids_TK, 4)
    for _ in range(3):
        row_of_slot_TK, _ = implementation.route_place(ids_TK, counts_BE, 1, 2)
        assert row_of_slot_TK.tolist() == [[0, 2], [1, 3], [-1, 4], [-1, 5]]  # assignments 4 and 6 are dropped


@pytest.mark.parametrize(
    "counts, multiple, padded", [([3, 2, 2, 1, 0, 0], 4, [4, 4, 4, 4, 0, 0]), ([44, 0, 1], 32, [64, 0, 32])]
)
def test_golden_alignment(implementation, device, counts, multiple, padded):
    ids_TK = torch.tensor([[e] for e, n in enumerate(counts) for _ in range(n)], device=device, dtype=torch.int32)
    E = len(counts)
    _, meta = implementation.route_place(ids_TK, implementation.id_count(ids_TK, E), multiple, 0)
    assert meta[E : 2 * E].tolist() == padded


def test_all_tokens_to_one_expert(implementation, device):
    ids_TK = torch.zeros(512, 1, device=device, dtype=torch.int32)
    row_of_slot_TK, _ = implementation.route_place(ids_TK, implementation.id_count(ids_TK, 3), 1, 0)
    assert row_of_slot_TK[:, 0].tolist() == list(range(512))


def test_ids_in_any_order_and_replayed_without_route(implementation, device):
    ids_TK = torch.tensor([[3, -1, 0], [-1, -1, -1], [0, 3, 2]], device=device, dtype=torch.int32)
    row_of_slot_TK, meta = implementation.route_place(ids_TK, implementation.id_count(ids_TK, 4), 2, 0)
    assert row_of_slot_TK.tolist() == [[4, -1, 0], [-1, -1, -1], [1, 5, 2]]
    assert meta[16:].tolist() == [2, 0, 1, 2, 0]


def test_rows_beyond_the_width_are_counted(implementation, device):
    routed = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1]], device=device, dtype=torch.bool)
    _, ids_TK, counts_BE = implementation.route_count(torch.rand(3, 3, device=device), routed, 2)
    assert ids_TK.tolist() == [[0, 1], [0, -1], [0, 1]]
    _, meta = implementation.route_place(ids_TK, counts_BE, 1, 0)
    assert meta[-4:].tolist() == [3, 2, 0, 2]  # counts, then the overflow counter


def test_a_nan_probability_stays_in_its_slot(implementation, device):
    probs = torch.tensor([[float("nan"), 0.5, 0.25], [0.5, 0.5, 0.125]], device=device)
    routed = torch.tensor([[1, 1, 0], [0, 1, 1]], device=device, dtype=torch.bool)
    probs_TK, _, _ = implementation.route_count(probs, routed, 2)
    assert probs_TK[0].isnan().tolist() == [True, False]
    assert probs_TK[1].tolist() == [0.5, 0.125]


@pytest.mark.parametrize("map_dtype", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
def test_integer_and_strided_maps(triton_kernels, twin, device, map_dtype):
    case = Case(T=7, E=6, K=3)
    routed = routing_map(case, device).to(map_dtype) * (1 if map_dtype == torch.bool else 2)
    wide = torch.zeros(7, 2, 6, device=device, dtype=map_dtype)
    wide[:, 1] = routed
    probs = probabilities(case, device)
    expected = twin.route_count(probs, routed, 3)
    for strided_map, strided_probs in ((wide[:, 1], probs), (routed, probs.t().contiguous().t())):
        got = triton_kernels.route_count(strided_probs, strided_map, 3)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


def test_poisoned_memory_is_overwritten_and_repeats_are_equal(triton_kernels, twin, device, poisoned_memory):
    case = Case(T=19, E=12, K=4, M=16)
    routed, probs = routing_map(case, device), probabilities(case, device)
    runs = []
    for _ in range(3):
        probs_TK, ids_TK, counts_BE = triton_kernels.route_count(probs, routed, case.K)
        row_of_slot_TK, meta = triton_kernels.route_place(ids_TK, counts_BE, case.M, 0)
        dense = triton_kernels.route_count_backward(probs_TK, ids_TK, case.E, torch.float32)
        runs.append([probs_TK, ids_TK, counts_BE, row_of_slot_TK, meta, dense])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
    assert torch.equal(dense, torch.where(routed, probs, 0.0))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(probs=torch.rand(4, 3)), r"probs \(4, 3\) and routing map \(4, 8\): expected equal"),
        (dict(routing_map=torch.rand(4, 8)), "routing map of torch.float32: expected bool or an integer"),
        (dict(probs=torch.zeros(4, 8, dtype=torch.int32)), "probs of torch.int32: expected one of"),
        (dict(topk=0), "topk=0: expected at least 1"),
        (dict(probs=torch.rand(4)), r"probs \(4,\) and routing map \(4, 8\): expected equal"),
        (
            dict(probs=torch.rand(4, 0), routing_map=torch.zeros(4, 0, dtype=torch.bool)),
            "0 experts: expected 1 to 4096",
        ),
        (
            dict(probs=torch.rand(1, 4097), routing_map=torch.zeros(1, 4097, dtype=torch.bool)),
            "4097 experts: expected 1 to 4096",
        ),
        (dict(topk=2**30), "4 tokens of 1073741824 slots: slot numbers are int32, at most 2147483647"),
    ],
)
def test_route_count_refuses(triton_kernels, device, change, message):
    args = dict(probs=torch.rand(4, 8), routing_map=torch.zeros(4, 8, dtype=torch.bool), topk=2) | change
    probs, routed = args["probs"].to(device), args["routing_map"].to(device)
    with pytest.raises(ValueError, match=message):
        triton_kernels.route_count(probs, routed, args["topk"])


def test_id_count_refuses(triton_kernels, device):
    ids = torch.zeros(4, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"expert_ids \(4, 2\) of torch.int64.*: expected contiguous \(T, K\) of torch.int32"):
        triton_kernels.id_count(ids.long(), 8)
    with pytest.raises(ValueError, match="0 experts: expected 1 to 4096"):
        triton_kernels.id_count(ids, 0)


def test_route_count_backward_refuses(triton_kernels, device):
    ids, grad = torch.zeros(4, 2, dtype=torch.int32, device=device), torch.zeros(4, 2, device=device)
    with pytest.raises(ValueError, match="gradient of dtype torch.int32: expected one of"):
        triton_kernels.route_count_backward(grad, ids, 8, torch.int32)
    with pytest.raises(ValueError, match="grad_probs .* of torch.bfloat16.*: expected contiguous .* of torch.float32"):
        triton_kernels.route_count_backward(grad.bfloat16(), ids, 8, torch.float32)
    with pytest.raises(ValueError, match=r"expert_ids \(3, 2\) .*: expected contiguous \(4, 2\) of torch.int32"):
        triton_kernels.route_count_backward(grad, ids[:3], 8, torch.float32)
    with pytest.raises(ValueError, match="4097 experts: expected 1 to 4096"):
        triton_kernels.route_count_backward(grad, ids, 4097, torch.float32)


def test_route_place_refuses(triton_kernels, device):
    ids = torch.zeros(4, 2, dtype=torch.int32, device=device)
    counts = torch.zeros(1, 9, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="expert_ids .*expected contiguous"):
        triton_kernels.route_place(ids.long(), counts, 1, 0)
    with pytest.raises(ValueError, match=r"counts .*expected \(B, E \+ 1\) int32 with unit stride"):
        triton_kernels.route_place(ids, counts[0], 1, 0)
    with pytest.raises(ValueError, match="pad_multiple=0"):
        triton_kernels.route_place(ids, counts, 0, 0)
    with pytest.raises(ValueError, match="capacity=-1: expected at least 1 and at least 0"):
        triton_kernels.route_place(ids, counts, 1, -1)
    with pytest.raises(ValueError, match=r"counts .*expected \(B, E \+ 1\) int32 with unit stride"):
        triton_kernels.route_place(ids, counts.long(), 1, 0)
    with pytest.raises(ValueError, match="row numbers are int32"):
        triton_kernels.route_place(ids, counts, 1, 2**29)
    with pytest.raises(ValueError, match="row numbers are int32"):
        triton_kernels.route_place(ids, counts, 2**30, 0)
