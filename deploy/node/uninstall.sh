#!/bin/sh
# Takes back what install.sh did to the node whose root is mounted at /host; keys and checkpoints stay.
# Run by the init container of deploy/uninstall/daemonset.yaml. Refuses while a container of vgpu-runtime runs.
set -eu
host=${VGPU_HOST:-/host}
manifest=$host/usr/lib/vgpu-snapshot/installed-files.txt

on_node() {
    chroot "$host" "$@"
}

service() {
    on_node test -x /usr/bin/systemctl || return 1
    nsenter --target 1 --mount --uts --ipc --net -- systemctl "$@"
}

if [ ! -e "$manifest" ]; then
    echo "uninstall: nothing is installed here"
    exit 0
fi
running=$(ls "$host/run/vgpu/state" 2>/dev/null || true)
if [ -n "$running" ]; then
    echo "uninstall: containers of vgpu-runtime still run here: $running" >&2
    exit 1
fi
service disable --now vgpu-agent || true
on_node /usr/bin/vgpu setup containerd --undo --keep-keys
(cd "$host" && tr '\n' '\0' <"$manifest" | xargs -0 rm -f --)
rm -f "$manifest"
find "$host/usr/lib/vgpu-snapshot" -depth -type d -empty -delete 2>/dev/null || true
service daemon-reload || true
echo "uninstall: restart containerd on this node to make it forget the handler vgpu-runtime"
