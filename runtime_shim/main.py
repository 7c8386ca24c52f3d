"""`vgpu-runtime`: reads the command line by position and hands it to the verb, or to the low-level runtime as it stands.

Every verb without a handler, `--help`, `--version`, a call without a container id and one that misses an option's value
is an immediate exec of the low-level runtime. Prints nothing: what a handler has to say goes through error_channel.py.
A broken runtime.conf stops only the verbs that start, freeze or restore something; containers can always be killed.
"""

from __future__ import annotations

import sys

from oci_hook.settings import CONFIG_PATH, read_settings
from runtime_shim.arguments import Arguments, parse
from runtime_shim.low_level import choose, leave_no_trace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oci_hook.settings import Settings
    from runtime_shim.low_level import LowLevel

    Handler = Callable[[Arguments, Settings, LowLevel], int]

# Module and function; the module is loaded by the verb that needs it.
HANDLERS = {
    "create": ("runtime_shim.create", "create"),
    "run": ("runtime_shim.create", "create"),
    "exec": ("runtime_shim.exec_verb", "exec_process"),
    "delete": ("runtime_shim.delete", "delete"),
    "resume": ("runtime_shim.resume", "resume"),
    "checkpoint": ("runtime_shim.checkpoint", "checkpoint"),
    "restore": ("runtime_shim.restore", "restore"),
}
STRICT_VERBS = ("create", "run", "checkpoint", "restore")


def main(argv: Sequence[str] | None = None, config_path: str = CONFIG_PATH) -> int:
    """The exit status; most calls end in the low-level runtime instead."""
    leave_no_trace()
    call = parse(sys.argv if argv is None else argv)
    try:
        is_ours = has_handler(call)
        settings = read_settings(config_path, is_strict=is_ours and call.verb in STRICT_VERBS)
        low_level = choose(settings)
        if not is_ours:
            low_level.replace_process(call)
        return handler_of(call)(call, settings, low_level)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - a traceback would land in the container's output
        from runtime_shim.error_channel import message_of, report  # noqa: PLC0415 - only when something failed

        report(call, message_of(error))
        return int(getattr(error, "exit_code", 1))


def has_handler(call: Arguments) -> bool:
    """Whether the call is one that this program does more for than pass it on."""
    if call.verb not in HANDLERS or call.is_incomplete or call.asks_for_help:
        return False
    return call.container_id is not None


def handler_of(call: Arguments) -> Handler:
    """The verb's function, its module loaded now."""
    module, name = HANDLERS[call.verb or ""]
    handler: Handler = getattr(__import__(module, fromlist=(name,)), name)
    return handler
