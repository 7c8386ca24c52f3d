"""A namespace that is joined by a path to the host's own is told, and refused where it was not signed."""

import pytest

from runtime_shim import host_namespaces
from runtime_shim.host_namespaces import host_namespaces_added, joined_host_namespaces


@pytest.fixture
def host_folder(tmp_path, monkeypatch):
    folder = tmp_path / "ns"
    folder.mkdir()
    for name in ("net", "pid", "mnt"):
        (folder / name).touch()
    monkeypatch.setattr(joined_host_namespaces, "__kwdefaults__", {"host_folder": str(folder)})
    return folder


def config(*namespaces):
    return {"linux": {"namespaces": list(namespaces), "resources": {}}, "process": {}}


def test_paths_to_the_hosts_own_are_found(host_folder, tmp_path):
    (tmp_path / "alias").symlink_to(host_folder / "net")
    given = config({"type": "network", "path": str(tmp_path / "alias")}, {"type": "pid"}, {"type": "mount"})
    assert joined_host_namespaces(given) == ["network"]


@pytest.mark.parametrize("path", ["other", "missing", "bad\0name"])
def test_other_paths_are_not(path, host_folder, tmp_path):
    (tmp_path / "other").touch()
    assert joined_host_namespaces(config({"type": "network", "path": str(tmp_path / path)})) == []


@pytest.mark.parametrize(
    "given", [{}, {"linux": None}, {"linux": {"namespaces": "x"}}, config(7, {"type": 7, "path": []})]
)
def test_what_is_no_list_of_namespaces_has_none(given):
    assert joined_host_namespaces(given) == []


@pytest.mark.parametrize(
    ("security", "is_refused"),
    [
        ({}, True),
        ({"hostNamespaces": ["pid"]}, True),
        ({"hostNamespaces": ["network", "pid"]}, False),
        ({"hostNamespaces": 7}, True),
    ],
)
def test_the_hosts_network_is_refused_where_it_was_not_signed(security, is_refused, host_folder):
    joined = config({"type": "network", "path": str(host_folder / "net")})
    assert host_namespaces_added(security, joined) == (
        ["namespaces: network joins the host's own"] if is_refused else []
    )


def test_leaving_the_hosts_network_is_no_fault(host_folder):
    assert host_namespaces_added({"hostNamespaces": ["network"]}, config({"type": "network"})) == []


def test_the_folder_is_the_hosts():
    assert host_namespaces.HOST_FOLDER == "/proc/1/ns"
