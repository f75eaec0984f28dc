"""The group `memstore`, the arguments and options that its commands share, exit codes, and what shells complete.

complete_*    keys of the store that the line names, and leaves of a key. Of many keys their starts are offered, as
              folders are of files. Keys with control characters can't be sent to a shell, and are left out
cli           the group: commands are registered with `@cli.command()`. `root`, `key`, `path`, `as_json` and
              `allow_pickle` are their shared arguments and options
completion    the command that prints the script of a shell

Each shell sends its line up to the cursor, and gets lines of `kind,text` for the last word of it: `plain`, `start` (of
many keys: more is to be typed, so no space comes behind it), `dir` and `file`. Click's own scripts send words: bash
ends those at colons, and the texts come back without quotes, which keys with spaces need.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

import memstore
from memstore.errors import MemstoreError, PermissionDeniedError
from memstore.listing import near

# --- Exit codes, as docs/command-line.md has them; 0 is done, and 2, a wrong call, is click's too --------------------


DAMAGED = DIFFERENT = SILENT = 1  # damage was found, or something was lost; two values differ; hosts don't answer
WRONG = 2
REFUSED = 3
MISSING = 4
INTERRUPTED = 130


# --- What shells complete --------------------------------------------------------------------------------------------


_OFFERED = 100
_READ = 200_000  # keys that are looked at
_PATIENCE = 1.0  # seconds


def complete_key(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Completes keys; where there are many, their starts up to the next "/"."""
    return keys_of(context.params.get("root", ""), incomplete)


complete_prefix = complete_key


def complete_pending(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Completes keys that wait for parts of a sharded put."""
    return _pending(context.params.get("root", ""), None, incomplete)


def complete_attempt(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Completes the attempts of the key that stands before."""
    return _pending(context.params.get("root", ""), context.params.get("key"), incomplete)


def _pending(root: str, key: str | None, incomplete: str) -> list[str]:
    """Returns the keys that wait, or the attempts of one."""
    from memstore.listing import open_keyspace

    try:
        with open_keyspace(_expanded(root), "r", timeout=_PATIENCE) as store:
            names = [one.key if key is None else one.attempt for one in store.pending() if key in (None, one.key)]
    except (MemstoreError, OSError, TypeError):
        return []
    return [name for name in sorted(set(names)) if name.startswith(incomplete) and name.isprintable()][:_OFFERED]


def complete_leaf(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Completes names of leaves of the key that stands before."""
    from memstore._arguments import encode_key
    from memstore.engine import index
    from memstore.listing import UnknownKindError, open_keyspace, opened, outline

    try:
        with open_keyspace(_expanded(context.params["root"]), "r", timeout=_PATIENCE) as store:
            record = index.find(opened(store), encode_key(context.params["key"]), _PATIENCE)
        leaves = [] if record is None else outline(record.description)[1]
    except (MemstoreError, OSError, KeyError, UnknownKindError):
        return []
    names = ("/".join(map(str, leaf.name)) for leaf in leaves if leaf.name)
    return [name for name in names if name.startswith(incomplete) and name.isprintable()][:_OFFERED]


def keys_of(root: str, incomplete: str) -> list[str]:
    """Returns the keys of a store that start so; none, if there is no store that can be read."""
    from memstore._arguments import encode_prefix
    from memstore.engine import index
    from memstore.listing import open_keyspace, opened

    try:
        with open_keyspace(_expanded(root), "r", timeout=_PATIENCE) as store:
            keys = index.keys_from(partial(opened, store), encode_prefix(incomplete), _PATIENCE)
            names = map(bytes.decode, itertools.islice(keys, _READ))
            found = [key for key in names if key.isprintable()]
    except (MemstoreError, OSError, TypeError):
        return []
    return found if len(found) <= _OFFERED else starts_of(found, len(incomplete))


def _expanded(path: str) -> str:
    """Expands a path as a shell would: what is completed is what was typed."""
    return os.path.expanduser(os.path.expandvars(path))


def starts_of(keys: Sequence[str], start: int) -> list[str]:
    """Returns starts that keys have in common: up to the first "/" beyond `start` characters, or a next character.

    Every key has one of them, so that a shell completes no further than all that is meant.
    """
    found = dict.fromkeys(key[: key.find("/", start) + 1 or None] for key in keys)
    if len(found) <= _OFFERED:
        return list(found)
    common = len(os.path.commonprefix(list(found)))
    cut = dict.fromkeys(key[: common + 1] for key in found)
    while len(finer := dict.fromkeys(key[: common + 2] for key in found)) <= _OFFERED:
        cut, common = finer, common + 1
    return list(cut)


# --- The group -------------------------------------------------------------------------------------------------------


class Seconds(click.FloatRange):
    """A number of seconds within a range, where click takes "nan" too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is no number of seconds.", param, ctx)
        return found


root = click.argument("root", type=click.Path(readable=False))
key = click.argument("key", shell_complete=complete_key)
path = click.argument("path", type=click.Path(readable=False))
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
allow_pickle = click.option(
    "--allow-pickle", is_flag=True, help="Read leaves that are pickles, which run code: trust whoever wrote them."
)


_SECTIONS = {
    "Look": ("stores", "ls", "tree", "info", "versions", "get", "diff", "watch", "top", "stats", "metrics", "ui"),
    "Change": ("put", "cp", "rm", "clear", "destroy", "abort"),
    "Other files": ("attach", "export", "convert", "snapshot", "checkpoints"),
    "Upkeep": ("quota", "spill", "verify", "repair", "gc", "bench"),
    "Several hosts": ("serve", "status", "policy", "drain", "promote", "remove"),
    "Shells": ("completion",),
}


_NEVER_MEANT = frozenset(
    ("abort", "clear", "destroy", "drain", "gc", "promote", "remove", "repair", "rm")
)  # what can't be taken back


class _Group(click.Group):
    """A group whose help has the commands by what they are for.

    A word that isn't known never leads to one that removes.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            like = near(name, set(self.commands) - _NEVER_MEANT)
            meant = f" Did you mean {' or '.join(map(repr, like))}?" if like else ""
            ctx.fail(f"No such command {name!r}.{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, names in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (f"{name:{width}}", self.commands[name].get_short_help_str(formatter.width))
                        for name in names
                        if name in self.commands
                    ]
                )


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(memstore.__version__, prog_name="memstore")
def cli() -> None:
    """Look into a memstore store and maintain it. ROOT, the first argument of most commands, is its folder.

    Exit codes: 0 done, 1 damage, loss, a difference or silent hosts, 2 wrong usage, 3 refused, 4 no such key,
    130 interrupted.
    """


def opened_to_read(root: str, *, allow_pickle: bool = False) -> memstore.Store:
    """Opens the store for a command that changes nothing, but may have to wait for who does.

    The command may write there, as far as this user may.
    """
    try:
        return memstore.open(root, "r+", allow_pickle=allow_pickle)
    except PermissionDeniedError:
        return memstore.open(root, "r", allow_pickle=allow_pickle)


# --- Scripts for shells ----------------------------------------------------------------------------------------------


_SPECIAL = frozenset(" \t\"'\\$`!&|;()<>*?[]{}~#^")
_SPECIAL_IN_QUOTES = frozenset('"\\$`')  # double ones
_BREAKS = ":="  # where bash begins a new word, which is all that it replaces

_BASH = """\
%(complete_func)s() {
    local kind text
    COMPREPLY=()
    while IFS=, read -r kind text; do
        case "$kind" in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            start) COMPREPLY+=("$text"); compopt -o nospace ;;
            plain) COMPREPLY+=("$text") ;;
        esac
    done < <(COMP_LINE="${COMP_LINE:0:COMP_POINT}" %(complete_var)s=bash_complete "$1" 2>/dev/null)
}

