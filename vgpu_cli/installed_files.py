"""Writes the files that a setup planned, remembers each, and takes back exactly those.

The memory is one manifest, `/etc/vgpu/setup.json`: per file the digest of what was written, what stood there before,
and which setups ("podman", "containerd", "cdi") want it. A file that somebody changed since is kept and named, never
overwritten and never removed. A symbolic link is refused: renaming over it would cut it.
A JSON file of an engine that holds keys of ours (`PlannedFile.keys`) is the administrator's to change: its undo takes out
these keys where the file is no longer as it was written.
Called by `vgpu setup`. Engines' packages only plan (docs/decisions/0002-engine-packages-plan-files.md).

Steps of a write, and what a crash after each leaves:
1. directories made: empty directories, of which the manifest knows nothing.
2. manifest written (rename): it names files that are not there yet; undo skips them, a second setup writes them.
3. each file written (temporary name, fsync, rename): every file is old or new, the manifest knows both digests.
Steps of an undo: files, then directories, then the manifest; a second undo goes on where the first stopped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from docker_integration import json_keys
from vgpu_errors import BadConfiguration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MANIFEST_PATH = "/etc/vgpu/setup.json"
MANIFEST_VERSION = 1
PARTIAL_SUFFIX = ".vgpu-partial"


@dataclass(frozen=True)
class PlannedFile:
    """One file that a setup wants; `keep` leaves alone what stands there already."""

    path: str
    content: bytes
    mode: int
    why: str
    if_present: Literal["replace", "keep"] = "replace"
    keys: tuple[tuple[json_keys.Key, Any], ...] = ()
    """What is ours, key and value, in a JSON file that somebody else wrote; the rest of the content is theirs."""


@dataclass(frozen=True)
class Outcome:
    """What happened, or would happen, to one path."""

    path: str
    what: str
    why: str = ""

    def to_json(self) -> dict[str, str]:
        """The form of `--json` output."""
        return {"path": self.path, "what": self.what, "why": self.why}


@dataclass(frozen=True)
class Before:
    """A file as it stood before the first setup."""

    content: bytes
    mode: int

    def to_json(self) -> dict[str, Any]:
        """Content as base64, because it need not be text."""
        return {"content": base64.b64encode(self.content).decode("ascii"), "mode": self.mode}

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> Before:
        """The reverse of `to_json`."""
        return cls(base64.b64decode(doc["content"]), int(doc["mode"]))


@dataclass(frozen=True)
class Entry:
    """One written file."""

    sha256: str
    targets: tuple[str, ...]
    before: Before | None = None
    earlier_sha256: str | None = None
    """Digest of our previous version: the one on disk if a crash came between manifest and file."""
    keys: tuple[tuple[json_keys.Key, Any], ...] = ()

    def is_ours(self, content: bytes) -> bool:
        """True for content that a setup wrote."""
        return _sha256(content) in (self.sha256, self.earlier_sha256)

    def to_json(self) -> dict[str, Any]:
        """One value of the manifest's `files`."""
        return {
            "sha256": self.sha256,
            "targets": list(self.targets),
            "before": self.before.to_json() if self.before else None,
            "earlierSha256": self.earlier_sha256,
            **({"keys": [[list(key), value] for key, value in self.keys]} if self.keys else {}),
        }

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> Entry:
        """The reverse of `to_json`."""
        before = doc.get("before")
        return cls(
            sha256=str(doc["sha256"]),
            targets=tuple(doc["targets"]),
            before=Before.from_json(before) if before else None,
            earlier_sha256=doc.get("earlierSha256"),
            keys=tuple((tuple(map(str, key)), value) for key, value in doc.get("keys", ())),
        )


