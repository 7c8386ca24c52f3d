"""What the fuzz tests share: how long they run, how real input is spoilt, what may come out of a parser.

`VGPU_FUZZ_SECONDS=600 pytest tests/fuzz` goes on for that long, spread over the targets; without it each is short and
the same every time.
"""

import copy
import json
import os
import resource
import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vgpu_errors import VgpuError

EXTRA_SECONDS = float(os.environ.get("VGPU_FUZZ_SECONDS", "0"))
TARGET_COUNT = 110  # a share of the time for each; tests/fuzz/test_every_parser.py holds it to the truth
LONGEST_CPU_S = 3.0
MOST_GROWTH_BYTES = 512 << 20
QUICK = settings(
    max_examples=120, deadline=None, derandomize=not EXTRA_SECONDS, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


def fuzz(check, *strategies, examples=None):
    """Run a check on generated values, once quickly, or again and again for this target's share of the time."""
    ends = time.monotonic() + EXTRA_SECONDS / TARGET_COUNT
    chosen = settings(QUICK, max_examples=examples) if examples else QUICK
    while True:
        chosen(given(*strategies)(check))()
        if time.monotonic() >= ends:
            return


def attempt(action, allowed=VgpuError):
    """What it returns, or the error that it may raise; any other error is the fuzzer's find."""
    try:
        return action()
    except allowed as error:
        return error


def bounded(action, allowed=VgpuError):
    """The same, and neither slow nor hungry."""
    started, peak = time.thread_time(), most_memory()
    outcome = attempt(action, allowed)
    assert time.thread_time() - started < LONGEST_CPU_S
    assert most_memory() - peak < MOST_GROWTH_BYTES
    return outcome


def most_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- strategies ----------------------------------------------------------------------------------

TEXT = st.text(max_size=20)
SMALL = st.integers(min_value=-(2**53) + 1, max_value=2**53 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | SMALL | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)
NUMBERS = [b"\xff" * 8, b"\0" * 8, b"\0" * 7 + b"\x80", b"1" * 8, b"-1,0.5e9", b'":[[[{"\\']
# JSON text that Python's reader takes, refuses, or takes in a way that surprises.
RAW_JSON = [
    "1" * 4301, "1" * 400, "-1", "1e999", "-1e999", "NaN", "0.5", "-0", "true", "null", '""', '"\\ud800"', '"\\u0000"', '"/"',
    '"' + "a" * 70000 + '"', "[]", "{}", "[[]]", "[null]", '{"": {}}', "[" * 9999 + "]" * 9999, '{"a":' * 9999 + "1" + "}" * 9999,
]  # fmt: skip
# What regular expressions, number parsers and recursive readers stumble over.
NASTY_TEXT = [
    "", "SEED" * 50, "a" * 50000, " " * 50000, "=" * 50000, "-" * 50000, "/" * 50000, ":" * 50000, "1" * 50000, "\n" * 50000,
    "SEED:" + "9" * 5000, "SEED\nx = " + "[" * 9999, "SEED\nx = " + "9" * 5000, "SEED\nx = " + "{a = " * 9999, "SEED\0", "\ud800",
    "SEED\n" + "[[" * 9999, "a-" * 9999, "a=b," * 9999, "a b " * 9999, '"' * 9999, "a:" * 9999, "\u0661\u0662", "SEED\u2028",
]  # fmt: skip
_MARK = "\0raw\0"


@st.composite
def mutated(draw, seed):
    """Real input with a few bytes changed, cut out, doubled or put in."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(min_value=1, max_value=4))):
        at = draw(st.integers(min_value=0, max_value=len(data)))
        length = draw(st.integers(min_value=0, max_value=16))
        kind = draw(st.sampled_from(["flip", "cut", "double", "insert", "end", "number"]))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(min_value=0, max_value=7))
        elif kind == "cut":
            del data[at : at + length]
        elif kind == "double":
            data[at:at] = data[at : at + length]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=16))
        elif kind == "end":
            del data[at:]
        elif kind == "number":
            data[at : at + 8] = draw(st.sampled_from(NUMBERS))
    return bytes(data)


def mutated_text(seed):
    """The same for text; bytes that are no UTF-8 come as surrogates, as from a file name or a command line."""
    spoilt = mutated(seed.encode()).map(lambda data: data.decode(errors="surrogateescape"))
    return spoilt | st.sampled_from([nasty.replace("SEED", seed) for nasty in NASTY_TEXT])


@st.composite
def reshaped(draw, seed):
    """A real JSON document with values of other shapes in some places, as a document."""
    doc = copy.deepcopy(seed)
    for _ in range(draw(st.integers(min_value=1, max_value=3))):
        doc = _changed(draw, doc, draw(JSON))
    return doc


@st.composite
def rewritten(draw, seed):
    """The same as bytes, with numbers, texts and depths in it that no document should have."""
    doc = draw(reshaped(seed))
    if draw(st.booleans()):
        doc = _changed(draw, doc, _MARK)
    return json.dumps(doc).replace(json.dumps(_MARK), draw(st.sampled_from(RAW_JSON))).encode()


def _changed(draw, doc, value):
    """The document with one of its values replaced, one taken out, or one more put in."""
    places = list(_places(doc, ()))
    path = draw(st.sampled_from(places))
    if not path:
        return value if draw(st.integers(min_value=0, max_value=9)) == 0 else doc
    holder = doc
    for key in path[:-1]:
        holder = holder[key]
    kind = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
    if kind == "remove":
        del holder[path[-1]]
    elif kind == "add" and isinstance(holder, list):
        holder.insert(path[-1], value)
    elif kind == "add":
        holder[draw(TEXT)] = value
    else:
        holder[path[-1]] = value
    return doc


def _places(doc, at):
    yield at
    inner = doc.items() if isinstance(doc, dict) else enumerate(doc) if isinstance(doc, list) else ()
    for key, value in inner:
        yield from _places(value, (*at, key))
