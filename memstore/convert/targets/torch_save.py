"""What torch.save writes, without its bytes passing through it: torch says which storage is to lie where.

torch.save is given a file that keeps what is short, and notes where torch hands over a storage. (torch computes no
checksums meanwhile, so it doesn't read them: as with `torch.serialization.set_crc32_options(False)`, the zip's own
checksums are left out, which torch.load never looks at.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import torch
from torch.serialization import get_safe_globals  # pyright: ignore[reportUnknownVariableType]

from memstore import structure
from memstore.convert.comparing import take_apart
from memstore.convert.leaves import Found, Leaf
from memstore.convert.rules import Rules
from memstore.convert.targets.parts import NewFile
from memstore.errors import UnsupportedValueError, lack_of
from memstore.sharding import whole
from memstore.wording import an


def draft_torch(found: Found, value: Any, rules: Rules) -> NewFile:
    """The file that torch.save makes of a value. Raises UnsupportedValueError for what it can't write."""
    for path, tensor in structure.iter_tensors(value):
        if tensor.dtype in structure.traits.WITHOUT_COPY:
            raise UnsupportedValueError(
                f"{structure.render_path(path)}: torch.save has no storage of {tensor.dtype}: convert to another format"
            )
        if structure.is_wrapper(type(tensor)) and not rules.allow_pickle and not _loads_safely(type(tensor)):
            raise UnsupportedValueError(
                f"{structure.render_path(path)}: torch.load reads {an(type(tensor))} only with pickle: convert it with "
                "allow_pickle=True if you trust the file, or add the class by torch.serialization.add_safe_globals"
            )
    sink = _Sink(_storages(found, value, rules))
    try:
        with _without_checksums():
            torch.save(value, sink)  # pyright: ignore[reportArgumentType]
    except (RuntimeError, AttributeError, TypeError) as error:  # what can't be pickled, among others
        if lack_of(error) is not None:
            raise
        raise UnsupportedValueError(f"torch.save can't write it: {error}") from error
    if sink.error is not None:
        raise sink.error
    return sink.file


def _loads_safely(kind: type) -> bool:
    known: list[Any] = list(get_safe_globals())  # pyright: ignore[reportUnknownArgumentType]
    return any(one is kind or (isinstance(one, tuple) and one[0] is kind) for one in known)


def _storages(found: Found, value: Any, rules: Rules) -> dict[tuple[int, int], Leaf]:
    """What storages have, by address and size in bytes."""
    storages: dict[tuple[int, int], Leaf] = {}
    for tensor in take_apart(value, rules).tensors.values():
        if not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key in storages:
            continue
        if found.is_stand_in(tensor):
            storages[key] = found.leaf(tensor)
        else:
            flat = structure.over(storage, torch.uint8, 0, (storage.nbytes(),), (1,))
            storages[key] = Leaf(torch.uint8, flat.shape, ((whole(flat.shape), flat),))
    return storages


class _Sink:
    """What torch.save writes to. An error waits until torch is done: raised within its C++, it would stay there."""

    def __init__(self, storages: Mapping[tuple[int, int], Leaf]) -> None:
        self.file = NewFile()
        self.error: BaseException | None = None
        self._storages = storages

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                self._take(view)
            except BaseException as error:
                self.error = error
        return len(view)

    def _take(self, view: memoryview) -> None:
        address = int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0
        leaf = self._storages.get((address, len(view)))
        if leaf is None:
            self.file.add(bytes(view))
        else:
            self.file.add_leaf(leaf)

    def flush(self) -> None:
        """Nothing is kept back."""


@contextlib.contextmanager
def _without_checksums() -> Generator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
