"""Walks a value whose rows are read: adds its leaves to a gather, and makes what is returned."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

from memstore import structure
from memstore.errors import StructureMismatchError
from memstore.late_imports import between_forks
from memstore.rows.gather import Gather
from memstore.rows.path import Path, name_of
from memstore.rows.targets import check_there, entry_of, matching


def plan(gather: Gather, source: Any, out: Any, path: Path = ()) -> Any:
    """What the rows of `source` become: `out`, or a new value, yet to be filled."""
    if isinstance(source, torch.Tensor) and not _is_collection(source):
        return gather.add(source, out, path)
    if isinstance(source, dict):
        return _dict(gather, source, out, path)
    if isinstance(source, (list, tuple)):
        return _sequence(gather, source, out, path)
    if _is_collection(source):
        with between_forks():
            from memstore.rows.collections import plan_collection

        return plan_collection(gather, source, out, path, plan)
    if next(structure.iter_tensors(source), None) is not None:
        kind = type(source).__qualname__
        raise TypeError(f"{name_of(path)} is a {kind}: rows are those of dicts, lists, tuples and TensorDicts")
    return source if out is None else out  # no tensor: it has no rows


def _dict(gather: Gather, source: dict[Any, Any], out: Any, path: Path) -> Any:
    outs = matching(source, out, path)
    entries = {
        key: plan(gather, value, entry_of(value, outs, key, path), (*path, key)) for key, value in source.items()
    }
    if out is not None:
        return out
    if type(source) is dict:
        return entries
    found = copy.copy(source)  # an OrderedDict, or what else a view has
    found.update(entries)
    return found


def _sequence(gather: Gather, source: Any, out: Any, path: Path) -> Any:
    outs = [None] * len(source) if out is None else out
    if not isinstance(outs, (list, tuple)) or len(outs) != len(source):
        raise StructureMismatchError(f"{name_of(path)} of out is no {type(source).__qualname__} of {len(source)}")
    if out is not None:
        for i, (one, other) in enumerate(zip(source, outs, strict=True)):
            check_there(one, other, (*path, i))
    pairs = enumerate(zip(source, outs, strict=True))
    entries = [plan(gather, one, other, (*path, i)) for i, (one, other) in pairs]
    if out is not None:
        return out
    kind: Any = type(source)
    return kind(*entries) if hasattr(kind, "_fields") else kind(entries)


def _is_collection(value: Any) -> bool:
    asked: Any = getattr(sys.modules.get("tensordict"), "is_tensor_collection", None)
    return asked is not None and asked(value) and not isinstance(value, type)
