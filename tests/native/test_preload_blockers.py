"""Memory with which the driver would lose the process, on the software driver: named for as long as any of it is there.

Host memory made by cuMemCreate, as NCCL makes it for its own communication, and the same imported by another process; memory
given away beside the table of objects. libvgpu.so in staged mode and an agent double. No GPU.
"""

from __future__ import annotations

import pytest

from tests.native.agent_double import FAILED, RELEASE
from tests.native.test_preload_staged import (  # noqa: F401 - the fixtures are used by name
    SMALL_TABLES,
    bring_back,
    close_all,
    compiled,
    libraries,
    make_stage,
    preload,
    run_folder,
    stage,
    take_away,
)
from tests.native.test_software_driver import EXPORTED, HOST_KIND, HOST_MEMORY, IMPORTED, MIB

WHAT = "memory on the host, made with cuMemCreate or imported"
HANDLE_GOES, MAPPING_GOES = "ok(d.cuMemRelease({}))", "ok(d.cuMemUnmap({}, 4 << 20))"


def named(peer):
    return [(blocker["kind"], blocker["bytes"], blocker["what"]) for blocker in peer.inventory()["blockers"]]


def test_the_application_sees_what_it_sees_with_the_plain_driver(stage):  # noqa: F811
    steps = (
        *(HOST_MEMORY, HOST_KIND.format("h"), "result = read(m, 4).decode()", EXPORTED + "; result = result > 2"),
        "again = ok(d.cuMemRetainAllocationHandle(int(m))); n = map_host_memory(again, 4 << 20); result = read(n, 4).decode()",
        "result = [code(d.cuMemRelease(x)) for x in (again, h)]",
        "result = [code(d.cuMemUnmap(x, 4 << 20)) for x in (m, n, n)]",
        "w = host_properties(); w.location.id = 7; result = [code(d.cuMemCreate(4 << 20, w, 0)), code(d.cuMemCreate(5, w, 0))]",
    )
    plain, _ = stage.child("start()", mode="plain")
    staged, _ = stage.child()
    assert [staged.run(step) for step in steps] == [plain.run(step) for step in steps]


@pytest.mark.parametrize("is_handle_first", [True, False])
def test_host_memory_is_named_until_its_handle_and_its_last_mapping_are_gone(is_handle_first, stage):  # noqa: F811
    child, peer = stage.child(HOST_MEMORY)
    assert named(peer) == [("host-vmm", 4 * MIB, WHAT)]
    inventory = peer.inventory()
    assert (inventory["objects"], inventory["imports"], inventory["driver_held"]) == ([], [], [])
    assert peer.shares() == ({"shares": []}, {})
    order = [HANDLE_GOES.format("h"), MAPPING_GOES.format("m")]
    for step in order if is_handle_first else reversed(order):
        assert named(peer) == [("host-vmm", 4 * MIB, WHAT)]
        child.run(step)
    assert named(peer) == []


def test_imported_host_memory_is_named_in_the_importer(stage):  # noqa: F811
    owner, owner_peer = stage.child(HOST_MEMORY)
    other, peer = stage.child(IMPORTED.format(owner.pid, owner.run(EXPORTED)))
    assert [kind for kind, _, _ in named(owner_peer)] == [kind for kind, _, _ in named(peer)] == ["host-vmm"]
    assert peer.inventory()["imports"] == []
    assert peer.shares() == ({"shares": []}, {})
    assert other.run("result = ctypes.string_at(int(m), 4).decode()") == "host"
    other.run("ok(d.cuMemRelease(i)); " + MAPPING_GOES.format("m"))
    assert named(peer) == []


def test_what_is_followed_in_no_table_is_named_all_the_same(make_stage, run_folder):  # noqa: F811
    small = make_stage(compiled(run_folder, "libvgpu-small.so", *SMALL_TABLES))
    child, peer = small.child(f"ps = [ok(d.cuMemAlloc({2 * MIB})) for _ in range(4)]; " + HOST_MEMORY)
    assert named(peer) == [("host-vmm", 4 * MIB, WHAT)]
    child.run(HANDLE_GOES.format("h") + "; " + MAPPING_GOES.format("m"))
    assert named(peer) == []
    child.run("h = ok(d.cuMemCreate(2 << 20, properties(), 0)); " + EXPORTED)
    assert [kind for kind, _, _ in named(peer)] == ["export"]
    child.run("ok(d.cuMemRelease(h))")
    assert named(peer) == []


def test_memory_on_the_host_is_never_taken_away(stage):  # noqa: F811
    child, peer = stage.child(f"p = ok(d.cuMemAlloc({4 * MIB})); write(p, b'device'); " + HOST_MEMORY)
    fds = peer.export()
    assert len(fds) == 1
    close_all(fds)
    peer.rest()
    for asked in ({}, {"imports": True}):
        kind, answer = peer.ask(RELEASE, asked)
        assert (kind, answer["what"]) == (FAILED, WHAT)
    peer.open_gate()
    child.run(HANDLE_GOES.format("h") + "; " + MAPPING_GOES.format("m"))
    bring_back(peer, take_away(peer))
    assert child.run("result = read(p, 6).decode()") == "device"
