"""Watches the kubelet's checkpoint folder: what appears there is verified, sealed where it is not, and pushed if wanted.

Only whole files: one that somebody has open for writing waits. Each archive once: what was done is noted in a state file,
so that a restart catches up and does nothing twice. A failure is told with what to do about it and tried again a few
times; it touches neither the archive nor the others. Runs as `vgpu containerd watch`, a service of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import stat
import subprocess
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

from containerd_integration.kubelet_sealing import remove_half_sealed, seal_archive
from containerd_integration.leftovers import find_leftovers, remove
from gpu_state.state_watch import StateWatch
from image_format import canonical_json
from image_format.archives import archive
from image_format.trust.policy import Policy
from vgpu_errors import DeadlineExceeded, ImageError, ToolMissing, Unsigned, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PATTERN = "checkpoint-*.tar"
RESCAN_S = 60.0
MAX_TRIES = 5
MAX_NOTED = 10_000
PUSH_S = 3600.0
TAG_LENGTH = 128


@dataclass(frozen=True)
class Noted:
    """What was done to one archive, and which file it was then."""

    size: int
    changed_ns: str  # beyond what JSON readers keep of an integer
    inode: int
    manifest: str
    pushed: str = ""

    def is_same(self, found: os.stat_result) -> bool:
        """The file is the one that was looked at."""
        return (self.size, self.changed_ns, self.inode) == (found.st_size, str(found.st_mtime_ns), found.st_ino)


class KubeletWatch:
    """One folder and its state file."""

    def __init__(
        self, folder: Path, state: Path, *, push_to: str | None, etc: Path, say: Callable[[str], object]
    ) -> None:
        self.folder, self._state, self._push_to, self._etc, self._say = folder, state, push_to, etc, say
        self._noted = _read_state(state)
        self._failures: dict[str, tuple[int, int]] = {}

    def run(self, *, rescan_s: float = RESCAN_S, stops_at: Callable[[], bool] = lambda: False) -> None:
        """Look now, at every event, and once a minute in case one was lost."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _Events(self.folder) as events:
            while not stops_at():
                self.catch_up()
                events.wait(rescan_s)

    def catch_up(self) -> int:
        """All archives that are whole and not done; how many of them failed."""
        failed = 0
        remove_half_sealed(self.folder)
        for path in sorted(self.folder.glob(PATTERN)):
            if self._is_due(path):
                failed += not self._take(path)
        for leftover in find_leftovers():
            remove(leftover)
        return failed

    # ---- one archive -----------------------------------------------------------------------------

    def _take(self, path: Path) -> bool:
        try:
            manifest = self._sealed(path)
            pushed = self._pushed(path)
            self._note(path, manifest, pushed)
        except (VgpuError, OSError) as problem:
            tries = self._count_failure(path)
            remedy = getattr(problem, "remedy", "Look at the folder and the disk.")
            self._say(
                f"{path.name}: {problem}; what to do: {remedy}" + (" It is left alone now." * (tries >= MAX_TRIES))
            )
            return False
        self._say(f"{path.name}: verified, manifest sha256:{manifest}" + (f", pushed to {pushed}" if pushed else ""))
        return True

    def _sealed(self, path: Path) -> str:
        """The digest of its manifest, after the archive was sealed if need be and verified in any case."""
        try:
            archive.read_archive_claims(path)
        except Unsigned:
            seal_archive(path, etc=self._etc)
            self._say(f"{path.name}: sealed and signed with this node's key")
        result = archive.verify_archive(path, Policy.load(str(self._etc)))
        manifest = result.verified.manifest_digest
        if manifest is None:
            raise ImageError(where=path, what="it was verified, but has no manifest")
        if result.config_differences:
            raise ImageError(where=path, what=f"spec.dump differs from what was signed: {result.config_differences[0]}")
        return str(manifest)

    def _pushed(self, path: Path) -> str:
        if not self._push_to:
            return ""
        reference = f"{self._push_to}:{tag_of(path.name)}"
        program = shutil.which("vgpu", path="/usr/bin:/usr/local/bin")
        if program is None:
            raise ToolMissing(tool="vgpu", what="the push runs 'vgpu push'")
        words = [program, "push", str(path), reference, "--etc", str(self._etc)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=PUSH_S, check=False)
        except subprocess.TimeoutExpired as problem:
            raise DeadlineExceeded(phase=f"the push to {reference}", seconds=f"{PUSH_S:g}") from problem
        if done.returncode != 0:
            raise ImageError(
                where=reference,
                what=f"the push failed: {done.stderr.strip()[-600:]}",
                remedy="It is tried again; 'vgpu push' with the same words shows more.",
            )
        return reference

    # ---- what was done ---------------------------------------------------------------------------

    def _is_due(self, path: Path) -> bool:
        """A whole file that is not done; what is gone by now, and what is no file, is nobody's to seal."""
        try:
            found = path.lstat()
            is_open_question = not self._is_done(path.name, found) and not self._is_hopeless(path.name, found)
            return stat.S_ISREG(found.st_mode) and is_open_question and is_whole(path)
        except OSError:
            return False

    def _is_done(self, name: str, found: os.stat_result) -> bool:
        noted = self._noted.get(name)
        return noted is not None and noted.is_same(found) and (not self._push_to or bool(noted.pushed))

    def _is_hopeless(self, name: str, found: os.stat_result) -> bool:
        tries, changed = self._failures.get(name, (0, 0))
        return tries >= MAX_TRIES and changed == found.st_mtime_ns

    def _count_failure(self, path: Path) -> int:
        changed = path.lstat().st_mtime_ns if path.exists() else 0
        tries, before = self._failures.get(path.name, (0, 0))
        tries = tries + 1 if before == changed else 1
        self._failures[path.name] = (tries, changed)
        return tries

    def _note(self, path: Path, manifest: str, pushed: str) -> None:
        found = path.lstat()
        self._noted[path.name] = Noted(found.st_size, str(found.st_mtime_ns), found.st_ino, manifest, pushed)
        there = {entry.name for entry in self.folder.glob(PATTERN)}
        self._noted = {name: noted for name, noted in self._noted.items() if name in there}
        self._failures.pop(path.name, None)
        self._state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self._state.with_name(f".{self._state.name}.partial")
        document = {"version": 1, "archives": {name: asdict(noted) for name, noted in sorted(self._noted.items())}}
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._state)


