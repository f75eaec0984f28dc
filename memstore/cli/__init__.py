"""The command line: `memstore COMMAND ROOT ...`. Arguments and printing only; it needs the extra `cli`.

commands      all of them, and what becomes of their errors
group         what commands share: arguments, exit codes; the script by which a shell completes keys
keys          commands about keys: lists, single ones, and the live table of `memstore watch`
values        commands about values: get, diff; a key or a file, taken apart; tensors as text
files         commands about files of other formats, conversions, snapshots
stores        commands about whole stores, also on several hosts; what `memstore bench` measures
render        output: lines, trees, JSON, progress bars, rows in columns, pictures of shards
messages      error messages, in the words of the command line
"""

from __future__ import annotations

import sys

_REFUSED, _INTERRUPTED = 3, 130  # as in `group`, which needs click itself


def main() -> None:
    """Runs a command: the entry point of the script `memstore`."""
    try:
        from memstore.cli.commands import run

        run()
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        print("memstore: the command line needs click and rich: pip install click rich", file=sys.stderr)
        sys.exit(_REFUSED)
    except KeyboardInterrupt:  # while it starts
        sys.exit(_INTERRUPTED)