@dataclass
class InstalledFiles:
    """The manifest below one root, and the steps that keep it true."""

    root: Path
    files: dict[str, Entry] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, root: Path) -> InstalledFiles:
        """Read the manifest; an absent one means that nothing was set up."""
        path = root / MANIFEST_PATH.lstrip("/")
        try:
            doc = json.loads(path.read_text(encoding="utf-8"))
            if doc["formatVersion"] != MANIFEST_VERSION:
                raise BadConfiguration(path=path, what=f"has format version {doc['formatVersion']}, not 1")
            files = {name: Entry.from_json(entry) for name, entry in doc["files"].items()}
            return cls(root, files, list(doc["directories"]))
        except FileNotFoundError:
            return cls(root)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadConfiguration(path=path, what=f"not a setup manifest: {error}") from error

    def targets(self) -> tuple[str, ...]:
        """The setups that are in place."""
        return tuple(sorted({target for entry in self.files.values() for target in entry.targets}))

    def content(self, path: str) -> bytes | None:
        """What lies at the path now."""
        real = self._real(path)
        if real.is_symlink():
            raise BadConfiguration(path=real, what="is a symbolic link, which setup does not replace")
        return real.read_bytes() if real.exists() else None

    def is_ours(self, path: str) -> bool:
        """True where a setup wrote what lies there now."""
        entry, content = self.files.get(path), self.content(path)
        return entry is not None and content is not None and entry.is_ours(content)

    def keys(self, path: str) -> tuple[tuple[json_keys.Key, Any], ...]:
        """What an earlier setup added to a JSON file of somebody else's."""
        return self.files[path].keys if path in self.files else ()

    def write(self, target: str, planned: Sequence[PlannedFile], *, is_dry_run: bool = False) -> list[Outcome]:
        """Write what is needed, in the order of the module's docstring; take back what is planned no more."""
        outcomes = [self._outcome(file) for file in planned]
        wanted = {file.path for file in planned}
        stale = [path for path, entry in sorted(self.files.items()) if target in entry.targets and path not in wanted]
        if is_dry_run:
            return outcomes + [self._undo_one(path, target, is_dry_run=True) for path in stale]
        to_write = [file for file, outcome in zip(planned, outcomes, strict=True) if outcome.what in _WRITES]
        for file in to_write:
            self._make_directories(file.path)
        for file, outcome in zip(planned, outcomes, strict=True):
            self._remember(target, file, outcome)
        if self.files:
            self._save()
        for file in to_write:
            # Taken now, for a file that keeps its own mode; a new one gets what was planned.
            mode = self._mode(file.path) if file.keys else 0
            write_atomically(self._real(file.path), file.content, mode or file.mode)
        return outcomes + self._take_back(target, stale)

    def undo(self, target: str, *, keep: Iterable[str] = (), is_dry_run: bool = False) -> list[Outcome]:
        """Take back what one setup wrote; files that another setup also wants stay."""
        kept = set(keep)
        paths = [path for path, entry in sorted(self.files.items()) if target in entry.targets]
        asked = [Outcome(path, "kept: as asked") for path in paths if path in kept]
        if is_dry_run:
            return asked + [self._undo_one(path, target, is_dry_run=True) for path in paths if path not in kept]
        outcomes = asked + self._take_back(target, [path for path in paths if path not in kept])
        for path in kept & self.files.keys():
            self._forget(target, path)
        return outcomes + self._finish_undo()

    def _outcome(self, file: PlannedFile) -> Outcome:
        """The decision for one file; nothing is touched."""
        found, entry = self.content(file.path), self.files.get(file.path)
        return Outcome(file.path, _decide(file, found, self._mode(file.path), entry), file.why)

    def _remember(self, target: str, file: PlannedFile, outcome: Outcome) -> None:
        entry, found = self.files.get(file.path), self.content(file.path)
        if file.keys:
            self._remember_keys(target, file, entry, found)
            return
        if outcome.what == "unchanged" and entry is not None and found is not None:
            # What somebody wrote into it stays theirs, although this setup would write the same.
            digest = _sha256(found) if entry.is_ours(found) else entry.sha256
            self.files[file.path] = replace(entry, sha256=digest, targets=_with(entry.targets, target))
        if outcome.what not in _WRITES:
            return
        is_first = entry is None
        before = Before(found, self._mode(file.path)) if is_first and found is not None else None
        self.files[file.path] = Entry(
            sha256=_sha256(file.content),
            targets=_with(entry.targets if entry else (), target),
            before=before if is_first else entry.before if entry else None,
            earlier_sha256=entry.sha256 if entry else None,
        )

    def _remember_keys(self, target: str, file: PlannedFile, entry: Entry | None, found: bytes | None) -> None:
        """As `_remember`; what somebody changed since the last setup is what undo has to come back to."""
        before = entry.before if entry else None
        if found is not None and not (entry and entry.is_ours(found)):
            without = json_keys.without(found, entry.keys) if entry else found
            before = Before(without, self._mode(file.path)) if without is not None else None
        self.files[file.path] = Entry(
            sha256=_sha256(file.content),
            targets=_with(entry.targets if entry else (), target),
            before=before,
            earlier_sha256=entry.sha256 if entry else None,
            keys=file.keys,
        )

    def _take_back(self, target: str, paths: Sequence[str]) -> list[Outcome]:
        """Undo these files, then save the manifest without them: a crash between leaves names of files that are gone."""
        if not paths:
            return []
        outcomes = [self._undo_one(path, target, is_dry_run=False) for path in paths]
        for path in paths:
            self._forget(target, path)
        self._save()
        return outcomes

    def _undo_one(self, path: str, target: str, *, is_dry_run: bool) -> Outcome:
        entry, found = self.files[path], self.content(path)
        others = [name for name in entry.targets if name != target]
        if others:
            return Outcome(path, "kept: " + " and ".join(others) + " needs it")
        if found is None:
            return Outcome(path, "gone already")
        if entry.before is not None and found == entry.before.content:
            return Outcome(path, "as before already")
        if not entry.is_ours(found):
            return self._take_out_keys(path, entry, found, is_dry_run=is_dry_run)
        if not is_dry_run:
            self._put_back(path, entry)
        return Outcome(path, "removed" if entry.before is None else "put back as before")

    def _take_out_keys(self, path: str, entry: Entry, found: bytes, *, is_dry_run: bool) -> Outcome:
        """A file that somebody changed: only keys of ours leave it."""
        rest = json_keys.without(found, entry.keys)
        if not entry.keys or rest == found:
            return Outcome(path, "kept: changed since the setup")
        if not is_dry_run:
            if rest is None:
                self._real(path).unlink()
            else:
                write_atomically(self._real(path), rest, self._mode(path))
        return Outcome(path, "our keys taken out")

    def _put_back(self, path: str, entry: Entry) -> None:
        if entry.before is None:
            self._real(path).unlink()
        else:
            write_atomically(self._real(path), entry.before.content, entry.before.mode)

    def _forget(self, target: str, path: str) -> None:
        """Drop the target from an entry, and the entry when nobody wants it any more."""
        left = tuple(name for name in self.files[path].targets if name != target)
        if left:
            self.files[path] = replace(self.files[path], targets=left)
        else:
            del self.files[path]

    def _finish_undo(self) -> list[Outcome]:
        """Directories that are empty now, then the manifest, then the directories that held it."""
        outcomes = self._remove_empty_directories()
        if self.files:
            self._save()
            return outcomes
        self._real(MANIFEST_PATH).unlink(missing_ok=True)
        return outcomes + self._remove_empty_directories(names_kept=True)

    def _remove_empty_directories(self, *, names_kept: bool = False) -> list[Outcome]:
        outcomes = []
        for path in sorted(self.directories, key=len, reverse=True):
            real = self._real(path)
            if real.is_dir() and any(real.iterdir()):
                if names_kept:
                    outcomes.append(Outcome(path, "kept: not empty"))
                continue
            if real.is_dir():
                real.rmdir()
                outcomes.append(Outcome(path, "removed"))
            self.directories.remove(path)
        return outcomes

    def _make_directories(self, path: str) -> None:
        """Make the missing parents of a file and remember them, outermost first."""
        missing = [parent for parent in Path(path).parents if not self._real(str(parent)).exists()]
        for parent in reversed(missing):
            self._real(str(parent)).mkdir(mode=0o755)
            self._real(str(parent)).chmod(0o755)
            self.directories.append(str(parent))

    def _save(self) -> None:
        self._make_directories(MANIFEST_PATH)
        doc = {
            "formatVersion": MANIFEST_VERSION,
            "files": {path: entry.to_json() for path, entry in sorted(self.files.items())},
            "directories": self.directories,
        }
        # It may hold the text of files that were readable to root alone.
        write_atomically(self._real(MANIFEST_PATH), (json.dumps(doc, indent=2) + "\n").encode(), 0o600)

    def _mode(self, path: str) -> int:
        real = self._real(path)
        return real.stat().st_mode & 0o7777 if real.exists() else 0

    def _real(self, path: str) -> Path:
        return self.root / path.lstrip("/")


_WRITES = ("written", "replaced", "merged", "brought up to date")


def _decide(file: PlannedFile, found: bytes | None, mode: int, entry: Entry | None) -> str:
    if found is None:
        return "written"
    is_ours = entry is not None and entry.is_ours(found)
    is_kept = file.if_present == "keep"
    if file.keys:
        is_new = "brought up to date" if entry else "merged"
        return "unchanged" if found == file.content else is_new
    if (is_ours and is_kept) or (found == file.content and mode == file.mode):
        return "unchanged"
    if is_ours:
        return "brought up to date"
    is_first_version = entry is None or (entry.before is not None and entry.before.content == found)
    if is_first_version:
        return "kept: was there before" if is_kept else "replaced"
    return "kept: changed since the setup"


def write_atomically(path: Path, content: bytes, mode: int) -> None:
    """Temporary name, fsync, rename, fsync of the folder: after a crash the old file or the new one is there."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            os.fchmod(stream.fileno(), mode)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _with(targets: tuple[str, ...], target: str) -> tuple[str, ...]:
    return tuple(sorted({*targets, target}))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
