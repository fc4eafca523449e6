"""`python -m megatron_ascend_moe bench`: the kernels and the dispatcher's sequence against the device's copy bandwidth,
then the dispatcher alone and a whole MoE layer, forward and backward, against Megatron-Core's own.

One line a case: microseconds on the device (CUDA graph replays, inputs that are not in the cache), bytes that must
move, GB/s, and the fraction of a copy of the same bytes measured in the same run. Results are checked against the
plain-torch twins before anything is timed.
"""

import argparse
import datetime
import functools
import importlib.metadata
import itertools
import json
import platform
import shlex
import sys
from collections.abc import Callable

import torch

from megatron_ascend_moe import kernels
from megatron_ascend_moe.bench import layer, timing
from megatron_ascend_moe.bench.cases import check, make_cases, make_inputs
from megatron_ascend_moe.bench.peers import PEERS
from megatron_ascend_moe.bench.shapes import MODELS, SMOKE, Shape
from megatron_ascend_moe.host.run import prepare_device

PARTS = ("kernels", "layer")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main(argv: list[str]) -> int:
    """Run the command; 0 where every result was right, else an error is raised."""
    args = _parse(argv)
    device = torch.device(args.device or _default_device())
    if "layer" in args.parts:
        prepare_device(device.type)
    kernel_set = kernels.select(args.kernels, device)
    shapes = [SMOKE] if args.smoke else [MODELS[name] for name in args.model.split(",")]
    report = {**_provenance(device, kernel_set.name, argv), "results": []}
    print(f"{report['device']}, kernels {kernel_set.name}, torch {report['torch']}, triton {report['triton']}")
    copies = timing.Copies(device)
    measure_kernels = functools.partial(_measure_kernels, device=device, kernel_set=kernel_set, copies=copies, vs=args.vs)
    measure_layer = functools.partial(_measure_layer, device=device, kernels_choice=args.kernels)
    for shape, dtype in itertools.product(shapes, args.dtype.split(",")):
        print(f"\n{shape} {dtype}")
        for part, measure in (("kernels", measure_kernels), ("layer", measure_layer)):
            if part in args.parts.split(","):
                report["results"] += _or_why_not(part, shape, dtype, measure)
        if args.json:  # after each: a fault on the device ends everything
            with open(args.json, "w") as file:
                json.dump(report, file, indent=1)
                file.write("\n")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megatron_ascend_moe bench", description=__doc__)
    parser.add_argument("--model", default=",".join(MODELS), help="one or several of these (default: all, %(default)s)")
    parser.add_argument("--dtype", default="bf16", help="of the rows, or several: bf16,fp32")
    parser.add_argument("--vs", default="", help=f"peers to time the same sequence with: {','.join(PEERS)}")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure (default: %(default)s)")
    parser.add_argument("--device", help="default: npu or cuda where torch finds one, else cpu")
    parser.add_argument("--kernels", default="auto", choices=kernels.KERNELS)
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny shape: shows that all of it runs, times nothing real"
    )
    args = parser.parse_args(argv)
    for name, known in (("model", MODELS), ("dtype", DTYPES), ("vs", PEERS), ("parts", PARTS)):
        unknown = [choice for choice in getattr(args, name).split(",") if choice and choice not in known]
        if unknown:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; expected some of {','.join(known)}")
    return args


def _default_device() -> str:
    if hasattr(torch, "npu") and torch.npu.is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _measure_kernels(
    shape: Shape, dtype: str, device: torch.device, kernel_set: kernels.KernelSet, copies: timing.Copies, vs: str
) -> list[dict]:
    """Check, then time, every case of a shape; the peers' lines follow that of the sequence."""
    inputs = make_inputs(shape, DTYPES[dtype], device, kernel_set)
    check(inputs, kernel_set)
    results = []
    for case in make_cases(inputs, kernel_set):
        seconds, floor = timing.graph_seconds(case.call, device), sum(map(copies.seconds, case.parts))
        line = {"shape": str(shape), "dtype": dtype, "case": case.name, "bytes": sum(case.parts)}
        line |= {"us": seconds * 1e6, "gb_per_s": sum(case.parts) / seconds / 1e9, "of_copy": floor / seconds}
        line |= {"host_us": timing.host_seconds(case.call, device) * 1e6}
        results.append(line)
        print(
            f"  {case.name:<27} {line['us']:9.1f} us {line['bytes'] / 1e6:9.1f} MB {line['gb_per_s']:7.0f} GB/s "
            f"{line['of_copy']:6.1%} of a copy   host {line['host_us']:5.0f} us",
            flush=True,
        )
    own = timing.call_seconds(case.call, device)
    return results + [_peer(name, inputs, device, own, results[-1]) for name in vs.split(",") if name]


def _peer(name: str, inputs, device: torch.device, own_seconds: float, own: dict) -> dict:
    """Time a peer's sequence beside ours, both launched from the host; a peer that cannot run is named."""
    line = {"shape": own["shape"], "dtype": own["dtype"], "case": f"sequence by {name}"}
    try:
        call = PEERS[name](inputs)
    except (ImportError, ValueError) as error:
        print(f"  {line['case']:<27} not measured: {error}", flush=True)
        return line | {"not_measured": str(error)}
    seconds = timing.call_seconds(call, device)
    line |= {"us": seconds * 1e6, "own_us": own_seconds * 1e6, "speedup": seconds / own_seconds}
    print(f"  {line['case']:<27} {line['us']:9.1f} us, ours {line['own_us']:.1f} us: {line['speedup']:.2f} times")
    return line


def _measure_layer(shape: Shape, dtype: str, device: torch.device, kernels_choice: str) -> list[dict]:
    lines = layer.measure(shape, DTYPES[dtype], device, kernels_choice)
    for line in lines:
        kept = f", keeps {line['kept_bytes']} B, stock {line['stock_kept_bytes']} B" if "kept_bytes" in line else ""
        times = f"{line['us']:9.1f} us, stock {line['stock_us']:.1f} us: {line['speedup']:.2f} times"
        print(f"  {line['case']:<27} {times}{kept}", flush=True)
    return [{"shape": str(shape), "dtype": dtype, **line} for line in lines]


def _or_why_not(part: str, shape: Shape, dtype: str, measure: Callable[[Shape, str], list[dict]]) -> list[dict]:
    """The part's lines, or one that says what it lacked: a package, or memory."""
    try:
        return measure(shape, dtype)
    except (ImportError, torch.OutOfMemoryError) as error:
        reason = str(error).splitlines()[0]
        print(f"  {part:<27} not measured: {reason}", flush=True)
        return [{"shape": str(shape), "dtype": dtype, "case": part, "not_measured": reason}]


def _provenance(device: torch.device, kernels_name: str, argv: list[str]) -> dict:
    on_cpu = device.type == "cpu"
    return {
        "command": shlex.join(["python", "-m", "megatron_ascend_moe", "bench", *argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": platform.processor() or "cpu" if on_cpu else getattr(torch, device.type).get_device_name(device),
        "kernels": kernels_name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }


def _triton_version() -> str:
    """Of triton-ascend or triton, whichever is installed; "none" without."""
    for name in ("triton-ascend", "triton"):
        try:
            return f"{importlib.metadata.version(name)} ({name})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
