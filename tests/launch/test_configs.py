"""Reading, merging and overriding configurations."""

import pytest

from megatron_ascend_moe.launch import configs


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_later_configurations_win_and_torchrun_merges_deeper():
    merged = configs.merge(
        {"lr": 1, "torchrun": {"nnodes": 2, "nproc-per-node": 8}}, {"lr": 2, "torchrun": {"nnodes": 4}}
    )
    assert merged == {"lr": 2, "torchrun": {"nnodes": 4, "nproc-per-node": 8}}


def test_flags_become_arguments():
    flags = {"swiglu": True, "bf16": False, "lr": "1e-4", "spec": ["a", "b"], "seed": None, "torchrun": {"nnodes": 2}}
    assert configs.as_argv(flags) == ["--swiglu", "--lr", "1e-4", "--spec", "a", "b"]


def test_overrides():
    flags = configs.parse_overrides("--lr 1e-3 --bf16 --data-path 1 a 2 b --seed=null --eval-iters -1".split())
    assert flags == {
        "lr": "1e-3",
        "bf16": True,
        "data-path": ["1", "a", "2", "b"],
        "seed": None,
        "eval-iters": "-1",
    }


def test_override_without_a_flag_is_refused():
    with pytest.raises(ValueError, match="'3' belongs to no flag"):
        configs.parse_overrides(["3", "--lr", "1"])


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'qwen3-30b-a3b'"):
        configs.find_config("models", "qwen3-30-a3b")


def test_a_path_is_taken_as_it_is(tmp_path):
    path = write(tmp_path / "own.yaml", "num-layers: 2\n")
    assert configs.find_config("models", str(path)) == path
    assert configs.read_config(path) == {"num-layers": 2}


def test_a_key_given_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keys given twice: lr"):
        configs.read_config(write(tmp_path / "own.yaml", "lr: 1\nseed: 1\nlr: 2\n"))


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n"])
def test_anything_but_a_mapping_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match="expected a mapping"):
        configs.read_config(write(tmp_path / "own.yaml", text))


def test_nested_flags_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'moe' holds a mapping"):
        configs.read_config(write(tmp_path / "own.yaml", "moe:\n  num-experts: 8\n"))


def test_smoke_size_keeps_the_kind_and_adds_nothing_that_the_model_lacks():
    full = configs.merge(
        configs.read_config(configs.CONFIG_DIR / "training.yaml"),
        configs.read_config(configs.find_config("models", "qwen3-30b-a3b")),
        configs.read_config(configs.find_config("parallel", "a2-2x8")),
    )
    smoke = configs.cut_to_smoke_size(full)
    assert smoke["torchrun"] == {"nnodes": 1, "nproc-per-node": 2}
    assert smoke["qk-layernorm"] is True and smoke["moe-token-dispatcher-type"] == "ascend"
    assert smoke["hidden-size"] == 64 and smoke["distributed-backend"] == "gloo"
    assert "moe-router-num-groups" not in smoke and "q-lora-rank" not in smoke
