"""The command lines that engines were recorded with, and the forms that both runtimes take."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_shim.arguments import parse
from runtime_shim.main import has_handler

B = "/var/lib/containers/storage/overlay-containers/4f1e/userdata"
R = "/run/containers/storage/overlay-containers/4f1e/userdata"
T = "/run/containerd/io.containerd.runtime.v2.task/default/web"
CTR = f"--root /run/containerd/runc/default --log {T}/log.json --log-format json"

# command line (without the program), verb, container id, options, is handled
RECORDED = [
    (
        f"create --bundle {B} --pid-file {R}/pidfile 4f1e",
        "create",
        "4f1e",
        {"bundle": B, "pid-file": f"{R}/pidfile"},
        True,
    ),
    (
        (
            f"--systemd-cgroup --log-format=json --log {R}/oci-log create --bundle {B} --pid-file {R}/pidfile "
            "--console-socket /var/tmp/conmon-term.X --preserve-fds 2 4f1e"
        ),
        "create",
        "4f1e",
        {"bundle": B, "console-socket": "/var/tmp/conmon-term.X", "preserve-fds": "2"},
        True,
    ),
    (f"--cgroup-manager disabled create --bundle {B} 4f1e", "create", "4f1e", {"bundle": B}, True),
    ("start 4f1e", "start", "4f1e", {}, False),
    ("delete --force 4f1e", "delete", "4f1e", {"force": None}, True),
    (
        f"exec --pid-file {B}/5a/exec_pid --process {B}/5a/exec-process-1 --detach 4f1e",
        "exec",
        "4f1e",
        {"process": f"{B}/5a/exec-process-1", "detach": None},
        True,
    ),
    ("kill 4f1e 15", "kill", "15", {}, False),
    ("pause 4f1e", "pause", "4f1e", {}, False),
    ("update --resources=/tmp/podman1 4f1e", "update", "4f1e", {"resources": "/tmp/podman1"}, False),
    ("--version", None, None, {}, False),
    ("checkpoint --help", "checkpoint", None, {"help": None}, False),
    (
        f"checkpoint --image-path {B}/checkpoint --work-path {B} 4f1e",
        "checkpoint",
        "4f1e",
        {"image-path": f"{B}/checkpoint", "work-path": B},
        True,
    ),
    (
        (
            f"checkpoint --image-path {B}/checkpoint --work-path {B} --leave-running --leave-running --tcp-established "
            "--file-locks 4f1e"
        ),
        "checkpoint",
        "4f1e",
        {"leave-running": None, "tcp-established": None, "file-locks": None},
        True,
    ),
    (
        f"checkpoint --image-path {B}/pre-checkpoint --work-path {B} --pre-dump 4f1e",
        "checkpoint",
        "4f1e",
        {"pre-dump": None},
        True,
    ),
    (
        f"checkpoint --image-path {B}/checkpoint --work-path {B} --parent-path ../pre-checkpoint 4f1e",
        "checkpoint",
        "4f1e",
        {"parent-path": "../pre-checkpoint"},
        True,
    ),
    (
        (
            f"restore --bundle {B} --pid-file {R}/pidfile --detach --image-path {B}/checkpoint --work-path {B} "
            "--tcp-established --tcp-close --file-locks 4f1e"
        ),
        "restore",
        "4f1e",
        {"bundle": B, "image-path": f"{B}/checkpoint", "detach": None, "tcp-close": None},
        True,
    ),
    ("restore --lsm-mount-context", "restore", None, {"lsm-mount-context": None}, False),
    (
        f"restore --lsm-mount-context=c --lsm-profile=selinux:x --bundle {B} 4f1e",
        "restore",
        "4f1e",
        {"lsm-profile": "selinux:x"},
        True,
    ),
    (f"{CTR} create --bundle {T} --pid-file {T}/init.pid web", "create", "web", {"bundle": T}, True),
    (
        f"{CTR} exec --process /tmp/runc-process9 --detach --pid-file {T}/e.pid web",
        "exec",
        "web",
        {"process": "/tmp/runc-process9"},
        True,
    ),
    (f"{CTR} kill --all web 9", "kill", "9", {"all": None}, False),
    (f"{CTR} delete web", "delete", "web", {}, True),
    (
        f"{CTR} checkpoint --image-path /tmp/ctrd-checkpoint1 --work-path {T}/criu-work --file-locks --leave-running web",
        "checkpoint",
        "web",
        {"image-path": "/tmp/ctrd-checkpoint1", "leave-running": None},
        True,
    ),
    (
        (
            f"{CTR} restore --image-path /tmp/ctrd-checkpoint1 --work-path {T}/work --detach --pid-file {T}/init.pid "
            f"-no-subreaper --bundle {T} new"
        ),
        "restore",
        "new",
        {"image-path": "/tmp/ctrd-checkpoint1", "no-subreaper": None, "bundle": T},
        True,
    ),
    ("features", "features", None, {}, False),
]


@pytest.mark.parametrize(("line", "verb", "container_id", "options", "is_handled"), RECORDED)
def test_recorded_command_lines(line, verb, container_id, options, is_handled):
    call = parse(["/usr/bin/vgpu-runtime", *line.split()])
    assert call.verb == verb
    assert call.container_id == container_id
    for name, value in options.items():
        assert call.has(name)
        assert call.get(name) == value
    assert has_handler(call) is is_handled


def test_global_options_are_kept_apart():
    call = parse(["rt", *CTR.split(), "create", "--bundle", "/b", "web"])
    assert call.get_global("root") == "/run/containerd/runc/default"
    assert call.get_global("log-format") == "json"
    assert call.get("log") is None
    assert call.global_words == CTR.split()


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (["create", "--bundle", "/b", "c"], "bundle", "/b"),
        (["create", "--bundle=/b", "c"], "bundle", "/b"),
        (["create", "-b", "/b", "c"], "bundle", "/b"),
        (["create", "-b=/b", "c"], "bundle", "/b"),
        (["create", "-b/b", "c"], "bundle", "/b"),
        (["create", "-bundle", "/b", "c"], "bundle", "/b"),
        (["create", "-bundle=/b", "c"], "bundle", "/b"),
        (["create", "c", "--bundle", "/b"], "bundle", "/b"),
        (["create", "--bundle", "/a", "--bundle", "/b", "c"], "bundle", "/b"),
        (["create", "--bundle", "checkpoint", "c"], "bundle", "checkpoint"),
        (["create", "--bundle=", "c"], "bundle", ""),
        (["create", "--bundle", "--", "c"], "bundle", "--"),
        (["run", "-d", "-b", "/b", "c"], "bundle", "/b"),
        (["exec", "-p", "/p", "c"], "process", "/p"),
        (["restore", "-no-subreaper", "--image-path", "/i", "c"], "image-path", "/i"),
    ],
)
def test_every_form_of_an_option(words, option, value):
    call = parse(["rt", *words])
    assert call.get(option) == value
    assert call.container_id == "c"


@pytest.mark.parametrize("word", ["--x=checkpoint", "--debug", "--unknown"])
def test_options_unknown_before_the_verb_are_passed_over(word):
    assert parse(["rt", word, "create", "c"]).verb == "create"


@pytest.mark.parametrize("value", ["create", "checkpoint", "restore", "exec"])
@pytest.mark.parametrize("option", ["--root", "--log", "--criu", "--rootless", "--cgroup-manager", "-root"])
def test_the_value_of_a_global_option_is_no_verb(option, value):
    assert parse(["rt", option, value, "kill", "c"]).verb == "kill"


def test_exec_ends_at_the_command():
    call = parse(["rt", "exec", "-t", "--cwd", "/w", "-e", "A=1", "c", "sh", "--process", "/x", "--help", "--"])
    assert call.container_id == "c"
    assert call.remaining == ["sh", "--process", "/x", "--help", "--"]
    assert call.get("process") is None
    assert not call.asks_for_help


def test_a_double_dash_ends_the_options():
    call = parse(["rt", "create", "--bundle", "/b", "--", "-c"])
    assert call.container_id == "-c"
    assert call.argv_with() == ["rt", "create", "--bundle", "/b", "--", "-c"]


@pytest.mark.parametrize(
    "words", [["create", "--bundle"], ["--root"], ["restore", "--lsm-mount-context"], ["checkpoint", "--image-path"]]
)
def test_a_missing_value_is_left_to_the_low_level_runtime(words):
    call = parse(["rt", *words])
    assert call.is_incomplete
    assert not has_handler(call)


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["--version"], ["create"], ["checkpoint", "-h", "c"], ["spec"], ["-"], ["--", "create"]]
)
def test_what_is_not_for_us(words):
    assert not has_handler(parse(["rt", *words]))


@pytest.mark.parametrize(
    ("word", "is_given"), [("--detach", True), ("--detach=true", True), ("--detach=false", False), ("-d", True)]
)
def test_switches(word, is_given):
    assert parse(["rt", "run", word, "c"]).has("detach") is is_given


@pytest.mark.parametrize(
    ("replacements", "expected"),
    [
        ({}, "rt --debug checkpoint --image-path /i --leave-running --leave-running c"),
        ({"leave-running": None}, "rt --debug checkpoint --image-path /i c"),
        ({"leave-running": True}, "rt --debug checkpoint --leave-running --image-path /i c"),
        ({"image-path": "/n"}, "rt --debug checkpoint --image-path /n --leave-running --leave-running c"),
        (
            {"tcp-established": True, "image-path": None},
            "rt --debug checkpoint --tcp-established --leave-running --leave-running c",
        ),
    ],
)
def test_argv_with_replacements(replacements, expected):
    call = parse(["rt", "--debug", "checkpoint", "--image-path", "/i", "--leave-running", "--leave-running", "c"])
    assert call.argv_with(replacements) == expected.split()


def test_a_replacement_covers_every_form_of_the_option():
    call = parse(["rt", "create", "-b", "/a", "--bundle=/b", "-bundle", "/c", "c"])
    assert call.argv_with({"bundle": "/n"}) == ["rt", "create", "--bundle", "/n", "c"]


VERBS = ["create", "run", "exec", "checkpoint", "restore", "delete", "kill"]
OPTIONS = ["--root", "--log", "--bundle", "-b", "-bx", "--bundle=/b", "--process", "-no-subreaper", "--help", "--force"]
OTHERS = ["--", "-", "-d", "--image-path", "c1", "--x=y", "-e", "A=1"]
words = st.one_of(st.sampled_from([*VERBS, *OPTIONS, *OTHERS]), st.text(max_size=5))


@settings(max_examples=500, deadline=None)
@given(st.lists(words, max_size=9))
def test_any_command_line_comes_back_word_for_word(line):
    call = parse(["rt", *line])
    assert call.argv_with() == ["rt", *line]
    assert call.argv_with(program="/usr/bin/runc") == ["/usr/bin/runc", *line]
    has_handler(call)
