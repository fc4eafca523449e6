"""Random routing cases for the kernel tests, made from a seed so that a failure's message is the whole case."""

from dataclasses import dataclass

import torch

from megatron_ascend_moe.kernels import reference


@dataclass(frozen=True)
class Case:
    """T tokens over E experts, K slots, hidden size H; pad multiple M or, where it is not 0, capacity C."""

    T: int = 11
    E: int = 8
    K: int = 2
    H: int = 64
    M: int = 4
    C: int = 0
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def routing_map(case: Case, device, max_routes: int | None = None) -> torch.Tensor:
    """(T, E) bool with 0 to max_routes routes in a row (K by default); the first and the last row have none, nor
    has expert 1, where there are rows and experts enough."""
    generator = case.generator()
    order = torch.rand(case.T, case.E, generator=generator).argsort(1).argsort(1)
    most = min(case.E, case.K if max_routes is None else max_routes)
    routes = torch.randint(0, most + 1, (case.T, 1), generator=generator)
    if case.T > 2:
        routes[0] = routes[-1] = 0
    routed = order < routes
    if case.E > 2:
        routed[:, 1] = False
    return routed.to(device)


def probabilities(case: Case, device, dtype=torch.float32) -> torch.Tensor:
    return torch.rand(case.T, case.E, generator=case.generator()).to(device, dtype)


def rows(case: Case, count: int, device, seed: int = 1) -> torch.Tensor:
    """(count, H) normal values of the case's dtype."""
    generator = torch.Generator().manual_seed(case.seed + 1000 * seed)
    return torch.randn(count, case.H, generator=generator).to(device, case.dtype)


@dataclass(frozen=True)
class Layout:
    """The twin's plan of a case, and what the row kernels take from it."""

    row_of_slot_TK: torch.Tensor
    counts_E: torch.Tensor
    padded_bins_E: torch.Tensor
    num_rows: int
    probs_TK: torch.Tensor


def layout(case: Case, device) -> Layout:
    probs_TK, ids_TK, counts_BE = reference.route_count(probabilities(case, device), routing_map(case, device), case.K)
    row_of_slot_TK, meta = reference.route_place(ids_TK, counts_BE, case.M, case.C)
    vectors = meta[: 5 * case.E].view(5, case.E)
    padded_bins_E = vectors[reference.PADDED_BINS]
    num_rows = int(padded_bins_E[-1])
    return Layout(row_of_slot_TK, vectors[reference.COUNTS], padded_bins_E, num_rows, probs_TK)
