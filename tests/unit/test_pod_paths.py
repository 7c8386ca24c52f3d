"""What a pod's restore may change in mount sources (spec/security-config.md, section 2): ids of sandbox and pod, no more."""

from __future__ import annotations

import pytest

from image_format import security_config

OLD, NEW = "a" * 64, "b" * 64
UID, NEW_UID = "0b5c9d3e-1111-4222-8333-444455556666", "1c5c9d3e-1111-4222-8333-444455556666"
SANDBOX = "/run/containerd/io.containerd.grpc.v1.cri/sandboxes"
KUBELET = "/var/lib/kubelet/pods"


def projected(source, *, sandbox=OLD, pod=UID, kind="cri"):
    keys = {"cri": ("io.kubernetes.cri.sandbox-id", "io.kubernetes.cri.sandbox-uid")}
    keys["cri-o"] = ("io.kubernetes.cri-o.SandboxID", "io.kubernetes.pod.uid")
    config = {
        "annotations": dict(zip(keys[kind], (sandbox, pod), strict=True)),
        "mounts": [{"destination": "/x", "type": "bind", "source": source, "options": ["rbind"]}],
    }
    return security_config.project(config, bundle="/run/b", container_id="c" * 64)["mounts"][0]["source"]


@pytest.mark.parametrize("kind", ["cri", "cri-o"])
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (f"{SANDBOX}/{OLD}/shm", f"{SANDBOX}/{NEW}/shm", f"{SANDBOX}/<sandbox>/shm"),
        (f"{KUBELET}/{UID}/volumes/v", f"{KUBELET}/{NEW_UID}/volumes/v", f"{KUBELET}/<pod>/volumes/v"),
        (
            f"{KUBELET}/{UID}/containers/main/1a2b3c4d",
            f"{KUBELET}/{NEW_UID}/containers/main/99999999",
            f"{KUBELET}/<pod>/containers/main/<engine>",
        ),
    ],
)
def test_the_same_place_of_another_pod_is_the_same(kind, old, new, expected):
    assert projected(old, kind=kind) == expected
    assert projected(new, sandbox=NEW, pod=NEW_UID, kind=kind) == expected


@pytest.mark.parametrize(
    ("source", "sandbox", "pod"),
    [
        (f"{SANDBOX}/{NEW}/shm", OLD, UID),
        (f"{KUBELET}/{NEW_UID}/volumes/v", OLD, UID),
        ("/etc/shadow", "etc", "etc"),
        ("/var/lib", "var", "lib"),
        (f"{SANDBOX}/{OLD}/../../etc", OLD, UID),
        (f"/x{OLD}/shm", OLD, UID),
    ],
)
def test_other_places_stay_what_they_are(source, sandbox, pod):
    assert projected(source, sandbox=sandbox, pod=pod) == source


def test_a_volume_of_another_name_differs():
    assert projected(f"{KUBELET}/{UID}/volumes/a") != projected(f"{KUBELET}/{UID}/volumes/b")
