"""The one way a kernel is launched: grid limits, compile options and the current device."""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

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


class Variant:
    """A kernel with its constexpr arguments and warps, and what was compiled of it: made once for a kind of call (by a
    cached function), since deriving all that anew takes the host longer than everything else a launcher does."""

    def __init__(self, kernel: Any, constants: dict[str, Any], num_warps: int) -> None:
        self.kernel, self.constants, self.num_warps = kernel, constants, num_warps
        self._compiled: dict[tuple, Any] = {}  # kinds of the other arguments -> compiled kernel

    def launch_on_cuda(self, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[int, ...]) -> None:
        """Launch what was compiled for arguments of this kind before: they tell at least as much apart as Triton does,
        of a tensor its type, device and alignment to 16, of an integer the value 1, divisibility by 16 and the width.
        Tensors are passed as addresses, for which Triton would ask them again and have the driver check."""
        addresses, kinds = [], []
        for tensor in tensors:
            if tensor is None:
                addresses.append(None)
                kinds.append(None)
            else:
                address = tensor.data_ptr()
                addresses.append(address)
                kinds += tensor.dtype, tensor.get_device(), address % 16
        for number in numbers:
            kinds.append((number == 1) + 2 * (number % 16 == 0) + 4 * (number > MAX_INT32))
        compiled = self._compiled.get(tuple(kinds))
        if compiled is None:
            # Sums are never fused into multiply-adds, so that they round as the plain-torch twin's do.
            options = {"num_warps": self.num_warps, "enable_fp_fusion": False}
            compiled = self.kernel[(programs,)](*tensors, *numbers, **self.constants, **options)
            self._compiled[tuple(kinds)] = compiled
        else:
            compiled[(programs, 1, 1)](*addresses, *numbers, *self._tail)

    @functools.cached_property
    def _tail(self) -> tuple:
        """Values of the constexpr arguments in the order of the kernel's, which a compiled kernel is called with."""
        return tuple(self.constants[name] for name in self.kernel.arg_names if name in self.constants)


def launch(
    variant: Variant,
    target: Target,
    device: torch.device,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[int, ...],
) -> None:
    """Launch `programs` programs of `variant` on `device`; its kernel's arguments are tensors, then numbers, then
    constexpr ones.

    Triton-Ascend warns against the switch that keeps sums and products apart, and the IR that it hands on does so.
    """
    if not 1 <= programs <= MAX_PROGRAMS:
        raise ValueError(f"launch grid of {programs} programs: expected 1 to {MAX_PROGRAMS}")
    with _current(device):
        if not target.compiled:
            variant.kernel[(programs,)](*tensors, *numbers, **variant.constants)
        elif target.ascend:
            variant.kernel[(programs,)](*tensors, *numbers, **variant.constants, multibuffer=True)
        else:
            variant.launch_on_cuda(programs, tensors, numbers)


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device: make the tensors' device that, where it is not already."""
    kind = device.type
    if kind == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    if kind == "npu" and device.index != torch.npu.current_device():
        return torch.npu.device(device)
    return _NO_CHANGE


_NO_CHANGE = contextlib.nullcontext()
