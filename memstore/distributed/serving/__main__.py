"""The program of an agent that `memstore.join` starts: `python -m memstore.distributed.serving ROOT ADDRESS ...`.

It is `memstore serve` without the command line's imports.
"""

from __future__ import annotations

import argparse
import sys

from memstore.distributed.serving.agent import serve
from memstore.distributed.serving.supervision import say
from memstore.errors import MemstoreError

_REFUSED = 3  # exit code, as of the command line


def main() -> None:
    parser = argparse.ArgumentParser(prog="memstore.distributed.serving")
    parser.add_argument("root")
    parser.add_argument("address")
    parser.add_argument("--join", action="append", default=[])
    parser.add_argument("--new", action="store_true")
    parser.add_argument("--moved", action="store_true")
    parser.add_argument("--no-owner", action="store_false", dest="owner")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--promote-after", type=float)
    parser.add_argument("--remove-after", type=float)
    parser.add_argument("--replicas", default="")
    parser.add_argument("--on-missing", default="fail")
    parser.add_argument("--ready-fd", type=int)
    try:
        serve(**vars(parser.parse_args()))
    except (MemstoreError, OSError, ValueError) as error:
        say(str(error))
        sys.exit(_REFUSED)


if __name__ == "__main__":
    main()
