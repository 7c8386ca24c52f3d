#!/bin/sh
# pushed.sh ARCHIVE SECONDS: waits until `vgpu containerd watch` has pushed this archive and prints its reference.
# Run by deploy/example/preempt.sh in the container `archives`. Ends with status 1 and the last reason when the time is over.
# The tag is the one of containerd_integration/kubelet_watch.py (tag_of): the last characters of the name, which hold the time.
set -eu
archive=$1
ends=$(($(date +%s) + $2))
name=$(basename "$archive" .tar)
reference=$VGPU_PUSH_TO:$(printf '%s' "$name" | tr -c 'A-Za-z0-9_.-' '-' | tail -c 128 | sed 's/^[.-]*//')
until reason=$(vgpu verify "$reference" 2>&1 >/dev/null); do
    [ "$(date +%s)" -lt "$ends" ] || { echo "pushed: $archive is not at $reference: $reason" >&2; exit 1; }
    sleep 2
done
echo "$reference"
