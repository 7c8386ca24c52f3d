"""The plugin itself: registers, answers containerd's calls, comes back when the connection is lost.

Order of a connection: RegisterPlugin (ours), Configure, Synchronize, then one call a container. An answer takes well under
the 2 s after which containerd gives a plugin up. A container that cannot be served is created without our additions and
named in the log; one that asks with `vgpu.snapshot/inject: "true"` is refused instead, because it would be
taken for a container that can be frozen. Called by `vgpu nri`.

Steps for one container, and what a crash after each leaves: control directory made (removed with the container, or by
the next Synchronize); answer sent (containerd has the mounts in its stored spec).
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from containerd_integration.api.wire import message
from containerd_integration.nri import ttrpc
from containerd_integration.nri.adjustment import Adjustment, adjust, spec_of
from containerd_integration.nri.multiplex import PLUGIN_STREAM, RUNTIME_STREAM, ConnectionLost, Multiplexer
from containerd_integration.nri.rootfs import LayeredTree, layers_of
from oci_hook.control_directory import (
    forget_container,
    is_injected,
    is_safe_id,
    make_control_directory,
    write_mode,
    write_state_file,
)
from oci_hook.gpu_detection import user_switch
from oci_hook.injection import mode_of, to_bytes
from oci_hook.state import state_from_hook
from vgpu_errors import DeadlineExceeded, EngineFailed, NodeError, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable

    from oci_hook.rootfs_libc import Tree
    from oci_hook.settings import Settings

DEFAULT_SOCKET = "/var/run/nri/nri.sock"
GIVEN_SOCKET = "NRI_PLUGIN_SOCKET"
PACKAGE = "nri.pkg.api.v1alpha1"
RUNTIME_SERVICE = f"{PACKAGE}.Runtime"
PLUGIN_SERVICE = f"{PACKAGE}.Plugin"
NAME = "vgpu"
# Late: other plugins' devices and mounts are there to be seen, and LD_PRELOAD is merged with theirs.
INDEX = "90"

POST_START, CREATE, REMOVE = 7, 4, 11
EVENTS = sum(1 << (event - 1) for event in (CREATE, POST_START, REMOVE))

REGISTER_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
# A connection that lasted so long was no failure to connect.
LASTED_S = 60.0
ADDITION_IN_LOG = "{name} ({id}): {what}"


class Plugin:
    """One registration with one runtime; `tree_of` gives a container's files."""

    def __init__(
        self,
        settings: Settings,
        say: Callable[[str], None],
        tree_of: Callable[[str], Tree | None],
        *,
        name: str = NAME,
        index: str = INDEX,
    ) -> None:
        self.settings = settings
        self.say = say
        self.tree_of = tree_of
        self.name, self.index = name, index
        self._calls: dict[str, Callable[[Any], Any]] = {
            "Configure": self._configure,
            "Synchronize": self._synchronize,
            "CreateContainer": self._create,
            "PostStartContainer": self._post_start,
            "RemoveContainer": self._remove,
            "StateChange": self._state_change,
            "Shutdown": lambda _: _new("Empty"),
        }
        self._requests = {"Shutdown": "Empty", "StateChange": "StateChangeEvent"}

    def serve(self, trunk: socket.socket, *, until: float | None = None) -> None:
        """Register, then answer until the connection is lost, which raises, or the time is over."""
        multiplexer = Multiplexer(trunk)
        try:
            register = _new("RegisterPluginRequest", plugin_name=self.name, plugin_idx=self.index)
            ttrpc.send_request(
                multiplexer, RUNTIME_STREAM, 1, f"{RUNTIME_SERVICE}/RegisterPlugin", register, timeout_s=REGISTER_S
            )
            self._serve(multiplexer, until)
        finally:
            multiplexer.close()

    def _serve(self, multiplexer: Multiplexer, until: float | None) -> None:
        registered_by = time.monotonic() + REGISTER_S
        is_registered = False
        while until is None or time.monotonic() < until:
            deadline = registered_by if not is_registered else until
            if not multiplexer.read_frame(deadline) and not is_registered:
                raise DeadlineExceeded(phase="registering with NRI", seconds=f"{REGISTER_S:g}")
            while (answer := ttrpc.next_message(multiplexer, RUNTIME_STREAM)) is not None:
                is_registered = self._check_registration(answer)
            while (call := ttrpc.next_message(multiplexer, PLUGIN_STREAM)) is not None:
                self._answer(multiplexer, call)

    def _check_registration(self, answer: ttrpc.Message) -> bool:
        status = answer.body.status
        if answer.is_request or status.code != ttrpc.OK:
            raise EngineFailed(engine="NRI", what=f"refuses the plugin: {status.message or 'no reason given'}")
        self.say(f"registered as {self.index}-{self.name}")
        return True

    def _answer(self, multiplexer: Multiplexer, call: ttrpc.Message) -> None:
        """Every call gets an answer; an error of ours is an answer too, and not the end of the plugin."""
        asked = call.body
        handler = self._calls.get(asked.method) if call.is_request and asked.service == PLUGIN_SERVICE else None
        if handler is None:
            words = f"{asked.service}/{asked.method} is not implemented" if call.is_request else "a response, unasked"
            ttrpc.send_failure(multiplexer, PLUGIN_STREAM, call.stream_id, ttrpc.UNIMPLEMENTED, words)
            return
        try:
            kind = message(f"{PACKAGE}.{self._requests.get(asked.method, asked.method + 'Request')}")
            answer = handler(ttrpc.parsed(kind, asked.payload))
        except (VgpuError, OSError, ValueError) as error:
            self.say(f"{asked.method}: {error}")
            ttrpc.send_failure(multiplexer, PLUGIN_STREAM, call.stream_id, ttrpc.UNKNOWN, f"vgpu: {error}")
            return
        ttrpc.send_answer(multiplexer, PLUGIN_STREAM, call.stream_id, answer)

    def _configure(self, request: Any) -> Any:
        self.say(f"serves {request.runtime_name or 'a runtime'} {request.runtime_version}".rstrip())
        return _new("ConfigureResponse", events=EVENTS)

    def _synchronize(self, request: Any) -> Any:
        """Containers from before our time stay as they are; `more` says that the list comes in parts."""
        return _new("SynchronizeResponse", more=request.more)

    def _create(self, request: Any) -> Any:
        container, pod = request.container, request.pod
        try:
            found = adjust(self.settings, container, pod, self.tree_of(container.id))
            self._prepare(container, pod, found)
        except (VgpuError, OSError, ValueError) as error:
            found = Adjustment(reason="GPU container", why_not=str(error))
        if found.why_not and _asks(container, pod):
            raise EngineFailed(engine="NRI", what=f"{container.name} asks for the preload library: {found.why_not}")
        self._log(container, found)
        return _new("CreateContainerResponse", **({} if found.is_empty else {"adjust": _message_of(found)}))

    def _prepare(self, container: Any, pod: Any, found: Adjustment) -> None:
        """What the mounts name has to be there when the runtime mounts it."""
        if found.is_empty:
            return
        make_control_directory(self.settings.run_dir, container.id)
        write_mode(self.settings.run_dir, container.id, mode_of(self.settings, spec_of(container, pod)))

    def _log(self, container: Any, found: Adjustment) -> None:
        if found.reason or found.why_not:
            what = f"left alone: {found.why_not}" if found.why_not else f"injected: {found.reason}"
            self.say(ADDITION_IN_LOG.format(name=container.name, id=container.id[:12], what=what))

    def _post_start(self, request: Any) -> Any:
        """The state file by which the agent and `vgpu ps` know the container."""
        container = request.container
        if is_safe_id(container.id) and is_injected(self.settings.run_dir, container.id):
            state = {"id": container.id, "pid": container.pid, "annotations": dict(container.annotations)}
            found = state_from_hook(self.settings, to_bytes({**state, "bundle": ""}))
            if found is not None:
                write_state_file(self.settings.run_dir, *found)
        return _new("PostStartContainerResponse")

    def _remove(self, request: Any) -> Any:
        if is_safe_id(request.container.id):
            forget_container(self.settings.run_dir, request.container.id)
        return _new("RemoveContainerResponse")

    def _state_change(self, request: Any) -> Any:
        """How containerd up to 2.1 tells what newer versions have calls of their own for."""
        handler = {POST_START: self._post_start, REMOVE: self._remove}.get(request.event)
        if handler is not None:
            handler(request)
        return _new("Empty")


