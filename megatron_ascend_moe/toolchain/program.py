"""Read the vector-core program that bishengir-compile ends with: which accesses it makes, where, and how buffered.

Only what a check needs is read, out of the text of module.hivm.opt.mlir: the calls that move data (DMAs and copies
inside the Unified Buffer), scalar accesses to global memory, the loops around them, and the buffers a DMA alternates
between. Releases end at different levels: ascendnpu-ir 1.0.0 in structured operations (`hivm.hir.load ins(…) outs(…)`),
later ones in calls of library functions, A5's compiler in basic blocks, where loops are not told (`steps` is None).
"""

import re
from dataclasses import dataclass

_DEFINITION = re.compile(r"^\s*((?:%[\w-]+(?::\d+)?(?:, )?)+) = \"?([\w.]+)\"?(.*)$")
_VALUE = re.compile(r"%[\w-]+(?:#\d+)?")
_CALL = re.compile(r"\bcall @(\w+)\(([^)]*)\)")
_STRUCTURED = re.compile(r"\bhivm\.hir\.(load|store|copy|nd2nz|v\w+) (?:.*\bins\(([^:)]*).*\) )?.*?\bouts\(([^:)]*)")
_MOVES = {"load_gm_to_ubuf": "load", "nd2nz": "load", "store_ubuf_to_gm": "store", "copy_ubuf_to_ubuf": "copy"}
_CONSTANT = re.compile(r"(%[\w-]+) = (?:arith\.constant|llvm\.mlir\.constant\()\s*(-?\d+) : (?:i32|i64|index)")
_LOOP = re.compile(r"scf\.for %[\w-]+ = \S+ to \S+ step (%[\w-]+)")
_FOLLOWED = {
    "memref.cast", "memref.subview", "memref.reinterpret_cast", "memref.collapse_shape", "memref.expand_shape",
    "memref.extract_strided_metadata", "builtin.unrealized_conversion_cast",
}  # fmt: skip

LEADING_ARGUMENTS = 3  # ffts base address, lock, workspace


@dataclass(frozen=True)
class Access:
    """One access of the program's text.

    Attributes:
        kind: "load" and "store" (DMAs), "copy" (inside the UB), "scalar_load", "scalar_store" (global memory).
        argument: number of the run-time argument it touches in global memory, or None.
        buffers: byte addresses of the UB buffers it alternates between; two are a double buffer.
        steps: step of each loop around it, outermost first, None where it is no constant; None for unknown loops.
    """

    kind: str
    argument: int | None
    buffers: tuple[int, ...]
    steps: tuple[int | None, ...] | None


@dataclass(frozen=True)
class Program:
    """The accesses of a program, the number of calls of vector instructions, and the buffers that hold constants."""

    accesses: tuple[Access, ...]
    vector_ops: int
    constant_buffers: frozenset[int]

    def count(self, *kinds: str) -> int:
        """How many accesses of these kinds the text holds; a loop's body counts once."""
        return sum(access.kind in kinds for access in self.accesses)

    def read_back(self) -> set[int]:
        """Run-time arguments that are both loaded by DMA and stored: an unlocked read-modify-write."""
        loaded = {access.argument for access in self.accesses if access.kind == "load"}
        return {a.argument for a in self.accesses if a.kind == "store" and a.argument in loaded} - {None}

    def moved_by_dma(self) -> set[int]:
        """Run-time arguments that a DMA loads or stores."""
        return {access.argument for access in self.accesses if access.kind in ("load", "store")} - {None}

    def scalars_in_column_loops(self, columns: int) -> int:
        """Scalar accesses to global memory inside a loop that steps by `columns`."""
        scalars = (a for a in self.accesses if a.kind in ("scalar_load", "scalar_store"))
        return sum(columns in (access.steps or ()) for access in scalars)

    def single_buffered(self, arguments: set[int]) -> list[Access]:
        """DMAs inside a loop, between these run-time arguments and a buffer that is not known to have two copies and
        holds no constant."""
        return [
            access
            for access in self.accesses
            if access.kind in ("load", "store")
            and access.argument in arguments
            and (access.steps is None or access.steps)
            and len(access.buffers) < 2
            and not self.constant_buffers.issuperset(access.buffers or (None,))
        ]


