"""The one way a kernel is launched: grid limits, compile options and the current device."""

import contextlib
from typing import Any

import torch

from megatron_ascend_moe.backend.device import Target

MAX_PROGRAMS = 65_535  # Ascend's limit on a launch grid, kept on CUDA too: kernels loop


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def token_ranges(num_tokens: int, max_programs: int) -> tuple[int, int]:
    """Split tokens into equal consecutive ranges, the last one shorter: (programs, tokens of one program).

    `tokens == ceil_div(num_tokens, programs)` always holds, so that who knows the number of programs knows the
    ranges. No tokens are one empty program.
    """
    if num_tokens == 0:
        return 1, 0
    programs = ceil_div(num_tokens, ceil_div(num_tokens, min(max_programs, MAX_PROGRAMS)))
    return programs, ceil_div(num_tokens, programs)


def launch(
    kernel: Any,
    target: Target,
    device: torch.device,
    programs: int,
    args: tuple,
    constants: dict[str, Any],
    num_warps: int,
) -> None:
    """Launch `programs` programs of `kernel` on `device`; `constants` are its constexpr arguments.

    Sums are never fused into multiply-adds, so that every device rounds as the plain-torch twin does.
    """
    if not 1 <= programs <= MAX_PROGRAMS:
        raise ValueError(f"launch grid of {programs} programs: expected 1 to {MAX_PROGRAMS}")
    options: dict[str, Any] = {}
    if target.compiled:
        options["enable_fp_fusion"] = False
        options |= {"multibuffer": True} if target.ascend else {"num_warps": num_warps}
    with _current(device):
        kernel[(programs,)](*args, **constants, **options)


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device: make the tensors' device that, where it is not already."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    if device.type == "npu" and device.index != torch.npu.current_device():
        return torch.npu.device(device)
    return contextlib.nullcontext()
