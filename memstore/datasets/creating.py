"""A dataset is created: what a put writes of it, or of any mutable entry. The rules: docs/decisions/015."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
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
    Record,
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
from memstore.wording import count_of

_OPENED_BY = {
    "dataset": "open it with store.open_dataset({key!r}), or delete it",
    "buffer": "it is a replay buffer, which memstore.ReplayBuffer(store, {key!r}) opens: do that, or delete it",
}
_A_VALUE = "it is an ordinary value: delete it, or take another key"


def control_of(size: int) -> Span:
    """The first tensor of a mutable entry's segment: what the processes share beside the rows."""
    return Span(("__control__",), "uint8", 1, (size,), size)


_CONTROL = control_of(CONTROL_SIZE)


def create(root: Root, key: str, spec: Spec, capacity: int, length: int, deadline: float) -> int:
    """Creates a dataset of zeros. Returns its put's version."""
    _check_absent(root, key, deadline)
    if type(length) is not int or length < 0:
        kind = ValueError if type(length) is int else TypeError
        raise kind(f"length is a number of rows, 0 or more, and not {length!r:.100}")
    with naming(key):
        value = rows_of_spec(spec, capacity)
        if length > capacity:
            raise ValueError(f"length is {length:,} rows, and capacity {capacity:,}")
        plan, entries = structure.plan_dense(value, _CONTROL)
    return _put(root, key, plan, entries, length, None, deadline)


def create_from(root: Root, key: str, value: Any, capacity: int | None, deadline: float) -> int:
    """Creates a dataset of a batch. Returns its put's version."""
    _check_absent(root, key, deadline)
    with naming(key):
        spec = spec_of_batch(value)
        one, _ = structure.plan_dense(rows_of_spec(spec, 1), _CONTROL)
        batch = take_batch(key, one, value)
        room = batch.count if capacity is None else capacity
        if capacity is None and not batch.count:
            raise ValueError("value has no rows: say a capacity")
        plan, entries = structure.plan_dense(rows_of_spec(spec, room), _CONTROL)
        if batch.count > room:
            raise ValueError(f"value has {count_of(batch.count, 'row', 'rows')}, and capacity is {room:,}")
    return _put(root, key, plan, entries, batch.count, batch, deadline)


def _check_absent(root: Root, key: str, deadline: float) -> None:
    """Before room is reserved: where the key is a large dataset, there may be none for another."""
    record = index.find(root, key.encode(), max(deadline - time.monotonic(), 0))
    if record is not None:
        raise _exists(key, record)


def _exists(key: str, record: Record) -> AlreadyExistsError:
    advice = _OPENED_BY[record.mutable_kind].format(key=key) if record.is_mutable else _A_VALUE
    return AlreadyExistsError(f"{key!r} is there already, at version {record.version}: {advice}", key=key)


def _put(root: Root, key: str, plan: Plan, entries: bytes, length: int, batch: Batch | None, deadline: float) -> int:
    mutable = MutableDescription("dataset", plan.description)
    return put_entry(root, key, mutable, plan, entries, functools.partial(_fill, plan, length, batch), deadline)


def put_entry(
    root: Root,
    key: str,
    mutable: MutableDescription,
    plan: Plan,
    entries: bytes,
    fill: Callable[[WritableMemory], None],
    deadline: float,
) -> int:
    """Puts a new mutable entry. Returns the version.

    Args:
        plan, entries: of all rows, with `control_of`; the entries of the header.
        fill: writes into the new file, which is zeros, the control page at least.

    Raises:
        AlreadyExistsError, StoreFullError: as `Store.create_dataset`.
    """
    need_mutable(root, deadline)
    description = encode_mutable(mutable)
    header = Header(key, root.settings.store, description, b"", entries)
    content = Content(description, b"", plan.nbytes)
    try:
        (version,) = put(root, [Draft(key.encode(), content, 0, header, fill)], deadline)
    except VersionConflictError as error:
        found = error.found
    else:
        return version
    _check_absent(root, key, deadline)
    raise AlreadyExistsError(f"{key!r} was there, at version {found}, and was deleted meanwhile: try again", key=key)


def _fill(plan: Plan, length: int, batch: Batch | None, memory: WritableMemory) -> None:
    """The file is new: what isn't written is zeros."""
    data = np.asarray(memory)
    data[:CONTROL_SIZE] = np.frombuffer(new_page(length), np.uint8)
    if batch is not None:
        for array, source in zip(arrays_over(plan, data), batch.arrays, strict=True):
            array[:length] = source
