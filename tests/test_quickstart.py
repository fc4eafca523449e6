"""The quickstart in a tiny size: its results, its refusals, and that nothing outlives it."""

import json
import os
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
    with open(tmp_path / "log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as quickstart:
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
        (["--steps", "0"], "--steps 0: expected at least 1"),
    ],
)
def test_bad_arguments_are_usage_errors(arguments, message):
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert done.returncode == 2
    assert message in done.stderr
