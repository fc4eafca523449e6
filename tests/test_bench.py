"""The bench command: its smoke mode runs every case, checks results first, and writes what it prints."""

import dataclasses
import json

import pytest
import torch

from megatron_ascend_moe import bench, kernels
from megatron_ascend_moe.bench import cases
from megatron_ascend_moe.bench.shapes import SMOKE

CASES = [
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
    argv = ["--smoke", "--device", "cpu", "--kernels", "torch", "--json", str(path)]
    assert bench.main(argv) == 0
    report = json.loads(path.read_text())
    assert [line["case"] for line in report["results"]] == CASES
    assert all(line["us"] > 0 and line["bytes"] > 0 and line["of_copy"] > 0 for line in report["results"])
    assert report["command"].endswith("bench " + " ".join(argv))
    assert {"date", "device", "torch", "triton", "kernels"} <= report.keys()
    printed = capsys.readouterr().out
    assert all(case in printed for case in CASES)


def test_a_missing_peer_is_named(tmp_path, capsys, monkeypatch):
    def absent(inputs):
        raise ImportError("No module named 'megablocks'")

    monkeypatch.setitem(bench.PEERS, "megablocks", absent)
    assert bench.main(["--smoke", "--device", "cpu", "--kernels", "torch", "--vs", "megablocks"]) == 0
    assert "sequence by megablocks" in (printed := capsys.readouterr().out)
    assert "not measured: No module named 'megablocks'" in printed


def test_wrong_results_are_not_timed():
    twin = kernels.select("torch", "cpu")
    wrong = dataclasses.replace(twin, combine_rows=lambda *args: tuple(v + 1 for v in twin.combine_rows(*args)))
    inputs = cases.make_inputs(SMOKE, torch.bfloat16, torch.device("cpu"), twin)
    with pytest.raises(RuntimeError, match="combine_rows: the kernel's result differs"):
        cases.check(inputs, wrong)
    cases.check(inputs, twin)


@pytest.mark.parametrize("argv", [["--dtype", "int8"], ["--vs", "stock,other"], ["--model", "unknown"]])
def test_unknown_choices_list_the_known(argv, capsys):
    with pytest.raises(SystemExit):
        bench.main(argv)
    printed = capsys.readouterr().err
    assert any(word in printed for word in ("bf16", "megablocks", "mixtral-8x7b"))


def test_bytes_are_the_floor():
    twin = kernels.select("torch", "cpu")
    inputs = cases.make_inputs(SMOKE, torch.float32, torch.device("cpu"), twin)
    by_name = {case.name: sum(case.parts) for case in cases.make_cases(inputs, twin)}
    T, K, P, row = SMOKE.T, SMOKE.K, inputs.num_rows, SMOKE.H * 4
    assert by_name["permute + pad"] == (T + P) * row
    assert by_name["combine"] == (T * K + T) * row
    assert by_name["combine backward, weighted"] == (T + T * K + P) * row
