"""Exchanges with one registry: authentication, redirects, retries, limits on what an answer may hold (docs/registry.md).

`call` is for small questions and repeats them; `begin` opens one answer whose body the caller streams; `send` streams
a body out once. Refuses to send an Authorization header to another host than the registry's, to follow a redirect from
https to http, and to read more of an answer than the caller allows.
`uploads`, `downloads`, `manifests` and `referrers` speak through it and know no HTTP library.
"""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urljoin, urlsplit

from image_format.registry.network import Cut, Network, NotTls, read_some
from image_format.registry.patience import Patience, Retries
from image_format.registry.reference import is_loopback, is_on_host
from image_format.registry.tokens import Authority
from vgpu_errors import LimitExceeded, NotInRegistry, RegistryAnswerInvalid, RegistryDenied, RegistryRefused
from vgpu_errors import RegistryUnreachable as Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from urllib3.response import BaseHTTPResponse

    from image_format.registry.credentials import Credentials
    from image_format.registry.tokens import Scopes

MAX_ERROR_BYTES = 64 << 10
MAX_SAID = 300
MAX_REDIRECTS = 5
WORTH_ANOTHER_ATTEMPT = frozenset({408, 425, 429, 500, 502, 503, 504})
REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str

    def header(self, name: str) -> str | None:
        """A header, whatever its case."""
        return self.headers.get(name)


class Wait(Exception):
    """The registry refused for now."""

    def __init__(self, what: str, retry_after: str | None = None) -> None:
        super().__init__(what)
        self.retry_after = retry_after


class TokenEnded(Cut):
    """The registry refused the token in the middle of a body; there is a new one."""


