"""A dataset is created: what a put writes of it. The rules: docs/decisions/015."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from memstore import structure
from memstore.datasets.batch import Batch, naming, take_batch
from memstore.datasets.rows import arrays_over
from memstore.datasets.spec import Spec, rows_of_spec, spec_of_batch
from memstore.engine import (
    CONTROL_SIZE,
    Content,
    Draft,
    Header,
    MutableDescription,
    Root,
    Span,
    WritableMemory,
    encode_mutable,
    index,
    need_mutable,
    new_page,
    put,
)
from memstore.errors import AlreadyExistsError, VersionConflictError
from memstore.structure import Plan

_CONTROL = Span(("__control__",), "uint8", 1, (CONTROL_SIZE,), CONTROL_SIZE)


def create(root: Root, key: str, spec: Spec, capacity: int, length: int, deadline: float) -> int:
    """Creates a dataset of zeros. Returns its put's version."""
    _check_absent(root, key)
    if type(length) is not int or length < 0:
        raise ValueError(f"length is a number of rows, 0 or more, and not {length!r}")
    with naming(key):
        value = rows_of_spec(spec, capacity)
        if length > capacity:
            raise ValueError(f"length is {length:,} rows, and capacity {capacity:,}")
        plan, entries = structure.plan_dense(value, _CONTROL)
    return _put(root, key, plan, entries, length, None, deadline)


def create_from(root: Root, key: str, value: Any, capacity: int | None, deadline: float) -> int:
    """Creates a dataset of a batch. Returns its put's version."""
    _check_absent(root, key)
    with naming(key):
        spec = spec_of_batch(value)
        one, _ = structure.plan_dense(rows_of_spec(spec, 1), _CONTROL)
        batch = take_batch(key, one, value)
        room = batch.count if capacity is None else capacity
        if capacity is None and not batch.count:
            raise ValueError("value has no rows: say a capacity")
        plan, entries = structure.plan_dense(rows_of_spec(spec, room), _CONTROL)
        if batch.count > room:
            raise ValueError(f"value has {batch.count:,} rows, and capacity is {room:,}")
    return _put(root, key, plan, entries, batch.count, batch, deadline)


def _check_absent(root: Root, key: str) -> None:
    """Before room is reserved: where the key is a large dataset, there may be none for another."""
    record = index.find(root, key.encode())
    if record is not None:
        raise _exists(key, record.version)


def _exists(key: str, version: int) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"{key!r} is there already, at version {version}: open it with store.open_dataset({key!r}), or delete it",
        key=key,
    )


def _put(root: Root, key: str, plan: Plan, entries: bytes, length: int, batch: Batch | None, deadline: float) -> int:
    need_mutable(root, deadline)
    description = encode_mutable(MutableDescription("dataset", plan.description))
    header = Header(key, root.settings.store, description, b"", entries)
    content = Content(description, b"", plan.nbytes)
    fill = functools.partial(_fill, plan, length, batch)
    try:
        (version,) = put(root, [Draft(key.encode(), content, 0, header, fill)], deadline)
    except VersionConflictError as error:
        raise _exists(key, error.found) from None
    return version


def _fill(plan: Plan, length: int, batch: Batch | None, memory: WritableMemory) -> None:
    """The file is new: what isn't written is zeros."""
    data = np.asarray(memory)
    data[:CONTROL_SIZE] = np.frombuffer(new_page(length), np.uint8)
    if batch is not None:
        for array, source in zip(arrays_over(plan, data), batch.arrays, strict=True):
            array[:length] = source
