"""Triton kernels from the routing map to the rows of a layout: adapter and counts in one launch, placement in a
second, the adapter's backward in a third. `reference` states the contract of each operation.

The algorithm is a stable counting sort of the routes by expert, whose tables B programs share: these own consecutive
ranges of ceil(T / B) tokens. `route_count` compacts its range and counts its routes of
each expert; `route_place` gives program b the routes of programs 0..b-1 as its start, so that rows come out stable
by (expert, token) with no sort, no atomics and no barrier. A (tokens, experts) tile turns into K compact slots by
K select-and-reduce steps: the number of a route is the inclusive cumulative sum of its row of the map, a select
keeps the route of slot k and a sum over the experts reads it out. No element is ever scattered.

What shaped this for Ascend: integer vector compares fall back to scalar code, so expert ids and slot numbers (at
most 4,096, exact in fp32) are compared as fp32, while row numbers stay int32; scattered element accesses have no
vector form, so the (tokens, K) arrays are read and written as tiles, where CUDA reads and writes their columns;
the grid is one program a vector core. CUDA spares the K reductions: it stores each route to its slot, ranks 128 routes
at a time by comparing each with each, and moves the experts' next rows on by a histogram (integers in shared memory,
so its order of addition does not show); `route_words` has the adapter's fast path.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ascend_moe.backend.device import Target, target_of
from megatron_ascend_moe.backend.launch import Variant, ceil_div, launch, next_power_of_two, token_ranges
from megatron_ascend_moe.kernels.checks import (
    MAX_INDEX,
    PROB_DTYPES,
    check_route_sizes,
    check_routing_map,
    check_slots,
)
from megatron_ascend_moe.kernels.route_words import EXPERTS_OF_WORD, route_count_words_kernel
from megatron_ascend_moe.kernels.tuning import route_programs, route_tile


@triton.jit
def _comparable(index, ASCEND: tl.constexpr):
    """Small integers in the type that this device compares as vectors."""
    if ASCEND:
        return index.to(tl.float32)
    else:
        return index


@triton.jit
def _slot_column(values_ptr, tile, slot, token, in_range, k: tl.constexpr, K: tl.constexpr, ASCEND: tl.constexpr):
    """Slot k of each token of a (tokens, K) array: out of its tile on Ascend, from memory on CUDA."""
    if ASCEND:
        return tl.sum(tl.where((_comparable(slot, ASCEND) == k)[None, :], tile, 0), 1)
    else:
        return tl.load(values_ptr + token * K + k, mask=in_range, other=-1)


@triton.jit(do_not_specialize=["T", "tokens"])
def _route_count_kernel(
    probs_ptr,  # (T, E) float
    map_ptr,  # (T, E) bool or integer
    probs_out_ptr,  # (T, K) fp32
    ids_out_ptr,  # (T, K) int32
    counts_ptr,  # (B, E + 1) int32
    probs_stride,
    map_stride,
    T,
    tokens,  # of one program
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,  # E, K and tokens of a tile: powers of two, on Ascend E and K multiples of 32 and 8
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PITCH: tl.constexpr,  # of counts_BE
    MAP_IS_BOOL: tl.constexpr,
    DROP_ZERO: tl.constexpr,
    ASCEND: tl.constexpr,
):
    """The first K routes of each token, experts ascending, -1 and 0 in slots without; routes of each expert and rows of
    more than K routes among this program's tokens (`reference.route_count`).

    probs: fp16, bf16, fp32 or, on CUDA, fp64; rows of probs and of the map probs_stride and map_stride elements apart.
    Traffic: T E elements of the map (bool as bytes), on Ascend or with DROP_ZERO also of probs, else the routed ones;
    8 T K bytes out, 4 (E + 1) a program.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    local = tl.arange(0, TOKENS)
    first = program * tokens
    last = tl.minimum(first + tokens, T)
    count = tl.zeros([EXPERTS], tl.int32)
    overflow = tl.zeros([TOKENS], tl.int32)
    for start in range(first, last, TOKENS):
        token = start + local
        in_range = token < last
        in_tile = in_range[:, None] & (expert < E)[None, :]
        map_at = map_ptr + tl.cast(start, tl.int64) * map_stride
        probs_at = probs_ptr + tl.cast(start, tl.int64) * probs_stride
        routed = tl.load(map_at + (local[:, None] * map_stride + expert[None, :]), mask=in_tile, other=0)
        if not MAP_IS_BOOL:
            routed = routed != 0
        routed = routed.to(tl.int32)
        probs_at += local[:, None] * probs_stride + expert[None, :]
        if DROP_ZERO or ASCEND:
            probs = tl.load(probs_at, mask=in_tile, other=0.0)
            if ASCEND:
                probs = probs.to(tl.float32)
            if DROP_ZERO:
                routed = tl.where(probs == 0.0, 0, routed)
        else:
            probs = tl.load(probs_at, mask=in_tile & (routed != 0), other=0.0)
        probs = probs.to(tl.float32)

        routes = tl.sum(routed, 1)
        number = _comparable(tl.cumsum(routed, 1) * routed, ASCEND)  # 1 + slot of a route, 0 elsewhere
        count += tl.sum(tl.where(number <= K, routed, 0), 0)
        overflow += tl.minimum(tl.maximum(routes - K, 0), 1)
        at = token[:, None] * K + slot[None, :]
        in_slots = in_range[:, None] & (slot < K)[None, :]
        if ASCEND:
            ids_tile = tl.full([TOKENS, SLOTS], -1, tl.int32)
            probs_tile = tl.zeros([TOKENS, SLOTS], tl.float32)
            for k in tl.static_range(K):
                ids = tl.sum(tl.where(number == k + 1, expert[None, :] + 1, 0), 1) - 1
                values = tl.sum(tl.where(number == k + 1, probs, 0.0), 1)
                is_slot = (_comparable(slot, ASCEND) == k)[None, :]
                ids_tile = tl.where(is_slot, ids[:, None], ids_tile)
                probs_tile = tl.where(is_slot, values[:, None], probs_tile)
            tl.store(ids_out_ptr + at, ids_tile, mask=in_slots)
            tl.store(probs_out_ptr + at, probs_tile, mask=in_slots)
        else:
            kept = (number > 0) & (number <= K)
            slot_at = token[:, None] * K + number - 1
            tl.store(ids_out_ptr + slot_at, tl.broadcast_to(expert[None, :], [TOKENS, EXPERTS]), mask=kept)
            tl.store(probs_out_ptr + slot_at, probs, mask=kept)
            empty = in_slots & (slot[None, :] >= routes[:, None])
            tl.store(ids_out_ptr + at, -1, mask=empty)
            tl.store(probs_out_ptr + at, 0.0, mask=empty)
    tl.store(counts_ptr + program * PITCH + expert, count, mask=expert < E)
    tl.store(counts_ptr + program * PITCH + E, tl.sum(overflow, 0))


