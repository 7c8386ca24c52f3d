"""A namespace that is joined by a path to the host's own counts as none."""

import os

import pytest

from image_format import security_config
from runtime_shim.host_namespaces import without_host_namespaces


@pytest.fixture
def host_folder(tmp_path):
    folder = tmp_path / "ns"
    folder.mkdir()
    for name in ("net", "pid", "mnt"):
        (folder / name).touch()
    return folder


def config(*namespaces):
    return {"linux": {"namespaces": list(namespaces), "resources": {}}, "process": {}}


def types(found):
    return [item["type"] for item in found["linux"]["namespaces"]]


def test_paths_to_the_hosts_own_are_left_out(host_folder, tmp_path):
    (tmp_path / "alias").symlink_to(host_folder / "net")
    given = config({"type": "network", "path": str(tmp_path / "alias")}, {"type": "pid"}, {"type": "mount"})
    assert types(without_host_namespaces(given, host_folder=str(host_folder))) == ["pid", "mount"]
    assert types(given) == ["network", "pid", "mount"]


@pytest.mark.parametrize("path", ["other", "missing", "bad\0name"])
def test_other_paths_stay(path, host_folder, tmp_path):
    (tmp_path / "other").touch()
    given = config({"type": "network", "path": str(tmp_path / path)})
    assert without_host_namespaces(given, host_folder=str(host_folder)) == given


@pytest.mark.parametrize(
    "given", [{}, {"linux": None}, {"linux": {"namespaces": "x"}}, config(7, {"type": 7, "path": []})]
)
def test_what_is_no_list_of_namespaces_is_left_as_it_is(given):
    assert without_host_namespaces(given) == given


def test_joining_the_hosts_network_differs_from_a_network_of_its_own():
    made = {"linux": {"namespaces": [{"type": "network", "path": "/run/netns/none-such"}, {"type": "pid"}]}}
    joined = {"linux": {"namespaces": [{"type": "network", "path": f"/proc/{os.getpid()}/ns/net"}, {"type": "pid"}]}}
    before, after = (
        security_config.project(
            without_host_namespaces(doc, host_folder="/proc/self/ns"), bundle="/b", container_id="c"
        )
        for doc in (made, joined)
    )
    assert any("network" in line for line in security_config.differences(before, after))
