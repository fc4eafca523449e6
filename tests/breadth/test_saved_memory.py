"""Bytes that autograd holds between forward and backward: no more than with Megatron's dispatcher, and let go."""

import pytest

SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
TO_CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
LAYOUTS = [(1, {}), (2, {"ep": 2}), (2, {"tp": 2, "etp": 2})]


@pytest.fixture
def saved_bytes(distributed_pool):
    """saved_bytes(world, layout, config) -> for each rank, (bytes, boxes, boxes alive) of stock and of ours."""

    def measure(world, layout, config):
        job = {"layout": layout, "config": config, "tokens": 256}
        stock, ours = (
            distributed_pool(world).submit("tests.breadth.memory_jobs:saved_bytes", settings=settings, **job)
            for settings in (None, {})
        )
        return list(zip(stock, ours, strict=True))

    return measure


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_padded_with_multiple_1_holds_no_more_than_stock(saved_bytes, world, layout):
    for (stock, _, _), (ours, boxes, alive) in saved_bytes(world, layout, {}):
        assert 0 < ours <= stock
        assert boxes > 10 and alive == 0


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_binned_holds_at_most_an_index_a_row_more(saved_bytes, world, layout):
    """Stock transposes bins by shape alone; here a plan says where rows go, as everywhere else."""
    rows = 256 * 2 * world  # capacity factor 1
    for (stock, _, _), (ours, boxes, alive) in saved_bytes(world, layout, TO_CAPACITY):
        assert 0 < ours <= stock + 4 * rows + 1024
        assert boxes > 10 and alive == 0


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
@pytest.mark.parametrize("config", [{}, TO_CAPACITY], ids=["padded", "binned"])
def test_recompute_holds_the_layers_input_alone(saved_bytes, world, layout, config):
    for (stock, _, _), (ours, boxes, alive) in saved_bytes(world, layout, config | SELECTIVE):
        assert ours == stock == 0
        assert boxes == 1 and alive == 0
