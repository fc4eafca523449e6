"""The run command's own part: choosing the device, and handing over to the script as Python would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ascend_moe.host import run

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, sys
import beside
import megatron.core.transformer.moe.moe_layer as moe_layer
dispatcher = moe_layer.MoEAlltoAllTokenDispatcher
print(json.dumps([__name__, sys.argv, beside.HERE, type(dispatcher).__name__, dispatcher.__module__]))
"""


def _run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(str(p) for p in (path, ROOT) if p)
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    command = [sys.executable, "-m", "megatron_ascend_moe", "run", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


def test_script_runs_as_main_with_its_arguments_and_the_plugin_installed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("HERE = 'imported from beside the script'")
    script = str(tmp_path / "script.py")
    done = _run("--device", "cpu", script, "--lr", "1", "--device", "its own")
    assert done.returncode == 0, done.stderr
    name, argv, beside, kind, module = json.loads(done.stdout.splitlines()[-1])
    assert (name, argv) == ("__main__", [script, "--lr", "1", "--device", "its own"])
    assert beside == "imported from beside the script"
    assert (kind, module) == ("function", "megatron_ascend_moe.plugin")


def test_exit_code_of_the_script_is_kept(tmp_path):
    (tmp_path / "script.py").write_text("import sys; sys.exit(5)")
    assert _run("--device", "cpu", str(tmp_path / "script.py")).returncode == 5


def test_npu_is_prepared_before_megatron(tmp_path):
    """With a stand-in for torch_npu: nothing here has run on an NPU."""
    package = tmp_path / "torch_npu"
    (package / "contrib").mkdir(parents=True)
    report = "import sys; print(__name__, 'megatron.core' in sys.modules)\n"
    for file in (package / "__init__.py", package / "contrib" / "transfer_to_npu.py"):
        file.write_text(report)
    (package / "contrib" / "__init__.py").write_text("")
    (tmp_path / "script.py").write_text("import megatron.core; print('script')")
    done = _run("--device", "auto", str(tmp_path / "script.py"), path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["torch_npu False", "torch_npu.contrib.transfer_to_npu False", "script"]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("npu", "--device npu needs torch_npu.*No module named 'torch_npu'.*set_env.sh"),
        ("cuda", r"--device cuda: torch.cuda.is_available\(\) is False.*--device cpu"),
        ("auto", "--device auto found neither torch_npu nor a GPU.*--device cpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device, message, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "script.py").write_text("raise SystemExit('the script must not start')")
    with pytest.raises(RuntimeError, match=message):
        run.main(["--device", device, str(tmp_path / "script.py")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_script.py"], "'no_such_script.py' is not a file"),
        (["--device", "tpu", __file__], "invalid choice: 'tpu'"),
        ([], "the following arguments are required: SCRIPT"),
    ],
)
def test_bad_arguments_are_usage_errors(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
