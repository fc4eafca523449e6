"""Every finding about the environment, provoked."""

import os
from pathlib import Path

import pytest

from megatron_ascend_moe.observe.doctor import environment


def only(findings):
    assert len(findings) == 1, findings
    return findings[0]


@pytest.fixture
def network(monkeypatch):
    """A machine with lo, eth0 and bond0 whose name leads to 10.0.0.7; `network(address)` changes the latter."""

    def address(value):
        def resolve(name):
            if value is None:
                raise OSError("no address")
            return value

        monkeypatch.setattr(environment.socket, "gethostbyname", resolve)

    names = [(1, "lo"), (2, "eth0"), (3, "bond0")]
    monkeypatch.setattr(environment.socket, "if_nameindex", lambda: names)
    address("10.0.0.7")
    return address


@pytest.mark.parametrize(
    ("variable", "value", "severity"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth0,bond0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "failure"),
        ("GLOO_SOCKET_IFNAME", "enp4s0", "failure"),
        ("HCCL_SOCKET_IFNAME", "eth", "ok"),
        ("HCCL_SOCKET_IFNAME", "=bond0", "ok"),
        ("HCCL_SOCKET_IFNAME", "^docker", "ok"),
        ("HCCL_SOCKET_IFNAME", "enp4s0", "failure"),
    ],
)
def test_named_interfaces_must_exist(network, variable, value, severity):
    finding = next(f for f in environment.check_interfaces({variable: value}) if variable in f.what)
    assert finding.severity == severity


@pytest.mark.parametrize(("address", "severity"), [("10.0.0.7", "ok"), ("127.0.1.1", "warning"), (None, "warning")])
def test_the_address_of_the_hosts_own_name(network, address, severity):
    network(address)
    finding = only(environment.check_interfaces({}))
    assert finding.severity == severity
    if severity == "warning":
        assert "GLOO_SOCKET_IFNAME" in finding.mend


def test_a_machine_with_nothing_but_loopback(network, monkeypatch):
    network("127.0.1.1")
    monkeypatch.setattr(environment.socket, "if_nameindex", lambda: [(1, "lo")])
    finding = only(environment.check_interfaces({}))
    assert finding.severity == "note" and "only loopback" in finding.what


@pytest.mark.parametrize(
    ("value", "npu", "severity"),
    [
        ("3600", True, "ok"),
        ("60", True, "warning"),
        (None, True, "warning"),
        (None, False, "ok"),
        ("1h", True, "failure"),
        ("1h", False, "failure"),
    ],
)
def test_timeouts(value, npu, severity):
    environ = {} if value is None else {"HCCL_EXEC_TIMEOUT": value}
    finding = next(f for f in environment.check_timeouts(npu, environ) if "HCCL_EXEC_TIMEOUT" in f.what)
    assert finding.severity == severity


@pytest.mark.parametrize(
    ("value", "npu", "severity"),
    [("expandable_segments:True", True, "ok"), ("max_split_size_mb:512", True, "warning"), (None, False, "ok")],
)
def test_allocator(value, npu, severity):
    environ = {} if value is None else {"PYTORCH_NPU_ALLOC_CONF": value}
    assert only(environment.check_allocator(npu, environ)).severity == severity


@pytest.mark.parametrize("variable", [row[0] for row in environment.DEBUGGING])
def test_debugging_switches_that_were_left_on(variable):
    for on in ("1", "true", "ON"):
        finding = only(environment.check_debugging({variable: on}))
        assert finding.severity == "warning" and f"{variable}={on}" in finding.what
    for off in ("0", "", "False"):
        assert only(environment.check_debugging({variable: off})).severity == "ok"


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
mds@tcp:/fs /scratch lustre rw 0 0
sshfs /home/remote fuse.sshfs rw 0 0
tmpfs /home/local\\040disk tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/x", "ext4"),
        ("/home/me/.triton", "nfs4"),
        ("/homework", "ext4"),
        ("/scratch/a", "lustre"),
        ("/home/remote/a", "fuse.sshfs"),
        ("/home/local disk/a", "tmpfs"),
    ],
)
def test_file_system_is_that_of_the_longest_mount_point(path, kind):
    assert environment.file_system(Path(path), MOUNTS) == kind


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs"])
def test_cache_on_a_shared_file_system(tmp_path, kind):
    mounts = f"/dev/sda1 / ext4 rw 0 0\nserver:/x {tmp_path.resolve()} {kind} rw 0 0\n"
    finding = only(environment.check_cache({"TRITON_CACHE_DIR": str(tmp_path / "new" / "cache")}, mounts))
    assert finding.severity == "warning" and kind in finding.what and "TRITON_CACHE_DIR" in finding.mend


def test_cache_on_a_disk_of_this_node(tmp_path):
    finding = only(environment.check_cache({"HOME": str(tmp_path)}, "/dev/sda1 / ext4 rw 0 0\n"))
    assert finding.severity == "ok" and ".triton" in finding.what


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert only(environment.check_cache({"TRITON_CACHE_DIR": str(tmp_path)})).severity == "failure"


def test_cache_that_is_a_file(tmp_path):
    (tmp_path / "cache").touch()
    assert only(environment.check_cache({"TRITON_CACHE_DIR": str(tmp_path / "cache")})).severity == "failure"


def test_cache_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**20})())
    finding = only(environment.check_cache({"TRITON_CACHE_DIR": str(tmp_path)}, "/dev/sda1 / ext4 rw 0 0\n"))
    assert finding.severity == "warning" and "1 MiB left" in finding.what
