"""For all tests: signals as a terminal leaves them, and every document that a verb prints held to its written schema in spec/."""

import json
import signal
import sys
from functools import cache
from pathlib import Path

import pytest

SPEC = Path(__file__).parents[1] / "spec"
VERBS_PACKAGE = "vgpu_cli.verbs."


def pytest_configure(config):
    """A suite in the background of a script inherits ignored signals, which programs must then leave ignored, ours too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@cache
def output_validator(verb):
    """The validator of what `vgpu VERB --json` prints, or None where no schema is written."""
    from jsonschema import Draft202012Validator
    from referencing import Registry, Resource

    if not (SPEC / f"{verb}-output.schema.json").exists():
        return None
    docs = [json.loads(path.read_text()) for path in sorted(SPEC.glob("*.schema.json"))]
    registry = Registry().with_resources((doc["$id"], Resource.from_contents(doc)) for doc in docs)
    schema = next(doc for doc in docs if doc["$id"].endswith(f"/{verb}-output.schema.json"))
    return Draft202012Validator(schema, registry=registry)


def printing_verb():
    """The verb whose module is printing, found on the stack: tests call verbs with and without `main`."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(VERBS_PACKAGE):
            return name.removeprefix(VERBS_PACKAGE).partition(".")[0]
        frame = frame.f_back
    return None


@pytest.fixture(autouse=True)
def _documents_follow_their_schemas(monkeypatch):
    from vgpu_cli.output import Output

    print_document = Output.json

    def checked(self, doc):
        verb = printing_verb()
        validator = output_validator(verb) if verb and self.is_json else None
        if validator is not None:
            validator.validate(json.loads(json.dumps(doc, default=str)))
        print_document(self, doc)

    monkeypatch.setattr(Output, "json", checked)
