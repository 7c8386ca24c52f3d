"""The registry client against a registry in this process, one fault at a time: what arrives is whole, or nothing is."""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
import time

import pytest

from image_format.registry import Credentials, Registry, Retries
from image_format.registry.manifests import INDEX_TYPE, MANIFEST_TYPE
from image_format.registry.parallel import for_each
from image_format.registry.uploads import LEAST_PIECE_BYTES
from tests.simulators.registry import Fault, RegistrySimulator, Settings
from vgpu_errors import (
    Cancelled,
    ContentMismatch,
    LimitExceeded,
    NotInRegistry,
    RegistryAnswerInvalid,
    RegistryContentWrong,
    RegistryDenied,
    RegistryGaveUp,
    RegistryRefused,
    RegistryUnreachable,
)

FAST = Retries(attempts=4, base_s=0.01, cap_s=0.02, connect_timeout_s=2, read_timeout_s=3)
MIB = 1 << 20
DATA = os.urandom(6 * MIB + 4711)
SIZE = len(DATA)
DIGEST = "sha256:" + hashlib.sha256(DATA).hexdigest()
SMALL = b"small"
SMALL_DIGEST = "sha256:" + hashlib.sha256(SMALL).hexdigest()
BLOBS = "/blobs/sha256"
UPLOADS = "/blobs/uploads/"


@pytest.fixture
def simulator(tmp_path):
    with RegistrySimulator(tmp_path / "registry") as started:
        yield started


def client(simulator, repository="team/model", **options):
    options = {"retries": FAST, "environ": {}, **options}
    return Registry(f"{simulator.address}/{repository}", **options)


def stream_of(data):
    def open_stream(offset):
        stream = io.BytesIO(data)
        stream.seek(offset)
        return stream

    return open_stream


def upload(registry, data=DATA, on_bytes=None):
    registry.upload_blob(stream_of(data), "sha256:" + hashlib.sha256(data).hexdigest(), len(data), on_bytes)


def download(registry, path, start=0, on_bytes=None, digest=DIGEST, size=SIZE):
    with path.open("rb+" if path.exists() else "wb+") as file:
        registry.download_blob(digest, size, file.fileno(), start=start, on_bytes=on_bytes)
    return path.read_bytes()


# ---- uploads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [DATA, SMALL, b""], ids=["large", "small", "empty"])
def test_a_blob_is_sent_in_one_put(simulator, data):
    told = []
    with client(simulator) as registry:
        upload(registry, data, told.append)
        assert registry.head_blob("sha256:" + hashlib.sha256(data).hexdigest()) == len(data)
    assert simulator.blob("sha256:" + hashlib.sha256(data).hexdigest()) == data
    assert [seen.method for seen in simulator.log if UPLOADS in seen.path] == ["POST", "PUT"]
    assert sum(told) == len(data)


