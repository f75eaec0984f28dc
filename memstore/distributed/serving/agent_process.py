"""The program of an agent that `memstore.join` starts: `python -m ...agent_process ROOT ADDRESS SEED [READY_FD]`.

MEMSTORE_TRANSPORT says which way bytes take, as `memstore serve --transport` does.
"""

from __future__ import annotations

import os
import sys

from memstore.distributed.serving.agent import serve
from memstore.distributed.serving.lines import say
from memstore.distributed.serving.ranks import TRANSPORT_VARIABLE
from memstore.errors import MemstoreError

REFUSED = 3  # exit code, as of the command line


def main() -> None:
    root, address, seed, *ready_fd = sys.argv[1:]
    try:
        transport = os.environ.get(TRANSPORT_VARIABLE, "auto")
        serve(root, address, join=[seed], ready_fd=int(ready_fd[0]) if ready_fd else None, transport=transport)
    except (MemstoreError, OSError, ValueError) as error:
        say(str(error))
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
