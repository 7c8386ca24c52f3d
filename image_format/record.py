"""The checkpoint record `vgpu-record.json` (spec/record.md): what was frozen, where, and what a restore needs.

Parses at the edge into frozen dataclasses, names the path of a fault, keeps unknown fields and writes them back.
Refuses an unknown major version, an unknown required feature, GPU objects without theirs, and references to what is not there.
Processes and devices are in gpu_processes. The shim makes it; restore gates and `vgpu inspect` read it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from image_format import canonical_json
from image_format.communicators import (
    Communicator,
    ShmemElement,
    check_members,
    read_communicators,
    read_nvshmem,
)
from image_format.fields import Fields
from image_format.file_names import RECORD_NAME
from image_format.gpu_objects import SHARED, STAGED
from image_format.gpu_processes import DeviceEntry, ProcessEntry, check_shared
from vgpu_errors import FormatTooNew, ImageError, UnknownFeature

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Container",
    "DeviceEntry",
    "LowLevelRuntime",
    "Parent",
    "Phase",
    "ProcessEntry",
    "Record",
    "RegionSummary",
    "Requirement",
]

MAX_RECORD_BYTES = 8 << 20
KNOWN_MAJOR = 1
KNOWN_FEATURES = frozenset({STAGED, SHARED})
LEVELS = ("must", "should")
PAGES_KIND = "pages"

_VERSION = re.compile(r"([1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})")
_CREATED = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?Z")
_SECONDS = re.compile(r"[0-9]{1,9}\.[0-9]{3}")

_Extra = dict[str, Any]


@dataclass(frozen=True)
class Container:
    """The container that was frozen, as its engine knows it."""

    id: str
    engine: str
    name: str | None = None
    image: str | None = None
    engine_annotations: Mapping[str, str] = field(default_factory=dict)
    unknown: _Extra = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> Container:
        """Parse `container`."""
        annotations = fields.object("engineAnnotations")
        return cls(
            id=fields.text("id"),
            engine=fields.text("engine"),
            name=fields.text_or_none("name"),
            image=fields.text_or_none("image"),
            engine_annotations={key: annotations.text(key) for key in annotations.unknown()},
            unknown=fields.unknown(),
        )

    def to_json(self) -> _Extra:
        """The form that is written."""
        doc = {"id": self.id, "engine": self.engine, "engineAnnotations": dict(self.engine_annotations)}
        return self.unknown | doc | _present(name=self.name, image=self.image)


@dataclass(frozen=True)
class LowLevelRuntime:
    """The runtime behind the shim; images of runc and crun are not interchangeable."""

    name: str
    version: str
    path: str
    unknown: _Extra = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> LowLevelRuntime:
        """Parse `lowLevelRuntime`."""
        name, version, path = fields.text("name"), fields.text("version"), fields.text("path")
        return cls(name, version, path, fields.unknown())

    def to_json(self) -> _Extra:
        """The form that is written."""
        return self.unknown | {"name": self.name, "version": self.version, "path": self.path}


@dataclass(frozen=True)
class Requirement:
    """What a node needs to run this checkpoint; `value` is a string, an integer, or a list of strings."""

    key: str
    value: Any
    level: str = "must"
    unknown: _Extra = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> Requirement:
        """Parse one of `requirements`."""
        value = fields.any("value")
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if isinstance(value, bool) or not (is_list or isinstance(value, str | int)):
            raise ImageError(where=fields.path("value"), what="must be a string, an integer or a list of strings")
        key, level = fields.text("key"), fields.one_of("level", *LEVELS)
        return cls(key, value, level, fields.unknown())

    def to_json(self) -> _Extra:
        """The form that is written."""
        value = list(self.value) if isinstance(self.value, tuple | list) else self.value
        return self.unknown | {"key": self.key, "value": value, "level": self.level}


@dataclass(frozen=True)
class Phase:
    """How long a step of the checkpoint took. Written as text, because canonical JSON here has no floats."""

    phase: str
    seconds: float
    unknown: _Extra = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> Phase:
        """Parse one of `phases`."""
        phase, seconds = fields.text("phase"), fields.text("seconds")
        if not _SECONDS.fullmatch(seconds):
            raise ImageError(where=fields.path("seconds"), what="must be seconds with three decimals, as text")
        return cls(phase, float(seconds), fields.unknown())

    def to_json(self) -> _Extra:
        """The form that is written."""
        return self.unknown | {"phase": self.phase, "seconds": f"{Decimal(self.seconds):.3f}"}


@dataclass(frozen=True)
class RegionSummary:
    """How many regions of a kind the index lists, and their bytes."""

    kind: str
    count: int
    bytes: int
    unknown: _Extra = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> RegionSummary:
        """Parse one of `regionsSummary`."""
        kind, count, size_bytes = fields.text("kind"), fields.integer("count"), fields.integer("bytes")
        return cls(kind, count, size_bytes, fields.unknown())

    def to_json(self) -> _Extra:
        """The form that is written."""
        return self.unknown | {"kind": self.kind, "count": self.count, "bytes": self.bytes}


@dataclass(frozen=True)
class Parent:
    """An earlier checkpoint that this one builds on."""

    manifest_digest: str
    generation: int
    unknown: _Extra = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> Parent:
        """Parse one of `parents`."""
        manifest_digest, generation = fields.hex_digest("manifestDigest"), fields.integer("generation")
        return cls(manifest_digest, generation, fields.unknown())

    def to_json(self) -> _Extra:
        """The form that is written."""
        return self.unknown | {"manifestDigest": self.manifest_digest, "generation": self.generation}


@dataclass(frozen=True)
class Record:
    """The whole document. `content_root` and `regions_summary` are filled in by sealing."""

    created: str
    container: Container
    low_level_runtime: LowLevelRuntime
    generation: int = 1
    registered_runtime: str = "/usr/bin/vgpu-runtime"
    mode: str = "driver"
    processes: tuple[ProcessEntry, ...] = ()
    devices: tuple[DeviceEntry, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    security: Mapping[str, Any] = field(default_factory=dict)
    parents: tuple[Parent, ...] = ()
    phases: tuple[Phase, ...] = ()
    regions_summary: tuple[RegionSummary, ...] = ()
    content_root: str = "0" * 64
    required_features: tuple[str, ...] = ()
    optional_features: tuple[str, ...] = ()
    format_version: str = "1.0"
    communicators: tuple[Communicator, ...] = ()
    nvshmem: tuple[ShmemElement, ...] = ()
    unknown: _Extra = field(default_factory=dict)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = RECORD_NAME) -> Record:
        """Parse the file's bytes."""
        return cls.from_json(canonical_json.read_object(data, where=where, max_bytes=MAX_RECORD_BYTES), where=where)

    @classmethod
    def from_json(cls, doc: Mapping[str, Any], *, where: str = RECORD_NAME) -> Record:
        """Parse the document; version and features are looked at before anything else."""
        fields = Fields(doc, where)
        version = check_version(fields)
        required, optional = _read_features(fields, where)
        processes = _read_processes(fields, required)
        communicators, elements = read_communicators(fields), read_nvshmem(fields)
        check_members(processes, communicators, elements, fields.at)
        return cls(
            format_version=version,
            required_features=required,
            optional_features=optional,
            created=_read_created(fields),
            generation=fields.integer("generation"),
            content_root=fields.hex_digest("contentRoot"),
            container=Container.from_json(fields.object("container")),
            low_level_runtime=LowLevelRuntime.from_json(fields.object("lowLevelRuntime")),
            registered_runtime=fields.text("registeredRuntime"),
            mode=fields.text("mode"),
            processes=processes,
            devices=tuple(map(DeviceEntry.from_json, fields.objects("devices"))),
            requirements=tuple(map(Requirement.from_json, fields.objects("requirements"))),
            security=fields.object("security").unknown(),
            parents=tuple(map(Parent.from_json, fields.objects("parents"))),
            phases=tuple(map(Phase.from_json, fields.objects("phases"))),
            regions_summary=tuple(map(RegionSummary.from_json, fields.objects("regionsSummary"))),
            communicators=communicators,
            nvshmem=elements,
            unknown=fields.unknown(),
        )

    def to_json(self) -> _Extra:
        """The form that is written; unknown fields come back as they were."""
        lists = {
            "communicators": [entry.to_json() for entry in self.communicators],
            "nvshmem": [entry.to_json() for entry in self.nvshmem],
        }
        optional = {key: entries for key, entries in lists.items() if entries}
        return (
            self.unknown
            | optional
            | {
                "formatVersion": self.format_version,
                "features": {"required": list(self.required_features), "optional": list(self.optional_features)},
                "created": self.created,
                "generation": self.generation,
                "contentRoot": self.content_root,
                "container": self.container.to_json(),
                "lowLevelRuntime": self.low_level_runtime.to_json(),
                "registeredRuntime": self.registered_runtime,
                "mode": self.mode,
                "processes": [entry.to_json() for entry in self.processes],
                "devices": [entry.to_json() for entry in self.devices],
                "requirements": [entry.to_json() for entry in self.requirements],
                "security": dict(self.security),
                "parents": [entry.to_json() for entry in self.parents],
                "phases": [entry.to_json() for entry in self.phases],
                "regionsSummary": [entry.to_json() for entry in self.regions_summary],
            }
        )

    def to_bytes(self) -> bytes:
        """The canonical bytes that are hashed and stored."""
        return canonical_json.write(self.to_json(), where=RECORD_NAME)

    def stamped(self) -> Record:
        """The same content with the lowest version that can carry it, and the features that this needs."""
        needed = {STAGED: self.is_staged, SHARED: self.is_shared}
        kept = tuple(feature for feature in self.required_features if feature not in needed)
        required = (*kept, *(feature for feature, is_needed in needed.items() if is_needed))
        return replace(self, format_version=lowest_version(self), required_features=required)

    @property
    def is_staged(self) -> bool:
        """Some process needs the staged restore."""
        return any(process.is_staged for process in self.processes)

    @property
    def is_shared(self) -> bool:
        """Some process has memory of another one."""
        return any(process.is_sharing for process in self.processes)


