"""Archives made to harm: every trick is refused in every compression, nothing is written before the signature holds, and
what a few bytes claim takes no memory."""

import gzip
import json
import os
import signal
import struct
import sys
import threading
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3

from image_format import chunk_index, source, vram
from image_format.archives import archive, ocistore
from image_format.index_model import Chunk, Codec, Index, Region, RegionKind
from image_format.trust.policy import Policy, TrustedKey
from tests.format import pages_images
from tests.format.make_vectors import FOLDER, TRUSTED, describe, make_tar, oci_files
from tests.format.tricky_tars import SEALED, TRICKS, WHOLE, base256, header, member, pax, with_last
from vgpu_errors import ImageError, NoSuchImage, VgpuError

POLICY = Policy(keys={TRUSTED.key_id: TrustedKey("trusted", Path("trusted.pub"), TRUSTED.public)})
COMPRESSIONS = {
    "none": bytes,
    "gzip": lambda data: gzip.compress(data, 1),
    "zstd": zstandard.ZstdCompressor(level=1).compress,
}


@pytest.fixture
def archived(tmp_path):
    def write(data, compression="none"):
        path = tmp_path / f"archive.{compression}"
        path.write_bytes(COMPRESSIONS[compression](data))
        return path

    return write


def told(action):
    """The message of the error, or nothing."""
    try:
        action()
    except VgpuError as error:
        return error.message
    return ""


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_archive_without_a_trick_is_accepted(compression, archived):
    path = archived(make_tar(WHOLE), compression)
    assert archive.verify_archive(path, POLICY).compression == compression
    assert archive.verify_archive(archived(with_last()), POLICY)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_is_refused(trick, compression, archived):
    path = archived(TRICKS[trick], compression)
    with pytest.raises((ImageError, NoSuchImage)) as refused:
        archive.verify_archive(path, POLICY)
    assert refused.value.message.isprintable()


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_shows_in_no_way_but_an_error_of_ours(trick, archived):
    path = archived(TRICKS[trick])
    for look in (archive.read_archive_claims, lambda p: source.read_claims(str(p)).claims.claimed, source.read_claims):
        assert told(lambda look=look: look(path)).isprintable()


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_in_an_oci_layer_is_refused(trick, tmp_path):
    for name, data in oci_files(TRICKS[trick]).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with pytest.raises((ImageError, NoSuchImage)):
        source.verify(str(tmp_path), POLICY)


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_writes_nothing_outside_of_the_folder_that_it_is_unpacked_into(trick, tmp_path):
    from containerd_integration import flat_tar

    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    flat = TRICKS[trick].replace(b"checkpoint/", b"./////////./")[: len(TRICKS[trick])]
    for data in (TRICKS[trick], flat):
        assert told(lambda data=data: flat_tar.unpack(iter([data]), target, where="x")).isprintable()
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir())
    assert all(name.startswith("deep/target/") and name.count("/") == 2 for name in found)
    assert not any(path.is_symlink() or path.stat().st_nlink > 1 for path in target.iterdir())


LAYOUT_TRICKS = {
    "a layer that lies outside": ("blobs/sha256/../../../../etc/passwd", None),
    "a digest with a path": (None, "sha256:../../../../etc/passwd"),
    "a digest of another algorithm": (None, "md5:" + "a" * 32),
    "a digest in capitals": (None, "sha256:" + "A" * 64),
}


@pytest.mark.parametrize("trick", LAYOUT_TRICKS)
@pytest.mark.parametrize("form", ["folder", "tar"])
def test_an_oci_layout_leads_to_no_file_outside(trick, form, tmp_path):
    member_name, digest = LAYOUT_TRICKS[trick]
    files = oci_files(make_tar(WHOLE))
    if digest is not None:
        index = json.loads(files["index.json"])
        index["manifests"][0]["digest"] = digest
        files["index.json"] = json.dumps(index).encode()
    members = sorted(files.items()) + ([(member_name, b"x")] if member_name else [])
    if form == "tar":
        (tmp_path / "a.tar").write_bytes(make_tar(members))
        with pytest.raises(VgpuError):
            source.verify(str(tmp_path / "a.tar"), POLICY)
        return
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    if digest is None:
        (tmp_path / "blobs/sha256").rename(tmp_path / "elsewhere")
        (tmp_path / "blobs/sha256").symlink_to(tmp_path / "elsewhere")
        return  # a link in somebody's own folder leads where he wants it to
    with pytest.raises(VgpuError):
        source.verify(str(tmp_path), POLICY)


