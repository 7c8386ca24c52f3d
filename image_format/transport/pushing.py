"""Pushes a sealed checkpoint to a registry (spec/transport.md, section 6).

1. the signature must hold; packs are planned, those of earlier checkpoints that the registry has are used again
2. several at a time, packs are measured, which compares every chunk with its signed id, and what the registry lacks is
   mounted from a sibling repository or sent; the bytes of a pack come out of the page cache the second time
3. the packed index, that now knows all packs, the other small layers and the config
4. the manifest, under the tag: the commit point
A crash or a fault before step 4 leaves blobs that nothing names; the next push finds them and goes on.
Sends nothing that the registry has, changes nothing on this node but a note in the store. `vgpu push` calls it.
"""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING

from image_format.archives.small_files import MEDIA_TYPE as SMALL_FILES_TYPE
from image_format.archives.small_files import write_small_files
from image_format.chunk_index import from_bytes as index_from_bytes
from image_format.file_names import INDEX_NAME, MANIFEST_NAME, RECORD_NAME, SIGNATURE_NAME
from image_format.hashing import thread_count
from image_format.manifest import INDEX_TYPE, MANIFEST_TYPE, RECORD_TYPE, Descriptor
from image_format.packs.pack_streams import measure_packs, open_pack
from image_format.packs.packed import earlier_packs, packed_index_bytes, plan_packs
from image_format.registry.parallel import for_each
from image_format.registry.reference import Reference
from image_format.transport.blobs import Blob, Sender
from image_format.transport.encrypting import EncryptedImage
from image_format.transport.manifest import ENGINE_FILES_TYPE, PACKED_INDEX_TYPE, TransportManifest
from image_format.transport.watching import Counts, Watcher
from image_format.trust.bundle import BUNDLE_TYPE
from image_format.trust.remote_documents import SEALED_MANIFEST_TYPE
from vgpu_errors import ImageError, NotInRegistry, RegistryError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from image_format.encryption import Recipient
    from image_format.packs.packed import Compression, EarlierPack, Layout, PackedPlan
    from image_format.registry import Registry
    from image_format.transport.notes import Notes
    from image_format.transport.sources import SealedSource

MAX_SIBLINGS = 8


@dataclass(frozen=True)
class PushOptions:
    """What a user may choose."""

    mount_from: tuple[str, ...] = ()
    compression: Compression | None = None
    threads: int | None = None
    in_flight: int = 8
    encrypt_to: tuple[Recipient, ...] = ()


@dataclass(frozen=True)
class Pushed:
    """What is in the registry now, and what it took."""

    reference: Reference
    digest: str
    size: int
    manifest_digest: str
    content_root: str
    packs: int
    counts: Counts = field(default_factory=Counts)


def push(
    source: SealedSource,
    registry: Registry,
    notes: Notes,
    *,
    target: str | None = None,
    options: PushOptions | None = None,
    watcher: Watcher | None = None,
) -> Pushed:
    """Push it; `target` is the tag, or None for the reference's own, or the empty string for the digest alone."""
    work = _Push(source, registry, notes, options or PushOptions(), watcher or Watcher())
    with tempfile.TemporaryFile() as small:
        return work.run(small, target)


