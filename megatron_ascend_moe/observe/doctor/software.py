"""Versions against the support table, and which triton Python really imports."""

import importlib.metadata
import importlib.util
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_ascend_moe.observe.doctor.finding import Finding


@dataclass(frozen=True)
class Support:
    """One row of the support table: what the suite ran with, and what is refused."""

    distribution: str
    minimum: str | None
    below: str | None
    tested: tuple[str, ...]
    needed: bool
    why: str
    mend: str


SUPPORT = (
    Support("torch", "2.4", None, ("2.13", "2.14"), True, "every operation is a torch operation", "install torch>=2.4"),
    Support("numpy", None, "2.4", ("2.3",), False, "numpy 2.4 breaks Triton's interpreters", "install 'numpy<2.4'"),
    Support(
        "megatron-core",
        "0.15.3",
        None,
        ("0.15.3", "0.16.1", "0.19.2"),
        False,
        "the dispatcher is a plugin of Megatron-Core; without it only the operations can be used",
        "install megatron-core 0.15.3, 0.16.1 (Python 3.10, 3.11) or 0.19.2 (Python 3.12)",
    ),
    Support("PyYAML", None, None, ("6.0",), True, "the launch command reads YAML", "install PyYAML"),
)

PYTHON_MINIMUM = (3, 10)


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    return tuple(int(part) for part in re.match(r"[0-9.]*", version).group().split(".") if part)


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> list[Finding]:
    """The interpreter."""
    version = platform.python_version()
    if version_tuple(version) < PYTHON_MINIMUM:
        return [
            Finding(
                "python",
                "failure",
                f"Python {version}",
                "this package needs 3.10 or newer",
                "use Python 3.10 or 3.11 with triton-ascend, 3.12 with megatron-core 0.19",
            )
        ]
    return [Finding("python", "ok", f"Python {version} on {platform.machine()}")]


def check_versions() -> list[Finding]:
    """Installed versions against `SUPPORT`."""
    return [_judge(row, installed(row.distribution)) for row in SUPPORT]


def _judge(row: Support, version: str | None) -> Finding:
    check = "versions"
    if version is None:
        severity = "failure" if row.needed else "warning"
        return Finding(check, severity, f"{row.distribution} is not installed", row.why, row.mend)
    found = version_tuple(version)
    too_old = row.minimum is not None and found < version_tuple(row.minimum)
    too_new = row.below is not None and found >= version_tuple(row.below)
    if too_old or too_new:
        bound = f"older than {row.minimum}" if too_old else f"not older than {row.below}"
        return Finding(check, "failure", f"{row.distribution} {version} is {bound}", row.why, row.mend)
    if not any(found[: len(version_tuple(tested))] == version_tuple(tested) for tested in row.tested):
        tested = ", ".join(row.tested)
        return Finding(check, "note", f"{row.distribution} {version} is untested here; tested: {tested}")
    return Finding(check, "ok", f"{row.distribution} {version}")


TRITON_DISTRIBUTIONS = ("triton-ascend", "triton", "pytorch-triton", "triton-windows")


def check_triton(ascend_machine: bool) -> list[Finding]:
    """Which `triton` Python imports, from which distribution, and whether another one shadows it."""
    found = {name: version for name in TRITON_DISTRIBUTIONS if (version := installed(name)) is not None}
    origin = triton_origin()
    if origin is None and not found:
        if not ascend_machine:
            return [Finding("triton", "note", "triton is not installed: the kernels run as plain torch")]
        return [
            Finding(
                "triton",
                "failure",
                "triton is not installed",
                "kernels on an NPU are Triton kernels",
                "pip install triton-ascend==3.2.0 (Python 3.10 or 3.11)",
            )
        ]
    return list(_judge_triton(found, origin, ascend_machine))


def _judge_triton(found: dict[str, str], origin: Path | None, ascend_machine: bool):
    names = ", ".join(f"{name} {version}" for name, version in found.items())
    remove = "pip uninstall -y triton pytorch-triton triton-ascend, then install the one that you need"
    if len(found) > 1:
        yield Finding(
            "triton",
            "failure",
            f"several distributions install the module triton: {names}",
            "they overwrite each other's files, so that what is imported is neither",
            remove,
        )
    records = [importlib.metadata.distribution(name) for name in found]
    homes = [Path(record.locate_file("triton")) for record in records]
    editable = any('"editable": true' in (record.read_text("direct_url.json") or "") for record in records)
    if origin is None:
        yield Finding(
            "triton", "failure", f"{names} is installed, but triton cannot be found", "files are missing", remove
        )
        return
    if not editable and not any(_same(origin, home) for home in homes):
        yield Finding(
            "triton",
            "failure",
            f"triton is imported from {origin}, which {f'shadows {names}' if found else 'no distribution installed'}",
            "Python takes the first triton on its path, whatever is installed",
            "rename or remove that folder, or take its parent out of PYTHONPATH and the working directory",
        )
        return
    backends = sorted(path.name for path in (origin / "backends").glob("*") if (path / "driver.py").is_file())
    if ascend_machine and "ascend" not in backends:
        yield Finding(
            "triton",
            "failure",
            f"triton at {origin} has the backends {', '.join(backends) or 'none'}, not ascend ({names})",
            "community triton shadows triton-ascend: kernels cannot be compiled for an NPU",
            "pip uninstall -y triton triton-ascend && pip install triton-ascend==3.2.0",
        )
    elif len(found) == 1:
        yield Finding("triton", "ok", f"{names} at {origin}, backends: {', '.join(backends) or 'none'}")


def triton_origin() -> Path | None:
    """The folder of the `triton` that `import triton` would take, or None. It is not imported."""
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
