"""The node's own files: settings, policy, key, agent unit, run-time folders. The same for every engine.

Pure except for `node_key_files`, which has a key made in a private folder and reads it back, so that the key is written
and taken back by the same steps as every other file. Called by `setup_plans`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from vgpu_cli.installed_files import PlannedFile

RUNTIME_CONF = "/etc/vgpu/runtime.conf"
POLICY = "/etc/vgpu/policy.json"
NODE_KEY = "/etc/vgpu/node.key"
NODE_PUBLIC_KEY = "/etc/vgpu/node.pub"
AGENT_UNIT = "/etc/systemd/system/vgpu-agent.service"
RUN_FOLDERS = "/etc/tmpfiles.d/vgpu.conf"

RUNTIME_CONF_TEXT = """\
# Settings of vgpu-runtime, vgpu-hook and vgpu-agent on this node: 'key = value', one a line.
# A line that starts with '#' is a comment; each key below shows its default.

# The OCI runtime that does the work: runc, crun, or another shim such as nvidia-container-runtime.
# Default: the first that exists of /usr/bin/runc, /usr/sbin/runc, /usr/bin/crun.
#low_level_runtime = /usr/bin/runc

# Which containers get the preload library: auto (GPU containers), always, never.
# The annotation vgpu.snapshot/inject=true or =false on a container wins over this.
#inject = auto

# Seconds that a restore may take. Podman gives up after 240 s by itself, so keep this below.
#deadline_restore_s = 220

# Seconds that freezing the GPU side may take.
#deadline_freeze_s = 120

# Seconds that the low-level runtime's part of a checkpoint may take, and copying GPU memory in staged mode.
#deadline_checkpoint_s = 900

# How GPU memory of new containers is moved: driver, staged.
# The annotation vgpu.snapshot/mode=driver or =staged on a container wins over this.
#mode = driver

# Checkpoint a container with the annotation vgpu.snapshot/group only together with its group (together), or by itself (alone).
#group = together

# Host memory that the agent keeps pinned for the next suspend, checkpoint or restore in staged mode, such as 40G.
#staging_reserve = 0

# Keep every checkpoint in this node's store as well: off, on. They stay there until 'vgpu gc' removes them.
#store = off

# What an engine's archive holds: embedded (everything), reference (the bulk stays in the store; needs store = on).
#archive = embedded

# Where the store is. On the disk of the engine's storage it costs no copy.
#store_dir = /var/lib/vgpu/store

# Progress on stderr of a checkpoint: auto (only on a terminal), json (one JSON line a phase), none.
#progress = auto

# Folder of libcuda.so.1, where the loader does not find it by itself.
#driver_dir = /usr/local/nvidia/lib64

# Debug log of vgpu-runtime; nothing is logged without it.
#log = /var/log/vgpu/runtime.log
"""

# The agent writes cgroup.freeze, reads /proc of every container, opens /dev/nvidia* and lets the driver compile code:
# the options that hide any of these (ProtectControlGroups, ProtectKernelTunables, ProtectProc, PrivateDevices,
# ProtectClock with its implied device list, MemoryDenyWriteExecute, ProtectKernelModules) are left out on purpose.
AGENT_UNIT_TEXT = """\
[Unit]
Description=vgpu-snapshot node agent
After=nvidia-persistenced.service
# An agent that was started on demand keeps the service waiting until it has nothing to do.
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart=/usr/bin/vgpu-agent
Restart=on-failure
RestartSec=5
# The agent undoes open freezes on SIGTERM, which takes the driver up to 180 s; its workers must live until then, and end with
# it by themselves. The keeper of GPU memory (gpu_state/fd_keeper.py) must outlive an agent that was killed.
KillMode=process
TimeoutStopSec=300
OOMScoreAdjust=-900
LimitMEMLOCK=infinity
UMask=0077
ProtectHome=yes
ProtectSystem=yes
ProtectHostname=yes
LockPersonality=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native

[Install]
WantedBy=multi-user.target
"""

# No RuntimeDirectory= in the unit: systemd would empty /run/vgpu under running containers when the agent stops.
RUN_FOLDERS_TEXT = """\
d /run/vgpu 0755 root root -
d /run/vgpu/containers 0755 root root -
d /run/vgpu/state 0700 root root -
d /var/log/vgpu 0700 root root -
"""

DEFAULT_POLICY = {"version": 1, "default": "refuse-untrusted"}


def node_files(runtime_conf: str) -> list[PlannedFile]:
    """Settings, policy, unit and folders; what an administrator may have written stays."""
    return [
        PlannedFile(RUNTIME_CONF, runtime_conf.encode(), 0o644, "settings of the runtime and the agent"),
        PlannedFile(POLICY, _json(DEFAULT_POLICY), 0o644, "which checkpoints this node accepts", "keep"),
        PlannedFile(AGENT_UNIT, AGENT_UNIT_TEXT.encode(), 0o644, "the node agent as a service"),
        PlannedFile(RUN_FOLDERS, RUN_FOLDERS_TEXT.encode(), 0o644, "folders under /run and /var/log"),
    ]


def node_key_files() -> list[PlannedFile]:
    """A fresh key pair; never planned where the node has a key already."""
    from image_format.trust.keys import make_node_key  # noqa: PLC0415 - cryptography takes 40 ms, only this step needs it

    with tempfile.TemporaryDirectory(prefix="vgpu-key-") as folder:  # mode 0700
        key = make_node_key(Path(folder))
        private, public = (Path(folder, Path(name).name).read_bytes() for name in (NODE_KEY, NODE_PUBLIC_KEY))
    return [
        PlannedFile(NODE_KEY, private, 0o600, f"signs this node's checkpoints (key {key.key_id})", "keep"),
        PlannedFile(NODE_PUBLIC_KEY, public, 0o644, "for other nodes that shall trust this one", "keep"),
    ]


def with_settings(text: str, settings: dict[str, str]) -> str:
    """The settings text with these keys set, each in the place of its own line or comment."""
    lines = text.splitlines()
    for key, value in settings.items():
        wanted = f"{key} = {value}"
        places = [n for n, line in enumerate(lines) if line.lstrip("#").split("=")[0].strip() == key]
        if places:
            lines[places[0]] = wanted
        else:
            lines.append(wanted)
    return "\n".join(lines) + "\n"


def settings_in(text: str) -> dict[str, str]:
    """The keys that are set; the runtime's own reader checks the values."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.lstrip().startswith("#"))
    return {key.strip(): value.strip() for key, value in pairs}


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
