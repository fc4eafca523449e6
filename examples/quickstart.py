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
PATIENCE = 5.0  # seconds that a process may take to end when it is asked to


def main() -> int:
    arguments = _parse()
    python = sys.executable if arguments.this_environment else _environment()
    with tempfile.TemporaryDirectory(prefix="quickstart-") as folder:
        workers = [_start(python, rank, Path(folder) / "rendezvous", arguments) for rank in range(WORLD_SIZE)]
        try:
            return _wait(workers)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return 130
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
    if arguments.data and not Path(arguments.data).is_file():
        parser.error(f"--data {arguments.data!r} is not a file")
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: expected at least 1")
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        names = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
        parser.error(f"this is Python {sys.version.split()[0]}; megatron-core has wheels for {names}: use one of those")
    return arguments


def _environment() -> str:
    """The Python of an environment that holds PACKAGES, made on the first call."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / "complete"
    wanted = "\n".join([sys.version, *PACKAGES])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making {ENVIRONMENT}: torch is a large download, once", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--prefer-binary", *PACKAGES], check=True)
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
