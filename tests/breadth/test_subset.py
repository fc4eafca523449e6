"""The part of the breadth matrix that runs with every change, in the environment's own megatron-core: each setting of
the table on one number of processes, and pairs of settings. `python tests/breadth/matrix.py` runs everything."""

import itertools

import pytest

from tests.breadth import pairwise
from tests.breadth.one_version import agree
from tests.breadth.settings import SETTINGS, Setting

PAIRWISE = pairwise.rows()


def one_world(index: int, setting: Setting) -> int:
    """Settings take turns in 1, 2 and 4 processes."""
    worlds = [world for world in setting.layouts if world <= 4]
    return worlds[index % len(worlds)]


@pytest.mark.parametrize(
    ("setting", "world"),
    [pytest.param(s, one_world(i, s), id=f"{s.name}-{one_world(i, s)}") for i, s in enumerate(SETTINGS)],
)
def test_setting(distributed_pool, setting, world):
    outcome, detail = run(distributed_pool, setting, world, steps=20)
    assert outcome != "failed", detail  # which of the others it must be, the table says and the job checks


@pytest.mark.parametrize("setting", [pytest.param(s, id=s.name) for s in PAIRWISE])
def test_pairs(distributed_pool, setting):
    (world,) = setting.layouts
    outcome, detail = run(distributed_pool, setting, world, steps=4)
    assert outcome == "parity", detail


def run(distributed_pool, setting, world, steps):
    job = {"setting": setting, "layout": setting.layouts[world], "steps": steps}
    return agree(distributed_pool(world).submit("tests.breadth.jobs:run_cell", timeout=240, **job))


def test_pairs_cover_every_two_values():
    names = [set(setting.name.split(", ")) for setting in PAIRWISE]
    values = [list(values) for values in pairwise.FACTORS.values()]
    for one, other in itertools.combinations(range(len(values)), 2):
        for x, y in itertools.product(values[one], values[other]):
            assert any({x, y} <= name for name in names), (x, y)
