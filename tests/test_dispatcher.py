"""The dispatcher's six stages around toy experts: unequal ranks, the combined schedule, syncs, determinism."""

import subprocess
import sys

import pytest

JOB = "tests.dispatcher_jobs:"
CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
NO_DROP = {"moe_expert_capacity_factor": 4.0}
FILLED = NO_DROP | {"moe_pad_expert_input_to_capacity": True}


def assert_equal(answers, limit=1e-5):
    for differences in answers:
        assert "out" in differences and any(name.startswith("weight") for name in differences)
        assert all(difference <= limit for difference in differences.values()), differences


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize(
    ("tokens", "ep", "tp", "to", "fewer"),
    [
        ([17], 1, 1, None, True),
        ([0], 1, 1, None, False),
        ([1], 1, 1, [7, 3], False),
        ([13, 5], 2, 1, None, True),
        ([9, 0], 2, 1, None, False),  # a rank without tokens
        ([9, 7], 2, 1, [0, 1], False),  # a rank that receives nothing
        ([9, 7], 2, 1, [4, 6], True),
        ([0, 0], 2, 1, None, False),  # all ranks empty
        ([9, 1, 0, 4], 4, 1, [0, 7], True),
        ([9, 3, 0, 6], 2, 2, None, True),  # ETP: parts of unequal size
        ([9, 3, 2, 6], 2, 2, [5, 6], False),
        ([4, 3], 1, 2, None, True),
    ],
)
def test_unequal_ranks_equal_one_process(distributed_pool, tokens, ep, tp, to, fewer, multiple):
    answers = distributed_pool(len(tokens)).submit(
        JOB + "compare_with_reference",
        tokens=tokens,
        ep=ep,
        tp=tp,
        to=to,
        fewer=fewer,
        settings={"pad_multiple": multiple, "checked": True},
    )
    assert_equal(answers)


@pytest.mark.parametrize(("world", "ep", "tp"), [(1, 1, 1), (2, 2, 1), (4, 2, 2), (8, 8, 1)])
@pytest.mark.parametrize("layout", ["binned", "auto"])
def test_binned_equals_one_process(distributed_pool, world, ep, tp, layout):
    """`auto` under pad-to-capacity; the toy routes of 4 experts overflow nothing at capacity factor 4."""
    host = NO_DROP if layout == "binned" else FILLED
    answers = distributed_pool(world).submit(
        JOB + "compare_with_reference", tokens=[12] * world, ep=ep, tp=tp, settings={"layout": layout}, host=host
    )
    assert_equal(answers)


@pytest.mark.parametrize(("tokens", "ep", "tp"), [([12, 8], 2, 1), ([12, 12, 12, 5], 2, 2)])
def test_unequal_tokens_in_bins_are_an_error_on_every_rank(distributed_pool, tokens, ep, tp):
    job = {"tokens": tokens, "ep": ep, "tp": tp, "host": NO_DROP}
    for error in distributed_pool(len(tokens)).submit(JOB + "unequal_bins", **job):
        assert error is not None and "capacity is 12 on rank 0" in error
        assert f"{tokens[-1]} on rank {len(tokens) - 1}" in error


@pytest.mark.parametrize(
    ("world", "ep", "tp", "host"), [(1, 1, 1, {}), (2, 2, 1, {}), (4, 2, 2, {}), (2, 2, 1, FILLED)]
)
def test_triton_kernels_inside_the_dispatcher(distributed_pool, world, ep, tp, host):
    """Interpreted here: the whole way, with Triton's kernels in it."""
    answers = distributed_pool(world).submit(
        JOB + "compare_with_reference",
        tokens=[6, 3, 0, 4][:world] if not host else [6] * world,
        ep=ep,
        tp=tp,
        settings={"kernels": "triton", "pad_multiple": 4},
        host=host,
    )
    assert_equal(answers)


def test_one_local_expert(distributed_pool):
    answers = distributed_pool(8).submit(
        JOB + "compare_with_reference", tokens=[5, 0, 3, 9, 1, 1, 4, 2], ep=8, settings={"pad_multiple": 8}, fewer=True
    )
    assert_equal(answers)


