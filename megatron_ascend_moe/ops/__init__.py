"""Autograd operations. Here by name: those with MegaBlocks' signatures, so that porting is changing an import.

The functions hide the modules of the same names, as they do in MegaBlocks.
"""

from megatron_ascend_moe.ops.gather import binned_gather, gather, padded_gather
from megatron_ascend_moe.ops.scatter import binned_scatter, padded_scatter, scatter
from megatron_ascend_moe.ops.sort import histogram, inclusive_cumsum, indices_and_bins, sort

__all__ = [
    "binned_gather",
    "binned_scatter",
    "gather",
    "histogram",
    "inclusive_cumsum",
    "indices_and_bins",
    "padded_gather",
    "padded_scatter",
    "scatter",
    "sort",
]
