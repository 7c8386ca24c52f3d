"""Connections to a registry and to where it redirects: certificates, proxies, time-outs (docs/registry.md).

One exchange at a time, without retries and without following anything; `session` decides about these.
The registry's own certificates (certs.d) are shown to the registry alone; other hosts meet the system's CA files.
Refuses plain http unless the session asked for it, and a proxy scheme that it cannot speak.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast
from urllib.parse import unquote, urlsplit, urlunsplit

import urllib3
from urllib3.exceptions import HTTPError, LocationParseError, MaxRetryError, NewConnectionError, ProxyError
from urllib3.exceptions import SSLError as UrllibSslError
from urllib3.util import make_headers

from image_format.registry.reference import host_without_port, is_loopback, is_on_host
from vgpu_errors import BadConfiguration, RegistryAnswerInvalid, RegistryUnreachable, UnsupportedRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from urllib3.response import BaseHTTPResponse

# Idle connections that are kept per host; more than transfers are in flight.
CONNECTIONS = 16
BLOCK_BYTES = 1 << 20
USER_AGENT = "vgpu-snapshot"
CERTIFICATE_FOLDERS = ("/etc/containers/certs.d", "/etc/docker/certs.d")
_WRONG_VERSION = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF", "HTTP_REQUEST")


class Cut(Exception):
    """The exchange broke off in the network; worth another attempt."""


class NotTls(Exception):
    """The other side does not speak TLS on this port."""


class Network:
    """Pools of connections, shared by all threads of one registry client."""

    def __init__(
        self,
        host: str,
        *,
        ca_file: Path | str | None = None,
        timeouts: tuple[float, float],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._host = host
        self._ca_file = Path(ca_file) if ca_file else None
        self._timeout = urllib3.Timeout(connect=timeouts[0], read=timeouts[1])
        self._environ = environ
        self._pools: dict[tuple[bool, str | None], urllib3.PoolManager] = {}
        self._lock = threading.Lock()

    def exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | Iterable[memoryview] | None = None,
    ) -> BaseHTTPResponse:
        """Send one request and return its answer with the body unread."""
        headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity", **headers}
        try:
            return self._pool(url).request(
                method,
                url,
                body=cast("Any", body),  # its iterable may hold any buffer
                headers=headers,
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
                timeout=self._timeout,
            )
        except (HTTPError, OSError) as error:
            self._explain(error, urlsplit(url).netloc)

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            for pool in self._pools.values():
                pool.clear()

    def _pool(self, url: str) -> urllib3.PoolManager:
        key = (is_on_host(url, self._host), proxy_for(url, self._environ))
        with self._lock:
            if key not in self._pools:
                self._pools[key] = self._new_pool(*key)
            return self._pools[key]

    def _new_pool(self, is_own: bool, proxy: str | None) -> urllib3.PoolManager:
        settings: dict[str, Any] = {
            "num_pools": 8,
            "maxsize": CONNECTIONS,
            "blocksize": BLOCK_BYTES,
            "ssl_context": self._tls(is_own),
        }
        return urllib3.PoolManager(**settings) if proxy is None else _proxy_pool(proxy, settings)

    def _tls(self, is_own: bool) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if not is_own:
            return context
        if self._ca_file:
            _load_ca(context, self._ca_file)
        for folder in certificate_folders(self._host, self._environ):
            load_certificates(context, folder)
        return context

    def _explain(self, error: HTTPError | OSError, where: str) -> NoReturn:
        reason = error.reason if isinstance(error, MaxRetryError) else error
        text = _short(reason)
        if isinstance(reason, UrllibSslError | ssl.SSLError):
            if any(word in text for word in _WRONG_VERSION):
                raise NotTls(text) from error
            raise RegistryUnreachable(where=where, what=text) from error
        if isinstance(reason, ProxyError):
            raise Cut(f"through the proxy: {text}") from error
        if isinstance(reason, LocationParseError):
            raise RegistryAnswerInvalid(
                where=where, what=f"it names an address that cannot be read ({text})"
            ) from error
        if isinstance(reason, NewConnectionError):
            raise Cut(f"no connection ({_short(reason.__cause__ or reason)})") from error
        raise Cut(text) from error


def read_some(response: BaseHTTPResponse, count: int) -> bytes:
    """What has come of a body, at most `count` bytes; nothing at its end; a broken connection is a `Cut`.

    Not more than what has come: bytes that were waited with would be lost with the connection.
    """
    try:
        return response.read1(count)
    except (HTTPError, OSError) as error:
        raise Cut(_short(error)) from error


def _short(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    return (text[:200] or type(error).__name__).rstrip(".")


# ---- certificates --------------------------------------------------------------------------------


def certificate_folders(host: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """Where podman and docker keep what belongs to this host and port; the user's own folder first."""
    home = environ.get("HOME")
    own = [Path(home, ".config/containers/certs.d")] if home else []
    for folder in (*own, *map(Path, CERTIFICATE_FOLDERS)):
        if (folder / host).is_dir():
            yield folder / host
            return


def load_certificates(context: ssl.SSLContext, folder: Path) -> None:
    """`*.crt` are CA files; `NAME.cert` with `NAME.key` is what the client shows."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".crt":
            _load_ca(context, path)
        elif path.suffix == ".cert":
            try:
                context.load_cert_chain(path, path.with_suffix(".key"), password=_no_password)
            except (OSError, ValueError) as error:
                raise BadConfiguration(path=path, what=f"cannot be used ({_short(error)})", remedy=_MEND) from error


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal.
    raise ValueError("its key has a passphrase")


def _load_ca(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise BadConfiguration(path=path, what=f"is no CA file ({_short(error)})", remedy=_MEND) from error


_MEND = "Replace the file with a PEM certificate, or remove it."


# ---- proxies -------------------------------------------------------------------------------------


def proxy_for(url: str, environ: Mapping[str, str]) -> str | None:
    """The proxy that the environment names for this address, or None."""
    parts = urlsplit(url)
    if is_loopback(parts.netloc) or is_excepted(parts.netloc, _variable(environ, "no_proxy") or ""):
        return None
    return _variable(environ, f"{parts.scheme}_proxy") or _variable(environ, "all_proxy") or None


def _variable(environ: Mapping[str, str], name: str) -> str | None:
    return environ.get(name) or environ.get(name.upper())


def is_excepted(host: str, rules: str) -> bool:
    """NO_PROXY speaks of this host: `*`, a name and all below it, an address, a network, each with or without a port."""
    name = host_without_port(host)
    for rule in (word.strip().lower() for word in rules.split(",")):
        if rule == "*" or (rule and rule in (name, host.lower())) or _is_in_network(name, rule):
            return True
        if rule and name.endswith("." + rule.removeprefix("*").removeprefix(".").partition(":")[0]):
            return True
    return False


def _is_in_network(name: str, rule: str) -> bool:
    try:
        return "/" in rule and ipaddress.ip_address(name) in ipaddress.ip_network(rule, strict=False)
    except ValueError:
        return False


def _proxy_pool(proxy: str, settings: dict[str, Any]) -> urllib3.PoolManager:
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UnsupportedRequest(
            what=f"The proxy setting names a {parts.scheme or 'strange'} proxy; http and https are possible.",
            remedy="Set HTTPS_PROXY to an http or https proxy, or list the registry in NO_PROXY.",
        )
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    headers = make_headers(proxy_basic_auth=user) if user else None
    address = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], "", "", ""))
    return urllib3.ProxyManager(address, proxy_headers=headers, **settings)
