"""A driver for Triton-Ascend that needs no NPU: `kernel[grid](…)` on CPU tensors goes through the real compiler.

Each kernel is lowered by Triton-Ascend itself (AST, TTIR, ttadapter); bishengir-compile makes its memory plan; the
ttadapter text, lowered once more by LLVM 19, runs on the CPU. What every launch did is kept in `launches`.
No device is involved and no device binary is made.
"""

import atexit
import dataclasses
import hashlib
import itertools
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from megatron_ascend_moe.backend import device
from megatron_ascend_moe.backend.soc import Soc, find_soc
from megatron_ascend_moe.toolchain import locate
from megatron_ascend_moe.toolchain.cpu import Accesses, CpuKernel
from megatron_ascend_moe.toolchain.memory_plan import CompilationFailed, MemoryPlan, compile_for

_serial_numbers = itertools.count()


@dataclass(frozen=True)
class Launch:
    """One launch and what it did.

    Attributes:
        kernel: the kernel's name.
        constants: its compile-time arguments.
        arguments: names of its run-time arguments, in order.
        tensors: shape and bytes of an element of those that are tensors.
        multibuffer: whether the compiler was asked to double-buffer.
        ttadapter: the IR that Triton-Ascend hands to its compiler.
        plan: the memory plan, None where the emulator was asked not to compile.
        accesses: what it did to each tensor, empty where the emulator was asked not to run.
    """

    kernel: str
    constants: dict[str, object]
    grid: tuple[int, int, int]
    arguments: tuple[str, ...]
    tensors: dict[str, tuple[tuple[int, ...], int]]
    multibuffer: bool
    ttadapter: str
    plan: MemoryPlan | None
    accesses: dict[str, Accesses]

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change where the IR does."""
        return hashlib.sha256(self.ttadapter.encode()).hexdigest()[:12]


@dataclass
class Emulator:
    """What is compiled and run, and for which SoC.

    Attributes:
        soc: the SoC kernels are compiled for.
        compile: make a memory plan of each kernel, which raises where it does not fit.
        run: execute the kernels on the CPU; their outputs stay unwritten otherwise.
        launches: every launch so far; clear it as you like.
    """

    soc: Soc
    compile: bool
    run: bool
    folder: Path
    launches: list[Launch] = field(default_factory=list)
    plans: dict[str, MemoryPlan | CompilationFailed] = field(default_factory=dict)

    def plan(self, ttadapter: str, multibuffer: bool) -> "MemoryPlan | CompilationFailed":
        """The memory plan of a kernel, or why there is none: raised at the launch, Triton would wrap it here."""
        try:
            return compile_for(self.soc, ttadapter, self.scratch(), multibuffer=multibuffer)
        except CompilationFailed as failure:
            return failure

    def scratch(self) -> Path:
        """A fresh folder for one compilation."""
        return Path(tempfile.mkdtemp(dir=self.folder))


def activate(soc: str = "Ascend910B3", *, compile: bool = True, run: bool = True) -> Emulator:
    """Make Triton-Ascend compile for `soc` and launch on the CPU, for the rest of the process.

    Raises:
        MissingTool: a part of the tool chain is not there; the message says how to get it.
        RuntimeError: Triton's interpreter is on, which compiles nothing.

    A launch then raises UnifiedBufferOverflow or CompilationFailed where the kernel has no memory plan, and
    IndexError where an access leaves its tensor.
    """
    if device.interpreting():
        raise RuntimeError("TRITON_INTERPRET is set: the interpreter compiles nothing, unset it before importing triton")
    locate.require_triton_ascend()
    target = find_soc(soc)
    if compile:
        locate.bishengir_compiler(target)
    if run:
        for tool in ("mlir-opt", "mlir-translate", "llc"):
            locate.llvm_tool(tool)
    folder = Path(tempfile.mkdtemp(prefix="megatron_ascend_moe_toolchain_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Not Triton's own cache: what this driver calls a binary is text, which a real NPU must never be served.
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    emulator = Emulator(target, compile, run, folder)
    _install(emulator)
    device.emulate(target.name)
    return emulator


def _install(emulator: Emulator) -> None:
    """Put the backend and the driver in the place of Triton-Ascend's."""
    from triton.backends import backends
    from triton.runtime.driver import driver

    backends["ascend"] = dataclasses.replace(backends["ascend"], compiler=_backend_class(emulator))
    driver.set_active(_Driver(emulator))


def _backend_class(emulator: Emulator):
    """Triton-Ascend's backend with its last stage, which needs CANN, replaced."""
    from triton.backends.ascend import compiler as ascend

    class OfflineBackend(ascend.AscendBackend):
        def add_stages(self, stages, options):
            super().add_stages(stages, options)

            def plan_stage(ttadapter, metadata):
                text, metadata = ascend._parse_linalg_metadata(ttadapter, metadata)
                if emulator.compile:
                    emulator.plans[text] = emulator.plan(text, bool(metadata["multibuffer"]))
                return text.encode()

            stages["npubin"] = plan_stage

    return OfflineBackend


class _Driver:
    """The part of Triton's driver interface that compiling and launching use."""

    def __init__(self, emulator: Emulator):
        cores = emulator.soc.vector_cores
        properties = {"max_shared_mem": 1, "num_aicore": cores // 2, "num_vectorcore": cores}
        self._arch = emulator.soc.name
        # Triton keeps compiled kernels by device: a new activation is a new device, so that nothing is reused.
        self._device = next(_serial_numbers)
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: properties,
            load_binary=lambda name, kernel, shared, device: (1, kernel, 0, 0),
            get_arch=lambda: self._arch,
            get_aicore_num=lambda: cores // 2,
            get_aivector_core_num=lambda: cores,
        )
        self.launcher_cls = lambda source, metadata: _Launcher(emulator, source, bool(metadata.multibuffer))

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("npu", self._arch, 0)

    def get_current_device(self):
        return self._device

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device=None):
        return 0


class _Launcher:
    """Runs one compiled kernel, program by program, and writes down what it did."""

    def __init__(self, emulator: Emulator, source, multibuffer: bool):
        self._emulator, self._multibuffer = emulator, multibuffer
        function = source.fn
        by_name = {
            key if isinstance(key, str) else function.arg_names[key]: value for key, value in source.constants.items()
        }
        self._name = function.__name__
        self._constants = by_name
        self._parameters = [parameter.name for parameter in function.params if not parameter.is_constexpr]
        self._cpu_kernel: CpuKernel | None = None

    def __call__(self, x, y, z, stream, binary, packed, launch_metadata, enter_hook, exit_hook, *values):
        text = binary.decode()
        names = tuple(name for name in self._parameters if name not in self._constants)
        by_name = dict(zip(self._parameters, values, strict=True))
        plan = self._emulator.plans.get(text)
        if isinstance(plan, CompilationFailed):
            raise plan
        tensors = {name: by_name[name] for name in names if hasattr(by_name[name], "data_ptr")}
        accesses = {}
        if self._emulator.run:
            if self._cpu_kernel is None:
                self._cpu_kernel = CpuKernel(text, self._emulator.scratch())
            done = dict(zip(names, self._cpu_kernel.launch([by_name[name] for name in names], (x, y, z)), strict=True))
            accesses = {name: done[name] for name in tensors}
        self._emulator.launches.append(
            Launch(
                kernel=self._name,
                constants=self._constants,
                grid=(x, y, z),
                arguments=names,
                tensors={name: (tuple(tensor.shape), tensor.element_size()) for name, tensor in tensors.items()},
                multibuffer=self._multibuffer,
                ttadapter=text,
                plan=plan,
                accesses=accesses,
            )
        )
