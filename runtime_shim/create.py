"""The verbs `create` and `run`: a GPU container is created from an edited config.json.

Any other is created by the low-level runtime in this process's place, its config.json untouched.
config.json is put back when `create` has returned. A `run` in the foreground returns only when the container has
ended; there it is put back once the low-level runtime's `state` knows the container, because both runtimes write that
after they have read config.json and keep their own copy.
`create --config FILE` of crun names another file: no engine does that, it passes through.
Crash after each step: see oci_hook/bundle_file.py; a control directory that is left goes with the engine's `delete`.
"""

from __future__ import annotations

import os

from runtime_shim.injection import InjectedBundle, injected_bundle

TYPE_CHECKING = False
if TYPE_CHECKING:
    from oci_hook.settings import Settings
    from runtime_shim.arguments import Arguments
    from runtime_shim.low_level import LowLevel

STATE_CALL_S = 10.0
LONGEST_PAUSE_TICKS = 20  # of 50 ms


def create(call: Arguments, settings: Settings, low_level: LowLevel) -> int:
    """Run the verb; returns the low-level runtime's status."""
    container_id = call.container_id or ""
    if call.get("config") is not None:
        low_level.replace_process(call)
    bundle = os.path.abspath(call.get("bundle") or ".")  # noqa: PTH100
    prepared = injected_bundle(settings, bundle, container_id)
    if prepared.injection is None or not _may_write(settings):
        low_level.replace_process(call)
    _log(settings, f"{call.verb} {container_id}: {prepared.injection.reason}")
    if call.verb == "run" and not call.has("detach"):
        return _run_in_foreground(call, settings, low_level, prepared, bundle)
    return _create(call, settings, low_level, prepared, bundle)


def _create(call: Arguments, settings: Settings, low_level: LowLevel, prepared: InjectedBundle, bundle: str) -> int:
    from runtime_shim.supervise import run_child  # noqa: PLC0415 - ctypes, not for containers that are left alone

    with prepared:
        done = run_child(call.argv_with(program=low_level.path))
        if done.status != 0:
            prepared.forget()
    if done.status == 0:
        _note(call, settings, low_level, prepared, bundle)
    return done.status


def _run_in_foreground(
    call: Arguments, settings: Settings, low_level: LowLevel, prepared: InjectedBundle, bundle: str
) -> int:
    from oci_hook.control_directory import forget_container  # noqa: PLC0415
    from runtime_shim.supervise import run_child  # noqa: PLC0415

    wait = _Backoff()

    def once_it_is_known() -> bool:
        if not wait.is_due() or _pid_from_state(call, low_level) is None:
            return False
        prepared.put_back()
        _note(call, settings, low_level, prepared, bundle)
        return True

    with prepared:
        done = run_child(call.argv_with(program=low_level.path), on_tick=once_it_is_known)
        if not call.has("keep"):
            forget_container(settings.run_dir, call.container_id or "")
    return done.status


class _Backoff:
    """Asks at ticks 1, 2, 4, 8, 16 and then once a second."""

    __slots__ = ("_left", "_pause")

    def __init__(self) -> None:
        self._pause = 1
        self._left = 1

    def is_due(self) -> bool:
        """Count one tick down."""
        self._left -= 1
        if self._left > 0:
            return False
        self._left = self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE_TICKS)
        return True


def _note(call: Arguments, settings: Settings, low_level: LowLevel, prepared: InjectedBundle, bundle: str) -> None:
    """Write the state file. The container is there by now: a full /run must not make the engine believe otherwise."""
    from runtime_shim.state_file import write_running  # noqa: PLC0415
    from vgpu_errors import VgpuError  # noqa: PLC0415

    try:
        pid = _pid_from_file(call) or _pid_from_state(call, low_level)
        if pid is None:
            _log(settings, f"{call.verb} {call.container_id}: created, but nothing names its process")
            return
        write_running(settings, call, low_level, bundle=bundle, pid=pid, injection=prepared.injection)
    except (OSError, VgpuError) as error:
        _log(settings, f"{call.verb} {call.container_id}: state file not written, {error}")


def _pid_from_file(call: Arguments) -> int | None:
    path = call.get("pid-file")
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            return int(file.read())
    except (OSError, ValueError):
        return None


def _pid_from_state(call: Arguments, low_level: LowLevel) -> int | None:
    from oci_hook.injection import parse_spec  # noqa: PLC0415

    done = low_level.call(call.global_words, "state", call.container_id or "", deadline_s=STATE_CALL_S, check=False)
    pid = (parse_spec(done.stdout) or {}).get("pid") if done.status == 0 else None
    return pid if isinstance(pid, int) and pid > 0 else None


def _may_write(settings: Settings) -> bool:
    """A rootless engine may not write to /run/vgpu; its containers start, but engines refuse to checkpoint them anyway."""
    if os.geteuid() == 0 and not _is_in_user_namespace():
        return True
    folder = settings.run_dir if os.path.isdir(settings.run_dir) else os.path.dirname(settings.run_dir)  # noqa: PTH112, PTH120
    return os.access(folder, os.W_OK | os.X_OK)


def _is_in_user_namespace() -> bool:
    """Root of a user namespace may write less than root of the host."""
    try:
        with open("/proc/self/uid_map", encoding="utf-8") as file:  # noqa: PTH123
            return file.read().split() != ["0", "0", "4294967295"]
    except OSError:
        return False


def _log(settings: Settings, text: str) -> None:
    if settings.log is not None:
        from runtime_shim.debug_log import write  # noqa: PLC0415

        write(settings, text)
