"""The generated pages say what the programs say, and the hand-written ones link to files that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from oci_hook.settings import Settings, parse_settings
from tools import cli_help, doc_examples
from vgpu_cli.main import build_parser
from vgpu_cli.node_files import RUNTIME_CONF_TEXT

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def test_help_texts_are_up_to_date():
    assert cli_help.main(["--check"]) == 0, "run 'make docs'"


def test_stale_block_is_noticed_and_mended():
    stale = "text\n<!-- help: vgpu version -->\n```text\nold\n```\nmore\n"
    fresh = cli_help.with_blocks(stale)
    assert "usage: vgpu version" in fresh
    assert fresh.startswith("text\n<!-- help: vgpu version -->\n```text\n")
    assert fresh.endswith("```\nmore\n")
    assert cli_help.with_blocks(fresh) == fresh


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_shell_block_is_run_by_the_tests_or_says_why_not(page):
    doc_examples.examples(str(page.relative_to(REPOSITORY)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_pages_are_ones_that_are_there(page):
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for example in doc_examples.examples(str(page.relative_to(REPOSITORY))):
        for program, *words in map(shlex.split, example.commands):
            if program == "vgpu":
                build_parser(words[0]).parse_args(words)
            if program == "make":
                assert words[0] in targets


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_page_is_found_from_the_index(page):
    index = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    assert page.name == "README.md" or f"]({page.name})" in index


def test_decisions_are_numbered_without_gaps_as_their_titles_say():
    pages = sorted((REPOSITORY / "docs" / "decisions").glob("*.md"))
    assert [page.name[:4] for page in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
    for page in pages:
        assert page.read_text(encoding="utf-8").startswith(f"# {page.name[:4]}: ")


def test_a_shell_block_without_a_marker_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(doc_examples, "REPOSITORY", tmp_path)
    (tmp_path / "page.md").write_text("Do this:\n\n```sh\nrm -rf x\n```\n")
    with pytest.raises(doc_examples.UnmarkedExample, match=r"page\.md.*\n.*rm -rf x"):
        doc_examples.examples("page.md")


SETTINGS = sorted(set(Settings.__slots__) - {"other"})


@pytest.mark.parametrize("key", SETTINGS)
def test_the_operations_page_has_every_setting_with_its_default(key):
    page = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| `{key}` \| ([^|]*) \|", page, re.MULTILINE)
    default = getattr(Settings(), key)
    assert found
    if default is not None:
        assert found[1].strip("` ") == (f"{default:g}" if isinstance(default, float) else str(default))


def test_the_settings_file_of_setup_shows_every_key_with_its_default():
    lines = re.findall(r"^#(\w+) = (.*)$", RUNTIME_CONF_TEXT, re.MULTILINE)
    shown = parse_settings("".join(f"{key} = {value}\n" for key, value in lines), "runtime.conf")
    assert {key for key, _ in lines} == set(SETTINGS) - {"run_dir", "library_dir"}
    for key in ("deadline_restore_s", "deadline_freeze_s", "deadline_checkpoint_s", "inject", "mode", "progress"):
        assert getattr(shown, key) == getattr(Settings(), key)