@functools.cache
def _count_variant(target: Target, E: int, K: int, map_is_bool: bool, drop_zero: bool) -> Variant:
    tile = route_tile(target, E, K, "route_count")
    constants = {"E": E, "K": K, "MAP_IS_BOOL": map_is_bool, "DROP_ZERO": drop_zero, **tile.constants}
    constants |= {"PITCH": _pitch(target, E), "ASCEND": target.ascend}
    return Variant(_route_count_kernel, constants, tile.num_warps)


@functools.cache
def _count_words_variant(target: Target, E: int, K: int) -> Variant:
    tile = route_tile(target, E, K, "route_count_words")
    constants = {"E": E, "K": K, "WORDS": tile.experts, "SLOTS": tile.slots, "TOKENS": tile.tokens}
    return Variant(route_count_words_kernel, {**constants, "PITCH": _pitch(target, E)}, tile.num_warps)


def route_count(
    probs_TE: Tensor, routing_map_TE: Tensor, topk: int, drop_zero_probs: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.route_count`. One launch, one read of the map; rows may be strided.

    Traffic: T E of the map, the routed probabilities (on Ascend all of them) and 8 T K out.
    """
    T, E = check_routing_map(probs_TE, routing_map_TE, topk)
    target = target_of(probs_TE.device)
    if probs_TE.dtype == torch.float64 and not target.has_fp64:
        probs_TE = probs_TE.to(torch.float32)  # the result is fp32 all the same
    probs_TE, routing_map_TE = _unit_stride(probs_TE), _unit_stride(routing_map_TE)
    is_bool = routing_map_TE.dtype == torch.bool
    by_words = not target.ascend and not drop_zero_probs and _is_words(routing_map_TE)
    programs, tokens = token_ranges(T, route_programs(target, T, E))
    probs_TK = torch.empty((T, topk), dtype=torch.float32, device=probs_TE.device)
    expert_ids_TK = torch.empty((T, topk), dtype=torch.int32, device=probs_TE.device)
    counts_BE = _empty_counts(programs, E, target, probs_TE.device)
    if is_bool:
        routing_map_TE = routing_map_TE.view(torch.int64 if by_words else torch.uint8)
    variant = _count_words_variant(target, E, topk) if by_words else _count_variant(target, E, topk, is_bool, drop_zero_probs)
    tensors = (probs_TE, routing_map_TE, probs_TK, expert_ids_TK, counts_BE)
    numbers = (probs_TE.stride(0), routing_map_TE.stride(0), T, tokens)
    launch(variant, target, probs_TE.device, programs, tensors, numbers)
    return probs_TK, expert_ids_TK, counts_BE


@triton.jit(do_not_specialize=["T", "tokens"])
def _route_count_backward_kernel(
    grad_ptr,  # (T, K) fp32
    ids_ptr,  # (T, K) int32
    out_ptr,  # (T, E)
    T,
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ASCEND: tl.constexpr,
):
    """out[t, ids[t, k]] = grad[t, k], 0 elsewhere, in out's dtype: fp16, bf16, fp32 or, on CUDA, fp64
    (`reference.route_count_backward`).

    Traffic: 8 T K bytes in, T E elements out. A tile of out is made by K selects: a scattered store of elements has no
    vector form on Ascend.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    local = tl.arange(0, TOKENS)
    comparable_expert = _comparable(expert, ASCEND)
    first = program * tokens
    last = tl.minimum(first + tokens, T)
    for start in range(first, last, TOKENS):
        token = start + local
        in_range = token < last
        at = token[:, None] * K + slot[None, :]
        in_slots = in_range[:, None] & (slot < K)[None, :]
        ids_tile = tl.load(ids_ptr + at, mask=in_slots, other=-1) if ASCEND else at
        grad_tile = tl.load(grad_ptr + at, mask=in_slots, other=0.0) if ASCEND else at
        out = tl.zeros([TOKENS, EXPERTS], tl.float32)
        for k in tl.static_range(K):
            ids = _slot_column(ids_ptr, ids_tile, slot, token, in_range, k, K, ASCEND)
            grad = _slot_column(grad_ptr, grad_tile, slot, token, in_range, k, K, ASCEND)
            mine = _comparable(ids, ASCEND)[:, None] == comparable_expert[None, :]
            out = tl.where(mine, grad[:, None], out)
        out_at = out_ptr + tl.cast(start, tl.int64) * E + (local[:, None] * E + expert[None, :])
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=in_range[:, None] & (expert < E)[None, :])


@functools.cache
def _count_backward_variant(target: Target, E: int, K: int) -> Variant:
    tile = route_tile(target, E, K, "route_count_backward")
    constants = {"E": E, "K": K, "ASCEND": target.ascend, **tile.constants}
    return Variant(_route_count_backward_kernel, constants, tile.num_warps)


def route_count_backward(grad_probs_TK: Tensor, expert_ids_TK: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    """See `reference.route_count_backward`. One launch; traffic: 8 T K in and T E of `dtype` out."""
    if dtype not in PROB_DTYPES:
        raise ValueError(f"gradient of dtype {dtype}: expected one of {PROB_DTYPES}")
    check_slots("grad_probs", grad_probs_TK, torch.float32)
    T, K = check_slots("expert_ids", expert_ids_TK, torch.int32, *grad_probs_TK.shape)
    check_route_sizes(T, num_experts, K)
    target = target_of(grad_probs_TK.device)
    written = torch.float32 if dtype == torch.float64 and not target.has_fp64 else dtype
    variant = _count_backward_variant(target, num_experts, K)
    programs = target.cores if target.ascend else ceil_div(max(T, 1), variant.constants["TOKENS"])
    programs, tokens = token_ranges(T, programs)
    grad_TE = torch.empty((T, num_experts), dtype=written, device=grad_probs_TK.device)
    launch(variant, target, grad_TE.device, programs, (grad_probs_TK, expert_ids_TK, grad_TE), (T, tokens))
    return grad_TE.to(dtype)


@triton.jit(do_not_specialize=["T", "tokens"])
def _id_count_kernel(
    ids_ptr,  # (T, K) int32
    counts_ptr,  # (B, E + 1) int32
    T,
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PITCH: tl.constexpr,
    ASCEND: tl.constexpr,
):
    """Routes of each expert among this program's tokens, by compact ids in any order, -1 where none
    (`reference.id_count`). Traffic: 4 T K bytes in, 4 (E + 1) out a program. No histogram: Ascend's is unreliable."""
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    first = program * tokens
    last = tl.minimum(first + tokens, T)
    count = tl.zeros([EXPERTS], tl.int32)
    for start in range(first, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        in_range = token < last
        in_slots = in_range[:, None] & (slot < K)[None, :]
        ids_tile = tl.load(ids_ptr + (token[:, None] * K + slot[None, :]), mask=in_slots, other=-1)
        routed = tl.zeros([TOKENS, EXPERTS], tl.int32)
        for k in tl.static_range(K):
            ids = _slot_column(ids_ptr, ids_tile, slot, token, in_range, k, K, ASCEND)
            mine = _comparable(ids, ASCEND)[:, None] == _comparable(expert, ASCEND)[None, :]
            routed = tl.where(mine, 1, routed)
        count += tl.sum(routed, 0)
    tl.store(counts_ptr + program * PITCH + expert, count, mask=expert < E)
    tl.store(counts_ptr + program * PITCH + E, 0)


@functools.cache
def _id_count_variant(target: Target, E: int, K: int) -> Variant:
    tile = route_tile(target, E, K, "id_count")
    constants = {"E": E, "K": K, "ASCEND": target.ascend, **tile.constants, "PITCH": _pitch(target, E)}
    return Variant(_id_count_kernel, constants, tile.num_warps)


def id_count(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """See `reference.id_count`. One launch; traffic: 4 T K in."""
    T, K = check_slots("expert_ids", expert_ids_TK, torch.int32)
    check_route_sizes(T, num_experts, K)
    target = target_of(expert_ids_TK.device)
    programs, tokens = token_ranges(T, route_programs(target, T, num_experts))
    counts_BE = _empty_counts(programs, num_experts, target, expert_ids_TK.device)
    variant = _id_count_variant(target, num_experts, K)
    launch(variant, target, expert_ids_TK.device, programs, (expert_ids_TK, counts_BE), (T, tokens))
    return counts_BE


@triton.jit
def _sum_counts(counts_ptr, lo, hi, expert, E: tl.constexpr, PITCH: tl.constexpr, ROWS: tl.constexpr):
    """Routes of each expert counted by programs lo..hi-1: (EXPERTS)."""
    total = tl.zeros([ROWS, expert.shape[0]], tl.int32)
    for start in range(lo, hi, ROWS):
        row = start + tl.arange(0, ROWS)
        at = counts_ptr + (row[:, None] * PITCH + expert[None, :])
        total += tl.load(at, mask=(row < hi)[:, None] & (expert < E)[None, :], other=0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["T", "tokens", "programs", "capacity"])
def _route_place_kernel(
    ids_ptr,  # (T, K) int32
    counts_ptr,  # (B, E + 1) int32
    rows_ptr,  # (T, K) int32
    meta_ptr,  # (5 E + 1) int32
    T,
    tokens,
    programs,  # B
    capacity,  # C
    E: tl.constexpr,
    K: tl.constexpr,
    MULTIPLE: tl.constexpr,  # M
    BINNED: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PITCH: tl.constexpr,
    COUNT_ROWS: tl.constexpr,  # rows of counts_BE read at a time
    PROGRAMS: tl.constexpr,  # at least B, a power of two
    ASCEND: tl.constexpr,
):
    """The row of each slot, -1 where none or dropped by capacity, and the vectors of `meta` (`reference.route_place`).

    Traffic: 4 T K bytes in, 4 T K out, counts (from the cache) once a program, 4 (5 E + 1) out. Integer division has no
    vector form on Ascend, so that a padding multiple that is a power of two is a mask.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)
    before = _sum_counts(counts_ptr, 0, program, expert, E, PITCH, COUNT_ROWS)
    total = before + _sum_counts(counts_ptr, program, programs, expert, E, PITCH, COUNT_ROWS)
    if BINNED:
        kept = tl.minimum(total, capacity)
        padded = tl.zeros([EXPERTS], tl.int32) + capacity
    else:
        kept = total
        padded = _round_up(total, MULTIPLE)
    padded_bins = tl.cumsum(padded, 0)
    if program == 0:
        is_expert = expert < E
        tl.store(meta_ptr + expert, total, mask=is_expert)
        tl.store(meta_ptr + E + expert, padded, mask=is_expert)
        tl.store(meta_ptr + 2 * E + expert, tl.cumsum(kept, 0), mask=is_expert)
        tl.store(meta_ptr + 3 * E + expert, padded_bins, mask=is_expert)
        tl.store(meta_ptr + 4 * E + expert, kept, mask=is_expert)
        counter = tl.arange(0, PROGRAMS)
        overflow = tl.load(counts_ptr + counter * PITCH + E, mask=counter < programs, other=0)
        tl.store(meta_ptr + 5 * E, tl.sum(overflow, 0))

    next_row = padded_bins - padded + before
    first = program * tokens
    last = tl.minimum(first + tokens, T)
    if ASCEND:
        _place_one_by_one(ids_ptr, rows_ptr, next_row, first, last, capacity, expert, slot, K, BINNED, SLOTS, TOKENS)
    else:
        at = tl.arange(0, TOKENS * SLOTS)
        for start in range(first * K, last * K, TOKENS * SLOTS):
            held = start + at < last * K
            ids = tl.load(ids_ptr + start + at, mask=held, other=-1)
            named = tl.maximum(ids, 0)
            earlier = (ids[:, None] == ids[None, :]) & (at[:, None] < at[None, :])  # the same expert's, before it
            row = tl.gather(next_row, named, 0) + tl.sum(earlier.to(tl.int32), 0)
            unrouted = tl.sum((ids < 0).to(tl.int32), 0)  # which the histogram counts as expert 0's
            next_row += tl.histogram(named, EXPERTS) - tl.where(expert == 0, unrouted, 0)
            if BINNED:
                row = tl.where(row < (named + 1) * capacity, row, -1)
            tl.store(rows_ptr + start + at, tl.where(ids >= 0, row, -1), mask=held)


@triton.jit
def _place_one_by_one(
    ids_ptr,
    rows_ptr,
    next_row,  # (EXPERTS) int32: the row of each expert's next route
    first,
    last,
    capacity,
    expert,
    slot,
    K: tl.constexpr,
    BINNED: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Rows of the tokens first..last-1, route by route: read the expert's next row, and move that on by one.

    Ascend's compiler keeps each element of a (tokens, experts) tile that is summed over its experts in a 32-byte
    block, eight times its size, which leaves no room for a tile of any use; vectors over the experts stay dense.
    """
    expert_number = expert.to(tl.float32)
    slot_number = slot.to(tl.float32)
    at = tl.arange(0, TOKENS * SLOTS)
    for start in range(first, last, TOKENS):
        held = tl.minimum(last - start, TOKENS)
        ids = tl.load(ids_ptr + start * K + at, mask=at < held * K, other=-1)
        for i in range(0, held):
            rows = tl.full([SLOTS], -1, tl.int32)
            for k in range(0, K):
                expert_id = tl.get_element(ids, (i * K + k,))
                if expert_id >= 0:
                    row = tl.get_element(next_row, (expert_id,))
                    if BINNED:
                        row = tl.where(row < (expert_id + 1) * capacity, row, -1)
                    rows = tl.where(slot_number == tl.cast(k, tl.float32), row, rows)
                    next_row += tl.where(expert_number == expert_id.to(tl.float32), 1, 0)
            tl.store(rows_ptr + (start + i) * K + slot, rows, mask=slot < K)


@triton.jit
def _round_up(count, MULTIPLE: tl.constexpr):
    if MULTIPLE == 1:
        return count
    elif MULTIPLE & (MULTIPLE - 1) == 0:
        return (count + (MULTIPLE - 1)) & (-MULTIPLE)  # Ascend has no vector integer division
    else:
        return (count + (MULTIPLE - 1)) // MULTIPLE * MULTIPLE


@functools.cache
def _place_variant(
    target: Target, E: int, K: int, multiple: int, binned: bool, most_programs: int, pitch: int
) -> Variant:
    tile = route_tile(target, E, K, "route_place")
    constants = {"E": E, "K": K, "MULTIPLE": multiple, "BINNED": binned, **tile.constants, "PITCH": pitch}
    constants |= {"COUNT_ROWS": tile.count_rows, "PROGRAMS": most_programs, "ASCEND": target.ascend}
    return Variant(_route_place_kernel, constants, tile.num_warps)


def route_place(expert_ids_TK: Tensor, counts_BE: Tensor, pad_multiple: int, capacity: int) -> tuple[Tensor, Tensor]:
    """See `reference.route_place`; the counts' programs own ceil(T / B) consecutive tokens each.

    One launch; traffic: 8 T K, and counts_BE once per program (from the cache).
    """
    T, K = check_slots("expert_ids", expert_ids_TK, torch.int32)
    if counts_BE.dim() != 2 or counts_BE.dtype != torch.int32 or counts_BE.stride(1) != 1:
        raise ValueError(
            f"counts {tuple(counts_BE.shape)} of {counts_BE.dtype}, strides {counts_BE.stride()}: expected "
            "(B, E + 1) int32 with unit stride along the experts"
        )
    programs, E = counts_BE.shape[0], counts_BE.shape[1] - 1
    check_route_sizes(T, E, K)
    if pad_multiple < 1 or capacity < 0:
        raise ValueError(f"pad_multiple={pad_multiple}, capacity={capacity}: expected at least 1 and at least 0")
    bound = T * K + E * (capacity or pad_multiple - 1)
    if bound > MAX_INDEX:
        raise ValueError(f"a layout of up to {bound} rows: row numbers are int32, at most {MAX_INDEX}")
    target = target_of(expert_ids_TK.device)
    row_of_slot_TK = torch.empty((T, K), dtype=torch.int32, device=expert_ids_TK.device)
    meta = torch.empty(5 * E + 1, dtype=torch.int32, device=expert_ids_TK.device)
    multiple = 1 if capacity else pad_multiple
    most = max(programs, route_programs(target, T, E))  # one kernel for fewer programs too
    variant = _place_variant(target, E, K, multiple, capacity > 0, next_power_of_two(most), counts_BE.stride(0))
    tensors = (expert_ids_TK, counts_BE, row_of_slot_TK, meta)
    launch(variant, target, meta.device, programs, tensors, (T, ceil_div(T, programs), programs, capacity))
    return row_of_slot_TK, meta


def _empty_counts(programs: int, E: int, target: Target, device: torch.device) -> Tensor:
    """(B, E + 1) int32, rows _pitch apart."""
    return torch.empty_strided((programs, E + 1), (_pitch(target, E), 1), dtype=torch.int32, device=device)


def _pitch(target: Target, E: int) -> int:
    """On CUDA each row of counts starts at 64 bytes, so that the placement reads four counts at a time."""
    return E + 1 if target.ascend else ceil_div(E + 1, 16) * 16


def _unit_stride(values_TE: Tensor) -> Tensor:
    """Rows may lie apart, elements of a row may not: copy what is laid out otherwise."""
    return values_TE if values_TE.stride(1) == 1 else values_TE.contiguous()


def _is_words(map_TE: Tensor) -> bool:
    """Whether each row of the map is a number of aligned 64-bit words of eight bools."""
    aligned = map_TE.data_ptr() % EXPERTS_OF_WORD == 0 and map_TE.stride(0) % EXPERTS_OF_WORD == 0
    return map_TE.dtype == torch.bool and map_TE.shape[1] % EXPERTS_OF_WORD == 0 and aligned
