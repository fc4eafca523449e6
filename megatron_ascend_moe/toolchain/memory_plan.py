"""Ask Ascend's own compiler, bishengir-compile, for a kernel's memory plan and final vector-core program.

The compiler ends by handing its program, `module.hivm.opt.mlir`, to the external `hivmc`, which only CANN ships. Here
a script stands in hivmc's place, keeps the program and makes no binary: what comes back is a plan and an IR. This
works for every release of the compiler (1.0.0 and 1.1.0 cannot save their intermediate files); 1.0.0 and A5's compiler
write no memory report, so that there the buffers are read from the program.
"""

import json
import math
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megatron_ascend_moe.backend.soc import Soc
from megatron_ascend_moe.toolchain import locate


class CompilationFailed(RuntimeError):
    """bishengir-compile made no program of the kernel; the message is its own."""


class UnifiedBufferOverflow(CompilationFailed):
    """The kernel does not fit the Unified Buffer of the SoC; the message carries the compiler's numbers."""


@dataclass(frozen=True)
class Buffer:
    """One buffer of the plan: its type in the IR, bytes, and the byte offsets of its copies (two: double-buffered)."""

    type: str
    nbytes: int
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class MemoryPlan:
    """What the compiler made of a kernel on one SoC.

    Attributes:
        soc: name of the SoC.
        buffers: the plan's Unified Buffer buffers.
        reported: False where the compiler writes no memory report and the buffers were read from the IR.
        multibuffer_dropped: the compiler could not double-buffer within the UB and gave it up.
        program: text of module.hivm.opt.mlir.
    """

    soc: str
    buffers: tuple[Buffer, ...]
    reported: bool
    multibuffer_dropped: bool
    program: str

    @property
    def ub_bytes(self) -> int:
        """Peak bytes of the Unified Buffer."""
        return max((max(buffer.offsets) + buffer.nbytes for buffer in self.buffers), default=0)


_KEEP_PROGRAM = """#!/bin/sh
for file in "$@"; do
  case "$file" in *.mlir) cp "$file" "$(dirname "$0")/" ;; esac
done
exit 1
"""


def compile_for(soc: Soc, ttadapter: str, folder: Path, *, multibuffer: bool) -> MemoryPlan:
    """Compile the ttadapter text for `soc` inside `folder`.

    Raises:
        UnifiedBufferOverflow: it does not fit.
        CompilationFailed: the compiler failed otherwise.
    """
    (folder / "kernel.ttadapter.mlir").write_text(ttadapter)
    for name in ("hivmc", "hivmc-a5"):
        (folder / name).write_text(_KEEP_PROGRAM)
        (folder / name).chmod(0o755)
    compiler = locate.bishengir_compiler(soc)
    reports_memory = soc.memory_report and locate.knows_option(compiler, "--enable-memory-display")
    done = subprocess.run(
        [
            str(compiler),
            "kernel.ttadapter.mlir",
            f"--target={soc.name}",
            f"--enable-auto-multi-buffer={multibuffer}",
            "--enable-auto-bind-sub-block=True",
            "--enable-hfusion-compile=true",
            "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true",
            *(["--enable-memory-display"] if reports_memory else []),
            "-o",
            "kernel",
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
    )
    overflow = re.search(r"ub overflow, requires (\d+) bits while (\d+) bits available", done.stderr)
    if overflow:
        needed, available = int(overflow[1]) // 8, int(overflow[2]) // 8
        raise UnifiedBufferOverflow(f"{soc.name}: needs {needed} B of the Unified Buffer's {available} B")
    program = folder / "module.hivm.opt.mlir"
    if not program.exists():
        reason = done.stderr[-1000:] or "it printed nothing"
        raise CompilationFailed(f"{soc.compiler} made no program for {soc.name} (exit code {done.returncode}): {reason}")
    text = program.read_text()
    reports = sorted(folder.glob("memory_info_*.json"))
    return MemoryPlan(
        soc=soc.name,
        buffers=_reported_buffers(reports) if reports else _buffers_of(text),
        reported=bool(reports),
        multibuffer_dropped="enable-auto-multi-buffer to false" in done.stderr,
        program=text,
    )


def _reported_buffers(reports: list[Path]) -> tuple[Buffer, ...]:
    """Buffers of the compiler's memory report: offsets are in bytes, extents in bits."""
    buffers = []
    for report in reports:
        for record in json.loads(report.read_text())["Record"]:
            if record["scope"] != "ub":
                continue
            for info in record.get("memory_info_array") or []:
                kind = re.search(r"memref<([^,>]+)", info["buffer"])
                offsets = tuple(info.get("offset") or [0])
                buffers.append(Buffer(kind[1] if kind else "", info["extent"] // 8, offsets))
    return tuple(buffers)


_ELEMENT_BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8}


def _buffers_of(program: str) -> tuple[Buffer, ...]:
    """Buffers as the program places them, each copy of one by itself: pointer_cast of byte addresses in the UB."""
    constants = dict(_CONSTANT.findall(program))
    buffers = []
    for addresses, kind in _PLACEMENT.findall(program):
        *extents, element = kind.split("x")
        if not all(extent.isdigit() for extent in extents):
            continue
        nbytes = math.prod(map(int, extents)) * _ELEMENT_BYTES[element]
        offsets = tuple(int(constants[name]) for name in addresses.split(", ") if name in constants)
        if offsets:
            buffers.append(Buffer(kind, nbytes, offsets))
    return tuple(buffers)


_CONSTANT = re.compile(r"(%[\w-]+) = (?:arith\.constant |llvm\.mlir\.constant\()(\d+) : i64")
_PLACEMENT = re.compile(r"hivm\.hir\.pointer_cast\(([^)]*)\)[^\n]*: memref<([^,>]+), #hivm\.address_space<ub>>")
