"""What a row of a dataset is: a spec as the user gives it, as an example of all rows, and as it is shown."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from memstore.errors import UnsupportedValueError
from memstore.structure import DTYPE_NAMES, DTYPES, Plan, traits

Spec = Any
"""`{"x": ((84, 84, 4), torch.uint8), "y": ((), torch.int64), "more": {...}}`, one `(shape, dtype)`, or an example of a
row: a tensor, a TensorDict, a tensorclass, or a dict of tensors.
"""

CAPACITY_LIMIT = 1 << 48  # rows: so that no product of it overflows


def rows_of_spec(spec: Spec, capacity: int) -> Any:
    """A value of `capacity` rows, of no memory: each leaf is one element, seen often.

    Raises:
        TypeError, ValueError: it is no spec; the message names the leaf, and says what one is.
        UnsupportedValueError: a leaf that can't be written in place.
    """
    if type(capacity) is not int or not 0 < capacity <= CAPACITY_LIMIT:
        raise ValueError(f"capacity is a number of rows, 1 to {CAPACITY_LIMIT:,}, and not {capacity!r}")
    if is_tensor_collection(spec):
        return _of_collection(spec, capacity)
    if isinstance(spec, Mapping):
        return _of_dict(cast("Mapping[Any, Any]", spec), capacity, "spec")
    return _leaf(spec, capacity, "spec")


def spec_of_batch(value: Any) -> Spec:
    """What a row of a batch is, as an example of no memory. Raises UnsupportedValueError, which names the leaf."""
    return _row_of(value, "value")


def _row_of(value: Any, name: str) -> Any:
    if is_tensor_collection(value):
        if not value.batch_size:
            raise ValueError(f"{name} is a {type(value).__qualname__} without a batch dimension: it has no rows")
        return value.apply(functools.partial(_row_of, name=name), batch_size=value.batch_size[1:], inplace=False)
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return {key: _row_of(inner, f"{name}[{key!r}]") for key, inner in entries.items()}
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value)
    if not isinstance(value, torch.Tensor):
        raise UnsupportedValueError(f"{name} is a {type(value).__qualname__}: rows are of tensors, and nothing else")
    if not value.ndim:
        raise ValueError(f"{name} has no dimension, and so no rows")
    if value.layout is not torch.strided or value.is_nested:
        raise UnsupportedValueError(f"{name} is a tensor of layout {value.layout}: rows are dense")
    return torch.empty((), dtype=value.dtype, device="cpu").expand(value.shape[1:])


def _of_collection(example: Any, capacity: int) -> Any:
    _check_leaves(example, "spec")
    found = example.apply(
        functools.partial(_leaf, capacity=capacity, name="spec"),
        batch_size=[capacity, *example.batch_size],
        inplace=False,
    )
    if found is None or not len(list(found.keys(include_nested=True, leaves_only=True))):
        raise ValueError("spec has no leaf: a row has at least one tensor")
    _keep_batch_sizes(found, example, capacity)
    return found


def _keep_batch_sizes(found: Any, example: Any, capacity: int) -> None:
    """Of nested collections, which may count more dimensions than the one that they are in."""
    for key, inner in example.items():
        if is_tensor_collection(inner):
            below = found.get(key)
            below.batch_size = [capacity, *inner.batch_size]
            _keep_batch_sizes(below, inner, capacity)


def _check_leaves(example: Any, name: str) -> None:
    for key, inner in example.items():
        below = f"{name}[{key!r}]"
        if is_non_tensor(inner):
            raise UnsupportedValueError(f"{below} is no tensor: rows are of tensors, and nothing else")
        if is_tensor_collection(inner):
            _check_leaves(inner, below)
        else:
            _leaf(inner, 1, below)


def _of_dict(spec: Mapping[Any, Any], capacity: int, name: str) -> TensorDictBase:
    if not spec:
        raise ValueError(f"{name} is empty: a row has at least one tensor")
    entries: dict[str, Any] = {}
    for key, inner in spec.items():
        if not isinstance(key, str):
            raise TypeError(f"{name} has the key {key!r}: keys are text")
        below = f"{name}[{key!r}]"
        if isinstance(inner, Mapping) or is_tensor_collection(inner):
            nested = cast("Mapping[Any, Any]", inner)
            entries[key] = _of_dict(nested, capacity, below)
        else:
            entries[key] = _leaf(inner, capacity, below)
    return TensorDict(entries, batch_size=[capacity])


def _leaf(spec: Any, capacity: int, name: str) -> torch.Tensor:
    if isinstance(spec, torch.Tensor):
        shape, dtype = tuple(spec.shape), spec.dtype
        if spec.layout is not torch.strided or spec.is_nested:
            raise UnsupportedValueError(f"{name} is a tensor of layout {spec.layout}: rows are dense")
    else:
        shape, dtype = _shape_and_dtype(spec, name)
    if dtype not in DTYPE_NAMES or dtype in traits.QUANTIZED:
        raise UnsupportedValueError(f"{name}: {dtype} can't be written in place")
    return torch.empty((), dtype=dtype, device="cpu").expand(capacity, *shape)


def _shape_and_dtype(spec: Any, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    what = (
        f"{name} is {spec!r:.200}: a spec is (shape, dtype), as ((84, 84), torch.uint8), a dict of them, or an "
        "example of a row"
    )
    if not isinstance(spec, Sequence) or isinstance(spec, str):
        raise TypeError(what)
    pair = list(cast("Sequence[Any]", spec))
    if len(pair) != 2 or not isinstance(pair[1], torch.dtype) or not isinstance(pair[0], Sequence):
        raise TypeError(what)
    shape = tuple(cast("Sequence[Any]", pair[0]))
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name}: the shape {shape!r} of a row has something else than sizes")
    return shape, pair[1]


def spec_of(plan: Plan) -> Any:
    """As the user would give it: nested dicts of (shape, dtype) of a row, or one such pair."""
    shown: dict[str, Any] = {}
    for leaf in plan.leaves:
        pair = (tuple(leaf.shape[1:]), DTYPES[leaf.dtype])
        if not leaf.name:
            return pair
        at = shown
        for name in leaf.name[:-1]:
            at = at.setdefault(str(name), {})
        at[str(leaf.name[-1])] = pair
    return shown
