"""What a row of a dataset is: a spec as the user gives it, as an example of all rows, and as it is shown."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import (
    TensorDict,
    TensorDictBase,
    is_non_tensor,  # pyright: ignore[reportUnknownVariableType]
    is_tensor_collection,
)

from memstore.datasets.batch import Array, check_dense, entries_of, over_array
from memstore.engine import Path
from memstore.errors import UnsupportedValueError
from memstore.structure import DTYPE_NAMES, DTYPES, MAX_DEPTH, Plan, render_path, traits
from memstore.wording import an_instance

Spec = Any
"""`{"x": ((84, 84, 4), torch.uint8), "y": ((), torch.int64), "more": {...}}`, one `(shape, dtype)`, or an example of a
row: a tensor, a TensorDict, a tensorclass, or a dict of tensors.
"""

CAPACITY_LIMIT = 1 << 48  # rows: so that no product of it overflows


def check_capacity(capacity: Any) -> None:
    """Raises TypeError, ValueError for what is no number of rows that there may be room for."""
    if type(capacity) is not int or not 0 < capacity <= CAPACITY_LIMIT:
        kind = ValueError if type(capacity) is int else TypeError
        raise kind(f"capacity is a number of rows, 1 to {CAPACITY_LIMIT:,}, and not {capacity!r:.100}")


def rows_of_spec(spec: Spec, capacity: int) -> Any:
    """A value of `capacity` rows, of no memory: each leaf is one element, seen often.

    Raises:
        TypeError, ValueError: it is no spec; the message names the leaf, and says what one is.
        UnsupportedValueError: a leaf that can't be written in place.
    """
    check_capacity(capacity)
    if is_tensor_collection(spec):
        return _of_collection(spec, capacity)
    if isinstance(spec, Mapping):
        return _of_dict(cast("Mapping[Any, Any]", spec), capacity, ())
    return _leaf(spec, capacity, ())


def spec_of_batch(value: Any, path: Path = ()) -> Spec:
    """What a row of a batch is, as an example of no memory. Raises UnsupportedValueError or ValueError."""
    if isinstance(value, np.ndarray):
        value = over_array(cast("Array", value), path)
    if isinstance(value, torch.Tensor):
        check_dense(value, render_path(path))
        if not value.ndim:
            raise ValueError(f"{render_path(path)} has no dimension, and so no rows")
        return torch.empty((), dtype=value.dtype, device="cpu").expand(value.shape[1:])
    entries: Any = entries_of(value, path)
    if not is_tensor_collection(value):
        return {key: spec_of_batch(inner, (*path, key)) for key, inner in entries.items()}
    if not value.batch_size:
        raise ValueError(f"{render_path(path)} is {an_instance(value)} without a batch dimension: it has no rows")
    _check_tensors(value, render_path(path))
    return value.apply(spec_of_batch, batch_size=value.batch_size[1:], inplace=False)


def _of_collection(example: Any, capacity: int) -> Any:
    _check_tensors(example, "spec")
    found = example.apply(
        functools.partial(_leaf, capacity=capacity, path=()), batch_size=[capacity, *example.batch_size], inplace=False
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


def _check_tensors(example: Any, name: str) -> None:
    """What `apply` doesn't tell of: names, and leaves that are no tensors."""
    for key, inner in example.items():
        below = f"{name}[{key!r}]"
        if is_non_tensor(inner):
            raise UnsupportedValueError(f"{below} is no tensor: rows are of tensors, and nothing else")
        if is_tensor_collection(inner):
            _check_tensors(inner, below)
        else:
            check_dense(inner, below)


def _of_dict(spec: Mapping[Any, Any], capacity: int, path: Path) -> TensorDictBase:
    if not spec:
        raise ValueError(f"{_render(path)} is empty: a row has at least one tensor")
    if len(path) >= MAX_DEPTH:
        raise UnsupportedValueError(f"{_render(path[:3])}...: more than {MAX_DEPTH} levels of containers")
    entries: dict[str, Any] = {}
    for key, inner in spec.items():
        if not isinstance(key, str):
            raise TypeError(f"{_render(path)} has the key {key!r}: keys are text")
        below = (*path, key)
        if isinstance(inner, Mapping) or is_tensor_collection(inner):
            entries[key] = _of_dict(cast("Mapping[Any, Any]", inner), capacity, below)
        else:
            entries[key] = _leaf(inner, capacity, below)
    return TensorDict(entries, batch_size=[capacity])


def _leaf(spec: Any, capacity: int, path: Path) -> torch.Tensor:
    if isinstance(spec, torch.Tensor):
        check_dense(spec, _render(path))
        shape, dtype = tuple(spec.shape), spec.dtype
    else:
        shape, dtype = _shape_and_dtype(spec, _render(path))
    if dtype not in DTYPE_NAMES or dtype in traits.QUANTIZED:
        raise UnsupportedValueError(f"{_render(path)}: {dtype} can't be written in place")
    return torch.empty((), dtype=dtype, device="cpu").expand(capacity, *shape)


def _render(path: Path) -> str:
    return "spec" + "".join(f"[{key!r}]" for key in path)


def _shape_and_dtype(spec: Any, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    what = (
        f"{name} is {spec!r:.200}: a spec is (shape, dtype), as ((84, 84), torch.uint8), a dict of them, or an "
        f"example of a row, of tensors{_meant(spec)}"
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


def _meant(spec: Any) -> str:
    """What was meant by what is no spec, where that can be told."""
    if isinstance(spec, np.ndarray):
        return ": torch.as_tensor(...) of the array is one"
    if not isinstance(spec, (list, tuple)) or len(cast("Sequence[Any]", spec)) != 2:
        return ""
    shape, dtype = cast("Sequence[Any]", spec)
    if isinstance(shape, (torch.dtype, type, str)):
        shape, dtype = dtype, shape
    shape = (shape,) if type(shape) is int else shape
    found = _torch_dtype(dtype)
    if found is None or not isinstance(shape, (list, tuple)):
        return ""
    return f": write ({tuple(cast('Sequence[Any]', shape))!r:.100}, {found})"


def _torch_dtype(dtype: Any) -> torch.dtype | None:
    """That which has numpy's name, or Python's."""
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        found: Any = getattr(torch, str(np.dtype(dtype)), None)
    except (TypeError, ValueError, SyntaxError):  # of np.dtype, for texts
        return None
    return found if isinstance(found, torch.dtype) else None
