"""The program of an agent that `memstore.join` starts.

`python -m ...agent_process [--shared] [--no-homes] ROOT ADDRESS SEED [READY_FD]`. MEMSTORE_TRANSPORT says which way
bytes take, as `memstore serve --transport` does.
"""

from __future__ import annotations

import os
import sys

from memstore.distributed.serving.agent import serve
from memstore.distributed.serving.lines import say
from memstore.distributed.serving.ranks import NO_HOMES, SHARED, TRANSPORT_VARIABLE
from memstore.errors import MemstoreError

REFUSED = 3  # exit code, as of the command line


def main() -> None:
    options = {word for word in sys.argv[1:] if word in (SHARED, NO_HOMES)}
    root, address, seed, *ready_fd = [word for word in sys.argv[1:] if word not in options]
    try:
        transport, told = os.environ.get(TRANSPORT_VARIABLE, "auto"), int(ready_fd[0]) if ready_fd else None
        serve(
            root,
            address,
            join=[seed],
            is_home=NO_HOMES not in options,
            ready_fd=told,
            transport=transport,
            shared=SHARED in options,
        )
    except (MemstoreError, OSError, ValueError) as error:
        say(str(error))
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
