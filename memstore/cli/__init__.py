"""The command line: `memstore COMMAND ROOT ...`. Arguments and printing only; it needs the extra `cli`.

commands      all of them, what becomes of their errors, and exit codes (`codes`)
group         what commands share; the script by which a shell completes keys
keys          commands about keys: lists, and single ones
values        commands about values: get, diff
files         commands about files of other formats, conversions, snapshots
stores        commands about whole stores; hosts: about a store on several hosts
inspection    a key or a file, taken apart for these
figures       statistics and histograms, as text
watch         the live table of `memstore watch`; bench: what `memstore bench` measures
render        output: lines, trees, JSON, progress bars, rows in columns, pictures of shards
messages      error messages, in the words of the command line
"""

from __future__ import annotations

import sys

from memstore.cli.codes import INTERRUPTED, REFUSED


def main() -> None:
    """Runs a command: the entry point of the script `memstore`."""
    try:
        from memstore.cli.commands import run

        run()
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print("memstore: the command line needs click and rich: pip install click rich", file=sys.stderr)
        sys.exit(REFUSED)
    except KeyboardInterrupt:  # while it starts
        sys.exit(INTERRUPTED)