complete -F %(complete_func)s %(prog_name)s
"""

_ZSH = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a keys starts
    local line text
    for line in "${(@f)$(COMP_LINE="${(j: :)words[1,CURRENT]}" %(complete_var)s=zsh_complete $words[1] 2>/dev/null)}"
    do
        text="${line#*,}"
        case "${line%%%%,*}" in
            dir) _path_files -/ ;;
            file) _path_files ;;
            start) starts+=("$text") ;;
            plain) keys+=("$text") ;;
        esac
    done
    (( $#keys )) && compadd -- "${keys[@]}"
    (( $#starts )) && compadd -S "" -- "${starts[@]}"
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""

_FISH = """\
function %(complete_func)s
    set -l line (commandline -cp)
    for found in (env %(complete_var)s=fish_complete COMP_LINE="$line" %(prog_name)s 2>/dev/null)
        set -l parts (string split -m 1 , -- $found)
        switch $parts[1]
            case dir
                __fish_complete_directories (commandline -ct)
            case file
                __fish_complete_path (commandline -ct)
            case start plain
                echo -- $parts[2]
        end
    end
end

complete --no-files --command %(prog_name)s --arguments "(%(complete_func)s)"
"""


def words_of(line: str) -> tuple[list[str], str]:
    """Returns the words behind the command's name, and the one that is being typed: "" behind a space."""
    *before, last = split_arg_string(f"{line}|")  # which ends a word that is being typed, and is one else
    return before[1:], last.removesuffix("|")


def quoted(text: str, line: str) -> str:
    """Returns what bash puts in the place of the word: behind the last break, as it has to be typed."""
    _, word = words_of(line)
    quote = _open_quote(line)
    start = 0 if quote else max(word.rfind(char) for char in _BREAKS) + 1
    kept = text[start:]
    if quote == "'":
        return kept.replace("'", "'\\''")
    special = _SPECIAL_IN_QUOTES if quote else _SPECIAL
    return "".join(f"\\{char}" if char in special else char for char in kept)


def _open_quote(line: str) -> str:
    """Returns the quote in which a line ends; "" outside of quotes."""
    quote, is_escaped = "", False
    for char in line:
        if is_escaped:
            is_escaped = False
        elif char == "\\" and quote != "'":
            is_escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
    return quote


class _ByLine(ShellComplete):
    """A shell that sends its line, and gets lines."""

    def get_completion_args(self) -> tuple[list[str], str]:
        return words_of(os.environ["COMP_LINE"])

    def format_completion(self, item: CompletionItem[str]) -> str:
        kind = "start" if item.type == "plain" and item.value.endswith("/") else item.type
        return f"{kind},{self.format_text(item.value)}"

    def format_text(self, text: str) -> str:
        return text


class _Bash(_ByLine, BashComplete):
    source_template = _BASH

    def format_text(self, text: str) -> str:
        return quoted(text, os.environ["COMP_LINE"])


class _Zsh(_ByLine, ZshComplete):
    source_template = _ZSH


class _Fish(_ByLine, FishComplete):
    source_template = _FISH


for _shell in (_Bash, _Zsh, _Fish):
    add_completion_class(_shell)


@cli.command(short_help="Print the script by which a shell completes keys.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script by which a shell completes commands, keys and leaves.

    \b
    bash    eval "$(memstore completion bash)"       in ~/.bashrc
    zsh     eval "$(memstore completion zsh)"        in ~/.zshrc, behind compinit
    fish    memstore completion fish | source        in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "one of ours"
    click.echo(kind(cli, {}, "memstore", "_MEMSTORE_COMPLETE").source())
