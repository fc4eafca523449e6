"""200 random whole layers against brute force; `python tests/breadth/fuzz.py` runs 1,000."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.breadth.fuzz import FAILED_ONCE, check, worlds_and_cases
from tests.breadth.planted_faults import FAULTS

MISMATCH = "tests.breadth.planted_faults:mismatch"
# the pools live as long as the session, on purpose
QUIET = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@pytest.mark.timeout(600)
@settings(max_examples=200, **QUIET)
@given(world_and_case=worlds_and_cases())
def test_random_layers_equal_brute_force(distributed_pool, world_and_case):
    check(distributed_pool, *world_and_case)


@pytest.mark.parametrize(("world", "case"), FAILED_ONCE)
def test_cases_that_failed_once(distributed_pool, world, case):
    check(distributed_pool, world, case)


@pytest.mark.parametrize("fault", [*FAULTS, None])
def test_a_planted_fault_is_found(distributed_pool, fault):
    """Each fault within forty layers; and without one, nothing."""
    found = []

    @settings(max_examples=40, phases=[Phase.generate], **QUIET)
    @given(world_and_case=worlds_and_cases(worlds=(1, 2)))
    def look(world_and_case):
        world, case = world_and_case
        if not found:
            found.extend(filter(None, distributed_pool(world).submit(MISMATCH, case=case, fault=fault)))

    look()
    assert bool(found) == (fault is not None), found
