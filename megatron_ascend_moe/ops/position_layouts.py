"""Which launch serves which layout of the MegaBlocks-signature operations, whatever implements it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ascend_moe import kernels
from megatron_ascend_moe.kernels.checks import check_vector


@dataclass(frozen=True)
class Positions:
    """Where sorted assignments lie among the experts' rows.

    `padded_bins` for padded segments, `expert_capacity` for bins of fixed capacity, neither where experts' rows
    follow each other. See `kernels.positions_reference` for the shared arguments.
    """

    indices: Tensor
    bin_ids: Tensor
    bins: Tensor
    top_k: int
    padded_bins: Tensor | None = None
    expert_capacity: int | None = None

    def gather(self, x: Tensor, weights: Tensor | None = None, num_rows: int | None = None) -> Tensor:
        """Token order to expert order; `num_rows` spares the padded layout its device-to-host sync."""
        launches = kernels.select_positions("auto", x.device)
        if self.expert_capacity is not None:
            return launches.binned_gather(
                x, self.indices, self.bin_ids, weights, self.bins, self.expert_capacity, self.top_k
            )
        if self.padded_bins is not None:
            return launches.padded_gather(
                x, self.indices, self.bin_ids, weights, self.bins, self.padded_bins, self.top_k, num_rows
            )
        return launches.gather(x, self.indices, self.bin_ids, weights, self.bins, self.top_k)

    def scatter(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Expert order to token order, summing the assignments of a token."""
        launches = kernels.select_positions("auto", x.device)
        if self.expert_capacity is not None:
            return launches.binned_scatter(x, self.indices, self.bin_ids, weights, self.bins, self.top_k)
        if self.padded_bins is not None:
            return launches.padded_scatter(
                x, self.indices, self.bin_ids, weights, self.bins, self.padded_bins, self.top_k
            )
        return launches.scatter(x, self.indices, self.bin_ids, weights, self.bins, self.top_k)

    def weight_gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """Gradient of `scatter`'s weights, by assignment id, fp32."""
        launches = kernels.select_positions("auto", x.device)
        if self.expert_capacity is not None:
            return launches.binned_scatter_wgrad(x, grad, self.indices, self.bin_ids, self.bins, self.top_k)
        if self.padded_bins is not None:
            return launches.padded_scatter_wgrad(
                x, grad, self.indices, self.bin_ids, self.bins, self.padded_bins, self.top_k
            )
        return launches.scatter_wgrad(x, grad, self.indices, self.bin_ids, self.bins, self.top_k)


def bin_ids_of(indices: Tensor, bins: Tensor) -> Tensor:
    """The expert of each sorted position, (N) int32, from inclusive cumulative counts."""
    check_vector("indices", indices, torch.int32)
    check_vector("bins", bins, torch.int32)
    positions = torch.arange(indices.numel(), dtype=torch.int32, device=bins.device)
    return torch.searchsorted(bins, positions, right=True, out_int32=True)
