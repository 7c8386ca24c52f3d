"""The Kubernetes RuntimeClass that sends pods to the handler `vgpu-runtime` (node.k8s.io/v1).

Written as JSON, which kubectl reads as it reads YAML. It is a file for the cluster's administrator: nothing here talks
to a cluster. Called by `vgpu setup containerd`.
"""

from __future__ import annotations

import json

from containerd_integration.config import HANDLER

MANIFEST_PATH = "/etc/vgpu/kubernetes/runtimeclass.json"


def runtime_class() -> str:
    """Text for `kubectl apply -f`."""
    document = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": HANDLER},
        "handler": HANDLER,
    }
    return json.dumps(document, indent=2) + "\n"