def keep_serving(plugin: Plugin, address: str, say: Callable[[str], None]) -> None:
    """Serve for ever: a runtime that restarts is waited for, longer each time.

    One that started this program by itself starts it again, too: with its connection this ends.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        began = time.monotonic()
        try:
            plugin.serve(connected(address))
        except ConnectionLost as error:
            say(str(error))
        except (NodeError, DeadlineExceeded, EngineFailed) as error:
            say(f"{error} Next try in {pause_s:g} s.")
        if GIVEN_SOCKET in os.environ:
            return
        pause_s = FIRST_PAUSE_S if time.monotonic() - began > LASTED_S else min(pause_s * 2, LONGEST_PAUSE_S)
        time.sleep(pause_s)


def connected(address: str) -> socket.socket:
    """The socket that a runtime gave us when it started this program, or a connection to its address."""
    given = os.environ.get(GIVEN_SOCKET)
    if given is not None:
        return socket.socket(fileno=int(given))
    trunk = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        trunk.settimeout(REGISTER_S)
        trunk.connect(address)
    except OSError as error:
        trunk.close()
        raise NodeError(what=f"{address}: {error.strerror or error}") from error
    return trunk


def tree_from_containerd(address: str, snapshotter: str) -> Callable[[str], Tree | None]:
    """How the plugin of a containerd node finds a container's files."""

    def tree_of(container_id: str) -> Tree | None:
        if not Path(address).exists():
            return None
        layers = layers_of(address, container_id, snapshotter)
        return LayeredTree(layers) if layers else None

    return tree_of


def _asks(container: Any, pod: Any) -> bool:
    return user_switch(spec_of(container, pod)) is True


def _message_of(found: Adjustment) -> Any:
    return _new(
        "ContainerAdjustment",
        annotations=found.annotations,
        mounts=[_new("Mount", **mount) for mount in found.mounts],
        env=[_new("KeyValue", key=name, value=value) for name, value in found.environment],
    )


def _new(name: str, /, **fields: Any) -> Any:
    return message(f"{PACKAGE}.{name}")(**fields)
