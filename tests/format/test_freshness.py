"""Freshness: what has expired is refused, what is older than the node knows is treated as the policy says."""

import json
import os
import threading
from datetime import UTC, datetime, timedelta

import pytest

from image_format.trust import freshness, seen_generations
from image_format.trust.freshness import SignedTimes, check, expiry_of, parse_time, time_text
from image_format.trust.policy import Policy
from image_format.trust.seen_generations import SeenGenerations
from vgpu_errors import DeadlineExceeded, Expired, ImageError, OlderGeneration, UserError

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
MADE = "2026-11-28T12:00:00Z"


def look(*, generation=3, expires=None, created=MADE, last=None, older="warn"):
    signed = SignedTimes("c0ffee", generation, created, expires)
    return check(signed, now=NOW, last_generation=last, policy=Policy(older_generation=older), where="x")


@pytest.mark.parametrize("expires", ["2026-11-29T12:00:00Z", "2026-11-29T11:59:59.999999999Z", "1999-01-01T00:00:00Z"])
def test_what_has_expired_is_refused_whatever_the_policy(expires):
    for older in ("allow", "warn", "refuse"):
        with pytest.raises(Expired, match=expires):
            look(expires=expires, older=older)


@pytest.mark.parametrize("expires", [None, "2026-11-29T12:00:00.5Z", "2026-11-29T12:00:01Z", "9999-12-31T23:59:59Z"])
def test_what_has_not_expired_passes(expires):
    assert look(expires=expires) == ()


@pytest.mark.parametrize("expires", ["tomorrow", "", "2026-13-01T00:00:00Z", "2026-11-29T12:00:00+01:00", "2026-11-29"])
def test_an_expiry_that_cannot_be_read_does_not_count_as_none(expires):
    with pytest.raises(ImageError):
        look(expires=expires)


@pytest.mark.parametrize(("last", "warns"), [(None, 0), (0, 0), (3, 0), (4, 1), (2**53 - 1, 1)])
def test_an_older_generation_is_told_and_refused_only_where_asked_for(last, warns):
    assert len(look(last=last)) == warns
    assert look(last=last, older="allow") == ()
    if not warns:
        assert look(last=last, older="refuse") == ()
        return
    with pytest.raises(OlderGeneration) as caught:
        look(last=last, older="refuse")
    assert "c0ffee" in caught.value.message
    assert str(last) in caught.value.message


def test_what_was_made_in_the_future_is_told_beyond_the_skew_of_clocks():
    assert look(created=time_text(NOW + timedelta(minutes=9))) == ()
    (warning,) = look(created=time_text(NOW + timedelta(minutes=11)))
    assert "clock" in str(warning)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90d", "2027-02-27T12:00:00Z"),
        ("12h", "2026-11-30T00:00:00Z"),
        ("4w", "2026-12-27T12:00:00Z"),
        ("1y", "2027-11-29T12:00:00Z"),
        ("2027-01-31T00:00:00Z", "2027-01-31T00:00:00Z"),
    ],
)
def test_an_expiry_is_a_span_or_a_time(text, expected):
    assert expiry_of(text, now=NOW) == expected


@pytest.mark.parametrize(
    "text", ["", "0d", "d", "90", "-1d", "1m", "90 d", "999999y", "2026-11-29T12:00:00Z", "2020-01-01T00:00:00Z", "x"]
)
def test_another_expiry_is_refused(text):
    with pytest.raises(UserError):
        expiry_of(text, now=NOW)


def test_times_are_read_to_the_microsecond():
    assert parse_time("2026-11-29T12:00:00.123456789Z", where="x") == NOW + timedelta(microseconds=123456)
    assert parse_time(time_text(NOW), where="x") == NOW


# ---- what the node remembers ---------------------------------------------------------------------


@pytest.fixture
def seen(tmp_path):
    return SeenGenerations(tmp_path / "vgpu")


def test_the_newest_generation_is_remembered(seen):
    assert seen.newest("a") is None
    for generation in (3, 5, 4):
        seen.note("a", generation)
    seen.note("b", 1)
    assert (seen.newest("a"), seen.newest("b"), seen.newest("c")) == (5, 1, None)
    assert SeenGenerations(seen.folder).newest("a") == 5
    assert (seen.folder / "generations.json").stat().st_mode & 0o777 == 0o600
    assert seen.folder.stat().st_mode & 0o777 == 0o700


def test_the_containers_not_heard_of_for_longest_leave_first(seen, monkeypatch):
    monkeypatch.setattr(seen_generations, "MAX_CONTAINERS", 3)
    for name in ("a", "b", "c", "a", "d"):
        seen.note(name, 1)
    assert [seen.newest(name) for name in "abcd"] == [1, None, 1, 1]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"version":2,"newest":[]}', b'{"version":1,"newest":[{"container":1}]}', b"\xff" * 9]
)
def test_a_damaged_memory_counts_as_empty_and_is_replaced(seen, data):
    seen.folder.mkdir()
    (seen.folder / "generations.json").write_bytes(data)
    assert seen.newest("a") is None
    seen.note("a", 2)
    assert seen.newest("a") == 2


def test_a_kill_while_writing_leaves_the_old_memory(seen, monkeypatch):
    seen.note("a", 2)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        seen.note("a", 3)
    monkeypatch.undo()
    assert seen.newest("a") == 2
    seen.note("a", 4)
    assert seen.newest("a") == 4


def test_many_at_once_lose_nothing(seen):
    threads = [threading.Thread(target=seen.note, args=(f"c{n % 4}", n)) for n in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seen.newest(f"c{n}") for n in range(4)] == [20, 21, 22, 23]


def test_a_lock_that_is_never_let_go_is_told_after_a_while(seen, monkeypatch):
    monkeypatch.setattr(seen_generations, "LOCK_S", 0.1)
    seen.folder.mkdir()
    with seen._locked(), pytest.raises(DeadlineExceeded, match="lock"):
        seen.note("a", 1)
    assert seen.newest("a") is None


def test_the_file_is_what_the_specification_shows(seen):
    seen.note("c0ffee", 7)
    doc = json.loads((seen.folder / "generations.json").read_text())
    assert doc == {"version": 1, "newest": [{"container": "c0ffee", "generation": 7}]}
    assert Policy().older_generation == freshness.WARN
