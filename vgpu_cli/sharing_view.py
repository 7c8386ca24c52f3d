"""The tables of `vgpu inspect` on what processes share: objects with their parties, communicators, NVSHMEM.

Takes the `--json` document of the verb and prints; decides nothing. A record without any of it prints nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vgpu_cli.wording import short_text, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vgpu_cli.output import Output

ID_SHOWN = 16
UUID_SHOWN = 12
_ACCESS = {0: "none", 1: "r", 3: "rw"}  # CUmemAccess_flags


def print_sharing(doc: dict[str, Any], out: Output, shown: int | None) -> None:
    """Everything of it; at most so many rows of a table."""
    record = doc["record"]
    _table(out, "Shared GPU memory", _OBJECT_COLUMNS, list(_object_rows(doc["sharing"])), shown, ["size"])
    rows = [_communicator_row(entry) for entry in _ordered(record.get("communicators", ()))]
    _table(out, "Communicators", _COMMUNICATOR_COLUMNS, rows, shown, ["rank", "pid", "device", *_COUNTS])
    rows = [_element_row(entry) for entry in record.get("nvshmem", ())]
    _table(out, "NVSHMEM", _ELEMENT_COLUMNS, rows, shown, ["PE", "pid", "device"])


def _table(
    out: Output, title: str, columns: Sequence[str], rows: list[list[Any]], shown: int | None, numbers: Sequence[str]
) -> None:
    if not rows:
        return
    out.table(title, columns, rows[:shown], numbers=numbers)
    if shown is not None and len(rows) > shown:
        out.line(f"... and {len(rows) - shown} more; --all lists them")


_OBJECT_COLUMNS = ["object", "size", "device", "party", "role", "addresses", "access"]


def _object_rows(sharing: Iterable[dict[str, Any]]) -> Iterable[list[Any]]:
    """The object is named in the row of whoever holds it; its other parties follow."""
    for held in sharing:
        for party in held["parties"]:
            of = [held["object"], size_text(held["bytes"]), held["uuid"][:UUID_SHOWN]] if party["holds"] else [""] * 3
            role = (
                f"{party['role']}, its exporter is gone"
                if party["holds"] and party["role"] != "exporter"
                else party["role"]
            )
            named = f"{party['name']} {party['comm']}"
            yield [*of, named, role, _addresses(party["mappings"]), _access(party["mappings"])]


def _addresses(mappings: Sequence[dict[str, Any]]) -> str:
    """Where it is mapped; a part of it with its offset."""
    places = [f"{m['va']}+{m['size']:#x}" + (f" from {m['offset']:#x}" if m["offset"] else "") for m in mappings]
    return short_text(places) if places else "not mapped"


def _access(mappings: Sequence[dict[str, Any]]) -> str:
    """Device ordinals of the process with what they may do; once where all mappings are alike."""
    texts = [" ".join(f"{device}:{_ACCESS.get(flags, flags)}" for device, flags in m["access"]) for m in mappings]
    return short_text(list(dict.fromkeys(text or "nobody" for text in texts)))


_COUNTS = ["collectives", "point to point"]
_COMMUNICATOR_COLUMNS = ["communicator", "library", "rank", "pid", "device", *_COUNTS, "made of", "name"]


def _ordered(communicators: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(communicators, key=lambda entry: (entry["id"], entry["rank"], entry["nsPid"]))


def _communicator_row(entry: dict[str, Any]) -> list[Any]:
    split, parent = entry.get("split"), entry.get("parent")
    made_of = parent[:ID_SHOWN] if parent else ""
    if split:
        made_of = f"{made_of} color {split['color']} key {split['key']}".strip()
    said = ["finalized"] if entry.get("finalized") else []
    return [
        entry["id"][:ID_SHOWN],
        f"{entry['library']} {entry['version']}",
        f"{entry['rank']} of {entry['size']}",
        entry["nsPid"],
        entry["device"],
        entry["sequence"]["collectives"],
        entry["sequence"]["pointToPoint"],
        made_of,
        ", ".join([*filter(None, [entry.get("name")]), *said]),
    ]


_ELEMENT_COLUMNS = ["PE", "library", "pid", "device", "symmetric heap", "teams"]


def _element_row(entry: dict[str, Any]) -> list[Any]:
    teams = [f"{team['name']} {team['pe']} of {team['size']}" for team in entry["teams"]]
    return [
        f"{entry['pe']} of {entry['size']}",
        f"{entry['library']} {entry['version']}",
        entry["nsPid"],
        entry.get("device", "none"),
        short_text(entry["heap"]) if "heap" in entry else "not known",
        short_text(teams),
    ]
