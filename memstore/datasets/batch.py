"""A batch of rows on its way into a dataset: its tensors by leaf, compared with what a row is, as numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from tensordict import is_tensor_collection

from memstore.engine import Leaf, Path
from memstore.errors import StructureMismatchError, UnsupportedValueError
from memstore.structure import DTYPES, Plan, render_path, traits
from memstore.view import StoredTensor

Array = np.ndarray[Any, Any]

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
NUMPY_SAME_SIZE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}  # not every dtype has one


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows to be stored: for each leaf of the dataset an array of their bits. Nothing is copied but from devices."""

    count: int
    arrays: tuple[Array, ...]


def take_batch(key: str, plan: Plan, value: Any, *, single: bool = False) -> Batch:
    """Compares a batch with what the rows of `plan` are; `single`: one row, without the dimension that counts them.

    Raises:
        StructureMismatchError: other leaves, shapes or dtypes, or leaves of different numbers of rows. All that is
            wrong is listed.
        UnsupportedValueError: a leaf that has no bytes.
    """
    found = dict(_leaves(value, ()))
    wrong = [f"{render_path(name)} is too much" for name in found if name not in {leaf.name for leaf in plan.leaves}]
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
        raise StructureMismatchError(f"{key!r}: this {what} doesn't fit the dataset: {'; '.join(wrong)}", key=key)
    return Batch(counts.pop(), tuple(map(_bits, tensors)))


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if is_tensor_collection(value) or isinstance(value, Mapping):
        for key, inner in cast("Mapping[Any, Any]", value).items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, torch.Tensor):
        yield path, _with_bytes(value, path)
    elif isinstance(value, np.ndarray):
        try:
            yield path, torch.as_tensor(value)
        except (TypeError, ValueError) as error:
            raise UnsupportedValueError(f"{render_path(path)}: {error}") from None
    else:
        raise UnsupportedValueError(
            f"{render_path(path)} is a {type(value).__qualname__}: rows are of tensors and numpy arrays"
        )


def _with_bytes(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """The tensor, on the CPU, once it is known to have memory. Raises UnsupportedValueError."""
    if isinstance(tensor, StoredTensor):
        return tensor.clone()
    what = ""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        what = f"a tensor of layout {tensor.layout}, nested or quantized"
    elif tensor.is_meta:
        what = "a meta tensor"
    else:
        try:
            storage = tensor.untyped_storage()
            is_there = storage.device == tensor.device and not traits.is_cut(tensor)
            if not is_there or (tensor.numel() and not tensor.data_ptr()):
                what = f"a {type(tensor).__qualname__} whose bytes aren't there"
        except (RuntimeError, NotImplementedError):  # of a transform, or a fake one
            what = f"a {type(tensor).__qualname__} that has no memory of its own"
    if what:
        raise UnsupportedValueError(f"{render_path(path)} is {what}: rows are of dense tensors")
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
