#!/bin/sh
# Pulls the checkpoint CHECKPOINT, verified, and gives it to the node's containerd as the image IMAGE, which the CRI
# restores into a container named CONTAINER. Run by deploy/example/fetch-job.yaml.
# What it needs on the way lies below /var/lib/vgpu/fetched and is removed at every end.
set -eu
host=${VGPU_HOST:-/host}
folder=/var/lib/vgpu/fetched/$$
mkdir -p "$folder"
chmod 0700 /var/lib/vgpu/fetched "$folder"
trap 'rm -rf "$folder"' EXIT INT TERM

vgpu pull "$CHECKPOINT" -o "$folder/checkpoint.tar"
python3 /opt/vgpu/checkpoint_image.py "$folder/checkpoint.tar" "$folder/image.tar" "$IMAGE" "$CONTAINER"
chroot "$host" ctr --namespace k8s.io images import "$folder/image.tar"
