"""Folders that `TensorDict.load_memmap` reads, of stored values. memmap.py has their layout."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensordict
import torch
from tensordict.utils import _STR_DTYPE_TO_DTYPE

from memstore import structure
from memstore.engine import Path
from memstore.errors import UnsupportedValueError, lacks_told
from memstore.formats.memmap import PICKLES
from memstore.formats.output import Meter, new_file, new_folder, what_special
from memstore.structure import name_of
from memstore.wording import an

_TAKEN = frozenset({"shape", "device", "_type"})  # names that meta.json uses itself, and would lose


def write_memmap(path: str, value: Any, meter: Meter, *, durable: bool, allow_pickle: bool) -> None:
    """The folder that `TensorDict.load_memmap` reads. tensordict makes it, but for the bytes of the tensors.

    Those it would write through mappings, where a full disk ends the process.
    """
    source = as_collection(value)
    meter.total = sum(tensor.numel() * tensor.itemsize for _, tensor in structure.iter_tensors(source))
    with new_folder(path, durable=durable) as folder:
        for tensor, name in make_folder(folder, source, allow_pickle=allow_pickle):
            with new_file(name, meter, durable=False) as file:
                file.write_tensor(tensor)


def as_collection(value: Any) -> Any:
    """The TensorDict that is written for a value. Raises UnsupportedValueError, naming the leaf, for what has none."""
    source = _as_collection(value, ())
    for name, tensor in structure.iter_tensors(source):
        special = what_special(tensor)
        if special:
            raise _refusal(name, special)
        if str(tensor.dtype) not in _STR_DTYPE_TO_DTYPE:
            raise _refusal(name, f"{tensor.dtype}, which tensordict doesn't load")
        for part in _TAKEN.intersection(name):
            raise _refusal(name, f"the key {part!r}, which the layout uses itself")
    return source


def make_folder(folder: str, source: Any, *, allow_pickle: bool) -> list[tuple[torch.Tensor, str]]:
    """All of a TensorDict but the bytes of its tensors, in an empty folder.

    Returns: the tensors that have elements, each with the file that is to have them, which has holes as yet.
    """
    try:
        with lacks_told(folder):
            target = source.memmap_like(folder, copy_existing=True)
    except OSError:
        raise
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
        raise UnsupportedValueError(f"TensorDict.memmap can't write it: {error}") from error
    if not allow_pickle:
        _check_no_pickles(folder)
    pairs = zip(structure.iter_tensors(source), structure.iter_tensors(target), strict=True)
    return [(tensor, str(place.filename)) for (_, tensor), (_, place) in pairs if tensor.numel()]  # type: ignore[attr-defined]


def _as_collection(value: Any, path: Path) -> Any:
    """dicts as TensorDicts without a batch size, what lies in them too."""
    if tensordict.is_tensor_collection(value):
        return value
    if not isinstance(value, dict):
        raise _refusal(path, f"{an(type(value))} instead of a TensorDict, tensorclass or dict")
    entries: dict[str, Any] = {}
    for key, entry in value.items():
        if type(key) is not str:
            raise _refusal((*path, name_of(key)), "a key that is no str")
        if isinstance(entry, dict):
            entries[key] = _as_collection(entry, (*path, key))
        elif isinstance(entry, torch.Tensor) or tensordict.is_tensor_collection(entry):
            entries[key] = entry
        elif next(structure.iter_tensors(entry), None) is not None or isinstance(entry, np.ndarray):
            raise _refusal((*path, key), f"{an(type(entry))} with tensors in it")
        else:
            entries[key] = tensordict.NonTensorData(entry)
    return tensordict.TensorDict(entries, batch_size=[])


def _check_no_pickles(folder: str) -> None:
    for parent, _, names in os.walk(folder):
        if not set(PICKLES).isdisjoint(names):
            what = os.path.relpath(parent, folder).split(os.sep)
            raise _refusal(tuple(what), "an object that would be pickled: open the store with allow_pickle=True")


def _refusal(path: Path, why: str) -> UnsupportedValueError:
    name = "value" + "".join(f"[{part!r}]" for part in path)
    return UnsupportedValueError(f"{name}: {why}, which can't be exported as memmap")
