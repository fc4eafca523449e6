"""Megatron-LM's own dispatcher tests, unchanged, on a CPU: once with the stock dispatcher, once with the plugin.

    git -C MEGATRON_LM archive core_v0.19.0 tests | tar x -C DIRECTORY
    python tests/breadth/megatron_tests.py DIRECTORY [--processes 8] [TEST_FILE ...]

DIRECTORY holds Megatron-LM's tests, and may hold its `megatron`, which is then used instead of the installed one. Every
test that stock passes on every rank must pass with the plugin. Tests that need a GPU library skip or fail on both sides.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_TESTS = ["tests/unit_tests/transformer/moe/test_a2a_token_dispatcher.py"]
SECONDS = 1200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("tests", nargs="*", default=DEFAULT_TESTS, metavar="TEST_FILE")
    parser.add_argument("--processes", type=int, default=8)
    options = parser.parse_args()
    stock, ours = (run(options.directory, options.tests, options.processes, side) for side in ("stock", "ours"))
    lost = sorted(stock["passed"] - ours["passed"])
    for side, outcomes in (("stock", stock), ("ours", ours)):
        print(side, ", ".join(f"{len(tests)} {outcome}" for outcome, tests in sorted(outcomes.items())))
    print(f"{len(stock['passed']) - len(lost)} of the {len(stock['passed'])} tests that stock passes pass with the plugin")
    for test in lost:
        print("  lost:", test)
    return bool(lost) or not stock["passed"]


def run(directory: Path, tests: list[str], processes: int, side: str) -> dict[str, set[str]]:
    """Outcome -> tests with that outcome on every rank (`failed` on any rank is failed)."""
    with tempfile.TemporaryDirectory() as results:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)]),
            "MEGATRON_TESTS_SIDE": side,
            "MEGATRON_TESTS_RESULTS": results,
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29517",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, str(ROOT / "tests/breadth/megatron_tests_rank.py"), *tests]
        ranks = [
            subprocess.Popen(
                command,
                cwd=directory,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=None if rank == 0 else subprocess.DEVNULL,
                stderr=None if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(processes)
        ]
        try:
            for rank in ranks:
                rank.wait(SECONDS)
        finally:
            for rank in ranks:
                rank.kill()
        outcomes = [dict(line.split(" ", 1)[::-1] for line in _lines(results, rank)) for rank in range(processes)]
    merged: dict[str, set[str]] = {"passed": set(), "failed": set(), "skipped": set()}
    for test, outcome in outcomes[0].items():
        agreed = all(other.get(test) == outcome for other in outcomes)
        merged[outcome if agreed else "failed"].add(test)
    return merged


def _lines(results: str, rank: int) -> list[str]:
    return (Path(results) / str(rank)).read_text().splitlines()


if __name__ == "__main__":
    sys.exit(main())
