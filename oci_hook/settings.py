"""Reads /etc/vgpu/runtime.conf (docs/operations: runtime.conf).

Refuses a value that a key cannot have, by path and key; an unknown key is kept and ignored, so that an older version
reads a newer file. Called by the hook and the shim at every container start and by the agent and the commands.
"""

from __future__ import annotations

CONFIG_PATH = "/etc/vgpu/runtime.conf"

PROGRESS_FORMS = ("auto", "json", "none")
INJECT_FORMS = ("auto", "always", "never")
MODE_FORMS = ("driver", "staged")
STORE_FORMS = ("off", "on")
ARCHIVE_FORMS = ("embedded", "reference")
GROUP_FORMS = ("together", "alone")
_FORMS = {
    "progress": PROGRESS_FORMS,
    "inject": INJECT_FORMS,
    "mode": MODE_FORMS,
    "store": STORE_FORMS,
    "archive": ARCHIVE_FORMS,
    "group": GROUP_FORMS,
}


class Settings:
    """What an administrator may set, with the defaults."""

    __slots__ = (
        "archive",
        "deadline_checkpoint_s",
        "deadline_freeze_s",
        "deadline_restore_s",
        "driver_dir",
        "group",
        "inject",
        "library_dir",
        "log",
        "low_level_runtime",
        "mode",
        "other",
        "progress",
        "run_dir",
        "staging_reserve",
        "store",
        "store_dir",
    )

    def __init__(self) -> None:
        self.low_level_runtime: str | None = None
        self.deadline_restore_s = 220.0  # podman gives up after 240 s
        self.deadline_freeze_s = 120.0
        self.deadline_checkpoint_s = 900.0
        self.progress = "auto"
        self.inject = "auto"
        self.mode = "driver"
        self.staging_reserve = 0  # bytes
        self.store = "off"  # checkpoints hold secrets and take room: nobody keeps them who has not asked for it
        self.archive = "embedded"
        self.group = "together"
        self.store_dir = "/var/lib/vgpu/store"
        self.driver_dir: str | None = None
        self.log: str | None = None
        self.run_dir = "/run/vgpu"
        self.library_dir = "/usr/lib/vgpu-snapshot"
        self.other: dict[str, str] = {}


def read_settings(path: str = CONFIG_PATH, *, is_strict: bool = True) -> Settings:
    """The settings of this node; a missing file means the defaults.

    Not strict, a bad value leaves its key at the default: a broken file must not keep anyone from killing a container.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - pathlib costs 10 ms here
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return Settings()
    except OSError as error:
        if is_strict:
            raise _bad(path, f"cannot be read: {error.strerror}") from error
        return Settings()
    return parse_settings(text, path, is_strict=is_strict)


def parse_settings(text: str, path: str, *, is_strict: bool = True) -> Settings:
    """`key = value` lines; `#` begins a comment line."""
    settings = Settings()
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        key, equals, value = (part.strip() for part in stripped.partition("="))
        wrong = _take(settings, key, value) if equals and key else "is no 'key = value' line"
        if wrong and is_strict:
            raise _bad(path, f"line {number}: {key} {wrong}")
    return settings


def _take(settings: Settings, key: str, value: str) -> str | None:
    """Put one value in its place, or say what is wrong with it."""
    if key.startswith("deadline_") and key in Settings.__slots__:
        seconds = _seconds(value)
        if seconds is None:
            return f"must be a number of seconds above 0, not '{value}'"
        setattr(settings, key, seconds)
    elif key in ("low_level_runtime", "driver_dir", "log", "run_dir", "library_dir", "store_dir"):
        if not value.startswith("/"):
            return f"must be an absolute path, not '{value}'"
        setattr(settings, key, value.rstrip("/") or "/")
    elif key in _FORMS:
        if value not in _FORMS[key]:
            return f"must be one of {', '.join(_FORMS[key])}, not '{value}'"
        setattr(settings, key, value)
    elif key == "staging_reserve":
        size = bytes_of(value)
        if size is None:
            return f"must be a number of bytes, with K, M, G or T behind it or not, not '{value}'"
        settings.staging_reserve = size
    else:
        settings.other[key] = value
    return None


def bytes_of(value: str) -> int | None:
    """`40G` and the like; a letter counts in powers of 1024. None where it is no size."""
    scale = "KMGT".find(value[-1:].upper()) + 1 if value else 0
    digits = value[:-1] if scale else value
    return int(digits) << 10 * scale if digits.isascii() and digits.isdecimal() and len(digits) < 20 else None


def _seconds(value: str) -> float | None:
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0 < seconds < 1e9 else None  # NaN and infinity fail here too


def _bad(path: str, what: str) -> Exception:
    from vgpu_errors import BadConfiguration  # noqa: PLC0415 - the good case does without the error tree

    return BadConfiguration(path=path, what=what)
