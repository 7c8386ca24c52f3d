"""The systemd unit of `vgpu containerd watch` (kubelet_watch.py).

Pure: settings in, text out. Called by `vgpu setup containerd --kubelet`.
"""

from __future__ import annotations

import re

from vgpu_errors import UserError

UNIT_PATH = "/etc/systemd/system/vgpu-kubelet-watch.service"
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_/-]{0,254}")

_UNIT = """\
[Unit]
Description=vgpu-snapshot: seal, sign and push the kubelet's checkpoints
After=containerd.service
Wants=network-online.target

[Service]
ExecStart=/usr/bin/vgpu containerd watch{options}
Restart=on-failure
RestartSec=30
UMask=0077
ProtectHome=yes
ProtectSystem=full
ProtectHostname=yes
LockPersonality=yes
RestrictSUIDSGID=yes
NoNewPrivileges=yes
SystemCallArchitectures=native

[Install]
WantedBy=multi-user.target
"""


def unit(push_to: str) -> str:
    """The unit's text; a repository that systemd could read as more than one word is refused."""
    if push_to and not _REPOSITORY.fullmatch(push_to):
        raise UserError(what=f"--push-to {push_to!a} is no HOST[:PORT]/REPOSITORY")
    return _UNIT.format(options=f" --push-to {push_to}" if push_to else "")
