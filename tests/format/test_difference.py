"""What `difference` and `content_summary` say of pairs of indexes and records: tables in, numbers out."""

from dataclasses import replace

import pytest
from blake3 import blake3

from image_format.chunk_index import Chunk, Codec, Index, Pack, Region, RegionKind, zero_id
from image_format.content_summary import Extent, summarise, total
from image_format.difference import Fact, compare, process_changes, record_facts, region_changes, transfer
from image_format.record import DeviceEntry, Parent, ProcessEntry, Requirement
from tests.format.make_shared_vectors import Shared, communicators, nvshmem
from tests.format.make_vectors import base_record

SIZE = 4096
RECORD = base_record()
FILE, VRAM = RegionKind.FILE, RegionKind.VRAM


def index(**regions):
    """An index whose chunks are one letter each: "ab0" is content a, content b, zeros; "A" half a chunk of a."""
    listed, chunks, packs = [], [], []
    for name, letters in regions.items():
        kind = VRAM if "_" in name else FILE
        first = len(chunks)
        for n, letter in enumerate(letters):
            length = SIZE // 2 if letter.isupper() else SIZE
            if letter == "0":
                chunks.append(Chunk(zero_id(length), 0, Codec.ZERO, 0, 0, length))
            else:
                content = blake3(letter.lower().encode() * length).digest()
                chunks.append(Chunk(content, len(packs), Codec.RAW, n * SIZE, length, length))
        length = sum(chunk.length for chunk in chunks[first:])
        listed.append(Region(name.replace("_", "/"), length, first, len(letters), kind))
        packs.append(Pack(name, length))
    return Index(tuple(listed), tuple(chunks), tuple(packs), SIZE)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"f": "ab"}, {"f": "ab"}, [("f", "equal", 2, 0, 0)]),
        ({"f": "ab"}, {"f": "ac"}, [("f", "changed", 1, 1, 0)]),
        ({"f": "ab"}, {"f": "a0"}, [("f", "changed", 1, 0, 1)]),
        ({"f": "a0"}, {"f": "a0"}, [("f", "equal", 2, 0, 0)]),
        ({"f": "a"}, {"f": "ab"}, [("f", "changed", 1, 1, 0)]),
        ({"f": "ab"}, {"f": "a"}, [("f", "changed", 1, 0, 0)]),
        ({"f": "ab"}, {"f": "ba"}, [("f", "changed", 0, 2, 0)]),
        ({"f": "a"}, {"f": "A"}, [("f", "changed", 0, 1, 0)]),
        ({"f": ""}, {"f": ""}, [("f", "equal", 0, 0, 0)]),
        ({}, {"f": "a0"}, [("f", "added", 0, 1, 1)]),
        ({"f": "a"}, {}, [("f", "removed", 0, 0, 0)]),
        ({"f": "a", "g": "b"}, {"g": "b", "p_1": "c"}, [("g", "equal", 1, 0, 0), ("p/1", "added", 0, 1, 0), ("f", "removed", 0, 0, 0)]),
    ],
)  # fmt: skip
def test_regions_are_compared_place_by_place(before, after, expected):
    found = region_changes(index(**before), index(**after))
    counts = [(c.name, c.change, c.count.equal_chunks, c.count.changed_chunks, c.count.zeroed_chunks) for c in found]
    assert counts == expected
    for change in found:
        assert change.count.equal_bytes + change.count.changed_bytes + change.count.zeroed_bytes == change.after


@pytest.mark.parametrize(
    ("before", "after", "chunks"),
    [
        ({"f": "ab"}, {"f": "ba"}, 0),
        ({"f": "a"}, {"g": "a"}, 0),
        ({"f": "a"}, {"f": "bb"}, 1),
        ({"f": "a"}, {"f": "b0"}, 1),
        ({}, {"f": "abc"}, 3),
        ({"f": "abc"}, {}, 0),
    ],
)
def test_a_push_sends_new_content_once_wherever_it_lies(before, after, chunks):
    found = transfer(index(**before), index(**after))
    assert (found.bytes, found.chunks) == (chunks * SIZE, chunks)
    assert found.sent_bytes >= found.bytes


def test_content_cut_along_pages_is_compared_by_what_is_there():
    before, after = index(f="abc"), index(f="bcd")
    paged = [replace(i, regions=tuple(r._replace(kind=3) for r in i.regions)) for i in (before, after)]
    (change,) = region_changes(*paged)
    assert (change.count.equal_chunks, change.count.changed_chunks) == (2, 1)


def test_another_chunk_size_is_compared_by_what_is_there():
    (change,) = region_changes(replace(index(f="ab"), chunk_size=2 * SIZE), index(f="ba"))
    assert (change.change, change.count.equal_chunks) == ("changed", 2)


def test_pages_that_changed_places_are_a_change():
    paged = [
        replace(i, regions=tuple(r._replace(kind=RegionKind.PAGES) for r in i.regions))
        for i in (index(f="ab"), index(f="ba"))
    ]
    assert [change.change for change in region_changes(*paged)] == ["changed"]
    assert [change.change for change in region_changes(paged[0], paged[0])] == ["equal"]


