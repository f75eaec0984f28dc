"""Rows as a caller gives them, made ready to be copied: the plain ones by a short way, all others by that of datasets.

The short way takes plain CPU tensors in dicts and TensorDicts, and 1 us a leaf; the other compares all that may be
wrong, and says it, in some ten.
"""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from memstore.datasets import Batch, take_batch
from memstore.replay.ring import Ring
from memstore.structure import DTYPES, is_readable, modes

Level = dict[str, "Level | int"]  # the names of a level, with the numbers of their leaves


class Intake:
    """Takes rows of one buffer."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._level: Level | int = {}
        for number, leaf in enumerate(ring.plan.leaves):
            names = [str(name) for name in leaf.name]
            if not names:
                self._level = number
                break
            at: Any = self._level
            for name in names[:-1]:
                at = at.setdefault(name, {})
            at[names[-1]] = number
        self._dtypes = [DTYPES[leaf.dtype] for leaf in ring.plan.leaves]
        self._shapes = [torch.Size(leaf.shape[1:]) for leaf in ring.plan.leaves]
        self._bits = [array.dtype for array in ring.arrays]
        self._has_numpy = [_has_numpy(dtype) for dtype in self._dtypes]

    def take(self, value: Any, *, single: bool) -> Batch:
        """Raises as `take_batch`."""
        if modes.are_active():
            with modes.put_aside():
                return take_batch(self._ring.key, self._ring.plan, value, single=single)
        arrays: list[Any] = [None] * len(self._dtypes)
        count = self._collect(self._level, value, arrays, 1 if single else -1, single)
        if count < 0:
            return take_batch(self._ring.key, self._ring.plan, value, single=single)
        return Batch(count, tuple(arrays))

    def _collect(self, level: Any, value: Any, arrays: list[Any], count: int, single: bool) -> int:
        """Fills `arrays`, and returns how many rows there are; -1: something is not plain."""
        if type(level) is int:
            return self._leaf(level, value, arrays, count, single)
        kind: type[Any] = type(value)
        if kind is TensorDict:
            value = value._tensordict
            kind = type(value)
        if kind is not dict or len(value) != len(level):
            return -1
        for name, inner in level.items():
            found: Any = value.get(name)
            count = self._collect(inner, found, arrays, count, single)
            if count < 0:
                return -1
        return count

    def _leaf(self, number: int, tensor: Any, arrays: list[Any], count: int, single: bool) -> int:
        if type(tensor) is not torch.Tensor or tensor.dtype is not self._dtypes[number] or not tensor.is_cpu:
            return -1
        shape = tensor.shape
        if single:
            is_fit, rows = shape == self._shapes[number], 1
        else:
            is_fit, rows = len(shape) > 0 and shape[1:] == self._shapes[number], shape[0] if shape else 0
        if not is_fit or (count >= 0 and rows != count) or tensor.layout is not torch.strided or tensor.is_nested:
            return -1
        if not is_readable(tensor):
            return -1
        plain = tensor.detach() if tensor.requires_grad else tensor
        array: Any = plain.numpy() if self._has_numpy[number] else plain.view(self._ring.tensors[number].dtype).numpy()
        array = array.view(self._bits[number])
        arrays[number] = array[None] if single else array
        return rows


def _has_numpy(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True
