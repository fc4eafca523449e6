"""Triton kernels that move rows: permute (one row in, its K destinations out), combine (K rows in, one row out) and
the weighted combine's backward. `reference` states the contract of each operation; layouts are unknown here.

All are token-major: a program takes a token, its K row numbers and a tile of columns, so that permute and the
backward read each token's row once whatever K. Pad rows are found from counts and padded_bins alone and zeroed in
the same launch, so no buffer is filled twice. Row numbers are int32, addresses int64.

What shaped this for Ascend: the row numbers of a block of tokens are loaded into the Unified Buffer once and read
there with `get_element`, since a scalar load from global memory stalls the vector core; a row is moved by DMA,
whole where the Unified Buffer allows; a slot without a row is skipped by a scalar branch, since a store mask made
of data becomes an unlocked read-modify-write of the destination. What remains element by element are the scalars
that ride along: their rows are scattered, so each is one element of its own, once a route and outside the loop
over columns. On CUDA a program is a token and reads its row numbers from memory (the cache), and the K loads of a
combine are masked instead of branched around, so that all are in flight at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ascend_moe.backend.device import Target, target_of
from megatron_ascend_moe.backend.launch import MAX_PROGRAMS, ceil_div, launch
from megatron_ascend_moe.kernels.checks import MAX_INDEX, check_rows, check_slots, check_vector
from megatron_ascend_moe.kernels.tuning import RowTile, row_tile


@triton.jit
def _slot_block(values_ptr, first_token, tokens, K: tl.constexpr, BLOCK_SLOTS: tl.constexpr, ASCEND: tl.constexpr):
    """The slots of a block of tokens, in the Unified Buffer; on CUDA nothing is loaded ahead."""
    if ASCEND:
        at = tl.arange(0, BLOCK_SLOTS)
        return tl.load(values_ptr + first_token * K + at, mask=at < tokens * K, other=0)
    else:
        return 0


@triton.jit
def _slot_value(values_ptr, block, first_token, i, k: tl.constexpr, K: tl.constexpr, ASCEND: tl.constexpr):
    """Slot k of token first_token + i, a scalar."""
    if ASCEND:
        return tl.get_element(block, (i * K + k,))
    else:
        return tl.load(values_ptr + (first_token + i) * K + k)


@triton.jit
def _zero_pad_rows(
    rows_ptr,
    scalars_ptr,
    counts_ptr,
    padded_bins_ptr,
    worker,
    workers,
    E,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,  # workers that share the pad rows of one expert
    HAS_SCALARS: tl.constexpr,
):
    """Zero every PARTS-th row between the real rows of a segment and its end, for this worker's share."""
    column = tl.arange(0, COLUMNS)
    zeros = tl.zeros([COLUMNS], rows_ptr.dtype.element_ty)
    for item in range(worker, E * PARTS, workers):
        expert = item // PARTS
        end = tl.load(padded_bins_ptr + expert)
        row = tl.load(counts_ptr + expert) + item % PARTS
        if expert > 0:
            row += tl.load(padded_bins_ptr + expert - 1)
        for pad_row in range(row, end, PARTS):
            pad_at = rows_ptr + tl.cast(pad_row, tl.int64) * H
            for start in range(0, H, COLUMNS):
                tl.store(pad_at + start + column, zeros, mask=start + column < H)
            if HAS_SCALARS:
                tl.store(scalars_ptr + pad_row, 0.0)


