"""`memstore completion`: scripts for shells. What they offer stands in `completing`.

Each shell sends its line up to the cursor, and gets lines of `kind,text` for the last word of it: `plain`, `start` (of
many keys: more is to be typed, so no space comes behind it), `dir` and `file`. Click's own scripts send words: bash
ends those at colons, and the texts come back without quotes, which keys with spaces need.
"""

from __future__ import annotations

import os

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

from memstore.cli.group import cli

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
    """The words behind the command's name, and the one that is being typed: "" behind a space."""
    *before, last = split_arg_string(f"{line}|")  # which ends a word that is being typed, and is one else
    return before[1:], last.removesuffix("|")


def quoted(text: str, line: str) -> str:
    """What bash puts in the place of the word that it completes: behind the last break, as it has to be typed."""
    _, word = words_of(line)
    quote = _open_quote(line)
    start = 0 if quote else max(word.rfind(char) for char in _BREAKS) + 1
    kept = text[start:]
    if quote == "'":
        return kept.replace("'", "'\\''")
    special = _SPECIAL_IN_QUOTES if quote else _SPECIAL
    return "".join(f"\\{char}" if char in special else char for char in kept)


def _open_quote(line: str) -> str:
    """The quote in which a line ends; "" outside of quotes."""
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
    """How all three are asked, and answer."""

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
