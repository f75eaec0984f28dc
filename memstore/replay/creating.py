"""A replay buffer is made: what a put writes of it."""

from __future__ import annotations

import numpy as np

from memstore import structure
from memstore.datasets import Spec, control_of, put_entry, rows_of_spec, spec_of
from memstore.engine import CONTROL_SIZE, MutableDescription, Root, WritableMemory, new_page
from memstore.replay.layout import RingOptions, encode_options, layout_of
from memstore.structure import Plan

_OURS = ("index", "weight")  # what samples have besides


def plan_of_spec(key: str, spec: Spec, options: RingOptions, capacity: int) -> tuple[Plan, bytes]:
    """The plan of all rows, and the entries of the header. Raises as `Store.create_dataset`, of the spec."""
    control = control_of(layout_of(options, capacity).size)
    plain, _ = structure.plan_dense(rows_of_spec(spec, capacity), control)
    pairs = spec_of(plain)  # in dicts alone, whatever the example was: samples are TensorDicts
    taken = [name for name in _OURS if isinstance(pairs, dict) and name in pairs]
    if taken:
        raise ValueError(f"{key!r}: spec has the key {taken[0]!r}, which samples have of their own: rename it")
    return structure.plan_dense(rows_of_spec(pairs, capacity), control)


def create(root: Root, key: str, spec: Spec, options: RingOptions, capacity: int, deadline: float) -> None:
    """Makes an empty buffer. Raises AlreadyExistsError, StoreFullError, and as `plan_of_spec`."""
    plan, entries = plan_of_spec(key, spec, options, capacity)
    mutable = MutableDescription("buffer", plan.description, encode_options(options))
    put_entry(root, key, mutable, plan, entries, _fill, deadline)


def _fill(memory: WritableMemory) -> None:
    """The file is new: what isn't written is zeros."""
    np.asarray(memory)[:CONTROL_SIZE] = np.frombuffer(new_page(0), np.uint8)
