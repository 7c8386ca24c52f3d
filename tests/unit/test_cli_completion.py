"""The completion scripts, run by the shells themselves: what is offered at which place."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from vgpu_cli.command_tree import tree
from vgpu_cli.completion import SHELLS, script
from vgpu_cli.main import full_parser, main, verbs

TREE = tree(full_parser())

BASH_DRIVER = """\
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
compopt() { :; }
_vgpu
printf '%s\\n' "${COMPREPLY[@]}"
"""

# zsh's completion system needs a terminal; its helpers are replaced by ones that print what they are given.
ZSH_DRIVER = """\
compdef() { : }
_describe() { print -l -- "${(P@)argv[-1]}" }
compadd() { shift; print -l -- "$@" }
_files() { [[ "$1" == -/ ]] && print -l -- *(N/) || print -l -- *(N) }
source "$1"; shift
words=("$@"); CURRENT=$#
_vgpu
"""


def offered_by_bash(folder, words):
    return run(["bash", "-c", BASH_DRIVER, "bash", str(folder / "bash"), *words], folder / "empty")


def offered_by_zsh(folder, words):
    current = words[-1]
    lines = run(["zsh", "-f", "-c", ZSH_DRIVER, "zsh", str(folder / "zsh"), *words], folder / "empty")
    return [word for line in lines if (word := line.partition(":")[0]).startswith(current)]


def offered_by_fish(folder, words):
    line = " ".join(words)
    command = f"source {folder}/fish; complete -C {line!r}"
    return [line.partition("\t")[0] for line in run(["fish", "--no-config", "-c", command], folder / "empty")]


OFFERED = {"bash": offered_by_bash, "zsh": offered_by_zsh, "fish": offered_by_fish}


def run(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).write_text(script(shell, TREE))
    (folder / "empty").mkdir()
    (folder / "empty" / "image.tar").touch()
    (folder / "empty" / "images").mkdir()
    return folder


COMMON = {"--help", "--json", "--etc"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["vgpu", ""], set(verbs())),
        (["vgpu", "ver"], {"verify", "version"}),
        (["vgpu", "--json", "ver"], {"verify", "version"}),
        (["vgpu", "--etc", "trust", "ver"], {"verify", "version"}),
        (["vgpu", "trust", ""], {"add", "ls", "rm"}),
        (["vgpu", "setup", "p"], {"podman"}),
        (["vgpu", "setup", "podman", "--hooks"], {"--hooks-only"}),
        (["vgpu", "completion", "f"], {"fish"}),
        (["vgpu", "trust", "add", "--"], COMMON | {"--name"}),
        (["vgpu", "inspect", "ima"], {"image.tar", "images"}),
        (["vgpu", "suspend", "x", "--to", "ima"], {"images"}),
        (["vgpu", "trust", "add", "--name", "ima"], set()),
        (["vgpu", "nothing", "--"], COMMON),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_offers_what_can_stand_there(shell, words, expected, folder):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    offered = {word.rstrip("/") for word in OFFERED[shell](folder, words)}
    assert offered - {"-h"} == expected - {"-h"}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_verb_prints_the_script(shell, capsys):
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == script(shell, TREE)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_in_the_script(shell):
    text = script(shell, TREE)
    for command in TREE.walk():
        assert command.words[-1] in text
        for word in command.options:
            for name in word.names:
                assert name.lstrip("-") in text


def test_a_shell_that_is_not_known_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 10
