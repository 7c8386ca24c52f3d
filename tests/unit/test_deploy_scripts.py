"""The example's scripts with a recorded kubectl and curl: order of the steps, and that a job is deleted last or not at all."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
ARCHIVE = "/var/lib/kubelet/checkpoints/checkpoint-trainer-abc_default-trainer-2026-01-01T00:00:00Z.tar"
REFERENCE = "registry.example/vgpu/checkpoints:checkpoint-trainer"
KUBECTL = f"""\
#!/bin/sh
echo "kubectl $*" >>"$CALLS"
case "$*" in
*"get pod -l job-name"*) echo "$PODS" ;;
esac
case "$*" in
*"jsonpath={{.spec.nodeName}}") echo node-a ;;
*"jsonpath={{.status.hostIP}}") echo 10.0.0.7 ;;
*"create token"*) echo secret-token ;;
*"-l app.kubernetes.io/name=vgpu-node"*) echo vgpu-node-1 ;;
*"get daemonset vgpu-node"*) echo registry.mine:5000/vgpu-snapshot:0.2.0 ;;
*"get job fetch-trainer"*) echo "$FETCH" ;;
*"logs job/fetch-trainer"*) echo "no such checkpoint" ;;
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
        "PODS": "trainer-abc",
        "FETCH": "Complete",
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


def test_the_pod_that_is_asked_for_the_push_is_one_that_runs(script):
    _, found = script("preempt.sh")
    (asked,) = [call for call in found["CALLS"].splitlines() if "name=vgpu-node" in call]
    assert "spec.nodeName=node-a,status.phase=Running" in asked


def test_a_job_without_a_running_pod_is_named(script):
    done, found = script("preempt.sh", PODS="")
    assert done.returncode == 1
    assert "no pod of the job trainer runs in default" in done.stderr
    assert "curl" not in found["CALLS"]


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
    assert fetch["spec"]["template"]["spec"]["containers"][0]["image"] == "registry.mine:5000/vgpu-snapshot:0.2.0"
    calls = found["CALLS"]
    assert calls.index("get job fetch-trainer") < calls.rindex("apply -f -")


@pytest.mark.parametrize("condition", ["Failed", "FailureTarget Failed"])
def test_a_fetch_that_fails_is_told_at_once_and_no_job_starts(script, condition):
    done, found = script("resume.sh", "node-b", REFERENCE, FETCH=condition)
    assert done.returncode == 1
    assert "no such checkpoint" in done.stderr
    assert f"the node node-b did not fetch {REFERENCE}" in done.stderr
    assert "trainer-resumed" not in found["APPLIED"]


PUSHED = """\
#!/bin/sh
echo "vgpu $*" >>"$CALLS"
[ -z "$REFUSED" ] || { echo "vgpu: error: nothing there" >&2; exit 74; }
"""


@pytest.fixture
def pushed(tmp_path):
    (tmp_path / "vgpu").write_text(PUSHED)
    (tmp_path / "vgpu").chmod(0o755)
    base = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "VGPU_PUSH_TO": "registry.example/a", "REFUSED": ""}

    def run(archive, seconds="5", **environment):
        return subprocess.run(
            [str(DEPLOY / "node/pushed.sh"), archive, seconds],
            env={**base, "CALLS": str(tmp_path / "calls"), **environment},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    "name",
    [
        Path(ARCHIVE).name,
        f"checkpoint-{'long-' * 40}x_default-c-2026-01-01T00:00:00Z.tar",
        f"checkpoint-{'-' * 140}.tar",
    ],
)
def test_the_tag_that_is_waited_for_is_the_one_that_watch_pushes(pushed, name):
    from containerd_integration.kubelet_watch import tag_of

    done = pushed(f"/var/lib/kubelet/checkpoints/{name}")
    assert done.stdout == f"registry.example/a:{tag_of(name)}\n"


def test_the_last_reason_is_told_when_the_time_is_over(pushed):
    done = pushed(ARCHIVE, "0", REFUSED="yes")
    assert done.returncode == 1
    assert done.stderr.endswith("vgpu: error: nothing there\n")


FETCH_TOOL = """\
#!/bin/sh
case "$0" in
*/vgpu) for word; do target=$word; done; echo checkpoint >"$target"; echo pulled >>"$CALLS"; sleep "$PULL_S" ;;
*/python3) [ "$(cat "$2")" = checkpoint ] && cp "$2" "$3" ;;
*/chroot) echo "$* $(cat "$7")" >>"$CALLS" ;;
esac
"""


@pytest.fixture
def fetch(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("vgpu", "python3", "chroot"):
        (tools / name).write_text(FETCH_TOOL)
        (tools / name).chmod(0o755)
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "VGPU_FETCHED": str(tmp_path / "fetched"),
        "CHECKPOINT": REFERENCE,
        "IMAGE": "localhost/vgpu/trainer:x",
        "CONTAINER": "trainer",
    }

    def start(pull_s):
        return subprocess.Popen([str(DEPLOY / "node/fetch.sh")], env={**environment, "PULL_S": pull_s})

    return start


def test_fetching_leaves_nothing_and_spares_what_another_is_at_work_in(fetch, tmp_path):
    folder = tmp_path / "fetched"
    (folder / "of-a-killed-pod").mkdir(parents=True)
    slow = fetch("2")
    try:
        wait_for(tmp_path / "calls", 1)
        assert fetch("0").wait(timeout=10) == 0
        assert len(list(folder.iterdir())) == 1  # the slow one's
    finally:
        assert slow.wait(timeout=10) == 0
    assert list(folder.iterdir()) == []
    assert (tmp_path / "calls").read_text().count("images import") == 2


def test_a_pod_that_is_deleted_while_it_fetches_leaves_nothing(fetch, tmp_path):
    job = fetch("30")
    wait_for(tmp_path / "calls", 1)
    job.terminate()
    assert job.wait(timeout=10) == 143
    assert list((tmp_path / "fetched").iterdir()) == []
    assert "import" not in (tmp_path / "calls").read_text()


def wait_for(path, lines):
    ends = time.monotonic() + 10
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < ends
        time.sleep(0.02)


def split(text):
    at = text.index("# The job again")
    return text[:at], text[at:]
