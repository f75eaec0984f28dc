"""The program of an agent that `memstore.join` starts.

`python -m ...agent_process [--shared] ROOT ADDRESS SEED [READY_FD]`. MEMSTORE_TRANSPORT says which way bytes take, as
`memstore serve --transport` does.
"""

from __future__ import annotations

import os
import sys

from memstore.distributed.serving.agent import serve
from memstore.distributed.serving.lines import say
from memstore.distributed.serving.ranks import TRANSPORT_VARIABLE
from memstore.errors import MemstoreError

SHARED = "--shared"
REFUSED = 3  # exit code, as of the command line


def main() -> None:
    words = [word for word in sys.argv[1:] if word != SHARED]
    root, address, seed, *ready_fd = words
    shared = len(words) < len(sys.argv) - 1
    try:
        transport, told = os.environ.get(TRANSPORT_VARIABLE, "auto"), int(ready_fd[0]) if ready_fd else None
        serve(root, address, join=[seed], ready_fd=told, transport=transport, shared=shared)
    except (MemstoreError, OSError, ValueError) as error:
        say(str(error))
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
