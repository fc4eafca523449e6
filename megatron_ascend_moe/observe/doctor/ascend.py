"""torch_npu, CANN and the SoC. torch_npu is imported only where NPUs are; elsewhere importing it fails."""

import glob
import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ascend_moe.backend.soc import SOCS
from megatron_ascend_moe.observe.doctor.finding import Finding
from megatron_ascend_moe.observe.doctor.software import installed, version_tuple


def is_ascend_machine() -> bool:
    """Whether the driver shows an NPU."""
    return bool(glob.glob("/dev/davinci[0-9]*"))


@dataclass(frozen=True)
class Pairing:
    """Versions that the vendor releases together."""

    triton_ascend: str
    cann: str
    torch_npu: str


PAIRINGS = (Pairing("3.2.0", "8.5.0", "2.7.1"), Pairing("3.2.1", "9.0.0", "2.7.1"))


def check_torch_npu(ascend_machine: bool) -> list[Finding]:
    """Whether torch_npu is there where it should be, and imports."""
    present = importlib.util.find_spec("torch_npu") is not None
    if not ascend_machine:
        if not present:
            return [Finding("torch_npu", "ok", "no NPU and no torch_npu")]
        autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
        return [
            Finding(
                "torch_npu",
                "note" if autoload == "0" else "warning",
                f"torch_npu is installed, but no NPU is visible (TORCH_DEVICE_BACKEND_AUTOLOAD={autoload})",
                "torch loads it at `import torch`, and without CANN's libraries that import fails",
                "uninstall torch-npu, export TORCH_DEVICE_BACKEND_AUTOLOAD=0, or give the container its devices",
            )
        ]
    if not present:
        return [
            Finding(
                "torch_npu",
                "failure",
                "an NPU is visible, but torch_npu is not installed",
                "torch cannot use the NPU without it",
                "pip install the torch-npu that matches torch and CANN (2.7.1 for CANN 8.5.0 and 9.0.0)",
            )
        ]
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # a missing shared library, an ABI mismatch, a driver that does not answer
        return [
            Finding(
                "torch_npu",
                "failure",
                f"import torch_npu fails: {type(error).__name__}: {error}",
                "without CANN's libraries (libhccl.so and others) on the loader's path it cannot be imported",
                "source /usr/local/Ascend/ascend-toolkit/set_env.sh in the shell that starts training",
            )
        ]
    return [Finding("torch_npu", "ok", f"torch_npu {installed('torch-npu')} imports")]


def cann_version(environ: Mapping[str, str] = os.environ) -> str | None:
    """CANN's version from its install record, or None where there is none."""
    home = environ.get("ASCEND_HOME_PATH") or environ.get("ASCEND_TOOLKIT_HOME")
    roots = [Path(home)] if home else [Path("/usr/local/Ascend/ascend-toolkit/latest")]
    for root in roots:
        for record in [*root.glob("*/ascend_toolkit_install.info"), *root.glob("ascend_toolkit_install.info")]:
            match = re.search(r"^version=(\S+)", record.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
            if match:
                return match.group(1)
    return None


def check_cann(ascend_machine: bool, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """CANN's presence, and whether triton-ascend and torch_npu are those that pair with it."""
    version = cann_version(environ)
    if version is None:
        if not ascend_machine:
            return [Finding("cann", "ok", "no CANN, as expected without an NPU")]
        return [
            Finding(
                "cann",
                "failure",
                "CANN is not found at $ASCEND_HOME_PATH, $ASCEND_TOOLKIT_HOME or /usr/local/Ascend",
                "triton-ascend compiles through CANN, and torch_npu loads its libraries",
                "install CANN and source its set_env.sh",
            )
        ]
    return [_pair(version, installed("triton-ascend"), installed("torch-npu"))]


def _pair(cann: str, triton_ascend: str | None, torch_npu: str | None) -> Finding:
    what = f"CANN {cann}, triton-ascend {triton_ascend or 'none'}, torch_npu {torch_npu or 'none'}"
    for pair in PAIRINGS:
        same_cann = version_tuple(pair.cann)[:2] == version_tuple(cann)[:2]
        if same_cann and triton_ascend and version_tuple(triton_ascend)[:3] == version_tuple(pair.triton_ascend):
            return Finding("cann", "ok", what)
    known = "; ".join(f"CANN {p.cann}: triton-ascend {p.triton_ascend}, torch_npu {p.torch_npu}" for p in PAIRINGS)
    return Finding(
        "cann",
        "warning",
        what,
        "the vendor releases these together, and others may miscompile or fail to load",
        f"use a pair that is released together ({known})",
    )


def check_soc(ascend_machine: bool) -> list[Finding]:
    """The SoC's name, its vector cores and Unified Buffer, as the kernels' planner sees them."""
    if not ascend_machine:
        return [Finding("soc", "ok", f"no NPU; the tile planner knows {', '.join(SOCS)}")]
    try:
        name = importlib.import_module("torch").npu.get_device_name(0)
    except Exception as error:
        return [
            Finding(
                "soc",
                "failure",
                f"the NPU does not give its name: {type(error).__name__}: {error}",
                "tile sizes depend on the SoC",
                "run `npu-smi info`; mend torch_npu first, if it is reported above",
            )
        ]
    soc = SOCS.get(name)
    if soc is None:
        return [
            Finding(
                "soc",
                "failure",
                f"SoC {name} is not in the planner's table ({', '.join(SOCS)})",
                "kernels are not planned for a Unified Buffer of unknown size",
                "report the name and its Unified Buffer size, so that it can be added; until then kernels='torch'",
            )
        ]
    what = f"{name} ({soc.generation}): {soc.vector_cores} vector cores, UB {soc.ub_bytes} bytes"
    return [Finding("soc", "ok", what)]