UPLOAD_FAULTS = {
    "429 with a wait": (Settings(), [Fault("status", "PUT", UPLOADS, status=429, headers={"Retry-After": "0"})]),
    "503 at the beginning": (Settings(), [Fault("status", "POST", UPLOADS, status=503, times=2)]),
    "500 at the put": (Settings(), [Fault("status", "PUT", UPLOADS, status=500)]),
    "no answer at the beginning": (Settings(), [Fault("hang_up", "POST", UPLOADS)]),
    "cut in the put": (Settings(), [Fault("cut", "PUT", UPLOADS, after_bytes=3 * MIB)]),
    "cut in the put, state forgotten": (Settings(resumes=False), [Fault("cut", "PUT", UPLOADS, after_bytes=3 * MIB)]),
    "cut again and again": (
        Settings(),
        [Fault("cut", "PUT", UPLOADS, after_bytes=MIB), Fault("cut", "PATCH", UPLOADS, after_bytes=MIB // 2, times=8)],
    ),
    "cut when all had arrived": (Settings(), [Fault("cut", "PUT", UPLOADS, after_bytes=len(DATA))]),
    "no whole blob in one put": (Settings(whole_put=False), []),
    "413 for more than 2 MiB": (Settings(max_body=2 * MIB), []),
    "416 in the middle": (Settings(whole_put=False), [Fault("status", "PATCH", UPLOADS, status=416)]),
    "404 in the middle": (Settings(max_body=MIB), [Fault("status", "PATCH", UPLOADS, status=404, skip=2)]),
    "404 in the middle, state forgotten": (
        Settings(max_body=MIB, resumes=False),
        [Fault("status", "PATCH", UPLOADS, status=404, skip=2)],
    ),
    "429 in the middle": (Settings(max_body=MIB), [Fault("status", "PATCH", UPLOADS, status=429, skip=2)]),
    "416 at the end": (Settings(whole_put=False), [Fault("status", "PUT", UPLOADS, status=416, skip=1)]),
    "pieces of at least 4 MiB": (Settings(whole_put=False, min_piece=4 * MIB), []),
    "slow": (Settings(bytes_per_s=30e6), []),
}


@pytest.mark.parametrize("fault", UPLOAD_FAULTS)
def test_a_blob_arrives_whole_in_spite_of(simulator, fault):
    simulator.settings, simulator.faults = UPLOAD_FAULTS[fault]
    told = []
    with client(simulator) as registry:
        upload(registry, on_bytes=told.append)
    assert simulator.blob(DIGEST) == DATA
    assert sum(told) == len(DATA)
    assert simulator.faults == [] or all(fault.times == 0 for fault in simulator.faults)


def test_an_upload_goes_on_where_the_registry_says(simulator):
    simulator.faults = [Fault("cut", "PUT", UPLOADS, after_bytes=5 * MIB)]
    with client(simulator) as registry:
        upload(registry)
    assert simulator.received() <= len(DATA) + 2 * MIB  # what was in flight at the cut is sent twice


def test_what_a_host_takes_is_learnt_once(simulator):
    simulator.settings.max_body = 2 * MIB
    with client(simulator) as registry:
        upload(registry)
        refused = len([seen for seen in simulator.log if seen.status == 413])
        upload(registry, DATA[1:])
        assert len([seen for seen in simulator.log if seen.status == 413]) == refused
    assert simulator.blob("sha256:" + hashlib.sha256(DATA[1:]).hexdigest()) == DATA[1:]


REFUSED_UPLOADS = {
    "403": (Settings(), [Fault("status", "POST", UPLOADS, status=403)], RegistryDenied),
    "quota": (Settings(), [Fault("status", "PUT", UPLOADS, status=507)], RegistryRefused),
    "too large in every piece": (Settings(max_body=LEAST_PIECE_BYTES // 2), [], RegistryRefused),
    "503 for ever": (Settings(), [Fault("status", "PUT", UPLOADS, status=503, times=99)], RegistryGaveUp),
    "cut for ever": (Settings(), [Fault("cut", "", UPLOADS, times=99)], RegistryGaveUp),
    "a wait of a day": (
        Settings(),
        [Fault("status", "POST", UPLOADS, status=429, headers={"Retry-After": "86400"})],
        RegistryGaveUp,
    ),
    "changed on the way": (Settings(), [Fault("content", "PUT", UPLOADS)], RegistryRefused),
    "no place named": (Settings(), [Fault("status", "POST", UPLOADS, status=202)], RegistryAnswerInvalid),
}


@pytest.mark.parametrize("fault", REFUSED_UPLOADS)
def test_an_upload_ends_with_the_reason(simulator, fault):
    simulator.settings, simulator.faults, error = REFUSED_UPLOADS[fault]
    told = []
    with client(simulator) as registry, pytest.raises(error) as raised:
        upload(registry, on_bytes=told.append)
    assert simulator.address in raised.value.message
    assert raised.value.remedy
    assert sum(told) == 0
    assert not simulator.blobs.get("team/model")


def test_a_source_that_is_too_short_is_no_blob(simulator):
    with client(simulator) as registry, pytest.raises(ContentMismatch):
        registry.upload_blob(stream_of(DATA[:-1]), DIGEST, len(DATA))
    assert not simulator.blobs.get("team/model")


@pytest.mark.parametrize(
    ("settings", "mounted"), [(Settings(), True), (Settings(mounts=False), False)], ids=["mounts", "no mount"]
)
def test_a_blob_is_mounted_from_another_repository(simulator, settings, mounted):
    simulator.settings = settings
    simulator.add_blob("team/parent", DATA)
    with client(simulator) as registry:
        assert registry.mount_blob(DIGEST, "team/parent") is mounted
        assert (registry.head_blob(DIGEST) is not None) is mounted
    assert simulator.uploads == {}  # a mount that was not made leaves no upload behind


def test_a_mount_that_is_forbidden_is_none(simulator):
    simulator.faults = [Fault("status", "POST", UPLOADS, status=403)]
    with client(simulator) as registry:
        assert registry.mount_blob(DIGEST, "others/secret") is False


# ---- downloads -----------------------------------------------------------------------------------


DOWNLOAD_FAULTS = {
    "nothing": (Settings(), []),
    "429": (Settings(), [Fault("status", "GET", BLOBS, status=429, headers={"Retry-After": "0"})]),
    "502 twice": (Settings(), [Fault("status", "GET", BLOBS, status=502, times=2)]),
    "hang-up": (Settings(), [Fault("hang_up", "GET", BLOBS)]),
    "cut": (Settings(), [Fault("cut", "GET", BLOBS, after_bytes=2 * MIB)]),
    "cut nine times": (Settings(), [Fault("cut", "GET", BLOBS, after_bytes=MIB + 7, times=4)]),
    "cut without ranges": (Settings(ranges=False), [Fault("cut", "GET", BLOBS, after_bytes=2 * MIB)]),
    "ranges that are too short": (
        Settings(),
        [Fault("cut", "GET", BLOBS, after_bytes=MIB), Fault("short_range", "GET", BLOBS, after_bytes=MIB, times=3)],
    ),
    "slow": (Settings(bytes_per_s=30e6), []),
}


@pytest.mark.parametrize("fault", DOWNLOAD_FAULTS)
def test_a_blob_is_fetched_whole_in_spite_of(simulator, tmp_path, fault):
    simulator.settings, simulator.faults = DOWNLOAD_FAULTS[fault]
    simulator.add_blob("team/model", DATA)
    told = []
    with client(simulator) as registry:
        assert download(registry, tmp_path / "blob", on_bytes=told.append) == DATA
    assert sum(told) == len(DATA)
    assert all(fault.times == 0 for fault in simulator.faults)


@pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "no ranges"])
def test_a_download_goes_on_in_a_file_that_has_the_beginning(simulator, tmp_path, ranges):
    simulator.settings.ranges = ranges
    simulator.add_blob("team/model", DATA)
    path, told = tmp_path / "blob", []
    path.write_bytes(DATA[: 4 * MIB])
    with client(simulator) as registry:
        assert download(registry, path, start=4 * MIB, on_bytes=told.append) == DATA
    assert sum(told) == len(DATA) - 4 * MIB
    assert simulator.asked("GET", BLOBS)[0].headers["Range"] == f"bytes={4 * MIB}-{len(DATA) - 1}"


def test_a_download_into_a_preallocated_file_leaves_its_size(simulator, tmp_path):
    simulator.add_blob("team/model", DATA)
    path = tmp_path / "blob"
    with path.open("wb") as file:
        file.truncate(len(DATA))
    with client(simulator) as registry:
        assert download(registry, path) == DATA


WRONG_DOWNLOADS = {
    "other content": ([Fault("content", "GET", BLOBS)], {}, RegistryContentWrong),
    "longer than was said": ([], {"size": len(DATA) - 1}, RegistryContentWrong),
    "shorter than was said": ([], {"size": len(DATA) + 1}, RegistryContentWrong),
    "not there": ([], {"digest": SMALL_DIGEST, "size": len(SMALL)}, NotInRegistry),
    "500 for ever": ([Fault("status", "GET", BLOBS, status=500, times=99)], {}, RegistryGaveUp),
    "compressed on the way": (
        [Fault("status", "GET", BLOBS, status=200, headers={"Content-Encoding": "gzip"}, body=b"x")],
        {},
        RegistryAnswerInvalid,
    ),
    "another range": (
        [
            Fault("cut", "GET", BLOBS, after_bytes=MIB),
            Fault("status", "GET", BLOBS, status=206, headers={"Content-Range": f"bytes 0-1/{len(DATA)}"}, body=b"xx"),
        ],
        {},
        RegistryAnswerInvalid,
    ),
    "redirects in a circle": (
        [Fault("status", "GET", BLOBS, status=307, headers={"Location": f"/v2/team/model{BLOBS}"}, times=99)],
        {},
        RegistryAnswerInvalid,
    ),
    "a redirect to nowhere": ([Fault("status", "GET", BLOBS, status=307)], {}, RegistryAnswerInvalid),
    "a redirect to a file": (
        [Fault("status", "GET", BLOBS, status=302, headers={"Location": "file:///etc/passwd"})],
        {},
        RegistryAnswerInvalid,
    ),
}


@pytest.mark.parametrize("fault", WRONG_DOWNLOADS)
def test_a_wrong_answer_is_no_blob(simulator, tmp_path, fault):
    simulator.faults, options, error = WRONG_DOWNLOADS[fault]
    simulator.add_blob("team/model", DATA)
    with client(simulator) as registry, pytest.raises(error):
        download(registry, tmp_path / "blob", **options)


def test_a_beginning_that_is_wrong_is_found_by_the_digest(simulator, tmp_path):
    simulator.add_blob("team/model", DATA)
    path = tmp_path / "blob"
    path.write_bytes(bytes(MIB))
    with client(simulator) as registry, pytest.raises(RegistryContentWrong):
        download(registry, path, start=MIB)


def test_a_small_blob_is_limited_before_it_is_read(simulator):
    simulator.add_blob("team/model", DATA)
    simulator.add_blob("team/model", SMALL)
    with client(simulator) as registry:
        assert registry.get_blob(SMALL_DIGEST, 5) == SMALL
        with pytest.raises(LimitExceeded):
            registry.get_blob(SMALL_DIGEST, 4)
        with pytest.raises(LimitExceeded):
            registry.get_blob(DIGEST, MIB)


# ---- who may -------------------------------------------------------------------------------------


@pytest.mark.parametrize("auth", ["basic", "bearer"])
def test_credentials_open_the_registry(simulator, tmp_path, auth):
    simulator.settings.auth = auth
    with client(simulator, credentials=Credentials("ann", "secret")) as registry:
        upload(registry)
        assert download(registry, tmp_path / "blob") == DATA


@pytest.mark.parametrize("auth", ["basic", "bearer"])
@pytest.mark.parametrize("known", [None, Credentials("ann", "wrong")], ids=["unknown", "wrong"])
def test_without_the_right_credentials_nothing_is_sent(simulator, auth, known):
    simulator.settings.auth = auth
    with client(simulator, credentials=known) as registry, pytest.raises(RegistryDenied) as raised:
        upload(registry)
    assert "secret" not in str(raised.value)
    assert simulator.received() == 0


def test_an_identity_token_is_exchanged(simulator):
    simulator.settings.auth, simulator.settings.identity_tokens = "bearer", {"id-1"}
    with client(simulator, credentials=Credentials(identity_token="id-1")) as registry:
        upload(registry, SMALL)
    assert simulator.asked("POST", "/token")


@pytest.mark.parametrize("tells_life", [True, False])
def test_tokens_are_renewed_in_the_middle_of_a_long_push(simulator, tells_life):
    simulator.settings = Settings(
        auth="bearer", token_life_s=0.15, tells_life=tells_life, max_body=MIB, bytes_per_s=20e6
    )
    with client(simulator, credentials=Credentials("ann", "secret")) as registry:
        upload(registry)
        upload(registry, DATA[1:])
    assert simulator.blob(DIGEST) == DATA
    assert len(simulator.asked("GET", "/token")) >= 3


def test_one_token_serves_all_threads(simulator):
    simulator.settings.auth = "bearer"
    with client(simulator, credentials=Credentials("ann", "secret")) as registry:
        for_each(lambda n: upload(registry, b"%d" % n), range(32), registry.stop)
    assert len(simulator.asked("GET", "/token")) == 1


def test_a_mount_asks_for_the_right_to_read_there(simulator):
    simulator.settings.auth = "bearer"
    simulator.add_blob("team/parent", DATA)
    with client(simulator, credentials=Credentials("ann", "secret")) as registry:
        assert registry.mount_blob(DIGEST, "team/parent")
    assert "repository%3Ateam%2Fparent%3Apull" in simulator.asked("GET", "/token")[-1].path


def test_a_redirect_to_another_host_gets_no_authorization(simulator, tmp_path):
    simulator.settings.auth = "basic"
    simulator.add_blob("team/model", DATA)
    with RegistrySimulator(tmp_path / "storage") as storage:
        storage.add_blob("any", DATA)
        simulator.settings.storage = f"http://{storage.address}"
        with client(simulator, credentials=Credentials("ann", "secret")) as registry:
            assert download(registry, tmp_path / "blob") == DATA
        assert all("Authorization" not in seen.headers for seen in storage.log)
    assert simulator.asked("GET", BLOBS)[-1].headers["Authorization"].startswith("Basic ")


# ---- manifests, tags, referrers ------------------------------------------------------------------


def manifest_of(config_digest, **more):
    config = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": config_digest, "size": len(SMALL)}
    return {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config, "layers": [], **more}


def put_small(simulator, registry, target="1"):
    data = json.dumps(manifest_of(simulator.add_blob(registry.repository, SMALL))).encode()
    return data, registry.put_manifest(data, MANIFEST_TYPE, target)


def test_a_manifest_comes_back_as_it_was(simulator):
    with client(simulator) as registry:
        data, digest = put_small(simulator, registry)
        assert registry.get_manifest("1") == (data, MANIFEST_TYPE, digest)
        assert registry.get_manifest(digest).data == data
        assert registry.head_manifest("1") == digest
        registry.delete_manifest(digest)
        assert registry.head_manifest(digest) is None
        with pytest.raises(NotInRegistry):
            registry.get_manifest("1")


def test_a_manifest_with_other_content_is_refused(simulator):
    with client(simulator) as registry:
        _, digest = put_small(simulator, registry)
        simulator.faults = [Fault("content", "GET", "/manifests/", times=2)]
        for target in ("1", digest):
            with pytest.raises(RegistryContentWrong):
                registry.get_manifest(target)


def test_a_manifest_beyond_the_limit_is_not_read(simulator):
    simulator.faults = [Fault("status", "GET", "/manifests/", status=200, body=bytes(4 * MIB + 1))]
    with client(simulator) as registry, pytest.raises(LimitExceeded):
        registry.get_manifest("1")


def test_all_pages_of_tags_are_read(simulator):
    simulator.settings.page = 2
    with client(simulator) as registry:
        for tag in "abcde":
            put_small(simulator, registry, tag)
        assert registry.tags() == list("abcde")


def test_a_list_that_goes_on_elsewhere_is_refused(simulator):
    headers = {"Link": '<http://127.0.0.1:1/v2/x/tags/list>; rel="next"'}
    simulator.faults = [Fault("status", "GET", "/tags/list", status=200, body=b'{"tags":[]}', headers=headers)]
    with client(simulator) as registry, pytest.raises(RegistryAnswerInvalid):
        registry.tags()


REFERRER_SETTINGS = {
    "api": Settings(page=1),
    "no api": Settings(referrers=False),
    "no api, but claims it": Settings(referrers=False, claims_subject=True),
    "api without the header": Settings(tells_subject=False),
}


@pytest.mark.parametrize("kind", REFERRER_SETTINGS)
def test_referrers_are_found(simulator, kind):
    simulator.settings = REFERRER_SETTINGS[kind]
    with client(simulator) as registry:
        data, digest = put_small(simulator, registry)
        subject = {"mediaType": MANIFEST_TYPE, "digest": digest, "size": len(data)}
        added = [
            registry.add_referrer(subject, manifest_of(SMALL_DIGEST, artifactType=f"application/{name}"))
            for name in ("one", "two", "one")
        ]
        found = {item["digest"] for item in registry.referrers(digest)}
        assert found == {item["digest"] for item in added}
        assert [item["digest"] for item in registry.referrers(digest, "application/two")] == [added[1]["digest"]]
        assert json.loads(registry.get_manifest(added[0]["digest"]).data)["subject"] == subject
    assert (digest.replace(":", "-") in simulator.tags["team/model"]) is not simulator.settings.referrers


def test_no_referrers_is_an_empty_list(simulator):
    simulator.settings.referrers = False
    with client(simulator) as registry:
        assert registry.referrers(DIGEST) == []


def test_a_fallback_tag_of_something_else_is_not_replaced(simulator):
    simulator.settings.referrers = False
    with client(simulator) as registry:
        data, digest = put_small(simulator, registry)
        registry.put_manifest(data, MANIFEST_TYPE, digest.replace(":", "-"))
        subject = {"mediaType": MANIFEST_TYPE, "digest": digest, "size": len(data)}
        with pytest.raises(RegistryRefused):
            registry.add_referrer(subject, manifest_of(SMALL_DIGEST))
        assert registry.get_manifest(digest.replace(":", "-")).data == data


def test_a_fallback_tag_that_another_writer_replaces_at_once_is_written_again(simulator):
    simulator.settings.referrers = False
    with client(simulator) as registry:
        data, digest = put_small(simulator, registry)
        subject = {"mediaType": MANIFEST_TYPE, "digest": digest, "size": len(data)}
        empty = json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}).encode()
        registry.put_manifest(empty, INDEX_TYPE, digest.replace(":", "-"))
        # The first write of the tag is lost, as it would be to another writer who read before us.
        simulator.faults = [Fault("status", "PUT", "/manifests/sha256-", status=201)]
        added = registry.add_referrer(subject, manifest_of(SMALL_DIGEST))
        assert [item["digest"] for item in registry.referrers(digest)] == [added["digest"]]
    assert len(simulator.asked("PUT", "/manifests/sha256-")) == 3


