"""Every finding about torch_npu, CANN and the SoC, provoked with stand-ins: nothing here has run on an NPU."""

import sys
import types

import pytest

from megatron_ascend_moe.observe.doctor import ascend


def only(findings):
    assert len(findings) == 1, findings
    return findings[0]


@pytest.fixture
def torch_npu(tmp_path, monkeypatch):
    """`torch_npu("source text")` makes a module of that name importable."""

    def provide(source):
        (tmp_path / "torch_npu.py").write_text(source)
        monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))

    yield provide
    sys.modules.pop("torch_npu", None)


def test_neither_npu_nor_torch_npu():
    assert only(ascend.check_torch_npu(ascend_machine=False)).severity == "ok"


def test_npu_without_torch_npu_fails():
    finding = only(ascend.check_torch_npu(ascend_machine=True))
    assert finding.severity == "failure" and "not installed" in finding.what


def test_torch_npu_without_libhccl_is_a_finding_not_a_crash(torch_npu):
    torch_npu("raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')")
    finding = only(ascend.check_torch_npu(ascend_machine=True))
    assert finding.severity == "failure" and "libhccl.so" in finding.what and "set_env.sh" in finding.mend


def test_torch_npu_that_imports(torch_npu):
    torch_npu("")
    assert only(ascend.check_torch_npu(ascend_machine=True)).severity == "ok"


@pytest.mark.parametrize(("autoload", "severity"), [(None, "warning"), ("0", "note")])
def test_torch_npu_without_an_npu_is_not_imported(torch_npu, monkeypatch, autoload, severity):
    torch_npu("raise SystemExit('imported')")
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    if autoload is not None:
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    assert only(ascend.check_torch_npu(ascend_machine=False)).severity == severity
    assert "torch_npu" not in sys.modules


def cann(tmp_path, version):
    record = tmp_path / "x86_64-linux" / "ascend_toolkit_install.info"
    record.parent.mkdir()
    record.write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\ninnerversion=V1\n")
    return {"ASCEND_HOME_PATH": str(tmp_path)}


def test_no_cann(tmp_path):
    nowhere = {"ASCEND_HOME_PATH": str(tmp_path)}
    assert only(ascend.check_cann(False, nowhere)).severity == "ok"
    finding = only(ascend.check_cann(True, nowhere))
    assert finding.severity == "failure" and "set_env.sh" in finding.mend


@pytest.mark.parametrize(
    ("version", "triton", "severity"),
    [
        ("8.5.0", "3.2.0", "ok"),
        ("8.5.RC1", "3.2.0", "ok"),
        ("9.0.0", "3.2.1", "ok"),
        ("9.0.0", "3.2.0", "warning"),
        ("8.1.0", "3.2.0", "warning"),
        ("8.5.0", None, "warning"),
    ],
)
def test_cann_and_triton_ascend_are_released_in_pairs(tmp_path, monkeypatch, version, triton, severity):
    monkeypatch.setattr(ascend, "installed", lambda name: triton if name == "triton-ascend" else "2.7.1")
    finding = only(ascend.check_cann(True, cann(tmp_path, version)))
    assert finding.severity == severity and version in finding.what


def npu_named(monkeypatch, get_device_name):
    torch = types.SimpleNamespace(npu=types.SimpleNamespace(get_device_name=get_device_name))
    monkeypatch.setattr(ascend.importlib, "import_module", lambda name: torch)


def test_soc(monkeypatch):
    assert only(ascend.check_soc(ascend_machine=False)).severity == "ok"
    npu_named(monkeypatch, lambda index: "Ascend910B3")
    finding = only(ascend.check_soc(ascend_machine=True))
    assert finding.severity == "ok" and "40 vector cores, UB 196608 bytes" in finding.what


def test_unknown_soc_fails(monkeypatch):
    npu_named(monkeypatch, lambda index: "Ascend999")
    finding = only(ascend.check_soc(ascend_machine=True))
    assert finding.severity == "failure" and "Ascend999" in finding.what


def test_npu_that_does_not_answer_fails(monkeypatch):
    def busy(index):
        raise RuntimeError("device is busy")

    npu_named(monkeypatch, busy)
    finding = only(ascend.check_soc(ascend_machine=True))
    assert finding.severity == "failure" and "device is busy" in finding.what
