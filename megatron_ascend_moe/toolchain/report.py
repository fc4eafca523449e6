"""What the compiler made of one kernel, judged: memory, double buffering, accesses and traffic."""

import re
from dataclasses import dataclass

from megatron_ascend_moe.backend.soc import Soc
from megatron_ascend_moe.toolchain.emulator import Launch
from megatron_ascend_moe.toolchain.instrument import scalars_in_loops
from megatron_ascend_moe.toolchain.memory_plan import CompilationFailed, MemoryPlan
from megatron_ascend_moe.toolchain.program import Program, read_program

_INTEGER_COMPARE = re.compile(r"@vcmps?_\w*int")  # the library functions of A2 and A3
_TILE_CONSTANTS = ("BLOCK", "ROWS", "TOKENS", "EXPERTS", "COLUMNS")


@dataclass(frozen=True)
class KernelReport:
    """One operation's kernel on one SoC; bytes are bytes, counts are of the program's text (a loop's body once).

    Attributes:
        ir: fingerprint of the IR that the compiler was given.
        double_buffered: every DMA of rows inside a loop alternates between two buffers, constants apart; None
            where the operation moves no rows.
        scalar_accesses: scalar accesses to global memory, wherever they stand.
        row_bytes: rows moved, counted while the compiled IR ran on the CPU, None where it did not; floor_bytes the least
            there can be, 0 where the operation moves no rows.
        metadata_bytes: everything else that was moved.
        problems: what a kernel of this package must not do; empty is well.
    """

    soc: str
    hidden: int
    experts: int
    topk: int
    dtype: str
    operation: str
    kernel: str
    ir: str
    tile: dict[str, int]
    ub_bytes: int | None
    ub_size: int
    ub_reported: bool
    multibuffer_dropped: bool
    double_buffered: bool | None
    dmas: int
    ub_copies: int
    scalar_accesses: int
    vector_ops: int
    row_bytes: int | None
    floor_bytes: int
    metadata_bytes: int | None
    problems: tuple[str, ...]


def report(
    launch: Launch, plan: MemoryPlan | CompilationFailed, soc: Soc, shape: dict, operation: str, floor_bytes: int
) -> KernelReport:
    """Judge one launch by its plan for `soc`; `shape` holds hidden, experts, topk and dtype by name."""
    tile = {name: launch.constants[name] for name in _TILE_CONSTANTS if name in launch.constants}
    rows = {name for name, (extents, _) in launch.tensors.items() if floor_bytes and _is_rows(extents, shape["hidden"])}
    traffic = {"row_bytes": None, "floor_bytes": floor_bytes, "metadata_bytes": None}
    if launch.accesses:
        traffic["row_bytes"] = sum(_moved_bytes(launch, name) for name in rows)
        traffic["metadata_bytes"] = sum(_moved_bytes(launch, name) for name in launch.tensors if name not in rows)
    known = {"soc": soc.name, **shape, "operation": operation, "kernel": launch.kernel,
             "ir": launch.fingerprint, "tile": tile, "ub_size": soc.ub_bytes, **traffic}  # fmt: skip
    if isinstance(plan, CompilationFailed):
        return KernelReport(
            **known, ub_bytes=None, ub_reported=False, multibuffer_dropped=False, double_buffered=None, dmas=0,
            ub_copies=0, scalar_accesses=0, vector_ops=0, problems=(str(plan),),
        )  # fmt: skip
    program = read_program(plan.program)
    row_arguments = {launch.arguments.index(name) for name in rows}
    single = program.single_buffered(row_arguments)
    unseen = sorted(launch.arguments[number] for number in row_arguments - program.moved_by_dma())
    one_by_one = sum(_elements_moved_one_by_one(launch, name) for name in rows)
    problems = {
        f"UB of {soc.ub_bytes} B overflows: {plan.ub_bytes} B": plan.ub_bytes > soc.ub_bytes,
        "multibuffer dropped by the compiler": plan.multibuffer_dropped,
        f"rows of {', '.join(unseen)} are moved by no DMA of the program": bool(unseen),
        f"{len(single)} row DMAs are not double-buffered": bool(single),
        "scalar global-memory access inside a loop over columns": _scalars_in_column_loops(launch, program),
        f"{one_by_one} elements of rows are moved one by one": one_by_one > 0,
        "an output is read back: unlocked read-modify-write": bool(program.read_back()),
        f"moves {traffic['row_bytes']} B of rows, floor {floor_bytes} B": traffic["row_bytes"] not in (None, floor_bytes),
        "integers are compared: scalar code on Ascend": bool(_INTEGER_COMPARE.search(plan.program)),
    }
    return KernelReport(
        **known,
        ub_bytes=plan.ub_bytes,
        ub_reported=plan.reported,
        multibuffer_dropped=plan.multibuffer_dropped,
        double_buffered=not (single or unseen) if row_arguments else None,
        dmas=program.count("load", "store"),
        ub_copies=program.count("copy"),
        scalar_accesses=program.count("scalar_load", "scalar_store"),
        vector_ops=program.vector_ops,
        problems=tuple(problem for problem, found in problems.items() if found),
    )


def _is_rows(extents: tuple[int, ...], hidden: int) -> bool:
    return len(extents) >= 2 and extents[-1] == hidden


def _moved_bytes(launch: Launch, name: str) -> int:
    return sum(launch.accesses[name].elements.values()) * launch.tensors[name][1]


def _elements_moved_one_by_one(launch: Launch, name: str) -> int:
    if not launch.accesses:
        return 0
    elements = launch.accesses[name].elements
    return elements["scalar_load"] + elements["scalar_store"]


def _scalars_in_column_loops(launch: Launch, program: Program) -> bool:
    """By the compiler's program and, since A5's shows no loops, by the IR that it was given."""
    columns = launch.constants.get("COLUMNS")
    if columns is None:
        return False
    return program.scalars_in_column_loops(columns) + scalars_in_loops(launch.ttadapter, columns) > 0
