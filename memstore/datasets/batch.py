"""Rows on their way into a dataset or buffer: their tensors by leaf, compared with what a row is, as numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from tensordict import (
    is_non_tensor,  # pyright: ignore[reportUnknownVariableType]
    is_tensor_collection,
)

from memstore.engine import Leaf, Path
from memstore.errors import MemstoreError, StructureMismatchError, UnsupportedValueError
from memstore.structure import DTYPES, MAX_DEPTH, Plan, render_path, tensor_of_array, why_no_memory
from memstore.view import StoredTensor
from memstore.wording import an_instance

Array = np.ndarray[Any, Any]

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
NUMPY_SAME_SIZE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}  # not every dtype has one


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows to be stored: for each leaf an array of their bits. Nothing is copied but from devices."""

    count: int
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
    """Its values as a tensor. Raises UnsupportedValueError."""
    tensor = tensor_of_array(array)
    if tensor is None:
        raise UnsupportedValueError(f"{render_path(path)} is a numpy array of {array.dtype}, which no tensor can have")
    return tensor


def entries_of(value: Any, path: Path) -> Mapping[Any, Any]:
    """Of what is no tensor. Raises UnsupportedValueError where it has none, or nests too deeply."""
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
    """The tensor, on the CPU, once it is known to have memory. Raises UnsupportedValueError."""
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
    """As integers of the same size: numpy has not every dtype."""
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
