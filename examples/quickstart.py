"""Train a small GPT-MoE with expert parallelism on this machine, and compare the dispatchers. One command:

    python3 examples/quickstart.py

It needs a Python (3.10 to 3.13) and a package index, and makes an environment of its own (.venv-quickstart in the
clone) on the first call. Then two gloo processes, which hold four of the eight experts each, train the same
model on the same text with Megatron's stock dispatcher, with `ascend` padded and with `ascend` binned; and once
more with a capacity factor of 1.0, stock and binned. A progress bar shows loss, ms/iteration and tokens/s; at
the end stand a table, a picture of the curves and a JSON file.

The text is the English documentation that ships inside Python, read byte by byte; `--data FILE` takes another.
Nothing is trained on an accelerator here: the CPU host and the plain-torch kernels do the work.
"""

from __future__ import annotations  # a Python that is too old shall get as far as being told so

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-quickstart"
OLDEST, NEWEST = (3, 10), (3, 13)  # Pythons for which megatron-core has wheels
# the newest megatron-core that has a wheel for this Python is pip's to find
PACKAGES = ["torch", "megatron-core>=0.15.3", "numpy<2.4", "PyYAML", "matplotlib", "tqdm"]
WORLD_SIZE = 2
SHORTEST_TEXT = 1000  # bytes
PATIENCE = 5.0  # seconds that a process may take to end when it is asked to


def main() -> int:
    arguments = _parse()
    try:
        return _train(sys.executable if arguments.this_environment else _environment(), arguments)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _train(python: str, arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="quickstart-") as folder:
        workers: list[subprocess.Popen] = []
        try:
            for rank in range(WORLD_SIZE):
                workers.append(_start(python, rank, Path(folder) / "rendezvous", arguments))
            return _wait(workers)
        finally:
            _end(workers)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE", help="UTF-8 text to train on (default: Python's documentation)")
    parser.add_argument("--steps", type=int, default=200, help="training steps of each run (%(default)s)")
    parser.add_argument("--out", default="runs/quickstart", help="folder for results (%(default)s)")
    parser.add_argument(
        "--this-environment",
        action="store_true",
        help="install nothing: this Python already has torch, megatron-core, matplotlib and tqdm",
    )
    arguments = parser.parse_args()
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        names = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
        parser.error(f"this is Python {sys.version.split()[0]}; megatron-core has wheels for {names}: use one of those")
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: expected at least 1")
    for problem in filter(None, (_problem_with_text(arguments.data), _problem_with_folder(arguments.out))):
        parser.error(problem)
    return arguments


def _problem_with_text(data: str | None) -> str | None:
    if data is None:
        return None
    path = Path(data)
    if not path.is_file() or not os.access(path, os.R_OK):
        return f"--data {data!r} is not a file that can be read: expected a text"
    if path.stat().st_size < SHORTEST_TEXT:
        return f"--data {data!r} holds {path.stat().st_size} bytes, expected at least {SHORTEST_TEXT}: give a longer text"
    return None


def _problem_with_folder(out: str) -> str | None:
    """Found before the training whose results go there, not after it."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        return f"--out {out!r} cannot be written ({error.strerror}): give a folder that can"
    return None


def _environment() -> str:
    """The Python of an environment that holds PACKAGES, made on the first call."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / "complete"
    wanted = "\n".join([sys.version, *PACKAGES])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making {ENVIRONMENT}: torch is a large download, once", flush=True)
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)],
            [str(python), "-m", "pip", "install", "-q", "--prefer-binary", *PACKAGES],
        ):
            code = subprocess.run(command).returncode
            if code:
                sys.exit(f"quickstart.py: `{' '.join(command)}` ended with exit code {code}; its own message is above")
        stamp.write_text(wanted)
    return str(python)


def _start(python: str, rank: int, rendezvous: Path, arguments: argparse.Namespace) -> subprocess.Popen:
    """One training process, out of the terminal's reach: Ctrl-C is for this process, which ends them."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",  # the CPU host refuses to work beside an accelerator that it can see
        "ASCEND_RT_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    command = [python, str(ROOT / "examples" / "quickstart_training.py"), "--rendezvous", str(rendezvous)]
    command += ["--steps", str(arguments.steps), "--out", arguments.out, "--parent", str(os.getpid())]
    command += ["--data", arguments.data] if arguments.data else []
    return subprocess.Popen(command, env=environment, start_new_session=True)


def _wait(workers: list[subprocess.Popen]) -> int:
    """Exit code of the run: the first that is not 0, at once, or 0 when all have ended well."""
    while True:
        codes = [worker.poll() for worker in workers]
        failed = [code for code in codes if code]
        if failed:
            return abs(failed[0])
        if None not in codes:
            return 0
        time.sleep(0.1)


def _end(workers: list[subprocess.Popen]) -> None:
    """Ask the processes that still run to end, then kill those that do not; by their ids."""
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _interrupt(number, frame):
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
