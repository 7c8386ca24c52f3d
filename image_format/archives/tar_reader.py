"""Reads a tar stream member by member (ustar, pax, GNU long names; spec/archive-layout.md, section 5).

Strict where tar readers differ, because engines unpack the same bytes as root: refuses absolute names, `..`,
sparse members, bad checksums, data behind the end and oversized extended headers. Extracts nothing.
Memory is bounded by one extended header. `archive` and `ocistore` use it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vgpu_errors import ImageError, LimitExceeded, Truncated, UnsafeName

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 512
MAX_EXTENDED_BYTES = 1 << 20
MAX_NAME_LENGTH = 4096
MAX_MEMBERS = 1 << 17
# A long name, a long link and attributes each take one; tar writers put no more before a member.
MAX_EXTENSIONS = 16
_SKIP_BYTES = 1 << 20
_MAX_PAX_DIGITS = 7

_SPARSE = "a sparse member, which engines unpack differently"


class Readable(Protocol):
    """Any source of bytes: a file, a decompressor."""

    def readinto(self, view: memoryview, /) -> int | None: ...  # noqa: D102


class Kind(StrEnum):
    """What a member is."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"
    DEVICE = "device or pipe"


class Member(NamedTuple):
    """One member; its name is relative and without `.`, `..` or a trailing slash ("" is the root itself)."""

    name: str
    kind: Kind
    size: int
    offset: int


_KINDS = {
    b"0": Kind.FILE,
    b"\0": Kind.FILE,
    b"7": Kind.FILE,
    b"1": Kind.LINK,
    b"2": Kind.LINK,
    b"3": Kind.DEVICE,
    b"4": Kind.DEVICE,
    b"6": Kind.DEVICE,
    b"5": Kind.DIRECTORY,
}


