#!/bin/sh
# pushed.sh ARCHIVE SECONDS: waits until `vgpu containerd watch` has pushed this archive and prints its reference.
# Run by deploy/example/preempt.sh in the container `archives`. Ends with status 1 when the time is over.
set -eu
archive=$1 left=$2
name=$(basename "$archive" .tar)
reference=$VGPU_PUSH_TO:$(printf '%s' "$name" | tr -c 'A-Za-z0-9_.-' '-' | cut -c 1-128)
while ! vgpu verify "$reference" >/dev/null 2>&1; do
    left=$((left - 2))
    [ "$left" -gt 0 ] || { echo "pushed: $archive is not at $reference" >&2; exit 1; }
    sleep 2
done
echo "$reference"
