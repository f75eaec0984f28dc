"""The command line: `memstore COMMAND ROOT ...`. Arguments and printing only; it needs the extra `cli`.

commands    all of them, and exit codes      group       what they share
entries     about keys and their values      upkeep      about a store as a whole
watch       the live table                   selftest    `memstore bench`
snapshots   about folders of snapshots           hosts       about a store on several hosts
render      tables, trees, JSON, progress
"""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point of the script `memstore`."""
    try:
        from memstore.cli.commands import run
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit("memstore: the command line needs click and rich: pip install click rich")
    run()