# ---- all at once ---------------------------------------------------------------------------------


def test_transfers_run_side_by_side_and_not_too_many(simulator):
    simulator.settings.bytes_per_s = 2e6
    pieces = [os.urandom(100_000) for _ in range(24)]
    with client(simulator) as registry:
        for_each(lambda data: upload(registry, data), pieces, registry.stop, in_flight=8)
    assert 4 <= simulator.most_in_flight <= 8
    assert len(simulator.blobs["team/model"]) == 24


def test_the_first_fault_stops_all_transfers(simulator):
    simulator.settings.bytes_per_s = 1e6
    simulator.faults = [Fault("status", "POST", UPLOADS, status=403, skip=3)]
    with client(simulator) as registry:
        started = time.monotonic()
        with pytest.raises(RegistryDenied):
            for_each(lambda n: upload(registry, DATA[n:]), range(4), registry.stop)
        assert time.monotonic() - started < 5
        simulator.settings.bytes_per_s = 0
        upload(registry, SMALL)  # the client can be used again


def test_a_transfer_can_be_stopped(simulator, tmp_path):
    simulator.settings.bytes_per_s = 1e6
    simulator.add_blob("team/model", DATA)
    with client(simulator) as registry:
        threading.Timer(0.3, registry.stop.set).start()
        with pytest.raises(Cancelled):
            download(registry, tmp_path / "blob")


