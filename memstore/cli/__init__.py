"""The command line: `memstore COMMAND ROOT ...`. Arguments and printing only; it needs the extra `cli`.

commands    all of them, and exit codes        group       what they share
listing     keys                               entries     one of them, looked at; deleted, copied
files       of other formats: put, served, written
values      one value, shown or written        figures     statistics and histograms, as text
diffs       two values, compared               looking     what these look into: keys and files, taken apart
stores      the stores of this machine, cleared and removed
upkeep      about a store as a whole           holders     which process holds what
watch       the live table                     rates       how often keys are put
convert     checkpoints of one format made into another's
snapshots   about folders of snapshots         hosts       about a store on several hosts
selftest    `memstore bench`                   shards      pictures of who has put what
completion  scripts for shells                 completing  the keys that these offer
render      tables, trees, JSON, progress      columns     rows in columns, as they come
words       errors, in the words of the command line; codes: exit codes
nowhere     what is said of a ROOT where there is no store
"""

from __future__ import annotations

import sys

from memstore.cli.codes import INTERRUPTED, REFUSED


def main() -> None:
    """The entry point of the script `memstore`."""
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
