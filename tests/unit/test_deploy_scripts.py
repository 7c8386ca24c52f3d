"""The example's scripts with a recorded kubectl and curl: order of the steps, and that a job is deleted last or not at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
ARCHIVE = "/var/lib/kubelet/checkpoints/checkpoint-trainer-abc_default-trainer-2026-01-01T00:00:00Z.tar"
REFERENCE = "registry.example/vgpu/checkpoints:checkpoint-trainer"
KUBECTL = f"""\
#!/bin/sh
echo "kubectl $*" >>"$CALLS"
case "$*" in
*"get pod -l job-name"*) echo trainer-abc ;;
*nodeName*status*|*spec.nodeName) ;;
esac
case "$*" in
*"jsonpath={{.spec.nodeName}}") echo node-a ;;
*"jsonpath={{.status.hostIP}}") echo 10.0.0.7 ;;
*"create token"*) echo secret-token ;;
*"-l app.kubernetes.io/name=vgpu-node"*) echo vgpu-node-1 ;;
*pushed.sh*) [ -z "$PUSH_FAILS" ] || exit 1; echo {REFERENCE} ;;
*"apply -f -"*) cat >>"$APPLIED" ;;
esac
"""
CURL = f"""\
#!/bin/sh
echo "curl $*" >>"$CALLS"
cat >"$GIVEN"
[ -z "$CURL_FAILS" ] || {{ echo "checkpointing failed" >&2; exit 22; }}
echo '{{"items":["{ARCHIVE}"]}}'
"""


@pytest.fixture
def script(tmp_path):
    """Runs a script of the example among the recorders."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("kubectl", KUBECTL), ("curl", CURL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    files = {name: str(tmp_path / name.lower()) for name in ("CALLS", "GIVEN", "APPLIED")}
    base = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PUSH_FAILS": "",
        "CURL_FAILS": "",
        "KUBELET_CA": "/ca.pem",
        **files,
    }

    def run(name, *words, **environment):
        command = [str(DEPLOY / "example" / name), *words]
        done = subprocess.run(
            command, env={**base, **environment}, capture_output=True, text=True, timeout=20, check=False
        )
        found = {key: Path(path).read_text() if Path(path).exists() else "" for key, path in files.items()}
        return done, found

    return run


def test_preempt_checkpoints_waits_for_the_push_and_deletes_last(script):
    done, found = script("preempt.sh")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"node=node-a checkpoint={REFERENCE}\n"
    calls = found["CALLS"].splitlines()
    order = [
        next(n for n, call in enumerate(calls) if word in call) for word in ("curl", "pushed.sh", "delete job trainer")
    ]
    assert order == sorted(order)
    assert "https://10.0.0.7:10250/checkpoint/default/trainer-abc/trainer?timeout=1800" in found["CALLS"]
    assert ARCHIVE in found["CALLS"]


def test_the_token_is_on_no_command_line(script):
    _, found = script("preempt.sh")
    assert "secret-token" not in found["CALLS"]
    assert "Authorization: Bearer secret-token" in found["GIVEN"]


@pytest.mark.parametrize("fault", ["CURL_FAILS", "PUSH_FAILS"])
def test_a_job_whose_checkpoint_is_not_in_the_registry_goes_on(script, fault):
    done, found = script("preempt.sh", **{fault: "yes"})
    assert done.returncode != 0
    assert "delete job" not in found["CALLS"]


def test_an_unnamed_ca_is_refused_before_anything_is_asked_of_the_kubelet(script):
    done, found = script("preempt.sh", KUBELET_CA="")
    assert done.returncode != 0
    assert "curl" not in found["CALLS"]
    done, found = script("preempt.sh", KUBELET_CA="", KUBELET_INSECURE="yes")
    assert done.returncode == 0
    assert "--insecure" in found["CALLS"]


def test_resume_fetches_on_the_node_and_starts_the_job_there(script):
    import yaml

    done, found = script("resume.sh", "node-b", REFERENCE)
    assert done.returncode == 0, done.stderr
    # The two manifests came one after the other.
    fetch, resumed = (yaml.safe_load(text) for text in split(found["APPLIED"]))
    assert fetch["spec"]["template"]["spec"]["nodeName"] == resumed["spec"]["template"]["spec"]["nodeName"] == "node-b"
    environment = {one["name"]: one["value"] for one in fetch["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert environment["CHECKPOINT"] == REFERENCE
    image = resumed["spec"]["template"]["spec"]["containers"][0]["image"]
    assert environment["IMAGE"] == image == "localhost/vgpu/trainer:checkpoint-trainer"
    calls = found["CALLS"]
    assert calls.index("job/fetch-trainer") < calls.rindex("apply -f -")


def split(text):
    at = text.index("# The job again")
    return text[:at], text[at:]
