"""Values taken apart for commands: the tensors and objects of a key, or of a file, by name.

Nothing is unpickled unasked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import memstore
from memstore import _wording as wording
from memstore._arguments import encode_key
from memstore.engine import Path, PinOptions, Record, Root, deadline_after, hold, resource_errors
from memstore.errors import KeyNotFoundError
from memstore.listing import near, no_value, open_keyspace, opened

if TYPE_CHECKING:
    import torch


_TIMEOUT = 30.0  # seconds
_NAMED = 8  # leaves, in a message


@dataclass(frozen=True, slots=True)
class InspectedValue:
    """A value, taken apart.

    Attributes:
        title: of a key its version and age, of a file its path.
        structure: "dict of 2 leaves".
        tensors: lazy, or mapped.
        objects: all other leaves.
    """

    title: str
    structure: str
    tensors: Mapping[Path, torch.Tensor]
    objects: Mapping[Path, Any]
    record: Record | None = None

    def below(self, leaf: str) -> InspectedValue:
        """Returns just the leaf of this name, or all leaves below it. Raises KeyNotFoundError."""
        names = leaves_below([*self.tensors, *self.objects], leaf)
        if not names:
            raise KeyNotFoundError(f"{self.title} has no leaf {leaf!r}: {self._has(leaf)}")
        tensors = {name: self.tensors[name] for name in names if name in self.tensors}
        objects = {name: self.objects[name] for name in names if name in self.objects}
        return InspectedValue(self.title, self.structure, tensors, objects, self.record)

    def count(self) -> str:
        """Counts tensors and objects: "2 leaves and 1 object". As elsewhere, leaves are tensors."""
        leaves = wording.count_of(len(self.tensors), "leaf", "leaves")
        objects = wording.count_of(len(self.objects), "object", "objects")
        return f"{leaves} and {objects}" if self.tensors and self.objects else objects if self.objects else leaves

    def _has(self, leaf: str) -> str:
        names = [leaf_text(name) for name in (*self.tensors, *self.objects)]
        if names == ["value"]:
            return "its value is a single leaf"
        alike = near(leaf, names) if len(names) > _NAMED else []
        if alike:
            return f"did you mean {' or '.join(map(repr, alike))}?"
        more = f", and {len(names) - _NAMED:,} more: `memstore info` lists them" if len(names) > _NAMED else ""
        return f"it has {', '.join(map(repr, names[:_NAMED]))}{more}"


def leaf_text(name: Path) -> str:
    """Writes a leaf's name as LEAF is written: "layer/w"."""
    return "/".join(map(str, name)) if name else "value"


def leaves_below(names: Sequence[Path], leaf: str) -> list[Path]:
    """Returns the names that `leaf` is, or is a start of: as it stands, else as parts joined by "/", else by "."."""
    found = [name for name in names if name and str(name[0]) == leaf]
    for joiner in "/.":
        starts = ((name, (joiner.join(map(str, name[:end])) for end in range(1, len(name) + 1))) for name in names)
        found = found or [name for name, some in starts if leaf in some]
    return found or [name for name in names if leaf_text(name) == leaf]  # "value", of a value that is a single leaf


@contextlib.contextmanager
def inspect_key(root: str, key: str) -> Generator[InspectedValue]:
    """Takes the present version of a key apart, and holds it meanwhile. Raises KeyNotFoundError."""
    with open_keyspace(root, "r") as store:
        with resource_errors(root, key):
            found = _inspect(opened(store), key)
        yield found


def _inspect(root: Root, key: str) -> InspectedValue:
    from memstore.view import parts_of

    name = encode_key(key)
    (held,) = hold(root, (name,), deadline_after(_TIMEOUT), may_lock=False, lazily=True)
    if held is None:
        raise no_value(root, name)
    record = held.record
    if record.is_mutable and record.mutable_kind == "buffer":
        from memstore.replay import look_at_rows

        rows = look_at_rows(root, key, _TIMEOUT)
        return InspectedValue(f"{key!r}", _filled("buffer", rows.rows, rows.capacity), rows.tensors, {}, record)
    if record.is_mutable:
        from memstore.datasets import hold_rows

        held = hold_rows(root, key, _TIMEOUT)
    found = parts_of(root, key, held, PinOptions("r", _TIMEOUT, False, False))
    shown = filled(root, key, record) if record.is_mutable else found.structure
    return InspectedValue(f"{key!r}", shown, found.tensors, found.objects, record)


def filled(root: Root, key: str, record: Record) -> str:
    """Says how full a dataset or replay buffer is: "a dataset with 4 of 10 rows"."""
    return _filled(record.mutable_kind, *rows_of(root, key, record.mutable_kind))


def _filled(kind: str, rows: int, capacity: int) -> str:
    if kind == "buffer":
        return f"a replay buffer with {rows:,} rows in {capacity:,} slots"
    return f"a dataset with {rows:,} of {capacity:,} rows"


def rows_of(root: Root, key: str, kind: str) -> tuple[int, int]:
    """Returns how many rows a dataset or replay buffer has, and how many it has room for."""
    if kind == "buffer":
        from memstore.replay import look_at_rows

        found = look_at_rows(root, key, _TIMEOUT)
        return found.rows, found.capacity
    with memstore.open(root.path, "r") as store:
        rows = store.open_dataset(key, "r")
        return len(rows), rows.capacity


def inspect_file(path: str, *, allow_pickle: bool) -> InspectedValue:
    """Takes a file or folder of another format apart, or a snapshot: of that, what rank 0 has."""
    from memstore import structure
    from memstore.formats import load_files
    from memstore.snapshot import Snapshot, is_snapshot

    if is_snapshot(path):
        value = Snapshot(path, storage_options={"allow_pickle": allow_pickle}).view()
    else:
        value = load_files(os.path.basename(path) or path, path, None, allow_pickle=allow_pickle)
    flat = structure.flatten(value, allow_pickle=allow_pickle)
    plan = flat.plan
    tensors = {leaf.name: tensor for leaf, tensor in zip(plan.leaves, flat.tensors, strict=True)}
    objects = structure.show_objects(flat.objects, plan.object_count)
    return InspectedValue(
        path, structure.structure_text(plan), tensors, dict(zip(plan.object_names, objects, strict=True))
    )


def loaded(key: str, path: str, format: Any, *, allow_pickle: bool) -> Any:
    """Loads the value of a file or folder, as `Store.attach` with `copy` puts it. `key` is for errors."""
    from memstore.formats import load_files
    from memstore.snapshot import is_snapshot, load_snapshot

    load = load_snapshot if format is None and is_snapshot(path) else load_files
    return load(key, path, format, allow_pickle=allow_pickle)


def check_served(key: str, path: str, format: Any, *, allow_pickle: bool) -> None:
    """Raises what `Store.attach` would raise of a file or folder that is to be served in place."""
    from memstore.formats import describe_files
    from memstore.snapshot import describe_snapshot, is_snapshot

    describe = describe_snapshot if format is None and is_snapshot(path) else describe_files
    describe(key, path, format, allow_pickle=allow_pickle)


def has_key(root: str, key: str) -> bool:
    """Returns whether a store has this key. Raises NotAStoreError."""
    with open_keyspace(root, "r") as store:
        return key in store
