"""The registry client on the network: certificates, client certificates, proxies, redirects between schemes."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import json
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from image_format.registry import Credentials, Registry, Retries
from image_format.registry.reference import is_on_host
from tests.simulators.registry import Fault, RegistrySimulator, Settings
from vgpu_errors import (
    BadConfiguration,
    NotInRegistry,
    RegistryAnswerInvalid,
    RegistryDenied,
    RegistryError,
    RegistryGaveUp,
    RegistryUnreachable,
    UnsupportedRequest,
)

FAST = Retries(attempts=3, base_s=0.01, cap_s=0.02, connect_timeout_s=2, read_timeout_s=3)
DATA = b"content"


class Authority:
    """A CA and what it signed, as PEM files in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._certificate("ca", self._key, is_ca=True)
        self.file = self._write("ca.crt", self.certificate)

    def issue(self, name):
        """Certificate and key files of a server or a client on this machine."""
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        (self.folder / f"{name}.key").write_bytes(pem)
        return self._write(f"{name}.cert", self._certificate(name, key)), self.folder / f"{name}.key"

    def _write(self, name, certificate):
        path = self.folder / name
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path

    def _certificate(self, name, key, *, is_ca=False):
        now = dt.datetime.now(tz=dt.UTC)
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca")])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(x509.KeyUsage(True, False, False, False, False, is_ca, is_ca, False, False), critical=True)
            .add_extension(names, critical=False)
            .sign(self._key, hashes.SHA256())
        )


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


