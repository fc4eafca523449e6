"""The environments the suite runs in. `python3 tests/run.py` brings nox and runs them all; `nox -l` lists them.

Upstream triton and triton-ascend install the same package name, so they can never share an environment; and
triton-ascend 3.2.0 has wheels up to Python 3.11, whereas megatron-core 0.19 needs 3.12.
"""

import os
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
NOX = ROOT / ".nox"
RESULTS = NOX / "results"
ASCEND_PYTHON = NOX / "ascend" / "bin" / "python"
OLDEST_CORE = NOX / "megatron-core-0.15.3"
COMPILERS = NOX / "ascendnpu-ir"  # of the CANN releases before: tests/toolchain/test_older_compilers.py
OLDER_COMPILERS = ("1.0.0", "1.1.0")
LLVM_TOOLS = ("mlir-opt", "mlir-translate", "llc")
IN_CI = os.environ.get("CI", "").lower() in ("1", "true")

TEST_TOOLS = ["hypothesis", "pytest", "pytest-timeout", "pytest-xdist"]
PROJECT_NEEDS = ["numpy<2.4", "PyYAML", "matplotlib", "psutil", "tensorboard", "tqdm"]
PARALLEL = ["-n", "2", "--dist", "worksteal"]

# What touches the host; the kernels and the tools do not know its version.
OLDEST_CORE_TESTS = ["tests/test_plugin.py", "tests/test_dispatcher.py", "tests/test_parity.py", "tests/test_faults.py"]
OLDEST_CORE_TESTS += ["tests/test_beside_others.py", "tests/observe/test_metrics.py"]
OLDEST_CORE_TESTS += ["tests/breadth/test_subset.py", "tests/breadth/test_fields.py"]

nox.options.error_on_missing_interpreters = IN_CI
nox.options.reuse_existing_virtualenvs = True


@nox.session(python="3.11")
def ascend(session: nox.Session) -> None:
    """Triton-Ascend's interpreter, megatron-core 0.16.1 (the newest for Python 3.11)."""
    session.install("torch", "pybind11", "megatron-core==0.16.1", *PROJECT_NEEDS, *TEST_TOOLS)
    session.install("--no-deps", "triton-ascend==3.2.0", "ascendnpu-ir==1.2.0")
    session.install("--no-deps", "-e", ".")
    for version in OLDER_COMPILERS:
        if not (COMPILERS / version).is_dir():
            session.install("--no-deps", "--target", str(COMPILERS / version), f"ascendnpu-ir=={version}")
    _pytest(session, "python", "interpret", *PARALLEL, env={"MEGATRON_ASCEND_MOE_TEST_COMPILERS": str(COMPILERS)})


@nox.session(venv_backend="none", requires=["ascend"])
def ascend_compiled(session: nox.Session) -> None:
    """The kernels once more: Triton-Ascend's own IR, compiled for the CPU through LLVM 19."""
    missing = [tool for tool in LLVM_TOOLS if not _find_llvm_tool(tool)]
    if missing:
        _lacks(session, f"LLVM 19's {', '.join(missing)}: apt-get install mlir-19-tools llvm-19")
    _pytest(session, str(ASCEND_PYTHON), "compiled", *PARALLEL, "tests/kernels")


@nox.session(venv_backend="none", requires=["ascend"])
def oldest_core(session: nox.Session) -> None:
    """megatron-core 0.15.3, laid beside the `ascend` environment and found before its own."""
    python = str(ASCEND_PYTHON)
    arguments = ["--no-deps", "--upgrade", "--target", str(OLDEST_CORE), "megatron-core==0.15.3"]
    session.run(python, "-m", "pip", "install", "-q", *arguments, external=True)
    env = {"PYTHONPATH": str(OLDEST_CORE)}
    _pytest(session, python, "interpret", *PARALLEL, *OLDEST_CORE_TESTS, env=env)


@nox.session(python="3.12")
def current(session: nox.Session) -> None:
    """Current torch with its own triton, megatron-core 0.19.2 and its whole training loop."""
    session.install("torch", "megatron-core==0.19.2", *PROJECT_NEEDS, *TEST_TOOLS)
    session.install("--no-deps", "-e", ".")
    _pytest(session, "python", "interpret", *PARALLEL)


@nox.session(venv_backend="none")
def quickstart(session: nox.Session) -> None:
    """The README's training command, in a short version: it makes its own environment."""
    arguments = ["--steps", "20", "--out", str(NOX / "quickstart")]
    session.run(sys.executable, str(ROOT / "examples" / "quickstart.py"), *arguments, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff on the Python, shellcheck on the shell scripts."""
    session.install("ruff")
    session.run("ruff", "check", ".")
    if shutil.which("shellcheck") is None:
        _lacks(session, "shellcheck: apt-get install shellcheck")
    scripts = [str(path) for path in [*ROOT.glob("examples/*.sh"), ROOT / ".ci" / "run"] if path.exists()]
    session.run("shellcheck", *scripts, external=True)


def _pytest(session: nox.Session, python: str, tier: str, *arguments: str, env: dict | None = None) -> None:
    """Run the suite (or what follows `--` on the command line) and leave its counts for tests/run.py."""
    settings = {
        "MEGATRON_ASCEND_MOE_TEST_TIER": tier,
        "OMP_NUM_THREADS": "1",  # two test workers and their gloo processes share the cores
        "TRITON_CACHE_DIR": str(NOX / "cache" / "triton"),
        "MPLCONFIGDIR": str(NOX / "cache" / "matplotlib"),
        **(env or {}),
    }
    report = f"--junitxml={RESULTS / session.name}.xml"
    session.run(python, "-m", "pytest", report, *arguments, *session.posargs, env=settings, external=python != "python")


def _find_llvm_tool(name: str) -> str | None:
    return shutil.which(f"{name}-19") or shutil.which(name, path="/usr/lib/llvm-19/bin")


def _lacks(session: nox.Session, what: str) -> None:
    """A loud skip on a user's machine, a failure in CI."""
    message = f"this machine lacks {what}"
    session.error(message) if IN_CI else session.skip(message)
