"""Cuts what deploy/ uses out of Kubernetes' published OpenAPI schemas: `python tests/kubernetes_schemas/make.py WHEEL`.

WHEEL is the file of the PyPI package `kubernetes-validate`, which carries the schemas of all versions as JSON Schema, in
a strict form that refuses unknown fields. It is no dependency: 22 MB, of which the tests need a hundredth.
The cut leaves descriptions out and changes nothing else. Licence of the schemas: Apache-2.0, as Kubernetes itself.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = "kubernetes_validate/kubernetes-json-schema/v{version}.0-local-strict/"
# The oldest version that takes checkpoints without a feature gate, and the newest that the package has.
VERSIONS = ("1.30", "1.37")
KINDS = {
    "v1/Namespace": "io.k8s.api.core.v1.Namespace",
    "v1/ServiceAccount": "io.k8s.api.core.v1.ServiceAccount",
    "v1/ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "apps/v1/DaemonSet": "io.k8s.api.apps.v1.DaemonSet",
    "batch/v1/Job": "io.k8s.api.batch.v1.Job",
    "node.k8s.io/v1/RuntimeClass": "io.k8s.api.node.v1.RuntimeClass",
    "rbac.authorization.k8s.io/v1/ClusterRole": "io.k8s.api.rbac.v1.ClusterRole",
    "rbac.authorization.k8s.io/v1/ClusterRoleBinding": "io.k8s.api.rbac.v1.ClusterRoleBinding",
    "networking.k8s.io/v1/NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
}


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as package:
        for version in VERSIONS:
            text = package.read(FOLDER.format(version=version) + "_definitions.json")
            out = HERE / f"kubernetes-{version}.json"
            out.write_text(
                json.dumps(cut(json.loads(text)["$defs"]), indent=0, sort_keys=True) + "\n", encoding="utf-8"
            )
            print(f"{out}: {out.stat().st_size} bytes")


def cut(definitions: dict) -> dict:
    """The definitions that the kinds lead to, with references inside the one file."""
    kept: dict[str, dict] = {}
    left = list(KINDS.values())
    while left:
        name = left.pop()
        if name not in kept:
            kept[name] = plain(definitions[name], left)
    return {"$defs": kept, "kinds": KINDS}


def plain(value, found: list[str], *, names_fields: bool = False):
    """Without descriptions; the names of referenced definitions go into `found`."""
    if isinstance(value, list):
        return [plain(item, found) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, item in value.items():
        if key == "description" and not names_fields:
            continue
        if key == "$ref":
            name = item.rpartition("/")[2]
            found.append(name)
            kept[key] = f"#/$defs/{name}"
            continue
        kept[key] = plain(item, found, names_fields=key == "properties")
    return kept


if __name__ == "__main__":
    main(sys.argv[1])
