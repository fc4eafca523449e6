"""Triton kernels that move rows: permute (one row in, its K destinations out), combine (K rows in, one row out) and
the weighted combine's backward. `reference` states the contract of each operation; layouts are unknown here.

The map from slots to rows is TransformerEngine's row_id_map with K slots a token in the place of E; the order of work
is this package's. All are token-major: a program takes a token and its K row numbers, so that permute and the backward
read each token's row once whatever K. Pad rows are found from counts and padded_bins alone and zeroed in the same
launch, so no buffer is filled twice. Row numbers are int32, addresses int64.

Ascend: one program a vector core. The row numbers of a block of tokens are loaded into the Unified Buffer once and
read there with `get_element`, since a scalar load from global memory stalls the core; a row is moved by DMA, whole
where the Unified Buffer allows; a slot without a row is skipped by a scalar branch, since a store mask made of data
becomes an unlocked read-modify-write of the destination. What remains element by element are the scalars that ride
along: their rows are scattered, so each is an element of its own, once a route and outside the loop over columns.

CUDA: one program a token and tile of its columns; row numbers come from memory (the cache); the K loads of a combine
are masked instead of branched around, so that none waits for another, and the backward moves the K rows as one tile,
so that their dots take one reduction; pad rows have programs of their own, last in the grid. Rows are read and
written once: none is worth keeping in the cache.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ascend_moe.backend.device import Target, target_of
from megatron_ascend_moe.backend.launch import MAX_PROGRAMS, Variant, ceil_div, launch
from megatron_ascend_moe.kernels.checks import MAX_INDEX, check_rows, check_slots, check_vector
from megatron_ascend_moe.kernels.tuning import row_tile

MAX_PAD_PARTS = 64


@triton.jit
def _slots_in_ub(values_ptr, first_token, tokens, K: tl.constexpr, BLOCK_SLOTS: tl.constexpr):
    """The slots of a block of tokens, in the Unified Buffer: (BLOCK_SLOTS)."""
    at = tl.arange(0, BLOCK_SLOTS)
    return tl.load(values_ptr + first_token * K + at, mask=at < tokens * K, other=0)


@triton.jit
def _zero_pad_rows(
    rows_ptr,
    scalars_ptr,
    counts_ptr,
    padded_bins_ptr,
    first_pad_program,
    parts,  # programs that share the pad rows of one expert
    E,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SCALARS: tl.constexpr,
    ASCEND: tl.constexpr,
):
    """Zero the rows between the real rows of each segment and its end: every parts-th of an expert's."""
    worker = tl.program_id(0) - first_pad_program
    column = tl.arange(0, COLUMNS)
    zeros = tl.zeros([COLUMNS], rows_ptr.dtype.element_ty)
    for item in range(worker, E * parts, tl.num_programs(0) - first_pad_program):
        expert = item // parts
        end = tl.load(padded_bins_ptr + expert)
        row = tl.load(counts_ptr + expert) + item % parts
        if expert > 0:
            row += tl.load(padded_bins_ptr + expert - 1)
        for pad_row in range(row, end, parts):
            pad_at = rows_ptr + tl.cast(pad_row, tl.int64) * H
            for start in range(0, H, COLUMNS):
                at = pad_at + start + column
                if ASCEND:
                    tl.store(at, zeros, mask=start + column < H)
                else:
                    tl.store(at, zeros, mask=start + column < H, eviction_policy="evict_first")
            if HAS_SCALARS:
                tl.store(scalars_ptr + pad_row, 0.0)


