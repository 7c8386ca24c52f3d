"""The generated pages say what the programs say, and the hand-written ones link to files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import cli_help, errors_page
from vgpu_errors import VgpuError, all_errors

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def test_error_list_is_up_to_date():
    assert errors_page.main(["--check"]) == 0, "run 'make docs'"


def test_help_texts_are_up_to_date():
    assert cli_help.main(["--check"]) == 0, "run 'make docs'"


def test_error_list_has_every_class_once():
    page = errors_page.page()
    for cls in all_errors():
        assert len(re.findall(rf"^\| {cls.exit_code} \| {cls.__name__} \|", page, re.MULTILINE)) == 1


def test_class_of_no_group_is_still_listed():
    assert errors_page.group_of(VgpuError) == ""


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
def test_commands_in_the_pages_are_verbs(page):
    """A line of a shell block that begins with `vgpu` names a verb that is there."""
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for verb in re.findall(r"^(?:sudo )?vgpu ([a-z-]+)", block, re.MULTILINE):
            assert verb in cli_help.verbs(), f"{page.name}: vgpu {verb}"
