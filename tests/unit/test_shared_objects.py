"""Which memory is one and the same: resolution by open file, whatever processes claim of themselves; and kcmp itself."""

import os
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_state.kcmp import same_files
from gpu_state.preload_objects import Blocker, DeviceObject, Holdings, Import, Mapping, Share, Sharing
from gpu_state.shared_objects import ImportedObject, Party, Surroundings, resolve

MIB = 1 << 20
UUIDS = ("GPU-aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa", "GPU-bbbbbbbb-bbbb-bbbb-bbbb-bbbbbbbbbbbb")
BOTH_WAYS = Sharing(("descriptor", "handle"), (), 0)


def made(number, *, size=4 * MIB, device=0, shared=BOTH_WAYS):
    place = Mapping(0x7F0000000000 + number * size, size, 0, ((device, 3),))
    return DeviceObject(number, size, device, UUIDS[device], "alloc", size, (place,), shared)


def imported(number, *, size=4 * MIB, device=0, kind="import", **more):
    place = Mapping(0x7E0000000000 + number * size, size, 0, ((device or 0, 3),))
    uuid = "" if device is None else UUIDS[device]
    return Import(number, size, device, uuid, kind, size if kind == "opened" else 0, (place,) if size else (), **more)


def party(ns_pid, *held, files=(), devices=UUIDS[:1]):
    """`files` are the open files of what is shared, in the order of `held`; the rest of `held` is not shared."""
    shares = [Share("exporter" if isinstance(one, DeviceObject) else "importer", one) for one in held[: len(files)]]
    kinds = {"alloc": "export", "import": "import", "opened": "ipc-opened"}
    blockers = tuple(Blocker(kinds[share.of.kind], 0x1000, 5, "", share.id) for share in shares)
    objects = tuple(one for one in held if isinstance(one, DeviceObject))
    imports = tuple(one for one in held if isinstance(one, Import))
    holdings = Holdings(objects, (), blockers, imports)
    numbers = {share.id: file for share, file in zip(shares, files, strict=True) if file is not None}
    return Party(100 + ns_pid, ns_pid, "x", tuple(devices), holdings, tuple(shares), numbers)


def refused(held, ns_pid):
    return "; ".join(blocker.what for blocker in held[ns_pid].blockers)


def references(held):
    return {ns_pid: [(one.id, one.of) for one in has.imports] for ns_pid, has in held.items()}


NOBODY = Surroundings()


# ---- who has what ----------------------------------------------------------------------------------------------


def test_an_object_is_its_exporters_and_the_others_refer_to_it():
    held = resolve([party(7, imported(3), files=[1]), party(9, made(5), made(6, shared=None), files=[1])], NOBODY)
    assert references(held) == {7: [(3, "9/5")], 9: []}
    assert [one.id for one in held[9].objects] == [5, 6]
    assert held[7].objects == ()
    assert not held[7].blockers + held[9].blockers


def test_the_open_file_decides_and_no_order_or_claim():
    """Two objects of one exporter, imported the other way round; and a claim on a third that is not in hand."""
    exporter = party(9, made(1), made(2), made(3), files=[11, 12, 13])
    first = imported(1, kind="opened", exporter_pid=9, exporter_object=3)
    held = resolve([exporter, party(7, first, imported(2), files=[12, 11])], NOBODY)
    assert references(held)[7] == [(1, "9/2"), (2, "9/1")]


def test_a_claim_without_the_descriptor_reaches_nothing():
    """It says that it opened the other's object; what it has in hand is a file of its own."""
    thief = party(7, imported(1, kind="opened", exporter_pid=9, exporter_object=5), files=[99])
    held = resolve([party(9, made(5), files=[1]), thief], Surroundings(living=frozenset({7, 9})))
    assert references(held) == {7: [], 9: []}
    assert [(one.id, one.kind) for one in held[7].objects] == [(1, "opened")]


