"""Names an image in a registry: `HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]` (docs/registry.md).

Refuses a name without a host: no registry is searched, so that a checkpoint never goes where nobody meant it to.
Pure. The registry client and the verbs push and pull parse what users write with it.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from image_format.fields import is_hex_digest
from vgpu_errors import BadReference

MAX_TEXT = 1024
MAX_REPOSITORY = 255
DEFAULT_TAG = "latest"
# Docker Hub is known by one name and served by another.
HUB, HUB_SERVER = "docker.io", "registry-1.docker.io"

_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST_PREFIX = "sha256:"


@dataclass(frozen=True)
class Reference:
    """One image, or one repository where both tag and digest are None."""

    host: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse what a user wrote."""
        if len(text) > MAX_TEXT:
            raise BadReference(text=ascii(text[:64])[1:-1] + "...", what=f"it is longer than {MAX_TEXT} characters")
        rest, _, digest = text.partition("@")
        host, slash, path = rest.partition("/")
        if not slash or not _is_host(host):
            raise BadReference(text=ascii(text)[1:-1], what="it does not begin with a registry's host")
        repository, colon, tag = path.partition(":")
        reference = cls(host, _repository(host, repository), tag if colon else None, digest if "@" in text else None)
        fault = reference._fault()
        if fault:
            raise BadReference(text=ascii(text)[1:-1], what=fault)
        return reference

    def _fault(self) -> str | None:
        if len(self.repository) > MAX_REPOSITORY or not _REPOSITORY.fullmatch(self.repository):
            return "the repository is not lower-case letters, digits and single separators"
        if self.tag is not None and not _TAG.fullmatch(self.tag):
            return "the tag is not up to 128 letters, digits and ._-"
        if self.digest is not None and not is_digest(self.digest):
            return "the digest is not sha256: and 64 lower-case hex digits"
        return None

    @property
    def name(self) -> str:
        """Host and repository."""
        return f"{self.host}/{self.repository}"

    @property
    def target(self) -> str:
        """What to ask the registry for: the digest, else the tag, else `latest`."""
        return self.digest or self.tag or DEFAULT_TAG

    @property
    def server(self) -> str:
        """The host and port that requests go to."""
        return HUB_SERVER if self.host == HUB else self.host

    def at(self, digest: str) -> Reference:
        """The same repository, by digest."""
        return replace(self, tag=None, digest=digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.name}{tag}" + (f"@{self.digest}" if self.digest else "")


def is_digest(text: str) -> bool:
    """`sha256:` and 64 lower-case hex digits."""
    return text.startswith(_DIGEST_PREFIX) and is_hex_digest(text.removeprefix(_DIGEST_PREFIX))


def is_loopback(host: str) -> bool:
    """The host, with or without a port, is this machine."""
    name = host_without_port(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_on_host(url: str, host: str) -> bool:
    """The address is one of this host and port; the port that everybody knows need not be said."""
    parts = urlsplit(url)
    known = {"https": ":443", "http": ":80"}.get(parts.scheme, "")
    return parts.netloc.lower().removesuffix(known) == host.lower().removesuffix(known)


def host_without_port(host: str) -> str:
    """The bare name or address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_host(text: str) -> bool:
    if not _HOST.fullmatch(text):
        return False
    _, colon, port = text.rpartition("]")[2].partition(":")
    if colon and not 0 < int(port) < 1 << 16:
        return False
    return "." in text or ":" in text or text == "localhost"


def _repository(host: str, path: str) -> str:
    return f"library/{path}" if host == HUB and "/" not in path else path
