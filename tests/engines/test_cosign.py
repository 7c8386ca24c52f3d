"""Signatures of images in a registry, against the tools that others use: cosign both ways, podman's sigstoreSigned policy.

Offline, on Debian's registry in a test host. The signed image is one that podman pushed; a transport image is signed the same.
"""

from __future__ import annotations

import contextlib
import json
import pathlib

import pytest

import vgpu_errors

pytestmark = [pytest.mark.engines, pytest.mark.timeout(180), pytest.mark.first_row]

PLAIN = pathlib.Path(__file__).parents[2] / "spec/vectors/1.0/good/plain"
WORK = "/var/tmp/trust"
POLICY = "/etc/containers/policy.json"
ATTACHMENTS = "/etc/containers/registries.d/test.yaml"
IMAGE_PREDICATE = "https://vgpu-snapshot.dev/image/v1"
COSIGN_ENV = {"COSIGN_PASSWORD": "secret", "HOME": WORK}
WITH_COSIGN = ("testing",)
OFFLINE = ["--insecure-ignore-tlog=true", "--allow-http-registry"]


@pytest.fixture(scope="module")
def keys(node):
    """A signing key of ours in the work folder: its path without the ending."""
    node.run(["mkdir", "-p", WORK])
    node.run(["vgpu", "keys", "new", f"{WORK}/ours.key"])
    node.run(["vgpu", "trust", "add", f"{WORK}/ours.pub", "--name", "ours"])
    yield f"{WORK}/ours"
    node.run(["vgpu", "trust", "rm", "ours"])
    node.run(["rm", "-rf", WORK])


@pytest.fixture(scope="module")
def pushed(node, registry, keys):
    """Pushes an image of its own digest under a name; returns the reference."""
    counter = iter(range(100))

    def push(name):
        reference = f"{registry}/trust/{name}:1"
        note = f"org.example.number={next(counter)}"
        node.run(
            ["sh", "-c", f"printf 'FROM {node.image('glibc')}\\nLABEL {note}\\n' | podman build -q -t {reference} -"]
        )
        node.run(["podman", "push", "-q", reference])
        return reference

    return push


@contextlib.contextmanager
def podman_accepts_only(node, registry, key):
    """podman's policy asks for sigstore signatures of this key, and finds them in the registry."""
    before = node.read(POLICY)
    rule = {"type": "sigstoreSigned", "keyPath": f"{key}.pub", "signedIdentity": {"type": "matchRepository"}}
    node.write(POLICY, json.dumps({"default": [{"type": "reject"}], "transports": {"docker": {registry: [rule]}}}))
    node.write(ATTACHMENTS, f"docker:\n  {registry}:\n    use-sigstore-attachments: true\n")
    try:
        yield
    finally:
        node.write(POLICY, before)
        node.run(["rm", ATTACHMENTS])


def code(node, *command):
    return node.run(list(command), check=False).returncode


@pytest.fixture
def cosign(node, row):
    """Runs cosign with a home and a password of its own."""
    if row not in WITH_COSIGN:
        pytest.skip("this suite ships no cosign")
    return lambda *arguments, check=True: node.run(["cosign", *arguments], env=COSIGN_ENV, check=check)


@pytest.mark.parametrize("kind", ["ecdsa-p256", "ed25519"])
def test_podman_takes_what_we_signed_and_refuses_the_rest(node, registry, pushed, kind):
    signed, unsigned, keys = pushed(f"signed-{kind}"), pushed(f"unsigned-{kind}"), f"{WORK}/podman-{kind}"
    node.run(["vgpu", "keys", "new", "--type", kind, f"{keys}.key"])
    node.run(["vgpu", "sign", signed, "--key", f"{keys}.key"])
    node.run(["podman", "rmi", "-f", signed, unsigned])
    with podman_accepts_only(node, registry, keys):
        node.run(["podman", "pull", "-q", signed])
        refused = node.run(["podman", "pull", "-q", unsigned], check=False)
        assert refused.returncode == 125
        assert "signature" in refused.stderr
        node.run(["vgpu", "sign", unsigned])  # with the node's own key, which podman's policy does not know
        assert node.run(["podman", "pull", "-q", unsigned], check=False).returncode == 125
        node.run(["vgpu", "sign", unsigned, "--key", f"{keys}.key"])  # beside the other signature
        node.run(["podman", "pull", "-q", unsigned])


def test_verify_says_who_signed_and_refuses_what_nobody_trusted_did(node, keys, pushed):
    reference = pushed("verified")
    assert code(node, "vgpu", "verify", f"docker://{reference}") == vgpu_errors.Unsigned.exit_code
    node.run(["vgpu", "keys", "new", f"{WORK}/stranger.key"])
    node.run(["vgpu", "sign", reference, "--key", f"{WORK}/stranger.key"])
    assert code(node, "vgpu", "verify", f"docker://{reference}") == vgpu_errors.UntrustedKey.exit_code
    node.run(["vgpu", "sign", reference, "--key", f"{keys}.key", "--expires", "30d"])
    doc = json.loads(node.run(["vgpu", "--json", "verify", f"docker://{reference}"]).stdout)
    assert (doc["trusted"], doc["keyName"], doc["checkpoint"]) == (True, "ours", None)
    found = sorted((signature["form"], signature["state"]) for signature in doc["signatures"])
    assert found == [(form, state) for form in ("bundle", "simple signing") for state in ("trusted", "unknown key")]


