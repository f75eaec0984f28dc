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
from memstore.listing.objects import OBJECT, object_types
from memstore.listing.outline import is_one_array, type_name
from memstore.wording import age, count_of, size

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
    type: str  # of the value: "TensorDict[3]"; of an entry whose rows are written in place its kind
    dtype: str | None = None  # of a value that is a single array; None: it is another one
    shape: tuple[int, ...] | None = None

    @property
    def content(self) -> str:
        """ "float32 [3, 4]", or "2 leaves"."""
        if self.dtype is not None:
            return f"{self.dtype} {list(self.shape or ())}"
        return count_of(self.leaves, "leaf", "leaves") if self.leaves else ""


COLUMNS = ("key", "type", "content", "size", "version", "age")


def cells(one: Listed) -> tuple[str, ...]:
    """As text, under COLUMNS."""
    return one.key, one.type, one.content, size(one.nbytes), str(one.version), age(one.created)


def entries(store: Keyspace, prefix: str = "", *, timeout: float | None = None) -> Iterator[Listed]:
    """The entries whose keys start with `prefix`, sorted, read in pages. timeout: of a page; None: the store's own."""
    within = timeout_of(store) if timeout is None else timeout
    for key, record in index.records_from(partial(opened, store), encode_prefix(prefix), within):
        yield _listed(key, record)


def _listed(key: bytes, record: Record) -> Listed:
    tree, leaves, _ = msgspec.msgpack.decode(plan_bytes(record.description))
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    if is_one_array(tree):
        dtype, shape = leaves[0][0], tuple(leaves[0][1])
    kind = type_name(tree) if not record.is_mutable else record.kind
    if kind == OBJECT:
        kind = next(iter(object_types(record.objects)), OBJECT)
    nbytes = _nbytes(record, leaves)
    return Listed(key.decode(), record.version, record.kind, nbytes, record.created, len(leaves), kind, dtype, shape)


def value_bytes(record: Record) -> int:
    """Of its tensors, as `Store.info` says them."""
    return _nbytes(record, msgspec.msgpack.decode(plan_bytes(record.description))[1])


def _nbytes(record: Record, leaves: list[Any]) -> int:
    """Of the leaves, by their places, where the data section has headers of files in it too."""
    if record.boxes is None and record.adopted is None:
        return record.nbytes
    sizes: dict[int, int] = {}
    for leaf in leaves:
        if not isinstance(leaf, int):  # the same tensor as an earlier one
            dtype, shape, offset = leaf[:3]
            bits = _BITS.search(dtype)
            itemsize = max(int(bits[0]), 8) // 8 if bits else 1
            sizes[offset] = max(sizes.get(offset, 0), math.prod(shape) * itemsize)
    return sum(sizes.values())
