"""Reads an OCI runtime command line by position and builds it again with changes.

Refuses nothing: what it does not know it keeps as it stands, because the low-level runtime is the judge of its own
options. The tables hold the options of runc 1.1-1.4 and crun 1.x that take a value; without them a value such as
`--image-path /x/checkpoint` could pass for a verb or a container id.
Called by main.py for every runtime call; imports nothing, because most calls only pass through.
Forms: reference table of recorded engine calls in docs/how-it-works.md (`--x v`, `--x=v`, `-x v`, `-long`, repeats).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

GLOBAL_VALUES = frozenset(("root", "log", "log-format", "log-level", "criu", "rootless", "cgroup-manager"))

_CREATE = frozenset(("bundle", "console-socket", "pidfd-socket", "pid-file", "preserve-fds", "config"))
VERB_VALUES = {
    "create": _CREATE,
    "run": _CREATE,
    "exec": frozenset(
        (
            "console-socket",
            "pidfd-socket",
            "cwd",
            "env",
            "user",
            "additional-gids",
            "process",
            "pid-file",
            "process-label",
            "apparmor",
            "cap",
            "preserve-fds",
            "cgroup",
        )
    ),
    "checkpoint": frozenset(
        (
            "image-path",
            "work-path",
            "parent-path",
            "status-fd",
            "page-server",
            "manage-cgroups-mode",
            "empty-ns",
            "network-lock",
        )
    ),
    "restore": frozenset(
        (
            "bundle",
            "console-socket",
            "pid-file",
            "image-path",
            "work-path",
            "manage-cgroups-mode",
            "empty-ns",
            "lsm-profile",
            "lsm-mount-context",
        )
    ),
    "delete": frozenset(()),
}
_CREATE_SHORT = {"b": "bundle", "d": "detach", "f": "config"}
SHORT_NAMES = {
    "create": _CREATE_SHORT,
    "run": _CREATE_SHORT,
    "exec": {
        "a": "apparmor",
        "c": "cap",
        "d": "detach",
        "e": "env",
        "g": "additional-gids",
        "p": "process",
        "t": "tty",
        "u": "user",
    },
    "checkpoint": {},
    "restore": {"b": "bundle", "d": "detach"},
    "delete": {"f": "force"},
}
HELP_NAMES = frozenset(("help", "h", "?", "usage"))


class Token:
    """One option with its value, or one positional argument (name None), and the words it was written with."""

    __slots__ = ("name", "value", "words")

    def __init__(self, name: str | None, value: str | None, words: tuple[str, ...]) -> None:
        self.name = name
        self.value = value
        self.words = words


class Arguments:
    """A runtime call: program, global options, verb, verb options and positional arguments, in their written order."""

    __slots__ = ("global_tokens", "is_incomplete", "program", "rest", "verb", "verb_tokens")

    def __init__(
        self,
        program: str,
        global_tokens: list[Token],
        verb: str | None,
        verb_tokens: list[Token],
        is_incomplete: bool,
    ) -> None:
        self.program = program
        self.global_tokens = global_tokens
        self.verb = verb
        self.verb_tokens = verb_tokens
        self.rest = [word for token in verb_tokens if token.name is None for word in token.words]
        self.is_incomplete = is_incomplete

    def get(self, name: str, default: str | None = None) -> str | None:
        """The value of a verb option; of repeated ones the last, as both runtimes take it."""
        return _last_value(self.verb_tokens, name, default)

    def get_global(self, name: str, default: str | None = None) -> str | None:
        """The value of an option written before the verb."""
        return _last_value(self.global_tokens, name, default)

    def has(self, name: str) -> bool:
        """Whether a verb option was given; `--name=false` counts as not given."""
        given = [token for token in self.verb_tokens if token.name == name]
        return bool(given) and given[-1].value not in ("false", "False", "FALSE", "F", "f", "0")

    @property
    def container_id(self) -> str | None:
        """The id: the first positional argument of exec, the last one of every other verb.

        The last, so that the value of an option unknown to the tables is not taken for it: all engines write the id last.
        """
        if self.verb == "exec":
            return self.rest[0] if self.rest else None
        return self.rest[-1] if self.rest else None

    @property
    def remaining(self) -> list[str]:
        """What follows the container id (the command of exec), or stands beside it."""
        if self.verb == "exec":
            return self.rest[1:]
        return self.rest[:-1]

    @property
    def asks_for_help(self) -> bool:
        """`RT checkpoint --help` is how podman probes for support: the low-level runtime answers."""
        return any(token.name in HELP_NAMES for token in self.verb_tokens)

    @property
    def global_words(self) -> list[str]:
        """The words before the verb, for further calls of the low-level runtime about the same container."""
        return list(_words(self.global_tokens))

    def argv_with(
        self, replacements: Mapping[str, str | bool | None] | None = None, *, program: str | None = None
    ) -> list[str]:
        """The whole command line again, each named verb option replaced once.

        A string gives an option its value, True sets a switch, None or False leaves the option out. Without
        replacements the words come back exactly as they were written.
        """
        changes = dict(replacements or {})
        kept = [token for token in self.verb_tokens if token.name is None or token.name not in changes]
        added = [word for name, value in changes.items() for word in _written(name, value)]
        words = [program if program is not None else self.program, *self.global_words]
        if self.verb is not None:
            words.append(self.verb)
        return [*words, *added, *_words(kept)]


def parse(argv: Sequence[str]) -> Arguments:
    """Split a command line; never fails, see `is_incomplete` for an option whose value is missing."""
    words = list(argv[1:])
    global_tokens, at, incomplete = _options_before_verb(words)
    program = argv[0] if argv else ""
    if at >= len(words):
        return Arguments(program, global_tokens, None, [], incomplete)
    verb = words[at]
    verb_tokens, verb_incomplete = _verb_tokens(verb, words[at + 1 :])
    return Arguments(program, global_tokens, verb, verb_tokens, incomplete or verb_incomplete)


def _options_before_verb(words: list[str]) -> tuple[list[Token], int, bool]:
    tokens: list[Token] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        token, incomplete = _option(words, at, GLOBAL_VALUES, {})
        tokens.append(token)
        at += len(token.words)
        if incomplete:
            return tokens, at, True
    if at < len(words) and words[at] == "--":
        tokens.append(Token("--", None, ("--",)))
        at += 1
    return tokens, at, False


def _verb_tokens(verb: str, words: list[str]) -> tuple[list[Token], bool]:
    """Options may stand behind the id, except for exec: there the command begins."""
    values, shorts = VERB_VALUES.get(verb, frozenset()), SHORT_NAMES.get(verb, {})
    tokens: list[Token] = []
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            tokens.append(Token("--", None, (word,)))
            tokens.extend(Token(None, None, (later,)) for later in words[at + 1 :])
            break
        if not word.startswith("-") or word == "-":
            if verb == "exec":
                tokens.extend(Token(None, None, (later,)) for later in words[at:])
                break
            tokens.append(Token(None, None, (word,)))
            at += 1
            continue
        token, incomplete = _option(words, at, values, shorts)
        tokens.append(token)
        at += len(token.words)
        if incomplete:
            return tokens, True
    return tokens, False


def _option(words: list[str], at: int, values: frozenset[str], shorts: Mapping[str, str]) -> tuple[Token, bool]:
    """One option and whether its value is missing."""
    word = words[at]
    is_short = not word.startswith("--")
    written, equals, value = word.lstrip("-").partition("=")
    name = shorts.get(written, written)
    if equals:
        return Token(name, value, (word,)), False
    if name in values:
        if at + 1 >= len(words):
            return Token(name, None, (word,)), True
        return Token(name, words[at + 1], (word, words[at + 1])), False
    attached = shorts.get(written[:1]) if is_short and len(written) > 1 else None
    if attached in values:  # crun's argp also takes -bBUNDLE
        return Token(attached, written[1:], (word,)), False
    return Token(name, None, (word,)), False


def _last_value(tokens: list[Token], name: str, default: str | None) -> str | None:
    for token in reversed(tokens):
        if token.name == name:
            return token.value
    return default


def _words(tokens: list[Token]) -> Iterator[str]:
    for token in tokens:
        yield from token.words


def _written(name: str, value: str | bool | None) -> tuple[str, ...]:
    if value is None or value is False:
        return ()
    if value is True:
        return ("--" + name,)
    return ("--" + name, value)