@triton.jit(do_not_specialize=["T", "E", "token_programs", "first_pad_program", "parts"])
def _permute_rows_kernel(
    x_ptr,  # (T, H)
    row_of_slot_ptr,  # (T, K) int32
    scalars_ptr,  # (T, K) fp32
    counts_ptr,  # (E) int32
    padded_bins_ptr,  # (E) int32
    rows_ptr,  # (P, H)
    scalars_out_ptr,  # (P) fp32
    x_stride,
    T,
    E,
    token_programs,  # programs before this one copy tokens
    first_pad_program,  # this one and later ones zero pad rows
    parts,
    H: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,  # of a block, on Ascend
    BLOCK_SLOTS: tl.constexpr,
    HAS_SCALARS: tl.constexpr,
    ASCEND: tl.constexpr,
):
    """rows[row_of_slot[t, k]] = x[t], its scalar with it; pad rows zero (`reference.permute_rows`).

    x, rows: fp16, bf16 or fp32, rows of x x_stride elements apart. Traffic: T H elements in whatever K, P H out, 4 T K
    bytes of row numbers; with scalars 4 T K in and 4 P out. Every program reads its experts' counts and bins.
    """
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    if ASCEND:
        for first in range(program * TOKENS, T, token_programs * TOKENS):
            tokens = tl.minimum(T - first, TOKENS)
            rows = _slots_in_ub(row_of_slot_ptr, first, tokens, K, BLOCK_SLOTS)
            if HAS_SCALARS:
                scalars = _slots_in_ub(scalars_ptr, first, tokens, K, BLOCK_SLOTS)
            for i in range(0, tokens):
                x_at = x_ptr + tl.cast(first + i, tl.int64) * x_stride
                for start in range(0, H, COLUMNS):
                    values = tl.load(x_at + start + column, mask=start + column < H)
                    for k in tl.static_range(K):
                        row = tl.get_element(rows, (i * K + k,))
                        if row >= 0:
                            at = rows_ptr + row.to(tl.int64) * H + start + column
                            tl.store(at, values, mask=start + column < H)
                if HAS_SCALARS:
                    for k in tl.static_range(K):
                        row = tl.get_element(rows, (i * K + k,))
                        if row >= 0:
                            tl.store(scalars_out_ptr + row, tl.get_element(scalars, (i * K + k,)))
    elif program < token_programs:
        TILES: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
        for item in range(program, T * TILES, token_programs):
            token = item // TILES
            in_tile = (item % TILES) * COLUMNS + column
            x_at = x_ptr + tl.cast(token, tl.int64) * x_stride + in_tile
            values = tl.load(x_at, mask=in_tile < H, eviction_policy="evict_first")
            for k in tl.static_range(K):
                row = tl.load(row_of_slot_ptr + token * K + k)
                if row >= 0:
                    at = rows_ptr + row.to(tl.int64) * H + in_tile
                    tl.store(at, values, mask=in_tile < H, eviction_policy="evict_first")
                    if HAS_SCALARS:
                        if item % TILES == 0:
                            tl.store(scalars_out_ptr + row, tl.load(scalars_ptr + token * K + k))
    if program >= first_pad_program:
        _zero_pad_rows(
            rows_ptr, scalars_out_ptr, counts_ptr, padded_bins_ptr, first_pad_program, parts, E,
            H, COLUMNS, HAS_SCALARS, ASCEND,
        )  # fmt: skip


@functools.cache
def _permute_variant(target: Target, H: int, K: int, itemsize: int, has_scalars: bool) -> Variant:
    tile = row_tile("permute_rows", target, H, K, itemsize)
    constants = {"H": H, "K": K, "HAS_SCALARS": has_scalars, "ASCEND": target.ascend, **tile.constants}
    return Variant(_permute_rows_kernel, constants, tile.num_warps)


