"""Run cells of the table under the megatron-core of this environment: one JSON line a cell, on standard output.

    echo '[["sinkhorn", 2], ["sinkhorn", 4]]' | python -m tests.breadth.one_version 0.16.1
"""

from __future__ import annotations

import json
import sys
import time

CELL_SECONDS = 600.0  # a hang ends as a failure
POOL_CELLS = 15  # after which a pool is renewed: what its jobs leave behind, threads of gloo groups above all, slows it


def run_cells(version: str, cells: list[tuple[str, int]]):
    """Yield (setting, processes, outcome, detail, seconds) for every cell; one pool of processes a world size."""
    import megatron.core

    from tests.breadth.settings import SETTINGS
    from tests.distributed_pool import JobFailed, Pools

    if megatron.core.__version__ != version:
        raise SystemExit(f"this environment imports megatron-core {megatron.core.__version__}, expected {version}")
    by_name = {setting.name: setting for setting in SETTINGS}
    for world in sorted({world for _, world in cells}):
        pools = Pools()
        for number, setting in enumerate(by_name[name] for name, n in cells if n == world):
            if number % POOL_CELLS == POOL_CELLS - 1:
                pools.close()
                pools = Pools()
            started = time.monotonic()
            try:
                answers = pools(world).submit(
                    "tests.breadth.jobs:run_cell",
                    setting=setting,
                    layout=setting.layouts[world],
                    timeout=CELL_SECONDS,
                )
                outcome, detail = agree(answers)
            except JobFailed as error:
                outcome, detail = "failed", str(error)
            yield setting.name, world, outcome, detail, round(time.monotonic() - started, 1)
        pools.close()


def agree(answers: list[tuple[str, str]]) -> tuple[str, str]:
    """The ranks' common outcome; ranks that differ are a failure."""
    failed = [detail for outcome, detail in answers if outcome == "failed"]
    if failed:
        return "failed", failed[0]
    if len({outcome for outcome, _ in answers}) > 1:
        return "failed", f"ranks disagree: {answers}"
    return answers[0]


if __name__ == "__main__":
    for cell in run_cells(sys.argv[1], json.load(sys.stdin)):
        print(json.dumps(cell), flush=True)
