"""Loads: counted right, once, and reported where Megatron reports."""

import json

import pytest

JOB = "tests.metrics_jobs:"
CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


@pytest.mark.parametrize(
    ("world", "layout", "settings", "config"),
    [
        (1, {}, {"pad_multiple": 8}, {}),
        (2, {"ep": 2}, {"pad_multiple": 8}, {}),
        (4, {"tp": 2, "ep": 2, "etp": 2}, {}, {}),
        (2, {"ep": 2}, {}, CAPACITY),
        (2, {"ep": 2}, {}, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
        (1, {}, {}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    ],
)
def test_loads_equal_what_the_router_asked_for(distributed_pool, world, layout, settings, config):
    job = dict(layout=layout, settings=settings, config=config, evaluate=True)
    for read, asked, again in distributed_pool(world).submit(JOB + "loads", **job):
        assert len(read) == 2
        for load, counts in zip(read, asked, strict=True):
            real, ep = sum(counts), layout.get("ep", 1)
            assert load.tokens_per_expert == counts and real > 0
            assert load.max_vio == pytest.approx(max(counts) / (real / 8) - 1)
            by_rank = [sum(counts[r * 8 // ep : (r + 1) * 8 // ep]) for r in range(ep)]
            assert load.overload == pytest.approx(max(by_rank) / (real / ep))
            assert load.dropped_share == 0
            assert (load.padding_share > 0) == (settings != {} or config is CAPACITY)
            assert (load.bytes_sent > 0) == (ep > 1)
        for load in again:
            assert sum(load.tokens_per_expert) == load.bytes_sent == load.padding_share == 0, "reading starts anew"


def test_megatrons_report_carries_the_loads_on_steps_that_log(distributed_pool, tmp_path):
    path = str(tmp_path / "loads.jsonl")
    answers = distributed_pool(2).submit(JOB + "report", path=path, log_interval=2)
    for numbers, (quiet, logged), _ in answers:
        assert numbers == [1, 2]
        assert "load_balancing_loss" in quiet and "load_balancing_loss" in logged
        assert not any(name.startswith("moe_ascend_") for name in quiet)
        assert logged["moe_ascend_max_vio"] > 0 and logged["moe_ascend_bytes_sent"] > 0
        assert logged["moe_ascend_overload"] >= 1 and logged["moe_ascend_dropped_share"] == 0
    lines = [json.loads(line) for line in answers[0][2]]
    layers = {line["layer"]: line for line in lines if line["step"] == 2}
    assert layers.keys() == {1, 2} and {line["step"] for line in lines} == {2}
    # two steps of two forwards of 64 tokens on each of two ranks, top-2
    assert all(sum(line["tokens_per_expert"]) == 2 * 2 * 64 * 2 * 2 for line in layers.values())
    stages = ["dispatch_preprocess", "token_dispatch", "dispatch_postprocess"]
    stages += ["combine_preprocess", "token_combine", "combine_postprocess"]
    for number, line in layers.items():
        assert list(line["stage_ms"]) == stages and min(line["stage_ms"].values()) > 0
        scalar = answers[0][1][1][f"moe_ascend/ms/token_dispatch/layer_{number}"]
        assert scalar == pytest.approx(line["stage_ms"]["token_dispatch"])
    mean = sum(line["max_vio"] for line in layers.values()) / 2
    assert answers[0][1][1]["moe_ascend_max_vio"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("layout", [{"ep": 2}, {"tp": 2, "ep": 2, "etp": 2}], ids=str)
@pytest.mark.parametrize("differ", [True, False])
def test_settings_are_compared_once_a_group(distributed_pool, layout, differ):
    """Over EP x ETP; every rank names both values."""
    world = layout.get("etp", 1) * 2
    for error, gathers in distributed_pool(world).submit(JOB + "agreement", layout=layout, differ=differ):
        assert gathers == 1
        if differ:
            assert "pad_multiple is 1 on rank 0" in error and f"8 on rank {world - 1}" in error
        else:
            assert error is None
