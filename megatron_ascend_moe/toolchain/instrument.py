"""Prepare the IR that Triton-Ascend hands to its compiler (`ttadapter`: linalg on memrefs) for a run on the CPU.

Two things are added to the text. External functions that the device compiler knows how to expand (cumulative sums)
get a body. Every access to global memory gets a record: a call, just before it, with the argument, the kind and the
strided window it touches, so that a run counts its DMAs and finds accesses outside a tensor.
"""

import re
from collections.abc import Iterator

KINDS = ("dma_load", "dma_store", "scalar_load", "scalar_store")

_DECLARATION = "func.func private @record_access(index, index, index, index, index, index, index)"
_DEFINITION = re.compile(r"^\s*(%[\w-]+) = memref\.(reinterpret_cast|subview|cast) (%[\w-]+)")
_ACCESSES = (
    ("dma_load", re.compile(r"memref\.copy (%[\w-]+), %[\w-]+ : (memref<.*>) to memref<")),
    ("dma_store", re.compile(r"memref\.copy %[\w-]+, (%[\w-]+) : memref<.*> to (memref<.*>)$")),
    ("dma_store", re.compile(r"bufferization\.materialize_in_destination \S+ in writable (%[\w-]+) : \(.*, (memref<.*>)\)")),
    ("scalar_load", re.compile(r"memref\.load (%[\w-]+)\[.*?\] (?:\{.*\} )?: (memref<.*>)$")),
    ("scalar_store", re.compile(r"memref\.store \S+, (%[\w-]+)\[.*?\] (?:\{.*\} )?: (memref<.*>)$")),
)
_CUMSUM = re.compile(r"^\s*func\.func private @(triton_cumsum\w*)\(tensor<([\dx]+)x(\w+)>, i32, i1\) -> .*$", re.M)
_EXTERNAL = re.compile(r"^\s*func\.func private @(\w+)\(", re.M)


def kernel_name(ttadapter: str) -> str:
    """Name of the kernel function."""
    return re.search(r"func\.func @(\w+)\(", ttadapter)[1]


def argument_types(ttadapter: str) -> list[str]:
    """Types of the kernel's arguments, the two leading ones (lock, workspace) and the six trailing ones (grid)
    included."""
    header = re.search(r"func\.func @\w+\((.*?)\) attributes", ttadapter, re.S)[1]
    return re.findall(r"%arg\d+: (memref<\?x\w+>|\w+)", header)


def instrument(ttadapter: str) -> str:
    """The text with bodies for external functions and records of every access to global memory."""
    text = _CUMSUM.sub(lambda match: _cumsum_body(match[1], match[2].split("x"), match[3]), ttadapter)
    unknown = [name for name in _EXTERNAL.findall(text) if not name.startswith("triton_cumsum")]
    if unknown:
        raise NotImplementedError(f"the CPU run has no body for the compiler's function {', '.join(unknown)}")
    lines = text.splitlines()
    records = {}
    for number, kind, argument, value, memref in _global_accesses(lines):
        records[number] = _record(number, argument, kind, value, memref)
    out = []
    for number, line in enumerate(lines):
        out += [*records.get(number, ()), line]
        if line.startswith("module"):
            out.append("  " + _DECLARATION)
    return "\n".join(out) + "\n"


def scalars_in_loops(ttadapter: str, step: int) -> int:
    """Scalar accesses to global memory that the text holds inside loops of this constant step."""
    lines = ttadapter.splitlines()
    scalars = {number for number, kind, *_ in _global_accesses(lines) if kind.startswith("scalar")}
    steps = dict(re.findall(r"(%[\w-]+) = arith\.constant (\d+) : (?:i32|i64|index)", ttadapter))
    ends: list[int] = []  # brace depths at which the loops of this step end
    depth = found = 0
    for number, line in enumerate(lines):
        loop = re.search(r"scf\.for .* step (%[\w-]+)", line)
        if loop and steps.get(loop[1]) == str(step):
            ends.append(depth)
        depth += line.count("{") - line.count("}")
        while ends and depth <= ends[-1]:
            ends.pop()
        found += bool(ends) and number in scalars
    return found


def _global_accesses(lines: list[str]) -> Iterator[tuple[int, str, int, str, str]]:
    """Every access to global memory: number of the line, kind, number of the argument, memref value and its type."""
    base: dict[str, int] = {}  # memref value -> number of the argument it looks into
    for number, line in enumerate(lines):
        defined = _DEFINITION.match(line)
        if defined:
            source = defined[3]
            if re.fullmatch(r"%arg\d+", source):
                base[defined[1]] = int(source[4:])
            elif source in base:
                base[defined[1]] = base[source]
            else:
                base.pop(defined[1], None)
        for kind, pattern in _ACCESSES:
            found = pattern.search(line)
            if found and found[1] in base:
                yield number, kind, base[found[1]], found[1], found[2]


