"""Writes the completion scripts of bash, zsh and fish for a tree of commands.

Pure: a tree in, a script out. The scripts know the commands of the version that wrote them and start no program, so
that completion costs nothing and does nothing. bash and zsh share one shape: a function that walks the words typed so
far down to a command, then offers that command's words. `vgpu completion` and `packaging/install.py` call it.
A library for this (argcomplete, shtab) would either run the program at every key or bring no more than these pages do.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vgpu_cli.command_tree import Command, Word

SHELLS = ("bash", "zsh", "fish")


def script(shell: str, root: Command) -> str:
    """The completion script of one shell."""
    return {"bash": bash, "zsh": zsh, "fish": fish}[shell](root)


# ---- bash ----------------------------------------------------------------------------------------

_BASH = """\
# bash completion for @PROG@; written by '@PROG@ completion bash'
_@ID@() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command=@PROG@ n
    COMPREPLY=()
    for ((n = 1; n < COMP_CWORD; n++)); do
        case "$command ${COMP_WORDS[n]}" in
@DESCENTS@
        esac
    done
    case "$command $previous" in
@VALUES@
    esac
    if [[ $current == -* ]]; then
        case "$command" in
@OPTIONS@
        esac
        return
    fi
    case "$command" in
@WORDS@
    esac
}
complete -F _@ID@ @PROG@
"""


def bash(root: Command) -> str:
    """For /usr/share/bash-completion/completions."""
    commands = list(root.walk())
    return _filled(
        _BASH,
        root,
        DESCENTS=_descents(root),
        VALUES=[
            _case(f"{command.name} {name}", f"{_bash_reply(word)}; return", 8)
            for command in commands
            for word in _values(root, command)
            for name in word.names
        ],
        OPTIONS=[_case(c.name, _bash_words(_option_names(c)), 12) for c in commands],
        WORDS=[_case(c.name, reply, 8) for c in commands if (reply := _bash_positional(c))],
    )


def _bash_words(words: Iterable[str]) -> str:
    return f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(words))} -- "$current"))'


def _bash_reply(word: Word) -> str:
    if word.choices:
        return _bash_words(word.choices)
    if word.is_folder:
        return 'compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$current")'
    if word.is_path:
        return 'compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$current")'
    return ":"


def _bash_positional(command: Command) -> str:
    if command.children:
        return _bash_words(child.words[-1] for child in command.children)
    word = _one_that_completes(command)
    return _bash_reply(word) if word else ""


# ---- zsh -----------------------------------------------------------------------------------------

_ZSH = """\
#compdef @PROG@
# zsh completion for @PROG@; written by '@PROG@ completion zsh'
_@ID@() {
    local command=@PROG@ n
    local -a offered
    for ((n = 2; n < CURRENT; n++)); do
        case "$command ${words[n]}" in
@DESCENTS@
        esac
    done
    case "$command ${words[CURRENT-1]}" in
@VALUES@
    esac
    if [[ ${words[CURRENT]} == -* ]]; then
        case "$command" in
@OPTIONS@
        esac
        _describe -o option offered
        return
    fi
    case "$command" in
@WORDS@
    esac
}
if [ "$funcstack[1]" = "_@ID@" ]; then
    _@ID@ "$@"
else
    compdef _@ID@ @PROG@
fi
"""


def zsh(root: Command) -> str:
    """For a folder of zsh's fpath, as `_vgpu`."""
    commands = list(root.walk())
    return _filled(
        _ZSH,
        root,
        DESCENTS=_descents(root),
        VALUES=[
            _case(f"{command.name} {name}", f"{_zsh_reply(word)}; return", 8)
            for command in commands
            for word in _values(root, command)
            for name in word.names
        ],
        OPTIONS=[
            _case(c.name, f"offered=({_zsh_pairs((n, w.help) for w in c.options for n in w.names)})", 12)
            for c in commands
        ],
        WORDS=[_case(c.name, reply, 8) for c in commands if (reply := _zsh_positional(c))],
    )


def _zsh_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    # _describe splits at the first colon; one in a word would have to be escaped.
    return " ".join(shlex.quote(f"{word.replace(':', chr(92) + ':')}:{text}") for word, text in pairs)


