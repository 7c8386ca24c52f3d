"""A seal is whole or absent: cut at any step, failed at any step, and never over what it must not sign."""

import errno
import os
import stat

import pytest

from image_format import sealing
from image_format.file_names import SEAL_NAMES
from image_format.sealing import remove_old_seal, seal
from image_format.trust.keys import load_signing_key
from image_format.verifying import verify_directory
from vgpu_errors import NoSuchImage, NotEnoughSpace, UnexpectedEntry, UnsafeName, Unsigned, VgpuError

STEPS = ("unlink", "replace", "fsync")


@pytest.fixture
def key(node):
    return load_signing_key(node / "node.key")


class Cut:
    """Counts the calls that change the disk and strikes at one of them, before it happens."""

    def __init__(self, monkeypatch, at, strike):
        self.count = 0
        for name in STEPS:
            monkeypatch.setattr(sealing.os, name, self._wrap(getattr(os, name), at, strike))

    def _wrap(self, real, at, strike):
        def call(*args, **kwargs):
            self.count += 1
            if self.count == at:
                strike()
            return real(*args, **kwargs)

        return call


def steps_of_a_seal(image, record, key):
    """How many calls a seal makes over an older one; the tests below strike at each."""
    with pytest.MonkeyPatch.context() as patch:
        cut = Cut(patch, -1, None)
        seal(image, record, key)
    return cut.count


def run_and_die(image, record, key, at):
    """In a child, because a kill runs no handler."""
    pid = os.fork()
    if pid == 0:
        with pytest.MonkeyPatch.context() as patch:
            Cut(patch, at, lambda: os._exit(9))
            seal(image, record, key)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("is_resealed", [False, True])
def test_a_kill_at_any_step_leaves_an_unsigned_directory(image, record, key, policy, is_resealed):
    seal(image, record, key)
    old = verify_directory(image, policy).manifest_digest
    (image / "core-2.img").write_bytes(b"new content, for which the old seal does not hold")
    if not is_resealed:
        remove_old_seal(image)
    outcomes = []
    for at in range(1, steps_of_a_seal(image, record, key) + 1):
        if is_resealed:
            seal(image, record, key)
        else:
            remove_old_seal(image)
        died = run_and_die(image, record, key, at)
        try:
            outcomes.append((at, died, verify_directory(image, policy).manifest_digest != old))
        except Unsigned:
            outcomes.append((at, died, "unsigned"))
    killed = [outcome for outcome in outcomes if outcome[1] == 9]
    assert len(killed) >= 8
    whole = [at for at, _, outcome in killed if outcome is True]
    # Whole is right in two places: before the old signature went, and after the new one came.
    assert whole == ([1, killed[-1][0]] if is_resealed else [killed[-1][0]])
    assert all(outcome == "unsigned" for at, _, outcome in killed if at not in whole)


def test_an_error_at_any_step_leaves_nothing_of_ours(image, record, key):
    def strike():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    steps = steps_of_a_seal(image, record, key)
    remove_old_seal(image)
    seen = set()
    for at in range(1, steps + 1):
        with pytest.MonkeyPatch.context() as patch:
            Cut(patch, at, strike)
            try:
                seal(image, record, key)
            except VgpuError as error:
                seen.add(type(error))
                assert [name for name in os.listdir(image) if "vgpu" in name] == []
            else:
                remove_old_seal(image)
    assert NotEnoughSpace in seen


def test_sealing_again_takes_the_old_signature_first(image, record, key, monkeypatch):
    seal(image, record, key)
    removed = []
    real = os.unlink
    monkeypatch.setattr(sealing.os, "unlink", lambda name, **kwargs: (removed.append(name), real(name, **kwargs))[1])
    remove_old_seal(image)
    assert removed[0] == "vgpu-signature.json"
    assert set(SEAL_NAMES) == set(removed)


def test_old_packs_and_partial_files_go_with_the_old_seal(image, record, key, policy):
    for name in ("vgpu-pack-00001.bin", ".vgpu-partial-vgpu-index.bin"):
        (image / name).write_bytes(b"old")
    seal(image, record, key)
    assert verify_directory(image, policy).bytes_checked > 0


def test_documents_are_for_their_owner_alone(image, record, key):
    old_umask = os.umask(0)
    try:
        seal(image, record, key)
    finally:
        os.umask(old_umask)
    assert {stat.S_IMODE((image / name).stat().st_mode) for name in SEAL_NAMES} == {0o600}


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda image: (image / "sub").mkdir(), UnexpectedEntry),
        (lambda image: (image / "parent").symlink_to("../pre-checkpoint"), UnexpectedEntry),
        (lambda image: os.link(image / "core-1.img", image / "core-2.img"), UnexpectedEntry),
        (lambda image: os.mkfifo(image / "pipe"), UnexpectedEntry),
        (lambda image: (image / "evil\nname").touch(), UnsafeName),
        (lambda image: (image / ".hidden").touch(), UnsafeName),
        (lambda image: [file.unlink() for file in image.iterdir()], NoSuchImage),
    ],
)
def test_what_cannot_travel_is_not_sealed(image, record, key, spoil, error):
    spoil(image)
    with pytest.raises(error):
        seal(image, record, key)
    assert not any(name in os.listdir(image) for name in SEAL_NAMES)


def test_removing_a_seal_where_nothing_is_does_nothing(tmp_path):
    remove_old_seal(tmp_path / "absent")
    remove_old_seal(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NoSuchImage):
        remove_old_seal(tmp_path / "file")


def test_sealed_says_what_verifying_finds(image, record, key, policy):
    progress = []
    sealed = seal(image, record, key, on_progress=lambda done, total: progress.append((done, total)))
    verified = verify_directory(image, policy)
    assert (sealed.content_root, sealed.manifest_digest) == (verified.record.content_root, verified.manifest_digest)
    assert sealed.bytes_hashed == verified.bytes_checked == progress[-1][0] == progress[-1][1]
    assert verified.key_name == "this node"
    assert verified.record.regions_summary[0].bytes == sealed.bytes_hashed


def test_a_log_that_comes_later_does_not_break_the_seal(image, record, key, policy):
    (image / "dump.log").write_text("before")
    seal(image, record, key)
    (image / "dump.log").write_text("after")
    (image / "restore.log").write_text("later")
    verify_directory(image, policy)
    (image / "restore.log").unlink()
    (image / "restore.log").symlink_to("/etc/shadow")
    with pytest.raises(UnexpectedEntry):
        verify_directory(image, policy)
