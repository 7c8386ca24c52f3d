#!/bin/sh
# resume.sh NODE REFERENCE: lets the job that preempt.sh took away go on, on this node.
# The checkpoint's signature is verified on the node before anything runs from it; a refusal leaves it in the registry.
# Ends with status 1 as soon as the fetching job has failed, and prints why.
set -eu
node=${1:?the name of the node} reference=${2:?what preempt.sh printed}
here=$(cd "$(dirname "$0")" && pwd)
tag=${reference##*:}

filled() {
    sed -e "s|NODE|$node|" -e "s|REFERENCE|$reference|" -e "s|TAG|$tag|" \
        -e "s|registry.example/vgpu-snapshot:.*|$image|" "$here/$1"
}

# `kubectl wait` knows one condition at a time, and a job that fails never completes.
fetched() {
    left=3600
    while [ "$left" -gt 0 ]; do
        case $(kubectl -n vgpu-system get job fetch-trainer -o 'jsonpath={.status.conditions[?(@.status=="True")].type}') in
        *Failed*) break ;;
        *Complete*) return 0 ;;
        esac
        sleep 2
        left=$((left - 2))
    done
    kubectl -n vgpu-system logs job/fetch-trainer --tail 20 >&2 || true
    echo "resume: the node $node did not fetch $reference" >&2
    return 1
}

image=$(kubectl -n vgpu-system get daemonset vgpu-node -o 'jsonpath={.spec.template.spec.containers[0].image}')
kubectl -n vgpu-system delete job fetch-trainer --ignore-not-found
filled fetch-job.yaml | kubectl apply -f -
fetched
filled resumed-job.yaml | kubectl apply -f -
kubectl -n default wait --for=jsonpath='{.status.ready}'=1 --timeout=300s job/trainer-resumed
