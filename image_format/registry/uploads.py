"""Sends one blob to a registry: whole in one request, or in pieces where that fails (docs/registry.md).

One PUT is the fastest and what most registries take. A host that cuts it off or refuses its size gets PATCH requests,
whose size is learnt per host and halved while it is refused. After a cut the registry says how far it came
(Range), and the upload goes on from there, in the place that it names (Location); where it forgot, from the beginning.
The registry checks the digest at the end; a source that is shorter than its size, or changes, is refused by that.
A blob whose digest is not known yet goes up in PATCH requests, because only the last PUT has to name it.
"""

from __future__ import annotations

import hashlib
import re
import threading
from typing import TYPE_CHECKING, BinaryIO, NamedTuple
from urllib.parse import quote, urlsplit

from image_format.registry.network import Cut
from image_format.registry.reference import is_on_host
from image_format.registry.session import MAX_ERROR_BYTES, WORTH_ANOTHER_ATTEMPT, Answer, TokenEnded, said_by
from image_format.registry.tokens import push_scope
from vgpu_errors import ContentMismatch, RegistryAnswerInvalid, RegistryRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from image_format.registry.session import Session

BUFFER_BYTES = 1 << 20
FIRST_PIECE_BYTES = 32 << 20
LEAST_PIECE_BYTES = 1 << 20
# What a registry answers when it takes no whole blob in one PUT, or not one of this size.
TAKES_NO_WHOLE = frozenset({400, 404, 405, 411, 413, 415, 416, 501})
KNOWN_OR_NOT = frozenset(range(200, 500)) - WORTH_ANOTHER_ATTEMPT
_RANGE = re.compile(r"(?:bytes=|bytes )?0-(\d{1,19})")


class BlobToSend(NamedTuple):
    """What is sent: a stream that can be opened at any offset; without a digest where that is learnt on the way."""

    open_stream: Callable[[int], BinaryIO]
    digest: str | None
    size: int


