"""Divisibility of the parallel sizes, and every layout that is shipped."""

import pytest

from megatron_ascend_moe.launch import configs
from megatron_ascend_moe.launch.layout import read_layout

GOOD = {
    "torchrun": {"nnodes": 2, "nproc-per-node": 8},
    "tensor-model-parallel-size": 2,
    "pipeline-model-parallel-size": 2,
    "expert-model-parallel-size": 4,
    "expert-tensor-parallel-size": 1,
    "sequence-parallel": True,
    "num-layers": 4,
    "num-attention-heads": 8,
    "group-query-attention": True,
    "num-query-groups": 2,
    "hidden-size": 64,
    "ffn-hidden-size": 128,
    "num-experts": 8,
    "moe-router-topk": 2,
    "seq-length": 128,
    "micro-batch-size": 1,
    "global-batch-size": 8,
}


def test_groups_of_a_good_layout():
    at = read_layout(GOOD)
    assert (at.world, at.dp, at.edp) == (16, 4, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor-model-parallel-size": 3}, "16 ranks are not divisible by TP 3 x PP 2 x CP 1 = 6"),
        ({"expert-model-parallel-size": 16}, "16 ranks are not divisible by ETP 1 x EP 16 x PP 2 = 32"),
        ({"num-experts": 6}, "num-experts 6 is not divisible by expert-model-parallel-size 4"),
        ({"moe-router-topk": 9}, "moe-router-topk 9 is more than num-experts 8"),
        ({"moe-router-num-groups": 3}, "num-experts 8 is not divisible by moe-router-num-groups 3"),
        ({"moe-router-num-groups": 2, "moe-router-group-topk": 3}, "moe-router-group-topk 3 is more than"),
        ({"moe-ffn-hidden-size": 33, "expert-tensor-parallel-size": 2}, "expert FFN width 33 is not divisible"),
        ({"sequence-parallel": None}, "needs `sequence-parallel: true`"),
        ({"num-attention-heads": 7}, "num-attention-heads 7 is not divisible"),
        ({"num-query-groups": 3}, "num-query-groups 3 and tensor-model-parallel-size 2: neither divides"),
        ({"ffn-hidden-size": 129}, "ffn-hidden-size 129 is not divisible"),
        ({"global-batch-size": 10}, "global-batch-size 10 is not divisible by micro-batch-size 1 x data-parallel"),
        ({"seq-length": 127}, "seq-length 127 is not divisible by 2"),
        ({"num-layers": 7}, "set `decoder-last-pipeline-num-layers: 3`"),
        ({"num-layers-per-virtual-pipeline-stage": 3}, "2 layers per pipeline stage are not divisible"),
        ({"torchrun": {"nnodes": 0}}, "at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change, message):
    with pytest.raises(ValueError) as error:
        read_layout(GOOD | change)
    assert message in str(error.value)


def test_uneven_last_stage():
    flags = GOOD | {"num-layers": 7, "decoder-last-pipeline-num-layers": 3}
    assert read_layout(flags).pp == 2


# which model each shipped layout is for; the layouts without a model in their name serve several
LAYOUTS = [
    ("deepseek-v2-lite", "a2-1x8"),
    ("qwen3-30b-a3b", "a2-2x8"),
    ("mixtral-8x7b", "a2-2x8"),
    ("qwen3-30b-a3b", "a3-1x16"),
    ("qwen3-30b-a3b", "a3-2x16"),
    ("glm-4.5-air", "a3-8x16-glm-4.5-air"),
    ("qwen3-235b-a22b", "a3-16x16-qwen3-235b-a22b"),
    ("deepseek-v3", "a3-32x16-deepseek-v3"),
    ("deepseek-v3", "a2-64x8-deepseek-v3"),
]


@pytest.mark.parametrize(("model", "parallel"), LAYOUTS)
def test_shipped_layouts_fit_their_models(model, parallel):
    flags = configs.merge(
        configs.read_config(configs.CONFIG_DIR / "training.yaml"),
        configs.read_config(configs.find_config("models", model)),
        configs.read_config(configs.find_config("parallel", parallel)),
    )
    nodes, ranks = parallel.split("-")[1].split("x")
    assert read_layout(flags).world == int(nodes) * int(ranks)


def test_every_shipped_layout_is_tested():
    shipped = {path.stem for path in (configs.CONFIG_DIR / "parallel").glob("*.yaml")}
    assert {parallel for _, parallel in LAYOUTS} == shipped