@pytest.mark.parametrize("kind", ["import", "opened"])
def test_an_object_without_exporter_is_held_by_the_first_of_its_importers(kind):
    parties = [party(9, imported(4, kind=kind, size=2 * MIB), files=[1]), party(8, imported(2, kind=kind), files=[1])]
    held = resolve(parties, NOBODY)
    assert [(one.id, one.kind, one.size) for one in held[8].objects] == [(2, kind, 4 * MIB)]
    assert references(held) == {8: [], 9: [(4, "8/2")]}
    assert held[9].imports[0].size == 4 * MIB


def test_an_orphan_is_as_large_as_any_importer_has_mapped_and_lies_where_one_knows():
    unsure = replace(imported(1, device=None, size=2 * MIB), requested=0)
    sure = imported(1, device=1, size=8 * MIB)
    held = resolve([party(5, unsure, files=[1], devices=UUIDS), party(6, sure, files=[1], devices=UUIDS)], NOBODY)
    (orphan,) = held[5].objects
    assert (orphan.size, orphan.uuid, orphan.device) == (8 * MIB, UUIDS[1], 1)


def test_a_process_can_import_one_object_twice():
    held = resolve([party(5, made(1), files=[1]), party(6, imported(2), imported(3), files=[1, 1])], NOBODY)
    assert references(held) == {5: [], 6: [(2, "5/1"), (3, "5/1")]}
    assert not held[6].blockers


def test_an_import_has_the_size_and_device_of_its_object_and_the_number_of_its_process():
    far = imported(1, device=None, size=2 * MIB)
    held = resolve([party(5, made(2, device=1), files=[1]), party(6, far, files=[1], devices=UUIDS[::-1])], NOBODY)
    (found,) = held[6].imports
    assert (found.size, found.uuid, found.device) == (4 * MIB, UUIDS[1], 0)
    assert ImportedObject.from_json(found.to_json()) == found
    assert ImportedObject.from_json(replace(found, device=None).to_json()).device is None


def test_exported_and_fetched_by_nobody_is_a_plain_object():
    held = resolve([party(5, made(1), files=[1])], NOBODY)
    assert [one.id for one in held[5].objects] == [1]
    assert not held[5].blockers


# ---- what cannot be resolved -----------------------------------------------------------------------------------


