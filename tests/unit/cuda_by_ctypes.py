"""The driver API through ctypes, for the GPU processes of the agent's tests, which need no package: they run as plain scripts."""

import ctypes

GRANULARITY = 2 << 20


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class CallFailed(Exception):
    """A call's name and code."""


cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    """Call, or raise."""
    code = getattr(cuda, name)(*arguments)
    if code:
        raise CallFailed(f"{name}: {code}")
