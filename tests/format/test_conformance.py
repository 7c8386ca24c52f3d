"""The conformance checklist is true: every item names tests and vectors that there are, and no vector is left out of use."""

import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SPEC = TESTS.parent / "spec"
PAGE = (SPEC / "conformance.md").read_text()
ROWS = re.findall(r"^\| (\d+\.\d+) \| (.*?) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)


def vectors():
    found = set()
    for path in SPEC.glob("vectors/*/expected.json"):
        for case in json.loads(path.read_text())["cases"]:
            found.add(f"{path.parent.name}/{case.get('name', case['path'])}")
    return found


VECTORS = vectors()


def test_items_are_numbered_without_gaps():
    numbers = [tuple(map(int, number.split("."))) for number, *_ in ROWS]
    sections = [int(number) for number in re.findall(r"^## (\d+)\.", PAGE, re.MULTILINE)]
    assert len(numbers) > 30
    assert numbers == [
        (section, item) for section in sections for item in range(1, 1 + sum(a == section for a, _ in numbers))
    ]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_item_is_checked_by_something_that_is_there(row):
    _, who, _, checks = row
    assert who in ("reader", "writer", "both", "packer", "unpacker")
    named = re.findall(r"`([^`]+)`", checks)
    assert named
    for name in named:
        if "::" in name:
            file, function = name.split("::")
            text = (TESTS / file).read_text()
            assert re.search(rf"^def {re.escape(function)}\(", text, re.MULTILINE), name
        else:
            assert name in VECTORS, name


def test_every_bad_vector_of_packs_belongs_to_an_item():
    packed = {name for name in VECTORS if re.match(r"1\.2/(packed|frame|pack|small)-[a-z0-9-]+$", name)}
    named = set(re.findall(r"`(1\.2/[^`]+)`", PAGE))
    assert sorted(packed - named) == [
        "1.2/packed-no-such-pack",
        "1.2/packed-truncated",
        "1.2/small-damaged",
        "1.2/small-truncated",
    ]
