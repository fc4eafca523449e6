"""Read the vector-core program that bishengir-compile ends with: which accesses it makes, where, and how buffered.

Only what a check needs is read, out of the text of module.hivm.opt.mlir: the calls that move data (DMAs and copies
inside the Unified Buffer), scalar accesses to global memory, the loops around them, and the buffers a DMA alternates
between. A5's compiler ends one level lower, in basic blocks: there loops are not told (`steps` is None).
"""

import re
from dataclasses import dataclass

_DEFINITION = re.compile(r"^\s*((?:%[\w-]+(?::\d+)?(?:, )?)+) = \"?([\w.]+)\"?(.*)$")
_VALUE = re.compile(r"%[\w-]+(?:#\d+)?")
_CALL = re.compile(r"\bcall @(\w+)\(([^)]*)\)")
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

    def scalars_in_column_loops(self, columns: int) -> int:
        """Scalar accesses to global memory inside a loop that steps by `columns`."""
        scalars = (a for a in self.accesses if a.kind in ("scalar_load", "scalar_store"))
        return sum(columns in (access.steps or ()) for access in scalars)

    def single_buffered(self, arguments: set[int]) -> list[Access]:
        """DMAs inside a loop, between these run-time arguments and a buffer of one copy that holds no constant."""
        return [
            access
            for access in self.accesses
            if access.kind in ("load", "store")
            and access.argument in arguments
            and (access.steps is None or access.steps)
            and len(access.buffers) == 1
            and access.buffers[0] not in self.constant_buffers
        ]


def read_program(text: str) -> Program:
    """Read module.hivm.opt.mlir."""
    body = _entry_function(text)
    structured = "cf.br" not in body
    definitions: dict[str, tuple[str, list[str]]] = {}
    constants = {name: int(value) for name, value in _CONSTANT.findall(body)}
    accesses, vector_ops = [], 0
    loops: list[tuple[int, int | None]] = []  # brace depth inside the loop, step
    depth = 0
    written: dict[int, bool] = {}  # UB address -> every vector write to it lies outside all loops
    filled: set[int] = set()  # UB addresses that a DMA fills
    for line in body.splitlines():
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
        access = _access(line, definitions, constants, steps)
        if access is not None:
            accesses.append(access)
            if access.kind == "load":
                filled.update(access.buffers)
        else:
            call = _CALL.search(line)
            if call and not re.match(r"(load_gm|store_ubuf|copy_ubuf)", call[1]):
                vector_ops += 1
                for address in _target(_VALUE.findall(call[2]), definitions, constants):
                    written[address] = written.get(address, True) and not (loops if structured else False)
    constant = {address for address, outside in written.items() if outside} - filled
    return Program(tuple(accesses), vector_ops, frozenset(constant))


def _entry_function(text: str) -> str:
    """The text of the kernel itself, declarations and outlined vector functions left out."""
    bodies = re.split(r"(?m)^  func\.func ", text)
    return max((body for body in bodies if "hacc.entry" in body.partition("\n")[0]), key=len)


def _access(line, definitions, constants, steps) -> Access | None:
    call = _CALL.search(line)
    if call:
        values = _VALUE.findall(call[2])
        if call[1].startswith(("load_gm_to_ubuf", "nd2nz")):
            argument, _ = _leaves(values[:1], definitions, constants)
            _, buffers = _leaves(values[1:2], definitions, constants)
            return Access("load", argument, buffers, steps)
        if call[1].startswith("store_ubuf_to_gm"):
            _, buffers = _leaves(values[:1], definitions, constants)
            argument, _ = _leaves(values[1:2], definitions, constants)
            return Access("store", argument, buffers, steps)
        if call[1].startswith("copy_ubuf_to_ubuf"):
            return Access("copy", None, (), steps)
        return None
    scalar = re.search(r"memref\.(load|store) (?:%[\w-]+, )?(%[\w-]+)\[.*address_space<gm>", line)
    if scalar:
        argument, _ = _leaves([scalar[2]], definitions, constants)
        return Access(f"scalar_{scalar[1]}", argument, (), steps)
    return None


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
