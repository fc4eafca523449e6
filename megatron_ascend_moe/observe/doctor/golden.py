"""Four tokens, four experts, two routes each, with every number known: `python -m … KERNELS DEVICE`."""

import sys

import torch

from megatron_ascend_moe import kernels
from megatron_ascend_moe.ops.combine import combine_rows
from megatron_ascend_moe.ops.permute import permute_rows
from megatron_ascend_moe.routing.plan import plan_routes
from megatron_ascend_moe.routing.route_adapter import compact_routes

ROUTING_MAP = [[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 0, 0]]
EXPERT_IDS = [[0, 2], [1, 2], [0, 3], [0, 1]]
COUNTS = [3, 2, 2, 1]
PADDED_BINS = [4, 8, 12, 16]
TOKEN_OF_ROW = [0, 2, 3, None, 1, 3, None, None, 0, 1, None, None, 2, None, None, None]
PAD_MULTIPLE, HIDDEN = 4, 48


def run(kernels_name: str, device: str) -> None:
    """Route, permute, scale, combine and go back, on small integers, so that every result is exact.

    Raises:
        RuntimeError: a result that differs; the message names it.
    """
    if device == "npu":
        import torch_npu  # noqa: F401 - registers the device

    kernel_set = kernels.select(kernels_name, device)
    routing_map = torch.tensor(ROUTING_MAP, dtype=torch.bool, device=device)
    # the probabilities are powers of two: their products with small integers are exact in any dtype
    probs = torch.where(routing_map, 0.5, 0.0).requires_grad_()
    hidden = (torch.arange(4 * HIDDEN, device=device).view(4, HIDDEN) % 13).float().requires_grad_()

    probs_TK, expert_ids_TK, counts_BE = compact_routes(probs, routing_map, 2, False, kernel_set)
    plan = plan_routes(expert_ids_TK, 4, PAD_MULTIPLE, counts_BE=counts_BE, kernel_set=kernel_set)
    _expect("expert ids", expert_ids_TK.tolist(), EXPERT_IDS)
    _expect("counts", plan.counts_E.tolist(), COUNTS)
    _expect("padded_bins", plan.padded_bins_E.tolist(), PADDED_BINS)

    rows, row_probs = permute_rows(hidden, plan, probs_TK, num_rows=16, kernel_set=kernel_set)
    wanted = [[0.0] * HIDDEN if token is None else hidden[token].tolist() for token in TOKEN_OF_ROW]
    _expect("permuted rows", rows.tolist(), wanted)
    _expect("permuted probabilities", row_probs.tolist(), [0.0 if t is None else 0.5 for t in TOKEN_OF_ROW])

    out = combine_rows(rows * row_probs.unsqueeze(1), plan, kernel_set=kernel_set)
    _expect("combined rows", out.tolist(), hidden.tolist())  # two routes of 0.5

    out.sum().backward()
    _expect("gradient of the tokens", hidden.grad.tolist(), [[1.0] * HIDDEN] * 4)
    sums = hidden.detach().sum(1, keepdim=True)
    _expect("gradient of the probabilities", probs.grad.tolist(), (sums * routing_map).tolist())


def _expect(name: str, got: list, wanted: list) -> None:
    if got != wanted:
        raise RuntimeError(f"{name}: got {str(got)[:120]}, expected {str(wanted)[:120]}")


if __name__ == "__main__":
    run(*sys.argv[1:3])
