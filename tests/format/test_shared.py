"""Processes that share GPU memory, and their communicators, in the record: references, features, versions, the seal."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from image_format.communicators import CallCount, Communicator, ShmemElement, Split, Team
from image_format.fields import Fields
from image_format.file_names import FRAGMENT_NAME
from image_format.gpu_objects import Access, ImportEntry, ObjectEntry, ObjectMapping, Sharing
from image_format.record import ProcessEntry, Record, lowest_version
from image_format.sealing import seal
from image_format.trust.keys import load_signing_key
from image_format.verifying import verify_directory
from image_format.vram import CHUNK_SIZE, VramFragment, write_fragment
from tests.format.make_shared_vectors import LATE, RANK_0, RANK_1, Shared, Told, communicators, nvshmem
from tests.format.make_staged_vectors import FIRST, OTHER_GPU, TAIL, Staged, entry
from tests.format.make_vectors import GPU, pattern
from vgpu_errors import ImageError, LimitExceeded


@pytest.fixture
def shared_doc():
    return json.loads(Shared().seal().documents["vgpu-record.json"])


def changed(doc, path, value):
    target = doc
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    return doc


IMPORT = ("processes", RANK_1, "imports", 0)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ((*IMPORT, "of"), "7/9", "processes[1].imports[0].of: 7/9 is no object"),
        ((*IMPORT, "of"), "15/6", "processes[1].imports[0].of: 15/6 is an import"),
        ((*IMPORT, "of"), "12/1", "processes[1].imports[0].of: 12/1 is of the process itself"),
        ((*IMPORT, "of"), "12/99", "processes[1].imports[0].of: 12/99 is of the process itself"),
        ((*IMPORT, "of"), "7/01", "processes[1].imports[0].of: must name an object"),
        ((*IMPORT, "uuid"), OTHER_GPU, "processes[1].imports[0].uuid: 7/1 lies on GPU-6f0c"),
        ((*IMPORT, "size"), 1 << 30, "processes[1].imports[0].size: 7/1 has 8192 bytes only"),
        ((*IMPORT, "requested"), 1 << 30, "processes[1].imports[0].size: "),
        ((*IMPORT, "kind"), "vmm", "processes[1].imports[0].kind: "),
        ((*IMPORT, "id"), 1, "processes[1].imports: two objects or imports have the same id"),
        ((*IMPORT, "mappings", 1, "offset"), 4097, "processes[1].imports[0].mappings[1]: "),
        ((*IMPORT, "mappings", 0, "va"), "0x7f8002000000", "processes[1].imports: the mappings at 0x7f8002000000"),
        (("processes", RANK_0, "objects", 0, "shared", "peers"), [12, -1], "processes[0].objects[0].shared.peers[1]: "),
        (("communicators", 1, "rank"), 3, "communicators[1].rank: there is no rank 3 among 3"),
        (("communicators", 1, "nsPid"), 1, "communicators[1].nsPid: there is no GPU process 1"),
        (("communicators", 2, "parent"), "x", "communicators[2].parent: "),
        (("communicators", 2, "split", "key"), True, "communicators[2].split.key: "),
        (("nvshmem", 1, "heap"), ["12/1", "7/1"], "nvshmem[1].heap[1]: 7/1 is neither object nor import of process 12"),
        (("nvshmem", 1, "heap"), ["12/1", "x"], "nvshmem[1].heap[1]: must name an object"),
        (("nvshmem", 1, "teams", 1, "pe"), 1, "nvshmem[1].teams[1].pe: there is no pe 1 among 1"),
        (("nvshmem", 0, "nsPid"), 1, "nvshmem[0].nsPid: there is no GPU process 1"),
        (("features", "required"), ["staged"], "features.required: lacks shared"),
        (("features", "required"), ["shared"], "features.required: lacks staged"),
    ],
)
def test_a_broken_reference_is_named_by_its_path(shared_doc, path, value, named):
    assert Record.from_json(shared_doc)
    with pytest.raises(ImageError) as caught:
        Record.from_json(changed(shared_doc, path, value))
    assert caught.value.message.startswith(f"vgpu-record.json.{named}")


def test_groups_are_limited(shared_doc):
    for key, limit in (("communicators", 8192), ("nvshmem", 1024)):
        entries = [shared_doc[key][0]] * (limit + 1)
        assert Record.from_json(shared_doc | {key: entries[:-1]})
        with pytest.raises(LimitExceeded, match=key):
            Record.from_json(shared_doc | {key: entries})
    element = shared_doc["nvshmem"][0]
    with pytest.raises(LimitExceeded, match="teams"):
        Record.from_json(shared_doc | {"nvshmem": [element | {"teams": element["teams"] * 4097}]})
    with pytest.raises(LimitExceeded, match="collectives"):
        Communicator.from_json(
            Fields(changed(shared_doc["communicators"][0], ("sequence", "collectives"), 1 << 53), "x")
        )


def test_a_writer_stamps_1_3_only_where_something_needs_it(record):
    staged = replace(record, processes=(replace(record.processes[0], mode="staged", objects=(entry(1, 4096),)),))
    assert lowest_version(staged) == "1.1"
    process, first = staged.processes[0], staged.processes[0].objects[0]
    needing = {
        "an object that was given away": {"objects": (replace(first, shared=Sharing(("handle",))),)},
        "an orphan": {"objects": (replace(first, kind="import"),)},
        "an import": {"imports": (ImportEntry(2, "9/1", "opened", 4096, 0, 0, GPU),)},
    }
    for what, changes in needing.items():
        assert lowest_version(replace(staged, processes=(replace(process, **changes),))) == "1.3", what
    assert lowest_version(replace(record, communicators=communicators())) == "1.3"
    assert lowest_version(replace(record, nvshmem=nvshmem())) == "1.3"
    later = replace(staged, format_version="1.3", required_features=("shared", "staged")).stamped()
    assert (later.format_version, later.required_features) == ("1.1", ("staged",))


def test_the_feature_is_listed_only_where_a_process_has_memory_of_another():
    told, shared = (json.loads(made.seal().documents["vgpu-record.json"]) for made in (Told(), Shared()))
    assert (told["formatVersion"], told["features"]["required"]) == ("1.3", ["staged"])
    assert (shared["formatVersion"], shared["features"]["required"]) == ("1.3", ["staged", "shared"])


def test_shared_memory_is_sealed_once_and_verified(image, node, policy):
    made = Staged(CHUNK_SIZE)
    made.add(7, entry(1, TAIL), [made.place(FIRST, pattern(TAIL, 51))])
    importer = ProcessEntry(8, "late", "staged", imports=(ImportEntry(1, "7/1", "opened", TAIL, 0, 0, GPU),))
    record = replace(made.record, processes=(*made.record.processes, importer), communicators=communicators()[:1])
    (image / FIRST).write_bytes(made.packs[FIRST])
    write_fragment(image / FRAGMENT_NAME, VramFragment.of(made.regions))
    seal(image, record, load_signing_key(node / "node.key"), vram=image / FRAGMENT_NAME)
    found = verify_directory(image, policy)
    assert [region.name for region in found.index.vram] == ["7/1"]
    assert found.record.processes == record.processes
    assert found.record.communicators == record.communicators
    assert (found.record.format_version, found.record.required_features) == ("1.3", ("staged", "shared"))
    assert (image / "vgpu-index.bin").read_bytes()[8:12] == b"\1\0\1\0"  # the index has no version 1.3


def test_a_seal_refuses_a_reference_to_what_is_not_sealed(image, node, record):
    lost = ProcessEntry(9, "late", "staged", imports=(ImportEntry(1, "7/1", "opened", 4096, 0, 0, GPU),))
    with pytest.raises(ImageError, match=r"processes\[1\]\.imports\[0\]\.of"):
        seal(image, replace(record, processes=(*record.processes, lost)), load_signing_key(node / "node.key"))
    assert not (image / "vgpu-signature.json").exists()


# ---- what is written comes back ------------------------------------------------------------------

COUNT = st.integers(min_value=0, max_value=2**53 - 1)
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
UUIDS = st.sampled_from([GPU, OTHER_GPU])
HEX_ID = st.text(alphabet="0123456789abcdef", min_size=1, max_size=256)
KEPT = st.dictionaries(st.text(alphabet="uvwxyz", min_size=9, max_size=12), st.integers(0, 9) | TEXT, max_size=2)


@st.composite
def communicator(draw):
    size = draw(st.integers(1, 2**53 - 1))
    return Communicator(
        draw(TEXT), draw(TEXT), draw(HEX_ID), draw(COUNT), draw(st.integers(0, size - 1)), size,
        draw(st.integers(0, 65535)), draw(UUIDS), CallCount(draw(COUNT), draw(COUNT), draw(KEPT)),
        draw(st.none() | HEX_ID), draw(st.none() | st.builds(Split, COUNT, st.integers(1 - 2**53, 2**53 - 1), KEPT)),
        draw(st.none() | TEXT), draw(st.booleans()), draw(KEPT),
    )  # fmt: skip


@st.composite
def element(draw):
    size = draw(st.integers(1, 2**53 - 1))
    name = st.builds("{}/{}".format, st.integers(1, 10**10 - 1), st.integers(0, 10**20 - 1))
    team = st.builds(
        lambda name, pe, more, parent: Team(name, pe, pe + more, parent),
        TEXT,
        st.integers(0, 9),
        st.integers(1, 9),
        st.none() | TEXT,
    )
    home = draw(st.none() | st.tuples(st.integers(0, 65535), UUIDS))
    return ShmemElement(
        draw(TEXT), draw(TEXT), draw(COUNT), draw(st.integers(0, size - 1)), size, *(home or (None, None)),
        tuple(draw(st.lists(team, max_size=3))), draw(st.none() | st.lists(name, max_size=3).map(tuple)), draw(KEPT),
    )  # fmt: skip


@st.composite
def imported(draw):
    size = draw(st.integers(1, 1 << 40))
    offset = draw(st.integers(0, size - 1))
    access = st.builds(Access, st.integers(0, 65535), st.integers(0, 2**32 - 1))
    mapping = ObjectMapping(
        draw(st.integers(1, 1 << 60)), size - offset, offset, tuple(draw(st.lists(access, max_size=3)))
    )
    return ImportEntry(
        draw(COUNT), "7/1", draw(st.sampled_from(["import", "opened"])), size, draw(st.integers(0, size)),
        draw(st.none() | st.integers(0, 65535)), draw(UUIDS), (mapping,), draw(KEPT),
    )  # fmt: skip


SHARING = st.builds(
    Sharing, st.lists(TEXT, max_size=2).map(tuple), st.lists(COUNT, max_size=3).map(tuple), st.none() | COUNT, KEPT
)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(st.one_of(communicator(), element(), imported(), SHARING))
def test_each_entry_comes_back_as_it_was(made):
    doc = json.loads(json.dumps(made.to_json()))
    assert type(made).from_json(Fields(doc, "x")) == made
    assert type(made).from_json(Fields(doc, "x")).to_json() == doc


@QUICK
@given(st.lists(st.sampled_from(["object", "import"]), max_size=6), st.data())
def test_references_hold_exactly_where_each_names_an_object_of_another_process(kinds, data):
    """Three processes with objects and imports at random: the record is read exactly where the rule of `of` holds."""
    owners = [data.draw(st.sampled_from([7, 8, 9])) for _ in kinds]
    names = [f"{owner}/{number}" for number, owner in enumerate(owners)]
    objects, imports = {7: [], 8: [], 9: []}, {7: [], 8: [], 9: []}
    is_sound = True
    for number, (kind, owner) in enumerate(zip(kinds, owners, strict=True)):
        if kind == "object":
            objects[owner].append(ObjectEntry(number, 4096, 0, GPU, "alloc", 0))
            continue
        of = data.draw(st.sampled_from([*names, "7/77"]))
        imports[owner].append(ImportEntry(number, of, "import", 4096, 0, 0, GPU))
        target = names.index(of) if of in names else None
        is_sound &= target is not None and kinds[target] == "object" and owners[target] != owner
    processes = tuple(
        ProcessEntry(pid, "p", "staged", objects=tuple(objects[pid]), imports=tuple(imports[pid])) for pid in (7, 8, 9)
    )
    record = replace(Shared().record, processes=processes, communicators=(), nvshmem=()).stamped()
    if is_sound:
        assert Record.from_bytes(record.to_bytes()).processes == record.processes
    else:
        with pytest.raises(ImageError, match=r"\.of: "):
            Record.from_bytes(record.to_bytes())


def test_the_late_importer_holds_what_lost_its_exporter():
    process = Shared().record.processes[LATE]
    assert [held.is_orphan for held in process.objects] == [True]
    assert process.is_sharing
    assert process.names() == {"15/4", "15/5", "15/6"}
