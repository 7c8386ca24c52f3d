"""Tells the engine what went wrong, the way runc does.

With `--log FILE` a line goes there, JSON (`level`, `msg`, `time`) with `--log-format json`, else logrus text, and a plain
line to stderr; without it stderr gets the line, as JSON if that format was asked for. podman takes the JSON line or the
stderr of create and restore for its own error, containerd the last `level=error` line of the file.
Refuses to write "no such file or directory" or "executable file not found": podman takes these for a missing command.
Called once, at the top, by main.py.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from runtime_shim.arguments import Arguments

MISLEADING = (
    ("no such file or directory", "it does not exist"),
    ("no such file", "it does not exist"),
    ("executable file not found", "program is missing"),
)


def report(call: Arguments, text: str) -> None:
    """Write one error to every place where an engine looks for it."""
    line = sanitized(text)
    path, is_json = call.get_global("log"), call.get_global("log-format") == "json"
    if path:
        _append(path, json_line(line) if is_json else text_line(line))
    _write(2, json_line(line) if is_json and not path else f"vgpu-runtime: {line}\n")


def message_of(error: BaseException) -> str:
    """What failed, and what to do about it."""
    remedy = getattr(error, "remedy", "")
    text = str(error) or type(error).__name__
    if not remedy:
        return f"unexpected {type(error).__name__}: {text}"
    notes = "".join(f" {note}." for note in getattr(error, "__notes__", ()))
    ending = "" if text.endswith((".", "!", "?")) else "."
    return f"{text}{ending}{notes} {remedy}"


def sanitized(text: str) -> str:
    """One line, without the words that podman misreads."""
    line = " ".join(text.split())
    for misread, instead in MISLEADING:
        at = line.lower().find(misread)
        while at >= 0:
            line = line[:at] + instead + line[at + len(misread) :]
            at = line.lower().find(misread)
    return line


def json_line(text: str) -> str:
    """As logrus' JSON formatter writes it."""
    import json  # noqa: PLC0415 - the good case does without

    return json.dumps({"level": "error", "msg": text, "time": _now()}, separators=(",", ":")) + "\n"


def text_line(text: str) -> str:
    """As logrus' text formatter writes it to a file."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'time="{_now()}" level=error msg="{quoted}"\n'


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _append(path: str, line: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        return  # stderr is left
    try:
        _write(descriptor, line)
    finally:
        os.close(descriptor)


def _write(descriptor: int, line: str) -> None:
    try:
        os.write(descriptor, line.encode("utf-8", "backslashreplace"))
    except OSError:
        return  # the engine has closed it; the exit status is left
