"""Settings in the environment that stop training, slow it down, or make it wrong. Only the variables named here
are ever read out or printed."""

import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from megatron_ascend_moe.config import OFF
from megatron_ascend_moe.observe.doctor.finding import Finding

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")


def check_interfaces(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """The network interfaces that gloo and HCCL are told to use, and the address that gloo takes otherwise."""
    present = [name for _, name in socket.if_nameindex()]
    findings = []
    for variable in INTERFACE_VARIABLES:
        value = environ.get(variable)
        if value is None:
            continue
        missing = [name for name in _named_interfaces(variable, value) if not _exists(variable, name, present)]
        if missing:
            findings.append(
                Finding(
                    "interfaces",
                    "failure",
                    f"{variable}={value}: this machine has no interface {', '.join(missing)} ({', '.join(present)})",
                    "the processes cannot connect to each other",
                    f"set {variable} to the interface of the nodes' network (`ip -brief address`), or unset it",
                )
            )
        else:
            findings.append(Finding("interfaces", "ok", f"{variable}={value}"))
    others = [name for name in present if name != "lo"]
    if "GLOO_SOCKET_IFNAME" not in environ:
        findings.append(_host_address(others))
    return findings


def _named_interfaces(variable: str, value: str) -> list[str]:
    """Names in the value. HCCL also takes prefixes, `=name` for an exact name and `^name` to exclude one."""
    if variable == "HCCL_SOCKET_IFNAME" and value.startswith("^"):
        return []
    return [name for name in value.lstrip("=").split(",") if name]


def _exists(variable: str, name: str, present: list[str]) -> bool:
    if variable == "HCCL_SOCKET_IFNAME":
        return any(interface.startswith(name) for interface in present)
    return name in present


def _host_address(others: list[str]) -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = None
    if address is not None and not address.startswith("127."):
        return Finding("interfaces", "ok", f"the host's name leads to {address}; interfaces: {', '.join(others)}")
    return Finding(
        "interfaces",
        "note" if not others else "warning",
        f"the host's own name leads to {address or 'no address'}; interfaces: {', '.join(others) or 'only loopback'}",
        "gloo listens on the address of the host's name: other nodes cannot reach it there",
        "for several nodes, export GLOO_SOCKET_IFNAME (and HCCL_SOCKET_IFNAME) with the nodes' interface",
    )


TIMEOUTS = ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT")
TIMEOUT_MINIMUM = 1200  # seconds; launch scripts of the field use 3600


def check_timeouts(ascend_machine: bool, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """HCCL's timeouts: the first step compiles kernels, at a different speed on each rank."""
    findings = []
    for variable in TIMEOUTS:
        value = environ.get(variable)
        if value is not None and not value.isdigit():
            findings.append(
                Finding(
                    "timeouts",
                    "failure",
                    f"{variable}={value} is no whole number of seconds",
                    "HCCL refuses to start with it",
                    f"export {variable}=3600",
                )
            )
        elif ascend_machine and (value is None or int(value) < TIMEOUT_MINIMUM):
            findings.append(
                Finding(
                    "timeouts",
                    "warning",
                    f"{variable} is {value or 'not set'}",
                    "ranks that still compile kernels in the first step outlast a short timeout, and the job ends",
                    f"export {variable}=3600, as configs/ascend.env does",
                )
            )
        else:
            findings.append(Finding("timeouts", "ok", f"{variable} is {value or 'not set'}"))
    return findings


def check_allocator(ascend_machine: bool, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """The NPU allocator: MoE batches change size in every step."""
    value = environ.get("PYTORCH_NPU_ALLOC_CONF")
    if ascend_machine and "expandable_segments:True" not in (value or ""):
        return [
            Finding(
                "allocator",
                "warning",
                f"PYTORCH_NPU_ALLOC_CONF is {value or 'not set'}",
                "the number of received rows changes in every step, and fixed segments fragment the memory",
                "export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
            )
        ]
    return [Finding("allocator", "ok", f"PYTORCH_NPU_ALLOC_CONF is {value or 'not set'}")]


# variable, why, mend
DEBUGGING = (
    (
        "ASCEND_LAUNCH_BLOCKING",
        "every launch waits for the device, and TASK_QUEUE_ENABLE has no effect",
        "unset it for training",
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        "every launch waits for the device",
        "unset it for training",
    ),
    (
        "TRITON_INTERPRET",
        "Triton kernels are interpreted in Python, thousands of times slower",
        "unset it for training",
    ),
    (
        "MEGATRON_ASCEND_MOE_CHECKED",
        "checked mode waits for the device in every dispatch",
        "unset it for training; use it to find wrong routes",
    ),
)


def check_debugging(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Debugging switches that were left on."""
    left_on = [
        Finding("debugging", "warning", f"{variable}={environ.get(variable)}", why, mend)
        for variable, why, mend in DEBUGGING
        if (environ.get(variable) or "").lower() not in OFF
    ]
    return left_on or [Finding("debugging", "ok", "no debugging switch is on")]


SHARED_FILE_SYSTEMS = (
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "glusterfs", "pvfs2", "9p", "fuse"
)  # fmt: skip
SPACE_MINIMUM = 2**30  # bytes


def check_cache(environ: Mapping[str, str] = os.environ, mounts: str | None = None) -> list[Finding]:
    """The folder of compiled kernels: writable, on a disk of this node, with room."""
    home = environ.get("TRITON_HOME") or environ.get("HOME") or "/"
    folder = Path(environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    if not os.access(existing, os.W_OK | os.X_OK) or not existing.is_dir():
        return [
            Finding(
                "cache",
                "failure",
                f"the kernel cache {folder} cannot be written",
                "Triton stores every compiled kernel there",
                "export TRITON_CACHE_DIR to a folder of this node that you may write",
            )
        ]
    kind = file_system(existing.resolve(), Path("/proc/mounts").read_text() if mounts is None else mounts)
    if kind.split(".")[0] in SHARED_FILE_SYSTEMS:
        return [
            Finding(
                "cache",
                "warning",
                f"the kernel cache {folder} is on a shared file system ({kind})",
                "nodes race on it: a half-written kernel can fail to load, or return NaN without an error",
                "export TRITON_CACHE_DIR=/tmp/triton-cache-$(id -u), on a disk of this node",
            )
        ]
    free = shutil.disk_usage(existing).free
    if free < SPACE_MINIMUM:
        return [
            Finding(
                "cache",
                "warning",
                f"the kernel cache {folder} has {free / 2**20:.0f} MiB left",
                "a full disk leaves half-written kernels",
                "free space, or export TRITON_CACHE_DIR to another disk of this node",
            )
        ]
    return [Finding("cache", "ok", f"{folder} ({kind}, {free / 2**30:.0f} GiB free)")]


def file_system(path: Path, mounts: str) -> str:
    """Type of the file system that holds `path`, from the text of /proc/mounts."""
    best, kind = -1, "unknown"
    for line in mounts.splitlines():
        _, point, found, *_ = line.split()
        point = point.replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), found
    return kind
