"""200 random whole layers against brute force; `python tests/breadth/fuzz.py` runs 1,000."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.breadth.fuzz import FAILED_ONCE, check, worlds_and_cases

# the pools live as long as the session, on purpose
QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.timeout(600)
@settings(max_examples=200, derandomize=True, **QUIET)
@given(world_and_case=worlds_and_cases())
def test_random_layers_equal_brute_force(distributed_pool, world_and_case):
    check(distributed_pool, *world_and_case)


@pytest.mark.parametrize(("world", "case"), FAILED_ONCE)
def test_cases_that_failed_once(distributed_pool, world, case):
    check(distributed_pool, world, case)
