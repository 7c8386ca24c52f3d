"""Finds the credentials that podman, docker and their helpers keep for a registry (docs/registry.md).

Looks where podman looks, in its order: REGISTRY_AUTH_FILE (or the file that was named), auth.json in XDG_RUNTIME_DIR,
auth.json in the user's containers folder, docker's config.json. The first that knows the registry wins.
Writes nothing, and never puts a secret into a message. A helper is a program of the user's and gets a deadline.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from image_format import canonical_json
from image_format.registry.reference import HUB
from vgpu_errors import BadConfiguration, CredentialHelperFailed, ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from image_format.registry.reference import Reference

HELPER_DEADLINE_S = 30
MAX_HELPER_BYTES = 64 << 10
MAX_FILE_BYTES = 1 << 20
HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "registry-1.docker.io")
TOKEN_USER = "<token>"  # noqa: S105 - how helpers mark an identity token
_HELPER_NAME = re.compile(r"[A-Za-z0-9._-]+")
_NOT_FOUND = "credentials not found"


@dataclass(frozen=True)
class Credentials:
    """A user with a password, or an identity token."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    def basic(self) -> str:
        """The header for Basic authentication."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def find(
    reference: Reference, *, auth_file: Path | str | None = None, environ: Mapping[str, str] = os.environ
) -> Credentials | None:
    """What is known for this repository, or None."""
    for path in places(auth_file, environ):
        settings = _read(path)
        if settings is not None:
            found = _from_settings(settings, reference, path, environ)
            if found:
                return found
    return None


def places(auth_file: Path | str | None, environ: Mapping[str, str]) -> Iterator[Path]:
    """The files in order; a file that was named is the only one, as with podman."""
    named = auth_file or environ.get("REGISTRY_AUTH_FILE")
    if named:
        yield Path(named)
        return
    home = Path(environ.get("HOME") or "/root")
    runtime = environ.get("XDG_RUNTIME_DIR")
    yield Path(runtime, "containers/auth.json") if runtime else Path(f"/run/containers/{os.getuid()}/auth.json")
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config", "containers/auth.json")
    yield Path(environ.get("DOCKER_CONFIG") or home / ".docker", "config.json")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadConfiguration(path=path, what=f"cannot be read ({error.strerror})") from error
    try:
        # Other people's file: floats and the like in it are none of our business.
        doc = json.loads(data) if len(data) <= MAX_FILE_BYTES else None
    except (ValueError, RecursionError):
        doc = None
    if not isinstance(doc, dict):
        raise BadConfiguration(path=path, what="is not a file of registry credentials", remedy="Log in again.")
    return doc


def _from_settings(
    settings: dict[str, Any], reference: Reference, path: Path, environ: Mapping[str, str]
) -> Credentials | None:
    helpers = _object(settings, "credHelpers")
    for key in _hosts(reference):
        if isinstance(helpers.get(key), str):
            return ask_helper(helpers[key], key, environ)
    auths = _object(settings, "auths")
    for key in _keys(reference):
        if key in auths:
            found = _from_entry(auths[key], path, key)
            if found:
                return found
    store = settings.get("credsStore")
    if isinstance(store, str) and store:
        for key in _hosts(reference):
            found = ask_helper(store, key, environ)
            if found:
                return found
    return None


def _hosts(reference: Reference) -> tuple[str, ...]:
    return (HUB, *HUB_KEYS) if reference.host == HUB else (reference.host, f"https://{reference.host}")


def _keys(reference: Reference) -> Iterator[str]:
    """The longest namespace first, then the host in the ways that it is written."""
    parts = reference.repository.split("/")
    for count in range(len(parts), 0, -1):
        yield "/".join([reference.host, *parts[:count]])
    yield from _hosts(reference)
    yield from (f"https://{reference.host}/", f"https://{reference.host}/v2/", f"https://{reference.host}/v1/")


def _from_entry(entry: Any, path: Path, key: str) -> Credentials | None:
    if not isinstance(entry, dict):
        return None
    token = entry.get("identitytoken")
    user, password = _decoded(entry.get("auth"), path, key)
    if isinstance(token, str) and token:
        return Credentials(user, password, token)
    return Credentials(user, password) if user else None


def _decoded(auth: Any, path: Path, key: str) -> tuple[str, str]:
    if not isinstance(auth, str) or not auth:
        return "", ""
    try:
        user, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
    except ValueError:  # no base64, no UTF-8, or not even ASCII
        user, colon, password = "", "", ""
    if not colon or not user:
        raise BadConfiguration(path=path, what=f"the entry of {key} is damaged", remedy="Log in again.")
    return user, password.rstrip("\0")


def _object(settings: dict[str, Any], key: str) -> dict[str, Any]:
    value = settings.get(key)
    return value if isinstance(value, dict) else {}


def ask_helper(name: str, server: str, environ: Mapping[str, str] = os.environ) -> Credentials | None:
    """What `docker-credential-NAME get` knows of the server."""
    program = f"docker-credential-{name}"
    if not _HELPER_NAME.fullmatch(name):
        raise CredentialHelperFailed(helper=ascii(name)[1:-1], where=server, what="that is no name of a program")
    try:
        done = subprocess.run(
            [program, "get"],
            input=server.encode(),
            capture_output=True,
            timeout=HELPER_DEADLINE_S,
            check=False,
            env=dict(environ),
        )
    except subprocess.TimeoutExpired as error:
        what = f"it did not answer in {HELPER_DEADLINE_S} s"
        raise CredentialHelperFailed(helper=program, where=server, what=what) from error
    except OSError as error:
        raise CredentialHelperFailed(helper=program, where=server, what=str(error.strerror)) from error
    return _helper_answer(program, server, done)


def _helper_answer(program: str, server: str, done: subprocess.CompletedProcess[bytes]) -> Credentials | None:
    if done.returncode:
        # Helpers say on stdout what went wrong; a secret is only there where they succeeded.
        said = (done.stdout + b" " + done.stderr)[:200].decode(errors="replace").strip()
        if _NOT_FOUND in said:
            return None
        raise CredentialHelperFailed(
            helper=program, where=server, what=ascii(said)[1:-1] or f"status {done.returncode}"
        )
    try:
        doc = canonical_json.read_object(done.stdout, where=program, max_bytes=MAX_HELPER_BYTES)
        user, secret = doc["Username"], doc["Secret"]
    except (ImageError, KeyError) as error:
        raise CredentialHelperFailed(helper=program, where=server, what="its answer cannot be read") from error
    if not isinstance(user, str) or not isinstance(secret, str):
        raise CredentialHelperFailed(helper=program, where=server, what="its answer cannot be read")
    if user == TOKEN_USER:
        return Credentials(identity_token=secret)
    return Credentials(user, secret) if user else None
