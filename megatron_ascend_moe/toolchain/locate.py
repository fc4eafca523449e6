"""Find the parts of the offline tool chain, or say which one is missing and the command that gets it.

Nothing is ever installed or downloaded from here.

Environment variables:
    MEGATRON_ASCEND_MOE_LLVM       directory of LLVM 19 (default /usr/lib/llvm-19).
    MEGATRON_ASCEND_MOE_BISHENGIR  directory of the bishengir-compile binaries (default: the ascendnpu-ir wheel of
                                   this environment); to try another version, `pip install --no-deps --target DIR
                                   ascendnpu-ir==1.0.0` and name DIR/ascendnpuir/bin.
"""

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from megatron_ascend_moe.backend.soc import SOCS, Soc

LLVM_VARIABLE = "MEGATRON_ASCEND_MOE_LLVM"
BISHENGIR_VARIABLE = "MEGATRON_ASCEND_MOE_BISHENGIR"

_TRITON_HINT = (
    "in an environment of Python 3.10 or 3.11 without the upstream triton package: "
    "pip install 'numpy<2.4' pybind11 && pip install --no-deps triton-ascend==3.2.0"
)
_BISHENGIR_HINT = "pip install --no-deps ascendnpu-ir==1.2.0"
_LLVM_HINT = f"apt-get install mlir-19-tools llvm-19, or set {LLVM_VARIABLE}"


class MissingTool(RuntimeError):
    """A part of the tool chain is not there; the message names it and the command that gets it."""


def require_triton_ascend() -> None:
    """Check that the `triton` of this environment is Triton-Ascend."""
    if importlib.util.find_spec("triton") is None:
        raise MissingTool(f"triton-ascend is not installed; {_TRITON_HINT}")
    from triton.backends import backends

    if "ascend" not in backends:
        version = importlib.metadata.version("triton")
        raise MissingTool(f"`triton` here is upstream Triton {version}, not triton-ascend; {_TRITON_HINT}")


def bishengir_compiler(soc: Soc) -> Path:
    """The bishengir-compile binary for `soc`."""
    named = os.environ.get(BISHENGIR_VARIABLE)
    if named:
        folder = Path(named)
    else:
        wheel = importlib.util.find_spec("ascendnpuir")
        if wheel is None:
            raise MissingTool(f"ascendnpu-ir is not installed: {_BISHENGIR_HINT}, or set {BISHENGIR_VARIABLE}")
        folder = Path(next(iter(wheel.submodule_search_locations))) / "bin"
    binary = folder / soc.compiler
    if not os.access(binary, os.X_OK):
        raise MissingTool(f"no {soc.compiler} (needed for {soc.name}) in {folder}: {_BISHENGIR_HINT}")
    return binary


@functools.cache
def knows_option(compiler: Path, option: str) -> bool:
    """Whether this release of the compiler has the command-line option."""
    shown = subprocess.run([str(compiler), "--help-hidden"], capture_output=True, text=True)
    return f" {option} " in shown.stdout


def bishengir_version() -> str:
    """Name and version of the compiler in use."""
    named = os.environ.get(BISHENGIR_VARIABLE)
    if named:
        folders = sorted(Path(named).parent.parent.glob("ascendnpu_ir-*.dist-info"))
        return f"ascendnpu-ir {folders[0].name.split('-')[1].removesuffix('.dist')}" if folders else f"bishengir in {named}"
    return f"ascendnpu-ir {importlib.metadata.version('ascendnpu-ir')}"


def llvm_folder() -> Path:
    """The folder of LLVM 19."""
    return Path(os.environ.get(LLVM_VARIABLE, "/usr/lib/llvm-19"))


def llvm_tool(name: str) -> Path:
    """A program of LLVM 19, e.g. `mlir-opt`."""
    binary = llvm_folder() / "bin" / name
    if not os.access(binary, os.X_OK):
        raise MissingTool(f"no {name} of LLVM 19 in {binary.parent}: {_LLVM_HINT}")
    return binary


def check_all(socs: Iterable[Soc] = SOCS.values()) -> None:
    """Raise MissingTool unless kernels can be lowered, compiled for these SoCs and run on the CPU."""
    require_triton_ascend()
    for soc in socs:
        bishengir_compiler(soc)
    for tool in ("mlir-opt", "mlir-translate", "llc"):
        llvm_tool(tool)
    c_compiler()


def c_compiler() -> str:
    """The system's C compiler."""
    found = shutil.which(os.environ.get("CC", "cc"))
    if found is None:
        raise MissingTool("no C compiler: apt-get install gcc, or set CC")
    return found
