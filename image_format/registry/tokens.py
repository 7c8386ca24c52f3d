"""Proves to a registry who asks: Basic, bearer tokens, identity tokens (docs/registry.md).

A token is asked for when the registry demands it (401 with a challenge), kept per scope, and renewed before it ends or
when it is refused. Credentials go to the registry and to the token server that it names; never in the clear to
another host than the one the user allowed plain http for.
"""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from vgpu_errors import RegistryAnswerInvalid, RegistryDenied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from image_format.registry.credentials import Credentials

MAX_TOKEN_BYTES = 1 << 20
DEFAULT_LIFE_S = 60
CLIENT_ID = "vgpu-snapshot"
# A token is renewed when this share of its life is over, so that it does not end inside a request.
USED_SHARE = 0.8

_CHALLENGE = re.compile(r"([A-Za-z][A-Za-z0-9-]*)\s+((?:[A-Za-z_]+\s*=\s*(?:\"[^\"]*\"|[^\s,\"]+)\s*(?:,\s*|$))+)")
_PARAMETER = re.compile(r"([A-Za-z_]+)\s*=\s*(?:\"([^\"]*)\"|([^\s,\"]+))")

Scopes = tuple[str, ...]


@dataclass(frozen=True)
class Challenge:
    """How the registry wants to be asked."""

    scheme: str
    realm: str
    service: str
    scope: str


@dataclass(frozen=True)
class _Token:
    header: str
    ends: float


def pull_scope(repository: str) -> Scopes:
    """To read from it."""
    return (f"repository:{repository}:pull",)


def push_scope(repository: str) -> Scopes:
    """To write to it."""
    return (f"repository:{repository}:pull,push",)


def delete_scope(repository: str) -> Scopes:
    """To delete in it."""
    return (f"repository:{repository}:delete,pull",)


def challenges(values: Iterable[str]) -> Iterator[Challenge]:
    """The challenges of WWW-Authenticate that can be answered."""
    for value in values:
        for scheme, parameters in _CHALLENGE.findall(value[:8192]):
            fields = {name.lower(): quoted or bare for name, quoted, bare in _PARAMETER.findall(parameters)}
            if scheme.lower() in ("basic", "bearer"):
                realm, service = fields.get("realm", ""), fields.get("service", "")
                yield Challenge(scheme.lower(), realm, service, fields.get("scope", ""))


class Authority:
    """Who we are at one registry; shared by all threads."""

    def __init__(
        self,
        where: str,
        credentials: Credentials | None,
        ask: Callable[[str, str, dict[str, str], bytes | None], tuple[int, bytes]],
        may_be_plain: Callable[[str], bool],
    ) -> None:
        self._where = where
        self._credentials = credentials
        self._ask = ask
        self._may_be_plain = may_be_plain
        self._challenge: Challenge | None = None
        self._tokens: dict[Scopes, _Token] = {}
        self._identity_token = credentials.identity_token if credentials else ""
        self._lock = threading.Lock()

    def header(self, scopes: Scopes) -> str | None:
        """The Authorization header for these scopes, fresh; None as long as the registry did not ask for one."""
        token = self._tokens.get(scopes)
        if token and time.monotonic() < token.ends:
            return token.header
        with self._lock:
            if self._challenge is None:
                return None
            token = self._tokens.get(scopes)
            if not token or time.monotonic() >= token.ends:
                token = self._tokens[scopes] = self._answer(self._challenge, scopes)
            return token.header

    def renew(self, values: Iterable[str], scopes: Scopes, refused: str | None) -> None:
        """The registry refused that header: find another one or raise."""
        with self._lock:
            token = self._tokens.get(scopes)
            if token and token.header != refused:
                return  # another thread was faster
            challenge = self._choose(values)
            self._tokens.pop(scopes, None)
            if challenge.scheme == "basic" and refused is not None:
                raise RegistryDenied(where=self._where, what="the user or the password is wrong")
            self._challenge = challenge
            self._tokens[scopes] = self._answer(challenge, scopes)

    def _choose(self, values: Iterable[str]) -> Challenge:
        found = list(challenges(values))
        for challenge in sorted(found, key=lambda challenge: challenge.scheme != "bearer"):
            if challenge.scheme == "bearer" and challenge.realm:
                return challenge
            if challenge.scheme == "basic":
                if self._credentials is None or not self._credentials.user:
                    raise RegistryDenied(where=self._where, what="it asks for a user and a password, and none is known")
                return challenge
        raise RegistryAnswerInvalid(where=self._where, what="it refuses access and does not say how to authenticate")

    def _answer(self, challenge: Challenge, scopes: Scopes) -> _Token:
        if challenge.scheme == "basic":
            assert self._credentials is not None
            return _Token(self._credentials.basic(), float("inf"))
        wanted = scopes or tuple(challenge.scope.split())
        asked = time.monotonic()
        doc = self._fetch(challenge, wanted)
        token = doc.get("access_token") or doc.get("token")
        if not isinstance(token, str) or not _is_header_safe(token):
            raise RegistryAnswerInvalid(where=challenge.realm, what="its answer holds no token")
        return _Token(f"Bearer {token}", asked + USED_SHARE * _life_of(doc))

    def _fetch(self, challenge: Challenge, scopes: Scopes) -> dict[str, Any]:
        parts = urlsplit(challenge.realm)
        if parts.scheme != "https" and not (parts.scheme == "http" and self._may_be_plain(parts.netloc)):
            raise RegistryDenied(where=self._where, what="it names a token server that would be asked in the clear")
        status, data = self._exchange(challenge, scopes)
        if status in (400, 401, 403):
            known = self._credentials is not None
            what = "the token server refused the credentials" if known else "it gives nothing without credentials"
            raise RegistryDenied(where=self._where, what=what)
        try:
            doc = json.loads(data) if status == 200 else None
        except (ValueError, RecursionError):
            doc = None
        if not isinstance(doc, dict):
            raise RegistryAnswerInvalid(where=challenge.realm, what=f"the token server answered with status {status}")
        if isinstance(doc.get("refresh_token"), str) and self._identity_token:
            self._identity_token = doc["refresh_token"]
        return doc

    def _exchange(self, challenge: Challenge, scopes: Scopes) -> tuple[int, bytes]:
        if self._identity_token:
            form = {
                "grant_type": "refresh_token",
                "service": challenge.service,
                "client_id": CLIENT_ID,
                "scope": " ".join(scopes),
                "refresh_token": self._identity_token,
            }
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            return self._ask("POST", challenge.realm, headers, urlencode(form).encode())
        query = [("service", challenge.service)] if challenge.service else []
        query += [("scope", scope) for scope in scopes]
        headers = {}
        if self._credentials is not None and self._credentials.user:
            query.append(("account", self._credentials.user))
            headers["Authorization"] = self._credentials.basic()
        joint = "&" if urlsplit(challenge.realm).query else "?"
        return self._ask("GET", f"{challenge.realm}{joint}{urlencode(query)}", headers, None)


def _life_of(doc: dict[str, Any]) -> float:
    life = doc.get("expires_in")
    if isinstance(life, bool) or not isinstance(life, int | float) or not 0 < life < 1e9:
        return DEFAULT_LIFE_S
    return float(life)


def _is_header_safe(token: str) -> bool:
    return bool(token) and token.isascii() and token.isprintable() and " " not in token
