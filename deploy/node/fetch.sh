#!/bin/sh
# Pulls the checkpoint CHECKPOINT, verified, and gives it to the node's containerd as the image IMAGE, which the CRI
# restores into a container named CONTAINER. Run by deploy/example/fetch-job.yaml.
# What it needs on the way lies in a folder of its own below /var/lib/vgpu/fetched, locked as long as it works and removed
# at every end; one that a killed pod left has no lock any more and goes when the next one starts.
set -eu
host=${VGPU_HOST:-/host}
image_maker=${VGPU_IMAGE_MAKER:-/opt/vgpu/checkpoint_image.py}
fetched=${VGPU_FETCHED:-/var/lib/vgpu/fetched}
child=

ended() {
    [ -z "$child" ] || kill "$child" 2>/dev/null || true
    [ -z "$child" ] || wait "$child" || true
    exit "$1"
}

# In the background: as process 1 of its container a shell hears no signal while it waits for a command.
work() {
    "$@" &
    child=$!
    wait "$child"
    child=
}

mkdir -p "$fetched"
chmod 0700 "$fetched"
for left in "$fetched"/*/; do
    [ -d "$left" ] || continue
    flock -n "$left" rm -rf "$left" || true
done

folder=$(mktemp -d "$fetched/XXXXXXXX")
exec 9<"$folder"
flock -n 9
trap 'rm -rf "$folder"' EXIT
trap 'ended 143' TERM
trap 'ended 130' INT

work vgpu pull "$CHECKPOINT" -o "$folder/checkpoint.tar"
work python3 "$image_maker" "$folder/checkpoint.tar" "$folder/image.tar" "$IMAGE" "$CONTAINER"
work chroot "$host" ctr --namespace k8s.io images import "$folder/image.tar"