def _record(serial: int, argument: int, kind: str, value: str, memref: str) -> list[str]:
    """Lines that record one access through the memref `value`."""
    shape = re.match(r"memref<((?:(?:\d+|\?)x)*)(\w+)", memref)
    rank, element = shape[1].count("x"), shape[2]
    if not 1 <= rank <= 2:
        raise NotImplementedError(f"an access of rank {rank} ({memref}): the CPU run records ranks 1 and 2")
    tag = f"%access{serial}"
    sizes = [f"{tag}_sizes#{axis}" if rank > 1 else f"{tag}_sizes" for axis in range(rank)]
    strides = [f"{tag}_strides#{axis}" if rank > 1 else f"{tag}_strides" for axis in range(rank)]
    many = f":{rank}" if rank > 1 else ""
    indices = ", ".join(["index"] * (2 * rank + 1))
    if rank == 1:
        sizes, strides = [f"{tag}_one", *sizes], [f"{tag}_one", *strides]
    return [
        f"{tag}_one = arith.constant 1 : index",
        f"{tag}_argument = arith.constant {argument} : index",
        f"{tag}_kind = arith.constant {KINDS.index(kind)} : index",
        f"{tag}_base, {tag}_offset, {tag}_sizes{many}, {tag}_strides{many} = memref.extract_strided_metadata {value}"
        f" : {memref} -> memref<{element}>, {indices}",
        f"func.call @record_access({tag}_argument, {tag}_kind, {tag}_offset, {sizes[0]}, {strides[0]}, {sizes[1]}, "
        f"{strides[1]}) : (index, index, index, index, index, index, index) -> ()",
    ]


def _cumsum_body(name: str, shape: list[str], element: str) -> str:
    """A running sum along the axis given at run time, for tensors of rank 1 and 2."""
    if len(shape) > 2:
        raise NotImplementedError(f"the CPU run sums along an axis of rank 1 and 2 tensors, got {'x'.join(shape)}")
    tensor = f"tensor<{'x'.join(shape)}x{element}>"
    rank = len(shape)
    add = "arith.addf" if element.startswith(("f", "bf")) else "arith.addi"
    lines = [
        f"  func.func private @{name}(%x: {tensor}, %axis: i32, %reverse: i1) -> {tensor} {{",
        "    %c0 = arith.constant 0 : index",
        "    %c1 = arith.constant 1 : index",
        "    %along = arith.index_cast %axis : i32 to index",
    ]
    lines += [f"    %d{axis} = arith.constant {length} : index" for axis, length in enumerate(shape)]
    for axis in range(rank):
        carried = "%x" if axis == 0 else f"%o{axis - 1}"
        lines.append(
            f"    %r{axis} = scf.for %i{axis} = %c0 to %d{axis} step %c1 iter_args(%o{axis} = {carried}) -> ({tensor}) {{"
        )
    here, before, steps = [], [], []
    for axis in range(rank):
        lines += [
            f"    %n{axis} = arith.constant {axis} : index",
            f"    %sums{axis} = arith.cmpi eq, %along, %n{axis} : index",
            f"    %last{axis} = arith.subi %d{axis}, %c1 : index",
            f"    %mirror{axis} = arith.subi %last{axis}, %i{axis} : index",
            f"    %turn{axis} = arith.andi %sums{axis}, %reverse : i1",
            f"    %h{axis} = arith.select %turn{axis}, %mirror{axis}, %i{axis} : index",
            f"    %down{axis} = arith.subi %h{axis}, %c1 : index",
            f"    %up{axis} = arith.addi %h{axis}, %c1 : index",
            f"    %near{axis} = arith.select %turn{axis}, %up{axis}, %down{axis} : index",
            f"    %later{axis} = arith.cmpi sgt, %i{axis}, %c0 : index",
            f"    %step{axis} = arith.andi %sums{axis}, %later{axis} : i1",
            f"    %b{axis} = arith.select %step{axis}, %near{axis}, %h{axis} : index",
        ]
        here.append(f"%h{axis}")
        before.append(f"%b{axis}")
        steps.append(f"%step{axis}")
    inner = rank - 1
    has_before = steps[0]
    if rank == 2:
        lines.append(f"    %any = arith.ori {steps[0]}, {steps[1]} : i1")
        has_before = "%any"
    lines += [
        f"    %value = tensor.extract %o{inner}[{', '.join(here)}] : {tensor}",
        f"    %previous = tensor.extract %o{inner}[{', '.join(before)}] : {tensor}",
        f"    %total = {add} %value, %previous : {element}",
        f"    %result = arith.select {has_before}, %total, %value : {element}",
        f"    %w{inner} = tensor.insert %result into %o{inner}[{', '.join(here)}] : {tensor}",
        f"    scf.yield %w{inner} : {tensor}",
        "    }",
    ]
    if rank == 2:
        lines += [f"    scf.yield %r1 : {tensor}", "    }"]
    lines += [f"    return %r0 : {tensor}", "  }"]
    return "\n".join(lines)
