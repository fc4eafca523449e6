"""The model configurations: published totals, Megatron's parser, and the count against models that Megatron built."""

import json
import subprocess
import sys

import pytest

from megatron_ascend_moe.launch import configs, shape
from tests.requirements import megatron_training

MODELS = sorted(path.stem for path in (configs.CONFIG_DIR / "models").glob("*.yaml"))

# Totals and active parameters in billions, as published on the models' cards and reports.
PUBLISHED_TOTAL = {
    "mixtral-8x7b": 46.7,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
    "deepseek-v2": 236,
    "qwen3-coder-480b-a35b": 480,
}
PUBLISHED_ACTIVE = {"mixtral-8x7b": 12.9, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22, "deepseek-v3": 37}

# What Megatron's local layers lack, in the words of 0.19.2.
WITHOUT_LOCAL_LAYERS = {
    "deepseek-v2": "k_channels",
    "deepseek-v2-lite": "k_channels",
    "deepseek-v3": "k_channels",
    "kimi-k2": "k_channels",
    "qwen3-next-80b-a3b": "only supports transformer engine",
}


def model_flags(name):
    return configs.read_config(configs.find_config("models", name))


@pytest.mark.parametrize("name", sorted(PUBLISHED_TOTAL))
def test_total_parameters_are_within_one_percent_of_the_published_total(name):
    total = shape.count_parameters(model_flags(name)).total / 1e9
    assert total == pytest.approx(PUBLISHED_TOTAL[name], rel=0.01)


@pytest.mark.parametrize("name", sorted(PUBLISHED_ACTIVE))
def test_active_parameters_are_near_the_published_number(name):
    active = shape.count_parameters(model_flags(name)).active / 1e9
    assert active == pytest.approx(PUBLISHED_ACTIVE[name], rel=0.03)


def test_parts_sum_to_the_total():
    count = shape.count_parameters(model_flags("deepseek-v3") | {"mtp-num-layers": 1})
    parts = ("embedding", "attention", "dense_mlp", "routed_experts", "shared_experts", "router", "norms", "mtp")
    assert sum(getattr(count, part) for part in parts) == count.total


def test_multi_token_prediction_layer_of_deepseek_v3_has_its_published_size():
    count = shape.count_parameters(model_flags("deepseek-v3") | {"mtp-num-layers": 1})
    assert count.mtp / 1e9 == pytest.approx(11.5, rel=0.01)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What became of every model in Megatron's hands; see built_models.py."""
    megatron_training()
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    done = subprocess.run(
        [sys.executable, "-m", "tests.launch.built_models", str(store)],
        cwd=configs.CONFIG_DIR.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_layout_parses_with_megatrons_parser(built):
    assert built["layouts"] == sorted(path.stem for path in (configs.CONFIG_DIR / "parallel").glob("*.yaml"))


@pytest.mark.parametrize("name", MODELS)
def test_config_parses_with_megatrons_parser_and_builds_or_names_what_is_missing(built, name):
    outcome = built["stock"][name]
    if name in WITHOUT_LOCAL_LAYERS:
        assert WITHOUT_LOCAL_LAYERS[name] in outcome["missing"]
    else:
        assert outcome["plugin_layers"] > 0


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"deepseek-v2-lite", "qwen3-next-80b-a3b"}))
def test_count_equals_the_parameters_of_the_built_model(built, name):
    """Exactly, with Megatron's attention product for MLA replaced by one without its extra arguments."""
    outcome = built["with_mla"][name]
    assert outcome.get("built") == outcome.get("counted") is not None, outcome


def test_the_local_layers_refuse_the_lite_models_query_norm(built):
    assert "q_lora_rank is None" in built["with_mla"]["deepseek-v2-lite"]["missing"]
