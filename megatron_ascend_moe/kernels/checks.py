"""Cheap checks of what the launchers are given: what, got, expected. Values on the device are not read."""

import torch
from torch import Tensor

MAX_EXPERTS = 4096  # exact in fp32 with room to spare; on Ascend the tile planner stops earlier, by the Unified Buffer
MAX_INDEX = 2**31 - 1  # row, slot and token numbers are int32
PROB_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ROW_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_routing_map(probs_TE: Tensor, routing_map_TE: Tensor, topk: int) -> torch.Size:
    if probs_TE.dim() != 2 or probs_TE.shape != routing_map_TE.shape:
        raise ValueError(
            f"probs {tuple(probs_TE.shape)} and routing map {tuple(routing_map_TE.shape)}: expected equal (T, E)"
        )
    if probs_TE.dtype not in PROB_DTYPES:
        raise ValueError(f"probs of {probs_TE.dtype}: expected one of {PROB_DTYPES}")
    if routing_map_TE.is_floating_point():
        raise ValueError(f"routing map of {routing_map_TE.dtype}: expected bool or an integer type")
    check_route_sizes(*probs_TE.shape, topk)
    return probs_TE.shape


def check_route_sizes(T: int, E: int, K: int) -> None:
    if not 1 <= E <= MAX_EXPERTS:
        raise ValueError(f"{E} experts: expected 1 to {MAX_EXPERTS}")
    if not 1 <= K:
        raise ValueError(f"topk={K}: expected at least 1")
    if T * max(K, 1) > MAX_INDEX:
        raise ValueError(f"{T} tokens of {K} slots: slot numbers are int32, at most {MAX_INDEX}")


def check_slots(
    name: str, slots_TK: Tensor, dtype: torch.dtype, tokens: int | None = None, slots: int | None = None
) -> torch.Size:
    """A contiguous (T, K) array of `dtype`, of these sizes where they are known."""
    shape = slots_TK.shape  # asked once, here and below: what is asked of a tensor takes the host most of a check
    fits = len(shape) == 2 and slots_TK.dtype == dtype and slots_TK.is_contiguous()
    if not fits or tokens not in (None, shape[0]) or slots not in (None, shape[1]):
        raise ValueError(
            f"{name} {tuple(shape)} of {slots_TK.dtype}, strides {slots_TK.stride()}: expected contiguous "
            f"({'T' if tokens is None else tokens}, {'K' if slots is None else slots}) of {dtype}"
        )
    return shape


def check_rows(name: str, rows_NH: Tensor, hidden: int | None = None) -> torch.Size:
    """Rows of a floating type, elements of a row adjacent; rows themselves may lie apart."""
    shape = rows_NH.shape
    fits = len(shape) == 2 and rows_NH.dtype in ROW_DTYPES and (rows_NH.stride(1) == 1 or shape[1] == 1)
    if not fits or shape[1] < 1 or hidden not in (None, shape[1]):
        raise ValueError(
            f"{name} {tuple(shape)} of {rows_NH.dtype}, strides {rows_NH.stride()}: expected "
            f"(rows, {'H' if hidden is None else hidden}) of fp16, bf16 or fp32 with unit stride along H"
        )
    return shape


def check_vector(name: str, values: Tensor, dtype: torch.dtype, length: int | None = None) -> int:
    shape = values.shape
    fits = len(shape) == 1 and values.dtype == dtype and values.is_contiguous()
    if not fits or length not in (None, shape[0]):
        raise ValueError(
            f"{name} {tuple(shape)} of {values.dtype}: expected contiguous "
            f"({'N' if length is None else length}) of {dtype}"
        )
    return shape[0]
