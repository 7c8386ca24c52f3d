"""Makes the test vectors of format version 1.3 under spec/vectors/1.3: processes that share GPU memory, and their groups.

Built like those of 1.1 (make_staged_vectors.py), whose files, packs and keys they share; a second run writes the same bytes.
Run as `python -m tests.format.make_shared_vectors`. A released folder is never changed.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from image_format.communicators import CallCount, Communicator, ShmemElement, Split, Team
from image_format.gpu_objects import Access, DescriptorEntry, ImportEntry, ObjectMapping, Sharing
from image_format.record import ProcessEntry, Record, Requirement
from tests.format.make_staged_vectors import FIRST, OTHER_GPU, SECOND, TAIL, Staged, entry, staged_record
from tests.format.make_vectors import (
    GPU,
    SMALL_CHUNK,
    TRUSTED,
    Vectors,
    inside,
    make_tar,
    outside,
    pattern,
    write_directory,
)

VECTORS = Path(__file__).parents[2] / "spec" / "vectors" / "1.3"
WORLD, HALF = "5cf0a19d33e871b2" * 16, "a2b7"
BYTES = 2 * SMALL_CHUNK
ORPHAN_BYTES = SMALL_CHUNK + TAIL
RANK_0, RANK_1, LATE = 0, 1, 2  # positions in `processes`


def mapped(va: int, size: int, *devices: int, offset: int = 0) -> ObjectMapping:
    return ObjectMapping(va, size, offset, tuple(Access(device, 3) for device in devices))


def imports_of(pid: int) -> tuple[ImportEntry, ...]:
    first = (mapped(0x7F80_0000_0000, SMALL_CHUNK, 1), mapped(0x7F80_0100_0000, SMALL_CHUNK, 1, offset=SMALL_CHUNK))
    of_orphan = mapped(0x7F80_0200_0000, ORPHAN_BYTES, 1)
    return {
        7: (),
        12: (
            ImportEntry(2, "7/1", "opened", BYTES, BYTES - 8, 0, GPU, first),
            ImportEntry(3, "15/4", "import", ORPHAN_BYTES, 0, 0, GPU, (of_orphan,)),
        ),
        15: (
            ImportEntry(5, "7/1", "import", 0, 0, None, GPU),
            ImportEntry(6, "12/1", "import", SMALL_CHUNK, 0, 1, OTHER_GPU, (mapped(0x10_0000, SMALL_CHUNK, 0, 1),)),
        ),
    }[pid]


def descriptors_of(pid: int) -> tuple[DescriptorEntry, ...]:
    token, other = 0x31C8_F04B_E1D9_7A60, 7
    return {
        7: (DescriptorEntry(41, "7/1", True, token), DescriptorEntry(0, "15/4", False, other)),
        12: (DescriptorEntry(41, "7/1", False, token),),
        15: (),
    }[pid]


def communicators() -> tuple[Communicator, ...]:
    def rank(pid: int, number: int, device: int, uuid: str, calls: int, **more) -> Communicator:
        return Communicator("nccl", "2.28.9", WORLD, pid, number, 3, device, uuid, CallCount(calls, 2), **more)

    half = Communicator(
        "nccl",
        "2.28.9",
        HALF,
        12,
        0,
        1,
        1,
        OTHER_GPU,
        CallCount(1 << 40, 0),
        WORLD,
        Split(1, -3),
        "tensor parallel",
        True,
    )
    return rank(7, 0, 0, GPU, 40961), rank(12, 1, 1, OTHER_GPU, 40961), half


def nvshmem() -> tuple[ShmemElement, ...]:
    world, right = Team("world", 1, 2), Team("right", 0, 1, "world")
    return (
        ShmemElement("nvshmem", "3.4.5", 7, 0, 2, 0, GPU, (Team("world", 0, 2),), ("7/1",)),
        ShmemElement("nvshmem", "3.4.5", 12, 1, 2, 1, OTHER_GPU, (world, right), ("12/1", "12/2")),
        ShmemElement("nvshmem", "3.4.5", 15, 0, 1),
    )


class Shared(Staged):
    """Three processes on two GPUs; the exporter of what the third one holds is gone."""

    def __init__(self) -> None:
        super().__init__(SMALL_CHUNK)
        told = Sharing(("descriptor", "handle"), (12,), 1)
        content = [self.place(FIRST, pattern(SMALL_CHUNK, n)) for n in (31, 32)]
        self.add(7, entry(1, BYTES, shared=told), content)
        self.add(12, entry(1, SMALL_CHUNK, 1, OTHER_GPU, kind="vmm"), [self.place(SECOND, pattern(SMALL_CHUNK, 33))])
        held = mapped(0x7F90_0000_0000, ORPHAN_BYTES, 0, 1)
        orphan = replace(entry(4, ORPHAN_BYTES, kind="import", mappings=(held,)), requested=0)
        self.add(15, orphan, [self.place(SECOND, pattern(n, n + 1)) for n in (SMALL_CHUNK, TAIL)])

    @property
    def record(self) -> Record:
        base = staged_record(self.objects)
        first, second = base.processes
        third = ProcessEntry(15, "late", "staged", (GPU, OTHER_GPU), objects=self.objects[15], imports=imports_of(15))
        return replace(
            base,
            processes=(
                replace(first, descriptors=descriptors_of(7)),
                replace(second, imports=imports_of(12), descriptors=descriptors_of(12)),
                third,
            ),
            requirements=(
                Requirement("gpu.peers", ("0-1",)),
                Requirement("gpu.nvlink", ("0-1",), "should"),
                Requirement("nccl.version", ("2.28.9",), "should"),
            ),
            communicators=communicators(),
            nvshmem=nvshmem(),
        )


class Told(Staged):
    """No import and no orphan: an object that was given away, and communicators; no reader needs to know `shared`."""

    def __init__(self) -> None:
        super().__init__(SMALL_CHUNK)
        self.add(7, entry(1, SMALL_CHUNK, shared=Sharing(("handle",))), [self.place(FIRST, pattern(SMALL_CHUNK, 41))])

    @property
    def record(self) -> Record:
        return replace(staged_record(self.objects), communicators=communicators()[:1])


# ---- bending -------------------------------------------------------------------------------------


def bent(change):
    """A copy of the record, changed in place."""

    def bend(doc):
        doc = copy.deepcopy(doc)
        change(doc)
        return doc

    return bend


def with_import(position: int = 0, process: int = RANK_1, **changes):
    def change(doc):
        found = doc["processes"][process]["imports"][position]
        found |= changes
        for key in [key for key, value in changes.items() if value is None]:
            del found[key]

    return bent(change)


def with_descriptor(position: int = 0, process: int = RANK_0, **changes):
    def change(doc):
        found = doc["processes"][process]["descriptors"][position]
        found |= changes
        for key in [key for key, value in changes.items() if value is None]:
            del found[key]

    return bent(change)


def with_member(key: str, position: int, **changes):
    def change(doc):
        found = doc[key][position]
        found |= changes
        for name in [name for name, value in changes.items() if value is None]:
            del found[name]

    return bent(change)


def with_mapping(**changes):
    return bent(lambda doc: doc["processes"][RANK_1]["imports"][0]["mappings"][0].update(changes))


def with_features(*features: str):
    return lambda doc: doc | {"features": {"required": list(features), "optional": ["shared"]}}


def orphan_alone(doc):
    """The orphan is the only sign of sharing."""
    for process in doc["processes"]:
        process.pop("imports", None)
        process.pop("descriptors", None)
    doc["nvshmem"] = []
    doc["features"]["required"] = ["staged"]


def import_alone(doc):
    """A process in driver mode with an import, and no feature."""
    doc["processes"][RANK_0] |= {"mode": "driver", "imports": doc["processes"][LATE]["imports"][1:]}
    doc["features"]["required"] = ["staged"]


def descriptor_alone(doc):
    """A number is the only sign of sharing."""
    orphan_alone(doc)
    doc["processes"][LATE]["objects"][0]["kind"] = "vmm"
    doc["processes"][RANK_0]["descriptors"] = [{"number": 3, "of": "7/1", "closeOnExec": True, "token": "0" * 16}]


def later(doc):
    doc |= {"formatVersion": "1.9", "novelty": {"a": 1}}
    doc["processes"][RANK_1]["imports"][0] |= {"novelty": [1]}
    doc["processes"][RANK_0]["objects"][0]["shared"] |= {"novelty": "x"}
    doc["processes"][RANK_0]["descriptors"][0] |= {"novelty": {}}
    doc["communicators"][2] |= {"library": "another", "novelty": None}
    doc["communicators"][2]["split"] |= {"novelty": 1}
    doc["communicators"][2]["sequence"] |= {"novelty": 1}
    doc["nvshmem"][1] |= {"novelty": 1}
    doc["nvshmem"][1]["teams"][1] |= {"novelty": 1}


# ---- the cases -----------------------------------------------------------------------------------


def make_good(vectors: Vectors) -> None:
    def good(name, made, kind="directory", whole=None, **bends):
        sealed = made.seal(**bends)
        content = sealed.all(made.files)
        more = {}
        if kind == "archive":
            members = inside(content)
            order = [members[0], *reversed(members[1:])] if whole == "backwards" else members
            vectors.write(f"good/{name}", make_tar(order + outside()))
            more = {"outside": ["config.dump", "rootfs-diff.tar", "spec.dump"]}
        else:
            write_directory(vectors.root / f"good/{name}", content)
        vectors.good(name, kind, sealed, {}, bytesChecked=made.bytes_checked, **more)

    good("shared", Shared())
    good("shared.tar", Shared(), "archive")
    good("shared-index-last.tar", Shared(), "archive", "backwards")
    good("told", Told())
    good("later-minor-version", Shared(), record=bent(later))


def make_bad(vectors: Vectors) -> None:
    """Vouched for by a trusted key, and wrong all the same."""

    def bad(name, what, record, error="ImageError", code=50):
        made = Shared()
        vectors.bad(name, what, inside(made.seal(record=record).all(made.files)) + outside(), error, code)

    make_bad_features(bad)
    make_bad_imports(bad)
    make_bad_descriptors(bad)
    make_bad_groups(bad)


def make_bad_features(bad) -> None:
    bad("feature-missing", "imports without the feature", with_features("staged"))
    bad("feature-missing-orphan", "an orphan without the feature", bent(orphan_alone))
    bad("feature-missing-driver", "an import of a process in driver mode without the feature", bent(import_alone))
    bad("feature-missing-descriptor", "a descriptor without the feature", bent(descriptor_alone))
    bad("feature-staged-missing", "imports without staged", with_features("shared"))
    bad("unknown-feature", "one feature more", with_features("staged", "shared", "teleport"), "UnknownFeature", 54)


def make_bad_imports(bad) -> None:
    bad("of-nothing", "an object that is not there", with_import(of="7/9"))
    bad("of-no-process", "an object of a process that is not there", with_import(of="9/1"))
    bad("of-import", "an import of an import", with_import(of="15/6"))
    bad(
        "of-own-object",
        "an import of the process's own object",
        with_import(of="12/1", uuid=OTHER_GPU, size=SMALL_CHUNK, requested=0, mappings=[]),
    )
    bad("of-own-import", "an import of itself", with_import(of="12/2"))
    for name, text in (("zero", "0/1"), ("leading", "07/1"), ("plain", "seven"), ("parent", "../1"), ("sign", "7/-1")):
        bad(f"of-name-{name}", f"the name {text}", with_import(of=text))
    bad("of-number", "a number in the place of a name", with_import(of=7))
    bad("of-missing", "an import of nobody", with_import(of=None))
    bad("import-uuid", "another device than the object's", with_import(uuid=OTHER_GPU))
    bad("import-uuid-text", "no uuid", with_import(uuid="GPU-0"))
    bad("import-size", "more than the object has", with_import(size=BYTES + 1))
    bad("import-requested", "more requested than there is", with_import(requested=BYTES + 1))
    bad("import-kind", "the kind of an object", with_import(kind="alloc"))
    bad("import-device", "an ordinal beyond all", with_import(device=65536))
    bad("import-id-of-object", "the id of an object of the process", with_import(id=1))
    bad("import-id-twice", "an id twice", with_import(id=3))
    bad("import-fields", "an import without mappings", with_import(mappings=None))
    bad("imports-no-list", "imports that are no list", bent(lambda doc: doc["processes"][RANK_1].update(imports={})))
    bad("mapping-beyond", "a mapping beyond its import", with_mapping(offset=SMALL_CHUNK + 1))
    bad("mapping-empty", "a mapping of nothing", with_mapping(size=0))
    bad(
        "mapping-over-object",
        "an import over an object of the process",
        with_mapping(va=f"{0x7F00_0000_0000 + (1 << 24):#x}"),
    )
    bad("mapping-over-import", "two imports at one address", with_mapping(va="0x7f8002000000"))
    bad("mapping-over-itself", "two mappings of an import at one address", with_mapping(va="0x7f8001000000"))
    first = bent(lambda doc: doc["processes"][RANK_0]["objects"][0]["shared"].update(peers=["12"]))
    bad("shared-peers", "peers that are no process ids", first)


def make_bad_descriptors(bad) -> None:
    bad("descriptor-of-nothing", "an object that is not there", with_descriptor(of="7/9"))
    bad("descriptor-of-import", "an import", with_descriptor(of="15/6"))
    bad("descriptor-of-missing", "a descriptor of nobody", with_descriptor(of=None))
    bad("descriptor-of-name", "a name with a zero in front", with_descriptor(of="07/1"))
    bad("descriptor-twice", "a number twice", with_descriptor(number=0))
    bad("descriptor-negative", "a negative number", with_descriptor(number=-1))
    bad("descriptor-beyond", "a number beyond all", with_descriptor(number=1 << 31))
    bad("descriptor-exec", "a number in the place of a claim", with_descriptor(closeOnExec=1))
    bad("descriptor-exec-missing", "no claim", with_descriptor(closeOnExec=None))
    bad("descriptor-token", "a token in capitals", with_descriptor(token="31C8F04BE1D97A60"))
    bad("descriptor-token-short", "a token that is too short", with_descriptor(token="31c8"))
    bad("descriptor-token-number", "a token that is no text", with_descriptor(token=7))
    nothing = bent(lambda doc: doc["processes"][RANK_0].update(descriptors={}))
    bad("descriptors-no-list", "descriptors that are no list", nothing)


def make_bad_groups(bad) -> None:
    world = ("communicators", 0)
    bad("rank-beyond", "a rank beyond its communicator", with_member(*world, rank=3))
    bad("rank-negative", "a negative rank", with_member(*world, rank=-1))
    bad("rank-of-nobody", "a rank of no process", with_member(*world, nsPid=99))
    bad("communicator-id", "an id in capitals", with_member(*world, id="5CF0"))
    bad("communicator-id-empty", "no id", with_member(*world, id=""))
    bad("communicator-id-long", "an id that is too long", with_member(*world, id="0" * 257))
    bad("communicator-parent", "a parent that is no id", with_member("communicators", 2, parent="world"))
    bad("communicator-split", "a split without key", with_member("communicators", 2, split={"color": 1}))
    bad("communicator-color", "a negative color", with_member("communicators", 2, split={"color": -1, "key": 0}))
    bad("communicator-sequence", "no sequence", with_member(*world, sequence=None))
    bad("communicator-uuid", "no uuid", with_member(*world, uuid="0"))
    bad("communicator-finalized", "finalized and not so", with_member(*world, finalized=False))
    bad("communicators-no-list", "communicators that are no list", lambda doc: doc | {"communicators": {"a": 1}})
    bad("element-beyond", "an element beyond its job", with_member("nvshmem", 0, pe=2))
    bad("element-of-nobody", "an element of no process", with_member("nvshmem", 0, nsPid=99))
    bad("element-device-alone", "a device without uuid", with_member("nvshmem", 0, uuid=None))
    bad("element-uuid-alone", "a uuid without device", with_member("nvshmem", 0, device=None))
    bad("element-without-teams", "no teams", with_member("nvshmem", 2, teams=None))
    bad("heap-nothing", "a heap that is not there", with_member("nvshmem", 0, heap=["7/9"]))
    bad("heap-of-another", "a heap of another process", with_member("nvshmem", 0, heap=["12/1"]))
    bad("heap-name", "a heap without a name", with_member("nvshmem", 0, heap=["heap"]))
    bad(
        "team-beyond",
        "an element beyond its team",
        with_member("nvshmem", 0, teams=[{"name": "a", "pe": 1, "size": 1}]),
    )
    bad("team-name", "a team without a name", with_member("nvshmem", 0, teams=[{"pe": 0, "size": 1}]))
    elements = with_many("nvshmem", 1025)
    bad("elements-many", "more elements than there may be", elements, "LimitExceeded", 55)


def with_many(key: str, count: int):
    return lambda doc: doc | {key: [doc[key][0]] * count}


def make(root: Path) -> None:
    """Write all vectors into an empty folder."""
    vectors = Vectors(root)
    vectors.write("keys/trusted.pub", TRUSTED.public.to_pem())
    make_good(vectors)
    make_bad(vectors)
    doc = {"formatVersion": "1.3", "trusted": ["keys/trusted.pub"], "cases": vectors.cases}
    vectors.write("expected.json", json.dumps(doc, indent=1).encode() + b"\n")


if __name__ == "__main__":
    if VECTORS.exists() and "--replace" not in sys.argv:
        sys.exit(f"{VECTORS} exists; released vectors are never changed (--replace before the first release only)")
    shutil.rmtree(VECTORS, ignore_errors=True)
    make(VECTORS)
