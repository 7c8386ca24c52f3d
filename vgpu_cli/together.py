"""Which containers one `vgpu suspend` or `vgpu resume` means, and how the agent is asked for all of them at a time.

A container of a group (annotation `vgpu.snapshot/group`) is suspended with all of its group, unless the user says otherwise.
One request and one connection for each; where one fails, the agent undoes the others, and the first error that says why is raised.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

from gpu_state.client import AgentClient
from gpu_state.group_terms import MAX_MEMBERS, group_json
from gpu_state.known_containers import checked_group, known_containers, members_of
from vgpu_cli.known import find_containers
from vgpu_errors import GroupMemberFailed, NoGroup, UnsupportedRequest, UserError, VgpuError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from gpu_state.known_containers import KnownContainer
    from vgpu_cli.output import Output


def add_containers(parser: argparse.ArgumentParser, what: str) -> None:
    """The arguments that say which containers."""
    parser.add_argument("containers", metavar="CONTAINER", nargs="*", help=f"names or ids of {what}")
    parser.add_argument(
        "--group", metavar="NAME", help="all running containers with the annotation vgpu.snapshot/group=NAME"
    )


def chosen(args: argparse.Namespace) -> list[KnownContainer]:
    """Those that the command line names, each once."""
    if bool(args.containers) == (args.group is not None):
        raise UserError(what=f"'vgpu {args.verb}' takes containers, or '--group' and the name of one")
    if args.group is not None:
        found = members_of(args.group, known_containers())
        for container in found:
            checked_group(container.group, container.id)
        if not found:
            raise NoGroup(group=args.group)
        return found
    found = list(dict.fromkeys(find_containers(args.containers)))
    if len(found) > MAX_MEMBERS:
        raise UserError(what=f"'vgpu {args.verb}' takes at most {MAX_MEMBERS} containers at a time")
    return found


def refuse_parts_of_groups(containers: Sequence[KnownContainer]) -> None:
    """Ranks of a group that are left running would wait for the others for ever, in the midst of a collective perhaps."""
    for container in containers:
        group = checked_group(container.group, container.id)
        if group is None:
            continue
        ids = {one.id for one in containers}
        left = [one.id[:12] for one in members_of(group, known_containers()) if one.id not in ids]
        if left:
            raise UnsupportedRequest(
                what=f"container {container.id[:12]} belongs to group {group} with {', '.join(left)}",
                remedy=f"'vgpu suspend --group {group}' suspends all of it; '--alone' leaves the others running.",
            )


def group_of(args: argparse.Namespace, containers: Sequence[KnownContainer]) -> dict[str, Any]:
    """The argument `group` for several containers; one on its own has none."""
    if len(containers) < 2:
        return {}
    attempt = f"{os.getpid()}-{secrets.token_hex(4)}"
    return {"group": group_json(args.group or f"command-{attempt}", [one.id for one in containers], attempt)}


def ask_all(
    socket: str, verb: str, wanted: Mapping[str, Mapping[str, Any]], deadline_s: float
) -> dict[str, dict[str, Any]]:
    """Container id -> the answer; all are asked at a time."""
    with contextlib.ExitStack() as stack:
        clients = {name: stack.enter_context(AgentClient.connect(socket)) for name in wanted}
        asks = {
            name: lambda name=name: clients[name].request(verb, wanted[name], deadline_s=deadline_s) for name in wanted
        }

        def give_up() -> None:
            for client in clients.values():
                client.hang_up()

        return _all_at_once(asks, give_up)


def say_all(
    out: Output, answers: Mapping[str, dict[str, Any]], describe: Callable[[Output, str, Mapping[str, Any]], None]
) -> None:
    """One container's document as it is, several in a list."""
    docs = [{"container": name, **done} for name, done in answers.items()]
    out.json(docs[0] if len(docs) == 1 else {"containers": docs})
    for name, done in answers.items():
        describe(out, name, done)


def _all_at_once(
    asks: Mapping[str, Callable[[], dict[str, Any]]], give_up: Callable[[], object]
) -> dict[str, dict[str, Any]]:
    with ThreadPoolExecutor(len(asks)) as threads:
        under_way = {threads.submit(ask): name for name, ask in asks.items()}
        try:
            failures = [problem for done in as_completed(under_way) if (problem := _problem_of(done.exception()))]
        except BaseException:  # Ctrl-C: the agent undoes what has begun
            give_up()
            raise
    if failures:
        reason = next((one for one in failures if not isinstance(one, GroupMemberFailed)), failures[0])
        for other in failures:
            if other is not reason:
                reason.add_note(f"also: {other}")
        raise reason
    answers = {name: done.result() for done, name in under_way.items()}
    return {name: answers[name] for name in asks}


def _problem_of(problem: BaseException | None) -> VgpuError | None:
    if problem is None or isinstance(problem, VgpuError):
        return problem
    raise problem
