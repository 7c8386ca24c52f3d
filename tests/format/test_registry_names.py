"""Names of images and credentials for them: what is read from podman's and docker's files, and what is refused."""

from __future__ import annotations

import base64
import json
import os

import pytest

from image_format.registry import Credentials, Reference
from image_format.registry.credentials import ask_helper, find
from image_format.registry.insecure import is_insecure
from image_format.registry.network import is_excepted, proxy_for
from image_format.registry.patience import seconds_of
from image_format.registry.reference import is_loopback
from image_format.registry.tokens import challenges
from image_format.registry.uploads import HostHabits
from vgpu_errors import BadConfiguration, BadReference, CredentialHelperFailed

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("registry.example/model", Reference("registry.example", "model")),
        ("registry.example:5000/team/model:1", Reference("registry.example:5000", "team/model", "1")),
        (f"localhost/a/b/c@{DIGEST}", Reference("localhost", "a/b/c", None, DIGEST)),
        (f"10.0.0.1:5000/a:v1.2_x-y@{DIGEST}", Reference("10.0.0.1:5000", "a", "v1.2_x-y", DIGEST)),
        ("[::1]:5000/a--b/c_d/e.f:T", Reference("[::1]:5000", "a--b/c_d/e.f", "T")),
        ("docker.io/ubuntu:1", Reference("docker.io", "library/ubuntu", "1")),
    ],
)
def test_a_reference_is_read_and_written(text, wanted):
    assert Reference.parse(text) == wanted
    assert Reference.parse(str(wanted)) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "", "model", "team/model", "model:1", "registry.example", "registry.example/", "registry.example/Model",
        "registry.example/a//b", "registry.example/../b", "registry.example/a:", "registry.example/a:b/c",
        "registry.example/a@", "registry.example/a@sha256:abc", f"registry.example/a@sha512:{'a' * 128}",
        "registry.example:0/a", "registry.example:70000/a", "registry.example:x/a", "user@registry.example/a",
        "https://registry.example/a", "registry.example/a b", "registry.example/a\n", "-x.example/a",
        "registry.example/" + "a" * 256, "x" * 2000, "registry.example/a?x=1", "[::1/a", "registry.example/é",
    ],
)  # fmt: skip
def test_what_is_no_reference_is_refused(text):
    with pytest.raises(BadReference) as raised:
        Reference.parse(text)
    assert raised.value.message.isascii()


def test_the_hub_is_served_by_another_host():
    assert Reference.parse("docker.io/team/model").server == "registry-1.docker.io"
    assert Reference.parse("registry.example/team/model").server == "registry.example"


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("localhost", True), ("localhost:5000", True), ("127.0.0.1:5000", True), ("127.9.9.9", True), ("[::1]:5000", True),
        ("x.localhost", True), ("localhost.example", False), ("10.0.0.1:5000", False), ("registry.example", False),
    ],
)  # fmt: skip
def test_this_machine(host, wanted):
    assert is_loopback(host) is wanted


# ---- credentials ---------------------------------------------------------------------------------


def auth(user, password="secret"):
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


