"""Training through the plugin equals training through Megatron's own alltoall dispatcher: losses and gradients."""

import functools

import pytest
import torch

LAYOUTS = {
    "EP 1": (1, {}),
    "EP 2": (2, {"ep": 2}),
    "TP 2 x EP 2": (4, {"tp": 2, "ep": 2}),
    "TP 2 x EP 2 x ETP 2": (4, {"tp": 2, "ep": 2, "etp": 2}),
}
NO_DROP = {"moe_expert_capacity_factor": 4.0}  # 8 experts, top-2: capacity = tokens, so nothing can be dropped
PAD_TO_CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


@pytest.fixture(scope="module")
def train(distributed_pool):
    """train(layout name, plugin settings or None, config overrides) -> every rank's result; stock runs once."""

    @functools.cache
    def cached(layout, settings, config):
        world, sizes = LAYOUTS[layout]
        return distributed_pool(world).submit(
            "tests.gpt_moe:train",
            layout=sizes,
            settings=None if settings is None else dict(settings),
            config=dict(config),
        )

    def run(layout, settings, config):
        frozen = None if settings is None else tuple(settings.items())
        return cached(layout, frozen, tuple(config.items()))

    return run


def assert_equal_training(stock, ours):
    assert len(stock) == len(ours)
    for expected, got in zip(stock, ours, strict=True):
        assert len(got["losses"]) == 20
        torch.testing.assert_close(got["losses"], expected["losses"], rtol=1e-5, atol=0)
        assert got["gradients"].keys() == expected["gradients"].keys()
        assert sum(bool(g.any()) for g in expected["gradients"].values()) > 20, "the comparison must compare something"
        for name, gradient in expected["gradients"].items():
            scale = gradient.abs().max().item()
            torch.testing.assert_close(
                got["gradients"][name], gradient, rtol=1e-5, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("multiple", [1, 8, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padded_equals_stock(train, layout, multiple):
    assert_equal_training(train(layout, None, {}), train(layout, {"pad_multiple": multiple}, {}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_binned_without_overflow_equals_stock(train, layout):
    stock = train(layout, None, NO_DROP)
    assert_equal_training(stock, train(layout, {"layout": "binned"}, NO_DROP))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pad_to_capacity_equals_stock_with_the_same_flags(train, layout):
    stock = train(layout, None, PAD_TO_CAPACITY)
    assert stock[0]["losses"] != train(layout, None, {})[0]["losses"], "capacity 1.0 must drop something"
    assert_equal_training(stock, train(layout, {}, PAD_TO_CAPACITY))
