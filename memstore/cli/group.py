"""The group `memstore`, and the arguments and options that its commands share."""

from __future__ import annotations

import click

import memstore
from memstore.errors import MemstoreError
from memstore.listing import entries, open_keyspace

MISSING = 4  # exit code


def complete_key(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    try:
        with open_keyspace(context.params["root"], "r", timeout=1.0) as store:
            return [found.key for found, _ in zip(entries(store, incomplete), range(100), strict=False)]
    except (MemstoreError, OSError, KeyError):
        return []


root = click.argument("root", type=click.Path())
key = click.argument("key", shell_complete=complete_key)
path = click.argument("path", type=click.Path())
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(memstore.__version__, prog_name="memstore")
def cli() -> None:
    """Look into a memstore folder, and take care of it. ROOT is the folder, first everywhere.

    Exit codes: 0 done, 1 damage, loss or a difference, 2 wrong usage, 3 refused, 4 no such key.
    """
