"""The bench command: its smoke mode runs every case, checks results first, and writes what it prints."""

import dataclasses
import json
import subprocess
import sys
import types

import pytest
import torch

from megatron_ascend_moe import bench, kernels
from megatron_ascend_moe.bench import cases
from megatron_ascend_moe.bench.shapes import SMOKE

CASES = [
    "rows to random places",
    "rows from random places",
    "adapter + plan",
    "permute + pad",
    "combine",
    "combine, weighted",
    "combine backward, weighted",
    "adapter backward",
    "dispatcher sequence",
]


def test_smoke_writes_a_line_a_case(tmp_path, capsys):
    path = tmp_path / "bench.json"
    argv = ["--smoke", "--device", "cpu", "--kernels", "torch", "--parts", "kernels", "--json", str(path)]
    assert bench.main(argv) == 0
    report = json.loads(path.read_text())
    assert [line["case"] for line in report["results"]] == CASES
    assert all(line["us"] > 0 and line["bytes"] > 0 and line["of_copy"] > 0 for line in report["results"])
    assert report["command"].endswith("bench " + " ".join(argv))
    assert {"date", "device", "torch", "triton", "kernels"} <= report.keys()
    printed = capsys.readouterr().out
    assert all(case in printed for case in CASES)


def test_a_layer_is_timed_beside_stock(tmp_path):
    """In a process of its own, since Megatron on a CPU needs names of torch.cuda replaced before it is imported."""
    path = tmp_path / "bench.json"
    argv = ["--smoke", "--device", "cpu", "--kernels", "torch", "--parts", "layer", "--json", str(path)]
    subprocess.run([sys.executable, "-m", "megatron_ascend_moe", "bench", *argv], check=True, timeout=200)
    dispatcher, layer = json.loads(path.read_text())["results"]
    assert [dispatcher["case"], layer["case"]] == [f"{n}, forward + backward" for n in ("dispatcher", "MoE layer")]
    for line in (dispatcher, layer):
        assert line["us"] > 0 and line["speedup"] == pytest.approx(line["stock_us"] / line["us"])
    plan = 4 * (5 * SMOKE.E + 1)
    assert dispatcher["kept_bytes"] <= 8 * SMOKE.T * SMOKE.K + plan


def test_a_missing_peer_is_named(tmp_path, capsys, monkeypatch):
    def absent(inputs):
        raise ImportError("No module named 'megablocks'")

    monkeypatch.setitem(bench.PEERS, "megablocks", absent)
    assert bench.main(["--smoke", "--device", "cpu", "--parts", "kernels", "--kernels", "torch", "--vs", "megablocks"]) == 0
    assert "sequence by megablocks" in (printed := capsys.readouterr().out)
    assert "not measured: No module named 'megablocks'" in printed


def test_megablocks_is_not_run_beyond_its_index_width(monkeypatch):
    """It crashes there, which ends the process for everybody."""
    monkeypatch.setitem(sys.modules, "megablocks.backend.kernels", types.ModuleType("kernels"))
    inputs = cases.make_inputs(SMOKE, torch.float32, torch.device("cpu"), kernels.select("torch", "cpu"))
    bench.PEERS["megablocks"](inputs)
    with pytest.raises(ValueError, match="beyond 2.31 elements"):
        bench.PEERS["megablocks"](dataclasses.replace(inputs, y_PH=[torch.empty(1).expand(2**31)]))


def test_a_shape_that_does_not_fit_is_named(tmp_path, capsys, monkeypatch):
    def too_large(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 38 GiB.\nMore of it.")

    monkeypatch.setattr(bench, "make_inputs", too_large)
    path = tmp_path / "bench.json"
    assert bench.main(["--smoke", "--device", "cpu", "--parts", "kernels", "--kernels", "torch", "--json", str(path)]) == 0
    (line,) = json.loads(path.read_text())["results"]
    assert line["case"] == "kernels" and line["not_measured"] == "CUDA out of memory. Tried to allocate 38 GiB."
    assert "not measured: CUDA out of memory" in capsys.readouterr().out


def test_wrong_results_are_not_timed():
    twin = kernels.select("torch", "cpu")
    wrong = dataclasses.replace(twin, combine_rows=lambda *args: tuple(v + 1 for v in twin.combine_rows(*args)))
    inputs = cases.make_inputs(SMOKE, torch.bfloat16, torch.device("cpu"), twin)
    with pytest.raises(RuntimeError, match="combine_rows: the kernel's result differs"):
        cases.check(inputs, wrong)
    cases.check(inputs, twin)


@pytest.mark.parametrize("argv", [["--dtype", "int8"], ["--vs", "stock,other"], ["--parts", "nothing"], ["--model", "x"]])
def test_unknown_choices_list_the_known(argv, capsys):
    with pytest.raises(SystemExit):
        bench.main(argv)
    printed = capsys.readouterr().err
    assert any(word in printed for word in ("bf16", "megablocks", "mixtral-8x7b", "kernels,layer"))


def test_bytes_are_the_floor():
    twin = kernels.select("torch", "cpu")
    inputs = cases.make_inputs(SMOKE, torch.float32, torch.device("cpu"), twin)
    by_name = {case.name: sum(case.parts) for case in cases.make_cases(inputs, twin)}
    T, K, P, row = SMOKE.T, SMOKE.K, inputs.num_rows, SMOKE.H * 4
    assert by_name["permute + pad"] == (T + P) * row
    assert by_name["combine"] == (T * K + T) * row
    assert by_name["combine backward, weighted"] == (T + T * K + P) * row
    assert by_name["rows to random places"] == by_name["rows from random places"] == 2 * P * row
