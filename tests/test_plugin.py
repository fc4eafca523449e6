"""Registration: what install changes, what it selects, and that it can be taken back."""

import pytest


def test_uninstall_leaves_identical_names(distributed_pool):
    ((during, after),) = distributed_pool(1).submit("tests.plugin_jobs:changed_names")
    assert "moe_layer.MoEAlltoAllTokenDispatcher" in during and "WrappedTorchNorm.__new__" in during
    assert after == []


@pytest.mark.parametrize(
    ("installed", "attribute", "name"),
    [
        (False, None, "MoEAlltoAllTokenDispatcher"),
        (False, True, "AscendTokenDispatcher"),
        (True, None, "AscendTokenDispatcher"),
        (True, False, "MoEAlltoAllTokenDispatcher"),
    ],
)
def test_selection(distributed_pool, installed, attribute, name):
    job = "tests.plugin_jobs:dispatcher_class"
    ((got, verified, module),) = distributed_pool(1).submit(job, installed=installed, attribute=attribute)
    assert got == name
    if name == "AscendTokenDispatcher":
        assert verified == 2
    else:
        assert module.startswith("megatron.core.")
        assert "2 of 2 MoE layers use MoEAlltoAllTokenDispatcher, expected AscendTokenDispatcher" in verified


def test_another_dispatcher_stays_where_ours_is_not_selected(distributed_pool):
    """And where it is, the support table's rows of moe_token_dispatcher_type hold the refusal."""
    job = {"installed": True, "attribute": False, "dispatcher_type": "allgather"}
    ((name, _, module),) = distributed_pool(1).submit("tests.plugin_jobs:dispatcher_class", **job)
    assert name == "MoEAllGatherTokenDispatcher" and module.startswith("megatron.core.")


def test_an_attribute_that_is_no_setting_is_refused(distributed_pool):
    from tests.distributed_pool import JobFailed

    host = {"moe_ascend_dispatcher": True, "moe_ascend_pad_mulitple": 8}
    with pytest.raises(JobFailed, match="moe_ascend_pad_mulitple, which is no setting: expected one of moe_ascend_ch"):
        distributed_pool(1).submit("tests.plugin_jobs:resolved", host=host)


def test_settings_come_from_config_then_arguments_then_install(distributed_pool):
    ((settings, origins),) = distributed_pool(1).submit(
        "tests.plugin_jobs:resolved",
        host={"moe_ascend_layout": "padded"},
        args={"moe_ascend_layout": "binned", "moe_ascend_pad_multiple": 8, "moe_ascend_dispatcher": True},
        installed={"pad_multiple": 16, "kernels": "torch"},
    )
    assert (settings.layout, settings.pad_multiple, settings.kernels) == ("padded", 8, "torch")
    assert origins == {
        "layout": "TransformerConfig",
        "pad_multiple": "arguments",
        "kernels": "install()",
        "exchange": "install()",
        "checked": "install()",
        "load_report": "install()",
        "stage_times": "install()",
    }


def test_settings_without_selection_are_refused(distributed_pool):
    from tests.distributed_pool import JobFailed

    message = "settings moe_ascend_pad_multiple are given but the dispatcher is not selected"
    with pytest.raises(JobFailed, match=message):
        distributed_pool(1).submit("tests.plugin_jobs:resolved", args={"moe_ascend_pad_multiple": 8})


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        ({"layout": "binned"}, {}, "layout='binned' needs a capacity, got moe_expert_capacity_factor=None"),
        (
            {"layout": "padded"},
            {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
            "layout='padded' cannot serve moe_pad_expert_input_to_capacity=True: use layout='auto' or drop that flag",
        ),
    ],
)
def test_layouts_that_cannot_work_are_refused_at_start_up(distributed_pool, settings, config, message):
    (got,) = distributed_pool(1).submit("tests.plugin_jobs:refusal", settings=settings, config=config)
    assert got is not None and message in got


def test_no_new_state_dict_keys(distributed_pool):
    ((stock, installed, ours),) = distributed_pool(1).submit("tests.plugin_jobs:state_dict_keys")
    assert stock == installed == ours and stock


@pytest.mark.parametrize(
    ("world", "settings", "config", "where"),
    [
        (1, {"checked": True}, {}, "forward"),
        (1, {}, {}, "forward"),
        (2, {}, {}, "forward"),
        (1, {"layout": "binned"}, {"moe_expert_capacity_factor": 4.0}, "loads"),
        (2, {"layout": "binned"}, {"moe_expert_capacity_factor": 4.0}, "loads"),
    ],
)
def test_too_many_routes_raise(distributed_pool, world, settings, config, where):
    """The counter rides in the counts' collective, so every rank raises; without a sync, where the loads are read.
    Checked mode raises on the rank that has them."""
    job = {"ep": world, "settings": settings, "config": config}
    for answer in distributed_pool(world).submit("tests.plugin_jobs:wrong_width", **job):
        assert answer is not None and answer[0] == where
        assert "1 rows of the routing map hold more than moe_router_topk=2" in answer[1]
