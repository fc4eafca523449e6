"""The kernels, in two implementations with one signature each: `reference` (plain torch) and Triton
(`route`, `rows`); the same for the MegaBlocks-signature launches (`positions_reference`, `positions`).
`select` and `select_positions` pick one; nothing here imports triton before it is asked for.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from megatron_ascend_moe.backend import device as backend_device
from megatron_ascend_moe.config import KERNELS


@dataclass(frozen=True)
class KernelSet:
    """The seven row-map operations of one implementation; `reference` documents each."""

    name: str  # "triton" or "torch"
    route_count: Callable
    route_count_backward: Callable
    id_count: Callable
    route_place: Callable
    permute_rows: Callable
    combine_rows: Callable
    combine_rows_backward: Callable


def select(kernels: str, device: torch.device | str) -> KernelSet:
    """The row-map operations of the implementation that `implementation` chooses; it states what is raised."""
    return _triton_kernels() if implementation(kernels, device) == "triton" else _torch_kernels()


def select_positions(kernels: str, device: torch.device | str) -> ModuleType:
    """The MegaBlocks-signature launches of the implementation that `implementation` chooses: the module
    `positions` (Triton) or its twin `positions_reference` (plain torch)."""
    if implementation(kernels, device) == "torch":
        return importlib.import_module(f"{__name__}.positions_reference")
    _prepare_interpreter()
    return importlib.import_module(f"{__name__}.positions")


def implementation(kernels: str, device: torch.device | str) -> str:
    """Choose the implementation, "triton" or "torch", that serves tensors on `device`.

    Args:
        kernels: "triton", "torch", or "auto": triton where the device is an NPU or a CUDA GPU and triton can
            be imported, torch elsewhere.
        device: where the tensors live.

    Raises:
        ValueError: `kernels` is none of the three.
        RuntimeError: `kernels` is "triton" and Triton cannot run on `device`.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r}: expected one of {', '.join(map(repr, KERNELS))}")
    device = torch.device(device)
    if kernels == "torch":
        return "torch"
    obstacle = backend_device.triton_obstacle(device)
    if kernels == "auto":
        # TRITON_INTERPRET=1 makes Triton run on the CPU, at the speed of a test: only "triton" asks for it.
        wanted = device.type in backend_device.ACCELERATORS and obstacle is None
        return "triton" if wanted else "torch"
    if obstacle is not None:
        raise RuntimeError(f"kernels='triton' cannot run on device {str(device)!r}: {obstacle}")
    return "triton"


@functools.cache
def _torch_kernels() -> KernelSet:
    return _collect("torch", "reference", "reference")


@functools.cache
def _triton_kernels() -> KernelSet:
    _prepare_interpreter()
    return _collect("triton", "route", "rows")


def _prepare_interpreter() -> None:
    """Where kernels are interpreted: with bounds checks and Triton-Ascend's extension operations."""
    if backend_device.interpreting():
        importlib.import_module("megatron_ascend_moe.toolchain.interpreter").register()


def _collect(name: str, route_module: str, rows_module: str) -> KernelSet:
    route = importlib.import_module(f"{__name__}.{route_module}")
    rows = importlib.import_module(f"{__name__}.{rows_module}")
    return KernelSet(
        name=name,
        route_count=route.route_count,
        route_count_backward=route.route_count_backward,
        id_count=route.id_count,
        route_place=route.route_place,
        permute_rows=rows.permute_rows,
        combine_rows=rows.combine_rows,
        combine_rows_backward=rows.combine_rows_backward,
    )
