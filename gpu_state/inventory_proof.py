"""Proves that every allocated byte of a process at rest is accounted for.

Pure: numbers in, a proof or InventoryMismatch out. Two things are compared on each device:
  used by the process = allocated + driver-held + own  within a tolerance: the driver's figure, by another way
  allocated = moved + zero + deduplicated              exactly: what the preload lists and what the data plane took
The first is held before the process lets its memory go, because what nobody listed nobody holds; the second when all is taken.
`own` is what the driver takes for itself (contexts, kernels, local memory), which no call tells exactly; so it is bounded,
not known. Less than nothing, or more than the bound, is memory that nobody listed. Called by staged_proof.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vgpu_errors import InventoryMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable

# A context costs 0.55 GiB on an H200 (docs/staged-mode.md); libraries load their kernels beside it.
OWN_MOST_BYTES = 1536 << 20
# The driver rounds to 2 MiB pages and the two figures are not of the same instant.
ROUNDING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Tally:
    """Every byte of the objects of one device, by what became of it."""

    total_bytes: int
    moved_bytes: int
    zero_bytes: int
    dedup_bytes: int

    @classmethod
    def sum(cls, tallies: Iterable[Tally]) -> Tally:
        """All devices together."""
        parts = list(tallies)
        return cls(*(sum(getattr(part, name) for part in parts) for name in cls.__slots__))

    def to_json(self) -> dict[str, int]:
        """The form in answers."""
        return {name: int(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> Tally:
        """Read what the staging worker sent."""
        return cls(*(int(doc[name]) for name in ("total_bytes", "moved_bytes", "zero_bytes", "dedup_bytes")))


@dataclass(frozen=True, slots=True)
class DeviceInventory:
    """What is claimed of one device, or of all.

    `used_bytes` is the driver's figure for all processes that freeze, None where it has none; `processes` counts contexts.
    That figure may lack `may_lack_bytes` of what is listed, and count `may_repeat_bytes` of it once more.
    """

    uuid: str
    allocated_bytes: int
    driver_held_bytes: int
    processes: int
    used_bytes: int | None
    may_lack_bytes: int = 0
    may_repeat_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The bounds, to be stated with every proof."""

    own_most_bytes: int = OWN_MOST_BYTES  # for each process on each device
    rounding_bytes: int = ROUNDING_BYTES


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared; `own_bytes` is what the driver's figure leaves for the driver itself."""

    uuid: str
    tally: Tally
    driver_held_bytes: int
    used_bytes: int | None
    own_bytes: int | None
    tolerance: Tolerance
    may_lack_bytes: int = 0
    may_repeat_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The figures, with the bounds that were applied."""
        return {
            "device": self.uuid,
            **self.tally.to_json(),
            "driver_held_bytes": self.driver_held_bytes,
            "used_bytes": self.used_bytes,
            "own_bytes": self.own_bytes,
            "own_most_bytes": self.tolerance.own_most_bytes,
            "may_lack_bytes": self.may_lack_bytes,
            "may_repeat_bytes": self.may_repeat_bytes,
        }


def prove(inventory: DeviceInventory, tally: Tally, tolerance: Tolerance) -> Proof:
    """The whole proof for one device, or InventoryMismatch."""
    accounted = tally.moved_bytes + tally.zero_bytes + tally.dedup_bytes
    if not inventory.allocated_bytes == tally.total_bytes == accounted:
        what = f"{inventory.allocated_bytes} bytes are allocated, {tally.total_bytes} were taken, {accounted} accounted for"
        raise InventoryMismatch(device=inventory.uuid, what=what)
    own = own_bytes(inventory, tolerance)
    return Proof(
        inventory.uuid, tally, inventory.driver_held_bytes, inventory.used_bytes, own, tolerance,
        inventory.may_lack_bytes, inventory.may_repeat_bytes,
    )  # fmt: skip


def own_bytes(inventory: DeviceInventory, tolerance: Tolerance) -> int | None:
    """What the driver's figure leaves for the driver itself, or InventoryMismatch; None where there is no figure."""
    if inventory.used_bytes is None:
        return None
    listed = inventory.allocated_bytes + inventory.driver_held_bytes
    own = inventory.used_bytes - listed
    least = -tolerance.rounding_bytes - inventory.may_lack_bytes
    most = tolerance.own_most_bytes * inventory.processes + tolerance.rounding_bytes + inventory.may_repeat_bytes
    if not least <= own <= most:
        what = f"the driver says {inventory.used_bytes} bytes are in use, {listed} are listed; 0 to {most} more are plausible"
        raise InventoryMismatch(device=inventory.uuid, what=what)
    return own
