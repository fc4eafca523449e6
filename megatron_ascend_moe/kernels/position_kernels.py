"""Triton kernels behind the MegaBlocks-signature launches of `positions`: position-major copy, in both directions, and
the weights' gradient.

The algorithm is MegaBlocks' (Gale et al., MLSys 2023: sorted positions, inclusive bins), the order of work is
Ascend's. Sorted positions are split evenly over the vector cores. A program walks the experts its positions belong
to, so that bins are a few scalar loads an expert, and inside an expert tiles of ROWS positions: their rows are
consecutive in the layout, so a tile of the Unified Buffer is assembled row by row with `insert_slice` (the compiler
loads whole rows straight into it) and stored by one DMA (gather), or loaded by one DMA and taken apart with
`extract_slice` (scatter). A tile never spans experts: it is flushed where the expert changes and after the last
position. Indices and weights of a block of positions are vectors in the Unified Buffer, read there with
`get_element`; scalar loads from global memory would stall the core. On CUDA, which has no such operations, the tile
is an indexed load or store.
"""

import triton
import triton.language as tl


@triton.jit
def _segment(bins_ptr, padded_bins_ptr, expert, capacity, BINNED: tl.constexpr):
    """First position, end of positions, end of kept positions and first row of an expert, scalars."""
    start = 0
    row = 0
    if expert > 0:
        start = tl.load(bins_ptr + expert - 1)
        if not BINNED:
            row = tl.load(padded_bins_ptr + expert - 1)
    end = tl.load(bins_ptr + expert)
    kept = end
    if BINNED:
        row = expert * capacity
        kept = tl.minimum(end, start + capacity)
    return start, end, kept, row


