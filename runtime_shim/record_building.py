"""Builds the checkpoint record from what the agent, the bundle and the low-level runtime say.

Pure but for the clock and the generations that the node remembers. Hashes nothing and writes nothing: content root and region summary are filled in by sealing.
Called by checkpoint.py (spec/record.md): build_record, then with_groups once the objects of staged processes are in it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpu_state.fitness import group_requirements, requirements_from
from gpu_state.node_facts import NodeFacts, RuntimeFacts
from image_format import security_config
from image_format.communicators import MAX_COMMUNICATORS, MAX_ELEMENTS, Communicator, ShmemElement, check_members
from image_format.fields import Fields
from image_format.record import Container, DeviceEntry, LowLevelRuntime, Phase, ProcessEntry, Record
from image_format.trust.seen_generations import SeenGenerations
from runtime_shim.host_namespaces import joined_host_namespaces
from vgpu_errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gpu_state.processes import GpuProcess

# What names the container to its engine and its cluster; the rest of the annotations may hold secrets.
KEPT_ANNOTATIONS = (
    "io.container.manager",
    "io.kubernetes.cri.container-name",
    "io.kubernetes.cri.container-type",
    "io.kubernetes.cri.image-name",
    "io.kubernetes.cri.sandbox-name",
    "io.kubernetes.cri.sandbox-namespace",
    "org.opencontainers.image.stopSignal",
    "vgpu.snapshot/preload-build-id",
    "vgpu.snapshot/preload-libc",
)


def build_record(
    *,
    container_id: str,
    bundle: str,
    config: Mapping[str, Any],
    state: Mapping[str, Any],
    facts: NodeFacts,
    processes: Sequence[GpuProcess],
    runtime: LowLevelRuntime,
    phases: Sequence[Phase],
) -> Record:
    """The record of one checkpoint; `state` is the shim's own state file of the container, or empty."""
    facts = replace(facts, runtime=RuntimeFacts(name=runtime.name, version=runtime.version))
    used = {uuid for process in processes for uuid in process.devices}
    return Record(
        created=now_rfc3339(),
        generation=_next_generation(container_id, state),
        container=_container(container_id, config, state),
        low_level_runtime=runtime,
        processes=tuple(map(process_entry, processes)),
        devices=tuple(DeviceEntry(d.uuid, d.name, d.memory_bytes) for d in facts.devices if d.uuid in used),
        requirements=tuple(requirements_from(facts, processes, preload_build=preload_build(state))),
        security=_security(config, bundle, container_id),
        phases=tuple(phases),
    )


def with_groups(
    record: Record, facts: NodeFacts, told: Mapping[str, Any], note: Callable[[str], None] = lambda _: None
) -> Record:
    """The record with `communicators` and `nvshmem` as the processes told them, and what several GPUs need of a node.

    Nothing that a process says of its libraries keeps it from being checkpointed: an entry that no reader would take is
    left out, and `note` is told why.
    """
    communicators, elements = [], []
    for at, doc in _entries(told, "communicators", MAX_COMMUNICATORS, note):
        with _left_out(note):
            communicator = Communicator.from_json(Fields(doc, at))
            check_members(record.processes, [communicator], (), at)
            communicators.append(communicator)
    for at, doc in _entries(told, "nvshmem", MAX_ELEMENTS, note):
        with _left_out(note):
            element = ShmemElement.from_json(Fields(doc, at))
            check_members(record.processes, (), [element], at)
            elements.append(element)
    record = replace(record, communicators=tuple(communicators), nvshmem=tuple(elements))
    return replace(record, requirements=(*record.requirements, *group_requirements(record, facts)))


def _entries(told: Mapping[str, Any], key: str, limit: int, note: Callable[[str], None]) -> Iterator[tuple[str, Any]]:
    found = told.get(key)
    if not isinstance(found, list):
        return
    if len(found) > limit:
        note(f"left out of the record: {len(found) - limit} of {len(found)} {key}")
    for n, doc in enumerate(found[:limit]):
        yield f"{key}[{n}]", doc


@contextlib.contextmanager
def _left_out(note: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except ImageError as error:
        note(f"left out of the record: {error.message}")


def _security(config: Mapping[str, Any], bundle: str, container_id: str) -> dict[str, Any]:
    projection = security_config.project(dict(config), bundle=bundle, container_id=container_id)
    joined = joined_host_namespaces(config)
    return projection | ({security_config.HOST_NAMESPACES: joined} if joined else {})


def _next_generation(container_id: str, state: Mapping[str, Any]) -> int:
    """One more than any this node knows of the container, also where it was set back to an older one meanwhile."""
    return max(int(state.get("generation") or 0), SeenGenerations().newest(container_id) or 0) + 1


def preload_build(state: Mapping[str, Any]) -> str | None:
    """`<libc>/<build-id>` of the preload that the container's processes have mapped."""
    libc, build_id = state.get("preload_libc"), state.get("preload_build_id")
    return f"{libc}/{build_id}" if libc and build_id else None


def process_entry(process: GpuProcess) -> ProcessEntry:
    """A GPU process as the record names it: by the pid it has in its own namespace."""
    return ProcessEntry(process.ns_pid, process.comm, process.mode, tuple(process.devices), process.gpu_bytes)


def now_rfc3339() -> str:
    """The time now in UTC, whole seconds."""
    return dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _container(container_id: str, config: Mapping[str, Any], state: Mapping[str, Any]) -> Container:
    annotations = config.get("annotations") or {}
    kept = {key: str(annotations[key]) for key in KEPT_ANNOTATIONS if key in annotations}
    return Container(id=container_id, engine=str(state.get("engine") or "unknown"), engine_annotations=kept)
