"""Tiles of the position-major kernels: from the Unified Buffer's size on Ascend, from the block size on CUDA."""

import functools
from dataclasses import dataclass

from megatron_ascend_moe.backend.device import Target
from megatron_ascend_moe.backend.launch import next_power_of_two
from megatron_ascend_moe.backend.tiles import RowBuffers, plan_rows

BLOCK = 64  # positions whose indices (and weights, and dots) are held at a time on Ascend
MAX_ROWS = 16  # most rows of a tile: beyond it a larger DMA gains little, and short experts leave it part empty

_VECTORS = 3 * 4 * BLOCK


def _row_buffers(kernel: str, itemsize: int) -> RowBuffers:
    """What a kernel keeps live, as the compiler's memory plans show. Scaling widens a narrow row to fp32."""
    widened = itemsize < 4
    return {
        "gather": RowBuffers(tiles=1, constant_tiles=1, vector_bytes=_VECTORS),
        "scaled_gather": RowBuffers(rows=1, tiles=1, constant_tiles=1, fp32_rows=widened, vector_bytes=_VECTORS),
        "scatter": RowBuffers(tiles=1, constant_tiles=1, vector_bytes=_VECTORS),
        "scaled_scatter": RowBuffers(
            rows=1, tiles=1, constant_tiles=1, fp32_rows=2 * widened, vector_bytes=_VECTORS
        ),
        "weight_gradient": RowBuffers(rows=2, fp32_rows=3 if widened else 1, vector_bytes=_VECTORS),
    }[kernel]


@dataclass(frozen=True)
class PositionTile:
    """Positions of a block, a multiple of the rows of a tile, and the columns moved at a time."""

    block: int
    rows: int
    columns: int
    num_warps: int


@functools.cache
def position_tile(kernel: str, target: Target, H: int, itemsize: int) -> PositionTile:
    """Tile of a position-major kernel: gather, scaled_gather, scatter, scaled_scatter or weight_gradient.

    Raises:
        ValueError: the buffers do not fit the Unified Buffer.
    """
    if not target.ascend:
        return PositionTile(4, 4, min(next_power_of_two(H), 1024), 4)
    plan = plan_rows(
        H,
        itemsize,
        target.ub_bytes,
        _row_buffers(kernel, itemsize),
        kernel=kernel,
        max_sub_block=1 if kernel == "weight_gradient" else MAX_ROWS,
    )
    rows = next_power_of_two(plan.sub_block + 1) // 2  # so that a block is a whole number of tiles
    columns = plan.block_x if target.any_tile_width else next_power_of_two(plan.block_x)
    return PositionTile(BLOCK, rows, columns, 1)
