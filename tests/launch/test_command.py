"""The `launch` command, as a user types it."""

import os
import shlex
import subprocess
import sys

import pytest

from megatron_ascend_moe.launch import command, flags
from tests.requirements import megatron_training

ROOT = command.configs.CONFIG_DIR.parent
QWEN = ["pretrain_gpt.py", "--model", "qwen3-30b-a3b", "--parallel", "a2-2x8"]


@pytest.fixture
def no_parser(monkeypatch):
    def refuse():
        raise flags.NoMegatronParser("not here")

    monkeypatch.setattr(flags, "megatron_parser", refuse)


def test_dry_run_prints_the_command_and_the_summary(no_parser, capsys):
    assert command.main([*QWEN, "--node-rank", "1", "--master-addr", "node0", "--dry-run", "--", "--lr", "3e-4"]) == 0
    out, err = capsys.readouterr()
    words = shlex.split(out)
    assert words[0].endswith("torchrun")
    assert words[1 : words.index("run") + 4] == shlex.split(
        "--nnodes 2 --nproc-per-node 8 --node-rank 1 --master-addr node0 --master-port 6000 "
        "-m megatron_ascend_moe run --device auto pretrain_gpt.py"
    )
    assert words[words.index("--lr") + 1] == "3e-4"
    assert "30.53 B total, 3.35 B active" in err and "16 = 2 nodes x 8" in err
    assert "32768 routes" in err and "MiB sent" in err
    assert "FLAGS NOT CHECKED against Megatron's parser: not here" in err


def test_launch_replaces_the_process_by_exactly_that_command(no_parser, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execvp", lambda file, argv: started.append((file, argv)))
    command.main(QWEN)
    printed = shlex.split(capsys.readouterr().out)
    assert started == [(printed[0], printed)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["x.py", "--model", "qwen3-30b", "--parallel", "a2-2x8"], "did you mean 'qwen3-30b-a3b'"),
        ([*QWEN, "--config", "absent.yaml"], "no such file: absent.yaml"),
        ([*QWEN, "--", "--expert-model-parallel-size", "7"], "num-experts 128 is not divisible"),
        ([*QWEN, "--", "oops"], "'oops' belongs to no flag"),
        ([*QWEN, "--", "--moe-ascend-pad-multiple", "0"], "expected a whole number of rows, at least 1"),
        ([*QWEN, "--", "--moe-ascend-layout", "bined"], "layout='bined' is unknown: choose one of auto, padded, binned"),
        ([*QWEN, "--", "--moe-ascend-layout", "binned"], "set --moe-expert-capacity-factor, or use layout='auto'"),
        (
            [*QWEN, "--", "--moe-ascend-layout", "padded", "--moe-pad-expert-input-to-capacity"],
            "layout='padded' cannot serve moe_pad_expert_input_to_capacity=True",
        ),
        (
            [*QWEN, "--", "--moe-token-dispatcher-type", "alltoall", "--moe-ascend-pad-multiple", "8"],
            "moe-ascend-pad-multiple: given, but the dispatcher is not selected",
        ),
    ],
)
def test_what_is_refused_exits_with_2_and_says_why(no_parser, capsys, argv, message):
    assert command.main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_yaml_is_named(no_parser, capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text("num-layers: [1\n")
    assert command.main([*QWEN, "--config", str(tmp_path / "mine.yaml")]) == 2
    assert "mine.yaml: expected YAML" in capsys.readouterr().err


def test_node_rank_comes_from_the_environment(no_parser, capsys, monkeypatch):
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    command.main([*QWEN, "--dry-run"])
    assert "--node-rank 1 --master-addr 10.0.0.1" in capsys.readouterr().out


def run(*overrides):
    return subprocess.run(
        [sys.executable, "-m", "megatron_ascend_moe", "launch", *QWEN, "--dry-run", "--", *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_real_parser_accepts_the_plugins_flags_and_names_the_nearest_for_an_unknown_one():
    megatron_training()
    good = run("--moe-ascend-pad-multiple", "16")
    assert good.returncode == 0, good.stderr
    assert "NOT CHECKED" not in good.stderr and "--moe-ascend-pad-multiple 16" in good.stdout
    bad = run("--num-expert", "64")
    assert bad.returncode == 2 and "did you mean 'num-experts'" in bad.stderr
