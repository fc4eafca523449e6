"""Small kernels whose right numbers, accesses and memory plans are known by hand."""

import triton
import triton.language as tl


@triton.jit
def gather_rows(
    x_ptr, index_ptr, out_ptr, rows, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One tile of ROWS rows, assembled in the Unified Buffer and stored at once."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    index = tl.load(index_ptr + row, mask=row < rows, other=0)
    tile = tl.zeros((ROWS, COLUMNS), dtype=x_ptr.dtype.element_ty)
    for i in range(0, tl.minimum(ROWS, rows - first)):
        source = tl.get_element(index, (i,)).to(tl.int64)
        values = tl.load(x_ptr + source * H + column, mask=column < H, other=0.0)
        tile = tl.insert_slice(tile, values[None, :], offsets=(i, 0), sizes=(1, COLUMNS), strides=(1, 1))
    tl.store(out_ptr + row[:, None] * H + column[None, :], tile, mask=(row < rows)[:, None] & (column < H)[None, :])


@triton.jit
def split_tile(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FROM: tl.constexpr):
    """Rows of one tile, taken out of it and stored in reverse order; FROM is where the first one is taken."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    tile = tl.load(x_ptr + row[:, None] * COLUMNS + column[None, :])
    for i in range(0, ROWS):
        values = tl.extract_slice(tile, (FROM + i, 0), (1, COLUMNS), (1, 1))
        tl.store(out_ptr + (ROWS - 1 - i) * COLUMNS + column, tl.reshape(values, (COLUMNS,)))


@triton.jit
def running_sums(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    """Cumulative sums of one tile along an axis."""
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + at, tl.cumsum(tl.load(x_ptr + at), AXIS, reverse=REVERSE))


@triton.jit
def copy_past_the_end(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Reads and writes BLOCK elements, whatever the tensors hold."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


@triton.jit
def round_to_half(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """fp32 rounded to the output's type."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, (tl.load(x_ptr + at) * 1.0009765625).to(out_ptr.dtype.element_ty))


@triton.jit
def copy_rows(
    x_ptr, index_ptr, out_ptr, rows, H: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, FAULT: tl.constexpr
):
    """out[i] = x[index[i]] by whole-row DMAs, as the package's kernels do it, or with one of the faults that a report
    must name."""
    first = tl.program_id(0) * BLOCK
    lane = tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    index = tl.load(index_ptr + first + lane, mask=first + lane < rows, other=0)
    if FAULT == "integers compared":
        index = tl.where(index == 50, 0, index)
    for i in range(0, tl.minimum(BLOCK, rows - first)):
        source = tl.get_element(index, (i,)).to(tl.int64)
        out_at = out_ptr + (first + i).to(tl.int64) * H
        for start in range(0, H, COLUMNS):
            inside = start + column < H
            if FAULT == "a scalar load in the loop over columns":
                source = tl.load(index_ptr + first + i).to(tl.int64)
            if FAULT == "element by element":
                flipped = tl.load(index_ptr + start + column, mask=inside, other=0)
                values = tl.load(x_ptr + source * H + flipped, mask=inside)
            else:
                values = tl.load(x_ptr + source * H + start + column, mask=inside)
            if FAULT == "a mask made of data":
                tl.store(out_at + start + column, values, mask=inside & (values > 0))
            else:
                tl.store(out_at + start + column, values, mask=inside)
            if FAULT == "a row stored twice":
                tl.store(out_at + start + column, values, mask=inside)
