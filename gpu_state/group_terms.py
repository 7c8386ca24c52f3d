"""Which containers are to come to rest together: the argument `group` of `freeze` and `suspend` (spec/agent-protocol.md).

Pure. Refuses with AgentRefused what names no group. Used by requests.py and group_meeting.py, and by the clients that ask for a group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_state.leases import checked_container
from vgpu_errors import AgentRefused

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_MEMBERS = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")
NAME_IN_WORDS = "1 to 128 letters, digits, '_', '.', '+' or '-', the first a letter or digit"


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """What every member must say alike: the group, all its members, and what is to be done with them.

    `attempt` is of a client that asks for all of them: who comes late to its failure is told. Others cannot be told apart from
    those that try again.
    """

    name: str
    members: tuple[str, ...]
    verb: str
    attempt: str | None = None

    @classmethod
    def from_json(cls, doc: object, verb: str) -> GroupTerms:
        """Parse the argument `group`."""
        if not isinstance(doc, dict):
            raise AgentRefused(verb=verb, what="'group' must be an object")
        name, members, attempt = doc.get("name"), doc.get("members"), doc.get("attempt")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise AgentRefused(verb=verb, what=f"'group' needs a 'name': {NAME_IN_WORDS}")
        if not isinstance(members, list) or not 0 < len(members) <= MAX_MEMBERS:
            raise AgentRefused(verb=verb, what=f"'group' needs 'members', a list of 1 to {MAX_MEMBERS} containers")
        if attempt is not None and not (isinstance(attempt, str) and NAME.fullmatch(attempt)):
            raise AgentRefused(verb=verb, what="'attempt' of 'group' must be a name like that of a group")
        return cls(name, tuple(sorted({checked_container(member, verb) for member in members})), verb, attempt)


def short(container: str) -> str:
    """A container's id as engines show it."""
    return container[:12]


def named(containers: Collection[str]) -> str:
    """Several containers in a message."""
    word = "container" if len(containers) == 1 else "containers"
    return f"{word} {', '.join(map(short, containers))}"


def group_json(name: str, members: Collection[str], attempt: str | None = None) -> dict[str, Any]:
    """The argument `group`, as a client writes it."""
    return {"name": name, "members": sorted(members)} | ({"attempt": attempt} if attempt is not None else {})
