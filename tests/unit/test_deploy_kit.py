"""The Kubernetes kit: every document fits the published schemas, names meet, images are pinned, rights are the least.

Offline: the schemas are cut from Kubernetes' own (tests/kubernetes_schemas). The scripts are run in test_deploy_scripts.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from containerd_integration.config import HANDLER
from containerd_integration.runtime_class import runtime_class

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (REPOSITORY / "tests/kubernetes_schemas").glob("*.json")}
FILES = sorted(path for path in DEPLOY.rglob("*.yaml") if path.name != "kustomization.yaml")
KUSTOMIZATIONS = sorted(DEPLOY.rglob("kustomization.yaml"))
VERSION = re.search(r'^version = "(.+)"', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)[1]


def documents(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


EVERYTHING = [(path.relative_to(DEPLOY).as_posix(), document) for path in FILES for document in documents(path)]
IDS = [f"{path}:{document['kind']}/{document['metadata']['name']}" for path, document in EVERYTHING]
each_document = pytest.mark.parametrize(("path", "document"), EVERYTHING, ids=IDS)


def pod_of(document):
    return document.get("spec", {}).get("template", {}).get("spec")


PODS = [
    (f"{path}:{document['metadata']['name']}", pod_of(document)) for path, document in EVERYTHING if pod_of(document)
]
CONTAINERS = [
    (f"{where}/{container['name']}", pod, container)
    for where, pod in PODS
    for container in (*pod.get("initContainers", ()), *pod["containers"])
]
each_pod = pytest.mark.parametrize(("where", "pod"), PODS, ids=[where for where, _ in PODS])
each_container = pytest.mark.parametrize(
    ("where", "pod", "container"), CONTAINERS, ids=[where for where, _, _ in CONTAINERS]
)


def errors(schema, document):
    kind = schema["kinds"][f"{document['apiVersion']}/{document['kind']}"]
    validator = Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": schema["$defs"]})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


@pytest.mark.parametrize("version", sorted(SCHEMAS))
@each_document
def test_the_document_fits_the_published_schema(version, path, document):
    assert errors(SCHEMAS[version], document) == []


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("daemonset.yaml", lambda spec: spec["spec"].update(replica=1)),
        ("daemonset.yaml", lambda spec: spec["spec"]["template"]["spec"]["containers"][0].update(imagePolicy="x")),
        ("daemonset.yaml", lambda spec: spec["spec"].pop("selector")),
        ("daemonset.yaml", lambda spec: spec["spec"]["template"]["spec"].update(hostPID="yes")),
        ("runtime-class.yaml", lambda spec: spec.pop("handler")),
        ("example/job.yaml", lambda spec: spec["spec"].update(backoffLimit="none")),
    ],
)
@pytest.mark.parametrize("version", sorted(SCHEMAS))
def test_the_schemas_refuse_what_an_api_server_refuses(version, file, change):
    document = documents(DEPLOY / file)[0]
    change(document)
    assert errors(SCHEMAS[version], document)


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_a_kustomization_names_every_manifest_of_its_folder_and_our_version(path):
    found = yaml.safe_load(path.read_text())
    assert sorted(found["resources"]) == sorted(
        file.name for file in path.parent.glob("*.yaml") if file.name != "kustomization.yaml"
    )
    assert found["images"] == [{"name": "registry.example/vgpu-snapshot", "newTag": VERSION}]
    assert found["namespace"] == "vgpu-system"


@each_document
def test_selectors_match_the_labels_of_their_own_pods(path, document):
    selector = document.get("spec", {}).get("selector", {}).get("matchLabels")
    if selector is not None:
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert selector.items() <= labels.items()
    if document["kind"] == "NetworkPolicy":
        (wanted,) = document["spec"]["podSelector"]["matchExpressions"]
        assert set(wanted["values"]) == {name_of(one) for one in WITH_PODS if takes_the_registry_secret(one)}


WITH_PODS = [document for _, document in EVERYTHING if pod_of(document)]


def name_of(document):
    return document["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]


def takes_the_registry_secret(document):
    return any("secret" in volume for volume in pod_of(document).get("volumes", ()))


def test_nobody_elses_pods_are_taken_for_those_of_a_daemon_set():
    """preempt.sh asks for the pod of the DaemonSet by its label; a job's pod of the same label has no such container."""
    for kind in ("DaemonSet", "Job"):
        labels = [name_of(document) for document in WITH_PODS if document["kind"] == kind]
        others = [name_of(document) for document in WITH_PODS if document["kind"] != kind]
        assert not set(labels) & set(others)


