"""Which rows are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memstore.wording import an

_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64})
_LARGEST = np.iinfo(np.int64).max


class Index:
    """An index as it was given, checked; `rows(n)` is what it means for leaves of n rows."""

    def __init__(self, index: Any) -> None:
        self._given: slice | range | torch.Tensor = index if isinstance(index, (slice, range)) else _as_tensor(index)
        self._rows: dict[int, torch.Tensor] = {}
        self._low, self._high = 0, -1  # of no row
        given = self._given
        if isinstance(given, range):
            if given:
                self._low, self._high = min(given[0], given[-1]), max(given[0], given[-1])
        elif isinstance(given, torch.Tensor) and given.dtype != torch.bool and given.numel():
            self._low, self._high = int(given.min()), int(given.max())

    @property
    def memory(self) -> torch.Tensor | None:
        """What must not be written while rows are read."""
        return self._given if isinstance(self._given, torch.Tensor) else None

    def rows(self, count: int, what: str) -> torch.Tensor:
        """The rows of a leaf that has `count` of them: int64, from 0 on. `what` names the leaf in errors."""
        found = self._rows.get(count)
        if found is None:
            found = self._rows[count] = self._find(count, what)
        return found

    def _find(self, count: int, what: str) -> torch.Tensor:
        given = self._given
        if isinstance(given, slice):
            return torch.tensor(range(*given.indices(count)), dtype=torch.int64)
        if isinstance(given, torch.Tensor) and given.dtype == torch.bool:
            if len(given) != count:
                raise IndexError(
                    f"a mask of {len(given):,} for {what}, which has {count:,} rows: it takes one for each"
                )
            return given.nonzero().squeeze(1)
        if self._low < -count or self._high >= count:
            wrong = self._low if self._low < -count else self._high
            allowed = f"from {-count:,} to {count - 1:,}" if count else "none, for it is empty"
            raise IndexError(f"row {wrong:,} of {what}, which has {count:,}: rows are {allowed}")
        if isinstance(given, range):  # not before: it may be of any length
            given = torch.from_numpy(np.asarray(given, np.int64))
        return torch.where(given < 0, given + count, given) if self._low < 0 else given


def _as_tensor(index: Any) -> torch.Tensor:
    if isinstance(index, torch.Tensor) and (index.layout is not torch.strided or index.is_nested or index.is_meta):
        raise _no_index(f"a tensor of layout {index.layout} on {index.device}")
    if isinstance(index, torch.Tensor) and index.dtype == torch.uint64:  # which torch can't compare
        index = index.detach().cpu().numpy()
    if isinstance(index, (list, tuple)):
        index = np.asarray(index, None if len(index) else np.int64)
    if isinstance(index, np.ndarray):
        if index.dtype.kind not in "iub" or index.dtype == np.uint8:
            raise _no_index(f"an array of {index.dtype}")
        if index.dtype == np.uint64 and index.size and index.max() > _LARGEST:
            raise IndexError(f"row {index.max():,}: no tensor has so many")
        index = torch.from_numpy(index.astype(bool if index.dtype.kind == "b" else np.int64))
    if not isinstance(index, torch.Tensor):
        raise _no_index(f"the number {index}" if isinstance(index, int) else f"{an(type(index))}")
    if index.dtype not in _INTEGERS and index.dtype != torch.bool:
        raise _no_index(f"a tensor of {index.dtype}")
    if index.ndim != 1:
        raise ValueError(f"an index of rows has one dimension, and not {index.ndim}: shape {tuple(index.shape)}")
    return index.detach().to("cpu", index.dtype if index.dtype == torch.bool else torch.int64).contiguous()


def _no_index(what: str) -> TypeError:
    return TypeError(
        f"{what} is no index of rows: it takes integers or booleans (uint8 might mean either), as a list, array or "
        "tensor of one dimension, a slice or a range"
    )