def _zsh_reply(word: Word) -> str:
    if word.choices:
        return f"compadd -- {shlex.join(word.choices)}"
    if word.is_folder:
        return "_files -/"
    return "_files" if word.is_path else ":"


def _zsh_positional(command: Command) -> str:
    if command.children:
        pairs = _zsh_pairs((child.words[-1], child.help) for child in command.children)
        return f"offered=({pairs}); _describe command offered"
    word = _one_that_completes(command)
    return _zsh_reply(word) if word else ""


# ---- fish ----------------------------------------------------------------------------------------

_FISH = """\
# fish completion for @PROG@; written by '@PROG@ completion fish'
function __@ID@_command
    set -l command @PROG@
    set -l skipped 0
    for word in (commandline -opc)[2..-1]
        if test $skipped = 1
            set skipped 0
            continue
        end
        switch "$command $word"
@DESCENTS@
        end
    end
    test "$command" = "$argv"
end
complete -c @PROG@ -f
@WORDS@
"""


def fish(root: Command) -> str:
    """For fish's vendor_completions.d."""
    commands = list(root.walk())
    return _filled(
        _FISH,
        root,
        DESCENTS=[
            *[_fish_case(c.name, f"set command {_fish_quote(c.name)}") for c in commands if c is not root],
            *[_fish_case(pattern, "set skipped 1") for pattern in _value_patterns(root)],
        ],
        WORDS=[line for command in commands for line in _fish_lines(root, command)],
    )


def _fish_case(pattern: str, action: str) -> str:
    return f"            case {_fish_quote(pattern)}\n                {action}"


def _fish_lines(root: Command, command: Command) -> Iterable[str]:
    head = f"complete -c {root.name} -n {_fish_quote(f'__{_identifier(root)}_command {command.name}')}"
    for child in command.children:
        yield f"{head} -a {_fish_quote(child.words[-1])} -d {_fish_quote(child.help)}"
    for word in command.options:
        names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in word.names)
        yield f"{head} {names}{_fish_value(word) if word.takes_value else ''} -d {_fish_quote(word.help)}"
    positional = None if command.children else _one_that_completes(command)
    if positional is not None:
        yield head + (f" -a {_fish_quote(' '.join(positional.choices))}" if positional.choices else " -F")


def _fish_value(word: Word) -> str:
    if word.choices:
        return f" -x -a {_fish_quote(' '.join(word.choices))}"
    if word.is_folder:
        return " -x -a '(__fish_complete_directories)'"
    return " -r -F" if word.is_path else " -x"


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# ---- shared --------------------------------------------------------------------------------------


def _values(root: Command, command: Command) -> Iterable[Word]:
    """Options whose next word is theirs; the top's stand behind a verb, too."""
    known = {name for word in command.options for name in word.names}
    above = (word for word in root.options if not known & set(word.names))
    return [word for word in (*command.options, *above) if word.takes_value]


def _value_patterns(root: Command) -> list[str]:
    """Commands with such an option behind them: the word that follows is no verb."""
    return [
        f"{command.name} {name}" for command in root.walk() for word in _values(root, command) for name in word.names
    ]


def _descents(root: Command) -> list[str]:
    """From a command and a word to the command below; the value of an option is passed over."""
    below = [_case(c.name, f"command={shlex.quote(c.name)}", 12) for c in root.walk() if c is not root]
    return below + [_case(pattern, "((n++))", 12) for pattern in _value_patterns(root)]


def _option_names(command: Command) -> list[str]:
    return [name for word in command.options for name in word.names]


def _one_that_completes(command: Command) -> Word | None:
    """The positional that the shell can complete; where several stand behind each other they name the same thing."""
    fit = [word for word in command.positionals if word.choices or word.is_path or word.is_folder]
    return fit[0] if fit else None


def _case(pattern: str, action: str, indent: int) -> str:
    return f"{' ' * indent}{shlex.quote(pattern)}) {action} ;;"


def _identifier(root: Command) -> str:
    return re.sub(r"\W", "_", root.name)


def _filled(template: str, root: Command, **blocks: list[str]) -> str:
    text = template.replace("@PROG@", root.name).replace("@ID@", _identifier(root))
    for name, lines in blocks.items():
        text = text.replace(f"@{name}@", "\n".join(lines))
    return text
