"""Makes the state files of software GPUs: `python -m tests.software_gpu.devices --dir D --count 2 --memory 1GiB --salt node-a`.

The layout is driver/state_file.h. With a salt the UUIDs are the same every time and differ between salts, so two test hosts
have different, known devices. Refuses to overwrite a device that exists. Called by tests, the test hosts and the demo.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import struct
import uuid
from pathlib import Path

MAGIC = b"SWGPUST1"
SLOTS = 256
SLOT_SIZE = 64
HEADER = struct.Struct("<8sII16sQ24x")
MAX_DEVICES = 16
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def device_uuid(salt: str | None, ordinal: int) -> uuid.UUID:
    """Derived from the salt, or random without one."""
    if salt is None:
        return uuid.uuid4()
    return uuid.UUID(bytes=hashlib.sha256(f"{salt}\0{ordinal}".encode()).digest()[:16])


def make_devices(directory: Path, count: int, memory_bytes: int, salt: str | None = None) -> list[str]:
    """Writes gpu0 to gpuN and returns their UUIDs as "GPU-..."."""
    if not 1 <= count <= MAX_DEVICES or memory_bytes <= 0:
        raise ValueError(f"between 1 and {MAX_DEVICES} devices with some memory, not {count} with {memory_bytes} bytes")
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o777)  # containers with other users share the devices
    return [make_device(directory / f"gpu{n}", n, memory_bytes, salt) for n in range(count)]


def make_device(path: Path, ordinal: int, memory_bytes: int, salt: str | None) -> str:
    """One state file; appears whole or not at all."""
    identity = device_uuid(salt, ordinal)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(HEADER.pack(MAGIC, SLOTS, 0, identity.bytes, memory_bytes) + bytes(SLOTS * SLOT_SIZE))
    partial.chmod(0o666)
    try:
        path.hardlink_to(partial)
    finally:
        partial.unlink()
    return f"GPU-{identity}"


def read_uuids(directory: Path) -> list[str]:
    """UUIDs of the devices that are there, in order."""
    found = []
    for n in range(MAX_DEVICES):
        path = directory / f"gpu{n}"
        if not path.exists():
            break
        found.append(f"GPU-{uuid.UUID(bytes=HEADER.unpack(path.read_bytes()[: HEADER.size])[3])}")
    return found


def parse_size(text: str) -> int:
    """ "512MiB", "1G" or plain bytes."""
    plain = text.removesuffix("iB").removesuffix("B")
    number, unit = (plain[:-1], plain[-1].upper()) if plain and plain[-1].isalpha() else (plain, "")
    if unit not in UNITS:
        raise ValueError(f"no such unit: {text}")
    return int(number, 0) * UNITS[unit]


def main() -> None:
    """The command line; prints one UUID per line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("/run/software-gpu"))
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--memory", type=parse_size, default=1 << 30)
    parser.add_argument("--salt")
    options = parser.parse_args()
    print("\n".join(make_devices(options.dir, options.count, options.memory, options.salt)))


if __name__ == "__main__":
    main()
