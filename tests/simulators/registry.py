"""An OCI registry in this process: the distribution specification over HTTP, with faults that can be ordered.

Stores blobs as files in a folder it is given. `Settings` say what kind of registry it is (authentication, mounts,
referrers, limits); a `Fault` goes off at the requests that it fits, so many times. `log` tells what was asked.
Called by the tests of the registry client and of push and pull, and by bench/registry_transfer.py.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import json
import os
import re
import secrets
import shutil
import socket
import ssl
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
NAME = r"(?P<name>[a-z0-9._/-]+?)"
ROUTES = [
    (re.compile(pattern), action)
    for pattern, action in (
        (r"/v2/", "base"),
        (r"/token", "token"),
        (rf"/v2/{NAME}/blobs/uploads/", "uploads"),
        (rf"/v2/{NAME}/blobs/uploads/(?P<upload>[0-9a-f]+)", "upload"),
        (rf"/v2/{NAME}/blobs/(?P<digest>[a-z0-9]+:[0-9a-f]+)", "blob"),
        (rf"/v2/{NAME}/manifests/(?P<target>[A-Za-z0-9._:-]+)", "manifest"),
        (rf"/v2/{NAME}/referrers/(?P<digest>[a-z0-9]+:[0-9a-f]+)", "referrers"),
        (rf"/v2/{NAME}/tags/list", "tags"),
        (r"/storage/(?P<digest>[a-z0-9]+:[0-9a-f]+)", "storage"),
    )
]
PIECE = 256 << 10


@dataclass
class Fault:
    """Goes off `times` times at requests that fit, after `skip` of them went well."""

    kind: str  # status, hang_up, cut (while a blob's body is under way, either way), content, short_range, slow
    method: str = ""
    path: str = ""
    times: int = 1
    skip: int = 0
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    after_bytes: int = 0

    def fits(self, method: str, path: str) -> bool:
        return self.method in ("", method) and re.search(self.path, path) is not None


@dataclass
class Settings:
    """What kind of registry it is."""

    auth: str = ""  # "", basic, bearer
    users: dict[str, str] = field(default_factory=lambda: {"ann": "secret"})
    identity_tokens: set[str] = field(default_factory=set)
    token_life_s: float = 300
    tells_life: bool = True
    mounts: bool = True
    referrers: bool = True
    ranges: bool = True
    resumes: bool = True
    whole_put: bool = True
    max_body: int | None = None
    min_piece: int = 0
    keeps_pieces: bool = True  # else a PATCH is answered well and forgotten
    page: int = 1000
    storage: str = ""  # blobs are served by a redirect to this address
    bytes_per_s: float = 0
    tells_subject: bool = True
    claims_subject: bool = False  # says OCI-Subject without having the API, as one registry does


@dataclass
class Seen:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    received: int = 0


class RegistrySimulator:
    """Use as a context manager; `address` is HOST:PORT."""

    def __init__(self, folder: Path, settings: Settings | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.folder = Path(folder)
        self.settings = settings or Settings()
        self.faults: list[Fault] = []
        self.log: list[Seen] = []
        self.lock = threading.RLock()
        self.blobs: dict[str, set[str]] = {}  # repository to digests
        self.manifests: dict[str, dict[str, tuple[bytes, str]]] = {}  # repository to digest to (bytes, type)
        self.tags: dict[str, dict[str, str]] = {}
        self.uploads: dict[str, Path] = {}
        self.tokens: dict[str, tuple[set[str], float]] = {}
        self.in_flight = self.most_in_flight = 0
        self._tls = tls
        (self.folder / "blobs").mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.simulator = self
        if self._tls:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    # ---- for tests -------------------------------------------------------------------------------

    def add_blob(self, repository: str, data: bytes) -> str:
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self.path_of(digest).write_bytes(data)
        self.blobs.setdefault(repository, set()).add(digest)
        return digest

    def blob(self, digest: str) -> bytes:
        return self.path_of(digest).read_bytes()

    def path_of(self, digest: str) -> Path:
        return self.folder / "blobs" / digest.replace(":", "-")

    def asked(self, method: str, path: str = "") -> list[Seen]:
        with self.lock:
            return [seen for seen in self.log if seen.method == method and re.search(path, seen.path)]

    def received(self, path: str = "/blobs/uploads/") -> int:
        """Bytes of bodies that came in."""
        with self.lock:
            return sum(seen.received for seen in self.log if path in seen.path)

    def fault_at(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.fits(method, path) and fault.times > 0:
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    simulator: RegistrySimulator

    def handle_error(self, *_: object) -> None:
        """Clients that go away are part of the tests."""


class _Gone(Exception):
    """The connection was cut on purpose."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _any(self) -> None:
        self.sim = self.server.simulator
        self.settings = self.sim.settings
        parts = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        self.left = int(self.headers.get("Content-Length") or 0)
        self.seen = Seen(self.command, self.path, dict(self.headers))
        with self.sim.lock:
            self.sim.log.append(self.seen)
            self.sim.in_flight += 1
            self.sim.most_in_flight = max(self.sim.most_in_flight, self.sim.in_flight)
        self.fault = self.sim.fault_at(self.command, self.path)
        try:
            self._route(parts.path)
        except (_Gone, ConnectionError, TimeoutError):
            self._hang_up()
        finally:
            with self.sim.lock:
                self.sim.in_flight -= 1

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _any  # noqa: N815 - the library's names

    def _route(self, path: str) -> None:
        if self.fault and self.fault.kind == "hang_up":
            raise _Gone
        if self.fault and self.fault.kind == "status":
            self._answer(self.fault.status, self.fault.body, dict(self.fault.headers))
            return
        for pattern, action in ROUTES:
            match = pattern.fullmatch(path)
            if match:
                if action not in ("token", "storage") and not self._is_allowed(match.groupdict().get("name")):
                    return
                getattr(self, f"_{action}")(**match.groupdict())
                return
        self._refuse(404, "NOT_FOUND")

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            # A reset, as a broken middle box gives it; what was not read yet must not reach the client as a clean end.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.connection.shutdown(socket.SHUT_RDWR)

    # ---- answers ---------------------------------------------------------------------------------

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        if self.left:
            # As most servers do: answer at once, and close because the rest of the body is still under way.
            self.close_connection = True
        self.seen.status = status
        self.send_response(status)
        headers = headers or {}
        if status not in (204, 304) and not {"content-length", "transfer-encoding"} & {key.lower() for key in headers}:
            self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD" and body:
            self.wfile.write(body)
        if self.left:
            self._drain()

    def _drain(self) -> None:
        """Swallow a little of what comes, so that the answer gets through before the reset."""
        self.connection.settimeout(0.5)
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            while self.left and self.connection.recv(PIECE):
                pass

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        body = json.dumps({"errors": [{"code": code, "message": f"{code.lower()} for a test"}]}).encode()
        self._answer(status, body, headers)

    # ---- who may ---------------------------------------------------------------------------------

    def _is_allowed(self, name: str | None) -> bool:
        if not self.settings.auth:
            return True
        given = self.headers.get("Authorization") or ""
        if self.settings.auth == "basic":
            if self._user_of(given):
                return True
            self._refuse(401, "UNAUTHORIZED", {"WWW-Authenticate": 'Basic realm="test"'})
            return False
        wanted = {f"repository:{name}:{'pull' if self.command in ('GET', 'HEAD') else 'push'}"} if name else set()
        scopes, ends = self.sim.tokens.get(given.removeprefix("Bearer "), (set(), 0.0))
        if given.startswith("Bearer ") and time.monotonic() < ends and wanted <= scopes:
            return True
        scheme = "https" if isinstance(self.connection, ssl.SSLSocket) else "http"
        realm = f'Bearer realm="{scheme}://{self.sim.address}/token",service="simulator",scope="repository:{name}:pull"'
        self._refuse(401, "UNAUTHORIZED", {"WWW-Authenticate": realm})
        return False

    def _user_of(self, given: str) -> str | None:
        if not given.startswith("Basic "):
            return None
        user, _, password = base64.b64decode(given.removeprefix("Basic ")).decode().partition(":")
        return user if self.settings.users.get(user) == password else None

    def _token(self) -> None:
        scopes, fresh = self.query.get("scope", ""), {}
        if self.command == "POST":
            form = dict(urllib.parse.parse_qsl(self._body().decode()))
            scopes = form.get("scope", "")
            if (
                form.get("grant_type") != "refresh_token"
                or form.get("refresh_token") not in self.settings.identity_tokens
            ):
                self._refuse(401, "UNAUTHORIZED")
                return
        else:
            scopes = " ".join(
                value for key, value in urllib.parse.parse_qsl(self.path.partition("?")[2]) if key == "scope"
            )
            if not self._user_of(self.headers.get("Authorization") or ""):
                self._refuse(401, "UNAUTHORIZED")
                return
        token = secrets.token_hex(8)
        granted = {
            f"{scope.rpartition(':')[0]}:{action}"
            for scope in scopes.split()
            for action in scope.rpartition(":")[2].split(",")
        }
        self.sim.tokens[token] = (granted, time.monotonic() + self.settings.token_life_s)
        life = {"expires_in": self.settings.token_life_s} if self.settings.tells_life else {}
        self._answer(200, json.dumps({"token": token, **life, **fresh}).encode(), {"Content-Type": "application/json"})

    # ---- the specification -----------------------------------------------------------------------

    def _base(self) -> None:
        self._answer(200, b"{}")

    def _blob(self, name: str, digest: str) -> None:
        if digest not in self.sim.blobs.get(name, ()):
            self._refuse(404, "BLOB_UNKNOWN")
        elif self.command == "HEAD":
            size = self.sim.path_of(digest).stat().st_size
            self._answer(200, b"", {"Content-Length": str(size), "Docker-Content-Digest": digest})
        elif self.command == "GET" and self.settings.storage:
            self._answer(307, b"", {"Location": f"{self.settings.storage}/storage/{digest}"})
        elif self.command == "GET":
            self._storage(digest)
        else:
            self._refuse(405, "UNSUPPORTED")

    def _storage(self, digest: str) -> None:
        path = self.sim.path_of(digest)
        size = path.stat().st_size if path.exists() else None
        if size is None:
            self._refuse(404, "BLOB_UNKNOWN")
            return
        start, end, status = 0, size, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked and self.settings.ranges:
            start, end, status = int(asked[1]), min(size, int(asked[2] or size - 1) + 1), 206
            if start >= size:
                self._refuse(416, "RANGE_INVALID")
                return
        if self.fault and self.fault.kind == "short_range" and status == 206:
            end = min(end, start + max(1, self.fault.after_bytes))
        headers = {"Content-Length": str(end - start), "Content-Type": "application/octet-stream"}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        self._answer(status, b"", headers)
        with path.open("rb") as file:
            self._send_file(file, start, end)

    def _send_file(self, file, start: int, end: int) -> None:
        cut = start + self.fault.after_bytes if self.fault and self.fault.kind == "cut" else None
        is_wrong = self.fault is not None and self.fault.kind == "content"
        self.wfile.flush()
        while start < end:
            count = (
                min(PIECE, end - start)
                if self._is_paced() or is_wrong or cut is not None
                else min(16 << 20, end - start)
            )
            if cut is not None:
                count = min(count, cut - start)
                if count <= 0:
                    raise _Gone
            if is_wrong or isinstance(self.connection, ssl.SSLSocket):
                data = os.pread(file.fileno(), count, start)
                self.wfile.write(bytes(byte ^ 1 for byte in data[:1]) + data[1:] if is_wrong else data)
            else:
                self.connection.settimeout(60)
                count = self.connection.sendfile(file, start, count) if count else 0
            start += count
            self._pace(count)

    def _is_paced(self) -> bool:
        return self.settings.bytes_per_s > 0 or (self.fault is not None and self.fault.kind == "slow")

    def _pace(self, count: int) -> None:
        if self._is_paced():
            time.sleep(count / (self.settings.bytes_per_s or 1e6))

    def _uploads(self, name: str) -> None:
        if self.command != "POST":
            self._refuse(405, "UNSUPPORTED")
            return
        digest, source = self.query.get("mount", ""), self.query.get("from", "")
        if digest and self.settings.mounts and digest in self.sim.blobs.get(source, ()):
            self.sim.blobs.setdefault(name, set()).add(digest)
            self._answer(201, b"", {"Location": f"/v2/{name}/blobs/{digest}", "Docker-Content-Digest": digest})
            return
        upload = secrets.token_hex(8)
        path = self.sim.folder / f"upload-{upload}"
        path.touch()
        with self.sim.lock:
            self.sim.uploads[upload] = path
        least = {"OCI-Chunk-Min-Length": str(self.settings.min_piece)} if self.settings.min_piece else {}
        self._answer(202, b"", {**self._place(name, upload), **least})

    def _place(self, name: str, upload: str) -> dict[str, str]:
        size = self.sim.uploads[upload].stat().st_size
        return {"Location": f"/v2/{name}/blobs/uploads/{upload}?state={size}", "Range": f"0-{max(0, size - 1)}"}

    def _upload(self, name: str, upload: str) -> None:
        if upload not in self.sim.uploads:
            self._refuse(404, "BLOB_UPLOAD_UNKNOWN")
            return
        if self.command == "GET":
            if not self.settings.resumes:
                self._refuse(404, "BLOB_UPLOAD_UNKNOWN")
                return
            self._answer(204, b"", self._place(name, upload))
        elif self.command == "DELETE":
            self.sim.uploads.pop(upload).unlink()
            self._answer(204)
        elif self._takes_body(name, upload):
            is_kept = self.command != "PATCH" or self.settings.keeps_pieces
            with (self.sim.uploads[upload] if is_kept else Path(os.devnull)).open("ab") as file:
                self._receive(file)
            if self.command == "PATCH":
                self._answer(202, b"", self._place(name, upload))
            else:
                self._complete(name, upload)

    def _takes_body(self, name: str, upload: str) -> bool:
        size = self.sim.uploads[upload].stat().st_size
        piece = re.fullmatch(r"(\d+)-(\d+)", self.headers.get("Content-Range") or "")
        is_whole = self.command == "PUT" and self.left > 0 and not piece
        if self.settings.max_body is not None and self.left > self.settings.max_body:
            self._refuse(413, "SIZE_INVALID")
        elif is_whole and not self.settings.whole_put:
            self._refuse(405, "UNSUPPORTED")
        elif piece and (int(piece[1]) != size or int(piece[2]) - int(piece[1]) + 1 != self.left):
            self._refuse(416, "RANGE_INVALID", self._place(name, upload))
        else:
            return True
        return False

    def _receive(self, file) -> None:
        cut = self.fault.after_bytes if self.fault and self.fault.kind == "cut" else None
        while self.left:
            data = self.rfile.read(min(PIECE if cut is not None or self._is_paced() else 1 << 20, self.left))
            if not data:
                raise _Gone
            if self.fault and self.fault.kind == "content":
                data = bytes([data[0] ^ 1]) + data[1:]
                self.fault = None
            self.left -= len(data)
            self.seen.received += len(data)
            file.write(data)
            self._pace(len(data))
            if cut is not None and self.seen.received >= cut:
                file.flush()
                raise _Gone
        if cut is not None:
            raise _Gone

    def _complete(self, name: str, upload: str) -> None:
        path, digest = self.sim.uploads[upload], self.query.get("digest", "")
        with path.open("rb") as file:
            found = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            self._refuse(400, "DIGEST_INVALID")
            return
        with self.sim.lock:
            del self.sim.uploads[upload]
            shutil.move(path, self.sim.path_of(digest))
            self.sim.blobs.setdefault(name, set()).add(digest)
        self._answer(201, b"", {"Location": f"/v2/{name}/blobs/{digest}", "Docker-Content-Digest": digest})

    def _body(self) -> bytes:
        data = self.rfile.read(self.left)
        self.left -= len(data)
        return data

    def _manifest(self, name: str, target: str) -> None:
        known = self.sim.manifests.setdefault(name, {})
        tags = self.sim.tags.setdefault(name, {})
        digest = target if ":" in target else tags.get(target, "")
        if self.command == "PUT":
            self._put_manifest(name, target)
        elif digest not in known:
            self._refuse(404, "MANIFEST_UNKNOWN")
        elif self.command == "DELETE":
            del known[digest]
            self.sim.tags[name] = {tag: of for tag, of in tags.items() if of != digest}
            self._answer(202)
        else:
            data, media_type = known[digest]
            if self.fault and self.fault.kind == "content":
                data = data + b" "
            self._answer(200, data, {"Content-Type": media_type, "Docker-Content-Digest": digest})

    def _put_manifest(self, name: str, target: str) -> None:
        data = self._body()
        digest, doc = "sha256:" + hashlib.sha256(data).hexdigest(), json.loads(data)
        blobs = [doc["config"], *doc["layers"]] if "config" in doc else []
        lacking = [blob["digest"] for blob in blobs if blob["digest"] not in self.sim.blobs.get(name, ())]
        known = self.sim.manifests[name]
        lacking += [item["digest"] for item in doc.get("manifests", []) if item["digest"] not in known and not blobs]
        if lacking and "-" not in target:
            self._refuse(400, "MANIFEST_BLOB_UNKNOWN")
            return
        if ":" in target and target != digest:
            self._refuse(400, "DIGEST_INVALID")
            return
        with self.sim.lock:
            known[digest] = (data, self.headers.get("Content-Type") or "")
            if ":" not in target:
                self.sim.tags[name][target] = digest
        headers = {"Location": f"/v2/{name}/manifests/{digest}", "Docker-Content-Digest": digest}
        subject = doc.get("subject")
        if subject and ((self.settings.referrers and self.settings.tells_subject) or self.settings.claims_subject):
            headers["OCI-Subject"] = subject["digest"]
        self._answer(201, b"", headers)

    def _referrers(self, name: str, digest: str) -> None:
        if not self.settings.referrers:
            self._refuse(404, "NOT_FOUND")
            return
        found = []
        for key, (data, media_type) in sorted(self.sim.manifests.get(name, {}).items()):
            doc = json.loads(data)
            if (doc.get("subject") or {}).get("digest") == digest:
                kind = {"artifactType": doc["artifactType"]} if "artifactType" in doc else {}
                found.append({"mediaType": media_type, "digest": key, "size": len(data), **kind})
        page, following = self._page(found)
        body = json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": page}).encode()
        self._answer(200, body, {"Content-Type": INDEX_TYPE, **following})

    def _tags(self, name: str) -> None:
        if name not in self.sim.tags:
            self._refuse(404, "NAME_UNKNOWN")
            return
        page, following = self._page(sorted(self.sim.tags[name]))
        self._answer(200, json.dumps({"name": name, "tags": page}).encode(), following)

    def _page(self, items: list) -> tuple[list, dict[str, str]]:
        start, count = int(self.query.get("last", 0)), self.settings.page
        if start + count >= len(items):
            return items[start:], {}
        path = self.path.partition("?")[0]
        return items[start : start + count], {"Link": f'<{path}?last={start + count}>; rel="next"'}


def configured(settings: Settings, **changes: object) -> Settings:
    """The settings with some of them changed."""
    return dataclasses.replace(settings, **changes)
