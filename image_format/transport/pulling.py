"""Pulls a checkpoint out of a registry (spec/transport.md, section 7).

1. the manifest; of an index the one checkpoint in it
2. the four sealed documents, which are small: the signature must hold by this node's policy before anything else is
   fetched or written, and they must agree with each other as in a restore
3. the packed index, whose content root must be the signed one
4. bulk files that the store has already are linked, chunks that are on this node already are copied
5. only the missing stretches of packs, by ranges, several at a time; each chunk is compared with its signed id as it
   comes, before it is written
6. the signature is written last, the checkpoint becomes one of the store by a rename
A crash or a fault leaves what has come, and the next pull goes on. Nothing that was not verified is ever named whole.
`vgpu pull` and `fetching` call it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from image_format import canonical_json, seal_documents
from image_format.chunk_index import from_bytes as index_from_bytes
from image_format.encryption.encrypted_record import ENCRYPTED_RECORD_TYPE
from image_format.fields import Fields
from image_format.file_names import MANIFEST_NAME, SIGNATURE_NAME
from image_format.manifest import ARTIFACT_TYPE, check_kind
from image_format.packs.unpacking import MARK_NAME, Unpacker
from image_format.registry.manifests import INDEX_TYPE
from image_format.registry.parallel import for_each
from image_format.registry.reference import Reference, is_digest
from image_format.store.locks import try_lock
from image_format.transport.manifest import MAX_BYTES, TransportManifest
from image_format.transport.opening import EncryptedBlobs, PlainBlobs, open_encrypted
from image_format.transport.watching import Counts, Watcher
from image_format.verifying import read_claims
from vgpu_errors import Cancelled, ContentMismatch, NoSuchImage, StoreBusy, Unsigned, UserError, VgpuError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from image_format.encryption import Identity
    from image_format.index_model import Index
    from image_format.packs.unpacking import Range
    from image_format.registry import Registry
    from image_format.seal_documents import Claims
    from image_format.store import Store
    from image_format.transport.notes import Notes
    from image_format.transport.opening import Blobs
    from image_format.trust.policy import Policy

MAX_RELATIVES = 4


@dataclass(frozen=True)
class PullOptions:
    """What a user may choose."""

    threads: int | None = None
    in_flight: int = 8


@dataclass(frozen=True)
class Remote:
    """A checkpoint in a registry whose documents this node believes."""

    reference: Reference
    manifest: TransportManifest
    documents: dict[str, bytes]
    claims: Claims
    blobs: Blobs
    is_encrypted: bool = False


@dataclass(frozen=True)
class Pulled:
    """What is on this node now, and what it took."""

    reference: Reference
    manifest_digest: str
    content_root: str
    directory: Path
    was_there: bool = False
    counts: Counts = field(default_factory=Counts)


def look(
    registry: Registry, policy: Policy, *, target: str | None = None, identities: Sequence[Identity] = ()
) -> Remote:
    """Steps 1 and 2: find the checkpoint and believe its documents, or refuse it."""
    where = str(registry.reference)
    stored = registry.get_manifest(target)
    digest, data = stored.digest, stored.data
    if stored.media_type == INDEX_TYPE:
        digest = checkpoint_in_index(data, where=where)
        data = registry.get_manifest(digest).data
    manifest, blobs = _opened(registry, data, identities, where)
    documents = _documents(manifest, blobs, policy, where)
    claims = seal_documents.check(documents, policy, where=where)
    if claims is None:
        raise Unsigned(where=where)
    if claims.record.content_root != manifest.content_root:
        raise ContentMismatch(where=where, what="content root")
    reference = Reference(registry.reference.host, registry.repository, digest=digest)
    return Remote(reference, manifest, documents, claims, blobs, isinstance(blobs, EncryptedBlobs))


def _documents(manifest: TransportManifest, blobs: Blobs, policy: Policy, where: str) -> dict[str, bytes]:
    """The four; the signature first, because the index may be large and a stranger's is not worth fetching."""
    signature = blobs.get(manifest.signature)
    statement, _ = seal_documents.verify_signature(signature, policy, where=where)
    if statement.manifest_sha256 != manifest.sealed_manifest.sha256:
        raise ContentMismatch(where=f"{where}: {MANIFEST_NAME}", what="sha256")
    others = {name: descriptor for name, descriptor in manifest.documents().items() if name != SIGNATURE_NAME}
    return {SIGNATURE_NAME: signature} | {name: blobs.get(descriptor) for name, descriptor in others.items()}


