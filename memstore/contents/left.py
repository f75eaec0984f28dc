"""Reads what a host has left on storage that hosts share, in a process of its own.

    python -m memstore.contents.left FOLDER HOST-ID

An index process runs it where there are sharded values: to merge their parts takes torch, which it doesn't import. What
is found goes to the standard output, as msgpack of `[[key, record], ...]`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import msgspec

from memstore.contents.merging import content_of_headers
from memstore.engine import read_left


def main(arguments: Sequence[str]) -> None:
    folder, store = arguments
    left = read_left(folder, store, partial(content_of_headers, of_all_ranks=True))
    sys.stdout.buffer.write(msgspec.msgpack.encode(left))


if __name__ == "__main__":
    main(sys.argv[1:])
