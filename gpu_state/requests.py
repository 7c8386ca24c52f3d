"""What clients ask of the agent, taken out of untrusted JSON (spec/agent-protocol.md).

Pure. Refuses with AgentRefused, naming the verb and the argument. Used by server.py and service.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from gpu_state.group_terms import GroupTerms
from gpu_state.leases import checked_container
from vgpu_errors import AgentRefused

DEFAULT_DEADLINE_S = 60.0
MAX_DEADLINE_S = 86400.0
MAX_FOLDERS = 16
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a client."""

    id: int
    verb: str
    args: Args

    @classmethod
    def from_line(cls, line: bytes) -> Request:
        """Parse one line."""
        try:
            doc = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise AgentRefused(verb="a request", what="it is no JSON") from problem
        if not isinstance(doc, dict) or not isinstance(doc.get("verb"), str) or not isinstance(doc.get("id"), int):
            raise AgentRefused(verb="a request", what="it needs 'id', a number, and 'verb', a string")
        args = doc.get("args", {})
        if not isinstance(args, dict):
            raise AgentRefused(verb=doc["verb"], what="'args' must be an object")
        return cls(doc["id"], doc["verb"], Args(doc["verb"], args))


class Args:
    """The arguments of one verb."""

    def __init__(self, verb: str, doc: dict[str, Any]) -> None:
        self._verb = verb
        self._doc = doc

    def container(self) -> str:
        """The container's id, safe as a file name."""
        return checked_container(self._doc.get("container"), self._verb)

    def text(self, key: str) -> str:
        """A string that is not empty."""
        value = self.text_or_none(key)
        if not value:
            raise self._refused(f"'{key}' must be a string")
        return value

    def text_or_none(self, key: str) -> str | None:
        """A string, or None."""
        value = self._doc.get(key)
        if value is None or (isinstance(value, str) and "\0" not in value):
            return value
        raise self._refused(f"'{key}' must be a string")

    def folders(self, key: str) -> tuple[str, ...]:
        """A list of absolute paths; empty where it is not given."""
        value = self._doc.get(key) or []
        if not isinstance(value, list) or len(value) > MAX_FOLDERS:
            raise self._refused(f"'{key}' must be a list of at most {MAX_FOLDERS} folders")
        if all(isinstance(path, str) and path.startswith("/") and "\0" not in path for path in value):
            return tuple(value)
        raise self._refused(f"'{key}' must hold absolute paths")

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._doc.get(key)
        if isinstance(value, bool):
            return value
        raise self._refused(f"'{key}' must be true or false")

    def flag_or(self, key: str, *, default: bool) -> bool:
        """True or false; `default` where it is not given."""
        return default if self._doc.get(key) is None else self.flag(key)

    def seconds_or(self, key: str, default: float) -> float:
        """Seconds under another name than `deadline_s`."""
        return Args(self._verb, {"deadline_s": self._doc.get(key, default)}).deadline_s()

    def deadline_s(self, default: float = DEFAULT_DEADLINE_S) -> float:
        """Seconds that the client gives."""
        value = self._doc.get("deadline_s", default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if (
            not is_number or not 0 < value <= MAX_DEADLINE_S
        ):  # NaN fails here too, and a whole number may be of any length
            raise self._refused("'deadline_s' must be a number of seconds")
        return float(value)

    def device_map(self) -> dict[str, str]:
        """Old uuid -> new uuid."""
        value = self._doc.get("device_map") or {}
        uuids = [*value.keys(), *value.values()] if isinstance(value, dict) else [None]
        if isinstance(value, dict) and all(isinstance(uuid, str) and _UUID.fullmatch(uuid) for uuid in uuids):
            return value
        raise self._refused("'device_map' must map uuid strings to uuid strings")

    def group(self) -> GroupTerms | None:
        """Those with whom this is to be done at one cut; None for a container on its own."""
        value = self._doc.get("group")
        return None if value is None else GroupTerms.from_json(value, self._verb)

    def _refused(self, what: str) -> AgentRefused:
        return AgentRefused(verb=self._verb, what=what)
