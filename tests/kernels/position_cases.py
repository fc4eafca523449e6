"""Routings for the position-major kernels, and what the operations must give, by plain loops over assignments."""

from dataclasses import dataclass

import torch

LAYOUTS = ("plain", "padded", "binned")


@dataclass(frozen=True)
class Case:
    """T tokens of K assignments to E experts; `routing` names how they are spread."""

    name: str
    T: int
    K: int
    E: int
    H: int
    dtype: torch.dtype = torch.bfloat16
    pad_to: int = 4
    capacity: int = 6
    routing: str = "random"
    weighted: bool = True

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def experts(self) -> torch.Tensor:
        """(T K) int32 expert of each assignment."""
        generator = torch.Generator().manual_seed(self.T + self.E + self.H)
        if self.routing == "one expert":
            return torch.full((self.T * self.K,), self.E // 2, dtype=torch.int32)
        if self.routing == "even":  # every expert gets the same number of assignments
            return torch.arange(self.T * self.K, dtype=torch.int32) % self.E
        if self.routing == "on and one over the multiple":  # pad_to, pad_to + 1, 0, …
            counts = [(self.pad_to, self.pad_to + 1, 0)[e % 3] for e in range(self.E)]
            assert sum(counts) == self.T * self.K, "the case's T and K do not fit its counts"
            experts = torch.repeat_interleave(torch.arange(self.E), torch.tensor(counts))
            return experts[torch.randperm(len(experts), generator=generator)].to(torch.int32)
        return torch.rand(self.T, self.E, generator=generator).topk(self.K).indices.flatten().to(torch.int32)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = (
    Case("empty experts and overflow", T=37, K=2, E=16, H=100, capacity=3),
    Case("exactly full capacity", T=32, K=1, E=8, H=129, dtype=FP16, capacity=4, routing="even"),
    Case("counts on and one over the multiple", T=51, K=1, E=9, H=7, dtype=FP32, pad_to=8, capacity=8,
         routing="on and one over the multiple"),
    Case("many experts in one block of positions", T=20, K=4, E=64, H=123, dtype=FP32, capacity=2),
    Case("one expert over many programs", T=130, K=1, E=5, H=200, routing="one expert", capacity=100),
    Case("one column and idle programs", T=3, K=1, E=8, H=1, dtype=FP32, capacity=1, weighted=False),
    *(
        Case(f"top {K}", T=7, K=K, E=12, H=16, dtype=(BF16, FP16, FP32)[K % 3], capacity=K, weighted=K % 2 == 0)
        for K in range(1, 11)
    ),
    Case("no tokens", T=0, K=2, E=4, H=8, capacity=3),
    Case("no weights", T=40, K=3, E=8, H=768, dtype=FP16, weighted=False),
    Case("a width of no power of two", T=24, K=2, E=8, H=2880, capacity=4),
    # Shapes on which the vendor's ports of these kernels are wrong.
    Case("vendor: weight gradient beyond 5120 columns", T=160, K=2, E=4, H=5200, pad_to=16, capacity=64),
    Case("vendor: weight gradient of 7168 columns", T=160, K=2, E=4, H=7168, pad_to=16, capacity=64, weighted=False),
    Case("vendor: fewer rows than cores times block", T=64, K=4, E=8, H=4, dtype=FP32, pad_to=8, capacity=40),
    Case("vendor: weights by assignment in padded gather", T=48, K=2, E=6, H=64, dtype=FP32, pad_to=16),
    Case("wide rows in fp32", T=6, K=2, E=4, H=7168, dtype=FP32, capacity=2),
    Case("rows of 5120", T=10, K=1, E=4, H=5120, capacity=2),
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """What the launches take, on the device under test; `assignment_of_row[layout][r]` is the id of a row or -1."""

    case: Case
    indices: torch.Tensor
    bin_ids: torch.Tensor
    bins: torch.Tensor
    padded_bins: torch.Tensor
    tokens: torch.Tensor
    weights: torch.Tensor | None
    assignment_of_row: dict[str, list[int]]

    def rows(self, layout: str) -> torch.Tensor:
        """Rows in expert order, NaN wherever the layout holds no assignment; (E, C, H) where binned."""
        generator = torch.Generator().manual_seed(7)
        ids = torch.tensor(self.assignment_of_row[layout], dtype=torch.long)
        rows = torch.randn(len(ids), self.case.H, generator=generator)
        rows[ids < 0] = float("nan")
        rows = rows.to(self.tokens)
        return rows.view(self.case.E, self.case.capacity, self.case.H) if layout == "binned" else rows


def make_inputs(case: Case, device: torch.device) -> Inputs:
    experts = case.experts()
    by_expert = [[a for a, e in enumerate(experts.tolist()) if e == expert] for expert in range(case.E)]
    counts = [len(ids) for ids in by_expert]
    padded = [-(-count // case.pad_to) * case.pad_to for count in counts]
    generator = torch.Generator().manual_seed(case.T)
    order = [a for ids in by_expert for a in ids]
    padded_rows = [row for ids, room in zip(by_expert, padded, strict=True) for row in _fill(ids, room)]
    binned_rows = [row for ids in by_expert for row in _fill(ids[: case.capacity], case.capacity)]

    def integers(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Inputs(
        case=case,
        indices=integers(order),
        bin_ids=integers([expert for expert, count in enumerate(counts) for _ in range(count)]),
        bins=integers(counts).cumsum(0, dtype=torch.int32),
        padded_bins=integers(padded).cumsum(0, dtype=torch.int32),
        tokens=torch.randn(case.T, case.H, generator=generator).to(device, case.dtype),
        weights=torch.rand(case.T * case.K, generator=generator).to(device) if case.weighted else None,
        assignment_of_row={"plain": order, "padded": padded_rows, "binned": binned_rows},
    )


def _fill(ids: list[int], room: int) -> list[int]:
    return ids + [-1] * (room - len(ids))


def expected_gather(inputs: Inputs, layout: str) -> torch.Tensor:
    """Row by row: the token's row times its weight, rounded once, or zeros."""
    case = inputs.case
    tokens, weights = inputs.tokens.cpu(), None if inputs.weights is None else inputs.weights.cpu()
    rows = torch.zeros(len(inputs.assignment_of_row[layout]), case.H, dtype=case.dtype)
    for row, assignment in enumerate(inputs.assignment_of_row[layout]):
        if assignment >= 0:
            values = tokens[assignment // case.K]
            rows[row] = values if weights is None else values.float() * weights[assignment]
    return rows.view(case.E, case.capacity, case.H) if layout == "binned" else rows


def expected_scatter(inputs: Inputs, layout: str, rows: torch.Tensor) -> torch.Tensor:
    """Token by token: the fp32 sum of its rows in slot order, rounded once."""
    case, rows = inputs.case, rows.cpu().reshape(-1, inputs.case.H)
    row_of = {a: row for row, a in enumerate(inputs.assignment_of_row[layout]) if a >= 0}
    out = torch.zeros(case.T, case.H)
    for assignment in range(case.T * case.K):
        if assignment in row_of:
            term = rows[row_of[assignment]].float()
            out[assignment // case.K] += term if inputs.weights is None else term * inputs.weights[assignment].cpu()
    return out.to(case.dtype)


def expected_weight_gradient(inputs: Inputs, layout: str, rows: torch.Tensor) -> torch.Tensor:
    """Assignment by assignment: the dot, in fp64, of its row with its token's gradient (`tokens`)."""
    case, rows, grad = inputs.case, rows.cpu().reshape(-1, inputs.case.H), inputs.tokens.cpu()
    out = torch.zeros(case.T * case.K)
    for row, assignment in enumerate(inputs.assignment_of_row[layout]):
        if assignment >= 0:
            out[assignment] = torch.dot(rows[row].double(), grad[assignment // case.K].double())
    return out
