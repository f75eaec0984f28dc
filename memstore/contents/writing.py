"""What a put stores: a value taken apart, and the draft that tells the engine what to write of it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import xxhash

from memstore import structure
from memstore.abandoned import ABANDONED, check_abandoned
from memstore.contents.checksums import CHECKSUM_SIZE, leaf_checksums
from memstore.engine import (
    HEADER_LIMIT,
    OBJECTS_IN_RECORD,
    SMALL,
    Content,
    Draft,
    Header,
    Path,
    Root,
    WritableMemory,
    check_header,
    resource_errors,
)
from memstore.errors import UnsupportedValueError
from memstore.structure import modes

_NEXT_IN_SEGMENTS = 64  # values that a process puts into segments once the catalog had no room for one


def inline_limit(root: Root) -> int:
    """Returns up to how many bytes the next value may have to lie in its record, for `flatten` and `draft`."""
    limit = root.settings.inline_limit
    if root.catalog.crowded and limit > SMALL:
        root.catalog.crowded -= 1
        return SMALL
    return limit


def inline_limit_when_crowded(root: Root) -> int:
    """Returns the limit for another try of a put that raised CatalogCrowded."""
    root.catalog.crowded = _NEXT_IN_SEGMENTS
    return SMALL


def flatten(
    key: str,
    value: Any,
    root: Root,
    *,
    limit: int,
    allow_pickle: bool,
    dtype: torch.dtype | None = None,
    below: Path = (),
) -> structure.Flat:
    """Takes a value apart. `dtype` is for leaves whose names start with `below`.

    `limit` is `inline_limit(root)`: up to so many bytes are laid out for a record.

    Raises UnsupportedValueError, naming the leaf, or TypeError of `dtype`, before anything is written.
    """
    try:
        return structure.flatten(value, allow_pickle=allow_pickle, inline_limit=limit, dtype=dtype, below=below)
    except Exception as error:
        if modes.are_active():  # what they do says nothing of the value
            with modes.put_aside(entirely=True):
                return flatten(key, value, root, limit=limit, allow_pickle=allow_pickle, dtype=dtype, below=below)
        if isinstance(error, UnsupportedValueError):
            error.key = key
        raise


def draft(root: Root, key: bytes, flat: structure.Flat, limit: int, expect: int | None) -> Draft:
    """Returns what the engine is to store of a flattened value: in its record up to `limit` bytes, else in a segment.

    The bytes of a small value are copied here, those of others when the draft is put.
    """
    plan = flat.plan
    is_inline = limit and plan.inline and plan.nbytes + len(flat.objects) <= limit
    try:
        return (_inline if is_inline else _in_segment)(root, key, flat, expect)
    except MemoryError:
        with resource_errors(root.path, key.decode(), root):
            raise


def _inline(root: Root, key: bytes, flat: structure.Flat, expect: int | None) -> Draft:
    plan = flat.plan
    if len(plan.description) > HEADER_LIMIT:
        check_header(key.decode(), len(plan.description))
    memory = structure.contents(flat)
    if ABANDONED:
        check_abandoned()
    checksums = leaf_checksums(plan, memoryview(memory)) if root.settings.checksum else None
    return Draft(key, Content(plan.description, flat.objects, plan.nbytes, memory, checksums), expect)


def _in_segment(root: Root, key: bytes, flat: structure.Flat, expect: int | None) -> Draft:
    plan, objects, settings = flat.plan, flat.objects, root.settings
    if len(objects) > OBJECTS_IN_RECORD:
        content = Content(plan.description, b"", plan.nbytes, objects_checksum=xxhash.xxh3_64_digest(objects))
    else:
        content = Content(plan.description, objects, plan.nbytes)
    checksums = CHECKSUM_SIZE * len(plan.leaves) if settings.checksum else 0
    header = Header(key.decode(), settings.store, plan.description, objects, plan.header, checksums=checksums)
    return Draft(key, content, expect, header, functools.partial(_fill, flat, with_checksums=settings.checksum))


def _fill(flat: structure.Flat, memory: WritableMemory, *, with_checksums: bool) -> bytes | None:
    """Copies the leaves to their places in the data section. Returns their checksums, if the store has them."""
    array = np.asarray(memory)
    structure.fill(flat, array)
    if ABANDONED:
        check_abandoned()
    return leaf_checksums(flat.plan, array.data) if with_checksums else None
