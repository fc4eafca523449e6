"""The example scripts: their own checks against a stand-in for Python, and every one of them at smoke size."""

import ast
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.requirements import megatron_training, missing

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MODELS = ["pretrain_mixtral_8x7b.sh", "pretrain_qwen3_30b_a3b.sh", "pretrain_deepseek_v3.sh"]
OURS = (
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NNODES",
    "MODEL",
    "PARALLEL",
    "MEGATRON_PATH",
    "DATA_PATH",
    "TOKENIZER",
)
BUSY = 600  # seconds for one smoke: half a minute on an idle core, several on a machine that runs other suites
QWEN = ["--model", "qwen3-30b-a3b", "--parallel", "a2-2x8"]


def environment(**settings):
    kept = {k: v for k, v in os.environ.items() if k not in OURS and not k.startswith(("SLURM_", "HCCL_", "TRITON_"))}
    return {**kept, **settings}


def run(script, *arguments, cwd, **settings):
    return subprocess.run(
        ["bash", str(EXAMPLES / script), *arguments],
        cwd=cwd,
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=BUSY,
    )


@pytest.fixture
def recorder(tmp_path):
    """A stand-in for Python that writes down how it was called; `recorder("doctor", 1)` makes that command fail."""

    def make(command="", code=0):
        path = tmp_path / "python"
        path.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"with open({str(tmp_path / 'calls')!r}, 'a') as file:\n"
            "    file.write(json.dumps([sys.argv[1:], dict(os.environ)]) + '\\n')\n"
            "print('output of', sys.argv[3])\n"
            f"sys.exit({code} if sys.argv[3] == {command!r} else 0)\n"
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def calls():
        file = tmp_path / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    make.calls = calls
    return make