def is_whole(path: Path) -> bool:
    """Nobody has the file open for writing: the kernel grants a read lease only then."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - path.stat().st_mtime > 2  # a file system without leases
    finally:
        os.close(descriptor)
    return True


def tag_of(name: str) -> str:
    """The archive's name as a registry's tag: its last characters, which hold the time."""
    text = re.sub(r"[^A-Za-z0-9_.-]", "-", name.removesuffix(".tar"))
    return text[-TAG_LENGTH:].lstrip(".-")


def _read_state(path: Path) -> dict[str, Noted]:
    """What an earlier run noted; a state file that is no such thing counts as none, and all is looked at again."""
    try:
        document = canonical_json.read_object(path.read_bytes(), where=str(path))
        entries = document["archives"].items()
        return {str(name): Noted(**entry) for name, entry in list(entries)[:MAX_NOTED]}
    except (OSError, ImageError, KeyError, TypeError, AttributeError):
        return {}


class _Events:
    """Files that were closed after writing or renamed into the folder; without inotify only the waiting time."""

    def __init__(self, folder: Path) -> None:
        self._watch = StateWatch(folder, arrivals_only=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.close()

    def wait(self, seconds: float) -> None:
        """Until something happened, or the time is over; events that came meanwhile are taken together."""
        descriptor = self._watch.fileno()
        if descriptor is None:
            time.sleep(seconds)
            return
        select.select([descriptor], [], [], seconds)
        self._watch.clear()
