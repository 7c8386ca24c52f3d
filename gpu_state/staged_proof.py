"""Holds what the preloads of a container list against what the driver counts, and against what the data plane took.

Asks nobody and decides no order; raises InventoryMismatch. The comparison itself is in inventory_proof.py.
A shared object is listed once. Whether the driver counts it for those that imported it too is not told anywhere, and what only
descriptors keep is counted for nobody; so its figure may be larger by all imports, and smaller by orphans and by what the agent
has handed out. Called by staged_freeze.py at rest and when all is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_state.inventory_proof import DeviceInventory, Proof, Tally, Tolerance, own_bytes, prove

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_state.staged_lease import StagedProcess

ALL_DEVICES = "all devices"
_IMPORT_KINDS = ("import", "opened")


class StagedProof:
    """The processes of one freeze at rest."""

    def __init__(
        self,
        processes: Sequence[StagedProcess],
        driver_bytes: int,
        used: Sequence[int],
        tolerance: Tolerance,
        *,
        is_marked: bool,
    ) -> None:
        """`used` are NVML's figures, one for each process and device; `is_marked`: some of the memory came from the agent."""
        self._processes = processes
        self._driver_bytes = driver_bytes
        self._used = used
        self._tolerance = tolerance
        self._is_marked = is_marked

    def check_listed(self) -> None:
        """Nothing is let go that nobody has listed."""
        for claim in self.claims():
            own_bytes(claim, self._tolerance)

    def check_taken(self, tallies: Mapping[str, Tally]) -> list[Proof]:
        """Every byte that is listed was taken."""
        proofs = []
        for claim in self.claims():
            tally = Tally.sum(tallies.values()) if claim.uuid == ALL_DEVICES else tallies[claim.uuid]
            proofs.append(prove(claim, tally, self._tolerance))
        return proofs

    def claims(self) -> list[DeviceInventory]:
        """What is listed of each device.

        Preloads do not say on which device small memory lies. So with several devices each is claimed by what is to be taken
        from it, and all of them together by what the driver counts.
        """
        sizes: dict[str, int] = {}
        for process in self._processes:
            for held in process.objects:
                sizes[held.uuid] = sizes.get(held.uuid, 0) + held.size
        if len(sizes) == 1:
            (uuid, size), *_ = sizes.items()
            return [self._claim_with_witness(uuid, size)]
        contexts = len(self._used) or len(self._processes)
        each = [DeviceInventory(uuid, size, 0, contexts, None) for uuid, size in sorted(sizes.items())]
        return [*each, self._claim_with_witness(ALL_DEVICES, sum(sizes.values()))] if each else []

    def _claim_with_witness(self, uuid: str, size: int) -> DeviceInventory:
        witness, contexts = (sum(self._used), len(self._used)) if self._used else (None, len(self._processes))
        return DeviceInventory(
            uuid, size, self._driver_bytes, contexts, witness,
            may_lack_bytes=size if self._is_marked else self._orphan_bytes(),
            may_repeat_bytes=sum(held.size for process in self._processes for held in process.imports),
        )  # fmt: skip

    def _orphan_bytes(self) -> int:
        return sum(held.size for process in self._processes for held in process.objects if held.kind in _IMPORT_KINDS)