@triton.jit
def _source_row(x_ptr, index, scale, at, x_stride, start, TOP_K: tl.constexpr, SCALED: tl.constexpr, H: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    """Columns of the token row that the index at position `at` of the block names, scaled; Ascend only."""
    column = start + tl.arange(0, COLUMNS)
    token = tl.get_element(index, (at,)) // TOP_K
    values = tl.load(x_ptr + token.to(tl.int64) * x_stride + column, mask=column < H)
    if SCALED:
        values = (values.to(tl.float32) * tl.get_element(scale, (at,))).to(x_ptr.dtype.element_ty)
    return values


@triton.jit
def _gather_tile(
    x_ptr,
    out_ptr,
    index,
    scale,
    at,
    count,
    first_row,
    x_stride,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    ASCEND: tl.constexpr,
):
    """Store `count` consecutive rows from first_row on: rows of the tokens that index[at:] names."""
    row = tl.arange(0, ROWS)
    out_at = out_ptr + tl.cast(first_row, tl.int64) * H
    for start in range(0, H, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        if not ASCEND:
            token = (index // TOP_K).to(tl.int64)
            tile = tl.load(
                x_ptr + token[:, None] * x_stride + column[None, :], mask=(row < count)[:, None] & (column < H)[None, :]
            )
            if SCALED:
                tile = (tile.to(tl.float32) * scale[:, None]).to(out_ptr.dtype.element_ty)
        elif ROWS == 1:
            tile = _source_row(x_ptr, index, scale, at, x_stride, start, TOP_K, SCALED, H, COLUMNS)[None, :]
        else:
            tile = tl.zeros((ROWS, COLUMNS), dtype=out_ptr.dtype.element_ty)
            for i in range(0, count):
                values = _source_row(x_ptr, index, scale, at + i, x_stride, start, TOP_K, SCALED, H, COLUMNS)
                tile = tl.insert_slice(tile, values[None, :], (i, 0), (1, COLUMNS), (1, 1))
        target = out_at + row[:, None] * H + column[None, :]
        tl.store(target, tile, mask=(row < count)[:, None] & (column < H)[None, :])


@triton.jit
def _scatter_tile(
    x_ptr,
    out_ptr,
    index,
    scale,
    at,
    count,
    first_row,
    x_stride,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    ASCEND: tl.constexpr,
):
    """Store each of `count` consecutive rows from first_row on to the token row that index[at:] names."""
    row = tl.arange(0, ROWS)
    x_at = x_ptr + tl.cast(first_row, tl.int64) * x_stride
    for start in range(0, H, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < count)[:, None] & (column < H)[None, :]
        tile = tl.load(x_at + row[:, None] * x_stride + column[None, :], mask=inside)
        if ASCEND:
            for i in range(0, count):
                values = tl.reshape(tl.extract_slice(tile, (i, 0), (1, COLUMNS), (1, 1)), (COLUMNS,))
                if SCALED:
                    values = (values.to(tl.float32) * tl.get_element(scale, (at + i,))).to(out_ptr.dtype.element_ty)
                token = tl.get_element(index, (at + i,)).to(tl.int64)
                tl.store(out_ptr + token * H + column, values, mask=column < H)
        else:
            if SCALED:
                tile = (tile.to(tl.float32) * scale[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + index.to(tl.int64)[:, None] * H + column[None, :], tile, mask=inside)


@triton.jit
def _zero_rows(out_ptr, first, end, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero the rows from `first` up to `end`."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    zeros = tl.zeros((ROWS, COLUMNS), dtype=out_ptr.dtype.element_ty)
    for block in range(first, end, ROWS):
        out_at = out_ptr + tl.cast(block, tl.int64) * H
        for start in range(0, H, COLUMNS):
            inside = (row < end - block)[:, None] & (start + column < H)[None, :]
            tl.store(out_at + row[:, None] * H + (start + column)[None, :], zeros, mask=inside)


@triton.jit(do_not_specialize=["positions", "experts", "capacity", "rows"])
def copy_positions_kernel(
    x_ptr,  # gather: (T, H) tokens; scatter: (rows, H) of the layout
    out_ptr,  # gather: (rows, H) of the layout; scatter: (T, H) tokens, top_k = 1
    indices_ptr,  # (N) int32
    bin_ids_ptr,  # (N) int32
    scale_ptr,  # (N) fp32 in sorted order, where SCALED
    bins_ptr,  # (E) int32
    padded_bins_ptr,  # (E) int32, unless BINNED
    x_stride,
    positions,
    experts,
    capacity,
    rows,  # rows of the layout
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,  # positions whose indices are held at a time, a multiple of ROWS
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATHER: tl.constexpr,
    BINNED: tl.constexpr,
    SCALED: tl.constexpr,
    ASCEND: tl.constexpr,
):
    """Copy rows between token order and expert order, times a factor each where SCALED.

    x, out: fp16, bf16 or fp32, the same; rows of x are x_stride elements apart, those of out follow each other.
    Traffic: gather reads N H elements (kept positions only, where BINNED) and writes rows H, each row once, a copied
    one or zeros; scatter reads the kept rows and writes T H. Metadata: 4 N bytes of indices, 4 N of factors, bins of
    the experts of each program.

    Ascend: a row as a DMA of its own would store each row alone; assembled in the Unified Buffer, ROWS of them leave
    as one. A position that capacity drops is outside the loop's bounds: a store mask made of data would be an unlocked
    read-modify-write.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    share = (positions + programs - 1) // programs
    first = program * share
    last = tl.minimum(first + share, positions)
    lane = tl.arange(0, BLOCK)
    if first < last:
        for expert in range(tl.load(bin_ids_ptr + first), tl.load(bin_ids_ptr + last - 1) + 1):
            start, end, kept, row = _segment(bins_ptr, padded_bins_ptr, expert, capacity, BINNED)
            begin = tl.maximum(first, start)
            stop = tl.minimum(last, kept)
            for block in range(begin, stop, BLOCK):
                held = tl.minimum(BLOCK, stop - block)
                index = tl.load(indices_ptr + block + lane, mask=lane < held, other=0)
                scale = 0.0
                if SCALED:
                    scale = tl.load(scale_ptr + block + lane, mask=lane < held, other=0.0)
                for at in range(0, held, ROWS):
                    count = tl.minimum(ROWS, held - at)
                    to = row + block - start + at
                    if GATHER:
                        _gather_tile(
                            x_ptr, out_ptr, index, scale, at, count, to, x_stride, H, TOP_K, ROWS, COLUMNS, SCALED,
                            ASCEND,
                        )  # fmt: skip
                    else:
                        _scatter_tile(
                            x_ptr, out_ptr, index, scale, at, count, to, x_stride, H, ROWS, COLUMNS, SCALED, ASCEND
                        )
            if BINNED and not GATHER:  # a dropped assignment is its token's only one: the token gets zeros
                for position in range(tl.maximum(begin, kept), tl.minimum(last, end)):
                    token = tl.load(indices_ptr + position)
                    _zero_rows(out_ptr, token, token + 1, H, 1, COLUMNS)
    if GATHER:
        for expert in range(program, experts, programs):
            start, end, kept, row = _segment(bins_ptr, padded_bins_ptr, expert, capacity, BINNED)
            stop = row + capacity
            if not BINNED:
                stop = tl.load(padded_bins_ptr + expert)
            if expert == experts - 1:
                stop = rows
            _zero_rows(out_ptr, row + kept - start, stop, H, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["positions", "capacity"])
def weight_gradient_kernel(
    x_ptr,  # (rows, H) of the layout
    grad_ptr,  # (T, H)
    out_ptr,  # (N) fp32, in sorted order
    indices_ptr,  # (N) int32
    bin_ids_ptr,  # (N) int32
    bins_ptr,  # (E) int32
    padded_bins_ptr,  # (E) int32, unless BINNED
    x_stride,
    grad_stride,
    positions,
    capacity,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,  # positions whose dots are stored at once
    COLUMNS: tl.constexpr,
    BINNED: tl.constexpr,
    ASCEND: tl.constexpr,
):
    """out[i] = dot(row of position i, grad of its token) in fp32, 0 where capacity dropped it.

    x, grad: fp16, bf16 or fp32, x_stride and grad_stride elements from row to row; out in sorted order.
    A dot runs over all column tiles of a row, so on Ascend rows are taken one at a time, whole where they fit (a
    tile of several rows would hold fp32 partial sums of each). Traffic: 2 N H elements read, 4 N bytes written.
    """
    program = tl.program_id(0)
    share = (positions + tl.num_programs(0) - 1) // tl.num_programs(0)
    first = program * share
    last = tl.minimum(first + share, positions)
    lane = tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    if first < last:
        for expert in range(tl.load(bin_ids_ptr + first), tl.load(bin_ids_ptr + last - 1) + 1):
            start, end, kept, row = _segment(bins_ptr, padded_bins_ptr, expert, capacity, BINNED)
            begin = tl.maximum(first, start)
            for block in range(begin, tl.minimum(last, kept), BLOCK):
                count = tl.minimum(BLOCK, tl.minimum(last, kept) - block)
                index = tl.load(indices_ptr + block + lane, mask=lane < count, other=0)
                x_at = x_ptr + tl.cast(row + block - start, tl.int64) * x_stride
                dots = tl.zeros((BLOCK,), dtype=tl.float32)
                if ASCEND:
                    # Compared in fp32: the vector units compare no integers, and a lane number is exact.
                    lane_number = lane.to(tl.float32)
                    for i in range(0, count):
                        token = tl.get_element(index, (i,)) // TOP_K
                        dot = 0.0
                        for tile in range(0, H, COLUMNS):
                            inside = tile + column < H
                            x = tl.load(x_at + i * x_stride + tile + column, mask=inside, other=0.0)
                            grad_at = grad_ptr + token.to(tl.int64) * grad_stride + tile + column
                            grad = tl.load(grad_at, mask=inside, other=0.0)
                            dot += tl.sum(x.to(tl.float32) * grad.to(tl.float32))
                        dots = tl.where(lane_number == tl.cast(i, tl.float32), dot, dots)
                else:
                    token = (index // TOP_K).to(tl.int64)
                    for tile in range(0, H, COLUMNS):
                        inside = (lane < count)[:, None] & (tile + column < H)[None, :]
                        x = tl.load(x_at + lane[:, None] * x_stride + tile + column[None, :], mask=inside, other=0.0)
                        grad_at = grad_ptr + token[:, None] * grad_stride + tile + column[None, :]
                        grad = tl.load(grad_at, mask=inside, other=0.0)
                        dots += tl.sum(x.to(tl.float32) * grad.to(tl.float32), axis=1)
                tl.store(out_ptr + block + lane, dots, mask=lane < count)
            if BINNED:
                zeros = tl.zeros((BLOCK,), dtype=tl.float32)
                for block in range(tl.maximum(begin, kept), tl.minimum(last, end), BLOCK):
                    tl.store(out_ptr + block + lane, zeros, mask=block + lane < tl.minimum(last, end))