class Home:
    """A user's files."""

    def __init__(self, folder):
        self.folder = folder
        self.environ = {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder / "run"), "PATH": str(folder / "bin")}

    def write(self, name, doc):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(doc if isinstance(doc, str) else json.dumps(doc))
        return path

    def helper(self, name, script):
        path = self.write(f"bin/docker-credential-{name}", f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def find(self, text="registry.example/team/model:1", **options):
        return find(Reference.parse(text), environ=self.environ, **options)


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


PODMAN_RUN = "run/containers/auth.json"
PODMAN_HOME = ".config/containers/auth.json"
DOCKER = ".docker/config.json"


def test_the_places_come_in_podman_s_order(home):
    assert home.find() is None
    for name, user in ((DOCKER, "docker"), (PODMAN_HOME, "home"), (PODMAN_RUN, "run")):
        home.write(name, {"auths": {"registry.example": auth(user)}})
        assert home.find() == Credentials(user, "secret")
    named = home.write("named.json", {"auths": {"registry.example": auth("named")}})
    home.environ["REGISTRY_AUTH_FILE"] = str(named)
    assert home.find().user == "named"
    other = home.write("other.json", {"auths": {}})
    assert home.find(auth_file=other) is None  # the file that is named is the only one


@pytest.mark.parametrize(
    ("key", "reference", "found"),
    [
        ("registry.example", "registry.example/team/model", True),
        ("registry.example/team", "registry.example/team/model", True),
        ("registry.example/team/model", "registry.example/team/model", True),
        ("registry.example/tea", "registry.example/team/model", False),
        ("registry.example/other", "registry.example/team/model", False),
        ("https://registry.example", "registry.example/team/model", True),
        ("https://registry.example/v2/", "registry.example/team/model", True),
        ("registry.example", "registry.example:5000/team/model", False),
        ("example", "registry.example/team/model", False),
        ("https://index.docker.io/v1/", "docker.io/team/model", True),
        ("docker.io", "docker.io/team/model", True),
    ],
)
def test_which_key_speaks_of_a_repository(home, key, reference, found):
    home.write(PODMAN_RUN, {"auths": {key: auth("ann")}})
    assert (home.find(reference) is not None) is found


def test_the_longest_namespace_wins(home):
    names = ("registry.example", "registry.example/team", "registry.example/team/model")
    home.write(PODMAN_RUN, {"auths": {name: auth(name.replace("/", "-")) for name in names}})
    assert home.find().user == "registry.example-team-model"
    assert home.find("registry.example/team/other").user == "registry.example-team"
    assert home.find("registry.example/else").user == "registry.example"


def test_a_password_may_hold_a_colon_and_docker_s_padding(home):
    home.write(DOCKER, {"auths": {"registry.example": auth("ann", "a:b:c\0\0")}})
    assert home.find() == Credentials("ann", "a:b:c")


def test_an_identity_token_is_taken(home):
    home.write(DOCKER, {"auths": {"registry.example": {**auth("00000000"), "identitytoken": "id-1"}}})
    assert home.find().identity_token == "id-1"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"auths":{"registry.example":{"auth":"%%%"}}}', '{"auths":{"registry.example":{"auth":"YQ=="}}}'],
)
def test_a_damaged_file_is_named(home, text):
    path = home.write(PODMAN_RUN, text)
    with pytest.raises(BadConfiguration) as raised:
        home.find()
    assert str(path) in raised.value.message


@pytest.mark.parametrize(
    "doc", [{}, {"auths": None}, {"auths": []}, {"auths": {"registry.example": {}}}, {"auths": {"registry.example": 1}}]
)
def test_a_file_without_an_entry_says_nothing(home, doc):
    home.write(PODMAN_RUN, doc)
    assert home.find() is None


def test_a_helper_is_asked(home):
    home.helper(
        "vault",
        """read server; echo "{\\"ServerURL\\":\\"$server\\",\\"Username\\":\\"$server\\",\\"Secret\\":\\"s\\"}" """,
    )
    home.write(DOCKER, {"credHelpers": {"registry.example": "vault"}})
    assert home.find() == Credentials("registry.example", "s")
    home.write(DOCKER, {"credsStore": "vault"})
    assert home.find("other.example/a") == Credentials("other.example", "s")


def test_a_helper_may_give_an_identity_token(home):
    home.helper("vault", """echo '{"Username":"<token>","Secret":"id-1"}'""")
    home.write(DOCKER, {"credsStore": "vault"})
    assert home.find() == Credentials(identity_token="id-1")


def test_a_helper_that_knows_nothing_is_no_fault(home):
    home.helper("vault", "echo credentials not found in native keychain; exit 1")
    home.write(DOCKER, {"credsStore": "vault"})
    assert home.find() is None


@pytest.mark.parametrize(
    "script",
    [
        "echo locked; exit 1",
        "echo no json",
        "echo '{}'",
        'echo \'{"Username":1,"Secret":"s"}\'',
        "head -c 99999 /dev/zero",
        "kill -9 $$",
    ],
)
def test_a_helper_that_fails_is_named(home, script):
    home.environ["PATH"] += ":" + os.environ["PATH"]
    home.helper("vault", script)
    home.write(DOCKER, {"credHelpers": {"registry.example": "vault"}})
    with pytest.raises(CredentialHelperFailed, match="docker-credential-vault"):
        home.find()


@pytest.mark.parametrize("name", ["../evil", "a b", "a;b", ""])
def test_a_helper_has_a_plain_name(home, name):
    with pytest.raises(CredentialHelperFailed):
        ask_helper(name, "registry.example", home.environ)


def test_a_helper_has_a_deadline(home, monkeypatch):
    monkeypatch.setattr("image_format.registry.credentials.HELPER_DEADLINE_S", 0.2)
    home.environ["PATH"] += ":" + os.environ["PATH"]
    home.helper("vault", "exec sleep 30")
    with pytest.raises(CredentialHelperFailed, match="did not answer"):
        ask_helper("vault", "registry.example", home.environ)