def test_the_resumed_job_is_the_job_but_for_its_image():
    """Arguments and rights are signed: another command would be refused."""
    first, again = (pod_of(documents(DEPLOY / f"example/{name}.yaml")[0]) for name in ("job", "resumed-job"))
    (before,), (after,) = first["containers"], again["containers"]
    assert {key for key in before | after if before.get(key) != after.get(key)} == {"image", "imagePullPolicy"}
    assert {key for key in first | again if first.get(key) != again.get(key)} == {"containers", "nodeName"}


def names(kind):
    return {document["metadata"]["name"] for _, document in EVERYTHING if document["kind"] == kind}


@each_pod
def test_every_referenced_name_exists(where, pod):
    if "serviceAccountName" in pod:
        assert pod["serviceAccountName"] in names("ServiceAccount")
    if "runtimeClassName" in pod:
        assert pod["runtimeClassName"] in names("RuntimeClass")
    for volume in pod.get("volumes", ()):
        source = volume.get("configMap") or volume.get("secret") or {}
        name = source.get("name") or source.get("secretName")
        assert name is None or source.get("optional") or name in names("ConfigMap")
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    mounted = {
        mount["name"]
        for container in (*pod.get("initContainers", ()), *pod["containers"])
        for mount in container.get("volumeMounts", ())
    }
    assert mounted == volumes


@each_container
def test_settings_come_from_keys_that_the_config_map_has(where, pod, container):
    keys = {
        document["metadata"]["name"]: document["data"] for _, document in EVERYTHING if document["kind"] == "ConfigMap"
    }
    for source in container.get("envFrom", ()):
        assert source["configMapRef"]["name"] in keys
    for variable in container.get("env", ()):
        chosen = variable.get("valueFrom", {}).get("configMapKeyRef")
        assert chosen is None or chosen["key"] in keys[chosen["name"]]
    known = {variable["name"] for variable in container.get("env", ())}
    used = {name for word in container.get("command", ()) for name in re.findall(r"\$\((\w+)\)", word)}
    assert used <= known


def test_the_config_map_has_what_the_scripts_read_and_no_more():
    scripts = "".join(path.read_text() for path in (DEPLOY / "node").glob("*.sh"))
    data = documents(DEPLOY / "config.yaml")[0]["data"]
    of_the_tests = {"VGPU_HOST", "VGPU_PACKAGES", "VGPU_TRUSTED", "VGPU_IMAGE_MAKER", "VGPU_FETCHED"}
    read = set(re.findall(r"VGPU_[A-Z_]+", scripts)) - of_the_tests
    assert read == set(data)


@each_container
def test_images_are_pinned(where, pod, container):
    name, _, tag = container["image"].rpartition(":")
    assert name
    assert "/" not in tag, "an image without a tag"
    assert tag == "TAG" or re.fullmatch(r"\d+(\.\d+)+", tag), tag
    if name.endswith("/vgpu-snapshot"):
        assert tag == VERSION


def test_the_containerfile_pins_its_base_and_copies_what_exists():
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert all(re.search(r":\d+\.\d+", base) for base in bases)
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied == ["build/vgpu-snapshot-*-py3.*.tar.gz", "deploy/node/"]
    assert all((REPOSITORY / word).is_dir() for word in copied if word.startswith("deploy/"))


@each_container
def test_only_what_changes_the_node_itself_is_privileged(where, pod, container):
    security = container["securityContext"]
    mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
    assert bool(security.get("privileged")) == ("node-root" in mounts)
    if not security.get("privileged"):
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False


def test_the_only_right_is_the_kubelets_checkpoint_call():
    roles = [document for _, document in EVERYTHING if document["kind"] == "ClusterRole"]
    assert [role["rules"] for role in roles] == [
        [{"apiGroups": [""], "resources": ["nodes/checkpoint"], "verbs": ["create"]}]
    ]
    bindings = [document for _, document in EVERYTHING if document["kind"] == "ClusterRoleBinding"]
    for binding in bindings:
        assert binding["roleRef"]["name"] in names("ClusterRole")
        assert {subject["name"] for subject in binding["subjects"]} <= names("ServiceAccount")
        assert {subject["namespace"] for subject in binding["subjects"]} <= names("Namespace")


def test_the_runtime_class_is_the_one_that_setup_writes():
    found = documents(DEPLOY / "runtime-class.yaml")[0]
    written = json.loads(runtime_class())
    assert found["handler"] == written["handler"] == HANDLER
    assert found["metadata"] == written["metadata"]
    daemons = pod_of(documents(DEPLOY / "daemonset.yaml")[0])
    assert found["scheduling"]["nodeSelector"].items() <= daemons["nodeSelector"].items()


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_executable_stop_at_failures_and_parse(path):
    text = path.read_text()
    assert text.startswith("#!/bin/sh\n# ")
    assert "\nset -eu\n" in text
    assert path.stat().st_mode & 0o111
    subprocess.run(["sh", "-n", str(path)], check=True, timeout=10)