@pytest.mark.parametrize("kind", ["ecdsa-p256", "ed25519"])
def test_cosign_verifies_what_we_sign(node, cosign, keys, pushed, kind):
    reference = pushed(f"for-cosign-{kind}")
    key = f"{WORK}/{kind}"
    node.run(["vgpu", "keys", "new", "--type", kind, f"{key}.key"])
    node.run(["vgpu", "sign", reference, "--key", f"{key}.key"])
    options = ["--key", f"{key}.pub", *OFFLINE]
    attested = cosign("verify-attestation", *options, "--type", IMAGE_PREDICATE, reference)
    assert IMAGE_PREDICATE in attested.stdout + attested.stderr or "payload" in attested.stdout
    legacy = cosign("verify", *options, "--new-bundle-format=false", reference)
    assert json.loads(legacy.stdout)[0]["critical"]["identity"]["docker-reference"] == reference
    other = ["--key", f"{keys}.pub", *OFFLINE]
    assert cosign("verify-attestation", *other, "--type", IMAGE_PREDICATE, reference, check=False).returncode
    assert cosign("verify", *other, "--new-bundle-format=false", reference, check=False).returncode


def test_a_pushed_checkpoint_is_signed_for_cosign_and_for_us(node, cosign, registry, keys):
    """A transport image, which `vgpu push` signs with the node's key."""
    for path in sorted(PLAIN.iterdir()):
        node.copy_in(path, f"{WORK}/plain/{path.name}")
    node.write(f"{WORK}/maker.pub", (PLAIN.parents[1] / "keys/trusted.pub").read_bytes())
    node.run(["vgpu", "trust", "add", f"{WORK}/maker.pub"])
    reference = f"{registry}/trust/checkpoint:1"
    try:
        node.run(["vgpu", "push", f"{WORK}/plain", reference])
        options = ["--key", "/etc/vgpu/node.pub", *OFFLINE]
        cosign("verify-attestation", *options, "--type", IMAGE_PREDICATE, reference)
        cosign("verify", *options, "--new-bundle-format=false", reference)
        doc = json.loads(node.run(["vgpu", "--json", "verify", "--deep", reference]).stdout)
        assert (doc["keyName"], doc["checkpoint"]["generation"], doc["deep"]) == ("this node", 3, True)
    finally:
        node.run(["vgpu", "trust", "rm", "maker"])
    assert code(node, "vgpu", "verify", reference) == vgpu_errors.UntrustedKey.exit_code  # of the seal's maker


def test_we_verify_what_cosign_signs_with_its_own_key_and_with_ours(node, cosign, keys, pushed):
    cosign("generate-key-pair", "--output-key-prefix", f"{WORK}/cosign")
    node.run(["vgpu", "trust", "add", f"{WORK}/cosign.pub", "--name", "cosign"])
    cosign("import-key-pair", "--key", f"{keys}.key", "--output-key-prefix", f"{WORK}/imported")
    quiet = ["--allow-http-registry", "--yes", "--use-signing-config=false", "--tlog-upload=false"]
    ways = {
        "bundle": ["--new-bundle-format=true"],
        "simple signing": ["--new-bundle-format=false"],
    }
    try:
        for form, options in ways.items():
            for key, name in (("cosign", "cosign"), ("imported", "ours")):
                reference = pushed(f"by-{key}-{form.replace(' ', '-')}")
                cosign("sign", *quiet, *options, "--key", f"{WORK}/{key}.key", reference)
                doc = json.loads(node.run(["vgpu", "--json", "verify", f"docker://{reference}"]).stdout)
                assert [(s["form"], s["state"], s["keyName"]) for s in doc["signatures"]] == [(form, "trusted", name)]
    finally:
        node.run(["vgpu", "trust", "rm", "cosign"])
    assert code(node, "vgpu", "verify", f"docker://{pushed('none')}") == vgpu_errors.Unsigned.exit_code


def test_an_attestation_about_an_image_does_not_vouch_for_it(node, cosign, keys, pushed):
    reference = pushed("attested")
    node.write(f"{WORK}/predicate.json", '{"scanner": "none", "result": "full of holes"}')
    cosign("import-key-pair", "--key", f"{keys}.key", "--output-key-prefix", f"{WORK}/attest")
    options = ["--allow-http-registry", "--yes", "--use-signing-config=false", "--tlog-upload=false"]
    predicate = ["--predicate", f"{WORK}/predicate.json", "--type", "https://scanner.example/v1"]
    cosign("attest", *options, *predicate, "--key", f"{WORK}/attest.key", reference)
    assert code(node, "vgpu", "verify", f"docker://{reference}") == vgpu_errors.BadSignature.exit_code