REQUIRED = Requirement("extra", "570")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"generation": 4}, [("generation", RECORD.generation, 4)]),
        ({"content_root": "1" * 64, "phases": (), "parents": (Parent("5e" * 32, 2),)}, []),
        ({"container": replace(RECORD.container, name="other")}, [("container.name", "trainer", "other")]),
        ({"devices": ()}, [(f"devices.{d.uuid}.{key}", value, None) for d in RECORD.devices for key, value in sorted(d.to_json().items())] + [("devices", None, {})]),
    ],
)  # fmt: skip
def test_facts_that_differ_are_named_by_their_path(change, expected):
    found = record_facts(RECORD, replace(RECORD, **change))
    assert sorted(found, key=str) == sorted((Fact(*fact) for fact in expected), key=str)


def test_requirements_and_devices_are_compared_by_what_they_are_and_not_by_position():
    second = DeviceEntry("GPU-2", "NVIDIA H200", 1)
    before = replace(RECORD, requirements=(*RECORD.requirements, REQUIRED), devices=(*RECORD.devices, second))
    after = replace(RECORD, requirements=(REQUIRED, *RECORD.requirements), devices=(second, *RECORD.devices))
    assert record_facts(before, after) == []


def test_processes_that_came_went_and_differ():
    one, two, three = (ProcessEntry(pid, "train", "driver", (), 1) for pid in (1, 2, 3))
    found = process_changes([one, two], [replace(two, gpu_bytes=5), three])
    assert [(change.ns_pid, change.what) for change in found] == [(1, "removed"), (2, "changed"), (3, "added")]
    assert found[1].facts == (Fact("gpuBytes", 1, 5),)


def shared_facts(change, before=None):
    record = Shared().record
    return [fact.path for fact in record_facts(before or record, replace(record, **change))]


def test_communicators_are_compared_by_id_and_rank_and_elements_by_process():
    first, second, half = communicators()
    further = replace(second, sequence=replace(second.sequence, collectives=50000))
    element, other, single = nvshmem()
    fewer = replace(other, teams=other.teams[:1])
    assert shared_facts({"communicators": (half, further, first)}) == [
        "communicators.5cf0a19d33e871b2.1.sequence.collectives"
    ]
    assert shared_facts({"communicators": (first, second)})[0] == "communicators.a2b7.0.device"
    assert shared_facts({"nvshmem": (single, fewer, element)}) == [
        "nvshmem.12.teams.right.parent", "nvshmem.12.teams.right.pe", "nvshmem.12.teams.right.size",
    ]  # fmt: skip


def test_ids_that_begin_alike_are_not_taken_for_one_another():
    first, _, _ = communicators()
    like = replace(first, id="5cf0a19d33e871b2" + "0" * 16)
    paths = shared_facts({"communicators": (first, like)})
    assert [path for path in paths if path.startswith(f"communicators.{like.id}.0.")]
    assert not [path for path in paths if path.startswith(f"communicators.{first.id}.0.")]


def test_an_import_of_something_else_is_a_change_of_its_process():
    _, importer, _ = Shared().record.processes
    other = replace(importer, imports=(replace(importer.imports[0], of="15/4"), *importer.imports[1:]))
    (change,) = process_changes([importer], [other])
    assert change.facts == (Fact("imports.2.of", "7/1", "15/4"),)
    (gone,) = process_changes([importer], [replace(importer, imports=importer.imports[:1])])
    assert gone.facts == (Fact("imports.3.kind", "import", None), Fact("imports.3.of", "15/4", None))


def test_a_checkpoint_compared_with_itself_has_no_difference():
    found = compare((RECORD, index(f="ab0")), (RECORD, index(f="ab0")))
    assert (found.facts, found.processes) == ((), ())
    assert (found.transfer.bytes, found.transfer.packs) == (0, 0)
    assert found.count.equal_bytes == 3 * SIZE


@pytest.mark.parametrize(
    ("regions", "expected"),
    [
        ({"f": "ab"}, Extent(2 * SIZE, 0, 0, 2 * SIZE)),
        ({"f": "a0a"}, Extent(3 * SIZE, SIZE, SIZE, SIZE)),
        ({"f": "a", "g": "a", "p_1": "a0"}, Extent(4 * SIZE, SIZE, 2 * SIZE, SIZE)),
        ({}, Extent()),
    ],
)
def test_zero_shared_and_stored_bytes_add_up(regions, expected):
    found = total(summarise(index(**regions)))
    assert found == expected
    assert found.stored_bytes + found.zero_bytes + found.shared_bytes == found.bytes


def large(letters):
    """A region of GPU memory of one chunk for each letter, in packs of 128 chunks at most."""
    return index(p_1=letters)


def test_a_push_sends_whole_packs_and_only_those_that_changed():
    first = "".join(chr(0x100 + n) for n in range(300))
    changed = first[:5] + "b" + first[6:]
    found = transfer(large(first), large(changed))
    assert (found.chunks, found.packs) == (1, 1)
    assert found.bytes <= found.sent_bytes <= 128 * SIZE
    assert transfer(large(first), large(first)).packs == 0
    assert transfer(large(""), large(first)).packs == 3
