"""Every finding about installed software, provoked."""

import importlib.metadata

import pytest

from megatron_ascend_moe.observe.doctor import software


def only(findings):
    assert len(findings) == 1, findings
    return findings[0]


def test_this_python_is_supported():
    assert only(software.check_python()).severity == "ok"


def test_old_python_fails(monkeypatch):
    monkeypatch.setattr(software.platform, "python_version", lambda: "3.9.18")
    finding = only(software.check_python())
    assert finding.severity == "failure" and "3.9.18" in finding.what


@pytest.mark.parametrize(
    ("distribution", "version", "severity", "words"),
    [
        ("torch", None, "failure", "torch is not installed"),
        ("torch", "2.3.1", "failure", "older than 2.4"),
        ("torch", "2.9.0+cpu", "note", "untested"),
        ("torch", "2.13.0+cpu", "ok", "torch 2.13.0+cpu"),
        ("numpy", "2.4.1", "failure", "not older than 2.4"),
        ("megatron-core", None, "warning", "not installed"),
        ("megatron-core", "0.12.1", "failure", "older than 0.15.3"),
        ("megatron-core", "0.17.0", "note", "tested: 0.15.3, 0.16.1, 0.19.2"),
        ("megatron-core", "0.16.1", "ok", "megatron-core 0.16.1"),
        ("PyYAML", None, "failure", "PyYAML is not installed"),
    ],
)
def test_versions_against_the_support_table(monkeypatch, distribution, version, severity, words):
    monkeypatch.setattr(software, "installed", lambda name: version if name == distribution else None)
    finding = next(f for f in software.check_versions() if f.what.startswith(distribution))
    assert finding.severity == severity and words in finding.what


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An installation of our own: `site.install("triton", "3.4.0", "nvidia")`, `site.import_from(folder)`."""

    class Site:
        home = tmp_path / "site-packages"

        def install(self, name, version, *backends):
            record = self.home / f"{name.replace('-', '_')}-{version}.dist-info"
            record.mkdir(parents=True)
            (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            return self.module(self.home, *backends)

        def module(self, parent, *backends):
            for backend in backends:
                folder = parent / "triton" / "backends" / backend
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "driver.py").touch()
            (parent / "triton").mkdir(parents=True, exist_ok=True)
            (parent / "triton" / "__init__.py").touch()
            return parent / "triton"

        def import_from(self, origin):
            monkeypatch.setattr(software, "triton_origin", lambda: origin)

    site = Site()
    site.home.mkdir()
    find = importlib.metadata.Distribution.discover

    def discover(name):
        found = next(iter(find(name=name, path=[str(site.home)])), None)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "distribution", discover)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: discover(name).version)
    site.import_from(None)
    return site


def test_no_triton(site):
    assert only(software.check_triton(ascend_machine=False)).severity == "note"
    assert only(software.check_triton(ascend_machine=True)).severity == "failure"


def test_one_triton_is_named_with_its_backends(site):
    site.import_from(site.install("triton-ascend", "3.2.0", "ascend"))
    finding = only(software.check_triton(ascend_machine=True))
    assert finding.severity == "ok" and "triton-ascend 3.2.0" in finding.what and "backends: ascend" in finding.what


def test_two_distributions_of_triton_fail(site):
    site.install("triton", "3.4.0", "nvidia")
    site.import_from(site.install("triton-ascend", "3.2.0", "ascend"))
    finding = only(software.check_triton(ascend_machine=True))
    assert finding.severity == "failure" and "triton-ascend 3.2.0, triton 3.4.0" in finding.what


def test_community_triton_on_an_npu_machine_fails(site):
    site.import_from(site.install("triton", "3.4.0", "nvidia", "amd"))
    finding = only(software.check_triton(ascend_machine=True))
    assert finding.severity == "failure" and "backends amd, nvidia, not ascend" in finding.what
    assert "shadows triton-ascend" in finding.why


def test_a_folder_named_triton_that_shadows_the_installed_one_fails(site, tmp_path):
    site.install("triton", "3.4.0", "nvidia")
    site.import_from(site.module(tmp_path / "work", "nvidia"))
    finding = only(software.check_triton(ascend_machine=False))
    assert finding.severity == "failure" and "shadows triton 3.4.0" in finding.what


def test_a_folder_named_triton_without_any_installed_fails(site, tmp_path):
    site.import_from(site.module(tmp_path / "work"))
    finding = only(software.check_triton(ascend_machine=False))
    assert finding.severity == "failure" and f"{tmp_path / 'work' / 'triton'}, which no distribution installed" in finding.what
    assert "PYTHONPATH" in finding.mend


def test_installed_but_missing_files_fail(site):
    site.install("triton", "3.4.0")
    finding = only(software.check_triton(ascend_machine=False))
    assert finding.severity == "failure" and "cannot be found" in finding.what


def test_an_editable_install_shadows_nothing(site, tmp_path):
    site.install("triton", "3.4.0")
    record = site.home / "triton-3.4.0.dist-info"
    (record / "direct_url.json").write_text('{"dir_info": {"editable": true}, "url": "file:///src"}')
    site.import_from(site.module(tmp_path / "src", "nvidia"))
    assert only(software.check_triton(ascend_machine=False)).severity == "ok"


def test_the_triton_that_python_would_import_is_found(tmp_path, monkeypatch):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").touch()
    monkeypatch.delitem(software.importlib.util.sys.modules, "triton", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert software.triton_origin() == tmp_path / "triton"