# ---- nothing is written before the signature holds -----------------------------------------------

_WATCHED = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.link",
    "os.symlink",
    "os.remove",
    "os.truncate",
    "os.chmod",
    "subprocess.Popen",
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_seen = threading.local()


def _audit(event, args):
    events = getattr(_seen, "events", None)
    if events is None or event not in _WATCHED:
        return
    if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITING):
        return
    events.append((event, str(args[0])))


sys.addaudithook(_audit)


class Spy:
    """Notes what this thread writes, makes or moves, and which programs it starts."""

    def __enter__(self):
        _seen.events = self.events = []
        return self.events

    def __exit__(self, *exc_info):
        _seen.events = None


def test_the_spy_sees_what_is_written(tmp_path):
    with Spy() as written:
        (tmp_path / "a").write_bytes(b"x")
        (tmp_path / "a").read_bytes()
        (tmp_path / "d").mkdir()
        (tmp_path / "a").rename(tmp_path / "b")
    assert [event for event, _ in written] == ["open", "os.mkdir", "os.rename"]


UNSIGNED = {
    "no signature": [(name, data) for name, data in WHOLE if not name.endswith("vgpu-signature.json")],
    "an unknown signature": [(name, b"{}" if name.endswith("vgpu-signature.json") else data) for name, data in WHOLE],
    "another manifest": [(name, data + b" " if name.endswith("vgpu-manifest.json") else data) for name, data in WHOLE],
    "another file": [(name, data[::-1] if name.endswith("core-1.img") else data) for name, data in WHOLE],
    "a good one": WHOLE,
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("case", UNSIGNED)
def test_verifying_and_inspecting_write_nothing_at_all(case, compression, archived, tmp_path):
    path = archived(make_tar(UNSIGNED[case]), compression)
    folder = tmp_path / "unpacked"
    for name, data in UNSIGNED[case]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if data is not FOLDER:
            (folder / name).write_bytes(data)
    before = sorted(tmp_path.rglob("*"))
    with Spy() as written:
        for place in (str(path), str(folder)):
            for look in (lambda p: source.verify(p, POLICY), source.read_claims):
                try:
                    look(place)
                except VgpuError:
                    continue
    assert written == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("case", [case for case in UNSIGNED if "another file" not in case and case != "a good one"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_an_archive_that_is_to_be_pushed_is_not_unpacked_before_its_signature_holds(
    case, compression, archived, tmp_path
):
    from image_format.transport import open_source

    path = archived(make_tar(UNSIGNED[case]), compression)
    with Spy() as written, pytest.raises(VgpuError), open_source(str(path), POLICY, tmp_path / "no-store"):
        pass
    assert [target for event, target in written if event == "open"] == []


@pytest.mark.parametrize("case", [case for case in UNSIGNED if case != "a good one"])
@pytest.mark.parametrize("verb", ["pack", "unpack"])
def test_an_archive_that_is_to_be_repacked_writes_no_result_that_a_signature_does_not_hold_for(
    verb, case, archived, tmp_path
):
    from image_format.references import reference_archive
    from image_format.store import Store

    store = Store.open(tmp_path / "store")
    path = archived(make_tar(UNSIGNED[case]))
    target = tmp_path / "result.tar"
    with pytest.raises(VgpuError):
        getattr(reference_archive, verb)(path, target, POLICY, store if verb == "pack" else store.root)
    assert not target.exists()
    assert store.checkpoints() == ()


# ---- what a few bytes claim ----------------------------------------------------------------------

SPACE_BYTES = 280 << 20


def in_little_memory(action):
    """What an action returns or raises in a child that can take a few hundred MB more than it has now."""
    import resource

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (taken + SPACE_BYTES, taken + SPACE_BYTES))
            resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
            signal.alarm(60)
            try:
                outcome = f"returned {type(action()).__name__}"
            except BaseException as error:  # noqa: BLE001 - whatever it is, the parent judges it
                outcome = f"{'ours' if isinstance(error, VgpuError) else 'foreign'} {type(error).__name__}: {error}"
            os.write(writing, outcome.encode(errors="replace")[:4000])
        finally:
            os._exit(0)
    os.close(writing)
    outcome = b"".join(iter(lambda: os.read(reading, 4096), b"")).decode()
    os.close(reading)
    _, status = os.waitpid(child, 0)
    return outcome or f"died with {status}"


def index_claiming(**counts):
    """An index header that claims as many of something, with nothing behind it."""
    data = bytearray(SEALED["vgpu-index.bin"][:128])
    places = {"regions": 40, "chunks": 48, "packs": 56, "names": 64}
    for what, count in counts.items():
        struct.pack_into("<Q", data, places[what], count)
    return bytes(data)


def bomb(size, compress):
    """A member of zeros, `size` bytes long, in a stream of a few kB."""
    tar = with_last(header("rootfs-diff2.tar", size))[:-1024] + bytes(size) + bytes(1024)
    return compress(tar)


def zstd_of_window(log):
    """A frame header that wants a window of 2**log bytes."""
    return b"\x28\xb5\x2f\xfd" + bytes([0x00, (log - 10) << 3]) + b"\x01\x00\x00"


def tar_claiming(name, size):
    return with_last(header(name, size_field=base256(size)))


def pagemap_claiming(count):
    """A pagemap of one run, and a file of pages that claims to hold them all."""
    text = pages_images.MAGICS + b"".join(
        pages_images.entry(pages_images.message(*fields)) for fields in ([(1, 9)], [(1, 0), (4, 4), (5, count)])
    )
    size_field = base256(count * pages_images.PAGE)
    return with_last(member("checkpoint/pagemap-9.img", text), header("checkpoint/pages-9.img", size_field=size_field))


def headers_without_a_member(count):
    """Extended headers of a thousand names each."""
    return with_last(*(pax({f"{n}.{k}": "x" for k in range(1000)}) for n in range(count)))


def index_of_zero_chunks(count, chunk_size=64 << 20):
    """GPU objects of one chunk each, all zero and of a different length; their ids are right, and made in no time."""
    regions, chunks, hasher, step = [], [], blake3(), chunk_size // count
    for n in range(count):
        hasher.update(bytes(step))
        chunks.append(Chunk(hasher.digest(), 0, Codec.ZERO, 0, 0, (n + 1) * step))
        regions.append(Region(f"1/{n}", (n + 1) * step, n, 1, RegionKind.VRAM))
    return chunk_index.to_bytes(Index(tuple(regions), tuple(chunks), (), chunk_size))


HUGE = 1 << 40
CLAIMS = {
    "a pagemap of 2 EB": ("archive", pagemap_claiming(1 << 49)),
    "a pagemap of 8 TB": ("archive", pagemap_claiming(1 << 31)),
    "extended headers of 200000 names": (
        "archive",
        with_last(*[member("x", b"5 a=\n" * 200_000, kind=b"x")] * 4, member("../x")),
    ),
    "extended headers without a member": ("archive", headers_without_a_member(2000)),
    **{
        f"an index of {1 << bits} {what}": (chunk_index.from_bytes, index_claiming(**{what: 1 << bits}))
        for what in ("regions", "chunks", "packs", "names")
        for bits in (20, 30, 40, 63)
    },
    "an index of all ones": (chunk_index.from_bytes, SEALED["vgpu-index.bin"][:24] + b"\xff" * 104),
    "a fragment of all ones": (vram.from_bytes, b"\xff" * 200),
    "a record of a million brackets": ("record", b"[" * 1_000_000),
    "a record of deep objects": ("record", b'{"a":' * 200_000),
    "a record of a long number": ("record", b'{"formatVersion":' + b"9" * 1_000_000 + b"}"),
    "a record of many keys": ("record", b"{" + b",".join(b'"%d":0' % n for n in range(400_000)) + b"}"),
    "a manifest of a million brackets": ("manifest", b"[" * 1_000_000),
    "an archive with a document of a TB": ("archive", tar_claiming("checkpoint/vgpu-record.json", HUGE)),
    "an archive with an index of a TB": ("archive", tar_claiming("checkpoint/vgpu-index.bin", HUGE)),
    "an archive with a file of an EB": ("archive", tar_claiming("checkpoint/pages-2.img", 1 << 60)),
    "an archive with a spec.dump of a TB": ("archive", tar_claiming("spec.dump.2", HUGE)),
    "an archive with a pack of a TB": ("archive", tar_claiming("checkpoint/vgpu-pack-00000.bin", HUGE)),
    "a zstd window of 2 GiB": ("archive", zstd_of_window(31)),
    "a zstd window of 1 TiB": ("archive", zstd_of_window(40)),
    "a policy of a million brackets": ("policy", b"[" * 1_000_000),
    "a bundle of a million brackets": ("bundle", b"[" * 1_000_000),
    "an OCI index of a million brackets": ("layout", b"[" * 1_000_000),
    "an OCI index of a layer of an EB": ("layout", None),
    "frames of a preload of 4 GiB": ("frames", struct.pack("<IHHII", 0x55504756, 2, 1, 0xFFFFFFFF, 1)),
    "a line for the agent of deep objects": ("request", b'{"id":1,"verb":"x","args":' + b'{"a":' * 150_000),
}


def action_of(parse, data, folder):
    from gpu_state.preload_frames import FrameError, FrameReader
    from gpu_state.requests import Request
    from image_format.manifest import Manifest
    from image_format.record import Record
    from image_format.trust.bundle import Bundle
    from image_format.trust.policy import parse_default

    def frames():
        try:
            return list(FrameReader().feed(data))
        except FrameError as error:
            raise ImageError(where="frames", what=str(error)) from error

    def in_archive():
        (folder / "archive").write_bytes(data)
        return archive.verify_archive(folder / "archive", POLICY, threads=1)

    def in_layout():
        text = data
        if text is None:
            entry = {"mediaType": ocistore.MANIFEST_TYPE, **describe(b"x"), "size": 1 << 60}
            text = json.dumps({"manifests": [entry]}).encode()
        (folder / "oci-layout").write_text("{}")
        (folder / "index.json").write_bytes(text)
        return source.verify(str(folder), POLICY, threads=1)

    named = {
        "record": lambda: Record.from_bytes(data), "manifest": lambda: Manifest.from_bytes(data), "archive": in_archive,
        "policy": lambda: parse_default(data, Path("p")), "bundle": lambda: Bundle.from_bytes(data), "layout": in_layout,
        "frames": frames, "request": lambda: Request.from_line(data),
    }  # fmt: skip
    return named[parse] if isinstance(parse, str) else lambda: parse(data)


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_of_a_few_bytes_is_refused_in_little_memory(claim, tmp_path):
    outcome = in_little_memory(action_of(*CLAIMS[claim], tmp_path))
    assert outcome.startswith("ours "), outcome


def test_zero_chunks_of_many_lengths_cost_what_the_longest_costs():
    data = index_of_zero_chunks(4096)
    assert in_little_memory(lambda: chunk_index.from_bytes(data)) == "returned Index"
    spoilt = bytearray(data)
    spoilt[128 + 4096 * 64 + 4000 * 64] ^= 1
    with pytest.raises(ImageError, match="chunk 4000: its id is not that of zeros"):
        chunk_index.from_bytes(spoilt)


def test_a_pipe_in_place_of_an_archive_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    outcome = in_little_memory(lambda: archive.read_archive_claims(tmp_path / "pipe"))
    assert outcome.startswith("ours NoSuchImage"), outcome


def test_a_child_of_little_memory_is_one():
    assert in_little_memory(lambda: bytearray(4 << 30)).startswith("foreign MemoryError")
    assert in_little_memory(lambda: None) == "returned NoneType"


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_member_of_zeros_takes_time_but_no_memory(compression, tmp_path):
    data = bomb(400 << 20, COMPRESSIONS[compression])
    assert len(data) < 4 << 20
    (tmp_path / "a").write_bytes(data)
    outcome = in_little_memory(lambda: archive.verify_archive(tmp_path / "a", POLICY, threads=1))
    assert outcome == "returned VerifiedArchive"
