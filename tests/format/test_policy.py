"""policy.json of both versions, and the folder of trusted keys."""

import json
import os

import pytest

from image_format.trust.keys import KEY_TYPES, SigningKey, make_node_key
from image_format.trust.policy import Policy, load_trusted
from vgpu_errors import BadConfiguration

RULES = [
    (None, ("refuse-untrusted", "warn")),
    ({"version": 1, "default": "refuse-untrusted"}, ("refuse-untrusted", "warn")),
    ({"version": 1, "default": "allow-unsigned"}, ("allow-unsigned", "warn")),
    ({"version": 2, "default": "refuse-untrusted"}, ("refuse-untrusted", "warn")),
    ({"version": 2, "default": "allow-unsigned", "olderGeneration": "refuse"}, ("allow-unsigned", "refuse")),
    ({"version": 2, "default": "refuse-untrusted", "olderGeneration": "allow"}, ("refuse-untrusted", "allow")),
]


@pytest.mark.parametrize(("doc", "expected"), RULES)
def test_a_policy_is_read(tmp_path, doc, expected):
    if doc is not None:
        (tmp_path / "policy.json").write_text(json.dumps(doc))
    policy = Policy.load(tmp_path)
    assert (policy.default, policy.older_generation) == expected


@pytest.mark.parametrize(
    "doc",
    [
        {"version": 1, "default": "refuse-untrusted", "olderGeneration": "refuse"},
        {"version": 2, "default": "refuse-untrusted", "olderGeneration": "forbid"},
        {"version": 2, "default": "refuse-untrusted", "olderGeneration": None},
        {"version": 2, "default": "refuse-untrusted", "oldergeneration": "refuse"},
        {"version": 2, "olderGeneration": "refuse"},
        {"version": 0, "default": "refuse-untrusted"},
        {"version": "2", "default": "refuse-untrusted"},
        {"version": True, "default": "refuse-untrusted"},
    ],
)
def test_a_policy_with_a_mistake_is_refused(tmp_path, doc):
    (tmp_path / "policy.json").write_text(json.dumps(doc))
    with pytest.raises(BadConfiguration, match=r"policy\.json"):
        Policy.load(tmp_path)


def test_keys_of_both_kinds_are_trusted_by_their_names(tmp_path):
    make_node_key(tmp_path)
    (tmp_path / "trusted").mkdir()
    keys = {kind: SigningKey.generate(kind) for kind in KEY_TYPES}
    for kind, key in keys.items():
        (tmp_path / "trusted" / f"{kind}.pub").write_bytes(key.public.to_pem())
    policy = Policy.load(tmp_path)
    assert [entry.name for entry in load_trusted(tmp_path)] == ["this node", "ecdsa-p256", "ed25519"]
    for kind, key in keys.items():
        assert policy.find(key.key_id).name == kind
    assert policy.find(SigningKey.generate().key_id) is None


@pytest.mark.parametrize("mode", [0o664, 0o666])
@pytest.mark.parametrize("name", ["node.pub", "policy.json", "trusted/a.pub"])
def test_a_file_that_others_can_change_is_refused(tmp_path, name, mode):
    make_node_key(tmp_path)
    (tmp_path / "trusted").mkdir()
    (tmp_path / "trusted/a.pub").write_bytes(SigningKey.generate().public.to_pem())
    (tmp_path / "policy.json").write_text('{"version": 2, "default": "refuse-untrusted"}')
    Policy.load(tmp_path)
    (tmp_path / name).chmod(mode)
    with pytest.raises(BadConfiguration, match="others"):
        Policy.load(tmp_path)


def test_a_key_of_the_next_version_says_which_version_it_needs(tmp_path):
    doc = {"version": 1, "default": "refuse-untrusted", "olderGeneration": "refuse"}
    (tmp_path / "policy.json").write_text(json.dumps(doc))
    with pytest.raises(BadConfiguration, match="olderGeneration") as found:
        Policy.load(tmp_path)
    assert '"version": 2' in found.value.remedy


@pytest.mark.parametrize("folder", [".", "trusted"])
def test_a_folder_in_which_others_can_replace_files_is_refused(tmp_path, folder):
    make_node_key(tmp_path)
    (tmp_path / "trusted").mkdir()
    (tmp_path / "trusted/a.pub").write_bytes(SigningKey.generate().public.to_pem())
    Policy.load(tmp_path)
    (tmp_path / folder).chmod(0o777)
    with pytest.raises(BadConfiguration, match="others") as found:
        Policy.load(tmp_path)
    assert "chmod go-w" in found.value.remedy


def test_a_file_that_is_no_key_among_the_trusted_ones_is_named(tmp_path):
    (tmp_path / "trusted").mkdir()
    (tmp_path / "trusted/a.pub").write_bytes(b"x")
    with pytest.raises(BadConfiguration, match=r"a\.pub") as found:
        Policy.load(tmp_path)
    assert f"rm {tmp_path}/trusted/a.pub" in found.value.remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path):
    make_node_key(tmp_path)
    os.chown(tmp_path / "node.pub", 12345, 12345)
    with pytest.raises(BadConfiguration, match="12345"):
        Policy.load(tmp_path)
