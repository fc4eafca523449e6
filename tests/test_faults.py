"""A rank that fails takes the others down within the process group's timeout: nobody hangs, nobody finishes."""

import os
import socket
import subprocess
import sys
import time

import pytest

from tests.fault_worker import TIMEOUT_SECONDS

START_UP_SECONDS = 150  # imports of two processes on a busy machine


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(fault):
    """Exit codes and outputs of the two ranks; both are ended whatever happens."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.fault_worker", fault],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + START_UP_SECONDS + 2 * TIMEOUT_SECONDS
        outputs = [rank.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for rank in ranks]
        return [rank.returncode for rank in ranks], outputs
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        ("raises", "raised RuntimeError: an expert failed on this rank"),
        ("killed", None),
        ("nan", "raised RuntimeError"),
    ],
)
def test_the_others_end_with_an_error(fault, first):
    codes, outputs = _run(fault)
    assert "finished" not in outputs[0] + outputs[1]
    if first is None:
        assert codes[0] == -9
    else:
        assert codes[0] == 1 and first in outputs[0], outputs[0][-2000:]
    assert codes[1] == 1 and "raised " in outputs[1], outputs[1][-2000:]


def test_without_a_fault_both_ranks_finish():
    codes, outputs = _run("none")
    assert codes == [0, 0] and all("finished" in output for output in outputs)