def test_a_missing_helper_is_named(home):
    with pytest.raises(CredentialHelperFailed, match="No such file"):
        ask_helper("none", "registry.example", home.environ)


def test_secrets_are_not_shown():
    assert "secret" not in repr(Credentials("ann", "secret", "token-secret"))


# ---- settings and headers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reference", "wanted"),
    [
        ('[[registry]]\nlocation="registry.example"\ninsecure=true', "registry.example/a", True),
        ('[[registry]]\nlocation="registry.example"', "registry.example/a", False),
        ('[[registry]]\nlocation="registry.example/team"\ninsecure=true', "registry.example/teams/a", False),
        ('[[registry]]\nprefix="*.example"\nlocation="x"\ninsecure=true', "registry.example/a", True),
        ('[[registry]]\nlocation="registry.example:5000"\ninsecure=true', "registry.example/a", False),
        (
            '[[registry]]\nlocation="registry.example"\ninsecure=true\n[[registry]]\nlocation="registry.example/team"',
            "registry.example/team/a",
            False,
        ),
        ("nonsense", "registry.example/a", False),
        ("registry=1", "registry.example/a", False),
    ],
)
def test_what_registries_conf_calls_insecure(tmp_path, text, reference, wanted):
    path = tmp_path / "registries.conf"
    path.write_text(text)
    environ = {"CONTAINERS_REGISTRIES_CONF": str(path), "HOME": str(tmp_path)}
    assert is_insecure(Reference.parse(reference), environ=environ) is wanted


@pytest.mark.parametrize(
    ("rules", "host", "wanted"),
    [
        ("*", "registry.example", True),
        ("registry.example", "registry.example:5000", True),
        ("registry.example:5000", "registry.example:5000", True),
        ("registry.example:5000", "registry.example:6000", False),
        (".example", "registry.example", True),
        ("example", "registry.example", True),
        ("*.example", "registry.example", True),
        ("ample", "registry.example", False),
        ("10.0.0.0/8, x", "10.1.2.3:5000", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("fd00::/8", "[fd00::1]:5000", True),
        ("", "registry.example", False),
        (" , ,", "registry.example", False),
    ],
)
def test_no_proxy(rules, host, wanted):
    assert is_excepted(host, rules) is wanted


def test_which_proxy():
    environ = {"HTTPS_PROXY": "http://proxy:1", "http_proxy": "http://proxy:2", "NO_PROXY": "inside.example"}
    assert proxy_for("https://registry.example/v2/", environ) == "http://proxy:1"
    assert proxy_for("http://registry.example/v2/", environ) == "http://proxy:2"
    assert proxy_for("https://a.inside.example/v2/", environ) is None
    assert proxy_for("https://127.0.0.1:5000/v2/", environ) is None
    assert proxy_for("https://registry.example/", {"ALL_PROXY": "http://proxy:3"}) == "http://proxy:3"
    assert proxy_for("https://registry.example/", {}) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3", 3),
        (" 10 ", 10),
        ("-1", 0),
        ("x", 0),
        (None, 0),
        ("", 0),
        ("9" * 30, 0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
    ],
)
def test_retry_after(text, seconds):
    assert seconds_of(text) == seconds


def test_retry_after_a_date():
    assert seconds_of("Fri, 31 Dec 2100 23:59:59 GMT") > 1e9


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ('Bearer realm="https://auth.example/token",service="s",scope="repository:a:pull,push"', ("bearer", "https://auth.example/token", "s", "repository:a:pull,push")),
        ('Basic realm="x"', ("basic", "x", "", "")),
        ("bearer realm=https://a.example/t", ("bearer", "https://a.example/t", "", "")),
        ('Bearer error="invalid_token",realm="https://a.example/t"', ("bearer", "https://a.example/t", "", "")),
    ],
)  # fmt: skip
def test_a_challenge_is_read(value, wanted):
    (found,) = challenges([value])
    assert (found.scheme, found.realm, found.service, found.scope) == wanted


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Negotiate", 'Digest realm="x"', "Bearer " + "a" * 100_000, '"' * 9000]
)
def test_a_challenge_that_cannot_be_answered_is_none(value):
    assert list(challenges([value])) == []


def test_pieces_shrink_only_while_they_are_refused():
    habits = HostHabits()
    assert habits.piece_bytes is None
    habits.refused(None)
    first = habits.piece_bytes
    habits.refused(first)
    habits.refused(first)  # another thread, with a piece of the old size
    assert habits.piece_bytes == first // 2
    for _ in range(40):
        habits.refused(habits.piece_bytes)
    assert habits.piece_bytes == 1 << 20
