"""Reports as JSON: what `compile --json` prints, and the files beside this one that it made.

SoCs on which the compiler made the same of all kernels of a shape share one entry; a kernel is a line of values in the
order of `columns`. The fingerprints of the IR tell whether a file still speaks of the kernels at hand.
"""

import dataclasses
import importlib.metadata
import itertools
import json
import os
from pathlib import Path

from megatron_ascend_moe.toolchain import locate
from megatron_ascend_moe.toolchain.report import KernelReport

FOLDER = Path(__file__).parent / "results"
NO_DEVICE = "No device ran: memory plans and programs are the compiler's, traffic is counted on the CPU."
SHAPE = ("hidden", "experts", "topk", "dtype")
COLUMNS = tuple(f.name for f in dataclasses.fields(KernelReport) if f.name not in ("soc", *SHAPE))


def to_json(reports: list[KernelReport], arguments: list[str]) -> str:
    """The reports, with the command line (`arguments` after `compile`) and the compilers that made them."""
    by_chip: dict[tuple, list[list]] = {}
    for one in reports:
        key = (one.soc, *(getattr(one, name) for name in SHAPE))
        by_chip.setdefault(key, []).append([getattr(one, name) for name in COLUMNS])
    socs: dict[tuple, list[str]] = {}
    for (soc, *shape), kernels in by_chip.items():
        lines = ",\n".join(f"   {json.dumps(kernel)}" for kernel in kernels)
        socs.setdefault((*shape, lines), []).append(soc)
    head = {
        "command": _command(arguments),
        "compiler": locate.bishengir_version(),
        "front end": f"triton-ascend {importlib.metadata.version('triton-ascend')}",
        "note": NO_DEVICE,
        "columns": COLUMNS,
    }
    entries = [
        "  {" + ", ".join(f'"{name}": {json.dumps(value)}' for name, value in zip(SHAPE, shape, strict=True))
        + f', "socs": {json.dumps(names)}, "kernels": [\n{lines}\n  ]}}'
        for (*shape, lines), names in socs.items()
    ]  # fmt: skip
    top = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items())
    return "{\n" + top + ',\n "shapes": [\n' + ",\n".join(entries) + "\n ]\n}"


def _command(arguments: list[str]) -> str:
    command = " ".join(["python -m megatron_ascend_moe compile", *arguments])
    return f"{locate.BISHENGIR_VARIABLE}=… {command}" if os.environ.get(locate.BISHENGIR_VARIABLE) else command


def from_json(text: str) -> list[KernelReport]:
    """The reports of `to_json`'s text, one a kernel and SoC."""
    parsed = json.loads(text)
    reports = []
    for entry in parsed["shapes"]:
        shape = {name: entry[name] for name in SHAPE}
        for soc, kernel in itertools.product(entry["socs"], entry["kernels"]):
            values = dict(zip(parsed["columns"], kernel, strict=True))
            values["problems"] = tuple(values["problems"])
            reports.append(KernelReport(soc=soc, **shape, **values))
    return reports


def read_earlier(path: str) -> list[KernelReport]:
    """The reports of a file that the compiler in use made.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no output of `compile --json`, or another compiler made it.
    """
    text = Path(path).read_text()
    try:
        made_by, reports = json.loads(text)["compiler"], from_json(text)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no output of `compile --json` of this version: {error!r}") from error
    if made_by != locate.bishengir_version():
        raise ValueError(f"{path} was made by {made_by}, expected {locate.bishengir_version()}")
    return reports