class Session:
    """One registry, one identity; shared by all threads."""

    def __init__(
        self,
        host: str,
        network: Network,
        credentials: Credentials | None,
        *,
        plain_http: bool | None = None,
        is_insecure: bool = False,
        retries: Retries | None = None,
        on_notice: Callable[[str], None] | None = None,
    ) -> None:
        self.host = host
        self.retries = retries or Retries()
        self.stop = threading.Event()
        self._network = network
        self._on_notice = on_notice
        # None: https is tried, and where it is no TLS and the user or the address allows it, http.
        self._scheme: str | None = None if plain_http is None else ("http" if plain_http else "https")
        self._may_be_plain = plain_http is not False and (plain_http is True or is_insecure or is_loopback(host))
        if not self._may_be_plain:
            self._scheme = "https"
        self._authority = Authority(host, credentials, self._ask_token_server, self._allows_plain)
        self._probing = threading.Lock()

    # ---- what the parts of the client call ---------------------------------------------------------

    def call(
        self,
        method: str,
        path: str,
        scopes: Scopes,
        *,
        accept: Iterable[int],
        max_bytes: int,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        """A small exchange, repeated while that may help; another status than the accepted ones is raised."""
        patience = self.patience()
        accepted = frozenset(accept)
        while True:
            patience.check()
            try:
                with self.begin(method, path, scopes, headers=headers, body=body) as (response, url):
                    if response.status not in accepted:
                        self.refuse(response, url)
                    data = b"" if method == "HEAD" else read_limited(response, max_bytes, url, patience.check)
                    return Answer(response.status, response.headers, data, url)
            except Cut as error:
                patience.failed(str(error))
            except Wait as error:
                patience.failed(str(error), error.retry_after)

    @contextlib.contextmanager
    def begin(
        self,
        method: str,
        path: str,
        scopes: Scopes,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Iterator[tuple[BaseHTTPResponse, str]]:
        """One exchange after authentication and redirects, its body unread; may raise `Cut`."""
        url, data, is_renewed = self.url(path), body, False
        for _ in range(MAX_REDIRECTS + 2):
            authorization = self._authority.header(scopes) if self._is_ours(url) else None
            response = self._exchange(method, url, _with(headers, authorization), data)
            with _released(response):
                if response.status == 401 and self._is_ours(url) and not is_renewed:
                    is_renewed = True
                    self._authority.renew(_challenges_in(response), scopes, authorization)
                elif response.status in REDIRECTS and method in ("GET", "HEAD"):
                    url = self.follow(url, response.headers.get("Location"))
                else:
                    yield response, url
                    return
        raise RegistryAnswerInvalid(where=self.host, what=f"more than {MAX_REDIRECTS} redirects")

    def send(
        self, method: str, url: str, scopes: Scopes, headers: Mapping[str, str], body: Iterable[memoryview] | bytes
    ) -> Answer:
        """Stream a body out, once. A token that ended is renewed and told as `TokenEnded`: the body must be sent again."""
        authorization = self._authority.header(scopes) if self._is_ours(url) else None
        response = self._exchange(method, url, _with(headers, authorization), body)
        with _released(response):
            if response.status == 401 and self._is_ours(url):
                self._authority.renew(_challenges_in(response), scopes, authorization)
                raise TokenEnded("the token ended")
            data = read_beginning(response, MAX_ERROR_BYTES)
            return Answer(response.status, response.headers, data, url)

    def patience(self) -> Patience:
        """For one piece of work."""
        return Patience(self.retries, self.stop, self.host, self._on_notice)

    def refuse(self, response: BaseHTTPResponse, url: str) -> NoReturn:
        """Raise what this status means."""
        said = said_by(read_beginning(response, MAX_ERROR_BYTES))
        raise self.fault(response.status, said, url, response.headers.get("Retry-After"))

    def fault(self, status: int, said: str, url: str, retry_after: str | None = None) -> Exception:
        """The error for an answer that was not accepted."""
        where = urlsplit(url).netloc
        what = f"status {status}{f', {said}' if said else ''}"
        if status in WORTH_ANOTHER_ATTEMPT:
            return Wait(what, retry_after)
        if status in (401, 403):
            return RegistryDenied(where=where, what=what)
        if status == 404:
            return NotInRegistry(where=where, what=f"{urlsplit(url).path} ({what})")
        if 400 <= status < 600:
            return RegistryRefused(where=where, what=what)
        return RegistryAnswerInvalid(where=where, what=f"{what} was not expected")

    def url(self, path: str) -> str:
        """The whole address; finds out first which scheme the registry speaks."""
        if "://" in path:
            return path
        return f"{self._known_scheme()}://{self.host}{path}"

    def follow(self, url: str, location: str | None) -> str:
        """Where an answer sends us; https never leads to http, except that proxies forget the s of our own host."""
        if not location:
            raise RegistryAnswerInvalid(where=self.host, what="it redirects without an address")
        target = urlsplit(urljoin(url, location))
        if target.scheme not in ("http", "https") or not target.netloc or target.username is not None:
            raise RegistryAnswerInvalid(where=self.host, what="it redirects to an address that cannot be used")
        if target.scheme == "http" and urlsplit(url).scheme == "https":
            if target.hostname != urlsplit(url).hostname:
                raise RegistryAnswerInvalid(where=self.host, what=f"it redirects from https to http on {target.netloc}")
            target = target._replace(scheme="https", netloc=urlsplit(url).netloc)
        return target.geturl()

    def close(self) -> None:
        """Let go of all connections."""
        self._network.close()

    # ---- inside ------------------------------------------------------------------------------------

    def _exchange(
        self, method: str, url: str, headers: dict[str, str], body: bytes | Iterable[memoryview] | None
    ) -> BaseHTTPResponse:
        try:
            return self._network.exchange(method, url, headers, body)
        except NotTls as error:
            remedy = "If it speaks plain http on purpose and you trust the network, say --plain-http."
            what = f"it does not speak TLS ({error})"
            raise Unreachable(where=urlsplit(url).netloc, what=what, remedy=remedy) from error

    def _known_scheme(self) -> str:
        with self._probing:
            if self._scheme is None:
                self._scheme = self._probe()
        return self._scheme

    def _probe(self) -> str:
        """Which scheme a registry speaks that may be plain; nothing of ours is told to it."""
        patience = self.patience()
        while True:
            try:
                with _released(self._network.exchange("GET", f"https://{self.host}/v2/", {})):
                    return "https"
            except NotTls:
                return "http"
            except Cut as error:
                # A plain server may also just hang up on a TLS greeting.
                try:
                    with _released(self._network.exchange("GET", f"http://{self.host}/v2/", {})):
                        return "http"
                except Cut:
                    patience.failed(str(error))

    def _is_ours(self, url: str) -> bool:
        return is_on_host(url, self.host) and urlsplit(url).scheme == self._scheme

    def _allows_plain(self, netloc: str) -> bool:
        return is_loopback(netloc) or (self._scheme == "http" and urlsplit(f"//{netloc}").hostname == self._name)

    @property
    def _name(self) -> str | None:
        return urlsplit(f"//{self.host}").hostname

    def _ask_token_server(
        self, method: str, url: str, headers: dict[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        patience = self.patience()
        while True:
            patience.check()
            try:
                response = self._exchange(method, url, headers, body)
                with _released(response):
                    if response.status not in WORTH_ANOTHER_ATTEMPT:
                        return response.status, read_limited(response, 1 << 20, url)
                    retry_after = response.headers.get("Retry-After")
                patience.failed(f"the token server answered with status {response.status}", retry_after)
            except Cut as error:
                patience.failed(f"the token server: {error}")


def read_limited(
    response: BaseHTTPResponse, max_bytes: int, where: str, check: Callable[[], None] = lambda: None
) -> bytes:
    """The whole body, if it is no longer than that; `check` raises where nobody wants it any more."""
    declared = response.headers.get("Content-Length", "")
    if declared.isdigit() and len(declared) < 20 and int(declared) > max_bytes and response.status < 300:
        _refuse_size(where, int(declared), max_bytes)
    data = read_beginning(response, max_bytes + 1, check)
    if len(data) > max_bytes:
        _refuse_size(where, f"more than {max_bytes}", max_bytes)
    return data


def read_beginning(response: BaseHTTPResponse, max_bytes: int, check: Callable[[], None] = lambda: None) -> bytes:
    """The body, as far as this many bytes."""
    data = bytearray()
    while len(data) < max_bytes and (part := read_some(response, min(256 << 10, max_bytes - len(data)))):
        data += part
        check()
    return bytes(data)


def _refuse_size(where: str, found: object, limit: int) -> NoReturn:
    parts = urlsplit(where)
    raise LimitExceeded(where=f"{parts.netloc}{parts.path}", what="the size of its answer", found=found, limit=limit)


def said_by(body: bytes) -> str:
    """The registry's own words, made safe for a terminal."""
    try:
        errors = json.loads(body)["errors"]
        text = "; ".join(f"{error.get('code', '')}: {error.get('message', '')}" for error in errors[:3])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = body.decode(errors="replace") if not body.lstrip().startswith(b"<") else ""
    words = " ".join(text.split())[:MAX_SAID]
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def _with(headers: Mapping[str, str] | None, authorization: str | None) -> dict[str, str]:
    return {**(headers or {}), **({"Authorization": authorization} if authorization else {})}


def _challenges_in(response: BaseHTTPResponse) -> list[str]:
    return response.headers.getlist("WWW-Authenticate")


@contextlib.contextmanager
def _released(response: BaseHTTPResponse) -> Iterator[BaseHTTPResponse]:
    """Give the connection back; one whose body was not read to its end is closed, unless the rest is short."""
    try:
        yield response
    finally:
        rest = response.length_remaining
        if rest is not None and rest <= MAX_ERROR_BYTES:
            with contextlib.suppress(Cut):
                read_beginning(response, MAX_ERROR_BYTES)
            response.release_conn()
        else:
            response.close()
