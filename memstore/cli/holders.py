"""`memstore top`: which process holds what."""

from __future__ import annotations

import os

from memstore.cli import columns, render
from memstore.cli.group import as_json, cli, root
from memstore.engine import Holding, who_holds
from memstore.listing import open_keyspace, opened
from memstore.wording import count_of

_COMMAND = 16, 40  # characters: in a terminal of 80 columns, in a wide one
_OTHERS = 64  # columns of a terminal that are not the command's
_NAMED = 3  # keys
_TITLES = ("pid", "held", "replaced", "command", "keys")


@cli.command(short_help="Show which process holds what.")
@root
@as_json
def top(root: str, as_json: bool) -> None:
    """Show the processes that have the store open, or hold values of it; the one that holds most comes first.

    "replaced" are bytes of versions that were replaced or deleted, and stay as long as the process holds them.
    """
    with open_keyspace(root, "r") as store:
        found = [one for one in who_holds(opened(store)) if one.pid != os.getpid()]
    if as_json:
        render.print_json([{**render.plain(one), "command": command_of(one.pid)} for one in found])
        return
    if not columns.write(_TITLES, map(_cells, found), right=("pid", "held", "replaced")):
        render.console.print("no process has the store open or holds one of its values, as far as /proc shows")


def _cells(one: Holding) -> tuple[str, ...]:
    program, space, arguments = command_of(one.pid).partition(" ")
    command = f"{os.path.basename(program)}{space}{arguments}"
    least, most = _COMMAND
    room = max(least, min(most, render.console.width - _OTHERS)) if render.console.is_terminal else most
    command = command if len(command) <= room else f"{command[: room - 1]}…"
    live = render.size(one.live_bytes) if one.keys else "-"
    replaced = render.size(one.replaced_bytes) if one.replaced else "-"
    return str(one.pid), live, replaced, command, _names(one)


def _names(one: Holding) -> str:
    keys = list(dict.fromkeys([*one.keys, *one.replaced]))
    if not keys:
        return "(open)"
    more = len(keys) - _NAMED
    return ", ".join(keys[:_NAMED]) + (f" and {count_of(more, 'more', 'more')}" if more > 0 else "")


def command_of(pid: int) -> str:
    """Its command line, as /proc has it; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
