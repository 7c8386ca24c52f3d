"""The mirror is the machine's own, from whichever form its sources have."""

from __future__ import annotations

import pytest

from tests.hosts.mirror import debian_mirror

BOOKWORM = "ID=debian\nVERSION_CODENAME=bookworm\n"
DEB822 = """\
Types: deb
# a comment between fields
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
"""
OTHERS = "Types: deb\nURIs: https://other.example/apt\nSuites: nodistro\nComponents: main\n"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("debian.sources", DEB822, "http://mirror.example/debian"),
        ("debian.sources", DEB822.replace("Types: deb\n#", "Types: deb\nEnabled: no\n#"), None),
        ("other.sources", OTHERS, None),
        ("sources.list", "deb http://a.example/debian bookworm main contrib\n", "http://a.example/debian"),
        ("sources.list", "deb [signed-by=/k.gpg arch=amd64] http://b.example/ bookworm main\n", "http://b.example/"),
        ("sources.list", "# deb http://c.example/ bookworm main\ndeb-src http://c.example/ bookworm main\n", None),
        ("sources.list", "deb http://d.example/ bookworm-security main\n", None),
        ("vendor.list", "deb https://e.example/apt tool-bookworm main\n", None),
    ],
)
def test_the_mirror_of_the_machines_own_suite_is_found(name, text, found):
    assert debian_mirror(BOOKWORM, [(name, text)]) == found


def test_another_distribution_leaves_the_choice_to_mmdebstrap():
    ubuntu = "ID=ubuntu\nVERSION_CODENAME=noble\n"
    assert debian_mirror(ubuntu, [("sources.list", "deb http://a.example/ubuntu noble main\n")]) is None