def read_program(text: str) -> Program:
    """Read module.hivm.opt.mlir."""
    body = _entry_function(text)
    structured = "cf.br" not in body
    repeated = set() if structured else _lines_in_loops(body)
    definitions: dict[str, tuple[str, list[str]]] = {}
    constants = {name: int(value) for name, value in _CONSTANT.findall(body)}
    accesses, vector_ops = [], 0
    loops: list[tuple[int, int | None]] = []  # brace depth inside the loop, step
    depth = 0
    written: dict[int, bool] = {}  # UB address -> every vector write to it lies outside all loops
    filled: set[int] = set()  # UB addresses that a DMA fills
    for line_number, line in enumerate(body.splitlines()):
        loop = _LOOP.search(line)
        depth += line.count("{") - line.count("}")
        while loops and depth < loops[-1][0]:
            loops.pop()
        if loop:
            loops.append((depth, constants.get(loop[1])))
        defined = _DEFINITION.match(line)
        if defined:
            operation = "empty" if "memref<0x" in line else defined[2]  # absent temporaries sit at address 0
            for name in defined[1].split(", "):
                definitions[name.partition(":")[0]] = (operation, _VALUE.findall(defined[3]))
        steps = tuple(step for _, step in loops) if structured else None
        kind, sources, targets = _operation(line)
        if kind == "vector":
            vector_ops += 1
            for address in _target(targets, definitions, constants):
                written[address] = written.get(address, True) and not (loops or line_number in repeated)
        elif kind:
            accesses.append(_access(kind, sources, targets, steps, definitions, constants))
            if kind == "load":
                filled.update(accesses[-1].buffers)
    constant = {address for address, outside in written.items() if outside} - filled
    return Program(tuple(accesses), vector_ops, frozenset(constant))


def _entry_function(text: str) -> str:
    """The text of the kernel itself, declarations and outlined vector functions left out."""
    bodies = re.split(r"(?m)^  func\.func ", text)
    return max((body for body in bodies if "hacc.entry" in body.partition("\n")[0]), key=len)


def _lines_in_loops(body: str) -> set[int]:
    """Lines of the basic blocks that run more than once: those from the target of a branch backwards to that branch,
    for blocks are printed in an order that never puts a loop's body outside its ends."""
    block, first_line, repeated = 0, {0: 0}, set()
    for number, line in enumerate(body.splitlines()):
        label = re.match(r"\s*\^bb(\d+)", line)
        if label:
            block = int(label[1])
            first_line[block] = number
        elif "cf." in line:
            for target in map(int, re.findall(r"\^bb(\d+)", line)):
                if target <= block:
                    repeated.update(range(first_line[target], number + 1))
    return repeated


def _operation(line: str) -> tuple[str | None, list[str], list[str]]:
    """What a line does, an access's kind, "vector" or None, with the values it reads and those it may write."""
    call = _CALL.search(line)
    if call:
        values = _VALUE.findall(call[2])
        kind = next((kind for prefix, kind in _MOVES.items() if call[1].startswith(prefix)), "vector")
        return (kind, values, values) if kind == "vector" else (kind, values[:1], values[1:2])
    structured = _STRUCTURED.search(line)
    if structured:
        kind = {"nd2nz": "load"}.get(structured[1], "vector" if structured[1].startswith("v") else structured[1])
        return kind, _VALUE.findall(structured[2] or ""), _VALUE.findall(structured[3])
    scalar = re.search(r"memref\.(load|store) (?:%[\w-]+, )?(%[\w-]+)\[.*address_space<gm>", line)
    if scalar:
        return f"scalar_{scalar[1]}", [scalar[2]], [scalar[2]]
    return None, [], []


def _access(kind, sources, targets, steps, definitions, constants) -> Access:
    if kind == "copy":
        return Access(kind, None, (), steps)
    inside, outside = (targets, sources) if kind == "load" else (sources, targets)
    argument, _ = _leaves(outside, definitions, constants)
    _, buffers = _leaves(inside, definitions, constants)
    return Access(kind, argument, buffers, steps)


def _target(values, definitions, constants) -> tuple[int, ...]:
    """UB addresses that a vector call writes: those of its last operand in the UB, absent temporaries apart."""
    for value in reversed(values):
        _, buffers = _leaves([value], definitions, constants)
        if buffers:
            return buffers
    return ()


def _leaves(values, definitions, constants) -> tuple[int | None, tuple[int, ...]]:
    """Where values come from: the number of a run-time argument, and addresses of UB buffers."""
    argument, buffers, todo, seen = None, [], list(values), set()
    while todo:
        value = todo.pop().partition("#")[0]
        if value in seen:
            continue
        seen.add(value)
        numbered = re.fullmatch(r"%arg(\d+)", value)
        if numbered and value not in definitions:
            argument = int(numbered[1]) - LEADING_ARGUMENTS
            continue
        operation, operands = definitions.get(value, ("", []))
        if operation == "hivm.hir.pointer_cast":
            buffers += [constants[name] for name in operands if name in constants]
        elif operation.endswith("select"):
            todo += operands[1:3]
        elif operation in _FOLLOWED:
            todo += operands[:1]
    return argument, tuple(sorted(set(buffers)))
