"""The verb `exec`: the process file of an injected container gets the preload, then the low-level runtime takes over.

Nothing is put back: the engine made the file for this one call. An exec without `--process` takes its environment from
the low-level runtime's own copy of config.json, which has the preload already. Never makes an exec fail.
"""

from __future__ import annotations

from oci_hook.control_directory import is_injected, is_safe_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from oci_hook.settings import Settings
    from runtime_shim.arguments import Arguments
    from runtime_shim.low_level import LowLevel


def exec_process(call: Arguments, settings: Settings, low_level: LowLevel) -> int:
    """Run the verb; does not return unless the low-level runtime is missing."""
    path, container_id = call.get("process"), call.container_id or ""
    if path is not None and is_safe_id(container_id) and is_injected(settings.run_dir, container_id):
        from oci_hook.exec_process import edit_process_file  # noqa: PLC0415 - the JSON parser, 8 ms

        try:
            edit_process_file(settings, container_id, path)
        except OSError as error:
            _log(settings, f"exec {container_id}: {path} not edited, {error}")
    low_level.replace_process(call)


def _log(settings: Settings, text: str) -> None:
    from runtime_shim.debug_log import write  # noqa: PLC0415

    write(settings, text)
