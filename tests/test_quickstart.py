"""The quickstart in a tiny size: its results, its refusals, and that nothing outlives it."""

import functools
import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--this-environment"]
RUNS = ["stock alltoall", "ascend padded", "ascend binned", "stock, capacity 1.0", "ascend binned, capacity 1.0"]


def test_the_dispatchers_train_alike(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Every token goes to two of eight experts, and comes back. " * 40, encoding="utf-8")
    out = tmp_path / "results"
    command = [*COMMAND, "--steps", "4", "--data", str(text), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    record = json.loads((out / "results.json").read_text())
    assert [run["name"] for run in record["runs"]] == RUNS
    assert all(len(run["losses"]) == 4 and run["tokens_per_second"] > 0 for run in record["runs"])
    assert all(run["losses"][-1] < run["losses"][0] for run in record["runs"])
    compared = {name: (c["with"], c["equal_steps"]) for name, c in record["comparisons"].items()}
    assert compared == {RUNS[1]: (RUNS[0], 4), RUNS[2]: (RUNS[0], 4), RUNS[4]: (RUNS[3], 4)}
    # the capacity drops tokens, so those two runs are not the first three over again
    assert record["runs"][3]["losses"] != record["runs"][0]["losses"]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert all(name in done.stdout for name in RUNS)
    assert "tokens/s" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_outlives_it(number, code, tmp_path):
    import psutil

    command = [*COMMAND, "--steps", "1000000", "--out", str(tmp_path)]
    # as a terminal starts it: a shell's background job ignores Ctrl-C, and so would all that it starts
    by_hand = {"preexec_fn": functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)}
    with open(tmp_path / "log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log, **by_hand) as quickstart:
        deadline = time.monotonic() + 120
        while "stock alltoall" not in (tmp_path / "log").read_text():
            assert quickstart.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        workers = psutil.Process(quickstart.pid).children(recursive=True)
        quickstart.send_signal(number)
        assert quickstart.wait(30) == code
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no_such_file"], "--data 'no_such_file' is not a file"),
        (["--data", "."], "--data '.' is not a file"),
        (["--data", "short"], "--data 'short' holds 5 bytes, expected at least 1000"),
        (["--steps", "0"], "--steps 0: expected at least 1"),
        (["--out", "short"], "--out 'short' cannot be written (File exists)"),
        (["--out", "short/results"], "--out 'short/results' cannot be written (Not a directory)"),
        (["--out", "/proc/results"], "--out '/proc/results' cannot be written"),
    ],
)
def test_bad_arguments_are_usage_errors(arguments, message, tmp_path):
    """Before anything is installed or started."""
    (tmp_path / "short").write_text("short")
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def quickstart(monkeypatch, tmp_path):
    """The module itself, started with an empty command line, its environment in a place of its own."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    module = importlib.import_module("quickstart")
    monkeypatch.setattr(module, "ENVIRONMENT", tmp_path / "venv")
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--out", str(tmp_path)])
    return module


@pytest.mark.parametrize("version", [(3, 8, 18), (3, 14, 0)])
def test_a_python_without_wheels_is_refused(quickstart, monkeypatch, capsys, version):
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SystemExit, match="2"):
        quickstart.main()
    assert "megatron-core has wheels for 3.10 to 3.13: use one of those" in capsys.readouterr().err


def test_an_installation_that_fails_is_named(quickstart, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match=r"-m venv --clear .*venv` ended with exit code 1; its own message is above"):
        quickstart.main()
    assert not (quickstart.ENVIRONMENT / "complete").exists()


def test_an_interrupted_installation_ends_as_an_interrupted_training_does(quickstart, monkeypatch, capsys):
    def interrupted(command):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    assert quickstart.main() == 130
    assert capsys.readouterr().err == "\ninterrupted\n"