def _opened(
    registry: Registry, data: bytes, identities: Sequence[Identity], where: str
) -> tuple[TransportManifest, Blobs]:
    fields = Fields(canonical_json.read_object(data, where=where, max_bytes=MAX_BYTES), where)
    check_kind(fields)
    if fields.object("config").text("mediaType") != ENCRYPTED_RECORD_TYPE:
        return TransportManifest.from_bytes(data, where=where), PlainBlobs(registry)
    encrypted, inner = open_encrypted(registry, fields, identities, where=where)
    manifest = TransportManifest.from_bytes(inner, where=f"{where}: encrypted manifest")
    encrypted.bind(manifest)
    return manifest, encrypted


def checkpoint_in_index(data: bytes, *, where: str) -> str:
    """The digest of the one checkpoint of ours in an index."""
    fields = Fields(canonical_json.read_object(data, where=where, max_bytes=MAX_BYTES), where)
    found = [
        entry.text("digest")
        for entry in fields.objects("manifests")
        if entry.text_or_none("artifactType") == ARTIFACT_TYPE
    ]
    if len(found) != 1 or not is_digest(found[0]):
        raise NoSuchImage(path=where, what=f"the index names {len(found)} checkpoints, not one")
    return found[0]


def pull_into_store(
    registry: Registry,
    remote: Remote,
    store: Store,
    notes: Notes,
    *,
    options: PullOptions | None = None,
    watcher: Watcher | None = None,
) -> Pulled:
    """Make it a checkpoint of this node's store."""
    digest, counts = remote.claims.manifest_digest, Counts()
    was_there = store.has(digest)
    if not was_there:
        with store.receive(digest) as incoming:
            linked = incoming.reuse(remote.claims.index)
            pull = _Pull(registry, remote, options or PullOptions(), watcher or Watcher(), counts)
            pull.into(incoming.image, _relatives(store, remote), linked=linked)
            incoming.commit()
    else:
        counts.add("reused", sum(region.length for region in remote.claims.index.regions))
    notes.add(digest, remote.reference)
    root = remote.claims.record.content_root
    return Pulled(remote.reference, digest, root, store.directory_of(digest), was_there, counts)


def pull_into_directory(
    registry: Registry,
    remote: Remote,
    directory: Path,
    *,
    relatives: Sequence[Path] = (),
    options: PullOptions | None = None,
    watcher: Watcher | None = None,
) -> Pulled:
    """Make it a sealed directory; one that an earlier pull left unfinished is gone on with, no other is touched."""
    counts = Counts()
    directory.mkdir(mode=0o700, exist_ok=True)
    with _alone_in(directory):
        _refuse_others(directory, remote)
        _Pull(registry, remote, options or PullOptions(), watcher or Watcher(), counts).into(directory, relatives)
    root = remote.claims.record.content_root
    return Pulled(remote.reference, remote.claims.manifest_digest, root, directory, counts=counts)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Nobody else pulls into it meanwhile."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not try_lock(descriptor):
            raise StoreBusy(root=directory, seconds=0, remedy="Another process pulls into it: wait for it.")
        yield
    finally:
        os.close(descriptor)


def _refuse_others(directory: Path, remote: Remote) -> None:
    """Files that no pull left are somebody's; so is a whole checkpoint that is another one."""
    names = {path.name for path in directory.iterdir()}
    if not names or (MARK_NAME in names and SIGNATURE_NAME not in names):
        return
    if MANIFEST_NAME in names and (directory / MANIFEST_NAME).read_bytes() == remote.documents[MANIFEST_NAME]:
        return
    what = f"{directory} holds something else than an unfinished pull of this checkpoint"
    raise UserError(what=what, remedy="Remove it, or name a directory that is empty or not there.")