class TarReader:
    """Iterates over members; between two of them the caller may read the current one's data."""

    def __init__(self, source: Readable, *, where: str) -> None:
        self.where = where
        self.position = 0
        self._source = source
        self._left = 0
        self._padding = 0
        self._scratch = memoryview(bytearray(_SKIP_BYTES))

    def __iter__(self) -> Iterator[Member]:
        for _ in range(MAX_MEMBERS + 1):
            self._skip(self._left + self._padding)
            member = self._next_member()
            if member is None:
                return
            yield member
        raise LimitExceeded(where=self.where, what="the number of members", found="more", limit=MAX_MEMBERS)

    def read_into(self, view: memoryview) -> None:
        """Fill the buffer with the current member's next bytes; asking for more than it has is a mistake of the caller."""
        self._fill(view)
        self._left -= len(view)

    def read(self, size: int) -> bytes:
        """The current member's next bytes, for small members."""
        pieces = []
        while size:
            piece = memoryview(bytearray(min(size, _SKIP_BYTES)))
            self.read_into(piece)
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    # ---- headers ---------------------------------------------------------------------------------

    def _next_member(self) -> Member | None:
        extended: dict[str, str] = {}
        for _ in range(MAX_EXTENSIONS + 1):
            block = self._block()
            if not any(block):
                self._expect_end()
                return None
            _check_sum(block, self.where)
            kind, size = block[156:157], self._number(block[124:136])
            if kind in (b"x", b"g", b"L", b"K"):
                self._read_extension(kind, size, extended)
                continue
            return self._member(block, kind, size, extended)
        raise LimitExceeded(
            where=self.where, what="the extended headers of a member", found="more", limit=MAX_EXTENSIONS
        )

    def _member(self, block: bytes, kind: bytes, size: int, extended: dict[str, str]) -> Member:
        if kind == b"S":
            raise ImageError(where=self.where, what=_SPARSE)
        if kind not in _KINDS:
            raise ImageError(where=self.where, what=f"a member of unknown type {ascii(kind)[1:]}")
        raw = extended.get("path", _header_name(block))
        found = _KINDS[kind]
        if found is Kind.FILE and raw.endswith("/"):
            found = Kind.DIRECTORY
        size = self._decimal(extended["size"]) if "size" in extended else size
        if found is not Kind.FILE and size:
            raise ImageError(where=self.where, what=f"{raw!a} is a {found} with data")
        name = self._clean_name(raw)
        if not name and found is not Kind.DIRECTORY:
            raise UnsafeName(where=self.where, name=ascii(raw))
        self._left, self._padding = size, -size % BLOCK
        return Member(name, found, size, self.position)

    def _read_extension(self, kind: bytes, size: int, extended: dict[str, str]) -> None:
        if size > MAX_EXTENDED_BYTES:
            raise LimitExceeded(where=self.where, what="an extended header", found=size, limit=MAX_EXTENDED_BYTES)
        self._left, self._padding = size, -size % BLOCK
        data = self.read(size)
        self._skip(self._padding)
        if kind == b"L":
            extended["path"] = _text(data.rstrip(b"\0"))
        elif kind in (b"x", b"g"):
            self._read_pax(kind, data, extended)

    def _read_pax(self, kind: bytes, data: bytes, extended: dict[str, str]) -> None:
        for key, value in _pax_records(data, self.where):
            if key.startswith("GNU.sparse."):
                raise ImageError(where=self.where, what=_SPARSE)
            if key in ("path", "size"):
                if kind == b"g":
                    raise ImageError(where=self.where, what="a global header that renames or resizes every member")
                extended[key] = value

    def _clean_name(self, raw: str) -> str:
        if len(raw) > MAX_NAME_LENGTH or not raw or raw.startswith("/"):
            raise UnsafeName(where=self.where, name=ascii(raw[:MAX_NAME_LENGTH]))
        parts = [part for part in raw.rstrip("/").split("/") if part != "."]
        if any(part in ("", "..") or _has_control(part) for part in parts):
            raise UnsafeName(where=self.where, name=ascii(raw))
        return "/".join(parts)

    def _number(self, field: bytes) -> int:
        if field[0] & 0x80:
            value = int.from_bytes(field[1:]) | (field[0] & 0x7F) << 88
            if field[0] & 0x40 or value >> 62:
                raise ImageError(where=self.where, what="a member's size is negative or absurd")
            return value
        text = field.rstrip(b"\0 ").lstrip(b" ")
        if not text:
            return 0
        if not all(digit in b"01234567" for digit in text):
            raise ImageError(where=self.where, what="a header field is not an octal number")
        return int(text, 8)

    def _decimal(self, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise ImageError(where=self.where, what="an extended size is not a number")
        return int(text)

    # ---- bytes -----------------------------------------------------------------------------------

    def _block(self) -> bytes:
        view = self._scratch[:BLOCK]
        self._fill(view)
        return bytes(view)

    def _skip(self, count: int) -> None:
        seek = getattr(self._source, "skip", None)
        if seek is not None and count > _SKIP_BYTES:
            skipped = seek(count - 1)  # the last byte is read, so that a short file is noticed
            self.position += skipped
            count -= skipped
        while count:
            view = self._scratch[: min(count, _SKIP_BYTES)]
            self._fill(view)
            count -= len(view)
        self._left = self._padding = 0

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = self._source.readinto(view[done:])
            if not count:
                found = self.position + done
                raise Truncated(where=self.where, found=found, needed=f"at least {self.position + len(view)}")
            done += count
        self.position += done

    def _expect_end(self) -> None:
        if any(self._block()):
            raise ImageError(where=self.where, what="a single empty block amid the members")
        while count := self._source.readinto(self._scratch):
            if any(self._scratch[:count]):
                raise ImageError(where=self.where, what="data follows the end of the archive")


def _check_sum(block: bytes, where: str) -> None:
    text = block[148:156].split(b"\0")[0].strip(b" ")
    is_octal = bool(text) and all(digit in b"01234567" for digit in text)
    if not is_octal or int(text, 8) != sum(block) - sum(block[148:156]) + 8 * 0x20:
        raise ImageError(where=where, what="is not a tar archive, or a header of it is damaged")


def _header_name(block: bytes) -> str:
    name = block[:100].split(b"\0")[0]
    prefix = block[345:500].split(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return _text(prefix + b"/" + name if prefix else name)


def _pax_records(data: bytes, where: str) -> Iterator[tuple[str, str]]:
    start = 0
    while start < len(data):
        head, space, _ = data[start : start + _MAX_PAX_DIGITS + 1].partition(b" ")
        end = start + (int(head) if space and head.isdigit() else 0)
        record = data[start + len(head) + 1 : end]
        key, equals, value = record[:-1].partition(b"=")
        if end > len(data) or not record.endswith(b"\n") or not equals or b"\0" in key + value:
            raise ImageError(where=where, what="a damaged extended header")
        yield _text(key), _text(value)
        start = end


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _has_control(part: str) -> bool:
    return any(letter < " " or letter == "\x7f" for letter in part)
