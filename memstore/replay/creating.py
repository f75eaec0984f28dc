"""A replay buffer is made: what a put writes of it."""

from __future__ import annotations

import functools

import numpy as np

from memstore import structure
from memstore.datasets import Spec, rows_of_spec, spec_of
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
    need_mutable,
    new_page,
    put,
)
from memstore.errors import AlreadyExistsError, VersionConflictError
from memstore.replay.layout import RingOptions, encode_options, layout_of
from memstore.structure import Plan

_OURS = ("index", "weight")  # what samples have besides


def plan_of_spec(key: str, spec: Spec, options: RingOptions, capacity: int) -> tuple[Plan, bytes]:
    """The plan of all rows, and the entries of the header. Raises as `Store.create_dataset`, of the spec."""
    size = layout_of(options, capacity).size
    control = Span(("__control__",), "uint8", 1, (size,), size)
    plain, _ = structure.plan_dense(rows_of_spec(spec, capacity), control)
    pairs = spec_of(plain)  # in dicts alone, whatever the example was: samples are TensorDicts
    taken = [name for name in _OURS if isinstance(pairs, dict) and name in pairs]
    if taken:
        raise ValueError(f"{key!r}: spec has the key {taken[0]!r}, which samples have of their own: rename it")
    return structure.plan_dense(rows_of_spec(pairs, capacity), control)


def create(root: Root, key: str, spec: Spec, options: RingOptions, capacity: int, deadline: float) -> None:
    """Makes an empty buffer. Raises AlreadyExistsError, StoreFullError, and as `plan_of_spec`."""
    plan, entries = plan_of_spec(key, spec, options, capacity)
    need_mutable(root, deadline)
    description = encode_mutable(MutableDescription("buffer", plan.description, encode_options(options)))
    header = Header(key, root.settings.store, description, b"", entries)
    draft = Draft(key.encode(), Content(description, b"", plan.nbytes), 0, header, functools.partial(_fill))
    try:
        put(root, [draft], deadline)
    except VersionConflictError as error:
        raise AlreadyExistsError(
            f"{key!r} is there already, at version {error.found}: open it with mode 'a' or 'r+', or delete it", key=key
        ) from None


def _fill(memory: WritableMemory) -> None:
    """The file is new: what isn't written is zeros."""
    np.asarray(memory)[:CONTROL_SIZE] = np.frombuffer(new_page(0), np.uint8)
