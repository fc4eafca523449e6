"""The same work by other libraries, where they can be imported: forward and backward of dispatch and combine.

What each does is stated with it, because none does exactly the same: `stock` pads nothing, `megablocks` starts from
expert ids and leaves out the adapter and the probabilities. All are called as their users call them, syncs included.
"""

import importlib
from collections.abc import Callable

import torch

from megatron_ascend_moe.backend.launch import MAX_INT32
from megatron_ascend_moe.bench.cases import Inputs


def stock(inputs: Inputs) -> Callable[[int], object]:
    """Megatron-Core's unfused permute and unpermute, no padding, probabilities permuted along."""
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    T, K = inputs.shape.T, inputs.shape.K

    def call(i: int) -> None:
        x, probs, routed, grad = _leaves(inputs, i)
        rows, row_probs, order, *_ = moe_utils.permute(x, routed, probs=probs, num_out_tokens=T * K)
        out = moe_utils.unpermute(rows, order, x.shape, routing_map=routed)
        torch.autograd.grad([out, row_probs], [x, probs], [grad, row_probs.detach()])

    return call


def te(inputs: Inputs) -> Callable[[int], object]:
    """TransformerEngine's permute with padding and probabilities, and unpermute."""
    permutation = importlib.import_module("transformer_engine.pytorch.permutation")

    def call(i: int) -> None:
        x, probs, routed, grad = _leaves(inputs, i)
        counts = routed.sum(0)
        rows, row_probs, row_ids, pad_offsets, _ = permutation.moe_permute_and_pad_with_probs(
            x, probs, routed.to(torch.int32), counts, inputs.shape.M
        )
        out = permutation.moe_unpermute(rows, row_ids, restore_shape=x.shape, pad_offsets=pad_offsets)
        torch.autograd.grad([out, row_probs], [x, probs], [grad, row_probs.detach()])

    return call


def megablocks(inputs: Inputs) -> Callable[[int], object]:
    """MegaBlocks' padded_gather and padded_scatter (no weights) and their backwards, which are each other; the plan
    by torch's sort, bincount and cumsum, from the expert ids of a top-k."""
    kernels = importlib.import_module("megablocks.backend.kernels")
    if inputs.y_PH[0].numel() > MAX_INT32:
        raise ValueError("its kernels leave their tensors' memory beyond 2^31 elements")
    E, K, M = inputs.shape.E, inputs.shape.K, inputs.shape.M
    ids = inputs.expert_ids_TK.flatten()

    def call(i: int) -> None:
        bin_ids, indices = torch.sort(ids, stable=True)
        counts = torch.bincount(ids, minlength=E)
        bins = counts.cumsum(0).int()
        padded_bins = ((counts + M - 1) // M * M).cumsum(0).int()
        plan = (indices.int(), bin_ids, None, bins, padded_bins, K)
        kernels.padded_gather(inputs.x_TH[i % 3], *plan)
        kernels.padded_scatter(inputs.y_PH[i % 3], *plan)
        kernels.padded_gather(inputs.x_TH[(i + 1) % 3], *plan)
        kernels.padded_scatter(inputs.y_PH[(i + 1) % 3], *plan)

    return call


def _leaves(inputs: Inputs, i: int) -> tuple[torch.Tensor, ...]:
    turn = i % len(inputs.x_TH)
    x, probs = inputs.x_TH[turn].detach().requires_grad_(), inputs.probs_TE[turn].detach().requires_grad_()
    return x, probs, inputs.map_TE[turn], inputs.x_TH[(i + 1) % len(inputs.x_TH)]


PEERS = {"stock": stock, "te": te, "megablocks": megablocks}
