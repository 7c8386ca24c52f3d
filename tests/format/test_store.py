"""The store: what goes in comes out the same and is there once, whatever is killed, and nothing goes that is needed."""

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from image_format import chunk_index
from image_format.chunk_index import CHUNK_SIZE
from image_format.file_names import INDEX_NAME, is_pack
from image_format.references import reference_archive
from image_format.store import Store, placing
from image_format.store.identity import BulkFile, Extent, bulk_files, content_id, extents
from image_format.verifying import verify_directory
from tests.format import store_stage
from tests.format.store_stage import MIB, PAGES, Cut, Stage, in_child, make_archive, pattern_bytes
from vgpu_errors import (
    ContentElsewhere,
    ContentMismatch,
    FormatTooNew,
    ImageError,
    NoSuchCheckpoint,
    NoSuchImage,
    NotEnoughSpace,
    StillNeeded,
    StoreBusy,
    Truncated,
    UnexpectedEntry,
    Unsigned,
    VgpuError,
)


@pytest.fixture
def stage(tmp_path, node):
    return Stage(tmp_path, node)


def index_of(folder):
    return chunk_index.from_bytes((folder / INDEX_NAME).read_bytes())


def bulk_names(folder):
    return [file.name for file in bulk_files(index_of(folder))]


# ---- identity ------------------------------------------------------------------------------------


def test_packs_and_large_files_are_bulk_and_nothing_else(stage):
    folder = stage.seal()
    names = bulk_names(folder)
    assert PAGES in names
    assert [name for name in names if is_pack(name)] == sorted(stage.staged.packs)
    assert set(names) == {PAGES, *stage.staged.packs}


