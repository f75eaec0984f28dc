"""The group `memstore`, and the arguments and options that its commands share."""

from __future__ import annotations

import math
from typing import Any

import click

import memstore
from memstore.cli.completing import (
    complete_attempt,
    complete_key,
    complete_leaf,
    complete_pending,
    complete_prefix,
)
from memstore.errors import PermissionDeniedError
from memstore.listing import near

__all__ = [
    "Seconds",
    "allow_pickle",
    "as_json",
    "cli",
    "complete_attempt",
    "complete_key",
    "complete_leaf",
    "complete_pending",
    "complete_prefix",
    "key",
    "opened_to_read",
    "path",
    "root",
]


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
    "Look": ("stores", "ls", "tree", "info", "get", "diff", "watch", "top", "stats"),
    "Change": ("put", "cp", "rm", "clear", "destroy", "abort"),
    "Other files": ("attach", "export", "convert", "snapshot"),
    "Upkeep": ("verify", "repair", "gc", "bench"),
    "Several hosts": ("serve", "status", "remove"),
    "Shells": ("completion",),
}


_NEVER_MEANT = frozenset(("abort", "clear", "destroy", "gc", "remove", "repair", "rm"))  # what can't be taken back


class _Group(click.Group):
    """Its help has the commands by what they are for. A word that isn't known never leads to one that removes."""

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
    """The store for a command that changes nothing, but may have to wait for who does; as far as it may write there."""
    try:
        return memstore.open(root, "r+", allow_pickle=allow_pickle)
    except PermissionDeniedError:
        return memstore.open(root, "r", allow_pickle=allow_pickle)
