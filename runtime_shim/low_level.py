"""The runtime that does the work: runc, crun, or another shim such as nvidia-container-runtime in the chain.

Found by absolute path, never through PATH: engines call `kill` and `delete` with an environment that has none.
Refuses to be its own low-level runtime. `replace_process` is the whole of every verb that only passes through, so this
module imports nothing at its top but what the interpreter has loaded anyway.
"""

from __future__ import annotations

# `signal` wraps this module in enums, 3 ms of the 25 ms that a call may cost (bench/shim_passthrough.py).
import _signal  # type: ignore[import-not-found,unused-ignore]
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from oci_hook.settings import Settings
    from runtime_shim.arguments import Arguments
    from runtime_shim.supervise import Finished

KNOWN_PATHS = ("/usr/bin/runc", "/usr/sbin/runc", "/usr/bin/crun")
VERSION_CALL_S = 10.0
COERCED_LOCALES = ("C.UTF-8", "C.utf8", "UTF-8")


class LowLevel:
    """One low-level runtime by its absolute path."""

    __slots__ = ("_known", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self._known: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """runc, crun...: of a chain the innermost, since that one makes the images."""
        return self._ask()[0]

    def version(self) -> str:
        """Its version, "unknown" if it does not say."""
        return self._ask()[1]

    def replace_process(self, call: Arguments) -> NoReturn:
        """Become the low-level runtime, as if the engine had started it; argv[0] is its own path, as it would be then."""
        for ignored_by_python in (_signal.SIGPIPE, _signal.SIGXFSZ):
            _signal.signal(ignored_by_python, _signal.SIG_DFL)
        try:
            os.execv(self.path, call.argv_with(program=self.path))  # noqa: S606 - keeps the C environment as it is
        except OSError as error:
            raise _missing(self.path, error.strerror) from error

    def call(
        self, global_words: Sequence[str], verb: str, *words: str, deadline_s: float, check: bool = True
    ) -> Finished:
        """A further call about the same container, its output kept.

        The engine's --log is left out: what fails here is not the engine's error. With `check` a failure raises.
        """
        from runtime_shim.supervise import run_child  # noqa: PLC0415 - verbs that pass through never come here
        from vgpu_errors import DeadlineExceeded, RuntimeFailed  # noqa: PLC0415

        done = run_child(
            [self.path, *_without_log(global_words), verb, *words],
            deadline_s=deadline_s,
            capture_stdout=True,
            capture_stderr=True,
            forwards_signals=False,
        )
        if check and done.has_timed_out:
            raise DeadlineExceeded(phase=f"{self.path} {verb}", seconds=deadline_s)
        if check and done.status != 0:
            what = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise RuntimeFailed(runtime=self.path, verb=verb, status=done.status, what=what or "it gave no reason")
        return done

    def _ask(self) -> tuple[str, str]:
        if self._known is None:
            from vgpu_errors import VgpuError  # noqa: PLC0415

            try:
                text = self.call((), "--version", deadline_s=VERSION_CALL_S).stdout.decode("utf-8", "replace")
            except VgpuError:
                text = ""
            self._known = parse_version(text) or (os.path.basename(self.path), "unknown")  # noqa: PTH119
        return self._known


def choose(settings: Settings) -> LowLevel:
    """The configured runtime, else the first one that is installed."""
    if settings.low_level_runtime is not None:
        return _refuse_itself(LowLevel(settings.low_level_runtime))
    for path in KNOWN_PATHS:
        if os.access(path, os.X_OK):
            return LowLevel(path)
    raise _missing("an OCI runtime", f"none of {', '.join(KNOWN_PATHS)} is there")


def parse_version(text: str) -> tuple[str, str] | None:
    """Name and version out of `RT --version`; a chain prints one after the other, the innermost last."""
    found = None
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 3 and words[1].rstrip(":") == "version":
            found = (words[0], words[2])
    return found


def leave_no_trace() -> None:
    """Take back what the interpreter did to the environment: in the C locale it sets LC_CTYPE (PEP 538).

    /proc/self/environ is the environment as the engine gave it; a variable of the user's own comes back as it was.
    """
    if os.environ.get("LC_CTYPE") not in COERCED_LOCALES:
        return
    try:
        with open("/proc/self/environ", "rb") as file:  # noqa: PTH123 - pathlib costs 10 ms at every call
            given = file.read().split(b"\0")
    except OSError:
        return
    for entry in given:
        if entry.startswith(b"LC_CTYPE="):
            value = os.fsdecode(entry[len(b"LC_CTYPE=") :])
            if value != os.environ["LC_CTYPE"]:
                os.environ["LC_CTYPE"] = value
            return
    del os.environ["LC_CTYPE"]


def _without_log(global_words: Sequence[str]) -> list[str]:
    from runtime_shim.arguments import parse  # noqa: PLC0415

    tokens = parse(["", *global_words]).global_tokens
    return [word for token in tokens if token.name not in ("log", "log-format") for word in token.words]


def _refuse_itself(low_level: LowLevel) -> LowLevel:
    import sys  # noqa: PLC0415

    try:
        is_itself = os.path.samefile(low_level.path, sys.argv[0])  # noqa: PTH121
    except OSError:
        return low_level
    if is_itself:
        from vgpu_errors import BadConfiguration  # noqa: PLC0415

        raise BadConfiguration(path="low_level_runtime", what=f"{low_level.path} is vgpu-runtime itself")
    return low_level


def _missing(tool: str, what: str | None) -> Exception:
    from vgpu_errors import ToolMissing  # noqa: PLC0415 - the good case does without the error tree

    return ToolMissing(tool=tool, what=what)
