"""The adapter's kernel for CUDA where eight experts of the bool map make one 64-bit word: an eighth of the elements.

A word's bytes are 0 or 1, so that word * 0x0101…01 holds in byte j the routes among experts 0..j of the word, and its
top byte all of them. The j-th byte of (n + 128) * 0x0101…01 - sums has its high bit set exactly where sums_j <= n,
without a borrow between bytes, as n and sums are at most 8: one subtraction compares eight experts.
"""

import triton
import triton.language as tl

EXPERTS_OF_WORD = 8
_BYTES: tl.constexpr = tl.constexpr(0x0101010101010101)


@triton.jit
def _at_most(sums, n):
    """1 in each byte of `sums` that is at most n, 0 in the others; n (int64) from 0 to 8."""
    return (((n + 128) * _BYTES - sums) >> 7) & _BYTES


@triton.jit
def _byte_sum(bytes_of_word):
    return (((bytes_of_word * _BYTES) >> 56) & 0xFF).to(tl.int32)


@triton.jit(do_not_specialize=["T", "tokens"])
def route_count_words_kernel(
    probs_ptr,  # (T, E) float
    words_ptr,  # (T, E / 8) int64, the bool map
    probs_out_ptr,  # (T, K) fp32
    ids_out_ptr,  # (T, K) int32
    counts_ptr,  # (B, E + 1) int32
    probs_stride,
    words_stride,
    T,
    tokens,  # of one program
    E: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,  # E / 8, K and the tokens of a tile (at most 128), as powers of two
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PITCH: tl.constexpr,  # of counts_BE
):
    """As `route._route_count_kernel`, without DROP_ZERO and for CUDA only; rows of probs and of words probs_stride and
    words_stride elements apart. Traffic: T E bytes of the map (twice, the second time from the cache), the routed
    probabilities, 8 T K bytes out, 4 (E + 1) a program.
    """
    program = tl.program_id(0)
    word = tl.arange(0, WORDS)
    slot = tl.arange(0, SLOTS)
    byte = tl.arange(0, 8)
    first = program * tokens
    last = tl.minimum(first + tokens, T)
    count = tl.zeros([WORDS, 8], tl.int32)
    overflow = tl.zeros([TOKENS], tl.int32)
    for start in range(first, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        in_range = token < last
        words_at = words_ptr + token.to(tl.int64)[:, None] * words_stride
        words = tl.load(words_at + word[None, :], mask=in_range[:, None] & (word < E // 8)[None, :], other=0)
        routes = _byte_sum(words)
        end = tl.cumsum(routes, 1)
        total = tl.sum(routes, 1)
        overflow += tl.minimum(tl.maximum(total - K, 0), 1)
        room = tl.minimum(tl.maximum(K - (end - routes), 0), 8).to(tl.int64)
        kept = tl.sum(words & _at_most(words * _BYTES, room), 0)  # a byte an expert: up to 128 tokens
        count += ((kept[:, None] >> (8 * byte)[None, :]) & 0xFF).to(tl.int32)

        # A word that ends at or before slot k lies before the word of slot k: count these, and their routes.
        before = (end[:, None, :] <= slot[None, :, None]) & (word < E // 8)[None, None, :]
        found = tl.sum(tl.where(before, routes[:, None, :] + 65536, 0), 2)
        valid = in_range[:, None] & (slot[None, :] < tl.minimum(total, K)[:, None])
        own = tl.load(words_at + found // 65536, mask=valid, other=0)
        ordinal = tl.where(valid, slot[None, :] - found % 65536, 0).to(tl.int64)
        ids = found // 65536 * 8 + _byte_sum(_at_most(own * _BYTES, ordinal))
        probs_at = probs_ptr + token.to(tl.int64)[:, None] * probs_stride + ids
        probs = tl.load(probs_at, mask=valid, other=0.0).to(tl.float32)
        at = token[:, None] * K + slot[None, :]
        in_slots = in_range[:, None] & (slot < K)[None, :]
        tl.store(ids_out_ptr + at, tl.where(valid, ids, -1), mask=in_slots)
        tl.store(probs_out_ptr + at, probs, mask=in_slots)
    counts_at = counts_ptr + program * PITCH
    tl.store(counts_at + word[:, None] * 8 + byte[None, :], count, mask=(word < E // 8)[:, None] & (byte < 8)[None, :])
    tl.store(counts_at + E, tl.sum(overflow, 0))
