"""Rows, padding and bytes of a dispatch, against counts done by hand."""

import pytest

from megatron_ascend_moe.launch.layout import Layout
from megatron_ascend_moe.launch.traffic import dispatch_traffic

FLAGS = {
    "seq-length": 64,
    "micro-batch-size": 2,
    "hidden-size": 100,
    "bf16": True,
    "num-experts": 8,
    "moe-router-topk": 2,
}
EP4 = Layout(nodes=1, ranks_per_node=4, tp=1, pp=1, cp=1, ep=4, etp=1)


def test_per_route_rows_and_bytes():
    move = dispatch_traffic(FLAGS, EP4)
    assert (move.tokens, move.routes, move.local_experts, move.expert_rows) == (128, 256, 2, 256)
    assert move.rows_sent == 192  # three of four ranks are others
    assert move.row_bytes == 204  # a row of 100 bf16, a probability of 4 bytes
    assert move.bytes_sent == 192 * 204


def test_sequence_parallelism_divides_the_tokens_and_etp_gathers_the_rows():
    at = Layout(nodes=1, ranks_per_node=4, tp=2, pp=1, cp=1, ep=2, etp=2)
    move = dispatch_traffic(FLAGS | {"sequence-parallel": True}, at)
    assert (move.tokens, move.expert_rows) == (64, 64 * 2 * 2)


def test_padding_of_the_padded_layout():
    move = dispatch_traffic(FLAGS | {"moe-ascend-pad-multiple": 16}, EP4)
    assert (move.pad_rows_expected, move.pad_rows_at_most) == (2 * 7.5, 2 * 15)
    assert dispatch_traffic(FLAGS, EP4).pad_rows_at_most == 0


def test_padding_of_the_binned_layout_is_unused_capacity():
    flags = FLAGS | {"moe-expert-capacity-factor": 1.25, "moe-pad-expert-input-to-capacity": True}
    assert dispatch_traffic(flags, EP4).pad_rows_at_most == 8 * 40 - 256


def test_capacity_without_a_factor_is_refused():
    with pytest.raises(ValueError, match="moe-expert-capacity-factor"):
        dispatch_traffic(FLAGS | {"moe-ascend-layout": "binned"}, EP4)