def test_an_identity_says_size_places_and_ids():
    first, second = Extent(0, 10, b"a" * 32), Extent(CHUNK_SIZE, 10, b"b" * 32)
    base = content_id(100, [first, second])
    assert base == content_id(100, [second, first])
    others = [
        content_id(101, [first, second]),
        content_id(100, [first]),
        content_id(100, [first, second._replace(offset=2 * CHUNK_SIZE)]),
        content_id(100, [first, second._replace(length=11)]),
        content_id(100, [first, second._replace(id=b"c" * 32)]),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_extents_cover_a_file_from_its_beginning_to_its_end(stage):
    index = index_of(stage.seal(pages=9 * MIB))
    covered = extents(index)[PAGES]
    assert [(extent.offset, extent.length) for extent in covered] == [
        (0, CHUNK_SIZE),
        (CHUNK_SIZE, CHUNK_SIZE),
        (2 * CHUNK_SIZE, MIB),
    ]


# ---- in and out ----------------------------------------------------------------------------------


def test_a_stored_checkpoint_is_a_sealed_directory_that_shares_its_bulk(stage, policy):
    folder = stage.seal()
    (folder / "dump.log").write_text("not part of it")
    kept = stage.store.add(folder)
    verified = verify_directory(kept.path, policy)
    assert verified.manifest_digest == kept.manifest_digest == kept.path.name
    assert (kept.container_id, kept.generation, kept.mode) == ("c" * 64, 1, "staged")
    assert not (kept.path / "dump.log").exists()
    for name in os.listdir(kept.path):
        assert (kept.path / name).read_bytes() == (folder / name).read_bytes()
        assert (kept.path / name).stat().st_mode & 0o777 == 0o600
        assert (kept.path / name).samefile(folder / name) is (name in bulk_names(folder))
    verify_directory(folder, policy)


def test_adding_twice_is_adding_once(stage):
    folder = stage.seal()
    first = stage.store.add(folder)
    before = stage.everything()
    assert stage.store.add(folder) == first
    assert stage.everything() == before


def test_two_checkpoints_share_what_they_have_in_common(stage, policy):
    first = stage.store.add(stage.seal("one"))
    second = stage.store.add(stage.seal("two", generation=2, pages_seed=2))
    for name in stage.staged.packs:
        assert (first.path / name).samefile(second.path / name)
    assert not (first.path / PAGES).samefile(second.path / PAGES)
    assert len(stage.contents()) == len(stage.staged.packs) + 2
    usage = {entry.checkpoint.generation: entry for entry in stage.store.usage().checkpoints}
    packs = sum(map(len, stage.staged.packs.values()))
    assert usage[1].shared_bytes == usage[2].shared_bytes == packs
    assert usage[1].unique_bytes >= 3 * MIB
    total = stage.store.usage()
    assert total.total_bytes == packs + usage[1].unique_bytes + usage[2].unique_bytes
    assert (total.incoming_bytes, total.unused_bytes) == (0, 0)
    for checkpoint in (first, second):
        verify_directory(checkpoint.path, policy)


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_where_no_link_can_be_made_content_is_copied(stage, policy, monkeypatch, error):
    folder, real = stage.seal(), os.link

    def link(source, target, **kwargs):
        if Path(source).parent == folder:
            raise OSError(error, os.strerror(error))
        return real(source, target, **kwargs)

    monkeypatch.setattr(os, "link", link)
    kept = stage.store.add(folder)
    verify_directory(kept.path, policy)
    assert not (kept.path / PAGES).samefile(folder / PAGES)
    assert (kept.path / PAGES).stat().st_nlink == 2


def test_a_store_without_any_hard_links_still_works(stage, policy, monkeypatch):
    def link(source, target, **kwargs):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    kept = stage.store.add(stage.seal())
    verify_directory(kept.path, policy)
    stage.store.gc()
    verify_directory(kept.path, policy)


@pytest.mark.skipif(os.stat("/dev/shm").st_dev == os.stat("/tmp").st_dev, reason="one file system")
def test_a_checkpoint_on_another_file_system(stage, policy, tmp_path):
    other = Path("/dev/shm") / f"vgpu-test-{os.getpid()}"
    shutil.copytree(stage.seal(), other)
    try:
        kept = stage.store.add(other)
        verify_directory(kept.path, policy)
        names = bulk_names(other)
        for name in names:
            (other / name).unlink()
        stage.store.bring_back(kept.manifest_digest, names, other)
        verify_directory(other, policy)
    finally:
        shutil.rmtree(other)


def test_files_that_others_may_write_to_are_copied(stage):
    folder = stage.seal()
    (folder / PAGES).chmod(0o666)
    kept = stage.store.add(folder)
    assert not (kept.path / PAGES).samefile(folder / PAGES)
    assert (kept.path / PAGES).stat().st_mode & 0o777 == 0o600


def test_links_are_not_made_where_the_caller_wants_none(stage):
    folder = stage.seal()
    kept = stage.store.add(folder, links=False)
    assert (folder / PAGES).stat().st_nlink == 1
    assert kept.path.exists()


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda folder: (folder / "vgpu-signature.json").unlink(), Unsigned),
        (lambda folder: (folder / PAGES).unlink(), UnexpectedEntry),
        (lambda folder: os.truncate(folder / PAGES, 5), Truncated),
        (lambda folder: (folder / "extra.img").touch(), UnexpectedEntry),
        (lambda folder: (folder / "link.img").symlink_to("/etc/shadow"), UnexpectedEntry),
    ],
)
def test_what_is_not_a_whole_sealed_directory_is_not_taken(stage, spoil, error):
    folder = stage.seal()
    spoil(folder)
    with pytest.raises(error):
        stage.store.add(folder)
    assert stage.everything() == []


