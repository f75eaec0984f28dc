"""How a Store makes and opens datasets: see the methods of `Store`, which say what each does."""

from __future__ import annotations

from typing import Any

from memstore.datasets.creating import create, create_from
from memstore.datasets.dataset import Dataset
from memstore.datasets.rows import as_held, capacity_of
from memstore.datasets.spec import Spec
from memstore.engine import MappedEntry, Root, deadline_after, open_mutable, resource_errors
from memstore.structure import modes


def create_dataset(root: Root, key: str, spec: Spec, capacity: int, length: int, timeout: float) -> Dataset:
    with resource_errors(root.path, key, root), modes.put_aside():
        create(root, key, spec, capacity, length, timeout)
    return open_dataset(root, key, timeout)


def create_dataset_from(root: Root, key: str, value: Any, capacity: int | None, timeout: float) -> Dataset:
    with resource_errors(root.path, key, root), modes.put_aside():
        create_from(root, key, value, capacity, timeout)
    return open_dataset(root, key, timeout)


def open_dataset(root: Root, key: str, timeout: float, *, writable: bool = True) -> Dataset:
    with resource_errors(root.path, key, root), modes.put_aside():
        entry = open_mutable(root, key, "dataset", capacity_of, deadline_after(timeout), writable=writable)
        return Dataset(entry, timeout)


def hold_rows(root: Root, key: str, timeout: float) -> MappedEntry:
    """What a view of a dataset shows."""
    with resource_errors(root.path, key, root), modes.put_aside():
        entry = open_mutable(root, key, "dataset", capacity_of, deadline_after(timeout), writable=False)
        return as_held(entry)
