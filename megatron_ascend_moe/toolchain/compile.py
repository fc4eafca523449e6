"""`python -m megatron_ascend_moe compile`: every kernel of a model shape through Ascend's compiler, without an NPU.

It compiles what training launches, with the tiles training chooses, reads the compiler's memory plan and final
program, and runs the compiled IR on the CPU to count the rows it moves. It installs nothing, and no device runs:
speed, races between cores and an NPU's rounding stay unknown.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from megatron_ascend_moe.backend.soc import SOCS, Soc, find_soc
from megatron_ascend_moe.kernels.checks import MAX_EXPERTS
from megatron_ascend_moe.toolchain import emulator, locate
from megatron_ascend_moe.toolchain.memory_plan import CompilationFailed, MemoryPlan, compile_for
from megatron_ascend_moe.toolchain.model_shapes import MODEL_SHAPES
from megatron_ascend_moe.toolchain.report import KernelReport, report
from megatron_ascend_moe.toolchain.results import NO_DEVICE, read_earlier, to_json
from megatron_ascend_moe.toolchain.workload import operations

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT_SOC = "Ascend910B3"


Plans = dict[tuple[str, str], MemoryPlan | CompilationFailed]  # (IR, SoC's name) -> what the compiler made of it


def compile_shape(
    hidden: int,
    experts: int,
    topk: int,
    dtype: str,
    socs: Iterable[str],
    run: bool = True,
    plans: Plans | None = None,
    earlier: Mapping[tuple, KernelReport] | None = None,
) -> list[KernelReport]:
    """Compile every kernel of a shape for SoCs that share one Unified Buffer size, hence one set of tiles.

    Args:
        hidden, experts, topk: H, E and K.
        dtype: "bf16", "fp16" or "fp32", of the rows.
        socs: names; the first one's vector cores shape the launch grids.
        run: also execute the compiled IR on the CPU, to count traffic.
        plans: what was compiled before and is not compiled again; what is new is added.
        earlier: reports by `key_of`, which are taken where the IR is the same.
    """
    chips = [find_soc(name) for name in socs]
    shape = {"hidden": hidden, "experts": experts, "topk": topk, "dtype": dtype}
    chip = emulator.activate(chips[0].name, compile=False, run=run)
    reports, plans = [], {} if plans is None else plans
    for operation in operations(hidden, experts, topk, DTYPES[dtype]):
        chip.launches.clear()
        operation.launch()
        for launch, soc in itertools.product(chip.launches, chips):
            known = (earlier or {}).get((soc.name, hidden, experts, topk, dtype, operation.name))
            if known is not None and known.ir == launch.fingerprint:
                reports.append(known)
                continue
            key = (launch.ttadapter, soc.name)
            if key not in plans:
                plans[key] = plan_of(chip, launch, soc)
            floor_bytes = operation.floor_rows * hidden * DTYPES[dtype].itemsize
            reports.append(report(launch, plans[key], soc, shape, operation.name, floor_bytes))
    return reports


def key_of(one: KernelReport) -> tuple:
    """What tells a report from all others of one compiler."""
    return one.soc, one.hidden, one.experts, one.topk, one.dtype, one.operation


def fingerprints(hidden: int, experts: int, topk: int, dtype: str, soc: str) -> dict[str, str]:
    """The fingerprint of each operation's IR for a shape, to compare with a report's `ir`; nothing is compiled or run."""
    chip = emulator.activate(soc, compile=False, run=False)
    found = {}
    for operation in operations(hidden, experts, topk, DTYPES[dtype]):
        chip.launches.clear()
        operation.launch()
        (launch,) = chip.launches
        found[operation.name] = launch.fingerprint
    return found


def plan_of(chip: emulator.Emulator, launch: emulator.Launch, soc: Soc) -> MemoryPlan | CompilationFailed:
    """The memory plan of a launch on `soc`, or why there is none."""
    try:
        return compile_for(soc, launch.ttadapter, chip.scratch(), multibuffer=launch.multibuffer)
    except CompilationFailed as failure:
        return failure


def compile_all(socs: Iterable[str], jobs: int, earlier: Iterable[KernelReport] = ()) -> list[KernelReport]:
    """Compile every distinct model shape, in bf16 and fp32, for these SoCs, in `jobs` processes; reports of `earlier`
    are taken where the IR is the same."""
    known = {key_of(one): one for one in earlier}
    by_memory: dict[tuple[int, str], list[str]] = {}
    for soc in map(find_soc, socs):
        by_memory.setdefault((soc.ub_bytes, soc.compiler), []).append(soc.name)
    shapes = sorted(set(MODEL_SHAPES.values()))
    by_width = [list(of_width) for _, of_width in itertools.groupby(shapes, lambda shape: shape[0])]
    work = itertools.product(by_width, by_memory.values())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        done = [pool.submit(_compile_shapes, *arguments, known) for arguments in work]
        for number, _ in enumerate(as_completed(done), 1):
            print(f"compile: {number} of {len(done)} parts", file=sys.stderr)
        return [one for future in done for one in future.result()]


def _compile_shapes(shapes: list[tuple[int, int, int]], socs: list[str], earlier: dict) -> list[KernelReport]:
    """Shapes of one width have kernels in common, which are compiled once."""
    plans: Plans = {}
    every = itertools.product(shapes, ("bf16", "fp32"))
    return [one for shape, dtype in every for one in compile_shape(*shape, dtype, socs, plans=plans, earlier=earlier)]


def main(argv: list[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.reuse and not arguments.all:
        parser.error("--reuse is for --all")
    _check_arguments(parser, arguments)
    if os.environ.pop("TRITON_INTERPRET", "0") not in ("", "0"):
        print("compile: TRITON_INTERPRET is set and ignored: nothing is interpreted here", file=sys.stderr)
    every = arguments.all and arguments.soc is None
    socs = list(SOCS) if every else [arguments.soc or DEFAULT_SOC]
    try:
        locate.check_all(map(find_soc, socs))
    except locate.MissingTool as missing:
        print(f"compile: {missing}", file=sys.stderr)
        return 2
    if arguments.all:
        try:
            earlier = read_earlier(arguments.reuse) if arguments.reuse else ()
        except (OSError, ValueError) as unusable:
            print(f"compile: --reuse: {unusable}", file=sys.stderr)
            return 2
        reports = compile_all(socs, arguments.jobs, earlier)
    else:
        try:
            reports = compile_shape(arguments.hidden, arguments.experts, arguments.topk, arguments.dtype, socs)
        except ValueError as refusal:  # the tile planner's, with its numbers
            print(f"compile: {refusal}", file=sys.stderr)
            return 1
    if arguments.json:
        print(to_json(reports, argv))
    else:
        print_table(reports)
    return 1 if any(one.problems for one in reports) else 0


def _check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs}: expected at least 1")
    if arguments.all:
        for name in ("hidden", "experts", "topk", "dtype"):
            if getattr(arguments, name) != parser.get_default(name):
                parser.error(f"--{name} is for one shape, --all takes every one")
    experts, topk, hidden = arguments.experts, arguments.topk, arguments.hidden
    if not 1 <= experts <= MAX_EXPERTS:
        parser.error(f"--experts {experts}: expected 1 to {MAX_EXPERTS}")
    if not 1 <= topk <= experts:
        parser.error(f"--topk {topk}: expected 1 to --experts {experts}")
    if hidden <= topk:  # reports tell rows from slots by their width
        parser.error(f"--hidden {hidden}: expected more than --topk {topk}")


_COLUMNS = "{:<32} {:<30} {:>17} {:>7} {:>4} {:>6} {:>6} {:>6} {:>12}"


def print_table(reports: list[KernelReport]) -> None:
    """One line a kernel, then the problems; grouped by SoC and shape."""
    for (soc, hidden, experts, topk, dtype), group in itertools.groupby(
        reports, lambda r: (r.soc, r.hidden, r.experts, r.topk, r.dtype)
    ):
        print(f"{soc}: hidden {hidden}, {experts} experts, top-{topk}, {dtype}, {locate.bishengir_version()}")
        print(_COLUMNS.format("operation", "tile", "UB bytes", "double", "DMA", "UB cp", "scalar", "vector", "row bytes"))
        for one in group:
            print(_line(one))
            for problem in one.problems:
                print(f"    PROBLEM: {problem}")
    print("double: row buffers are double-buffered; DMA, UB copies, scalar accesses to global memory and vector calls")
    print("are counted in the program's text; row bytes are against the least that the operation can move.")
    print(NO_DEVICE)


def _line(one: KernelReport) -> str:
    tile = " ".join(f"{name.lower()}={value}" for name, value in one.tile.items())
    used = "-" if one.ub_bytes is None else f"{one.ub_bytes}/{one.ub_size}"
    double = {None: "-", True: "yes", False: "NO"}[one.double_buffered]
    rows = f"{one.row_bytes / one.floor_bytes:.2f} x floor" if one.floor_bytes else "none"
    return _COLUMNS.format(
        one.operation, tile, used, double, one.dmas, one.ub_copies, one.scalar_accesses, one.vector_ops, rows
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ascend_moe compile",
        description="Compile every kernel of a model shape for an Ascend SoC. " + NO_DEVICE,
        epilog="Exit code 1: a kernel overflows the Unified Buffer, loses double buffering or breaks another rule; "
        "2: a part of the tool chain is missing.",
    )
    parser.add_argument("--soc", choices=SOCS, help=f"default {DEFAULT_SOC}, with --all every SoC")
    parser.add_argument("--hidden", type=int, default=7168, help="H, columns of a row")
    parser.add_argument("--experts", type=int, default=256, help="E")
    parser.add_argument("--topk", type=int, default=8, help="K, experts per token")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the rows")
    parser.add_argument("--all", action="store_true", help="every model shape in bf16 and fp32")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes of --all")
    parser.add_argument(
        "--reuse", metavar="FILE", help="with --all: an earlier --json; kernels whose IR is the same are not compiled again"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    return parser