def test_a_registry_that_is_not_there(tmp_path):
    with Registry("127.0.0.1:1/team/model", retries=FAST, environ={}) as registry, pytest.raises(RegistryGaveUp):
        registry.get_manifest("1")


def test_a_host_that_is_no_registry(simulator):
    simulator.faults = [
        Fault("status", "GET", "/referrers/", status=200, body=b"<html>", headers={"Content-Type": "text/html"}),
        Fault("status", "GET", "/tags/", status=200, body=b"[1]"),
    ]
    with client(simulator) as registry:
        assert registry.referrers(DIGEST) == []
        with pytest.raises(RegistryAnswerInvalid):
            registry.tags()


def test_words_of_the_registry_are_safe_to_print(simulator):
    body = json.dumps({"errors": [{"code": "DENIED", "message": "no\x1b[31m\nway" + "x" * 9999}]}).encode()
    simulator.faults = [Fault("status", "POST", UPLOADS, status=403, body=body)]
    with client(simulator) as registry, pytest.raises(RegistryDenied) as raised:
        upload(registry)
    assert "DENIED: no?[31m way" in raised.value.message
    assert len(raised.value.message) < 500


def test_plain_http_is_not_used_with_another_host(simulator, tmp_path, monkeypatch):
    """A name that is not this machine gets TLS only, whatever answers there."""
    monkeypatch.setattr("image_format.registry.session.is_loopback", lambda _host: False)
    with client(simulator) as registry, pytest.raises(RegistryUnreachable):
        registry.get_manifest("1")
    with client(simulator, plain_http=True) as registry, pytest.raises(NotInRegistry):
        registry.get_manifest("1")
    settings = tmp_path / "registries.conf"
    settings.write_text(f'[[registry]]\nlocation = "{simulator.address}/team"\ninsecure = true\n')
    environ = {"CONTAINERS_REGISTRIES_CONF": str(settings), "HOME": str(tmp_path)}
    with client(simulator, environ=environ) as registry, pytest.raises(NotInRegistry):
        registry.get_manifest("1")


