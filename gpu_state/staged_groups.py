"""What the staged processes of a container say of NCCL and NVSHMEM, as the record tells it (spec/record.md, section 5).

Asks at rest, so that all ranks are counted at one cut. Nothing of it is needed to bring memory back: a process whose answer is
damaged or late is passed over. Called by staged_freeze.py.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vgpu_errors import DeadlineExceeded, PreloadFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_state.communicators import Communicators
    from gpu_state.deadline import Deadline
    from gpu_state.preload_link import PreloadLink

# A process that does not answer must not make the stop longer than this.
ANSWER_S = 1.0
log = logging.getLogger("vgpu-agent")


def ask_groups(links: Sequence[PreloadLink], deadline: Deadline) -> dict[str, list[dict[str, Any]]]:
    """Lists `communicators` and `nvshmem` of all processes that can tell."""
    able = [link for link in links if link.knows_groups]
    soon = deadline.within(ANSWER_S)
    if not able:
        return {"communicators": [], "nvshmem": []}
    with ThreadPoolExecutor(len(able)) as threads:
        told = list(threads.map(lambda link: _ask(link, soon), able))
    found = [(link, answer) for link, answer in zip(able, told, strict=True) if answer is not None]
    return {
        "communicators": [_placed(one.to_json(), link) for link, answer in found for one in answer.communicators],
        "nvshmem": [_placed(one.to_json(), link) for link, answer in found for one in answer.nvshmem],
    }


def _ask(link: PreloadLink, deadline: Deadline) -> Communicators | None:
    try:
        answer = link.communicators(deadline)
    except (DeadlineExceeded, PreloadFailed) as problem:
        log.warning("process %s did not say what communicators it has: %s", link.pid, problem)
        return None
    if answer.starting or answer.unlisted:
        log.info("process %s has %s communicators not listed", link.pid, answer.starting + answer.unlisted)
    return answer


def _placed(doc: dict[str, Any], link: PreloadLink) -> dict[str, Any]:
    """With the process and the uuid of the device; without the device where the process has none of that number."""
    number = doc.pop("device", None)
    has_device = number is not None and number < len(link.devices)
    return doc | {"nsPid": link.ns_pid} | ({"device": number, "uuid": link.devices[number]} if has_device else {})
