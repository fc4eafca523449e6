"""Execute on the CPU the very IR that Triton-Ascend hands to its compiler: mlir-opt, llc and cc, then ctypes.

It computes the numbers of the compiled kernel, one program after another. It says nothing of speed, of races
between programs, or of an NPU's rounding.
"""

import ctypes
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ascend_moe.toolchain import locate
from megatron_ascend_moe.toolchain.instrument import KINDS, argument_types, instrument, kernel_name

_PASSES = """
    --allow-unregistered-dialect --inline --canonicalize --cse --convert-elementwise-to-linalg
    --eliminate-empty-tensors --empty-tensor-to-alloc-tensor
    --one-shot-bufferize=allow-return-allocs-from-loops=true --buffer-deallocation-pipeline
    --convert-bufferization-to-memref --convert-linalg-to-loops --fold-memref-alias-ops
    --expand-strided-metadata --lower-affine --convert-scf-to-cf --memref-expand
    --arith-expand=include-bf16=true --convert-math-to-llvm --convert-math-to-libm --convert-complex-to-llvm
    --convert-index-to-llvm --finalize-memref-to-llvm --convert-cf-to-llvm --convert-arith-to-llvm
    --convert-func-to-llvm --canonicalize --reconcile-unrealized-casts
""".split()

_SCRATCH_BYTES = 1 << 16  # lock and workspace arguments, which row kernels do not use
_LEADING, _TRAILING = 2, 6  # arguments before and after the kernel's own: lock, workspace; grid, program ids


@dataclass(frozen=True)
class Accesses:
    """What a launch did to one argument in global memory, summed over its programs.

    `elements` and `count` map a kind (dma_load, dma_store, scalar_load, scalar_store) to elements and accesses.
    """

    elements: dict[str, int]
    count: dict[str, int]


class CpuKernel:
    """A kernel built for the CPU out of its ttadapter text."""

    def __init__(self, ttadapter: str, folder: Path):
        """Build in `folder`, which must exist. Raises RuntimeError with the failing tool's message."""
        self.name = kernel_name(ttadapter)
        self.types = argument_types(ttadapter)[_LEADING:-_TRAILING]
        self._library = _build(instrument(ttadapter), folder)
        self._function = getattr(self._library, self.name)
        self._scratch = ctypes.create_string_buffer(_SCRATCH_BYTES)

    def launch(self, arguments: Sequence, grid: tuple[int, int, int]) -> list[Accesses]:
        """Run every program of `grid`, in order.

        Args:
            arguments: the kernel's run-time arguments in order: CPU tensors, numbers.
            grid: programs along the three axes.

        Returns:
            What was done to each argument.

        Raises:
            IndexError: an access left the memory of a tensor.
        """
        packed = self._pack(arguments)
        self._reset(arguments)
        grid_values = [ctypes.c_int32(extent) for extent in grid]
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    self._function(*packed, *grid_values, ctypes.c_int32(x), ctypes.c_int32(y), ctypes.c_int32(z))
        self._check_fault()
        return [self._accesses(position) for position in range(len(arguments))]

    def _pack(self, arguments: Sequence) -> list:
        if len(arguments) != len(self.types):
            raise ValueError(f"{self.name} takes {len(self.types)} run-time arguments, got {len(arguments)}")
        packed = 2 * _memref(ctypes.addressof(self._scratch), _SCRATCH_BYTES)
        for value, kind in zip(arguments, self.types, strict=True):
            if kind.startswith("memref"):
                packed += _memref(value.data_ptr(), _reachable_elements(value))
            elif kind == "f32":
                packed.append(ctypes.c_float(value))
            else:
                packed.append((ctypes.c_int64 if kind == "i64" else ctypes.c_int32)(int(value)))
        return packed

    def _symbol(self, name: str, *shape: int):
        kind = ctypes.c_int64
        for extent in reversed(shape):
            kind = kind * extent
        return kind.in_dll(self._library, name)

    def _reset(self, arguments: Sequence) -> None:
        limits = self._symbol("access_limits", 64)
        for position, value in enumerate(arguments):
            limits[position + _LEADING] = _reachable_elements(value) if hasattr(value, "data_ptr") else 0
        for name in ("access_elements", "access_count"):
            ctypes.memset(ctypes.addressof(self._symbol(name, 64, 4)), 0, 64 * 4 * 8)
        ctypes.memset(ctypes.addressof(self._symbol("access_fault", 4)), 0, 4 * 8)

    def _check_fault(self) -> None:
        argument, kind, first, last = self._symbol("access_fault", 4)
        if argument:
            position = argument - 1
            limit = self._symbol("access_limits", 64)[position]
            raise IndexError(
                f"{self.name}: a {KINDS[kind]} of run-time argument {position - _LEADING} touches elements "
                f"{first}..{last} of a tensor of {limit}"
            )

    def _accesses(self, position: int) -> Accesses:
        elements = self._symbol("access_elements", 64, 4)[position + _LEADING]
        count = self._symbol("access_count", 64, 4)[position + _LEADING]
        return Accesses(dict(zip(KINDS, elements, strict=True)), dict(zip(KINDS, count, strict=True)))


def _memref(address: int, elements: int) -> list:
    """A rank-1 memref descriptor, unpacked: allocated, aligned, offset, size, stride."""
    pointer = ctypes.c_void_p(address)
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(elements), ctypes.c_int64(1)]


def _reachable_elements(tensor) -> int:
    """Elements from the tensor's first to its last, gaps of strided rows included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _build(mlir: str, folder: Path) -> ctypes.CDLL:
    """Lower, assemble and load; the files stay in `folder`."""
    (folder / "kernel.mlir").write_text(mlir)
    _run(locate.llvm_tool("mlir-opt"), folder / "kernel.mlir", *_PASSES, "-o", folder / "kernel.llvm.mlir")
    _run(
        locate.llvm_tool("mlir-translate"), "--mlir-to-llvmir", "--allow-unregistered-dialect",
        folder / "kernel.llvm.mlir", "-o", folder / "kernel.ll",
    )  # fmt: skip
    _run(
        locate.llvm_tool("llc"), "-O2", "-filetype=obj", "-relocation-model=pic", folder / "kernel.ll",
        "-o", folder / "kernel.o",
    )  # fmt: skip
    _run(
        locate.c_compiler(), Path(__file__).with_name("cpu_runtime.c"), folder / "kernel.o", "-shared", "-fPIC",
        "-O2", "-o", folder / "kernel.so", "-lm",
    )  # fmt: skip
    return ctypes.CDLL(str(folder / "kernel.so"))


def _run(*command) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        first = re.search(r"error: .*", done.stderr)
        reason = first[0] if first else done.stderr[-500:]
        raise RuntimeError(f"{Path(command[0]).name} failed on {command[1]}: {reason}")
