"""How a Store makes and opens datasets: see the methods of `Store`, which say what each does."""

from __future__ import annotations

from typing import Any

from memstore.datasets.creating import create, create_from
from memstore.datasets.dataset import Dataset
from memstore.datasets.rows import as_held, capacity_of
from memstore.datasets.spec import Spec
from memstore.engine import MappedEntry, MutableEntry, Root, deadline_after, index, open_mutable, resource_errors
from memstore.errors import VersionGoneError
from memstore.structure import modes


@modes.unaffected
def create_dataset(
    root: Root, key: str, spec: Spec, capacity: int, length: int, timeout: float, deadline: float
) -> Dataset:
    """`timeout`: of the dataset's calls; `deadline`: of this one."""
    with resource_errors(root.path, key, root):
        version = create(root, key, spec, capacity, length, deadline)
        return _open_new(root, key, version, timeout)


@modes.unaffected
def create_dataset_from(
    root: Root, key: str, value: Any, capacity: int | None, timeout: float, deadline: float
) -> Dataset:
    """Creates a dataset with the rows of a batch. Timeouts as of `create_dataset`."""
    with resource_errors(root.path, key, root):
        version = create_from(root, key, value, capacity, deadline)
        return _open_new(root, key, version, timeout)


def _open_new(root: Root, key: str, version: int, timeout: float) -> Dataset:
    """What was created just now, and not what somebody has made in its place since."""
    record = index.find(root, key.encode(), timeout)
    if record is None or record.version != version:
        raise VersionGoneError(f"{key!r} was created, and at once deleted or sealed by somebody else", key=key)
    return Dataset(_open(root, key, timeout, writable=True, put_id=record.put_id), timeout)


@modes.unaffected
def open_dataset(root: Root, key: str, timeout: float, *, writable: bool = True) -> Dataset:
    with resource_errors(root.path, key, root):
        return Dataset(_open(root, key, timeout, writable=writable), timeout)


@modes.unaffected
def hold_rows(root: Root, key: str, timeout: float) -> MappedEntry:
    """What a view of a dataset shows."""
    with resource_errors(root.path, key, root):
        return as_held(_open(root, key, timeout, writable=False))


def _open(root: Root, key: str, timeout: float, *, writable: bool, put_id: int = 0) -> MutableEntry:
    deadline = deadline_after(timeout)
    return open_mutable(root, key, "dataset", capacity_of, deadline, writable=writable, put_id=put_id)
