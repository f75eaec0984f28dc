"""Files of `torch.save`: those of the zip format (since torch 1.6) are served in place, others loaded for a copy.

torch reads the structure, in its safe mode unless pickle is allowed, over a mapping of the file, so no data is read.
Where each storage lies in the file tells the mapping; the zip's directory tells which bytes are storages. Tensors come
on the CPU, wherever they were saved from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from memstore import structure
from memstore.engine import ExternalFiles, file_offsets, opened, syscalls
from memstore.errors import CorruptionError, ResourceLimitError, UnsupportedValueError, lacks_told
from memstore.formats.documents import damaged
from memstore.formats.torch_zip import Archive, is_legacy, read_archive

_GLOBAL = re.compile(r"GLOBAL (\S+)")
_UNPICKLER_SAYS = re.compile(r"WeightsUnpickler error:\s+(.+)")
_LOAD_SAYS = re.compile(r"Weights only load failed\. (.+)")


class _WrappersError(Exception):
    """A file has tensors that wrap others, which torch loads only to a device that it is told by name."""


_Place = Callable[[Any, str], Any]  # of storages


def read_torch(path: str, sources: ExternalFiles, allow_pickle: bool) -> structure.ExternalValue:
    path = os.path.realpath(path)
    with opened(path) as (fd, found):
        if is_legacy(syscalls.read_at(fd, 64, 0)):
            raise UnsupportedValueError(
                f"{path} has torch.save's format before torch 1.6, which can't be served in place: attach it with "
                "copy=True"
            )
        archive = read_archive(path, fd, found.st_size)
        value = _load_archive(path, fd, found, archive, allow_pickle)
        base = sources.add(path, found)

    def locate(addresses: Sequence[int]) -> list[int]:
        offsets = file_offsets(addresses, path, found.st_ino)
        if offsets is None:
            raise UnsupportedValueError(
                "it has a NumPy array, a quantized tensor or another that torch makes anew, so that its bytes can't be "
                "served in place: attach it with copy=True"
            )
        return [base + offset for offset in offsets]

    try:
        return structure.describe_external_value(value, locate, allow_pickle=allow_pickle)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{path}: {error.message}") from None
    except CorruptionError as error:
        raise UnsupportedValueError(f"{path}: tensors that can't be served in place ({error.detail})") from None


def load_torch(path: str, allow_pickle: bool) -> Any:
    """What is in a file, as torch.load gives it: for a copy."""
    path = os.path.realpath(path)
    with opened(path) as (fd, found):
        if is_legacy(syscalls.read_at(fd, 64, 0)):
            return _load_legacy(path, fd, found.st_size, allow_pickle)
        return _load_archive(path, fd, found, read_archive(path, fd, found.st_size), allow_pickle)


def _load_archive(path: str, fd: int, found: os.stat_result, archive: Archive, allow_pickle: bool) -> Any:
    """The value over a mapping of the file. No storage has other bytes than those that the directory says."""
    spans: list[tuple[int, int]] = []

    def place(storage: torch.UntypedStorage, _: str) -> torch.UntypedStorage:
        if storage.nbytes():
            spans.append((storage.data_ptr(), storage.nbytes()))
        return storage

    try:
        value = _load(path, fd, archive, place, allow_pickle)
    except _WrappersError:  # torch takes no function for them
        value = _load(path, fd, archive, "cpu", allow_pickle)
        storages = [tensor.untyped_storage() for tensor in _tensors_of(path, value, allow_pickle)]
        spans = [(storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes()]
    offsets = file_offsets([address for address, _ in spans], path, found.st_ino) or []
    if len(offsets) != len(spans) or not all(
        archive.has(start, start + nbytes) for start, (_, nbytes) in zip(offsets, spans, strict=True)
    ):
        damaged(path, "a tensor lies in none of its storages")
    return value


def _tensors_of(path: str, value: Any, allow_pickle: bool) -> list[torch.Tensor]:
    try:
        _, walk, *_ = structure.take_apart(value, lambda careful: structure.Walk(allow_pickle, careful))
    except structure.RefusedError as error:
        raise UnsupportedValueError(f"{path}: {error.message()}") from None
    return walk.tensors


def _load_legacy(path: str, fd: int, size: int, allow_pickle: bool) -> Any:
    left = size

    def place(storage: torch.UntypedStorage, _: str) -> torch.UntypedStorage:
        """Zeros instead of whatever torch found in its memory: a file need not fill what it asks for."""
        nonlocal left
        left -= storage.nbytes()
        if left < 0:
            damaged(path, "its tensors are larger than it is: it is truncated, or none of torch.save")
        return torch.from_numpy(np.zeros(storage.nbytes(), np.uint8)).untyped_storage()

    return _load(path, fd, None, place, allow_pickle)


def _load(path: str, fd: int, archive: Archive | None, place: _Place | str, allow_pickle: bool) -> Any:
    located: Any = place  # torch's stubs name another class of storages than it passes
    name = f"/proc/self/fd/{fd}"  # the file that was looked at, though its path may name another by now
    try:
        with lacks_told(path):
            return torch.load(name, map_location=located, mmap=archive is not None, weights_only=not allow_pickle)
    except ResourceLimitError as error:
        if archive is None or archive.is_intact:
            raise
        text = f"{error.message}; or it is damaged: its data.pkl, which asks for that, doesn't fit its checksum"
        raise ResourceLimitError(text, code=error.errno) from error
    except (OSError, MemoryError, RecursionError, CorruptionError):
        raise
    except RuntimeError as error:
        if "Callable map_location" in str(error) and archive is not None:
            raise _WrappersError from error
        _refuse(path, archive, allow_pickle, error)
    except Exception as error:  # of the pickle's opcodes, with whatever arguments
        _refuse(path, archive, allow_pickle, error)


def _refuse(path: str, archive: Archive | None, allow_pickle: bool, error: Exception) -> NoReturn:
    """What it means that torch could not load a file. Only damage is told as damage."""
    text = str(error)
    said = _UNPICKLER_SAYS.search(text) or _LOAD_SAYS.search(text)
    detail = said[1] if said else f"{type(error).__name__}: {text}"
    missing = _GLOBAL.search(text)
    if archive is not None and not archive.is_intact:
        damaged(path, f"its data.pkl doesn't fit its checksum, and torch can't read it: {detail}")
    if "must be imported" in text:
        raise UnsupportedValueError(f"{path}: {detail}: import them, and attach it again") from error
    if not allow_pickle and missing:
        raise UnsupportedValueError(
            f"{path} has objects ({missing[1]}) that only pickle can read, which can run code: open the store with "
            "allow_pickle=True if you trust whoever wrote it"
        ) from error
    if not allow_pickle and said:
        other = "" if archive else ", or is damaged"
        raise UnsupportedValueError(
            f"{path} needs pickle{other} ({detail}), which can run code: open the store with allow_pickle=True if you "
            "trust whoever wrote it; or, if it was saved with a pickle_protocol other than 2, save it anew without"
        ) from error
    if allow_pickle and isinstance(error, (ImportError, AttributeError)):
        raise UnsupportedValueError(f"{path} has objects of a class that this process hasn't: {text}") from error
    if allow_pickle and archive is not None:
        raise UnsupportedValueError(f"{path} has objects that can't be loaded: {detail}") from error
    damaged(path, f"torch can't read it: {detail}")
