"""Tiles of the row-map kernels: from the Unified Buffer's size on Ascend, from measurements on CUDA."""

import functools
from dataclasses import dataclass
from typing import Any

from megatron_ascend_moe.backend.device import Target
from megatron_ascend_moe.backend.launch import ceil_div, next_power_of_two
from megatron_ascend_moe.backend.tiles import RowBuffers, plan_rows, plan_tokens

ASCEND_BLOCK_TOKENS = 32  # tokens whose row numbers are held in the Unified Buffer at a time
ASCEND_LANES = 32  # experts of a tile are a multiple: one 32-byte block of the bool map


@dataclass(frozen=True)
class RouteTile:
    """A (tokens, experts) tile of a routing kernel, and how many programs' counts are read at a time."""

    experts: int
    slots: int
    tokens: int
    count_rows: int
    num_warps: int

    @property
    def constants(self) -> dict[str, Any]:
        return {"EXPERTS": self.experts, "SLOTS": self.slots, "TOKENS": self.tokens}


@dataclass(frozen=True)
class RowTile:
    """Columns of a row moved at a time, and on Ascend tokens whose slots are held at a time."""

    columns: int
    tokens: int
    block_slots: int
    slots: int
    num_warps: int

    @property
    def constants(self) -> dict[str, Any]:
        return {"COLUMNS": self.columns, "TOKENS": self.tokens, "BLOCK_SLOTS": self.block_slots}


def _width(target: Target, n: int, lanes: int) -> int:
    """Width of a tile that holds n: a whole number of lanes where the device allows it, else a power of two."""
    return ceil_div(n, lanes) * lanes if target.any_tile_width else next_power_of_two(n)


# Buffers of a (tokens, experts) tile, in bytes an element, that a routing kernel keeps live at once.
# As the compiler's memory plans show; placement has no such tile.
_ROUTE_TILE_BYTES = {"route_count": 144, "route_count_backward": 32, "id_count": 96, "route_place": 0}


@functools.cache
def route_tile(target: Target, E: int, K: int, kernel: str) -> RouteTile:
    """Tile of a routing kernel for E experts and K slots.

    Raises:
        ValueError: one token's experts do not fit the Unified Buffer.
    """
    if not target.ascend:
        return _cuda_route_tile(E, K, kernel)
    experts, slots = _width(target, E, ASCEND_LANES), _width(target, K, 8)
    tokens = plan_tokens(
        experts * _ROUTE_TILE_BYTES[kernel] + slots * 24,
        experts * 40,
        target.ub_bytes,
        kernel=kernel,
        max_tokens=ASCEND_BLOCK_TOKENS,
    )
    return RouteTile(experts, slots, tokens, 1, 1)


def route_programs(target: Target, T: int, E: int) -> int:
    """The most programs it is worth splitting T tokens over: each of them rescans the counts of all when it places."""
    if target.ascend:
        return target.cores
    return 128 if T * E <= 2**22 else 256


def _cuda_route_tile(E: int, K: int, kernel: str) -> RouteTile:
    """Measured on an H200: one wave of programs, tiles that stay in registers."""
    slots = next_power_of_two(K)
    if kernel == "route_count_words":
        words = max(2, next_power_of_two(ceil_div(E, 8)))
        return RouteTile(words, slots, max(1, min(32, 16384 // (slots * words))), 1, 8)
    experts = max(2, next_power_of_two(E))  # Triton-Ascend's interpreter cannot scan a single element
    if kernel == "route_count_backward":
        return RouteTile(experts, slots, max(1, min(64, 2048 // experts)), 1, 4)
    if kernel == "route_place":  # 128 routes are compared with each other at a time
        return RouteTile(experts, slots, max(1, 128 // slots), max(1, min(64, 16384 // experts)), 4)
    rows = max(1, 8192 // experts)
    tokens = min(64 if E <= 32 else 32, rows)
    num_warps = max(1, min(8, tokens * experts // 64))
    return RouteTile(experts, slots, tokens, 1, num_warps)


# Live buffers by kernel: rows that a DMA fills or drains, fp32 rows that vector instructions work on, and vectors of a
# block's slots, as the compiler's memory plans show.
_ROW_BUFFERS = {"permute_rows": (2, 0, 2), "combine_rows": (2, 3, 2), "combine_rows_backward": (3, 4, 5)}


@functools.cache
def row_tile(kernel: str, target: Target, H: int, K: int, itemsize: int) -> RowTile:
    """Tile of a row kernel.

    Raises:
        ValueError: the row buffers do not fit the Unified Buffer.
    """
    if not target.ascend:
        columns, num_warps = _cuda_row_tile(kernel, H, K, itemsize)
        slots = max(2, next_power_of_two(K))  # Triton-Ascend's interpreter takes a mask of one False element for none
        return RowTile(columns, 1, 1, slots, num_warps)
    rows, fp32_rows, vectors = _ROW_BUFFERS[kernel]
    block_slots = _width(target, ASCEND_BLOCK_TOKENS * K, 8)
    buffers = RowBuffers(rows=rows, fp32_rows=fp32_rows, vector_bytes=vectors * 4 * block_slots)
    plan = plan_rows(H, itemsize, target.ub_bytes, buffers, kernel=kernel)
    columns = plan.block_x if target.any_tile_width else next_power_of_two(plan.block_x)
    return RowTile(columns, ASCEND_BLOCK_TOKENS, block_slots, _width(target, K, 8), 1)


def _cuda_row_tile(kernel: str, H: int, K: int, itemsize: int) -> tuple[int, int]:
    """(columns, warps) of a row kernel on CUDA: the best of sweeps on an H200, by kernel, K, H and element size."""
    slots = {1: "one", 2: "few"}.get(K, "many")
    if H > 4096 and (kernel, slots + ", wide", itemsize) in _CUDA_ROW_TILES:
        slots += ", wide"
    widest, num_warps = _CUDA_ROW_TILES[kernel, slots, itemsize]
    if kernel == "combine_rows_backward":  # holds K rows of its columns in registers
        widest = max(widest // next_power_of_two(K), 32)
    columns = min(next_power_of_two(H), widest)
    return columns, max(1, min(num_warps, columns * itemsize // (16 * 32)))


# (kernel, slots and rows, bytes of an element): (columns, of the backward times slots; warps). With many destinations
# a token, the memory takes a row best from one warp, whole.
_CUDA_ROW_TILES = {
    ("permute_rows", "one", 2): (2048, 4),
    ("permute_rows", "one", 4): (1024, 8),
    ("permute_rows", "few", 2): (2048, 8),
    ("permute_rows", "few", 4): (1024, 8),
    ("permute_rows", "many", 2): (8192, 1),
    ("permute_rows", "many", 4): (8192, 1),
    ("combine_rows", "one", 2): (2048, 4),
    ("combine_rows", "one", 4): (1024, 8),
    ("combine_rows", "few", 2): (2048, 8),
    ("combine_rows", "few", 4): (1024, 4),
    ("combine_rows", "many", 2): (512, 1),
    ("combine_rows", "many", 4): (1024, 8),
    ("combine_rows_backward", "one", 2): (4096, 4),
    ("combine_rows_backward", "one", 4): (2048, 4),
    ("combine_rows_backward", "few", 2): (4096, 4),
    ("combine_rows_backward", "few", 4): (2048, 4),
    ("combine_rows_backward", "many", 2): (16384, 4),
    ("combine_rows_backward", "many", 4): (8192, 4),
    ("combine_rows_backward", "many, wide", 4): (16384, 8),
}
