"""Parameter counts: layer patterns, defaults, and counts done by hand."""

import pytest

from megatron_ascend_moe.launch.shape import (
    count_parameters,
    integer,
    layer_pattern,
    linear_attention_pattern,
    padded_vocabulary,
)

TINY = {
    "num-layers": 2,
    "hidden-size": 8,
    "ffn-hidden-size": 16,
    "num-attention-heads": 2,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "vocab-size": 128,
    "num-experts": 4,
    "moe-router-topk": 1,
}


def test_tiny_model_by_hand():
    attention = 2 * (3 * 8 * 8 + 8 * 8)
    expert = 3 * 8 * 16
    norms = 5 * 8
    embedding = 128 * 8  # tied
    count = count_parameters(TINY)
    assert count.total == attention + 2 * (4 * expert + 4 * 8) + norms + embedding
    assert count.total - count.active == 2 * 3 * expert


def test_biases_layernorm_and_learned_positions_by_hand():
    flags = {k: v for k, v in TINY.items() if k not in ("disable-bias-linear", "normalization", "swiglu")}
    flags |= {"position-embedding-type": "learned_absolute", "max-position-embeddings": 32}
    attention = 2 * (3 * 8 * 8 + 3 * 8 + 8 * 8 + 8)
    expert = 2 * 8 * 16 + 16 + 8
    router = 4 * 8 + 4
    norms = 5 * 16
    assert count_parameters(flags).total == attention + 2 * (4 * expert + router) + norms + 128 * 8 + 32 * 8


def test_untied_output_doubles_the_embedding():
    assert count_parameters(TINY | {"untie-embeddings-and-output-weights": True}).embedding == 2 * 128 * 8


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, [1, 1, 1, 1]), ("2", [1, 0, 1, 0]), ("([0]*1+[1]*3)", [0, 1, 1, 1]), ("([1]+[0])*2", [1, 0, 1, 0])],
)
def test_layer_patterns(value, expected):
    assert layer_pattern({"moe-layer-freq": value}, "moe-layer-freq", 4) == expected


@pytest.mark.parametrize("value", ["[0]*", "__import__('os').getpid()", "[x]*4", "'0'*4", "[1.5]*4"])
def test_layer_pattern_evaluates_lists_of_integers_only(value):
    with pytest.raises(ValueError, match="no layer pattern"):
        layer_pattern({"moe-layer-freq": value}, "moe-layer-freq", 4)


def test_layer_pattern_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="describes 3 layers, num-layers is 4"):
        layer_pattern({"moe-layer-freq": "[1]*3"}, "moe-layer-freq", 4)


def test_every_fourth_layer_has_softmax_attention():
    assert linear_attention_pattern({"linear-attention-freq": 4}, 8) == [1, 1, 1, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(("tp", "expected"), [(1, 151936), (2, 152064)])
def test_vocabulary_is_padded_as_megatron_pads_it(tp, expected):
    assert padded_vocabulary({"vocab-size": 151936, "tensor-model-parallel-size": tp}) == expected


def test_missing_and_malformed_integers_name_the_flag():
    with pytest.raises(ValueError, match="'hidden-size' is missing"):
        integer({}, "hidden-size")
    with pytest.raises(ValueError, match="'hidden-size': expected an integer, got 'wide'"):
        integer({"hidden-size": "wide"}, "hidden-size")
