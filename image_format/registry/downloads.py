"""Fetches one blob into a file by ranges, checks its digest as it comes, goes on after a cut (docs/registry.md).

The file is the caller's, as long as it likes; bytes are written at their place and nowhere else.
A registry that ignores ranges is read from its beginning again. More bytes than the blob has are never read, and
nothing is believed before the digest holds: a caller must not use the file when this raises.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

from image_format.registry.network import Cut, read_some
from image_format.registry.session import Wait
from image_format.registry.tokens import pull_scope
from vgpu_errors import (
    LimitExceeded,
    NodeError,
    NotEnoughSpace,
    NotInRegistry,
    RegistryAnswerInvalid,
    RegistryContentWrong,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from urllib3.response import BaseHTTPResponse

    from image_format.registry.session import Session

    Hash: TypeAlias = "hashlib._Hash"  # noqa: SLF001 - the library gives it no other name

READ_BYTES = 256 << 10
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


class Blob(NamedTuple):
    """What is fetched."""

    digest: str
    size: int


class BlobStream:
    """Part of a blob as it comes; a cut goes unnoticed as long as the registry can go on where it was.

    Its digest is not checked: whoever reads a part has other means, whoever reads all uses `download`.
    """

    def __init__(
        self,
        session: Session,
        repository: str,
        blob: Blob,
        stretch: tuple[int, int] | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self._session = session
        self._repository = repository
        self._blob = blob
        self._position, self._end = stretch or (0, blob.size)
        self._on_bytes = on_bytes
        self._patience = session.patience()
        self._open: contextlib.ExitStack | None = None
        self._response: BaseHTTPResponse | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        if self._open is not None:
            self._open.close()
        self._open = self._response = None

    def readinto(self, view: memoryview, /) -> int:
        """Some of the next bytes; 0 at the end of the stretch."""
        while self._position < self._end and len(view):
            self._patience.check()
            try:
                data = read_some(self._answer(), min(READ_BYTES, len(view), self._end - self._position))
            except Cut as error:
                self._failed(str(error))
            except Wait as error:
                self._failed(str(error), error.retry_after)
            else:
                if data:
                    return self._took(data, view)
                self._failed("the answer ended early")
        return 0

    def _took(self, data: bytes, view: memoryview) -> int:
        view[: len(data)] = data
        self._position += len(data)
        self._patience.moved_on()
        if self._on_bytes is not None:
            self._on_bytes(len(data))
        return len(data)

    def _failed(self, what: str, retry_after: str | None = None) -> None:
        self.close()
        self._patience.failed(what, retry_after)

    def _answer(self) -> BaseHTTPResponse:
        """The answer under way, or a new one that begins where we are."""
        if self._response is None:
            with contextlib.ExitStack() as stack:
                path = f"/v2/{self._repository}/blobs/{self._blob.digest}"
                scopes = pull_scope(self._repository)
                opened = self._session.begin("GET", path, scopes, headers=self._headers())
                response, url = stack.enter_context(opened)
                self._check(response, url)
                self._open = stack.pop_all()
                self._response = response
        return self._response

    def _headers(self) -> dict[str, str]:
        if (self._position, self._end) == (0, self._blob.size):
            return {}
        return {"Range": f"bytes={self._position}-{self._end - 1}"}

    def _check(self, response: BaseHTTPResponse, url: str) -> None:
        if response.status == 416:
            what = f"{self._blob.digest} is shorter than {self._blob.size} bytes"
            raise RegistryContentWrong(where=self._session.host, what=what)
        if response.status not in (200, 206):
            self._refuse(response, url)
        skip = self._check_range(response)
        while skip:
            data = read_some(response, min(READ_BYTES, skip))
            if not data:
                raise Cut("the answer ended early")
            skip -= len(data)
            self._patience.check()

    def _refuse(self, response: BaseHTTPResponse, url: str) -> None:
        try:
            self._session.refuse(response, url)
        except NotInRegistry as error:
            where = f"{self._session.host}/{self._repository}"
            raise NotInRegistry(where=where, what=f"blob {self._blob.digest}") from error

    def _check_range(self, response: BaseHTTPResponse) -> int:
        """How many bytes to skip; refuses an answer that speaks of another blob."""
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding not in ("", "identity"):
            raise RegistryAnswerInvalid(where=self._session.host, what=f"it sends a blob encoded as {encoding[:20]}")
        if response.status == 200:
            self._check_size(response.headers.get("Content-Length", ""))
            return self._position
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if not match or int(match[1]) != self._position:
            raise RegistryAnswerInvalid(where=self._session.host, what="it sends another range than was asked for")
        self._check_size(match[3])
        return 0

    def _check_size(self, text: str) -> None:
        if text.isdigit() and int(text) != self._blob.size:
            what = f"{self._blob.digest} has {text} bytes, not {self._blob.size}"
            raise RegistryContentWrong(where=self._session.host, what=what)


def download(
    session: Session,
    repository: str,
    blob: Blob,
    into_fd: int,
    *,
    start: int = 0,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Fetch into a file what follows its first `start` bytes; on return the digest of all of it holds."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
    position = _hash_beginning(digest, into_fd, start, buffer)
    if position < blob.size:
        with BlobStream(session, repository, blob, (position, blob.size), on_bytes) as stream:
            while count := stream.readinto(buffer):
                digest.update(buffer[:count])
                _write(into_fd, buffer[:count], position)
                position += count
    if "sha256:" + digest.hexdigest() != blob.digest:
        raise RegistryContentWrong(where=session.host, what=f"{blob.digest} has another digest")


def _hash_beginning(digest: Hash, descriptor: int, length: int, buffer: memoryview) -> int:
    """Hash what the file has already; it may have less than was thought."""
    position = 0
    while position < length:
        count = os.preadv(descriptor, [buffer[: min(len(buffer), length - position)]], position)
        if not count:
            break
        digest.update(buffer[:count])
        position += count
    return position


def _write(descriptor: int, view: memoryview, at: int) -> None:
    while view:
        count = _pwrite(descriptor, view, at)
        view, at = view[count:], at + count


def _pwrite(descriptor: int, view: memoryview, at: int) -> int:
    try:
        return os.pwrite(descriptor, view, at)
    except OSError as error:
        status = os.fstatvfs(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        free_bytes = status.f_bavail * status.f_frsize
        if free_bytes < len(view) + (1 << 20):
            raise NotEnoughSpace(path=path, free_bytes=free_bytes, needed_bytes=len(view)) from error
        raise NodeError(what=f"{path} cannot be written ({error.strerror})") from error


def fetch_small(session: Session, repository: str, digest: str, max_bytes: int) -> bytes:
    """A small blob into memory; its size need not be known."""
    answer = session.call(
        "GET", f"/v2/{repository}/blobs/{digest}", pull_scope(repository), accept=(200,), max_bytes=max_bytes
    )
    if len(answer.body) > max_bytes:
        raise LimitExceeded(where=digest, what="its size", found=len(answer.body), limit=max_bytes)
    if "sha256:" + hashlib.sha256(answer.body).hexdigest() != digest:
        raise RegistryContentWrong(where=session.host, what=f"{digest} has another digest")
    return answer.body
