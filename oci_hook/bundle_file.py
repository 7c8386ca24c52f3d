"""Puts an edited config.json in a bundle for the length of one runtime call, and the original back.

Files beside config.json while a call runs, and what a kill leaves after each step:
1. config.json.vgpu-edited (a copy of what will be put in): left alone it is rubbish.
2. config.json.vgpu-original (a hard link to the original): config.json is still the original, both are rubbish.
3. config.json replaced by the edited content: the original must be put back.
4. config.json.vgpu-original renamed over config.json (the commit of the way back): the rest is rubbish.
`recover`, at the start of the next call, tells these apart. If the engine has meanwhile written a config.json of its
own, that one stands, without any edits of ours that it was made from.
The original keeps its inode, so also owner, mode and times. Called by the shim alone; the hook changes no files.
"""

from __future__ import annotations

import os

from oci_hook.gpu_detection import may_use_gpu
from oci_hook.injection import parse_spec, without_own_edits


class BundleFile:
    """The config.json of one bundle."""

    __slots__ = ("_edited", "_original", "_partial", "bundle", "is_edited", "path")

    def __init__(self, bundle: str) -> None:
        self.bundle = bundle
        self.path = f"{bundle}/config.json"
        self._original = f"{self.path}.vgpu-original"
        self._edited = f"{self.path}.vgpu-edited"
        self._partial = f"{self.path}.vgpu-partial"
        self.is_edited = False

    def read(self) -> bytes | None:
        """The content as the engine wrote it, after repairing what a killed call left; None if there is no such file."""
        self.recover()
        return _read(self.path)

    def recover(self) -> None:
        """Bring the bundle to the state before a call that was killed."""
        original = _status(self._original)
        if original is None:
            if _status(self._edited) is not None:
                _unlink(self._edited)
            return
        now = _read(self.path)
        if now is None or now == _read(self._edited) or parse_spec(now) is None:
            self._return_original()
        else:
            self._keep_the_engines(original, now)
        _unlink(self._edited)
        _unlink(self._partial)

    def put_in(self, edited: bytes) -> None:
        """Replace config.json by the edited content."""
        status = os.stat(self.path)  # noqa: PTH116
        _write_new(self._edited, edited, status)
        os.link(self.path, self._original)
        self.is_edited = True
        _write_new(self._partial, edited, status)
        os.rename(self._partial, self.path)  # noqa: PTH104

    def put_back(self) -> None:
        """Put the original back; does nothing the second time."""
        if self.is_edited:
            self._return_original()
            self.is_edited = False
        for path in (self._edited, self._partial):
            _unlink(path)

    def _return_original(self) -> None:
        try:
            os.rename(self._original, self.path)  # noqa: PTH104
        except FileNotFoundError:
            return  # the engine has removed the bundle
        _unlink(self._original)  # a rename between two links of one file does nothing

    def _keep_the_engines(self, original: os.stat_result, now: bytes) -> None:
        """Drop the saved original: the engine wrote since, perhaps (podman restore) from our edited one."""
        status = os.stat(self.path)  # noqa: PTH116
        is_the_original = (status.st_dev, status.st_ino) == (original.st_dev, original.st_ino)
        cleaned = without_own_edits(now) if may_use_gpu(now) and not is_the_original else now
        if cleaned != now:
            _write_new(self._partial, cleaned, status)
            os.rename(self._partial, self.path)  # noqa: PTH104
        _unlink(self._original)


def _write_new(path: str, content: bytes, like: os.stat_result) -> None:
    """Write with the owner and mode of another file; what a killed call left there is replaced."""
    _unlink(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(descriptor, like.st_uid, like.st_gid)
        os.fchmod(descriptor, like.st_mode & 0o7777)
        file.write(content)


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _unlink(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108
    except FileNotFoundError:
        return
