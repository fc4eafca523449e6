"""The `doctor` command: report, JSON, exit codes, masked secrets."""

import json

import pytest

from megatron_ascend_moe.observe.doctor import command, environment, software
from megatron_ascend_moe.observe.doctor.finding import Finding, without_secrets

BAD = Finding("trial", "failure", "it breaks", "because", "mend it so")


def test_report_for_a_person(monkeypatch, capsys):
    monkeypatch.setattr(command, "examine", lambda trials_too: [Finding("python", "ok", "Python 3"), BAD])
    assert command.main([]) == 1
    out = capsys.readouterr().out
    assert "[     ok] python: Python 3" in out
    assert "[failure] trial: it breaks\n            why:  because\n            mend: mend it so" in out
    assert out.endswith("1 ok, 0 note, 0 warning, 1 failure\n")


def test_warnings_do_not_fail(monkeypatch, capsys):
    monkeypatch.setattr(command, "examine", lambda trials_too: [Finding("x", "warning", "w", "why", "mend")])
    assert command.main([]) == 0


def test_json(monkeypatch, capsys):
    monkeypatch.setattr(command, "examine", lambda trials_too: [BAD])
    assert command.main(["--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failures"] == 1
    assert report["findings"] == [
        {"check": "trial", "severity": "failure", "what": "it breaks", "why": "because", "mend": "mend it so"}
    ]


def test_every_check_runs_on_this_machine_without_breaking(capsys):
    command.main(["--json", "--no-trials"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    checks = "python versions triton torch_npu cann soc interfaces timeouts allocator debugging cache"
    assert {finding["check"] for finding in findings} == set(checks.split())


def test_a_check_that_breaks_is_a_failure(monkeypatch):
    def broken():
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(software, "check_python", broken)
    findings = list(command.examine(trials_too=False))
    assert findings[0].severity == "failure" and "ZeroDivisionError: oops" in findings[0].what
    assert len(findings) > 5


def test_without_torch_nothing_is_tried_and_the_report_is_complete(monkeypatch):
    monkeypatch.setattr(software, "installed", lambda name: None)
    findings = list(command.examine())
    assert {finding.check for finding in findings}.isdisjoint({"golden", "loopback", "doctor"})
    assert "torch is not installed" in [finding.what for finding in findings if finding.severity == "failure"]


def test_secrets_of_the_environment_are_never_printed(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef123456")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/tmp/hf_abcdef123456/0123456789abcdef")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "0123456789abcdef")
    for argv in (["--no-trials"], ["--no-trials", "--json"]):
        command.main(argv)
        out = capsys.readouterr().out
        assert "***" in out and "hf_abcdef" not in out and "0123456789" not in out


def test_passwords_in_urls_are_masked():
    finding = Finding("x", "note", "proxy http://user:hunter2@proxy:80/ is set")
    assert without_secrets([finding], {})[0].what == "proxy http://user:***@proxy:80/ is set"


def test_a_finding_must_say_why_and_how():
    with pytest.raises(ValueError, match="why it matters"):
        Finding("x", "failure", "it breaks")
    with pytest.raises(ValueError, match="severity 'bad'"):
        Finding("x", "bad", "it breaks")


def test_only_the_named_variables_are_read(monkeypatch):
    """An environment that records who is read."""

    class Recorder(dict):
        read = set()

        def get(self, key, default=None):
            self.read.add(key)
            return super().get(key, default)

    environ = Recorder()
    environment.check_interfaces(environ)
    environment.check_timeouts(True, environ)
    environment.check_allocator(True, environ)
    environment.check_debugging(environ)
    environment.check_cache(environ)
    named = {*environment.INTERFACE_VARIABLES, *environment.TIMEOUTS, *(row[0] for row in environment.DEBUGGING)}
    assert environ.read == named | {"PYTORCH_NPU_ALLOC_CONF", "TRITON_CACHE_DIR", "TRITON_HOME", "HOME"}
