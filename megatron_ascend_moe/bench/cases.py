"""What is measured for a shape: each kernel and the dispatcher's own sequence, with the bytes that must move."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ascend_moe.bench.shapes import Shape
from megatron_ascend_moe.bench.timing import INPUT_SETS
from megatron_ascend_moe.kernels import KernelSet, reference


@dataclass(frozen=True)
class Inputs:
    """Inputs of a shape and the plan of its first routing map."""

    shape: Shape
    dtype: torch.dtype
    probs_TE: list[Tensor]
    map_TE: list[Tensor]
    x_TH: list[Tensor]
    y_PH: list[Tensor]
    probs_TK: Tensor
    expert_ids_TK: Tensor
    row_of_slot_TK: Tensor
    counts_E: Tensor
    padded_bins_E: Tensor
    num_rows: int
    random_row_P1: Tensor  # (P, 1) int32, a random order of the rows


@dataclass(frozen=True)
class Case:
    """One measurement: `call(i)` works on the i-th inputs; `parts` are the bytes that must move, one number for a
    kernel, one a kernel for a sequence: copies of these sizes are its floor."""

    name: str
    call: Callable[[int], object]
    parts: tuple[int, ...]


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, kernels: KernelSet) -> Inputs:
    """Random inputs with exactly K routes a token, and their plan by `kernels`."""
    generator = torch.Generator(device).manual_seed(0)
    T, H, E, K = shape.T, shape.H, shape.E, shape.K
    first = torch.rand(T, E, device=device, generator=generator).softmax(-1)
    # The same rows in other orders: other inputs, equal counts, so that one number of rows serves all.
    orders = [torch.randperm(T, device=device, generator=generator) for _ in range(INPUT_SETS)]
    probs = [first[order] for order in orders]
    maps = [torch.zeros(T, E, device=device, dtype=torch.bool).scatter_(1, p.topk(K).indices, True) for p in probs]
    probs_TK, ids_TK, counts_BE = kernels.route_count(probs[0], maps[0], K)
    row_of_slot_TK, meta = kernels.route_place(ids_TK, counts_BE, shape.M, 0)
    vectors = meta[: 5 * E].view(5, E)
    num_rows = int(vectors[reference.PADDED_BINS][-1])

    def rows(count: int) -> list[Tensor]:
        return [torch.randn(count, H, device=device, generator=generator).to(dtype) for _ in range(INPUT_SETS)]

    plan = (row_of_slot_TK, vectors[reference.COUNTS], vectors[reference.PADDED_BINS], num_rows)
    order = torch.randperm(num_rows, device=device, generator=generator).to(torch.int32).unsqueeze(1)
    return Inputs(shape, dtype, probs, maps, rows(T), rows(num_rows), probs_TK, ids_TK, *plan, order)


def make_cases(inputs: Inputs, kernels: KernelSet) -> list[Case]:
    """The kernels, then the sequence, with the bytes that must move: the traffic that the kernels' docstrings state.

    Before them what rows of this width cost at random: the layout's rows copied one by one, written at random (permute
    of one slot) and read at random (combine of one slot).
    """
    shape, plan = inputs.shape, (inputs.row_of_slot_TK, inputs.counts_E, inputs.padded_bins_E)
    T, E, K, P = shape.T, shape.E, shape.K, inputs.num_rows
    row = shape.H * inputs.x_TH[0].element_size()
    routed, probs_TK = T * K, inputs.probs_TK
    adapter = T * E + 4 * routed + 8 * routed  # the map, the routed probabilities; ids and probs out
    route = adapter + 8 * routed  # and ids in, row numbers out
    dense = 8 * routed + 4 * T * E
    x, y = inputs.x_TH, inputs.y_PH

    def adapter_and_plan(i: int) -> tuple[Tensor, ...]:
        probs, ids, counts = kernels.route_count(_turn(inputs.probs_TE, i), _turn(inputs.map_TE, i), K)
        return probs, ids, *kernels.route_place(ids, counts, shape.M, 0)

    def sequence(i: int) -> tuple[object, ...]:
        probs, ids, row_of_slot, meta = adapter_and_plan(i)
        vectors = meta[: 5 * E].view(5, E)
        segments = (vectors[reference.COUNTS], vectors[reference.PADDED_BINS])
        rows = kernels.permute_rows(_turn(x, i), row_of_slot, *segments, P, probs)
        out = kernels.combine_rows(_turn(y, i), row_of_slot)
        grad_rows = kernels.permute_rows(_turn(x, i + 1), row_of_slot, *segments, P)
        grad_x, grad_probs = kernels.combine_rows(_turn(y, i + 1), row_of_slot, None, _turn(grad_scalars, i))
        return rows, out, grad_rows, grad_x, kernels.route_count_backward(grad_probs, ids, E, torch.float32)

    grad_scalars = [torch.randn(P, device=x[0].device) for _ in range(INPUT_SETS)]
    permute, combine = (T + P) * row, (routed + T) * row
    order, all_P = inputs.random_row_P1, torch.full((1,), P, dtype=torch.int32, device=x[0].device)
    return [
        Case("rows to random places", lambda i: kernels.permute_rows(_turn(y, i), order, all_P, all_P, P), (2 * P * row,)),
        Case("rows from random places", lambda i: kernels.combine_rows(_turn(y, i), order), (2 * P * row,)),
        Case("adapter + plan", adapter_and_plan, (route,)),
        Case("permute + pad", lambda i: kernels.permute_rows(_turn(x, i), *plan, P, probs_TK), (permute,)),
        Case("combine", lambda i: kernels.combine_rows(_turn(y, i), plan[0]), (combine,)),
        Case("combine, weighted", lambda i: kernels.combine_rows(_turn(y, i), plan[0], probs_TK), (combine,)),
        Case(
            "combine backward, weighted",
            lambda i: kernels.combine_rows_backward(_turn(x, i), _turn(y, i), plan[0], probs_TK, *plan[1:]),
            ((T + routed + P) * row,),
        ),
        Case(
            "adapter backward",
            lambda i: kernels.route_count_backward(probs_TK, inputs.expert_ids_TK, E, torch.float32),
            (dense,),
        ),
        Case("dispatcher sequence", sequence, (route, permute, combine, permute, combine, dense)),
    ]


def check(inputs: Inputs, kernels: KernelSet) -> None:
    """Compare every kernel with its plain-torch twin on these very inputs.

    Raises:
        RuntimeError: a result differs; nothing is timed then.
    """
    shape, x, y = inputs.shape, inputs.x_TH[0], inputs.y_PH[0]
    got_probs, got_ids, counts_BE = kernels.route_count(inputs.probs_TE[0], inputs.map_TE[0], shape.K)
    probs, ids, counts = reference.route_count(inputs.probs_TE[0], inputs.map_TE[0], shape.K)
    _require("adapter", torch.equal(got_probs, probs) and torch.equal(got_ids, ids))
    got, expected = kernels.route_place(ids, counts_BE, shape.M, 0), reference.route_place(ids, counts, shape.M, 0)
    _require("plan", all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)))
    plan = (inputs.row_of_slot_TK, inputs.counts_E, inputs.padded_bins_E)
    for name, args in {
        "permute_rows": (x, *plan, inputs.num_rows, probs),
        "combine_rows": (y, plan[0], probs, inputs.y_PH[1][:, 0].to(torch.float32).contiguous()),
    }.items():
        got, expected = getattr(kernels, name)(*args), getattr(reference, name)(*args)
        _require(name, all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)))
    args = (x, y, plan[0], probs, *plan[1:])
    got, expected = kernels.combine_rows_backward(*args), reference.combine_rows_backward(*args)
    close = torch.allclose(got[1], expected[1], rtol=1e-3, atol=1e-2)
    _require("combine_rows_backward", torch.equal(got[0], expected[0]) and close)
    got = kernels.route_count_backward(probs, ids, shape.E, torch.float32)
    _require("adapter backward", torch.equal(got, torch.where(inputs.map_TE[0], inputs.probs_TE[0], 0.0)))
    order = inputs.random_row_P1
    _require("combine_rows of one slot", torch.equal(kernels.combine_rows(y, order)[0], y[order.flatten()]))
    all_P = torch.full((1,), inputs.num_rows, dtype=torch.int32, device=y.device)
    moved, _ = kernels.permute_rows(y, order, all_P, all_P, inputs.num_rows)
    _require("permute_rows of one slot", torch.equal(moved[order.flatten()], y))


def _require(name: str, holds: bool) -> None:
    if not holds:
        raise RuntimeError(f"{name}: the kernel's result differs from its plain-torch twin's; nothing was timed")


def _turn(values: list[Tensor], i: int) -> Tensor:
    return values[i % len(values)]
