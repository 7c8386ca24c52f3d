"""The configuration a test host has before vgpu-snapshot is set up on it: engines fitted to a bare namespace.

Written into a host when it is entered. None of it belongs to vgpu-snapshot: it is what the administrator
of such a machine would have had to write to make plain podman, runc and crun checkpoint a CPU container.
"""

from __future__ import annotations

from pathlib import Path

# The only cgroup v2 controller may be hugetlb (v1 hybrid machines): no pids limit, no systemd, no default sysctls,
# and the host's network, whose namespace is the test host's own.
CONTAINERS_CONF = """\
[containers]
pids_limit = 0
netns = "host"
default_sysctls = []
default_ulimits = []
log_driver = "k8s-file"

[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
"""

STORAGE_CONF = """\
[storage]
driver = "{driver}"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers/storage"
"""

POLICY_JSON = '{"default": [{"type": "insecureAcceptAnything"}]}\n'

# Registries of the tests speak plain HTTP on the test hosts' own addresses.
REGISTRIES_CONF = """\
unqualified-search-registries = []
[[registry]]
location = "127.0.0.1:5000"
insecure = true
[[registry]]
location = "10.0.0.1:5000"
insecure = true
[[registry]]
location = "10.0.0.2:5000"
insecure = true
"""

# On a machine with version 1 hierarchies crun's containers stay in the host's own cgroups there. CRIU dumps every cgroup
# below these and restores the whole tree into the container's, so that the tree doubles with each restore.
CRIU_CONF = "manage-cgroups=ignore\n"

FILES = {
    "etc/containers/containers.conf": CONTAINERS_CONF,
    "etc/containers/policy.json": POLICY_JSON,
    "etc/containers/registries.conf": REGISTRIES_CONF,
    # No resolver: a name outside /etc/hosts fails at once instead of running into a time-out per container.
    "etc/resolv.conf": "",
}


def write_base_config(root: Path) -> None:
    """Put the files in place; a link left by a package gives way to the file."""
    driver = (root / "run/storage-driver").read_text(encoding="ascii").strip()
    for name, text in {**FILES, "etc/containers/storage.conf": STORAGE_CONF.format(driver=driver)}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")