@each_container
def test_commands_are_in_the_image(where, pod, container):
    command = container.get("command", ["-"])[0]
    if command.startswith("/opt/vgpu/"):
        assert (DEPLOY / "node" / Path(command).name).exists()


def test_the_manifests_of_uninstall_share_the_namespace():
    assert (DEPLOY / "uninstall/namespace.yaml").read_text() == (DEPLOY / "namespace.yaml").read_text()


def test_what_the_example_scripts_fill_in_is_in_the_manifests():
    words = set(re.findall(r"s\|([A-Z]+)\|", (DEPLOY / "example/resume.sh").read_text()))
    assert words == {"NODE", "REFERENCE", "TAG"}
    both = [(DEPLOY / "example" / name).read_text() for name in ("fetch-job.yaml", "resumed-job.yaml")]
    assert all("nodeName: NODE" in text for text in both)
    first, resumed = (documents(DEPLOY / "example" / name)[0] for name in ("job.yaml", "resumed-job.yaml"))
    before, after = (pod_of(document)["containers"][0] for document in (first, resumed))
    same = ("name", "securityContext", "resources")
    assert [before[key] for key in same] == [after[key] for key in same]


# ---- the image that brings a checkpoint back --------------------------------------------------------------------------


def archive_with(path, *names, link=None):
    import io

    with tarfile.open(path, "w") as tar:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = 3
            tar.addfile(entry, io.BytesIO(b"abc"))
        if link:
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(entry)
    return path


def make_image(*words):
    program = DEPLOY / "node/checkpoint_image.py"
    command = ["python3", "-IS", str(program), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_checkpoint_becomes_an_image_whose_digests_hold(tmp_path):
    archive = archive_with(tmp_path / "a.tar", "config.dump", "spec.dump", "checkpoint/inventory.img")
    done = make_image(archive, tmp_path / "image.tar", "localhost/x:1", "trainer")
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "image.tar") as tar:
        content = {entry.name: tar.extractfile(entry).read() for entry in tar}
    for name, data in content.items():
        if name.startswith("blobs/"):
            assert hashlib.sha256(data).hexdigest() == name.rpartition("/")[2]
    named = json.loads(content["index.json"])["manifests"][0]
    assert named["annotations"]["io.containerd.image.name"] == "localhost/x:1"
    manifest = json.loads(content["blobs/sha256/" + named["digest"][7:]])
    assert manifest["annotations"] == {"org.criu.checkpoint.container.name": "trainer"}
    layer = manifest["layers"][0]
    assert content["blobs/sha256/" + layer["digest"][7:]] == archive.read_bytes()
    assert json.loads(content["blobs/sha256/" + manifest["config"]["digest"][7:]])["rootfs"]["diff_ids"] == [
        layer["digest"]
    ]


@pytest.mark.parametrize(
    ("names_", "link", "words"),
    [
        (("spec.dump", "checkpoint/a.img"), None, "config.dump or checkpoint/ is missing"),
        (("config.dump",), None, "config.dump or checkpoint/ is missing"),
        (("config.dump", "checkpoint/a.img"), "checkpoint/b.img", "no plain file"),
    ],
)
def test_what_is_no_checkpoint_is_refused_and_leaves_no_image(tmp_path, names_, link, words):
    archive = archive_with(tmp_path / "a.tar", *names_, link=link)
    done = make_image(archive, tmp_path / "image.tar", "localhost/x:1", "trainer")
    assert done.returncode == 1
    assert words in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_shell_words_of_the_watcher_are_the_verbs_own():
    from vgpu_cli.main import build_parser

    container = pod_of(documents(DEPLOY / "daemonset.yaml")[0])["containers"][0]
    words = [word.replace("$(VGPU_PUSH_TO)", "registry.example/a") for word in container["command"][1:]]
    args = build_parser("containerd").parse_args(words)
    assert (args.action, args.push_to) == ("watch", "registry.example/a")


@pytest.mark.parametrize("script", ["fetch.sh", "pushed.sh", "install.sh", "uninstall.sh"])
def test_every_vgpu_command_of_a_script_is_one_that_vgpu_takes(script):
    from vgpu_cli.main import build_parser

    text = (DEPLOY / "node" / script).read_text()
    found = re.findall(
        r"^(?:work |until reason=\$\(|on_node /usr/bin/)?(vgpu [a-z][^>\n]*?)(?: 2>|$)", text, re.MULTILINE
    )
    found += [f"vgpu {words}" for words in re.findall(r"on_node /usr/bin/vgpu ([^>\n]*)", text)]
    found += [f"vgpu {words}" for words in re.findall(r"set -- (setup [^\n]*)", text)]
    assert found
    for line in found:
        words = [word for word in shlex.split(line)[1:] if word != "$@"]
        if words:
            build_parser(words[0]).parse_args(words)
