"""Reads from NVML how the GPUs of a node are connected: who reaches whose memory, NVLinks between them, the way over PCI.

An absent call means None, never an error, as in nvml.py. Judges nothing; fitness.py compares it with a checkpoint's requirements.
Used by the driver worker alone, once: connections do not change while a driver is loaded.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_state.nvml import Nvml

MAX_DEVICES = 64
_MAX_LINKS = 36  # 18 up to NVLink 5; a later generation may have more
_READ, _WRITE, _NVLINK = 0, 1, 2  # nvmlGpuP2PCapsIndex_t
_SWITCH = 2  # nvmlIntNvLinkDeviceType_t
_WAYS = {0: "board", 10: "switch", 20: "switches", 30: "bridge", 40: "node", 50: "system"}  # nvmlGpuTopologyLevel_t


@dataclass(frozen=True, slots=True)
class Link:
    """How two GPUs are connected; None where NVML does not say.

    `nvlinks` counts direct ones, or those that both have to a switch between them; `way` is the way over PCI.
    """

    a: str
    b: str
    reads: bool | None = None
    writes: bool | None = None
    nvlinks: int | None = None
    way: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The entry of `links` in the agent's facts."""
        return {
            "a": self.a,
            "b": self.b,
            "reads": self.reads,
            "writes": self.writes,
            "nvlinks": self.nvlinks,
            "way": self.way,
        }

    @property
    def reaches(self) -> bool | None:
        """Each of the two reads and writes the other's memory."""
        told = (self.reads, self.writes)
        return False if False in told else None if None in told else True


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_sub_system_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


@dataclass(frozen=True, slots=True)
class _Ends:
    """The active NVLinks of one GPU by what is at their other end: PCI places of GPUs, and a number to switches."""

    gpus: Mapping[str, int]
    switches: int


def links(nvml: Nvml) -> list[Link]:
    """Every pair of GPUs that NVML lists, in its order."""
    handles = nvml.handles()
    if len(handles) > MAX_DEVICES:
        return []
    ends = {uuid: _ends(nvml, handle) for uuid, handle in handles.items()} if len(handles) > 1 else {}
    return [_link(nvml, handles, ends, pair) for pair in combinations(handles, 2)]


def _link(
    nvml: Nvml, handles: Mapping[str, ctypes.c_void_p], ends: Mapping[str, _Ends | None], pair: Sequence[str]
) -> Link:
    a, b = (handles[uuid] for uuid in pair)
    return Link(
        pair[0],
        pair[1],
        reads=_both(nvml, a, b, _READ),
        writes=_both(nvml, a, b, _WRITE),
        nvlinks=_nvlinks(ends[pair[0]], ends[pair[1]], _place(nvml, b), _both(nvml, a, b, _NVLINK)),
        way=_way(nvml, a, b),
    )


def _both(nvml: Nvml, a: ctypes.c_void_p, b: ctypes.c_void_p, what: int) -> bool | None:
    """Whether it holds in both directions."""
    told = [_status(nvml, first, second, what) for first, second in ((a, b), (b, a))]
    return False if False in told else None if None in told else True


def _status(nvml: Nvml, a: ctypes.c_void_p, b: ctypes.c_void_p, what: int) -> bool | None:
    status = ctypes.c_uint()
    return status.value == 0 if nvml.ok("nvmlDeviceGetP2PStatus", a, b, what, ctypes.byref(status)) else None


def _way(nvml: Nvml, a: ctypes.c_void_p, b: ctypes.c_void_p) -> str | None:
    level = ctypes.c_uint()
    known = nvml.ok("nvmlDeviceGetTopologyCommonAncestor", a, b, ctypes.byref(level))
    return _WAYS.get(level.value) if known else None


def _place(nvml: Nvml, handle: ctypes.c_void_p) -> str | None:
    info = _PciInfo()
    return _text(info) if nvml.ok("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(info)) else None


def _text(info: _PciInfo) -> str:
    return f"{info.domain:x}:{info.bus:x}:{info.device:x}"


def _ends(nvml: Nvml, handle: ctypes.c_void_p) -> _Ends | None:
    gpus: dict[str, int] = {}
    switches, active = 0, ctypes.c_uint()
    if not nvml.has("nvmlDeviceGetNvLinkState"):
        return None
    for number in range(_MAX_LINKS):
        if not nvml.ok("nvmlDeviceGetNvLinkState", handle, number, ctypes.byref(active)):
            break  # no further link, or a GPU without any
        if active.value != 1:
            continue
        kind, info = ctypes.c_uint(), _PciInfo()
        if nvml.ok("nvmlDeviceGetNvLinkRemoteDeviceType", handle, number, ctypes.byref(kind)) and kind.value == _SWITCH:
            switches += 1
        elif nvml.ok("nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, number, ctypes.byref(info)):
            gpus[_text(info)] = gpus.get(_text(info), 0) + 1
    return _Ends(gpus, switches)


def _nvlinks(a: _Ends | None, b: _Ends | None, place_of_b: str | None, is_connected: bool | None) -> int | None:
    """Direct NVLinks; where there is none and the two are connected all the same, those through switches."""
    if a is None or b is None or place_of_b is None:
        return None
    direct = a.gpus.get(place_of_b, 0)
    return direct or (min(a.switches, b.switches) if is_connected else 0)
