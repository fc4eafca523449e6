"""The CPU host: when it refuses, and that its stand-ins do what Megatron relies on."""

import subprocess
import sys

import pytest
import torch

from megatron_ascend_moe.host import cpu


def _run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("kind", ["a GPU", "an NPU"])
def test_refuses_where_an_accelerator_is_present(monkeypatch, kind):
    if kind == "a GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    else:
        monkeypatch.setattr(cpu.glob, "glob", lambda pattern: ["/dev/davinci0"])
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    before = torch.cuda.current_stream
    with pytest.raises(RuntimeError, match=f"{kind}.*is present.*--device npu or --device cuda"):
        cpu.enable()
    assert torch.cuda.current_stream is before


def test_an_npu_may_be_hidden(monkeypatch):
    monkeypatch.setattr(cpu.glob, "glob", lambda pattern: ["/dev/davinci0"])
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    with pytest.raises(RuntimeError, match="ASCEND_RT_VISIBLE_DEVICES=''"):
        cpu.refuse_accelerator()
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    cpu.refuse_accelerator()


def test_refuses_after_megatron_was_imported():
    done = _run("import megatron.core; from megatron_ascend_moe.host import cpu; cpu.enable()")
    assert done.returncode == 1
    assert "RuntimeError: the CPU host was enabled after megatron.core" in done.stderr


def test_importing_the_module_changes_nothing():
    done = _run(
        "import torch; before = vars(torch.cuda).copy(), torch.zeros, torch.Tensor.to\n"
        "import megatron_ascend_moe.host.cpu\n"
        "print(before == (vars(torch.cuda), torch.zeros, torch.Tensor.to))"
    )
    assert done.stdout.strip() == "True", done.stderr


def test_uneven_all_gather(distributed_pool):
    expected = [[0.0], [1.0, 1.0]]
    assert distributed_pool(2).submit("tests.host.cpu_jobs:uneven_all_gather") == [expected, expected]


def test_split_sizes_may_be_tensors(distributed_pool):
    received = distributed_pool(2).submit("tests.host.cpu_jobs:all_to_all_with_tensor_splits")
    assert received == [[0.0, 10.0], [1.0, 11.0]]


def test_random_state_tracker_keeps_its_own_stream(distributed_pool):
    assert distributed_pool(1).submit("tests.host.cpu_jobs:tracked_dropout_masks") == [[False, True, True]]


def test_only_megatron_is_told_that_cuda_is_available():
    done = _run(
        "from megatron_ascend_moe.host.cpu_training import enable_training_loop; enable_training_loop()\n"
        "import torch; ask = 'torch.cuda.is_available()'\n"
        "for name in ('megatron.training.initialize', 'torch.optim', 'megatron_ascend_moe.backend', '__main__'):\n"
        "    print(eval(ask, {'torch': torch, '__name__': name}))"
    )
    assert done.stdout.split() == ["True", "False", "False", "False"], done.stderr