class RunningDigest:
    """The sha256 of what is sent from its beginning to its end, some of it maybe several times."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._end = 0

    def take(self, view: memoryview, at: int) -> None:
        """These bytes go out, which lie there."""
        known = self._end - at
        if 0 <= known < len(view):
            self._hash.update(view[known:])
            self._end = at + len(view)

    def whole(self, size: int) -> str | None:
        """The digest, once so many bytes have gone by."""
        return f"sha256:{self._hash.hexdigest()}" if self._end == size else None


class HostHabits:
    """What a host was found to take; shared by all uploads to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._piece_bytes: int | None = None

    @property
    def piece_bytes(self) -> int | None:
        """How much to send in one PATCH; None: all in one PUT."""
        return self._piece_bytes

    def refused(self, sent: int | None) -> None:
        """The host did not take a whole blob (None), or a piece of this size."""
        with self._lock:
            if self._piece_bytes is None:
                self._piece_bytes = FIRST_PIECE_BYTES
            if sent is not None and sent <= self._piece_bytes:
                self._piece_bytes = max(LEAST_PIECE_BYTES, sent // 2)


class Upload:
    """One blob on its way."""

    def __init__(
        self,
        session: Session,
        repository: str,
        blob: BlobToSend,
        habits: HostHabits,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self._session = session
        self._repository = repository
        self._scopes = push_scope(repository)
        self._blob = blob
        self._running = RunningDigest() if blob.digest is None else None
        self._habits = habits
        self._on_bytes = on_bytes
        self._location: str | None = None
        self._least_piece = 1
        self._offset = 0
        self._furthest = 0
        self._told = 0
        self._fault: tuple[str, str | None] | None = None

    def run(self) -> str:
        """Send it; on return the registry has it, under this digest."""
        patience = self._session.patience()
        try:
            while not self._step(patience.check):
                if self._offset > self._furthest:
                    self._furthest = self._offset
                    patience.moved_on()
                elif self._fault:
                    patience.failed(*self._fault)
        except BaseException:
            self._tell(0)
            raise
        return self._digest()

    def _digest(self) -> str:
        digest = self._blob.digest or (self._running.whole(self._blob.size) if self._running else None)
        if digest is None:
            raise RegistryAnswerInvalid(where=self._session.host, what="it says that it has more than was sent")
        return digest

    def _step(self, check: Callable[[], None]) -> bool:
        """One request of the upload; True when it was the last and the blob is there."""
        self._fault = None
        check()
        if self._location is None:
            self._begin()
        piece = self._habits.piece_bytes
        is_whole = piece is None and self._offset == 0 and self._blob.digest is not None
        try:
            if is_whole:
                return self._put_whole()
            if self._offset < self._blob.size:
                self._patch(max(piece or self._first_piece, self._least_piece))
                return False
            return self._finish()
        except Cut as error:
            self._fault = (str(error), None)
            if not isinstance(error, TokenEnded):
                self._after_cut(is_whole=is_whole, piece=piece)
            else:
                self._locate()
            return False

    def _begin(self) -> None:
        answer = self._session.call(
            "POST",
            f"/v2/{self._repository}/blobs/uploads/",
            self._scopes,
            accept=(202,),
            max_bytes=MAX_ERROR_BYTES,
            headers={"Content-Length": "0"},
        )
        least = answer.header("OCI-Chunk-Min-Length") or ""
        self._least_piece = min(int(least), 1 << 30) if least.isdigit() and len(least) < 12 else 1
        self._move(answer)
        self._set_offset(0)

    @property
    def _first_piece(self) -> int:
        """Without a digest one PATCH takes the place of one PUT."""
        return FIRST_PIECE_BYTES if self._running is None else max(FIRST_PIECE_BYTES, self._blob.size)

    def _put_whole(self) -> bool:
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(self._blob.size)}
        answer = self._send("PUT", self._with_digest(), headers, 0, self._blob.size)
        if answer.status in (201, 204):
            return self._is_there(answer)
        if answer.status in TAKES_NO_WHOLE and self._blob.size and not _is_digest_fault(answer):
            self._habits.refused(None if self._blob.size > FIRST_PIECE_BYTES else self._blob.size)
            self._location = None
            return False
        return self._refused(answer)

    def _patch(self, piece: int) -> None:
        length = min(piece, self._blob.size - self._offset)
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(length),
        }
        if length < self._blob.size:  # all at once is a stream, which hosts take that know no pieces
            headers["Content-Range"] = f"{self._offset}-{self._offset + length - 1}"
        assert self._location is not None
        answer = self._send("PATCH", self._location, headers, self._offset, length)
        if answer.status in (201, 202, 204):
            before = self._offset
            self._move(answer)
            end = _end_of(answer, default=before + length)
            self._set_offset(0 if end == 1 < length else end)  # "0-0" also stands for nothing
            if self._offset <= before:
                self._fault = (f"it took nothing of {length} bytes", None)
        elif answer.status == 413 and length > max(LEAST_PIECE_BYTES, self._least_piece):
            self._habits.refused(length)
            self._locate()
        elif answer.status in (404, 416):
            self._fault = (f"status {answer.status} at byte {self._offset}", None)
            self._locate()
        else:
            self._refused(answer)

    def _finish(self) -> bool:
        answer = self._send("PUT", self._with_digest(), {"Content-Length": "0"}, self._offset, 0)
        if answer.status in (201, 204):
            return self._is_there(answer)
        if answer.status in (404, 416):
            self._fault = (f"status {answer.status} at the end", None)
            self._locate()
            return False
        return self._refused(answer)

    def _send(self, method: str, url: str, headers: dict[str, str], offset: int, length: int) -> Answer:
        body = self._pieces(offset, length) if length else b""
        return self._session.send(method, url, self._scopes, headers, body)

    def _pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        """The bytes through one reused buffer."""
        buffer = memoryview(bytearray(min(BUFFER_BYTES, length)))
        with self._blob.open_stream(offset) as stream:
            while length:
                if self._session.stop.is_set():
                    raise Cut("interrupted")
                count = _read_into(stream, buffer[: min(len(buffer), length)])
                if not count:
                    raise ContentMismatch(where=self._blob.digest or "a blob", what=f"it ends {length} bytes too early")
                if self._running is not None:
                    self._running.take(buffer[:count], offset)
                yield buffer[:count]
                length -= count
                offset += count
                self._tell(self._told + count)

    # ---- after a fault -----------------------------------------------------------------------------

    def _refused(self, answer: Answer) -> bool:
        """Wait where that may help, and raise where not."""
        said = said_by(answer.body)
        if answer.status in WORTH_ANOTHER_ATTEMPT:
            self._fault = (f"status {answer.status}{f', {said}' if said else ''}", answer.header("Retry-After"))
            self._locate()
            return False
        if _is_digest_fault(answer):
            raise RegistryRefused(
                where=self._session.host,
                what=f"the content is not that of {self._digest()}: {said}",
                remedy="The file changed while it was sent, or something on the way changes bytes; push again.",
            )
        raise self._session.fault(answer.status, said, answer.url)

    def _after_cut(self, *, is_whole: bool, piece: int | None) -> None:
        """What was sent in one request and did not arrive is sent in smaller ones from now on."""
        before = self._offset
        self._locate()
        is_all = is_whole or (self._running is not None and piece is None and self._offset <= before)
        if is_all and self._blob.size > LEAST_PIECE_BYTES:
            self._habits.refused(None)
        elif piece is not None and self._offset <= before:
            self._habits.refused(piece)

    def _locate(self) -> None:
        """Ask the registry how far it came; where it does not say, begin again."""
        location, self._location = self._location, None
        if location is not None and is_on_host(location, self._session.host):
            answer = self._session.call("GET", location, self._scopes, accept=KNOWN_OR_NOT, max_bytes=MAX_ERROR_BYTES)
            if answer.status in (202, 204) and answer.header("Range"):
                end = _end_of(answer, default=0)
                if end <= self._blob.size:
                    self._location = location
                    self._move(answer)
                    self._set_offset(0 if end == 1 else end)  # as above
                    return
        self._set_offset(0)

    def _move(self, answer: Answer) -> None:
        """The next request goes where this answer says, if it says anything."""
        location = answer.header("Location")
        if location:
            self._location = self._session.follow(answer.url, location)
        elif self._location is None:
            raise RegistryAnswerInvalid(where=self._session.host, what="it begins an upload and does not say where")

    def _with_digest(self) -> str:
        assert self._location is not None
        joint = "&" if urlsplit(self._location).query else "?"
        return f"{self._location}{joint}digest={quote(self._digest(), safe='')}"

    def _is_there(self, answer: Answer) -> bool:
        stored = answer.header("Docker-Content-Digest")
        if stored and stored != self._digest():
            raise RegistryAnswerInvalid(where=self._session.host, what=f"it stored {self._digest()} as {stored}")
        self._tell(self._blob.size)
        return True

    def _set_offset(self, offset: int) -> None:
        self._offset = offset
        self._tell(offset)

    def _tell(self, sent: int) -> None:
        """Progress is told as a difference, which is negative after a fault."""
        if self._on_bytes is not None and sent != self._told:
            self._on_bytes(sent - self._told)
        self._told = sent


def _is_digest_fault(answer: Answer) -> bool:
    return answer.status == 400 and b"DIGEST_INVALID" in answer.body


def _end_of(answer: Answer, *, default: int) -> int:
    match = _RANGE.fullmatch((answer.header("Range") or "").strip())
    return int(match[1]) + 1 if match else default


def _read_into(stream: BinaryIO, view: memoryview) -> int:
    readinto = getattr(stream, "readinto", None)
    if readinto is not None:
        return int(readinto(view) or 0)
    data = stream.read(len(view))
    view[: len(data)] = data
    return len(data)
