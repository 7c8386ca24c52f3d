#!/bin/sh
# Installs vgpu-snapshot into the node whose root is mounted at /host, and sets its containerd up. Run by the init
# container of deploy/daemonset.yaml, again after every update; a second run changes nothing.
# Refuses a node whose Python no package of this image is made for. Restarts containerd only where its files changed.
# A failure in the middle leaves the node's containerd as it was until it is restarted, and the next run, which finds the
# files changed already, still restarts it: how they were at first is kept below /run until then.
set -eu
host=${VGPU_HOST:-/host}
packages=${VGPU_PACKAGES:-/opt/vgpu/packages}
trusted=${VGPU_TRUSTED:-/etc/vgpu-trusted}
unread=$host/run/vgpu-install.before
copy=
trap '[ -z "$copy" ] || rm -f "$copy"' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

on_node() {
    chroot "$host" "$@"
}

# The service manager is spoken to in the node's own namespaces: from a changed root it refuses.
service() {
    on_node test -x /usr/bin/systemctl || return 1
    nsenter --target 1 --mount --uts --ipc --net -- systemctl "$@"
}

python=$(on_node /usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])') || {
    echo "install: the node has no /usr/bin/python3 (3.11 to 3.14)" >&2
    exit 1
}
package=$(find "$packages" -name "vgpu-snapshot-*-py$python.tar.gz" | head -n 1)
if [ -z "$package" ]; then
    echo "install: no package for the node's Python $python; there are: $(ls "$packages")" >&2
    exit 1
fi

echo "install: $(basename "$package")"
tar -C "$host" --no-same-owner -xzf "$package"

configuration() {
    cat "$host/etc/containerd/config.toml" "$host"/etc/containerd/conf.d/*.toml 2>/dev/null | sha256sum
}
[ -e "$unread" ] || configuration >"$unread"
set -- setup containerd
[ -z "${VGPU_LOW_LEVEL_RUNTIME:-}" ] || set -- "$@" --low-level-runtime "$VGPU_LOW_LEVEL_RUNTIME"
[ -z "${VGPU_DRIVER_DIR:-}" ] || set -- "$@" --driver-dir "$VGPU_DRIVER_DIR"
on_node /usr/bin/vgpu "$@"

for key in "$trusted"/*.pub; do
    [ -e "$key" ] || continue
    copy=$(mktemp "$host/run/vgpu-key-XXXXXX")
    cat "$key" >"$copy"
    on_node /usr/bin/vgpu trust add "${copy#"$host"}"
    rm -f "$copy"
done

mkdir -p "$host/run/vgpu" "$host/var/lib/vgpu"
service daemon-reload && service enable --now vgpu-agent ||
    echo "install: no systemd here; vgpu-runtime starts the agent when it needs it"
if [ "$(cat "$unread")" != "$(configuration)" ]; then
    if [ "${VGPU_RESTART_CONTAINERD:-yes}" = yes ] && service restart containerd; then
        echo "install: containerd was restarted"
    else
        echo "install: restart containerd on this node to make it read the handler vgpu-runtime" >&2
    fi
fi
rm -f "$unread"