class _Pull:
    """Steps 3 to 6."""

    def __init__(
        self, registry: Registry, remote: Remote, options: PullOptions, watcher: Watcher, counts: Counts
    ) -> None:
        self._registry = registry
        self._remote = remote
        self._options = options
        self._watcher = watcher
        self._counts = counts

    def into(self, directory: Path, relatives: Sequence[Path], *, linked: Collection[str] = ()) -> None:
        packed = self._packed_index()
        is_continued = any(path.name not in linked for path in directory.iterdir())
        self._counts.add("reused", sum(pack.size for pack in self._remote.claims.index.packs if pack.name in linked))
        with Unpacker(self._remote.claims.index, packed, directory, ready=linked) as unpacker:
            self._expect_wanted()
            if is_continued:
                self._watcher.note("looking at what an earlier pull left")
                self._counts.add("reused", unpacker.find_present(threads=self._options.threads))
            self._take_local(unpacker, relatives)
            self._fetch(unpacker)
            unpacker.finish(self._remote.documents)

    def _packed_index(self) -> Index:
        descriptor, where = self._remote.manifest.packed_index, f"{self._remote.reference}: packed index"
        data = self._remote.blobs.get(descriptor)
        packed = index_from_bytes(data, where=where)
        self._counts.add("fetched", len(data) + sum(map(len, self._remote.documents.values())))
        if packed.content_root != self._remote.claims.index.content_root:
            raise ContentMismatch(where=where, what="content root")
        self._remote.manifest.check_packs(packed, where=where)
        return packed

    def _take_local(self, unpacker: Unpacker, relatives: Sequence[Path]) -> None:
        for directory in relatives:
            if not any(unpacker.missing(number) for number in range(unpacker.pack_count)):
                return
            self._expect_wanted()
            try:
                _, index = read_claims(directory)
                self._counts.add("reused", unpacker.fill_from(directory, index))
            except VgpuError as error:
                self._watcher.note(f"{directory.name} cannot be used: {error}")

    def _fetch(self, unpacker: Unpacker) -> None:
        small = self._remote.manifest.small_files
        stretches = list(_stretches(unpacker))
        self._watcher.phase("pull", small.size + sum(stretch.end - stretch.start for _, stretch in stretches))
        with self._remote.blobs.open(small, (0, small.size), self._moved) as stream:
            unpacker.write_small_files(stream)

        def bring(item: tuple[int, Range]) -> None:
            number, stretch = item
            pack = self._remote.manifest.packs[number]
            limits = (stretch.start, min(stretch.end, pack.size))
            with self._remote.blobs.open(pack, limits, self._moved) as stream:
                unpacker.write(number, stream, stretch)

        for_each(bring, stretches, self._registry.stop, in_flight=self._options.in_flight)

    def _expect_wanted(self) -> None:
        if self._registry.stop.is_set():
            raise Cancelled(phase="The pull", what="it was interrupted")

    def _moved(self, count: int) -> None:
        self._counts.add("fetched", count)
        self._watcher.moved("pull", count)


def _stretches(unpacker: Unpacker) -> Iterator[tuple[int, Range]]:
    """All that is missing, pack by pack."""
    for number in range(unpacker.pack_count):
        for stretch in unpacker.missing(number):
            yield number, stretch


def _relatives(store: Store, remote: Remote) -> list[Path]:
    """Checkpoints of the store that are likely to hold the same: the parents, the same container's, the newest."""
    parents = {parent.manifest_digest for parent in remote.claims.record.parents}
    container = remote.claims.record.container.id

    def rank(position: int, digest: str, container_id: str) -> tuple[bool, bool, int]:
        return digest in parents, container_id == container, position

    found = [
        (rank(position, entry.manifest_digest, entry.container_id), entry.path)
        for position, entry in enumerate(store.checkpoints())
        if entry.problem is None
    ]
    return [path for _, path in sorted(found, reverse=True)[:MAX_RELATIVES]]
