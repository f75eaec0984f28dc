"""Specs of rows, and batches that are compared with them.

A spec says what a row is: `rows_of_spec` turns it into an example of all rows, `spec_of` shows it as a user would write
it, `spec_of_batch` takes it from rows. `take_batch` compares rows with a plan, and returns their bits by leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tensordict import (
    TensorDict,
    TensorDictBase,
    is_non_tensor,  # pyright: ignore[reportUnknownVariableType]
    is_tensor_collection,
)

from memstore._wording import an_instance
from memstore.engine import Leaf, Path
from memstore.errors import MemstoreError, StructureMismatchError, UnsupportedValueError
from memstore.structure import DTYPE_NAMES, DTYPES, MAX_DEPTH, Plan, render_path, tensor_of_array, traits, why_no_memory
from memstore.view import StoredTensor

# --- Specs -----------------------------------------------------------------------------------------------------------


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
    """Makes a value of `capacity` rows that takes no memory: each leaf is one element, seen often.

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
    """Returns an example of a row of a batch, which takes no memory. Raises UnsupportedValueError or ValueError."""
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
    """Keeps the batch sizes of nested collections, which may count more dimensions than the one that they are in."""
    for key, inner in example.items():
        if is_tensor_collection(inner):
            below = found.get(key)
            below.batch_size = [capacity, *inner.batch_size]
            _keep_batch_sizes(below, inner, capacity)


def _check_tensors(example: Any, name: str) -> None:
    """Checks what `apply` doesn't tell of: names, and leaves that are no tensors."""
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
    """Returns the spec as a user would give it: nested dicts of (shape, dtype) of a row, or one such pair."""
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
    """Guesses what was meant by a value that is no spec, for an error."""
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
    """Returns torch's dtype for one of numpy's or Python's; None if there is none."""
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        found: Any = getattr(torch, str(np.dtype(dtype)), None)
    except (TypeError, ValueError, SyntaxError):  # of np.dtype, for texts
        return None
    return found if isinstance(found, torch.dtype) else None


# --- Batches ---------------------------------------------------------------------------------------------------------


Array = np.ndarray[Any, Any]

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
NUMPY_SAME_SIZE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}  # not every dtype has one


class Batch(NamedTuple):
    """Rows to be stored: for each leaf an array of their bits. Nothing is copied but from devices."""

    rows: int
    arrays: tuple[Array, ...]


def take_batch(key: str, plan: Plan, value: Any, *, single: bool = False) -> Batch:
    """Compares a batch with what the rows of `plan` are; `single`: one row, without the dimension that counts them.

    Raises:
        StructureMismatchError: other leaves, shapes or dtypes, or leaves of different numbers of rows. All that is
            wrong is listed.
        UnsupportedValueError: a leaf that has no bytes.
    """
    with naming(key):
        found = dict(_leaves(value, ()))
    known = {leaf.name for leaf in plan.leaves}
    wrong = [f"{render_path(name)} isn't in the spec" for name in found if name not in known]
    tensors: list[torch.Tensor] = []
    for leaf in plan.leaves:
        tensor = found.get(leaf.name)
        if tensor is None:
            wrong.append(f"{render_path(leaf.name)} is missing")
        elif (difference := _difference(leaf, tensor, single=single)) is not None:
            wrong.append(difference)
        else:
            tensors.append(tensor[None] if single else tensor)
    counts = {len(tensor) for tensor in tensors}
    if not wrong and len(counts) > 1:
        wrong.append(f"its leaves have {' and '.join(map(str, sorted(counts)))} rows")
    if wrong:
        what = "row" if single else "batch"
        raise StructureMismatchError(f"{key!r}: this {what} doesn't fit: {'; '.join(wrong)}", key=key)
    return Batch(counts.pop(), tuple(map(_bits, tensors)))


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, _with_bytes(value, path)
    elif isinstance(value, np.ndarray):
        yield path, over_array(cast("Array", value), path)
    else:
        for key, inner in entries_of(value, path).items():
            yield from _leaves(inner, (*path, key))


def over_array(array: Array, path: Path) -> torch.Tensor:
    """Returns the values of an array as a tensor. Raises UnsupportedValueError."""
    tensor = tensor_of_array(array)
    if tensor is None:
        raise UnsupportedValueError(f"{render_path(path)} is a numpy array of {array.dtype}, which no tensor can have")
    return tensor


def entries_of(value: Any, path: Path) -> Mapping[Any, Any]:
    """Returns the entries of a container. Raises UnsupportedValueError where it is none, or nests too deeply."""
    if len(path) >= MAX_DEPTH:
        raise UnsupportedValueError(f"{render_path(path[:3])}...: more than {MAX_DEPTH} levels of containers")
    if isinstance(value, Mapping) or (is_tensor_collection(value) and not is_non_tensor(value)):
        return cast("Mapping[Any, Any]", value)
    raise UnsupportedValueError(
        f"{render_path(path)} is {an_instance(value)}: rows are of tensors and numpy arrays{_instead_of(value)}"
    )


def _instead_of(value: Any) -> str:
    if isinstance(value, (bool, int, float)):
        return f": write torch.tensor({value!r})"
    if not isinstance(value, (list, tuple)) or not value:
        return ""
    first: Any = cast("Sequence[Any]", value)[0]
    if isinstance(first, torch.Tensor) or is_tensor_collection(first):
        return ": torch.stack(...) of it is a batch"
    if isinstance(first, Mapping):
        return ": a batch is one dict, with torch.stack(...) of what the rows have under each key"
    return ": torch.tensor(...) of it is one" if isinstance(first, (bool, int, float)) else ""


def check_dense(tensor: torch.Tensor, name: str) -> None:
    """Raises UnsupportedValueError where rows can't be such tensors."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise UnsupportedValueError(f"{name} is a tensor of another layout, {kind}: rows are of dense tensors")


def _with_bytes(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """Returns the tensor, on the CPU, once it is known to have memory. Raises UnsupportedValueError."""
    if isinstance(tensor, StoredTensor):
        return tensor.clone()
    check_dense(tensor, render_path(path))
    reason = why_no_memory(tensor)
    if reason is not None:
        raise UnsupportedValueError(f"{render_path(path)} is {reason}; rows are of dense tensors")
    return tensor.detach().cpu()


def _difference(leaf: Leaf, tensor: torch.Tensor, *, single: bool) -> str | None:
    row, dtype = tuple(leaf.shape[1:]), DTYPES[leaf.dtype]
    shape = tuple(tensor.shape)
    if tensor.dtype is dtype and (shape == row if single else shape[1:] == row and bool(shape)):
        return None
    expected = list(row) if single else ["rows", *row]
    return f"{render_path(leaf.name)} is {tensor.dtype} of shape {list(shape)}, and takes {dtype} of shape " + str(
        expected
    ).replace("'", "")


def _bits(tensor: torch.Tensor) -> Array:
    """Returns a tensor's bits as integers of the same size: numpy has not every dtype."""
    plain = tensor.resolve_conj().resolve_neg()
    return plain.view(_SAME_SIZE[plain.dtype.itemsize]).numpy()


class naming:
    """Gives errors of what the caller has given the key."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, MemstoreError):
            error.key = self._key
