"""`vgpu store`, `gc`, `pack` and `unpack` on a real store: documents by their schemas, tables, refusals and exit codes."""

import json
import os
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from image_format.file_names import REFERENCE_NAME
from image_format.trust.keys import make_node_key
from tests.format.store_stage import MIB, PAGES, Stage, make_archive
from vgpu_cli.main import main
from vgpu_cli.store_choice import seconds_of
from vgpu_errors import ContentElsewhere, ContentMismatch, NoSuchCheckpoint, NoSuchImage, StillNeeded, UserError

SPEC = Path(__file__).parents[2] / "spec"


@pytest.fixture
def etc(tmp_path):
    folder = tmp_path / "etc"
    folder.mkdir()
    make_node_key(folder)
    return folder


@pytest.fixture
def stage(tmp_path, etc):
    made = Stage(tmp_path, etc)
    (etc / "runtime.conf").write_text(f"store_dir = {made.store.root}\n")
    return made


@pytest.fixture
def vgpu(etc, capsys):
    """Run a command; its document, which fits its schema, and its exit code."""

    def run(*words):
        code = main([*map(str, words), "--json", "--etc", str(etc)])
        text = capsys.readouterr().out
        doc = json.loads(text)
        name = "error" if "error" in doc else words[0]
        schema = json.loads((SPEC / f"{name}-output.schema.json").read_text())
        Draft202012Validator(schema).validate(doc)
        return doc, code

    return run


@pytest.fixture
def shown(etc, capsys):
    def run(*words):
        assert main([*map(str, words), "--etc", str(etc)]) == 0
        return capsys.readouterr().out

    return run


def test_list_measure_verify_and_remove(stage, vgpu, shown):
    kept = [stage.store.add(stage.seal(f"g{n}", generation=n, day=n, pages_seed=n)) for n in (1, 2)]
    stage.store.refer(kept[0].manifest_digest, "/backup/ref.tar")
    doc, code = vgpu("store", "ls")
    assert (code, doc["store"]) == (0, str(stage.store.root))
    assert [(entry["generation"], entry["neededBy"]) for entry in doc["checkpoints"]] == [
        (1, ["/backup/ref.tar"]),
        (2, []),
    ]
    text = shown("store", "ls")
    assert "name-cccc" in text
    assert "/backup/ref.tar" in text
    doc, code = vgpu("store", "du")
    first = doc["checkpoints"][0]
    assert first["totalBytes"] == first["sharedBytes"] + first["uniqueBytes"] > 3 * MIB
    assert doc["totalBytes"] > 2 * first["uniqueBytes"]
    assert "unique" in shown("store", "du")
    doc, code = vgpu("store", "verify")
    assert code == 0
    assert doc["checkpoints"][1]["sharedBytes"] > 0
    assert "2 checkpoints verified, 0 damaged" in shown("store", "verify")
    doc, code = vgpu("store", "rm", "cccc:1")
    assert code == StillNeeded.exit_code
    doc, code = vgpu("store", "rm", "cccc:1", kept[1].manifest_digest[:10], "--force")
    assert (code, [one["forgotten"] for one in doc["removals"]]) == (0, [["/backup/ref.tar"], []])
    assert vgpu("store", "ls")[0]["checkpoints"] == []
    assert "no checkpoint" in shown("store", "ls")
    assert vgpu("store", "rm", "cccc")[1] == NoSuchCheckpoint.exit_code


def test_a_damaged_checkpoint_is_named_and_gives_its_exit_code(stage, vgpu):
    whole = stage.store.add(stage.seal("a"))
    kept = stage.store.add(stage.seal("b", generation=2, pages_seed=2))
    with (kept.path / PAGES).open("r+b") as file:
        file.write(b"damage")
    doc, code = vgpu("store", "verify")
    assert code == ContentMismatch.exit_code
    problems = {entry["manifestDigest"]: entry["problem"] for entry in doc["checkpoints"]}
    assert problems[whole.manifest_digest] is None
    assert PAGES in problems[kept.manifest_digest]["message"]
    assert vgpu("store", "verify", whole.manifest_digest)[1] == 0


