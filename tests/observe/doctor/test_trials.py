"""The trials: right on this machine, and findings when a kernel is wrong, a process crashes or nothing answers."""

import dataclasses

import pytest

from megatron_ascend_moe import kernels
from megatron_ascend_moe.observe.doctor import golden, trials


def test_golden_of_the_plain_torch_kernels():
    golden.run("torch", "cpu")


@pytest.mark.parametrize(
    ("operation", "spoil", "words"),
    [
        ("route_count", lambda out: (out[0], out[1].flip(1), out[2]), "expert ids"),
        ("permute_rows", lambda out: (out[0] + 1, out[1]), "permuted rows"),
        ("combine_rows", lambda out: (out[0] * 2, out[1]), "combined rows"),
        ("route_count_backward", lambda out: out * 0, "gradient of the probabilities"),
    ],
)
def test_golden_names_what_is_wrong(monkeypatch, operation, spoil, words):
    good = kernels.select("torch", "cpu")
    bad = dataclasses.replace(good, **{operation: lambda *a, **k: spoil(getattr(good, operation)(*a, **k))})
    monkeypatch.setattr(kernels, "select", lambda name, device: bad)
    with pytest.raises(RuntimeError, match=words):
        golden.run("torch", "cpu")


def test_goldens_run_in_processes_and_report_what_they_say():
    good, bad = trials._golden("torch", "cpu"), trials._golden("no-such-kernels", "cpu")
    assert good.severity == "ok"
    assert bad.severity == "failure" and "kernels='no-such-kernels'" in bad.what


@pytest.mark.parametrize(
    ("accelerator", "triton", "wanted"),
    [
        (None, False, [("torch", "cpu")]),
        (None, True, [("torch", "cpu"), ("triton", "cpu")]),
        ("cuda", True, [("torch", "cpu"), ("torch", "cuda"), ("triton", "cuda")]),
    ],
)
def test_every_available_backend_gets_its_golden(monkeypatch, accelerator, triton, wanted):
    asked = []
    monkeypatch.setattr(trials, "_golden", lambda kernels, device, **environ: asked.append((kernels, device)))
    trials.check_goldens(accelerator, triton)
    assert asked == wanted


def test_loopback():
    (finding,) = trials.check_loopback()
    assert finding.severity == "ok", finding


def test_loopback_that_fails(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    (finding,) = trials.check_loopback()
    assert finding.severity == "failure" and "GLOO_SOCKET_IFNAME" in finding.mend


def test_a_trial_that_hangs_is_ended_and_told_apart_from_a_wrong_result(monkeypatch):
    fault = trials._run([["http.server", "0"]], {}, time_limit=1)
    assert fault == "no answer within 1 s"
    monkeypatch.setattr(trials, "_run", lambda modules, environ: fault)
    finding = trials._golden("triton", "npu")
    assert finding.severity == "failure" and "hangs" in finding.why