@triton.jit(do_not_specialize=["T", "pad_programs", "first_token_program", "E"])
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
    pad_programs,  # programs 0..pad_programs-1 zero pad rows
    first_token_program,  # this one and later ones copy tokens
    H: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens of a block
    BLOCK_SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SCALARS: tl.constexpr,
    ASCEND: tl.constexpr,
):
    program = tl.program_id(0)
    if program < pad_programs:
        _zero_pad_rows(
            rows_ptr, scalars_out_ptr, counts_ptr, padded_bins_ptr, program, pad_programs, E, H, COLUMNS, PARTS, HAS_SCALARS
        )
    if program >= first_token_program:
        column = tl.arange(0, COLUMNS)
        step = (tl.num_programs(0) - first_token_program) * TOKENS
        for first in range((program - first_token_program) * TOKENS, T, step):
            tokens = tl.minimum(T - first, TOKENS)
            row_block = _slot_block(row_of_slot_ptr, first, tokens, K, BLOCK_SLOTS, ASCEND)
            if HAS_SCALARS:
                scalar_block = _slot_block(scalars_ptr, first, tokens, K, BLOCK_SLOTS, ASCEND)
            for i in range(0, tokens):
                x_at = x_ptr + tl.cast(first + i, tl.int64) * x_stride
                for start in range(0, H, COLUMNS):
                    values = tl.load(x_at + start + column, mask=start + column < H)
                    for k in tl.static_range(K):
                        row = _slot_value(row_of_slot_ptr, row_block, first, i, k, K, ASCEND)
                        if row >= 0:
                            at = rows_ptr + row.to(tl.int64) * H + start + column
                            tl.store(at, values, mask=start + column < H)
                if HAS_SCALARS:
                    for k in tl.static_range(K):
                        row = _slot_value(row_of_slot_ptr, row_block, first, i, k, K, ASCEND)
                        if row >= 0:
                            scalar = _slot_value(scalars_ptr, scalar_block, first, i, k, K, ASCEND)
                            tl.store(scalars_out_ptr + row, scalar)


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
    tile = row_tile("permute_rows", target, H, K, x_TH.element_size())
    rows_PH = torch.empty((num_rows, H), dtype=x_TH.dtype, device=x_TH.device)
    scalars_P = None
    if scalars_TK is not None:
        scalars_P = torch.empty(num_rows, dtype=torch.float32, device=x_TH.device)
    pads = _pad_programs(target, E, tile)
    programs, first = _grid(target, T, pads, tile)
    args = (x_TH, row_of_slot_TK, scalars_TK, counts_E, padded_bins_E, rows_PH, scalars_P)
    args += (x_TH.stride(0), T, E, pads, first)
    constants = {"H": H, "K": K, "HAS_SCALARS": scalars_TK is not None, **tile.constants}
    launch(_permute_rows_kernel, target, x_TH.device, programs, args, constants, tile.num_warps)
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
    column = tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    for first in range(tl.program_id(0) * TOKENS, T, tl.num_programs(0) * TOKENS):
        tokens = tl.minimum(T - first, TOKENS)
        row_block = _slot_block(row_of_slot_ptr, first, tokens, K, BLOCK_SLOTS, ASCEND)
        weight_block = row_block
        if HAS_WEIGHTS:
            weight_block = _slot_block(weights_ptr, first, tokens, K, BLOCK_SLOTS, ASCEND)
        for i in range(0, tokens):
            out_at = out_ptr + tl.cast(first + i, tl.int64) * H
            for start in range(0, H, COLUMNS):
                total = tl.zeros([COLUMNS], tl.float32)
                for k in tl.static_range(K):
                    row = _slot_value(row_of_slot_ptr, row_block, first, i, k, K, ASCEND)
                    at = rows_ptr + row.to(tl.int64) * rows_stride + start + column
                    if ASCEND:
                        if row >= 0:
                            term = tl.load(at, mask=start + column < H, other=0.0).to(tl.float32)
                            if HAS_WEIGHTS:
                                term *= _slot_value(weights_ptr, weight_block, first, i, k, K, ASCEND)
                            total += term
                    else:
                        term = tl.load(at, mask=(start + column < H) & (row >= 0), other=0.0).to(tl.float32)
                        if HAS_WEIGHTS:
                            weight_at = weights_ptr + (first + i) * K + k
                            term *= tl.load(weight_at, mask=row >= 0, other=0.0)
                        total += term
                tl.store(out_at + start + column, total.to(out_ptr.dtype.element_ty), mask=start + column < H)
            if HAS_SCALARS:
                _gather_scalars(
                    scalars_ptr, scalars_out_ptr, row_of_slot_ptr, row_block, first, i, slot, K, ASCEND
                )


@triton.jit
def _gather_scalars(
    scalars_ptr, out_ptr, row_of_slot_ptr, row_block, first, i, slot, K: tl.constexpr, ASCEND: tl.constexpr
):
    """Scalars of the K rows of token first + i, 0 where there is no row."""
    out_at = out_ptr + (first + i) * K + slot
    if ASCEND:
        gathered = tl.zeros([slot.shape[0]], tl.float32)
        for k in tl.static_range(K):
            row = _slot_value(row_of_slot_ptr, row_block, first, i, k, K, ASCEND)
            if row >= 0:
                gathered = tl.where(slot == k, tl.load(scalars_ptr + row), gathered)
    else:
        row = tl.load(row_of_slot_ptr + (first + i) * K + slot, mask=slot < K, other=-1)
        gathered = tl.load(scalars_ptr + row, mask=row >= 0, other=0.0)
    tl.store(out_at, gathered, mask=slot < K)