CASES = {
    "obstacle": ([party(5, imported(1, obstacle="it came by a fabric handle"), files=[1])], NOBODY, "fabric handle"),
    "no descriptor": ([party(5, imported(1), files=[None])], NOBODY, "no descriptor of it"),
    "not of this container": (
        [party(5, imported(1), files=[1])],
        Surroundings(strangers={1: "process 4 of container c2"}), "process 4 of container c2 shares it",
    ),
    "given to another container": (
        [party(5, made(1), files=[1])],
        Surroundings(strangers={1: "process 4 of container c2"}), "process 4 of container c2 shares it",
    ),
    "an exporter that is not staged": (
        [party(5, imported(1, kind="opened", exporter_pid=8), files=[1])],
        Surroundings(living=frozenset({5, 8})), "its exporter, process 8 of its namespace, is not staged",
    ),
    "somebody who is not staged": (
        [party(5, imported(1), files=[1])],
        Surroundings(unstaged=("process 8 (y)",)), r"process 8 \(y\) is not staged and may have",
    ),
    "a peer that is not staged": (
        [party(5, made(1, shared=Sharing(("handle",), (8,), 1)), files=[1])],
        Surroundings(living=frozenset({5, 8})), "process 8 of its namespace fetched it",
    ),
    "a descriptor that somebody may have": (
        [party(5, made(1), files=[1])], Surroundings(unstaged=("process 8 (y)",)), "given away by descriptor",
    ),
    "mapped nowhere": ([party(5, imported(1, size=0), files=[1])], NOBODY, "mapped nowhere"),
    "no device": ([party(5, imported(1, device=None), files=[1], devices=UUIDS)], NOBODY, "on which device it lies"),
    "its own": ([party(5, made(1), imported(2), files=[1, 1])], NOBODY, "object 5/1 of this very process once more"),
    "made twice": ([party(5, made(1), files=[1]), party(6, made(1), files=[1])], NOBODY, "both say that they made it"),
    "beyond its object": (
        [party(6, made(1, size=2 * MIB), files=[1]), party(5, imported(1, size=4 * MIB), files=[1])],
        NOBODY, "mapped beyond the 2097152 bytes of object 6/1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("parties", "around", "what"), CASES.values(), ids=CASES)
def test_what_cannot_be_resolved_is_named(parties, around, what):
    held = resolve(parties, around)
    assert held[5].blockers
    assert re.search(what, refused(held, 5))
    assert held[5].imports == ()


def test_a_peer_that_has_ended_or_is_staged_does_not_matter():
    exporter = party(5, made(1, shared=Sharing(("handle",), (6, 8), 2)), files=[1])
    held = resolve([exporter, party(6, imported(1), files=[1])], Surroundings(living=frozenset({5, 6})))
    assert not held[5].blockers + held[6].blockers


def test_an_importer_of_what_cannot_be_taken_cannot_be_taken_either():
    exporter = party(5, made(1, shared=Sharing(("handle",), (8,), 1)), files=[1])
    held = resolve([exporter, party(6, imported(1), files=[1])], Surroundings(living=frozenset({8})))
    assert held[5].blockers
    assert held[6].blockers


def test_other_blockers_stay_and_so_do_shares_that_nobody_can_follow():
    others = (Blocker("managed", 1, 1, ""), Blocker("import", 1, 1, ""), Blocker("export", 1, 1, "", 77))
    one = party(5, made(1), files=[1])
    one = replace(one, holdings=replace(one.holdings, blockers=others + one.holdings.blockers))
    assert resolve([one], NOBODY)[5].blockers == others


def test_a_share_that_the_preload_did_not_block_is_blocked_all_the_same():
    one = party(5, imported(1, obstacle="no"), files=[1])
    one = replace(one, holdings=replace(one.holdings, blockers=()))
    assert [(blocker.kind, blocker.object) for blocker in resolve([one], NOBODY)[5].blockers] == [("import", 1)]


@given(st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=5), min_size=1, max_size=4))
def test_every_share_is_an_object_once_or_refers_to_one_or_is_refused(drawn):
    parties = []
    for ns_pid, shares in enumerate(drawn, 1):
        made_first = sorted(shares, reverse=True)
        held = [made(n) if is_made else imported(n) for n, (is_made, _) in enumerate(made_first)]
        parties.append(party(ns_pid, *held, files=[file for _, file in made_first]))
    held = resolve(parties, NOBODY)
    names = {f"{ns_pid}/{one.id}" for ns_pid, has in held.items() for one in has.objects}
    files = {}
    for one in parties:
        has = held[one.ns_pid]
        blocked = {blocker.object for blocker in has.blockers}
        refers = {item.id: item.of for item in has.imports}
        for share in one.shares:
            name = refers.get(share.id, f"{one.ns_pid}/{share.id}")
            assert share.id in blocked or name in names
            if share.id not in blocked:  # one file has one name
                assert files.setdefault(one.files[share.id], name) == name


# ---- kcmp ------------------------------------------------------------------------------------------------------


def test_open_files_are_told_apart_whatever_they_are_files_of(tmp_path):
    path = tmp_path / "x"
    path.touch()
    one, other, pipe = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY), os.pipe()
    fds = [one, other, os.dup(one), pipe[0], os.dup(other), pipe[1], os.dup(one)]
    try:
        numbers = same_files(fds)
    finally:
        for fd in fds:
            os.close(fd)
    groups = {number: [n for n, found in enumerate(numbers) if found == number] for number in numbers}
    assert sorted(groups.values()) == [[0, 2, 6], [1, 4], [3], [5]]
    assert same_files([]) == []