def tls(authority, *, wants_client=False):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server"))
    if wants_client:
        context.load_verify_locations(authority.file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.fixture
def secure(tmp_path, authority):
    with RegistrySimulator(tmp_path / "registry", tls=tls(authority)) as started:
        yield started


@pytest.fixture
def plain(tmp_path):
    with RegistrySimulator(tmp_path / "plain") as started:
        yield started


def read(simulator, **options):
    digest = simulator.add_blob("team/model", DATA)
    options = {"retries": FAST, "environ": {}, **options}
    with Registry(f"{simulator.address}/team/model", **options) as registry:
        return registry.get_blob(digest, 100)


def test_an_unknown_ca_is_refused(secure):
    with pytest.raises(RegistryUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
        read(secure)


def test_a_ca_file_is_believed(secure, authority):
    assert read(secure, ca_file=authority.file) == DATA


def test_certificates_of_one_registry_are_found(secure, authority, tmp_path):
    folder = tmp_path / ".config/containers/certs.d" / secure.address
    folder.mkdir(parents=True)
    (folder / "ca.crt").write_bytes(authority.file.read_bytes())
    assert read(secure, environ={"HOME": str(tmp_path)}) == DATA


def test_a_client_certificate_is_shown(tmp_path, authority):
    folder = tmp_path / ".config/containers/certs.d"
    with RegistrySimulator(tmp_path / "registry", tls=tls(authority, wants_client=True)) as simulator:
        with pytest.raises(RegistryError):
            read(simulator, ca_file=authority.file)
        (folder / simulator.address).mkdir(parents=True)
        authority.issue("client")
        for name in ("client.cert", "client.key"):
            (folder / simulator.address / name).write_bytes((authority.folder / name).read_bytes())
        assert read(simulator, ca_file=authority.file, environ={"HOME": str(tmp_path)}) == DATA


@pytest.mark.parametrize("name", ["ca.crt", "client.cert"])
def test_a_certificate_that_is_none_is_named(secure, tmp_path, name):
    folder = tmp_path / ".config/containers/certs.d" / secure.address
    folder.mkdir(parents=True)
    (folder / name).write_text("nonsense")
    with pytest.raises(BadConfiguration, match=name):
        read(secure, environ={"HOME": str(tmp_path)})


def test_a_bearer_token_over_tls(secure, authority):
    secure.settings.auth = "bearer"
    assert read(secure, ca_file=authority.file, credentials=Credentials("ann", "secret")) == DATA


def test_credentials_do_not_go_to_a_token_server_in_the_clear(secure, authority):
    """Not even to one on this machine, where the registry itself has TLS and names another host."""
    challenge = {"WWW-Authenticate": 'Bearer realm="http://auth.example/token",service="x"'}
    secure.faults = [Fault("status", "GET", "/v2/", status=401, headers=challenge, times=9)]
    with pytest.raises(RegistryDenied, match="in the clear"):
        read(secure, ca_file=authority.file, credentials=Credentials("ann", "secret"))


def test_https_does_not_lead_to_http(secure, authority, plain):
    secure.settings.storage = f"http://localhost:{plain.address.partition(':')[2]}"
    with pytest.raises(RegistryAnswerInvalid, match="from https to http"):
        read(secure, ca_file=authority.file)
    assert plain.log == []


def test_plain_http_when_asked_is_not_tried_on_a_tls_registry(secure, authority):
    with pytest.raises(RegistryError):
        read(secure, ca_file=authority.file, plain_http=True)


def test_a_proxy_is_used_and_gets_its_password(plain):
    digest = plain.add_blob("team/model", DATA)
    environ = {"http_proxy": f"http://ann:pass@{plain.address}"}
    with Registry("registry.example/team/model", plain_http=True, retries=FAST, environ=environ) as registry:
        assert registry.get_blob(digest, 100) == DATA
    (seen,) = plain.log
    assert seen.path.startswith("http://registry.example/v2/")
    assert base64.b64decode(seen.headers["proxy-authorization"].removeprefix("Basic ")) == b"ann:pass"


def test_a_proxy_password_may_hold_any_letter(plain):
    digest = plain.add_blob("team/model", DATA)
    environ = {"http_proxy": f"http://ann:p%40ss%3A@{plain.address}"}
    with Registry("registry.example/team/model", plain_http=True, retries=FAST, environ=environ) as registry:
        assert registry.get_blob(digest, 100) == DATA
    given = plain.log[0].headers["proxy-authorization"].removeprefix("Basic ")
    assert base64.b64decode(given) == b"ann:p@ss:"


@pytest.mark.parametrize(
    ("url", "host", "expected"),
    [
        ("https://r.example/v2/", "r.example", True),
        ("https://r.example:443/v2/", "r.example", True),
        ("https://R.example/v2/", "r.example:443", True),
        ("http://r.example:80/v2/", "r.example", True),
        ("https://r.example:80/v2/", "r.example", False),
        ("https://r.example:5000/v2/", "r.example", False),
        ("https://r.example.evil/v2/", "r.example", False),
        ("https://r.example@evil/v2/", "r.example", False),
    ],
)
def test_a_host_is_the_same_with_its_usual_port(url, host, expected):
    assert is_on_host(url, host) is expected


def test_a_proxy_that_is_not_there_is_named():
    environ = {"https_proxy": "http://127.0.0.1:1"}
    with (
        Registry("registry.example/team/model", retries=FAST, environ=environ) as registry,
        pytest.raises(RegistryGaveUp, match="through the proxy"),
    ):
        registry.get_manifest("1")


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "http://", "nonsense://x"])
def test_a_proxy_that_cannot_be_spoken_to_is_refused(proxy):
    with (
        Registry("registry.example/team/model", retries=FAST, environ={"https_proxy": proxy}) as registry,
        pytest.raises(UnsupportedRequest),
    ):
        registry.get_manifest("1")


def test_a_registry_on_this_machine_may_be_plain(plain):
    assert read(plain) == DATA
    with pytest.raises(RegistryUnreachable, match="does not speak TLS"):
        read(plain, plain_http=False)


def test_a_forgotten_s_in_a_location_is_put_back(secure, authority):
    """A registry behind a proxy that ends TLS writes http:// into Location; it is the same host, and stays https."""
    secure.faults = [
        Fault(
            "status",
            "GET",
            "/manifests/1",
            status=307,
            headers={"Location": f"http://{secure.address}/v2/a/manifests/2"},
        )
    ]
    with (
        Registry(f"{secure.address}/a", ca_file=authority.file, retries=FAST, environ={}) as registry,
        pytest.raises(NotInRegistry),
    ):
        registry.get_manifest("1")
    assert [seen.path for seen in secure.log if "manifests" in seen.path][-1].endswith("/2")


def test_credentials_are_found_by_the_client(plain, tmp_path):
    plain.settings = Settings(auth="basic")
    entry = {"auth": base64.b64encode(b"ann:secret").decode()}
    (tmp_path / "auth.json").write_text(json.dumps({"auths": {plain.address: entry}}))
    assert read(plain, auth_file=tmp_path / "auth.json") == DATA