def lowest_version(record: Record) -> str:
    """The lowest format version whose readers understand all of this record; later versions add a row each."""
    has_pages = any(entry.kind == PAGES_KIND for entry in record.regions_summary)
    tells_sharing = record.is_shared or any(entry.shared for process in record.processes for entry in process.objects)
    tells_groups = bool(record.communicators or record.nvshmem)
    needs = (("1.3", tells_sharing or tells_groups), ("1.2", has_pages), ("1.1", record.is_staged), ("1.0", True))
    return next(version for version, is_needed in needs if is_needed)


def check_version(fields: Fields) -> str:
    """`formatVersion`: any minor of the known major."""
    version = fields.text("formatVersion")
    match = _VERSION.fullmatch(version)
    if not match:
        raise ImageError(where=fields.path("formatVersion"), what="must look like 1.0")
    if int(match[1]) != KNOWN_MAJOR:
        raise FormatTooNew(where=fields.at, found=version, known=f"{KNOWN_MAJOR}.x")
    return version


def _read_processes(fields: Fields, features: tuple[str, ...]) -> tuple[ProcessEntry, ...]:
    """`processes`, whose features are listed and whose references hold."""
    processes = tuple(map(ProcessEntry.from_json, fields.objects("processes")))
    needed = (
        (STAGED, any(process.is_staged for process in processes)),
        (SHARED, any(process.is_sharing for process in processes)),
    )
    for feature, is_needed in needed:
        if is_needed and feature not in features:
            raise ImageError(where=fields.path("features.required"), what=f"lacks {feature}, which a process needs")
    check_shared(processes, fields.path("processes"))
    return processes


def _read_features(fields: Fields, where: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    features = fields.object("features")
    required, optional = features.texts("required"), features.texts("optional")
    for feature in required:
        if feature not in KNOWN_FEATURES:
            raise UnknownFeature(where=where, feature=feature)
    return required, optional


def _read_created(fields: Fields) -> str:
    created = fields.text("created")
    if not _CREATED.fullmatch(created):
        raise ImageError(where=fields.path("created"), what="must be an RFC 3339 time in UTC, ending in Z")
    return created


def _present(**fields: object) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
