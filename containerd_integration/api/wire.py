"""Makes protobuf classes and callable methods of `definitions`, without a compiler and without generated code.

Reads the small part of proto syntax that is used there: messages of scalar, message, repeated and map fields, and
services. A line that it does not understand is a mistake in `definitions` and raises at import.
Called by `connection` and by whoever builds a message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, empty_pb2, message_factory

from containerd_integration.api.definitions import PACKAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from image_format.archives.containerd_index import Descriptor

_FIELD_TYPES = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    "string": _FIELD_TYPES.TYPE_STRING,
    "bytes": _FIELD_TYPES.TYPE_BYTES,
    "bool": _FIELD_TYPES.TYPE_BOOL,
    "int32": _FIELD_TYPES.TYPE_INT32,
    "int64": _FIELD_TYPES.TYPE_INT64,
    "uint32": _FIELD_TYPES.TYPE_UINT32,
}
WELL_KNOWN = (any_pb2.DESCRIPTOR, empty_pb2.DESCRIPTOR)

_MESSAGE = re.compile(r"message (\w+) \{([^}]*)\}")
_SERVICE = re.compile(r"service (\w+) \{([^}]*)\}")
_FIELD = re.compile(r"(repeated )?(?:map<string, ([\w.]+)>|([\w.]+)) (\w+) = (\d+)")
_METHOD = re.compile(r"rpc (\w+)\((stream )?([\w.]+)\) returns \((stream )?([\w.]+)\)")


@dataclass(frozen=True)
class Method:
    """One call of a service."""

    path: str
    request: Any
    response: Any
    is_request_stream: bool
    is_response_stream: bool


@cache
def message(full_name: str) -> Any:
    """The class of a message, by its full name."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(full_name))


@cache
def method(service: str, name: str) -> Method:
    """A method, by the full name of its service and its own."""
    package, _, short = service.rpartition(".")
    body = next(match[2] for match in _SERVICE.finditer(PACKAGES[package]) if match[1] == short)
    for match in _METHOD.finditer(body):
        if match[1] == name:
            request, response = (message(_full(word, package)) for word in (match[3], match[5]))
            return Method(f"/{service}/{name}", request, response, bool(match[2]), bool(match[4]))
    raise KeyError(f"{service}/{name}")


def packed(content: Any, type_url: str | None = None) -> Any:
    """An Any as containerd reads it: the type's bare name, without the host that protobuf's own Pack writes."""
    return message("google.protobuf.Any")(
        type_url=type_url or content.DESCRIPTOR.full_name, value=content.SerializeToString()
    )


def wire_descriptor(blob: Descriptor) -> Any:
    """A descriptor as containerd's calls take it."""
    return message("containerd.types.Descriptor")(media_type=blob.media_type, digest=blob.digest, size=blob.size)


@cache
def _pool() -> Any:
    pool = descriptor_pool.DescriptorPool()
    for well_known in WELL_KNOWN:
        pool.AddSerializedFile(well_known.serialized_pb)
    files: list[str] = [well_known.name for well_known in WELL_KNOWN]
    for package, text in PACKAGES.items():
        file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
        file.dependency.extend(files)
        for match in _MESSAGE.finditer(text):
            _add_message(file, package, match[1], match[2])
        pool.Add(file)
        files.append(file.name)
    return pool


def _add_message(file: Any, package: str, name: str, body: str) -> None:
    found = file.message_type.add(name=name)
    for statement in _statements(body):
        match = _FIELD.fullmatch(statement)
        if match is None:
            message_text = f"{package}.{name}: {statement!r} is no field"
            raise ValueError(message_text)
        repeated, map_value, kind, field, number = match.groups()
        if map_value is not None:
            entry = found.nested_type.add(name=f"{field.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            _set_type(entry.field.add(name="key", number=1, label=_FIELD_TYPES.LABEL_OPTIONAL), "string", package)
            _set_type(entry.field.add(name="value", number=2, label=_FIELD_TYPES.LABEL_OPTIONAL), map_value, package)
            kind = f"{package}.{name}.{entry.name}"
        is_list = repeated or map_value is not None
        label = _FIELD_TYPES.LABEL_REPEATED if is_list else _FIELD_TYPES.LABEL_OPTIONAL
        _set_type(found.field.add(name=field, number=int(number), label=label), kind, package)


def _set_type(field: Any, kind: str, package: str) -> None:
    if kind in SCALARS:
        field.type = SCALARS[kind]
        return
    field.type = _FIELD_TYPES.TYPE_MESSAGE
    field.type_name = f".{_full(kind, package)}"


def _full(word: str, package: str) -> str:
    return word if "." in word else f"{package}.{word}"


def _statements(body: str) -> Iterator[str]:
    return (" ".join(part.split()) for part in body.split(";") if part.strip())
