"""The man pages: what must stand in them, clean for groff and mandoc where these are installed, the same each time."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from oci_hook.settings import Settings
from tools import man_pages
from tools.man_text import escaped, inline, markdown
from vgpu_cli.command_tree import tree
from vgpu_cli.main import full_parser, verbs
from vgpu_errors import all_errors

PAGES = {page.file_name: page for page in man_pages.pages()}
REQUESTS = {".TH", ".SH", ".SS", ".PP", ".TP", ".IP", ".RS", ".RE", ".nf", ".fi", '.\\"'}


def shown(page):
    """The text that a reader sees, without man's markup."""
    text = "\n".join(line for line in page.text.splitlines() if not line.startswith('.\\"'))
    text = re.sub(r"\\f[BPI]|\\&", "", text)
    for escape, letter in (("\\-", "-"), ("\\(ga", "`"), ("\\(ha", "^"), ("\\(ti", "~"), ("\\(dq", '"'), ("\\e", "\\")):
        text = text.replace(escape, letter)
    return text


def test_the_five_pages_are_there():
    assert set(PAGES) == {"vgpu.1", "vgpu-runtime.8", "vgpu-agent.8", "vgpu-hook.8", "runtime.conf.5"}


def test_the_command_page_has_every_verb_option_and_exit_code():
    text = shown(PAGES["vgpu.1"])
    for command in tree(full_parser()).walk():
        assert command.name in text
        for word in command.options:
            assert all(name in text for name in word.names)
    for cls in all_errors():
        assert re.search(rf"^{cls.exit_code}\n{cls.__name__}: ", text, re.MULTILINE)
    assert verbs()


def test_the_settings_page_has_every_key():
    text = shown(PAGES["runtime.conf.5"])
    for key in set(Settings.__slots__) - {"other"}:
        assert re.search(rf"^\.TP\n{key}$", text, re.MULTILINE), key


def test_the_agent_page_has_the_options_of_its_parser():
    from gpu_state import agent

    text = shown(PAGES["vgpu-agent.8"])
    for action in agent._parser()._actions:
        assert all(name in text for name in action.option_strings)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_only_requests_that_man_knows_and_the_sections_of_a_page(name):
    lines = PAGES[name].text.splitlines()
    assert {line.split(" ")[0] for line in lines if line.startswith((".", "'"))} <= REQUESTS
    sections = re.findall(r'^\.SH "?([A-Z ]+)', PAGES[name].text, re.MULTILINE)
    assert sections[0] == "NAME"
    assert {"DESCRIPTION", "SEE ALSO"} <= set(sections)
    assert len(sections) == len(set(sections))
    assert not re.search(r"\\(?![-&e(f\"])", PAGES[name].text), "an escape that we do not write"


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("checker", ["groff", "mandoc"])
def test_a_page_is_clean(checker, name, tmp_path):
    if shutil.which(checker) is None:
        pytest.skip(f"{checker} is not installed")
    path = tmp_path / name
    path.write_text(PAGES[name].text)
    command = {"groff": ["groff", "-man", "-ww", "-z", "-Tutf8"], "mandoc": ["mandoc", "-T", "lint", "-W", "warning"]}
    done = subprocess.run([*command[checker], path], capture_output=True, text=True, timeout=30, check=False)
    told = [line for line in (done.stdout + done.stderr).splitlines() if "missing date" not in line]
    assert told == []


def test_pages_are_the_same_each_time(tmp_path):
    names = man_pages.write(tmp_path)
    assert {path.name for path in names} == set(PAGES)
    assert all((tmp_path / path).read_text() == PAGES[path.name].text for path in names)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (".so /etc/passwd", "\\&.so /etc/passwd"),
        ("'a", "\\&'a"),
        ("a\\b", "a\\eb"),
        ("--json", "\\-\\-json"),
        ("~ ^ `", "\\(ti \\(ha \\(ga"),
    ],
)
def test_text_is_never_a_request(text, expected):
    assert escaped(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`a-b` and *man*(1)", "\\fBa\\-b\\fP and \\fBman\\fP(1)"),
        ("[a page](x.md#y)", "a page"),
        ("`.x` first", "\\fB\\&.x\\fP first"),
    ],
)
def test_marks_inside_a_line(text, expected):
    assert inline(text) == expected


def test_markdown_blocks():
    text = "# t\n\n## A b\n\nOne.\nTwo.\n\n- x\n- y\n\n| k | d | what |\n| --- | --- | --- |\n| a | 1 | it |\n\n```sh\n.x\n```\n"
    assert markdown(text) == [
        '.SH "A B"', ".PP", "One.", "Two.", ".IP \\(bu 2", "x", ".IP \\(bu 2", "y", ".TP", "a", "it (d: 1)",
        ".PP", ".RS 4", ".nf", "\\&.x", ".fi", ".RE",
    ]  # fmt: skip