def test_a_registry_that_takes_pieces_and_forgets_them_is_given_up(simulator):
    simulator.settings.whole_put, simulator.settings.keeps_pieces = False, False
    with client(simulator) as registry, pytest.raises(RegistryGaveUp, match="took nothing"):
        upload(registry)
    assert len(simulator.asked("PATCH")) < 20


def test_a_small_answer_that_trickles_is_ended_with_the_transfer(simulator):
    digest = simulator.add_blob("team/model", DATA)
    simulator.settings.bytes_per_s = 1e5
    with client(simulator) as registry:
        threading.Timer(0.3, registry.stop.set).start()
        started = time.monotonic()
        with pytest.raises(Cancelled):
            registry.get_blob(digest, SIZE)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({}, None),
        ({}, Fault("cut", "PATCH", UPLOADS, after_bytes=3 * MIB)),
        ({}, Fault("status", "PATCH", UPLOADS, status=503)),
        ({"resumes": False}, Fault("cut", "PATCH", UPLOADS, after_bytes=3 * MIB)),
        ({"max_body": 2 * MIB}, None),
        ({"auth": "bearer", "token_life_s": 0.2, "tells_life": False}, None),
    ],
)
def test_a_digest_may_be_learnt_on_the_way(simulator, settings, fault):
    for name, value in settings.items():
        setattr(simulator.settings, name, value)
    simulator.faults = [fault] if fault else []
    opened, told = [], []

    def open_stream(offset):
        opened.append(offset)
        return stream_of(DATA)(offset)

    with client(simulator, credentials=Credentials("ann", "secret")) as registry:
        assert registry.upload_stream(open_stream, SIZE, told.append) == DIGEST
    assert simulator.blob(DIGEST) == DATA
    assert sum(told) == SIZE
    if fault is None and not settings:
        assert opened == [0]


class Slow(io.BytesIO):
    """Gives little at a time, so that a cut is noticed before all is under way."""

    def readinto(self, view):
        time.sleep(0.005)
        return super().readinto(view[: 64 << 10])


def test_a_registry_that_claims_more_than_was_sent_is_refused(simulator):
    simulator.faults = [
        Fault("cut", "PATCH", UPLOADS, after_bytes=MIB),
        Fault("status", "GET", UPLOADS, status=204, headers={"Range": f"0-{SIZE - 1}"}),
    ]
    with client(simulator) as registry, pytest.raises(RegistryAnswerInvalid, match="more than was sent"):
        registry.upload_stream(lambda offset: Slow(DATA[offset:]), SIZE)
