"""`memstore top`: which process holds what."""

from __future__ import annotations

import os

from memstore.cli import columns, render
from memstore.cli.group import as_json, cli, root
from memstore.engine import Holding, who_holds
from memstore.listing import open_keyspace, opened
from memstore.wording import count_of

_COMMAND = 16  # columns of a command, at least
_KEYS = 30  # columns of keys that a command leaves free, as far as there are such keys
_LONGEST = 200  # of a command in a file or a pipe
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
    if not columns.write(_TITLES, _fitted(list(map(_cells, found))), right=("pid", "held", "replaced")):
        render.console.print("no process has the store open or holds one of its values, as far as /proc shows")


def _cells(one: Holding) -> tuple[str, ...]:
    program, space, arguments = command_of(one.pid).partition(" ")
    command = f"{os.path.basename(program)}{space}{arguments}"
    live = render.size(one.live_bytes) if one.keys else "-"
    replaced = render.size(one.replaced_bytes) if one.replaced else "-"
    return str(one.pid), live, replaced, command, _names(one)


def _fitted(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Commands as long as the other columns leave room for."""
    room = _LONGEST
    if render.console.is_terminal and rows:
        pids, held, replaced, _, keys = (
            max(map(columns.width, map(render.escaped, cells))) for cells in zip(_TITLES, *rows, strict=True)
        )
        others = max(pids, columns.LEAST) + held + replaced + min(keys, _KEYS) + columns.gaps(len(_TITLES))
        room = max(_COMMAND, render.console.width - others)
    return [(*row[:3], columns.cut(row[3], room), row[4]) for row in rows]


def _names(one: Holding) -> str:
    keys = [*dict.fromkeys(one.keys), *(f"{key} (replaced)" for key in dict.fromkeys(one.replaced))]
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
