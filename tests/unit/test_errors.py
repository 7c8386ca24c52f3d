"""The error tree: codes are unique and in their group's range, messages and remedies are whole, the page is current."""

import string
from collections import Counter

import pytest

from tools import errors_page
from vgpu_errors import ImageError, NodeError, RegistryError, UserError, VgpuError, all_errors, from_json

RANGES = {UserError: range(10, 20), NodeError: range(20, 50), ImageError: range(50, 70), RegistryError: range(70, 80)}
OTHERS = (*range(1, 10), *range(80, 90))
CLASSES = sorted(all_errors(), key=lambda cls: cls.__name__)
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def fields_of(cls):
    return {name for _, name, _, _ in string.Formatter().parse(cls.__doc__) if name is not None}


def test_no_two_errors_share_an_exit_code_or_a_name():
    codes = Counter(cls.exit_code for cls in CLASSES)
    names = Counter(cls.__name__ for cls in CLASSES)
    assert {code: n for code, n in codes.items() if n > 1} == {}
    assert {name: n for name, n in names.items() if n > 1} == {}


@every_class
def test_the_exit_code_says_who_must_act(cls):
    wanted = next((codes for group, codes in RANGES.items() if issubclass(cls, group)), OTHERS)
    assert cls.exit_code in wanted


@every_class
def test_the_class_sets_its_own_exit_code_and_message(cls):
    assert "exit_code" in vars(cls)
    assert vars(cls)["__doc__"]


@every_class
def test_the_message_is_one_line_made_of_its_fields_alone(cls):
    assert "\n" not in cls.__doc__
    assert all(name.isidentifier() for name in fields_of(cls))
    values = {name: f"<{name}>" for name in fields_of(cls)}
    message = cls(**values).message
    assert all(value in message for value in values.values())
    assert not {"{", "}"} & set(message)


@every_class
def test_the_remedy_is_a_sentence(cls):
    assert cls.remedy == cls.remedy.strip()
    assert cls.remedy.endswith(".")
    assert len(cls.remedy.split()) > 2


@every_class
def test_an_error_comes_back_from_json_as_it_was(cls):
    error = cls(**dict.fromkeys(fields_of(cls), "x"))
    error.add_note("and this")
    again = from_json(error.to_json())
    assert type(again) is cls
    assert again.to_json() == error.to_json()


def test_a_field_that_nobody_gave_stays_in_the_message():
    assert VgpuError().message == "{what}"


def test_an_error_of_a_newer_version_keeps_its_message():
    doc = {"class": "FromTheFuture", "exit_code": 49, "message": "what happened", "remedy": "Do this."}
    assert from_json(doc).message == "what happened"


def test_every_error_is_on_the_page_once():
    rows = [line for line in errors_page.page().splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert sorted(row.split(" | ")[1] for row in rows) == [cls.__name__ for cls in CLASSES]


def test_the_page_of_errors_is_up_to_date():
    assert errors_page.main(["--check"]) == 0, "run 'make docs'"
