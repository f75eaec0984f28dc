"""A value as rows: how many it has, and one of them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch

from memstore.errors import UnsupportedValueError
from memstore.structure import render_path
from memstore.wording import an

_Path = tuple[Any, ...]


def count_rows(value: Any, key: str) -> int:
    """The rows that every tensor of a stored value has.

    Raises:
        UnsupportedValueError: something in the value has no rows, or another number of them.
    """
    counts = {render_path(path): _count(leaf, path, key) for path, leaf in _leaves(value, ())}
    if not counts:
        raise UnsupportedValueError(f"the value of {key!r} has no tensor, and so no rows", key=key)
    found = sorted(set(counts.values()))
    if len(found) > 1:
        one, other = (next(name for name, count in counts.items() if count == number) for number in found[:2])
        raise UnsupportedValueError(
            f"the tensors of {key!r} have different numbers of rows: {one} has {found[0]:,}, {other} has {found[1]:,}. "
            "Put tensors that don't belong to the rows under a key of their own",
            key=key,
        )
    return found[0]


def _count(leaf: Any, path: _Path, key: str) -> int:
    if not isinstance(leaf, torch.Tensor):
        why = f"is {an(type(leaf))}, and no tensor"
    elif leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
        why = f"is a sparse, nested or quantized tensor ({leaf.layout})"
    elif not leaf.ndim:
        why = "has no dimension"
    else:
        return leaf.shape[0]
    raise UnsupportedValueError(
        f"{render_path(path)} of {key!r} {why}: a row is one element of the first dimension of each tensor. "
        "Put it under a key of its own, or as a tensor with a row for each",
        key=key,
    )


def row_of(batch: Any, place: int) -> Any:
    """One row of a batch: the same containers, and of each tensor what it has at `place`.

    Raises:
        UnsupportedValueError: something in the batch, which a transform may have made, has no rows.
    """
    if isinstance(batch, torch.Tensor) or _is_collection(batch):
        return batch[place]
    if isinstance(batch, dict):
        row = copy.copy(batch)
        row.update({key: row_of(value, place) for key, value in batch.items()})
        return row
    if isinstance(batch, (list, tuple)):
        values = [row_of(value, place) for value in batch]
        kind: Any = type(batch)
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    raise UnsupportedValueError(
        f"a batch has {an(type(batch))}, which has no rows. To take single rows, let transform= return "
        "tensors, and TensorDicts, dicts, lists and tuples of them"
    )


def _leaves(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    entries: Any = None
    if isinstance(value, dict) or _is_collection(value):
        entries = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    if entries is None:
        yield path, value
        return
    for name, entry in entries:
        yield from _leaves(entry, (*path, name))


def _is_collection(value: Any) -> bool:
    """Whether it is a TensorDict or a tensorclass. Those whose rows lie apart, or are no tensors, are not."""
    tensordict: Any = sys.modules.get("tensordict")
    if tensordict is None or not tensordict.is_tensor_collection(value):
        return False
    return not tensordict.is_non_tensor(value) and not isinstance(value, tensordict.LazyStackedTensorDict)