def combine_rows(
    rows_PH: Tensor,
    row_of_slot_TK: Tensor,
    weights_TK: Tensor | None = None,
    scalars_P: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `reference.combine_rows`; bitwise equal to it, weighted or not (terms are rounded before they are
    summed on every device). One launch; traffic: R H in, T H out."""
    P, H = check_rows("rows", rows_PH)
    T, K = check_slots("row_of_slot", row_of_slot_TK, torch.int32)
    if weights_TK is not None:
        check_slots("weights", weights_TK, torch.float32, tokens=T, slots=K)
    if scalars_P is not None:
        check_vector("scalars", scalars_P, torch.float32, P)
    target = target_of(rows_PH.device)
    tile = row_tile("combine_rows", target, H, K, rows_PH.element_size())
    out_TH = torch.empty((T, H), dtype=rows_PH.dtype, device=rows_PH.device)
    scalars_TK = None
    if scalars_P is not None:
        scalars_TK = torch.empty((T, K), dtype=torch.float32, device=rows_PH.device)
    programs, _ = _grid(target, T, 0, tile)
    args = (rows_PH, row_of_slot_TK, weights_TK, scalars_P, out_TH, scalars_TK, rows_PH.stride(0), T)
    constants = {"H": H, "K": K, "SLOTS": tile.slots, "HAS_WEIGHTS": weights_TK is not None}
    constants |= {"HAS_SCALARS": scalars_P is not None, **tile.token_constants}
    launch(_combine_rows_kernel, target, rows_PH.device, programs, args, constants, tile.num_warps)
    return out_TH, scalars_TK


@triton.jit(do_not_specialize=["T", "pad_programs", "first_token_program", "E"])
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
    pad_programs,
    first_token_program,
    H: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    ASCEND: tl.constexpr,
):
    program = tl.program_id(0)
    if program < pad_programs:
        _zero_pad_rows(
            grad_rows_ptr, None, counts_ptr, padded_bins_ptr, program, pad_programs, E, H, COLUMNS, PARTS, False
        )
    if program >= first_token_program:
        column = tl.arange(0, COLUMNS)
        slot = tl.arange(0, SLOTS)
        step = (tl.num_programs(0) - first_token_program) * TOKENS
        for first in range((program - first_token_program) * TOKENS, T, step):
            tokens = tl.minimum(T - first, TOKENS)
            row_block = _slot_block(row_of_slot_ptr, first, tokens, K, BLOCK_SLOTS, ASCEND)
            weight_block = _slot_block(weights_ptr, first, tokens, K, BLOCK_SLOTS, ASCEND)
            for i in range(0, tokens):
                grad_at = grad_ptr + tl.cast(first + i, tl.int64) * grad_stride
                grad_weights = tl.zeros([SLOTS], tl.float32)
                for start in range(0, H, COLUMNS):
                    in_row = start + column < H
                    grad = tl.load(grad_at + start + column, mask=in_row, other=0.0).to(tl.float32)
                    for k in tl.static_range(K):
                        row = _slot_value(row_of_slot_ptr, row_block, first, i, k, K, ASCEND)
                        if row >= 0:
                            weight = _slot_value(weights_ptr, weight_block, first, i, k, K, ASCEND)
                            row_at = rows_ptr + row.to(tl.int64) * rows_stride + start + column
                            values = tl.load(row_at, mask=in_row, other=0.0).to(tl.float32)
                            grad_row_at = grad_rows_ptr + row.to(tl.int64) * H + start + column
                            scaled = (grad * weight).to(grad_rows_ptr.dtype.element_ty)
                            tl.store(grad_row_at, scaled, mask=in_row)
                            dot = tl.sum(grad * values, 0)
                            grad_weights = tl.where(slot == k, grad_weights + dot, grad_weights)
                tl.store(grad_weights_ptr + (first + i) * K + slot, grad_weights, mask=slot < K)


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
    tile = row_tile("combine_rows_backward", target, H, K, rows_PH.element_size())
    grad_rows_PH = torch.empty((P, H), dtype=rows_PH.dtype, device=rows_PH.device)
    grad_weights_TK = torch.empty((T, K), dtype=torch.float32, device=rows_PH.device)
    pads = _pad_programs(target, E, tile)
    programs, first = _grid(target, T, pads, tile)
    args = (grad_TH, rows_PH, row_of_slot_TK, weights_TK, counts_E, padded_bins_E, grad_rows_PH, grad_weights_TK)
    args += (grad_TH.stride(0), rows_PH.stride(0), T, E, pads, first)
    constants = {"H": H, "K": K, "SLOTS": tile.slots, **tile.constants}
    launch(_combine_rows_backward_kernel, target, rows_PH.device, programs, args, constants, tile.num_warps)
    return grad_rows_PH, grad_weights_TK


def _check_segments(counts_E: Tensor, padded_bins_E: Tensor) -> int:
    E = check_vector("counts", counts_E, torch.int32)
    return check_vector("padded_bins", padded_bins_E, torch.int32, E)


def _check_num_rows(num_rows: int) -> None:
    if not 0 <= num_rows <= MAX_INDEX:
        raise ValueError(f"num_rows={num_rows}: expected 0 to {MAX_INDEX}")


def _pad_programs(target: Target, E: int, tile: RowTile) -> int:
    """Programs that zero pad rows: every vector core beside its tokens on Ascend, their own ones on CUDA."""
    return target.cores if target.ascend else min(E * tile.parts, MAX_PROGRAMS // 2)


def _grid(target: Target, T: int, pad_programs: int, tile: RowTile) -> tuple[int, int]:
    """(programs, the first of them that has tokens)."""
    if target.ascend:
        return target.cores, 0
    token_programs = min(max(ceil_div(T, tile.tokens), 1), MAX_PROGRAMS - pad_programs)
    return pad_programs + token_programs, pad_programs
