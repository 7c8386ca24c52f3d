"""The table of docs/support-matrix.md, drawn from docs/support-matrix.json, which tests/engines/test_support_matrix.py records.

`python -m tools.support_matrix` writes the table, with `--check` it fails where the page differs.
Refuses to invent: a cell is what a test saw, or the stated reason why no test can see it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

REPOSITORY = Path(__file__).resolve().parents[1]
OUTCOME = REPOSITORY / "docs" / "support-matrix.json"
PAGE = REPOSITORY / "docs" / "support-matrix.md"
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"

SCENARIOS = {
    "run_with_gpu": "run with a GPU",
    "checkpoint_leave_running": "checkpoint, container goes on",
    "restore_in_place": "checkpoint, end, restore here",
    "second_checkpoint": "checkpoint of a restored container",
    "tampered_refused": "changed image refused",
    "agent_killed": "agent killed in between",
    "move_to_another_node": "move to another node",
    "files_come_along": "its files move along",
}


def main(argv: list[str]) -> int:
    """Write the table, or compare it."""
    page = PAGE.read_text(encoding="utf-8")
    wanted = with_table(page, table(json.loads(OUTCOME.read_text(encoding="utf-8"))))
    if "--check" in argv:
        if wanted != page:
            print(f"{PAGE.name} differs from {OUTCOME.name}: run 'python -m tools.support_matrix'", file=sys.stderr)
        return int(wanted != page)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


def record(outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    """Write what the test run saw; engines that no test can run keep their entry."""
    untested = [item for item in _recorded() if not item["isTested"] and item["engine"] not in outcomes]
    engines = [{"engine": label, "isTested": True, **outcome} for label, outcome in outcomes.items()]
    document = {"engines": [*engines, *untested]}
    OUTCOME.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if PAGE.exists():
        main([])


def table(document: Mapping[str, Any]) -> str:
    """Markdown: one row an engine, one column a scenario, reasons as numbered notes below."""
    notes: list[str] = []
    heads = ["engine", *SCENARIOS.values()]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for item in document["engines"]:
        cells = [_cell(item["results"].get(scenario, item.get("reason")), notes) for scenario in SCENARIOS]
        lines.append(_row([_engine(item), *cells]))
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]).rstrip() + "\n"


def with_table(page: str, text: str) -> str:
    """The page with the table between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        message = f"the page has no '{BEGIN}' and '{END}'"
        raise ValueError(message)
    return f"{before}{BEGIN}\n{text}{END}{after}"


def _recorded() -> list[dict[str, Any]]:
    if not OUTCOME.exists():
        return []
    engines: list[dict[str, Any]] = json.loads(OUTCOME.read_text(encoding="utf-8"))["engines"]
    return engines


def _engine(item: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in item.get("versions", {}).items())
    return f"**{item['engine']}**" + (f" ({versions})" if versions else "")


def _cell(result: str, notes: list[str]) -> str:
    if result == "yes":
        return "yes"
    if result not in notes:
        notes.append(result)
    return f"no ({notes.index(result) + 1})"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
