"""What a fuzz target is: a parser, real input for it, in which form that is spoilt, and what it may raise."""

import atexit
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from image_format.fields import Fields
from tests.fuzz.mutations import mutated, mutated_text, reshaped, rewritten
from vgpu_errors import VgpuError

SCRATCH = Path(tempfile.mkdtemp(prefix="vgpu-fuzz-"))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)


@dataclass(frozen=True)
class Target:
    """A parser, real input for it, in which form that is spoilt, and what it may raise."""

    parse: Any
    seed: Any
    form: str = "bytes"
    allowed: Any = VgpuError

    def inputs(self):
        """The strategy."""
        return FORMS[self.form](self.seed)


def words(seed):
    """A command line: words of a real one, spoilt, doubled, left out, in any order."""
    word = st.sampled_from(seed) | st.sampled_from(seed).flatmap(mutated_text) | st.text(max_size=8)
    return st.lists(word, max_size=2 * len(seed))


FORMS = {
    "bytes": mutated,
    "text": mutated_text,
    "json bytes": lambda seed: st.one_of(mutated(seed), rewritten(json.loads(seed))),
    "object": lambda seed: st.one_of(reshaped(seed), rewritten(seed).map(loaded)).filter(lambda d: isinstance(d, dict)),
    "words": words,
}


def loaded(data):
    """What json makes of the bytes; documents that it refuses never reach these parsers."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def as_bytes(doc):
    return json.dumps(doc).encode()


def in_file(read, name="input"):
    """A parser of a file, fed with content."""

    def parse(data):
        path = SCRATCH / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return read(path)

    return parse


def fields_of(parse):
    """A parser of a JSON object that is part of a document."""
    return lambda doc: parse(Fields(doc, "x"))


def written(name, data):
    path = SCRATCH / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