def test_a_directory_is_verified_before_it_is_added(stage, vgpu):
    folder = stage.seal()
    data = bytearray((folder / PAGES).read_bytes())
    data[5] ^= 1
    (folder / PAGES).write_bytes(data)
    assert vgpu("store", "add", folder)[1] == ContentMismatch.exit_code
    assert stage.everything() == []
    data[5] ^= 1
    (folder / PAGES).write_bytes(data)
    doc, code = vgpu("store", "add", folder)
    assert code == 0
    assert Path(doc["added"]["path"]).is_dir()
    assert (folder / PAGES).stat().st_nlink == 1


def test_gc_says_what_goes_and_what_stays(stage, vgpu, shown):
    kept = [stage.store.add(stage.seal(f"g{n}", generation=n, day=n)) for n in (1, 2, 3)]
    stage.store.refer(kept[0].manifest_digest, "/backup/ref.tar")
    assert vgpu("gc")[0]["removed"] == []
    doc, _ = vgpu("gc", "--keep", 1, "--dry-run")
    assert ([one["generation"] for one in doc["removed"]], [one["generation"] for one in doc["kept"]]) == ([2], [1])
    assert "Kept, although old" in shown("gc", "--keep", 1, "--dry-run")
    assert vgpu("gc", "--keep", 1, "--older-than", "1d")[0]["removed"] == []
    doc, _ = vgpu("gc", "--keep", 1)
    assert (doc["dryRun"], len(doc["removed"])) == (False, 1)
    assert len(stage.store.checkpoints()) == 2
    os.utime(stage.store.references()[0].path, (1, 1))
    doc, _ = vgpu("gc", "--keep", 1, "--references-older-than", "1h")
    assert (len(doc["removed"]), len(doc["forgotten"])) == (1, 1)
    for wrong in (["--keep", "-1"], ["--older-than", "soon"]):
        assert vgpu("gc", *wrong)[1] == UserError.exit_code


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("12h", 43200), ("30d", 2592000), ("1w", 604800), ("5s", 5)]
)
def test_spans_of_time(text, seconds):
    assert seconds_of(text) == seconds


def test_pack_and_unpack_archives_and_directories(stage, vgpu, shown, tmp_path):
    folder = stage.seal()
    whole = make_archive(tmp_path / "whole.tar", folder, "zstd")
    location = "registry.example/x@sha256:" + "a" * 64
    doc, code = vgpu("pack", whole, "-o", tmp_path / "small.tar", "--compress", "none", "--location", location)
    assert code == 0
    assert doc["movedBytes"] > 3 * MIB > (tmp_path / "small.tar").stat().st_size
    doc, code = vgpu("unpack", tmp_path / "small.tar", "-o", tmp_path / "again.tar", "--compress", "zstd")
    assert (code, PAGES in doc["files"]) == (0, True)
    assert vgpu("verify", tmp_path / "again.tar")[1] == 0
    shown("inspect", tmp_path / "small.tar", "--no-fitness")
    assert vgpu("verify", tmp_path / "small.tar")[1] == 0
    assert vgpu("verify", tmp_path / "small.tar", "--store", tmp_path / "none")[1] == ContentElsewhere.exit_code
    assert "refers to it" in shown("pack", folder, "-o", tmp_path / "ref")
    assert (tmp_path / "ref" / REFERENCE_NAME).exists()
    assert "whole and verified" in shown("unpack", tmp_path / "ref", "-o", tmp_path / "full")
    assert vgpu("verify", tmp_path / "full")[1] == 0
    assert vgpu("pack", folder, "-o", tmp_path / "x", "--compress", "zstd")[1] == UserError.exit_code
    assert vgpu("pack", folder, "-o", tmp_path / "x", "--location", "elsewhere")[1] != 0


def test_a_store_that_is_not_there_is_not_made_by_looking(stage, vgpu, tmp_path):
    assert vgpu("store", "ls", "--store", tmp_path / "none")[1] == NoSuchImage.exit_code
    assert vgpu("gc", "--store", tmp_path / "none")[1] == NoSuchImage.exit_code
    assert not (tmp_path / "none").exists()
