#!/bin/sh
# resume.sh NODE REFERENCE: lets the job that preempt.sh took away go on, on this node.
# The checkpoint's signature is verified on the node before anything runs from it; a refusal leaves it in the registry.
set -eu
node=$1 reference=$2
here=$(cd "$(dirname "$0")" && pwd)
tag=${reference##*:}

filled() {
    sed -e "s|NODE|$node|" -e "s|REFERENCE|$reference|" -e "s|TAG|$tag|" "$here/$1"
}

kubectl -n vgpu-system delete job fetch-trainer --ignore-not-found
filled fetch-job.yaml | kubectl apply -f -
kubectl -n vgpu-system wait --for=condition=complete --timeout=3600s job/fetch-trainer
filled resumed-job.yaml | kubectl apply -f -
kubectl -n default wait --for=jsonpath='{.status.ready}'=1 --timeout=300s job/trainer-resumed
