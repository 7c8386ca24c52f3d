"""Reads the facts of a shared object that decide whether it is safe to preload (ELF gABI, 64-bit little-endian).

Pure: bytes in, facts out. Reads section headers only, runs nothing, and refuses what is no such object with
BuildFailed. `build.py` calls it on every library before it hands it out; the tests compare it with nm and readelf.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vgpu_errors import BuildFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHT_DYNAMIC, _SHT_NOTE, _SHT_DYNSYM, _SHT_GNU_VERNEED = 6, 7, 11, 0x6FFFFFFE
_DT_NEEDED, _CONSTRUCTOR_TAGS = 1, {12, 13, 25, 26, 32}  # INIT, FINI, INIT_ARRAY, FINI_ARRAY, PREINIT_ARRAY
_NT_GNU_BUILD_ID = 3


@dataclass(frozen=True)
class ElfFacts:
    """What a dynamic linker would do with the object."""

    build_id: str
    exported: frozenset[str]
    imported: frozenset[str]
    needed: tuple[str, ...]
    needed_versions: frozenset[str]
    has_constructors: bool


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    info: int


class _Elf:
    def __init__(self, content: bytes, where: str) -> None:
        if content[:6] != b"\x7fELF\x02\x01":
            raise BuildFailed(target=where, what="no 64-bit little-endian ELF object")
        self.content = content
        (table,) = struct.unpack_from("<Q", content, 40)
        entry_size, count = struct.unpack_from("<HH", content, 58)
        self.sections = [self._section(table + n * entry_size) for n in range(count)]

    def _section(self, at: int) -> _Section:
        _, kind, _, _, offset, size, link, info = struct.unpack_from("<IIQQQQII", self.content, at)
        return _Section(kind, offset, size, link, info)

    def of_kind(self, kind: int) -> Iterator[_Section]:
        return (section for section in self.sections if section.kind == kind)

    def text(self, strings: _Section, offset: int) -> str:
        start = strings.offset + offset
        return self.content[start : self.content.index(b"\0", start)].decode()


def read_elf_facts(content: bytes, where: str) -> ElfFacts:
    """The facts of one shared object; `where` names it in errors."""
    try:
        elf = _Elf(content, where)
        tags = list(_dynamic_entries(elf))
        return ElfFacts(
            build_id=_build_id(elf),
            exported=frozenset(name for name, defined in _symbols(elf) if defined),
            imported=frozenset(name for name, defined in _symbols(elf) if not defined),
            needed=tuple(name for tag, name in tags if tag == _DT_NEEDED),
            needed_versions=frozenset(_needed_versions(elf)),
            has_constructors=any(tag in _CONSTRUCTOR_TAGS for tag, _ in tags),
        )
    except (struct.error, ValueError, IndexError) as error:
        raise BuildFailed(target=where, what=f"damaged ELF object ({error})") from error


def _symbols(elf: _Elf) -> Iterator[tuple[str, bool]]:
    for section in elf.of_kind(_SHT_DYNSYM):
        for at in range(section.offset + 24, section.offset + section.size, 24):
            name, _, _, defined_in = struct.unpack_from("<IBBH", elf.content, at)
            yield elf.text(elf.sections[section.link], name), defined_in != 0


def _dynamic_entries(elf: _Elf) -> Iterator[tuple[int, str]]:
    for section in elf.of_kind(_SHT_DYNAMIC):
        for at in range(section.offset, section.offset + section.size, 16):
            tag, value = struct.unpack_from("<QQ", elf.content, at)
            yield tag, elf.text(elf.sections[section.link], value) if tag == _DT_NEEDED else ""


def _needed_versions(elf: _Elf) -> Iterator[str]:
    for section in elf.of_kind(_SHT_GNU_VERNEED):
        at = section.offset
        for _ in range(section.info):
            _, count, _, first, step = struct.unpack_from("<HHIII", elf.content, at)
            entry = at + first
            for _ in range(count):
                _, _, _, name, next_entry = struct.unpack_from("<IHHII", elf.content, entry)
                yield elf.text(elf.sections[section.link], name)
                entry += next_entry
            at += step


def _build_id(elf: _Elf) -> str:
    for section in elf.of_kind(_SHT_NOTE):
        owner_size, size, kind = struct.unpack_from("<III", elf.content, section.offset)
        start = section.offset + 12 + (owner_size + 3 & ~3)
        if kind == _NT_GNU_BUILD_ID:
            return elf.content[start : start + size].hex()
    return ""