def test_shellcheck_finds_nothing():
    if shutil.which("shellcheck") is None:
        missing("shellcheck is not installed")
    scripts = [*EXAMPLES.glob("*.sh"), ROOT / "configs" / "ascend.env"]
    assert len(scripts) > 5
    done = subprocess.run(["shellcheck", "-s", "bash", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_export_has_a_reason():
    """Each export of ascend.env follows a comment, and keeps what is already set."""
    lines = (ROOT / "configs" / "ascend.env").read_text().splitlines()
    exports = [i for i, line in enumerate(lines) if line.startswith("export ")]
    assert len(exports) >= 7
    for i in exports:
        name = re.match(r"export (\w+)=", lines[i]).group(1)
        assert f'="${{{name}:-' in lines[i]
        assert lines[i - 1].startswith(("#", "export "))


@pytest.mark.parametrize(
    ("script", "arguments", "settings", "message"),
    [
        ("run_single_node.sh", ["--parallel", "a2-1x8"], {}, "--model is missing"),
        ("run_single_node.sh", ["--model", "mixtral-8x7b"], {}, "--parallel is missing"),
        ("run_single_node.sh", ["--model"], {}, "--model needs a value"),
        ("run_single_node.sh", [*QWEN, "--smok"], {}, "unknown argument '--smok'"),
        ("run_single_node.sh", QWEN, {"MEGATRON_PATH": "/nowhere"}, "MEGATRON_PATH=/nowhere has no pretrain_gpt.py"),
        ("run_multi_node.sh", QWEN, {}, "NODE_RANK='': expected this node's number"),
        ("run_multi_node.sh", QWEN, {"NODE_RANK": "one", "MASTER_ADDR": "a"}, "NODE_RANK='one'"),
        ("run_multi_node.sh", QWEN, {"NODE_RANK": "0"}, "MASTER_ADDR is missing"),
        ("run_multi_node.sh", QWEN, {"NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        ("run_multi_node.sh", QWEN, {"NODE_RANK": "2", "MASTER_ADDR": "a", "NNODES": "2"}, "from 0 to NNODES - 1"),
        *[(script, [], {}, "MEGATRON_PATH is missing") for script in MODELS],
        (MODELS[0], [], {"MEGATRON_PATH": "/m", "DATA_PATH": "/d", "TOKENIZER": "/t"}, "/d.idx does not exist"),
    ],
)
def test_arguments_are_checked_before_anything_starts(recorder, tmp_path, script, arguments, settings, message):
    done = run(script, *arguments, cwd=tmp_path, PYTHON=recorder(), **settings)
    assert done.returncode == 2 and message in done.stderr
    assert recorder.calls() == []


def test_a_megatron_without_its_training_loop_is_named():
    """Before the script's other imports, of which an older Megatron lacks some, too."""
    hidden = "import sys, runpy; sys.modules['megatron.training'] = None; "
    script = f"runpy.run_path({str(EXAMPLES / 'pretrain_gpt_moe.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", hidden + script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "needs the training loop of megatron-core 0.19 or newer" in done.stderr and "MEGATRON_PATH" in done.stderr


def test_single_node(recorder, tmp_path):
    done = run("run_single_node.sh", *QWEN, "--", "--lr", "1e-4", cwd=tmp_path, PYTHON=recorder())
    assert done.returncode == 0, done.stderr
    (doctor, _), (launch, settings) = recorder.calls()
    assert doctor == ["-m", "megatron_ascend_moe", "doctor"]
    script = str(EXAMPLES / "pretrain_gpt_moe.py")
    own = ["--node-rank", "0", "--master-addr", "localhost"]
    assert launch == ["-m", "megatron_ascend_moe", "launch", *QWEN, *own, script, "--", "--lr", "1e-4"]
    assert settings["HCCL_CONNECT_TIMEOUT"] == "3600" and settings["TRITON_CACHE_DIR"].startswith("/tmp/")
    (log,) = (tmp_path / "logs").iterdir()
    assert log.name.startswith("qwen3-30b-a3b-") and "output of launch" in log.read_text()


def test_what_the_user_set_is_kept(recorder, tmp_path):
    run("run_single_node.sh", *QWEN, cwd=tmp_path, PYTHON=recorder(), HCCL_EXEC_TIMEOUT="7200")
    assert recorder.calls()[0][1]["HCCL_EXEC_TIMEOUT"] == "7200"


def test_a_node_that_the_doctor_finds_unfit_starts_nothing(recorder, tmp_path):
    done = run("run_single_node.sh", *QWEN, cwd=tmp_path, PYTHON=recorder("doctor", 1))
    assert done.returncode == 2 and "the doctor found failures" in done.stderr
    assert len(recorder.calls()) == 1


def test_the_exit_code_of_training_is_the_scripts(recorder, tmp_path):
    assert run("run_single_node.sh", *QWEN, cwd=tmp_path, PYTHON=recorder("launch", 7)).returncode == 7


def test_multi_node_by_hand(recorder, tmp_path):
    settings = {"NODE_RANK": "1", "MASTER_ADDR": "node0", "NNODES": "2"}
    done = run("run_multi_node.sh", *QWEN, cwd=tmp_path, PYTHON=recorder(), **settings)
    assert done.returncode == 0, done.stderr
    launch = recorder.calls()[1][0]
    own = "--node-rank 1 --master-addr node0 --master-port 6000 --nnodes 2".split()
    assert launch[3:-2] == [*QWEN, *own]
    assert next((tmp_path / "logs").iterdir()).name.endswith("-node1.log")


def test_multi_node_by_slurm(recorder, tmp_path):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames rack[3-4]" ] && printf "rack3\\nrack4\\n"\n')
    scontrol.chmod(0o755)
    settings = {"SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "rack[3-4]", "SLURM_JOB_NUM_NODES": "2"}
    path = f"{scontrol.parent}:{os.environ['PATH']}"
    done = run("run_multi_node.sh", *QWEN, cwd=tmp_path, PYTHON=recorder(), PATH=path, **settings)
    assert done.returncode == 0, done.stderr
    assert recorder.calls()[1][0][7:11] == ["--node-rank", "1", "--master-addr", "rack3"]


@pytest.mark.parametrize("script", MODELS)
def test_model_scripts_run_megatrons_own_script_with_data_and_checkpoints(recorder, tmp_path, script):
    for name in ("pretrain_gpt.py", "text.idx", "text.bin", "tokenizer"):
        (tmp_path / name).touch()
    settings = {
        "MEGATRON_PATH": str(tmp_path),
        "DATA_PATH": str(tmp_path / "text"),
        "TOKENIZER": str(tmp_path / "tokenizer"),
        "CHECKPOINTS": "/checkpoints",
        "NODE_RANK": "0",
        "MASTER_ADDR": "node0",
    }
    done = run(script, "--dry-run", "--", "--seed", "1", cwd=tmp_path, PYTHON=recorder(), **settings)
    assert done.returncode == 0, done.stderr
    launch, environ = recorder.calls()[1]
    assert "--dry-run" in launch and launch[launch.index("--") - 1] == str(tmp_path / "pretrain_gpt.py")
    flags = " ".join(launch[launch.index("--") + 1 :])
    assert flags.startswith("--save /checkpoints --load /checkpoints") and flags.endswith("--seed 1")
    assert f"--data-path {tmp_path / 'text'} --tokenizer-type HuggingFaceTokenizer" in flags
    assert str(tmp_path) in environ["PYTHONPATH"].split(":")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def steps(output):
    """Step numbers and losses in Megatron's log."""
    found = re.findall(r"iteration +(\d+)/ +3 .*?lm loss: (\S+)", output)
    return [int(step) for step, _ in found], [float(loss) for _, loss in found]


@pytest.mark.timeout(BUSY + 30)
def test_single_node_smoke(tmp_path):
    megatron_training()
    arguments = ["--model", "deepseek-v2-lite", "--parallel", "a2-1x8", "--smoke"]
    done = run("run_single_node.sh", *arguments, cwd=tmp_path, PYTHON=sys.executable, MASTER_PORT=free_port())
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    numbers, losses = steps(done.stdout)
    assert numbers == [1, 2, 3] and all(4 < loss < 7 for loss in losses)  # ln 256 = 5.5 at the start


@pytest.mark.timeout(BUSY + 30)
@pytest.mark.parametrize("script", MODELS)
def test_model_scripts_smoke_on_two_nodes_played_by_this_machine(tmp_path, script):
    """Two torchrun agents, one process each, expert parallelism between them."""
    megatron_training()
    done = run(script, "--smoke", cwd=tmp_path, PYTHON=sys.executable, MASTER_PORT=free_port())
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert steps(done.stdout)[0] == [1, 2, 3]
    logs = sorted((tmp_path / "logs").iterdir(), key=lambda log: log.stem[-5:])  # names begin with the second of the start
    assert [log.stem[-5:] for log in logs] == ["node0", "node1"]
    assert "--nnodes 2 --nproc-per-node 1 --node-rank 1 --master-addr 127.0.0.1" in logs[1].read_text()


def test_a_node_that_fails_ends_the_smoke_with_its_exit_code(recorder, tmp_path):
    done = run("run_multi_node.sh", *QWEN, "--smoke", cwd=tmp_path, PYTHON=recorder("launch", 3))
    assert done.returncode == 3 and "node 0 ended with exit code 3" in done.stderr


@pytest.mark.timeout(BUSY + 30)
def test_bridge_example_smoke(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "bridge_install.py"), "--smoke"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=BUSY,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(word) for word in done.stdout.splitlines()[-1].removeprefix("losses:").split()]
    assert len(losses) == 3 and losses[2] < losses[0]
    assert "2 MoE layers use the Ascend dispatcher" in done.stderr


BRIDGE = """
import logging
from megatron_ascend_moe.host import cpu
cpu.enable()
logging.basicConfig(level=logging.INFO)
import bridge_install
bridge_install.pretrain_with_bridge()
"""


@pytest.mark.timeout(BUSY + 30)
def test_bridge_example_with_a_stand_in_for_bridge(tmp_path):
    """Bridge's recipe selects another dispatcher, and graphs that capture it; the callback counts ours."""
    path = os.pathsep.join(map(str, [ROOT, EXAMPLES, ROOT / "tests" / "stand_ins" / "bridge"]))
    done = subprocess.run(
        [sys.executable, "-c", BRIDGE],
        cwd=tmp_path,
        env=environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=BUSY,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    settings = ast.literal_eval(done.stdout.partition("model settings: ")[2].splitlines()[0])
    assert settings["moe_token_dispatcher_type"] == "alltoall" and settings["moe_flex_dispatcher_backend"] is None
    assert settings["cuda_graph_impl"] == "none" and not settings["moe_permute_fusion"]
    assert "2 MoE layers of this rank use the Ascend dispatcher" in done.stderr