def permute_rows(
    x_TH: Tensor,
    row_of_slot_TK: Tensor,
    counts_E: Tensor,
    padded_bins_E: Tensor,
    num_rows: int,
    scalars_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `reference.permute_rows`. One launch; traffic: T H in, P H out; each row of x is read once."""
    T, H = check_rows("x", x_TH)
    _, K = check_slots("row_of_slot", row_of_slot_TK, torch.int32, tokens=T)
    E = _check_segments(counts_E, padded_bins_E)
    if scalars_TK is not None:
        check_slots("scalars", scalars_TK, torch.float32, tokens=T, slots=K)
    _check_num_rows(num_rows)
    target = target_of(x_TH.device)
    variant = _permute_variant(target, H, K, x_TH.element_size(), scalars_TK is not None)
    grid = _grid(target, T * ceil_div(H, variant.constants["COLUMNS"]), E, num_rows - T * K)
    rows_PH = torch.empty((num_rows, H), dtype=x_TH.dtype, device=x_TH.device)
    scalars_P = None
    if scalars_TK is not None:
        scalars_P = torch.empty(num_rows, dtype=torch.float32, device=x_TH.device)
    tensors = (x_TH, row_of_slot_TK, scalars_TK, counts_E, padded_bins_E, rows_PH, scalars_P)
    numbers = (x_TH.stride(0), T, E, grid.token_programs, grid.first_pad_program, grid.parts)
    launch(variant, target, x_TH.device, grid.programs, tensors, numbers)
    return rows_PH, scalars_P


@triton.jit(do_not_specialize=["T"])
def _combine_rows_kernel(
    rows_ptr,  # (P, H)
    row_of_slot_ptr,  # (T, K) int32
    weights_ptr,  # (T, K) fp32
    scalars_ptr,  # (P) fp32
    out_ptr,  # (T, H)
    scalars_out_ptr,  # (T, K) fp32
    rows_stride,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_SCALARS: tl.constexpr,
    ASCEND: tl.constexpr,
):
    """out[t] = sum over k, in fp32 and in this order, of rows[row_of_slot[t, k]] (times its weight), rounded once; the
    scalars of those rows, where there are some (`reference.combine_rows`).

    rows, out: fp16, bf16 or fp32, rows rows_stride elements apart. Traffic: R H elements in (R slots that have a row),
    T H out, 4 T K bytes of row numbers, of weights, and of scalars each way. On Ascend the loop over slots is not
    unrolled: each trip would take row buffers of its own.
    """
    column = tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    if ASCEND:
        for first in range(tl.program_id(0) * TOKENS, T, tl.num_programs(0) * TOKENS):
            tokens = tl.minimum(T - first, TOKENS)
            rows = _slots_in_ub(row_of_slot_ptr, first, tokens, K, BLOCK_SLOTS)
            if HAS_WEIGHTS:
                weights = _slots_in_ub(weights_ptr, first, tokens, K, BLOCK_SLOTS)
            for i in range(0, tokens):
                out_at = out_ptr + tl.cast(first + i, tl.int64) * H
                for start in range(0, H, COLUMNS):
                    total = tl.zeros([COLUMNS], tl.float32)
                    for k in range(0, K):  # unrolled, each slot would have row buffers of its own
                        row = tl.get_element(rows, (i * K + k,))
                        if row >= 0:
                            at = rows_ptr + row.to(tl.int64) * rows_stride + start + column
                            term = tl.load(at, mask=start + column < H, other=0.0).to(tl.float32)
                            if HAS_WEIGHTS:
                                term *= tl.get_element(weights, (i * K + k,))
                            total += term
                    if out_ptr.dtype.element_ty == tl.float32:  # nothing is cast: a buffer apart from the sum's, for the DMA
                        total = 0.0 - (0.0 - total)
                    tl.store(out_at + start + column, total.to(out_ptr.dtype.element_ty), mask=start + column < H)
                if HAS_SCALARS:
                    gathered = tl.zeros([SLOTS], tl.float32)
                    for k in range(0, K):
                        row = tl.get_element(rows, (i * K + k,))
                        if row >= 0:
                            is_slot = slot.to(tl.float32) == tl.cast(k, tl.float32)  # integers compare as scalars
                            gathered = tl.where(is_slot, tl.load(scalars_ptr + row), gathered)
                    tl.store(scalars_out_ptr + (first + i) * K + slot, gathered, mask=slot < K)
    else:
        TILES: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
        for item in range(tl.program_id(0), T * TILES, tl.num_programs(0)):
            token = item // TILES
            in_tile = (item % TILES) * COLUMNS + column
            total = tl.zeros([COLUMNS], tl.float32)
            for k in tl.static_range(K):
                row = tl.load(row_of_slot_ptr + token * K + k)
                at = rows_ptr + row.to(tl.int64) * rows_stride + in_tile
                term = tl.load(at, mask=(in_tile < H) & (row >= 0), other=0.0, eviction_policy="evict_first")
                term = term.to(tl.float32)
                if HAS_WEIGHTS:
                    term *= tl.load(weights_ptr + token * K + k, mask=row >= 0, other=0.0)
                total += term
            at = out_ptr + tl.cast(token, tl.int64) * H + in_tile
            tl.store(at, total.to(out_ptr.dtype.element_ty), mask=in_tile < H, cache_modifier=".cs")
            if HAS_SCALARS:
                if item % TILES == 0:
                    rows = tl.load(row_of_slot_ptr + token * K + slot, mask=slot < K, other=-1)
                    gathered = tl.load(scalars_ptr + rows, mask=rows >= 0, other=0.0)
                    tl.store(scalars_out_ptr + token * K + slot, gathered, mask=slot < K)


@functools.cache
def _combine_variant(target: Target, H: int, K: int, itemsize: int, has_weights: bool, has_scalars: bool) -> Variant:
    tile = row_tile("combine_rows", target, H, K, itemsize)
    constants = {"H": H, "K": K, "HAS_WEIGHTS": has_weights, "HAS_SCALARS": has_scalars, "ASCEND": target.ascend}
    return Variant(_combine_rows_kernel, {**constants, **tile.constants, "SLOTS": tile.slots}, tile.num_warps)


def combine_rows(
    rows_PH: Tensor,
    row_of_slot_TK: Tensor,
    weights_TK: Tensor | None = None,
    scalars_P: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `reference.combine_rows`; bitwise equal to it, weighted or not: terms are rounded before they
    are summed. One launch; traffic: R H in, T H out."""
    P, H = check_rows("rows", rows_PH)
    T, K = check_slots("row_of_slot", row_of_slot_TK, torch.int32)
    if weights_TK is not None:
        check_slots("weights", weights_TK, torch.float32, tokens=T, slots=K)
    if scalars_P is not None:
        check_vector("scalars", scalars_P, torch.float32, P)
    target = target_of(rows_PH.device)
    variant = _combine_variant(target, H, K, rows_PH.element_size(), weights_TK is not None, scalars_P is not None)
    out_TH = torch.empty((T, H), dtype=rows_PH.dtype, device=rows_PH.device)
    scalars_TK = None
    if scalars_P is not None:
        scalars_TK = torch.empty((T, K), dtype=torch.float32, device=rows_PH.device)
    grid = _grid(target, T * ceil_div(H, variant.constants["COLUMNS"]))
    tensors = (rows_PH, row_of_slot_TK, weights_TK, scalars_P, out_TH, scalars_TK)
    launch(variant, target, rows_PH.device, grid.programs, tensors, (rows_PH.stride(0), T))
    return out_TH, scalars_TK


@triton.jit(do_not_specialize=["T", "E", "token_programs", "first_pad_program", "parts"])
def _combine_rows_backward_kernel(
    grad_ptr,  # (T, H)
    rows_ptr,  # (P, H)
    row_of_slot_ptr,  # (T, K) int32
    weights_ptr,  # (T, K) fp32
    counts_ptr,  # (E) int32
    padded_bins_ptr,  # (E) int32
    grad_rows_ptr,  # (P, H)
    grad_weights_ptr,  # (T, K) fp32
    grad_stride,
    rows_stride,
    T,
    E,
    token_programs,
    first_pad_program,
    parts,
    H: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    ASCEND: tl.constexpr,
):
    """grad_rows[row] = weights[t, k] * grad[t] and grad_weights[t, k] = dot(rows[row], grad[t]) in fp32, with row =
    row_of_slot[t, k]; pad rows zero (`reference.combine_rows_backward`).

    grad, rows, grad_rows: fp16, bf16 or fp32. Traffic: T H + R H elements in, P H out, 12 T K bytes of row numbers,
    weights and their gradients. On Ascend the dots of a token are a vector that a select fills: no element is stored.
    """
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    if ASCEND:
        for first in range(program * TOKENS, T, token_programs * TOKENS):
            tokens = tl.minimum(T - first, TOKENS)
            rows = _slots_in_ub(row_of_slot_ptr, first, tokens, K, BLOCK_SLOTS)
            weights = _slots_in_ub(weights_ptr, first, tokens, K, BLOCK_SLOTS)
            for i in range(0, tokens):
                grad_at = grad_ptr + tl.cast(first + i, tl.int64) * grad_stride
                dots = tl.zeros([SLOTS], tl.float32)
                for start in range(0, H, COLUMNS):
                    in_row = start + column < H
                    grad = tl.load(grad_at + start + column, mask=in_row, other=0.0).to(tl.float32)
                    for k in range(0, K):
                        row = tl.get_element(rows, (i * K + k,))
                        if row >= 0:
                            row_at = rows_ptr + row.to(tl.int64) * rows_stride + start + column
                            values = tl.load(row_at, mask=in_row, other=0.0).to(tl.float32)
                            scaled = grad * tl.get_element(weights, (i * K + k,))
                            grad_row_at = grad_rows_ptr + row.to(tl.int64) * H + start + column
                            tl.store(grad_row_at, scaled.to(grad_rows_ptr.dtype.element_ty), mask=in_row)
                            is_slot = slot.to(tl.float32) == tl.cast(k, tl.float32)  # integers compare as scalars
                            dots = tl.where(is_slot, dots + tl.sum(grad * values, 0), dots)
                tl.store(grad_weights_ptr + (first + i) * K + slot, dots, mask=slot < K)
    elif program < token_programs:
        for token in range(program, T, token_programs):
            rows = tl.load(row_of_slot_ptr + token * K + slot, mask=slot < K, other=-1)
            weights = tl.load(weights_ptr + token * K + slot, mask=slot < K, other=0.0)[:, None]
            grad_at = grad_ptr + tl.cast(token, tl.int64) * grad_stride
            row_at = rows_ptr + (rows.to(tl.int64) * rows_stride)[:, None]
            grad_row_at = grad_rows_ptr + (rows.to(tl.int64) * H)[:, None]
            dots = tl.zeros([SLOTS], tl.float32)
            for start in range(0, H, COLUMNS):
                at = start + column
                grad = tl.load(grad_at + at, mask=at < H, other=0.0, eviction_policy="evict_first").to(tl.float32)[None, :]
                kept = (rows >= 0)[:, None] & (at < H)[None, :]
                values = tl.load(row_at + at[None, :], mask=kept, other=0.0, eviction_policy="evict_first")
                scaled = (grad * weights).to(grad_rows_ptr.dtype.element_ty)
                tl.store(grad_row_at + at[None, :], scaled, mask=kept, eviction_policy="evict_first")
                dots += tl.sum(grad * values.to(tl.float32), 1)
            # a slot without a row has 0 even where the gradient is not finite
            tl.store(grad_weights_ptr + token * K + slot, tl.where(rows >= 0, dots, 0.0), mask=slot < K)
    if program >= first_pad_program:
        _zero_pad_rows(
            grad_rows_ptr, None, counts_ptr, padded_bins_ptr, first_pad_program, parts, E, H, COLUMNS, False, ASCEND
        )


@functools.cache
def _combine_backward_variant(target: Target, H: int, K: int, itemsize: int) -> Variant:
    tile = row_tile("combine_rows_backward", target, H, K, itemsize)
    constants = {"H": H, "K": K, "ASCEND": target.ascend, "SLOTS": tile.slots, **tile.constants}
    return Variant(_combine_rows_backward_kernel, constants, tile.num_warps)


def combine_rows_backward(
    grad_TH: Tensor,
    rows_PH: Tensor,
    row_of_slot_TK: Tensor,
    weights_TK: Tensor,
    counts_E: Tensor,
    padded_bins_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `reference.combine_rows_backward`; the dot's order of summation is the tile's, fixed from run to run.

    One launch; traffic: (T + R) H in and P H out; the gradient is read once.
    """
    P, H = check_rows("rows", rows_PH)
    T, _ = check_rows("grad", grad_TH, hidden=H)
    _, K = check_slots("row_of_slot", row_of_slot_TK, torch.int32, tokens=T)
    check_slots("weights", weights_TK, torch.float32, tokens=T, slots=K)
    E = _check_segments(counts_E, padded_bins_E)
    target = target_of(rows_PH.device)
    variant = _combine_backward_variant(target, H, K, rows_PH.element_size())
    grad_rows_PH = torch.empty((P, H), dtype=rows_PH.dtype, device=rows_PH.device)
    grad_weights_TK = torch.empty((T, K), dtype=torch.float32, device=rows_PH.device)
    grid = _grid(target, T, E, P - T * K)
    tensors = (grad_TH, rows_PH, row_of_slot_TK, weights_TK, counts_E, padded_bins_E, grad_rows_PH, grad_weights_TK)
    numbers = (grad_TH.stride(0), rows_PH.stride(0), T, E)
    numbers += (grid.token_programs, grid.first_pad_program, grid.parts)
    launch(variant, target, rows_PH.device, grid.programs, tensors, numbers)
    return grad_rows_PH, grad_weights_TK


def _check_segments(counts_E: Tensor, padded_bins_E: Tensor) -> int:
    E = check_vector("counts", counts_E, torch.int32)
    return check_vector("padded_bins", padded_bins_E, torch.int32, E)


def _check_num_rows(num_rows: int) -> None:
    if not 0 <= num_rows <= MAX_INDEX:
        raise ValueError(f"num_rows={num_rows}: expected 0 to {MAX_INDEX}")


class _Grid(NamedTuple):
    """Programs of a launch: those before `token_programs` have tokens, `first_pad_program` and later ones pad rows,
    of which `parts` share one expert's."""

    programs: int
    token_programs: int
    first_pad_program: int
    parts: int


def _grid(target: Target, items: int, E: int = 0, expected_pads: int = 0) -> _Grid:
    """The grid for `items` tokens or tiles of tokens, and for the pad rows of E experts, of which about
    `expected_pads` are there: a guess that shapes the grid, never a bound."""
    if target.ascend:
        return _Grid(target.cores, target.cores, 0, ceil_div(target.cores, max(E, 1)))
    parts = min(max(expected_pads // (2 * max(E, 1)), 1), MAX_PAD_PARTS)
    pad_programs = min(E * parts, MAX_PROGRAMS // 4)
    token_programs = min(max(items, 1), MAX_PROGRAMS - pad_programs)
    return _Grid(token_programs + pad_programs, token_programs, token_programs, parts)