def test_a_full_disk_is_said_and_leaves_nothing(stage, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(NotEnoughSpace):
        stage.store.add(stage.seal(), links=False)
    assert stage.everything() == []


def test_content_comes_back_from_its_checkpoint_or_from_another_with_the_same_content(stage, policy):
    folder = stage.seal()
    kept = stage.store.add(folder)
    names = bulk_names(folder)
    for name in names:
        (folder / name).unlink()
    stage.store.bring_back(kept.manifest_digest, names, folder)
    verify_directory(folder, policy)
    later = stage.seal("later", generation=2)
    index = index_of(later)
    for name in names:
        (later / name).unlink()
    stage.store.bring_back("0" * 64, names, later, index=index)
    verify_directory(later, policy)


@pytest.mark.parametrize("names", [[PAGES, "nothing.img"], ["core-1.img"], ["../x"], ["vgpu-pack-09999.bin"]])
def test_what_the_store_lacks_or_does_not_share_leaves_the_directory_as_it_was(stage, names):
    folder = stage.seal()
    kept = stage.store.add(folder)
    (folder / PAGES).unlink()
    before = sorted(os.listdir(folder))
    with pytest.raises(ContentElsewhere):
        stage.store.bring_back(kept.manifest_digest, names, folder)
    assert sorted(os.listdir(folder)) == before


def test_a_name_that_is_there_is_never_replaced(stage):
    folder = stage.seal()
    kept = stage.store.add(folder)
    first = min(stage.staged.packs)
    (folder / first).unlink()
    with pytest.raises(ImageError):
        stage.store.bring_back(kept.manifest_digest, [first, PAGES], folder)
    assert not (folder / first).exists()
    assert (folder / PAGES).exists()


# ---- finding -------------------------------------------------------------------------------------


def test_finding_by_digest_container_and_generation(stage):
    first = stage.store.add(stage.seal("one", day=1))
    second = stage.store.add(stage.seal("two", generation=2, day=2))
    other = stage.store.add(stage.seal("three", container="d" * 64, day=3))
    find = stage.store.find
    assert find(first.manifest_digest) == find(first.manifest_digest[:12]) == first
    assert find(f"sha256:{first.manifest_digest}") == first
    assert find("c" * 64) == find("c" * 12) == find("name-cccc") == second
    assert find("cccc:1") == find("name-cccc:1") == first
    assert stage.store.latest_of("c" * 64) == second
    assert stage.store.latest_of("d" * 64) == other
    assert stage.store.latest_of("e" * 64) is None
    assert [entry.generation for entry in stage.store.checkpoints()] == [1, 2, 1]
    for unknown in ("cccc:9", "nothing", "ccc", "", ":1", "e" * 64):
        with pytest.raises(NoSuchCheckpoint):
            find(unknown)


def test_an_ambiguous_word_is_refused(stage):
    stage.store.add(stage.seal("one", container="abcd" + "0" * 60))
    stage.store.add(stage.seal("two", container="abcd" + "1" * 60))
    with pytest.raises(NoSuchCheckpoint, match="several"):
        stage.store.find("abcd")


def test_a_checkpoint_with_a_broken_record_is_listed_and_stays(stage):
    kept = stage.store.add(stage.seal())
    (kept.path / "vgpu-record.json").write_bytes(b"{")
    (entry,) = stage.store.checkpoints()
    assert entry.problem
    assert stage.store.gc(keep=0).removed == ()
    assert stage.store.find(kept.manifest_digest[:8]).problem
    stage.store.remove(entry)
    assert stage.everything() == []


# ---- a kill at every step ------------------------------------------------------------------------


def steps_of(stage, work):
    with pytest.MonkeyPatch.context() as patch:
        cut = Cut(patch, -1)
        work()
    return cut.count


@pytest.mark.parametrize("links", [True, False])
def test_a_kill_at_any_step_of_an_add_leaves_all_or_nothing_and_gc_sweeps(stage, policy, links):
    stage.store.add(stage.seal("base"))
    base = stage.everything()
    folder = stage.seal("image", generation=2, pages_seed=2)
    digest = stage.store.add(folder, links=links).manifest_digest
    whole = stage.everything()
    stage.store.remove(stage.store.find(digest))
    steps = steps_of(stage, lambda: stage.store.add(folder, links=links))
    assert steps > 10
    outcomes = []
    for at in range(1, steps + 1):
        if stage.store.has(digest):
            stage.store.remove(stage.store.find(digest))
        assert stage.everything() == base
        with pytest.MonkeyPatch.context() as patch:
            assert in_child(patch, lambda: stage.store.add(folder, links=links), at) == 9
        is_there = stage.store.has(digest)
        outcomes.append(is_there)
        stage.store.gc()
        assert stage.everything() == (whole if is_there else base)
        if is_there:
            verify_directory(stage.store.directory_of(digest), policy)
        verify_directory(folder, policy)
        stage.store.add(folder, links=links)
        assert stage.everything() == whole
    assert outcomes == sorted(outcomes)  # one step is the commit
    assert {True, False} == set(outcomes)


def test_a_kill_at_any_step_of_a_gc_leaves_what_the_next_one_finishes(stage, policy):
    folders = [stage.seal(f"g{n}", generation=n, pages_seed=n, day=n) for n in (1, 2, 3)]
    kept = stage.store.add(folders[2])
    alone = stage.everything()

    def fill():
        for folder in folders:
            stage.store.add(folder)

    fill()
    steps = steps_of(stage, lambda: stage.store.gc(keep=1))
    assert steps > 5
    for at in range(1, steps + 1):
        fill()
        with pytest.MonkeyPatch.context() as patch:
            assert in_child(patch, lambda: stage.store.gc(keep=1), at) == 9
        for entry in stage.store.checkpoints():
            verify_directory(entry.path, policy)
        stage.store.gc(keep=1)
        assert stage.everything() == alone
        verify_directory(kept.path, policy)


def test_an_error_at_any_step_of_an_add_leaves_nothing(stage):
    folder = stage.seal()
    digest = stage.store.add(folder).manifest_digest
    stage.store.remove(stage.store.find(digest))
    steps = steps_of(stage, lambda: stage.store.add(folder))

    def strike():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for at in range(1, steps + 1):
        if stage.store.has(digest):
            stage.store.remove(stage.store.find(digest))
        with pytest.MonkeyPatch.context() as patch:
            Cut(patch, at, strike)
            with contextlib.suppress(VgpuError):
                stage.store.add(folder)
        stage.store.gc()
        assert stage.everything() == [] or stage.store.has(digest)


# ---- gc ------------------------------------------------------------------------------------------


def test_gc_keeps_the_newest_of_each_container(stage):
    made = {
        (container, n): stage.store.add(stage.seal(f"{container}{n}", container=container * 64, generation=n, day=n))
        for container in "cd"
        for n in (1, 2, 3)
    }
    dry = stage.store.gc(keep=1, dry_run=True)
    assert len(stage.store.checkpoints()) == 6
    done = stage.store.gc(keep=1)
    assert [entry.manifest_digest for entry in done.removed] == [entry.manifest_digest for entry in dry.removed]
    assert done.freed_bytes == dry.freed_bytes > 0
    assert {entry.manifest_digest for entry in stage.store.checkpoints()} == {
        made["c", 3].manifest_digest,
        made["d", 3].manifest_digest,
    }
    assert stage.store.gc().removed == ()


def test_gc_by_age_and_both(stage):
    entries = [stage.store.add(stage.seal(f"g{n}", generation=n, day=n)) for n in (1, 2, 3)]
    for entry in entries[:2]:
        os.utime(entry.path, (1, 1))
    assert len(stage.store.gc(older_than_s=3600, keep=2, dry_run=True).removed) == 1
    assert len(stage.store.gc(older_than_s=3600, dry_run=True).removed) == 2
    assert len(stage.store.gc(older_than_s=3600).removed) == 2


def test_freed_bytes_are_what_the_disk_gets_back(stage):
    one, two = stage.seal("one", day=1), stage.seal("two", generation=2, pages_seed=2, day=2)
    for folder in (one, two):
        stage.store.add(folder)
        shutil.rmtree(folder)
    before = stage.store.usage().total_bytes
    done = stage.store.gc(keep=1)
    assert before - stage.store.usage().total_bytes == done.freed_bytes
    assert 3 * MIB < done.freed_bytes < 4 * MIB


def test_content_that_an_image_path_still_has_is_not_called_freed(stage):
    stage.store.add(stage.seal())
    assert stage.store.gc(keep=0).freed_bytes < MIB


HOLD = """
import sys, time
from image_format.store import Store
with Store.open(sys.argv[1]).lease(sys.argv[2], "a transfer"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lease_keeps_gc_away_until_its_holder_lets_go_or_dies(stage):
    kept = stage.store.add(stage.seal())
    with stage.store.lease(kept.manifest_digest, "a test") as directory:
        assert directory == kept.path
        ((entry, why),) = stage.store.gc(keep=0).kept
        assert entry == kept
        assert "a test" in why
        with pytest.raises(StillNeeded, match="a test"):
            stage.store.remove(kept, force=True)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOLD,
            str(stage.store.root),
            kept.manifest_digest,
        ],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        assert [(lease.why, lease.pid) for lease in stage.store.leases()] == [("a transfer", holder.pid)]
        assert stage.store.gc(keep=0).removed == ()
        holder.kill()
        holder.wait(10)
        assert stage.store.leases() == ()
        assert [entry.manifest_digest for entry in stage.store.gc(keep=0).removed] == [kept.manifest_digest]
        assert stage.everything() == []
    finally:
        holder.kill()
        holder.wait(10)


def test_a_reference_keeps_gc_away_until_somebody_forgets_it(stage):
    kept = stage.store.add(stage.seal())
    note = stage.store.refer(kept.manifest_digest, "/backup/ref.tar")
    assert stage.store.gc(keep=0).kept == ((kept, "/backup/ref.tar refers to it"),)
    with pytest.raises(StillNeeded, match=r"/backup/ref\.tar"):
        stage.store.remove(kept)
    assert stage.store.gc(keep=0, references_older_than_s=3600).removed == ()
    os.utime(note, (1, 1))
    dry = stage.store.gc(keep=0, references_older_than_s=3600, dry_run=True)
    assert len(dry.removed) == 1
    assert note.exists()
    note.write_bytes(b"damaged")
    assert stage.store.gc(keep=0).kept[0][0] == kept
    stage.store.remove(kept, force=True)
    assert stage.everything() == []
    with pytest.raises(NoSuchCheckpoint):
        stage.store.refer(kept.manifest_digest, "too late")


def test_a_lease_on_what_is_not_there_is_refused(stage):
    with pytest.raises(NoSuchCheckpoint), stage.store.lease("0" * 64, "a test"):
        pass
    with pytest.raises(ImageError), stage.store.lease("../..", "a test"):
        pass
    assert stage.everything() == []


def test_gc_waits_for_its_turn_and_says_so(stage):
    store = Store.open(stage.store.root, deadline_s=0.2)
    with open(store.layout.lock, "w+b") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(StoreBusy):
            store.gc()
        stage.store.add(stage.seal())
        fcntl.flock(file, fcntl.LOCK_EX)
        started = time.monotonic()
        with pytest.raises(StoreBusy):
            store.add(stage.seal("two", generation=2))
        assert time.monotonic() - started < 2


# ---- receiving -----------------------------------------------------------------------------------


def receive(stage, folder, digest, *, names=None):
    """As a pull does it: what is there already, then the rest, then the commit."""
    with stage.store.receive(digest) as incoming:
        reused = incoming.reuse(index_of(folder))
        for path in folder.iterdir():
            if path.name not in os.listdir(incoming.image) and (names is None or path.name in names):
                shutil.copy(path, incoming.image)
        return reused, incoming.commit()


def digest_of(stage, folder):
    other = Store.open(stage.folder / "scratch-store")
    return other.add(folder, links=False).manifest_digest


def test_a_received_checkpoint_takes_what_is_there_and_is_whole(stage, policy):
    first = stage.store.add(stage.seal("one"))
    folder = stage.seal("two", generation=2, pages_seed=2)
    digest = digest_of(stage, folder)
    reused, path = receive(stage, folder, digest)
    assert set(reused) == set(stage.staged.packs)
    verify_directory(path, policy)
    assert (path / min(reused)).samefile(first.path / min(reused))
    assert (path / PAGES).stat().st_nlink == 2
    assert os.listdir(stage.store.root / "incoming") == []


def test_a_broken_transfer_is_resumed_and_gc_leaves_it_for_a_day(stage, policy):
    folder = stage.seal()
    digest = digest_of(stage, folder)
    with stage.store.receive(digest) as incoming:
        shutil.copy(folder / PAGES, incoming.image)
        (incoming.scratch / "half").write_bytes(b"half")
        with pytest.raises(StoreBusy), stage.store.receive(digest):
            pass
        assert stage.store.gc(partial_older_than_s=-10).swept == ()  # it is running
        assert stage.store.usage().incoming_bytes >= 3 * MIB
    assert stage.store.gc().swept == ()
    with stage.store.receive(digest) as incoming:
        assert (incoming.image / PAGES).exists()
        assert (incoming.scratch / "half").exists()
    receive(stage, folder, digest)
    verify_directory(stage.store.directory_of(digest), policy)
    with stage.store.receive("1" * 64):
        pass
    assert stage.store.gc(partial_older_than_s=-10).swept == (f"incoming/receiving-{'1' * 64}",)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda image: (image / "vgpu-signature.json").unlink(), Unsigned),
        (lambda image: (image / "vgpu-index.bin").unlink(), Unsigned),
        (lambda image: (image / PAGES).unlink(), UnexpectedEntry),
        (lambda image: os.truncate(image / PAGES, 1), Truncated),
        (lambda image: (image / "more.img").touch(), UnexpectedEntry),
        (lambda image: (image / "dump.log").touch(), UnexpectedEntry),
        (lambda image: (image / "sub").mkdir(), UnexpectedEntry),
        (lambda image: (image / "vgpu-manifest.json").write_bytes(b"{}"), ContentMismatch),
    ],
)
def test_a_commit_of_something_else_is_refused(stage, spoil, error):
    folder = stage.seal()
    digest = digest_of(stage, folder)
    with stage.store.receive(digest) as incoming:
        for path in folder.iterdir():
            shutil.copy(path, incoming.image)
        spoil(incoming.image)
        with pytest.raises(error):
            incoming.commit()
    assert not stage.store.has(digest)
    assert stage.contents() == []


# ---- proof ---------------------------------------------------------------------------------------


def test_verify_reads_shared_content_once_and_names_what_is_damaged(stage, policy):
    first = stage.store.add(stage.seal("one"))
    second = stage.store.add(stage.seal("two", generation=2, pages_seed=2))
    proofs = list(stage.store.verify(policy))
    assert [proof.problem for proof in proofs] == [None, None]
    packs = sum(map(len, stage.staged.packs.values()))
    assert proofs[1].shared_bytes == packs
    with (second.path / PAGES).open("r+b") as file:
        file.seek(MIB)
        file.write(b"damage")
    by_digest = {proof.checkpoint.manifest_digest: proof.problem for proof in stage.store.verify(policy)}
    assert by_digest[first.manifest_digest] is None
    assert isinstance(by_digest[second.manifest_digest], ContentMismatch)
    pack = min(stage.staged.packs)
    with (second.path / pack).open("r+b") as file:
        file.write(b"damage")
    assert all(proof.problem for proof in stage.store.verify(policy))


@pytest.mark.parametrize("links", [True, False])
def test_what_a_disk_has_changed_is_not_shared_with_later_checkpoints(stage, policy, links):
    first = stage.store.add(stage.seal("one"), links=False)
    with (first.path / PAGES).open("r+b") as file:
        file.write(b"damage")
    second = stage.store.add(stage.seal("two", generation=2), links=links)
    assert [type(proof.problem) for proof in stage.store.verify(policy)] == [ContentMismatch, type(None)]
    third = stage.store.add(stage.seal("three", generation=3), links=links)
    assert (third.path / PAGES).samefile(second.path / PAGES)
    stage.store.remove(first)
    assert [proof.problem for proof in stage.store.verify(policy)] == [None, None]


def test_an_archive_whose_content_is_damaged_in_the_store_is_packed_all_the_same(stage, policy, tmp_path):
    folder = stage.seal("one")
    first = stage.store.add(folder, links=False)
    with (first.path / PAGES).open("r+b") as file:
        file.write(b"damage")
    whole = make_archive(tmp_path / "whole.tar", stage.seal("two", generation=2))
    packed = reference_archive.pack(whole, tmp_path / "small.tar", policy, stage.store)
    verify_directory(stage.store.directory_of(packed.manifest_digest), policy)


def test_a_damaged_checkpoint_can_be_replaced(stage, policy):
    folder = stage.seal()
    kept = stage.store.add(folder, links=False)
    with (kept.path / PAGES).open("r+b") as file:
        file.write(b"damage")
    stage.store.remove(kept)
    stage.store.gc()
    stage.store.add(folder)
    assert [proof.problem for proof in stage.store.verify(policy)] == [None]


# ---- the folder itself ---------------------------------------------------------------------------


def test_a_store_is_for_root_alone(stage, tmp_path):
    assert stage.store.root.stat().st_mode & 0o777 == 0o700
    stage.store.root.chmod(0o770)
    with pytest.raises(ImageError, match="others"):
        Store.open(stage.store.root)
    with pytest.raises(NoSuchImage):
        Store.open(tmp_path / "none", create=False)
    (tmp_path / "file").touch()
    with pytest.raises(ImageError):
        Store.open(tmp_path / "file")


def test_a_store_of_a_later_layout_is_refused(stage):
    (stage.store.root / "layout").write_text("vgpu-store-2\n")
    with pytest.raises(FormatTooNew, match="vgpu-store-2"):
        Store.open(stage.store.root)


def test_a_file_that_is_replaced_while_it_is_linked_is_noticed(stage, monkeypatch, tmp_path):
    source, real = tmp_path / "source", os.link
    source.write_bytes(b"x" * MIB)

    def link(path, target, **kwargs):
        other = tmp_path / "other"
        other.write_bytes(b"y" * MIB)
        other.replace(path)
        return real(path, target, **kwargs)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ImageError, match="replaced"):
        placing.place(source, tmp_path / "target", MIB, links=True)
    assert not (tmp_path / "target").exists()


def test_bulk_files_are_what_they_are_called(stage):
    assert all(isinstance(file, BulkFile) and len(file.content) == 64 for file in bulk_files(index_of(stage.seal())))


# ---- what comes and goes at the same time ----------------------------------------------------------


def test_two_equal_files_of_a_checkpoint_stay_two(stage, policy, monkeypatch):
    files = store_stage.base_files()
    monkeypatch.setattr(store_stage, "base_files", lambda: {**files, "pages-3.img": pattern_bytes(3 * MIB, 1)})
    kept = stage.store.add(stage.seal("one"))
    verify_directory(kept.path, policy)
    again = stage.store.add(stage.seal("two", generation=2))
    verify_directory(again.path, policy)
    for name in (PAGES, "pages-3.img"):
        assert (again.path / name).samefile(kept.path / name)
    stage.store.gc()
    assert [proof.problem for proof in stage.store.verify(policy)] == [None, None]


def test_what_goes_away_under_gc_and_usage_is_no_error(stage, monkeypatch):
    """A transfer that is given up while gc looks at it, at every look."""
    stage.store.add(stage.seal())
    layout = stage.store.layout

    def leave():
        for folder in (layout.incoming / "adding-gone", layout.incoming / "receiving-gone", layout.trash / "gone"):
            (folder / "image").mkdir(parents=True, exist_ok=True)
            for number in range(3):
                (folder / "image" / f"{number}").touch()

    def vanish():
        for folder in (*layout.incoming.iterdir(), *layout.trash.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)

    for work in (stage.store.gc, stage.store.usage, lambda: stage.store.gc(keep=0, partial_older_than_s=-10)):
        leave()
        with monkeypatch.context() as patch:
            count = Looks(patch)
            work()
        for at in range(1, count.count + 1):
            leave()
            with monkeypatch.context() as patch:
                Looks(patch, at, vanish)
                work()


class Looks:
    """Strikes at one of the looks at a folder or a file."""

    def __init__(self, patch, at=0, strike=None):
        self.count = 0
        for name in ("scandir", "lstat", "listdir", "stat", "rename"):
            patch.setattr(os, name, self._wrap(getattr(os, name), at, strike))

    def _wrap(self, real, at, strike):
        def call(*args, **kwargs):
            self.count += 1
            if self.count == at:
                strike()
            return real(*args, **kwargs)

        return call


def test_removing_what_is_gone_says_so(stage):
    kept = stage.store.add(stage.seal())
    stage.store.remove(kept)
    with pytest.raises(NoSuchCheckpoint):
        stage.store.remove(kept)


def test_a_damaged_note_is_as_old_as_its_file(stage):
    kept = stage.store.add(stage.seal())
    stage.store.refer(kept.manifest_digest, "x").write_bytes(b"{")
    assert stage.store.gc(keep=0, references_older_than_s=3600).removed == ()


def test_a_transfer_that_took_long_is_kept_for_a_day_from_its_end(stage):
    with stage.store.receive("1" * 64) as incoming:
        os.utime(incoming.folder, (1, 1))
    assert stage.store.gc().swept == ()


def test_a_half_file_of_an_earlier_try_is_not_taken_for_whole(stage, policy):
    first = stage.store.add(stage.seal("one"))
    folder = stage.seal("two", generation=2)
    digest = digest_of(stage, folder)
    with stage.store.receive(digest) as incoming:
        (incoming.image / PAGES).write_bytes(bytes(3 * MIB))
        os.link(first.path / min(stage.staged.packs), incoming.image / min(stage.staged.packs))
        reused = incoming.reuse(index_of(folder))
        assert PAGES not in reused
        assert set(reused) == set(stage.staged.packs)
        assert (incoming.image / PAGES).stat().st_nlink == 1


def test_content_is_compared_without_holding_gc_up(stage, monkeypatch):
    stage.store.add(stage.seal("one"), links=False)
    seen = []

    def look(path, size, covered):
        seen.append(Store.open(stage.store.root, deadline_s=0.2).gc().removed)
        return True

    monkeypatch.setattr("image_format.store.incoming.holds", look)
    stage.store.add(stage.seal("two", generation=2), links=False)
    assert seen
