"""Cut at every call that changes the disk, sealing and unpacking leave nothing that any reader takes for whole.

Every such call goes through the `os` module: opening for writing, writes, sizes, renames, removals, synchronising.
At the n-th one the process is killed before it, killed with half of it written, or the call fails; for every n.
"""

import contextlib
import errno
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from image_format import chunk_index
from image_format.archives.archive import verify_archive
from image_format.archives.small_files import write_small_files
from image_format.file_names import FRAGMENT_NAME, PARTIAL_PREFIX, SIGNATURE_NAME
from image_format.packs.pack_streams import measure_packs, open_pack
from image_format.packs.packed import packed_index, plan_packs
from image_format.packs.unpacking import Unpacker
from image_format.sealing import seal
from image_format.trust.policy import Policy, TrustedKey
from image_format.verifying import verify_directory
from image_format.vram import VramFragment, write_fragment
from tests.format import independent_reader
from tests.format.make_staged_vectors import large
from tests.format.make_vectors import TRUSTED, base_files, pattern
from tests.format.packed_images import Image, chunks, text
from vgpu_errors import VgpuError

CALLS = ("open", "write", "pwrite", "ftruncate", "posix_fallocate", "fsync", "replace", "unlink")
WRITES = ("write", "pwrite")
TRUSTING = Policy(keys={TRUSTED.key_id: TrustedKey("vectors", Path("trusted.pub"), TRUSTED.public)})
LENIENT = replace(TRUSTING, default="allow-unsigned")
CHUNK = 1 << 20


class Cut:
    """Counts the calls that change the disk and strikes at one of them."""

    def __init__(self, patch, at, how):
        self.count, self._at, self._how = 0, at, how
        for name in CALLS:
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name, real):
        def call(*args, **kwargs):
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return real(*args, **kwargs)
            self.count += 1
            if self.count == self._at:
                self._strike(name, real, args)
            return real(*args, **kwargs)

        return call

    def _strike(self, name, real, args):
        if self._how == "error":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._how == "half" and name in WRITES:
            half = len(args[1]) // 2
            real(args[0], args[1][:half], *args[2:])
        os._exit(9)


def steps_of(work):
    with pytest.MonkeyPatch.context() as patch:
        cut = Cut(patch, -1, "")
        work()
    return cut.count


def run_and_cut(work, at, how):
    """True where it was cut; in a child, because a kill runs no handler."""
    pid = os.fork()
    if pid == 0:
        status = 0
        with pytest.MonkeyPatch.context() as patch:
            Cut(patch, at, how)
            try:
                work()
            except VgpuError:
                status = 9
            except BaseException:  # noqa: BLE001 - the parent tells
                status = 1
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 9), f"step {at}: exit code {status}"
    return status == 9


def archive_of(folder, path):
    with tarfile.open(path, "w") as tar:
        for name in sorted(os.listdir(folder)):
            tar.add(folder / name, f"checkpoint/{name}")
    return path


def readers_that_take(folder, scratch):
    """Which readers find a sealed checkpoint there."""
    archive = archive_of(folder, scratch / "cut.tar")
    readers = {
        "directory": lambda: verify_directory(folder, TRUSTING),
        "archive": lambda: verify_archive(archive, TRUSTING),
        "independent": lambda: independent_reader.verify(folder, [TRUSTED.public.to_pem()]),
    }
    return [name for name, read in readers.items() if _takes(read)]


def _takes(read):
    try:
        read()
    except (VgpuError, independent_reader.RefusedError):
        return False
    return True


# ---- unpacking -----------------------------------------------------------------------------------


class Transfer:
    """A checkpoint in packs, to be unpacked again and again."""

    def __init__(self, tmp_path):
        files = {"core-1.img": b"x" * 300, "empty.img": b"", "log.img": text(CHUNK + 5000)}
        self.source = tmp_path / "sealed"
        objects = {1: [*chunks(2, 1, 0, CHUNK), bytes(CHUNK), pattern(100, 8)], 2: [pattern(5000, 9)]}
        self.index = Image(files, objects, slots_from=1, chunk_size=CHUNK).write(self.source)
        self.plan = measure_packs(plan_packs(self.index), self.source)
        self.packed = chunk_index.from_bytes(chunk_index.to_bytes(packed_index(self.plan)))
        out = io.BytesIO()
        write_small_files(self.index, self.source, out)
        self.small_files = out.getvalue()
        names = ("vgpu-index.bin", "vgpu-record.json", "vgpu-manifest.json", SIGNATURE_NAME)
        self.documents = {name: (self.source / name).read_bytes() for name in names}
        self.size = sum(region.length for region in self.index.regions)

    def unpack(self, into):
        """As a pull does it: look at what is there, bring the rest, finish."""
        with Unpacker(self.index, self.packed, into) as unpacker:
            unpacker.find_present(threads=1)
            for number in range(unpacker.pack_count):
                for stretch in unpacker.missing(number):
                    with open_pack(self.plan, number, self.source) as stream:
                        stream.seek(stretch.start)
                        unpacker.write(number, stream, stretch)
            unpacker.write_small_files(io.BytesIO(self.small_files))
            unpacker.finish(self.documents)


