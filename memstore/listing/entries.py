"""What a store holds, told from records alone: no tensor is touched, and torch is not imported.

For the command line and for `repr`s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from memstore.engine import Record, index, plan_bytes
from memstore.keys import encode_prefix
from memstore.listing.keyspace import Keyspace, opened, timeout_of
from memstore.wording import age, size

_BITS = re.compile(r"[0-9]+")  # in the name of a dtype


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry, as `memstore ls` shows it."""

    key: str
    version: int
    kind: str
    nbytes: int
    created: float  # Unix seconds
    leaves: int  # tensors


COLUMNS = ("key", "version", "kind", "leaves", "size", "age")


def cells(one: Listed) -> tuple[str, ...]:
    """As text, under COLUMNS."""
    return one.key, str(one.version), one.kind, str(one.leaves), size(one.nbytes), age(one.created)


def entries(store: Keyspace, prefix: str = "") -> Iterator[Listed]:
    """The entries whose keys start with `prefix`, sorted, read in pages."""
    for key, record in index.records_from(partial(opened, store), encode_prefix(prefix), timeout_of(store)):
        yield _listed(key, record)


def _listed(key: bytes, record: Record) -> Listed:
    leaves = msgspec.msgpack.decode(plan_bytes(record.description))[1]
    nbytes = _nbytes(leaves) if record.boxes is not None else record.nbytes
    return Listed(key.decode(), record.version, record.kind, nbytes, record.created, len(leaves))


def _nbytes(leaves: list[Any]) -> int:
    """Of the leaves, by their places: the data section of an entry in boxes has headers in it, and room."""
    sizes: dict[int, int] = {}
    for leaf in leaves:
        if not isinstance(leaf, int):  # the same tensor as an earlier one
            dtype, shape, offset = leaf[:3]
            bits = _BITS.search(dtype)
            itemsize = max(int(bits[0]), 8) // 8 if bits else 1
            sizes[offset] = max(sizes.get(offset, 0), math.prod(shape) * itemsize)
    return sum(sizes.values())
