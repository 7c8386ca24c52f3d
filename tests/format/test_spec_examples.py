"""What the spec pages show is true: every JSON example validates, the tables of bytes match the code, schemas are sound."""

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from image_format import chunk_index, file_names
from image_format.encryption import ENCRYPTED_RECORD_TYPE, EncryptedRecord
from image_format.record import Record
from image_format.trust import image_statement
from image_format.trust.dsse import Envelope, pre_authentication_encoding
from image_format.trust.image_statement import ImageStatement
from image_format.trust.policy import parse_default
from image_format.trust.statement import Statement

SPEC = Path(__file__).parents[2] / "spec"
SCHEMAS = {path.name: json.loads(path.read_text()) for path in sorted(SPEC.glob("*.schema.json"))}
REGISTRY = Registry().with_resources((doc["$id"], Resource.from_contents(doc)) for doc in SCHEMAS.values())
BY_MEDIA_TYPE = {
    "application/vnd.vgpu.checkpoint.record.v1+json": "record.schema.json",
    "application/vnd.oci.image.manifest.v1+json": "manifest.schema.json",
    "application/vnd.in-toto+json": "statement.schema.json",
    "application/vnd.dev.sigstore.bundle.v0.3+json": "bundle.schema.json",
    "application/vnd.vgpu.checkpoint.reference.v1+json": "reference.schema.json",
    "application/vnd.vgpu.policy.v1+json": "policy.schema.json",
    "application/vnd.vgpu.generations.v1+json": "generations.schema.json",
    "application/vnd.vgpu.checkpoint.encrypted-record.v1+json": "encrypted-record.schema.json",
    "application/vnd.dev.cosign.simplesigning.v1+json": "simple-signing.schema.json",
}
OURS = (
    "record.md",
    "chunk-index.md",
    "archive-layout.md",
    "signature.md",
    "security-config.md",
    "store.md",
    "versioning.md",
    "transport.md",
    "conformance.md",
    "security-considerations.md",
    "encryption.md",
)
# The same media type, but with other layers than the sealed manifest has.
BY_PAGE = {("transport.md", "application/vnd.oci.image.manifest.v1+json"): "transport-manifest.schema.json"}


def validator(name):
    return Draft202012Validator(SCHEMAS[name], registry=REGISTRY)


def find_examples():
    for page in OURS:
        for n, match in enumerate(
            re.finditer(r"^```(\S+)\n(.*?)^```", (SPEC / page).read_text(), re.MULTILINE | re.DOTALL)
        ):
            if match[1] != "text":
                schema = BY_PAGE.get((page, match[1]), BY_MEDIA_TYPE.get(match[1]))
                yield pytest.param(match[1], schema, match[2], id=f"{page}-{n}")


EXAMPLES = list(find_examples())


@pytest.mark.parametrize(("media_type", "schema", "text"), EXAMPLES)
def test_example_in_the_spec_validates(media_type, schema, text):
    doc = json.loads(text)
    validator(schema).validate(doc)
    if media_type == ENCRYPTED_RECORD_TYPE:
        assert EncryptedRecord.from_bytes(text.encode()).to_json() == doc
    if media_type.endswith("checkpoint.record.v1+json"):
        assert Record.from_json(doc).to_json() == doc
    if media_type.endswith("in-toto+json"):
        assert json.loads(read_statement(doc).to_bytes()) == doc
    if media_type.endswith("policy.v1+json"):
        assert parse_default(text.encode(), Path("policy.json")) == doc["default"]


def read_statement(doc):
    data = json.dumps(doc).encode()
    if doc["predicateType"] == image_statement.PREDICATE_TYPE:
        return ImageStatement.from_bytes(data, digest="sha256:" + doc["subject"][0]["digest"]["sha256"])
    return Statement.from_bytes(data)


def test_there_is_an_example_for_every_document():
    assert {case.values[0] for case in EXAMPLES} == set(BY_MEDIA_TYPE)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_is_a_schema(name):
    Draft202012Validator.check_schema(SCHEMAS[name])


@pytest.mark.parametrize("folder", sorted((SPEC / "vectors").glob("*/good/*/vgpu-record.json")))
def test_documents_of_good_vectors_validate(folder):
    folder = folder.parent
    for file, schema in (("record", "record"), ("manifest", "manifest"), ("signature", "bundle")):
        validator(f"{schema}.schema.json").validate(json.loads((folder / f"vgpu-{file}.json").read_bytes()))


def staged_without_feature():
    path = SPEC / "vectors/1.1/good/large-chunks/vgpu-record.json"
    doc = json.loads(path.read_bytes())
    assert validator("record.schema.json").is_valid(doc)
    return doc | {"features": {"required": [], "optional": []}}


@pytest.mark.parametrize(
    ("schema", "doc"),
    [
        ("policy.schema.json", {"version": 1, "default": "allow-everything"}),
        ("policy.schema.json", {"version": 1, "default": "allow-unsigned", "defualt": "x"}),
        ("record.schema.json", {"formatVersion": "1.0"}),
        ("record.schema.json", staged_without_feature()),
        ("bundle.schema.json", {"mediaType": "application/vnd.dev.sigstore.bundle.v0.4+json"}),
    ],
)
def test_schema_refuses(schema, doc):
    assert not validator(schema).is_valid(doc)


def byte_table(title):
    page = (SPEC / "chunk-index.md").read_text()
    section = page.split(f"## {title}")[1].split("## ")[0]
    return [(int(offset), int(size)) for offset, size in re.findall(r"^\| (\d+) \| (\d+) \|", section, re.MULTILINE)]


@pytest.mark.parametrize(
    ("title", "layout"),
    [
        ("2. Header, 128 bytes", chunk_index._HEADER),
        ("3. Region record, 64 bytes", chunk_index._REGION),
        ("4. Chunk record, 64 bytes", chunk_index._CHUNK),
        ("5. Pack record, 64 bytes", chunk_index._PACK),
    ],
)
def test_byte_tables_have_no_hole_and_fit_the_code(title, layout):
    rows = byte_table(title)
    ends = [offset + size for offset, size in rows]
    assert [offset for offset, _ in rows] == [0, *ends[:-1]]
    assert ends[-1] == layout.size


def test_pre_authentication_table_is_byte_exact():
    rows = re.findall(
        r"^\| (\S+|\(empty\)) \| (.*?) \| `(DSSEv1 .*)` \|$", (SPEC / "signature.md").read_text(), re.MULTILINE
    )
    payloads = {"`hello world`": b"hello world", "(empty)": b"", "two bytes `é` in UTF-8": "é".encode()}
    assert len(rows) == 3
    for kind, payload, expected in rows:
        payload_type = "" if kind == "(empty)" else kind.strip("`")
        assert pre_authentication_encoding(payload_type, payloads[payload]) == expected.encode()
        assert Envelope(payload_type, payloads[payload], b"").signed_bytes() == expected.encode()


def test_names_that_may_change_are_listed_in_the_spec():
    page = (SPEC / "archive-layout.md").read_text()
    line = next(line for line in page.splitlines() if "may be written after the seal" in line)
    assert set(re.findall(r"`([^`]+)`", line)) == file_names.ALLOWED_UNSIGNED


def test_pages_keep_one_sentence_per_line_and_name_no_history():
    for page in OURS:
        text = (SPEC / page).read_text()
        assert not re.search(r"\b(TODO|FIXME|will be|formerly|used to)\b", text), page