@pytest.mark.parametrize(("settings", "host"), [({}, {}), ({"pad_multiple": 8}, {}), ({}, CAPACITY)])
@pytest.mark.parametrize("world", [2, 8])  # four local experts, and one
def test_the_combined_1f1b_schedule_gives_the_same_gradients(distributed_pool, world, settings, host):
    answers = distributed_pool(world).submit(JOB + "one_f_one_b", ep=world, settings=settings, host=host)
    for equal, nonzero in answers:
        assert all(equal) and sum(nonzero) >= 3, "input, probabilities and a weight must have gradients to compare"


@pytest.mark.parametrize("host", [{}, CAPACITY])
@pytest.mark.parametrize("world", [1, 2])
def test_the_experts_may_free_their_input(distributed_pool, world, host):
    for equal, nonzero in distributed_pool(world).submit(JOB + "freed_by_the_experts", ep=world, host=host):
        assert all(equal) and all(nonzero)


@pytest.mark.parametrize(("world", "ep", "tp"), [(1, 1, 1), (2, 2, 1), (4, 2, 2)])
@pytest.mark.parametrize("host", [{}, CAPACITY])
def test_twenty_runs_give_the_same_bits(distributed_pool, world, ep, tp, host):
    for same in distributed_pool(world).submit(JOB + "twenty_runs", ep=ep, tp=tp, host=host):
        assert len(same) == 20 and all(same)


@pytest.mark.parametrize(("world", "ep", "tp"), [(1, 1, 1), (2, 2, 1), (4, 2, 2)])
@pytest.mark.parametrize(
    ("settings", "host", "syncs"),
    [
        ({}, {}, ["cpu"]),
        ({"pad_multiple": 8}, {}, ["cpu"]),
        ({"layout": "binned"}, NO_DROP, []),
        ({}, CAPACITY, []),
    ],
)
def test_device_syncs(distributed_pool, world, ep, tp, settings, host, syncs):
    """At most one in padded, none in binned; and the count can count: checked mode waits more often."""
    for got in distributed_pool(world).submit(JOB + "count_syncs", ep=ep, tp=tp, settings=settings, host=host):
        assert got == syncs
    checked = settings | {"checked": True}
    for got in distributed_pool(world).submit(JOB + "count_syncs", ep=ep, tp=tp, settings=checked, host=host):
        assert len(got) > len(syncs)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("host", [{}, CAPACITY])
def test_recompute_plans_alike_and_counts_once(distributed_pool, world, host):
    for found in distributed_pool(world).submit(JOB + "recompute", ep=world, host=host):
        assert found["plans"] == 3, "one of the plain run, two of the checkpointed one"
        assert found["same plan"] and found["same gradients"]
        plain, checkpointed = found["routes counted"]
        assert plain == checkpointed > 0


WITHOUT_TORCH_DISTRIBUTED = """
from types import SimpleNamespace
from megatron_ascend_moe.host import cpu
cpu.enable()
import torch.distributed
from megatron_ascend_moe import AscendTokenDispatcher
from tests import dispatcher_jobs as jobs
groups = SimpleNamespace(ep=None, expt_tp=None, tp_ep=None)
dispatcher = AscendTokenDispatcher(8, list(range(8)), jobs.host_config(), groups)
hidden, probs, routed = jobs.routes(9, seed=1)
output = jobs.layer(dispatcher, hidden.requires_grad_(), probs, routed, list(jobs.expert_weights()))
output.sum().backward()
error = (output - jobs.reference(hidden, probs, routed, jobs.expert_weights())).abs().max()
print("error", float(error), "initialised", torch.distributed.is_initialized(), "gradient", bool(hidden.grad.any()))
"""


def test_one_rank_needs_no_torch_distributed():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH_DISTRIBUTED], capture_output=True, text=True, timeout=280)
    assert "error 0.0 initialised False gradient True" in done.stdout, done.stderr[-2000:]