class _Push:
    def __init__(
        self, source: SealedSource, registry: Registry, notes: Notes, options: PushOptions, watcher: Watcher
    ) -> None:
        self._source = source
        self._registry = registry
        self._notes = notes
        self._options = options
        self._watcher = watcher
        self._counts = Counts()
        # Encrypted blobs are equal to no other ones.
        self._relatives = [] if options.encrypt_to else list(self._find_relatives())
        self._sender = self._new_sender(self._counts)

    def run(self, small: IO[bytes], target: str | None) -> Pushed:
        plan = self._planned()
        missing = sum(chunk.length for pack in plan.packs if pack.layout is None for chunk in pack.chunks)
        self._watcher.phase("compare", missing)
        plan = self._measured(plan) if self._options.encrypt_to else self._bring_packs(plan)
        manifest, blobs = self._described(plan, small)
        data = manifest.to_bytes()
        if self._options.encrypt_to:
            packs = [self._pack_blob(plan, n) for n in range(len(plan.packs))]
            data = self._send_encrypted(manifest, data, [*blobs, *packs])
        else:
            for blob in blobs:
                self._sender.bring(blob)
        digest = Blob.of_bytes(data).digest
        self._registry.put_manifest(data, MANIFEST_TYPE, digest if target == "" else target)
        where = Reference(self._registry.reference.host, self._registry.repository, digest=digest)
        if not self._options.encrypt_to:
            self._notes.add(self._source.claims.manifest_digest, where)
        return Pushed(
            reference=where,
            digest=digest,
            size=len(data),
            manifest_digest=self._source.claims.manifest_digest,
            content_root=manifest.content_root,
            packs=len(plan.packs),
            counts=self._counts,
        )

    # ---- relatives: what this node knows to lie in the registry ------------------------------------

    def _find_relatives(self) -> Iterator[_Relative]:
        claims = self._source.claims
        first = [claims.manifest_digest, *(parent.manifest_digest for parent in claims.record.parents)]
        host = self._registry.reference.host
        for where in self._notes.on_host(host, first)[:MAX_SIBLINGS]:
            try:
                client = self._registry.beside(where.repository)
                data = client.get_manifest(where.digest).data
                manifest = TransportManifest.from_bytes(data, where=str(where))
            except (NotInRegistry, ImageError):
                continue  # deleted meanwhile, or encrypted
            except RegistryError as error:  # it may be somebody else's now; what it could save is not needed
                self._watcher.note(f"{where.name} gives nothing: {error}")
                continue
            yield _Relative(where.repository, client, manifest)

    def _earlier(self) -> Iterator[EarlierPack]:
        for relative in self._relatives:
            descriptor = relative.manifest.packed_index
            try:
                data = relative.client.get_blob(f"sha256:{descriptor.sha256}", descriptor.size)
                index = index_from_bytes(data, where=f"packed index in {relative.repository}")
                yield from earlier_packs(index)
            except (RegistryError, ImageError) as error:
                self._watcher.note(f"an earlier checkpoint cannot be used: {error}")

    # ---- packs -------------------------------------------------------------------------------------

    def _planned(self) -> PackedPlan:
        """The plan whose earlier packs are all in the registry."""
        earlier = list(self._earlier())
        compression = self._options.compression
        while True:
            plan = plan_packs(self._source.claims.index, earlier=earlier, compression=compression)
            used = {pack.measured.sha256: pack.measured.size for pack in plan.packs if pack.is_earlier}
            before = Counts()
            sender = self._new_sender(before)
            gone = {sha256 for sha256, size in used.items() if not sender.is_there(f"sha256:{sha256.hex()}", size)}
            if not gone:
                self._counts.add("mounted", before.mounted)
                self._counts.add("skipped", before.skipped)
                return plan
            earlier = [pack for pack in earlier if pack.sha256 not in gone]

    def _new_sender(self, counts: Counts) -> Sender:
        siblings = {digest: relative.repository for relative in reversed(self._relatives) for digest in relative.blobs}
        return Sender(self._registry, siblings, self._options.mount_from, counts, self._watcher)

    def _measured(self, plan: PackedPlan) -> PackedPlan:
        threads = self._options.threads
        return measure_packs(plan, self._source.directory, threads=threads, on_bytes=self._compared)

    def _bring_packs(self, plan: PackedPlan) -> PackedPlan:
        """Measure and send pack by pack: hashing one and sending another go on at the same time."""
        self._watcher.phase("push", 0)
        cores = threading.Semaphore(thread_count(self._options.threads))
        layouts: dict[bytes, Layout] = {}

        def bring(number: int) -> None:
            one = replace(plan, packs=(plan.packs[number],))
            with cores:
                one = measure_packs(one, self._source.directory, threads=1, on_bytes=self._compared)
            layouts[one.packs[0].key] = one.packs[0].measured
            self._sender.bring(self._pack_blob(one, 0))

        new = [number for number, pack in enumerate(plan.packs) if not pack.is_earlier]
        for_each(bring, new, self._registry.stop, in_flight=self._options.in_flight)
        return plan.with_layouts(layouts)

    def _compared(self, count: int) -> None:
        self._watcher.moved("compare", count)

    def _open(self, plan: PackedPlan, number: int, offset: int) -> BinaryIO:
        stream = open_pack(plan, number, self._source.directory)
        stream.seek(offset)
        return stream

    # ---- what goes over the wire -------------------------------------------------------------------

    def _described(self, plan: PackedPlan, small: IO[bytes]) -> tuple[TransportManifest, list[Blob]]:
        """The manifest, and the layers that are no packs, in the order in which they are sent."""
        source = self._source
        write_small_files(source.claims.index, source.directory, small)
        small.flush()
        packed = packed_index_bytes(plan)
        documents = source.documents
        blobs = {
            SMALL_FILES_TYPE: Blob.of_file(small),
            PACKED_INDEX_TYPE: Blob.of_bytes(packed),
            INDEX_TYPE: Blob.of_bytes(documents[INDEX_NAME]),
            SEALED_MANIFEST_TYPE: Blob.of_bytes(documents[MANIFEST_NAME]),
            BUNDLE_TYPE: Blob.of_bytes(documents[SIGNATURE_NAME]),
            RECORD_TYPE: Blob.of_bytes(documents[RECORD_NAME]),
        }
        if source.engine_files is not None:
            blobs = {ENGINE_FILES_TYPE: Blob.of_file(source.engine_files), **blobs}
        found = {kind: _descriptor(blob, kind) for kind, blob in blobs.items()}
        packs = [Descriptor(pack.media_type, pack.measured.sha256.hex(), pack.measured.size) for pack in plan.packs]
        manifest = TransportManifest(
            record=found[RECORD_TYPE],
            packed_index=found[PACKED_INDEX_TYPE],
            index=found[INDEX_TYPE],
            sealed_manifest=found[SEALED_MANIFEST_TYPE],
            signature=found[BUNDLE_TYPE],
            small_files=found[SMALL_FILES_TYPE],
            packs=tuple(packs),
            created=source.claims.record.created,
            content_root=source.claims.record.content_root,
            engine_files=found.get(ENGINE_FILES_TYPE),
        )
        return manifest, list(blobs.values())

    def _send_encrypted(self, manifest: TransportManifest, inner: bytes, blobs: list[Blob]) -> bytes:
        """The outer manifest; what it names is sent, in no order that would tell anything."""
        by_digest = {blob.digest: blob for blob in blobs}
        named = [by_digest[f"sha256:{layer.sha256}"] for layer in (manifest.record, *manifest.layers())]
        image = EncryptedImage.of(inner, named, self._options.encrypt_to)
        self._watcher.phase("push", sum(stream.size for stream in image.streams))
        digests = self._sender.send_streams(image.streams, in_flight=self._options.in_flight)
        self._sender.bring(image.config)
        return image.manifest(digests)

    def _pack_blob(self, plan: PackedPlan, number: int) -> Blob:
        layout = plan.packs[number].measured
        return Blob(lambda offset: self._open(plan, number, offset), f"sha256:{layout.sha256.hex()}", layout.size)


@dataclass(frozen=True)
class _Relative:
    """A checkpoint in this registry that this node pushed or verified."""

    repository: str
    client: Registry
    manifest: TransportManifest

    @property
    def blobs(self) -> list[str]:
        return [f"sha256:{layer.sha256}" for layer in (self.manifest.record, *self.manifest.layers())]


def _descriptor(blob: Blob, media_type: str) -> Descriptor:
    return Descriptor(media_type, blob.digest.removeprefix("sha256:"), blob.size)
