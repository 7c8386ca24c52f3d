"""Takes fields out of an untrusted JSON object and names the path of a fault.

Remembers which keys were asked for, so that unknown fields can be kept and written back.
The `from_json` of every document uses it; nothing past them sees a dict.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from vgpu_errors import ImageError, LimitExceeded

MAX_TEXT = 64 << 10
MAX_ITEMS = 1 << 16


class Fields:
    """One JSON object at a known path."""

    def __init__(self, doc: Any, at: str) -> None:
        if not isinstance(doc, dict):
            raise ImageError(where=at, what="must be an object")
        self._doc: dict[str, Any] = doc
        self._asked: set[str] = set()
        self.at = at

    def path(self, key: str) -> str:
        """How a fault in this field is named."""
        return f"{self.at}.{key}"

    def has(self, key: str) -> bool:
        """The field is present and not null."""
        self._asked.add(key)
        return self._doc.get(key) is not None

    def is_there(self, key: str) -> bool:
        """The field is present, be it null."""
        self._asked.add(key)
        return key in self._doc

    def any(self, key: str) -> Any:
        """The field, which must be present."""
        self._asked.add(key)
        if key not in self._doc:
            raise ImageError(where=self.path(key), what="is missing")
        return self._doc[key]

    def text(self, key: str) -> str:
        """A string that must be present."""
        return self._text(self.any(key), self.path(key))

    def text_or_none(self, key: str) -> str | None:
        """A string, or None where it is absent or null."""
        return self.text(key) if self.has(key) else None

    def integer(self, key: str) -> int:
        """A non-negative integer."""
        value = self.any(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ImageError(where=self.path(key), what="must be a non-negative integer")
        return value

    def integer_or_none(self, key: str) -> int | None:
        """A non-negative integer, or None where it is absent or null."""
        return self.integer(key) if self.has(key) else None

    def object(self, key: str) -> Fields:
        """A nested object."""
        return Fields(self.any(key), self.path(key))

    def items(self, key: str) -> list[Any]:
        """A list that must be present."""
        value = self.any(key)
        if not isinstance(value, list):
            raise ImageError(where=self.path(key), what="must be a list")
        if len(value) > MAX_ITEMS:
            raise LimitExceeded(where=self.path(key), what="its length", found=len(value), limit=MAX_ITEMS)
        return value

    def objects(self, key: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(item, f"{self.path(key)}[{n}]") for n, item in enumerate(self.items(key))]

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        return tuple(self._text(item, f"{self.path(key)}[{n}]") for n, item in enumerate(self.items(key)))

    def one_of(self, key: str, *allowed: str) -> str:
        """A string out of a fixed set."""
        value = self.text(key)
        if value not in allowed:
            raise ImageError(where=self.path(key), what=f"must be one of {', '.join(allowed)}")
        return value

    def hex_digest(self, key: str) -> str:
        """64 lower-case hex digits."""
        value = self.text(key)
        if not is_hex_digest(value):
            raise ImageError(where=self.path(key), what="must be 64 lower-case hex digits")
        return value

    def sha256_digest(self, key: str) -> str:
        """A digest as registries write it; any other word would be taken for a tag, whose content nobody has named."""
        value = self.text(key)
        if not value.startswith("sha256:") or not is_hex_digest(value.removeprefix("sha256:")):
            raise ImageError(where=self.path(key), what="must be sha256: and 64 lower-case hex digits")
        return value

    def base64(self, key: str, *, max_bytes: int) -> bytes:
        """Bytes in the standard alphabet with padding, in the one spelling that an encoder gives them."""
        text = self.any(key)
        if not isinstance(text, str) or len(text) > (max_bytes + 2) // 3 * 4:
            raise ImageError(where=self.path(key), what=f"must be base64 of at most {max_bytes} bytes")
        try:
            data = base64.b64decode(text.encode("ascii"), validate=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise ImageError(where=self.path(key), what="is not base64") from error
        if len(data) > max_bytes:
            raise ImageError(where=self.path(key), what=f"must be base64 of at most {max_bytes} bytes")
        if base64.b64encode(data).decode() != text:
            raise ImageError(where=self.path(key), what="is not base64 in its one canonical form")
        return data

    def base64_of(self, key: str, size: int) -> bytes:
        """The same of exactly so many bytes."""
        data = self.base64(key, max_bytes=size)
        if len(data) != size:
            raise ImageError(where=self.path(key), what=f"must be base64 of {size} bytes")
        return data

    def unknown(self) -> dict[str, Any]:
        """The fields nobody asked for: kept, and written back unchanged."""
        return {key: value for key, value in self._doc.items() if key not in self._asked}

    def whole(self) -> dict[str, Any]:
        """The object as it was read, to be kept and written back."""
        return dict(self._doc)

    @staticmethod
    def _text(value: Any, at: str) -> str:
        if not isinstance(value, str):
            raise ImageError(where=at, what="must be a string")
        if len(value) > MAX_TEXT:
            raise LimitExceeded(where=at, what="its length", found=len(value), limit=MAX_TEXT)
        return value


def is_hex_digest(text: str) -> bool:
    """64 lower-case hex digits, the written form of a 256-bit digest."""
    return len(text) == 64 and all(digit in "0123456789abcdef" for digit in text)