@pytest.fixture(scope="module")
def transfer(tmp_path_factory):
    return Transfer(tmp_path_factory.mktemp("transfer"))


@pytest.mark.parametrize("how", ["kill", "half", "error"])
def test_unpacking_cut_at_any_step_leaves_nothing_that_reads_as_whole(transfer, tmp_path, how):
    (tmp_path / "count").mkdir()
    steps = steps_of(lambda: transfer.unpack(tmp_path / "count"))
    assert steps > 40
    taken = []
    for at in range(1, steps + 1):
        into = tmp_path / f"{at}"
        into.mkdir()
        assert run_and_cut(lambda into=into: transfer.unpack(into), at, how)
        if readers_that_take(into, tmp_path):
            taken.append(at)
        expect_honest(into, transfer.size)
        transfer.unpack(into)
        assert verify_directory(into, TRUSTING).bytes_checked == transfer.size
        remove(into)
    # The last step synchronises the directory after the signature's rename.
    assert taken == [steps]


def expect_honest(folder, size):
    """Whoever accepts unsigned checkpoints is told, or gets all of it."""
    if not os.listdir(folder):
        return
    with contextlib.suppress(VgpuError):
        found = verify_directory(folder, LENIENT)
        assert found.record is not None
        assert found.bytes_checked == size


def remove(folder):
    for entry in folder.iterdir():
        entry.unlink()
    folder.rmdir()


def test_unpacking_over_an_older_checkpoint_takes_its_signature_first(transfer, tmp_path):
    (tmp_path / "a").mkdir()
    transfer.unpack(tmp_path / "a")
    steps = steps_of(lambda: transfer.unpack(tmp_path / "a"))
    taken = []
    for at in range(1, steps + 1):
        transfer.unpack(tmp_path / "a")
        assert run_and_cut(lambda: transfer.unpack(tmp_path / "a"), at, "kill")
        if readers_that_take(tmp_path / "a", tmp_path):
            taken.append(at)
    # Before the old signature went, and after the new one came.
    assert taken == [1, steps]


# ---- sealing -------------------------------------------------------------------------------------


def staged_folder(folder, staged):
    folder.mkdir()
    for name, data in {**base_files(), **staged.packs}.items():
        (folder / name).write_bytes(data)
    write_fragment(folder / FRAGMENT_NAME, VramFragment.of(staged.regions))


@pytest.mark.parametrize("how", ["kill", "half", "error"])
def test_sealing_cut_at_any_step_leaves_nothing_that_reads_as_whole(tmp_path, how):
    staged = large()

    def work(folder):
        seal(folder, staged.record, TRUSTED, vram=folder / FRAGMENT_NAME)

    staged_folder(tmp_path / "count", staged)
    steps = steps_of(lambda: work(tmp_path / "count"))
    assert steps > 15
    taken = []
    for at in range(1, steps + 1):
        folder = tmp_path / f"{at}"
        staged_folder(folder, staged)
        cut = run_and_cut(lambda folder=folder: work(folder), at, how)
        if readers_that_take(folder, tmp_path):
            taken.append((at, cut))
        kept = {name for name in os.listdir(folder) if name in staged.packs}
        assert kept == set(staged.packs), f"step {at} lost a pack"
        remove(folder)
    # An error in the last step, synchronising, takes the seal back; a kill there leaves it.
    assert taken == ([] if how == "error" else [(steps, True)])


def test_a_cut_seal_is_no_plain_unsigned_checkpoint(tmp_path):
    """Where unsigned checkpoints are allowed and no document is left, the partial one tells."""
    for name, data in base_files().items():
        (tmp_path / name).write_bytes(data)
    verify_directory(tmp_path, LENIENT)
    (tmp_path / f"{PARTIAL_PREFIX}vgpu-index.bin").write_bytes(b"half")
    with pytest.raises(VgpuError, match="cut off"):
        verify_directory(tmp_path, LENIENT)
