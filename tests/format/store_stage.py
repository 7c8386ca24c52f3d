"""Sealed checkpoints with bulk in them, and a store beside them, for the tests of the store and of reference mode."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import zstandard

from image_format.file_names import FRAGMENT_NAME
from image_format.record import Container
from image_format.sealing import seal
from image_format.store import Store
from image_format.trust.keys import load_signing_key
from image_format.vram import VramFragment, write_fragment
from tests.format.make_staged_vectors import large
from tests.format.make_vectors import base_files

PAGES = "pages-2.img"
MIB = 1 << 20


def pattern_bytes(size, seed):
    """Bytes that differ from chunk to chunk and from seed to seed."""
    return b"".join(b"%015d\n" % (seed * 10**9 + n) for n in range(-(-size // 16)))[:size]


class Stage:
    """A folder with a store, and checkpoints made on request."""

    def __init__(self, folder: Path, node: Path):
        self.folder = folder
        self.key = load_signing_key(node / "node.key")
        self.store = Store.open(folder / "store", deadline_s=5)
        self.staged = large()

    def seal(self, name="image", *, container="c" * 64, generation=1, pages_seed=1, pages=3 * MIB, day=1):
        """A sealed directory: CRIU's small files, 3 MiB of pages, the packs of the staged vector."""
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        for file, data in base_files().items():
            (folder / file).write_bytes(data)
        (folder / PAGES).write_bytes(pattern_bytes(pages, pages_seed))
        for file, data in self.staged.packs.items():
            (folder / file).write_bytes(data)
        write_fragment(folder / FRAGMENT_NAME, VramFragment.of(self.staged.regions))
        record = replace(
            self.staged.record,
            generation=generation,
            created=f"2026-11-{day:02}T12:00:00Z",
            container=Container(container, "podman", name=f"name-{container[:4]}"),
        )
        seal(folder, record, self.key, vram=folder / FRAGMENT_NAME)
        return folder

    def contents(self):
        """The store's content files."""
        return sorted(path for path in (self.store.root / "content").rglob("*") if path.is_file())

    def everything(self):
        """All files below the store, but the lock and the mark."""
        files = (path for path in self.store.root.rglob("*") if path.is_file() or path.is_symlink())
        return sorted(str(path.relative_to(self.store.root)) for path in files if path.name not in ("lock", "layout"))


def make_archive(path, folder, compression="none", *, extra=()):
    """As podman writes one: metadata beside the checkpoint, folders as members, names in order."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member(tar, "config.dump", b"{}")
        directory = tarfile.TarInfo("checkpoint/")
        directory.type, directory.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(directory)
        for name in sorted(os.listdir(folder)):
            member(tar, f"checkpoint/{name}", (folder / name).read_bytes())
        member(tar, "rootfs-diff.tar", b"r" * 3000, uid=1000, pax={"SCHILY.xattr.user.a": "b", "comment": "x" * 300})
        for name, data in extra:
            member(tar, name, data)
        link = tarfile.TarInfo("volumes/link")
        link.type, link.linkname = tarfile.SYMTYPE, "there"
        tar.addfile(link)
    data = plain.getvalue()
    packed = {"none": lambda: data, "gzip": lambda: gzip.compress(data), "zstd": lambda: zstandard.compress(data)}
    path.write_bytes(packed[compression]())
    return path


def member(tar, name, data, *, uid=0, pax=None):
    entry = tarfile.TarInfo(name)
    entry.size, entry.uid, entry.mtime, entry.mode = len(data), uid, 1_700_000_000, 0o600
    entry.pax_headers = pax or {}
    tar.addfile(entry, io.BytesIO(data))


class Cut:
    """Counts the calls that change the disk and strikes at one of them, before it happens."""

    STEPS = ("link", "rename", "replace", "unlink", "mkdir", "rmdir", "fsync")

    def __init__(self, monkeypatch, at, strike=lambda: os._exit(9)):
        self.count = 0
        for name in self.STEPS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name), at, strike))

    def _wrap(self, real, at, strike):
        def call(*args, **kwargs):
            self.count += 1
            if self.count == at:
                strike()
            return real(*args, **kwargs)

        return call


def in_child(patch, work, at):
    """Run in a child that dies at a step: a kill runs no handler. Its exit status; 0 where it came to its end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            Cut(patch, at)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
