#!/bin/sh
# preempt.sh [JOB]: takes a checkpoint of the job's pod through the kubelet, waits until it is pushed, deletes the job.
# Prints what resume.sh needs. The job goes on where anything fails before its checkpoint is in the registry.
# Needs: kubectl; a way to the node's port 10250; KUBELET_CA (a file), or KUBELET_INSECURE=yes for self-signed kubelets.
set -eu
job=${1:-trainer} namespace=${NAMESPACE:-default} container=${CONTAINER:-trainer}
deadline=${DEADLINE_S:-1800}

field() {
    kubectl -n "$namespace" get pod "$pod" -o "jsonpath={$1}"
}

pod=$(kubectl -n "$namespace" get pod -l "job-name=$job" --field-selector status.phase=Running -o 'jsonpath={.items[*].metadata.name}')
pod=${pod%% *}
[ -n "$pod" ] || { echo "preempt: no pod of the job $job runs in $namespace" >&2; exit 1; }
node=$(field .spec.nodeName) address=$(field .status.hostIP)
case $address in *:*) address="[$address]" ;; esac
token=$(kubectl -n vgpu-system create token vgpu-checkpointer --duration 10m)

if [ "${KUBELET_INSECURE:-no}" = yes ]; then
    set -- --insecure
else
    set -- --cacert "${KUBELET_CA:?the file of the CA that signs the certificates of kubelets}"
fi
# The token goes through standard input: a command line is everybody's to read.
answer=$(printf 'header = "Authorization: Bearer %s"\n' "$token" |
    curl --config - --fail-with-body --silent --show-error --max-time "$deadline" "$@" \
        --request POST "https://$address:10250/checkpoint/$namespace/$pod/$container?timeout=$deadline")
archive=$(printf '%s' "$answer" | sed -n 's/.*"\(\/[^"]*\.tar\)".*/\1/p')
[ -n "$archive" ] || { echo "preempt: the kubelet named no archive: $answer" >&2; exit 1; }

agent=$(kubectl -n vgpu-system get pod -l app.kubernetes.io/name=vgpu-node --field-selector "spec.nodeName=$node,status.phase=Running" \
    -o 'jsonpath={.items[*].metadata.name}')
agent=${agent%% *}
[ -n "$agent" ] || { echo "preempt: no pod of vgpu-snapshot runs on $node; the checkpoint is there: $archive" >&2; exit 1; }
reference=$(kubectl -n vgpu-system exec "$agent" -c archives -- /opt/vgpu/pushed.sh "$archive" "$deadline")

kubectl -n "$namespace" delete job "$job" --cascade=foreground
echo "node=$node checkpoint=$reference"
