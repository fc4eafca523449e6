"""The tile planner: how much of a row, and how many rows or tokens, a kernel holds in the Unified Buffer (UB).

Pure arithmetic on bytes, so that every model shape on every SoC is tested without a device. A kernel's launcher
states what it keeps live (`RowBuffers`); the planner answers with whole rows where they fit, splits a row only
where the UB demands it, and refuses, with the numbers, what cannot fit.
"""

from dataclasses import dataclass

# DMAs and vector instructions address the UB in blocks of 32 bytes; a tile is a whole number of them.
UB_BLOCK = 32

# Share of the UB that a plan may fill. The compilers of CANN 8.5 and 9.0 (ascendnpu-ir 1.0.0 and 1.1.0) take up
# to a third more UB than 1.2.0 for the same kernel and fail where 1.2.0 silently gives up double buffering.
UB_SHARE = 0.75

# The compiler keeps two copies of each buffer that a DMA fills or drains inside a loop.
MULTIBUFFER_COPIES = 2


@dataclass(frozen=True)
class RowBuffers:
    """What one program of a row kernel keeps live in the UB.

    Attributes:
        rows: buffers of one row (of one column tile of it) in the rows' dtype that a DMA fills or drains.
        tiles: buffers of `sub_block` rows in the rows' dtype that a DMA fills or drains.
        constant_tiles: buffers of `sub_block` rows that are set once (zeros). Not double-buffered.
        fp32_rows: rows in fp32 that vector instructions work on: accumulators and casts. Not double-buffered.
        vector_bytes: index, bin, weight and probability vectors, one copy, whatever the tile's width.
    """

    rows: int = 0
    tiles: int = 0
    constant_tiles: int = 0
    fp32_rows: int = 0
    vector_bytes: int = 0


@dataclass(frozen=True)
class RowTiles:
    """A plan: tiles of `sub_block` rows by `block_x` columns; `column_tiles` of them cover a row.

    `ub_bytes` is what the plan fills, of the `ub_budget` it was allowed.
    """

    block_x: int
    column_tiles: int
    sub_block: int
    ub_bytes: int
    ub_budget: int


def ub_budget(ub_bytes: int) -> int:
    """Bytes of a UB of `ub_bytes` that a plan may fill."""
    return int(ub_bytes * UB_SHARE)


def plan_rows(
    hidden: int,
    itemsize: int,
    ub_bytes: int,
    buffers: RowBuffers,
    *,
    kernel: str,
    max_sub_block: int = 1,
    multibuffer: bool = True,
) -> RowTiles:
    """Plan the tile of a row kernel: the fewest column tiles first, then the most rows, up to `max_sub_block`.

    Args:
        hidden: H, columns of a row.
        itemsize: bytes of one element of the rows' dtype (2 for bf16 and fp16, 4 for fp32).
        ub_bytes: Unified Buffer of one vector core.
        buffers: what the kernel keeps live.
        kernel: name of the kernel, for the message.
        max_sub_block: most rows of a tile that the kernel can use.
        multibuffer: whether the compiler is asked to double-buffer.

    Raises:
        ValueError: not even one 32-byte block of columns fits; the message carries the numbers.
    """
    if hidden < 1 or max_sub_block < 1:
        raise ValueError(f"{kernel}: hidden and max_sub_block must be at least 1, got {hidden} and {max_sub_block}")
    budget = ub_budget(ub_bytes)
    blocks = -(-hidden * itemsize // UB_BLOCK)  # 32-byte blocks of a whole row
    per_block = _fill(buffers, itemsize, 1, UB_BLOCK // itemsize, multibuffer) - _fixed(buffers, multibuffer)
    affordable = (budget - _fixed(buffers, multibuffer)) // per_block
    if affordable < 1:
        raise ValueError(
            f"{kernel}: no tile fits the Unified Buffer: index and scalar vectors take "
            f"{_fixed(buffers, multibuffer)} B and one 32-byte column block {per_block} B, of {budget} B "
            f"({UB_SHARE:.0%} of {ub_bytes} B); use fewer experts per launch or multibuffer=False"
        )
    column_tiles = -(-blocks // affordable)
    block_x = -(-blocks // column_tiles) * (UB_BLOCK // itemsize)
    sub_block = 1
    while (
        sub_block < max_sub_block
        and _fill(buffers, itemsize, sub_block + 1, block_x, multibuffer) <= budget
    ):
        sub_block += 1
    filled = _fill(buffers, itemsize, sub_block, block_x, multibuffer)
    return RowTiles(block_x, -(-hidden // block_x), sub_block, filled, budget)


def plan_tokens(
    bytes_per_token: int, fixed_bytes: int, ub_bytes: int, *, kernel: str, max_tokens: int = 64
) -> int:
    """Tokens of one block of a routing kernel: the largest power of two, up to `max_tokens`, that fits.

    Args:
        bytes_per_token: bytes that one more token takes, all live copies counted.
        fixed_bytes: bytes that do not grow with the tokens.
        ub_bytes: Unified Buffer of one vector core.
        kernel: name of the kernel, for the message.
        max_tokens: a power of two, the most tokens that the kernel can use.

    Raises:
        ValueError: not even one token fits; the message carries the numbers.
    """
    budget = ub_budget(ub_bytes)
    if fixed_bytes + bytes_per_token > budget:
        raise ValueError(
            f"{kernel}: one token does not fit the Unified Buffer: it takes {bytes_per_token} B beside "
            f"{fixed_bytes} B of fixed vectors, of {budget} B ({UB_SHARE:.0%} of {ub_bytes} B); use fewer experts"
        )
    tokens = max_tokens
    while fixed_bytes + tokens * bytes_per_token > budget:
        tokens //= 2
    return tokens


def _fixed(buffers: RowBuffers, multibuffer: bool) -> int:
    """Bytes that do not depend on the tile's width."""
    return buffers.vector_bytes * (MULTIBUFFER_COPIES if multibuffer else 1)


def _fill(buffers: RowBuffers, itemsize: int, sub_block: int, block_x: int, multibuffer: bool) -> int:
    """Bytes that tiles of `sub_block` rows by `block_x` columns fill."""
    copies = MULTIBUFFER_COPIES if multibuffer else 1
    row_bytes = block_x * itemsize
    moved = (buffers.rows + buffers.tiles * sub_block) * row_bytes * copies
    kept = buffers.constant_tiles * sub_block * row_bytes + buffers.fp32_rows * block_x * 4
    return _fixed(buffers, multibuffer) + moved + kept
