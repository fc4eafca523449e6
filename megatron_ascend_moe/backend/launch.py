"""The one way a kernel is launched: grid limits, compile options and the current device."""

import contextlib
from typing import Any

import torch

from megatron_ascend_moe.backend.device import Target

MAX_PROGRAMS = 65_535  # Ascend's limit on a launch grid, kept on CUDA too: kernels loop
MAX_INT32 = 2**31 - 1


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

    On CUDA sums are never fused into multiply-adds, so that they round as the plain-torch twin's do; Triton-Ascend
    warns against that switch, and the IR that it hands on keeps the two apart.
    """
    if not 1 <= programs <= MAX_PROGRAMS:
        raise ValueError(f"launch grid of {programs} programs: expected 1 to {MAX_PROGRAMS}")
    with _current(device):
        if not target.compiled:
            kernel[(programs,)](*args, **constants)
        elif target.ascend:
            kernel[(programs,)](*args, **constants, multibuffer=True)
        else:
            _launch_on_cuda(kernel, device, programs, args, constants, num_warps)


_compiled: dict[tuple, tuple[Any, tuple]] = {}  # a launch's specialization -> (compiled kernel, its constants)


def _launch_on_cuda(
    kernel: Any, device: torch.device, programs: int, args: tuple, constants: dict[str, Any], num_warps: int
) -> None:
    """Launch what was compiled for arguments of this kind before. Triton's own launch derives its cache key anew each
    time, which takes the host longer than everything else a launcher does. This key tells at least as much apart: of
    a tensor its type, device and alignment to 16; of an integer the value 1, divisibility by 16 and the width."""
    kinds, values = [], []  # addresses for tensors, which Triton would ask for them again and have the driver check
    for arg in args:
        if isinstance(arg, torch.Tensor):
            address = arg.data_ptr()
            kinds += arg.dtype, arg.get_device(), address % 16
            values.append(address)
        else:
            kinds.append(arg and (arg == 1) + 2 * (arg % 16 == 0) + 4 * (arg > MAX_INT32))
            values.append(arg)
    key = (id(kernel), num_warps, *constants.values(), *kinds)
    if key in _compiled:
        compiled, tail = _compiled[key]
        compiled[(programs, 1, 1)](*values, *tail)
    else:
        compiled = kernel[(programs,)](*args, **constants, num_warps=num_warps, enable_fp_fusion=False)
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device: make the tensors' device that, where it is not already."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    if device.type == "npu" and device.index != torch.npu.current_device():
        return torch.npu.device(device)
    return contextlib.nullcontext()
