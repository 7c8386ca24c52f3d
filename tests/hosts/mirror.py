"""Finds the Debian mirror that this machine itself uses, so that no mirror's name is written down here.

Pure: text of apt's source files in, addresses out. Refuses to guess: None lets mmdebstrap use its own default.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ONE_LINE = re.compile(r"^deb\s+(?:\[[^\]]*\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>.+)$")


def debian_mirror(os_release: str, sources: Iterable[tuple[str, str]]) -> str | None:
    """The address of the entry for this release's own suite; None when the machine is no Debian."""
    release = dict(line.split("=", 1) for line in os_release.splitlines() if "=" in line)
    if release.get("ID", "").strip('"') != "debian":
        return None
    suites = {release.get("VERSION_CODENAME", "").strip('"'), "stable", "testing", "sid", "unstable"}
    for name, text in sources:
        for uri, suite, components in _entries(name, text):
            if suite in suites and "main" in components:
                return uri
    return None


def _entries(name: str, text: str) -> Iterable[tuple[str, str, list[str]]]:
    return _deb822(text) if name.endswith(".sources") else _one_line(text)


def _one_line(text: str) -> Iterable[tuple[str, str, list[str]]]:
    for line in text.splitlines():
        found = ONE_LINE.match(line.strip())
        if found:
            yield found["uri"], found["suite"], found["components"].split()


def _deb822(text: str) -> Iterable[tuple[str, str, list[str]]]:
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", kept):
        fields = {
            key.strip().lower(): value.split()
            for key, _, value in (line.partition(":") for line in re.sub(r"\n[ \t]+", " ", stanza).splitlines())
        }
        if "deb" not in fields.get("types", []) or fields.get("enabled") == ["no"]:
            continue
        for uri in fields.get("uris", []):
            for suite in fields.get("suites", []):
                yield uri, suite, fields.get("components", [])
