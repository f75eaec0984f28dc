"""Source: a pinned version whose bytes lazy leaves read.

A source is pickled as its pin is: see `engine/pin.py`. Whoever unpickles it has the version mapped at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

import msgspec
import numpy as np

from memstore import contents
from memstore.engine import Pin, Record
from memstore.errors import CorruptionError
from memstore.late_imports import between_forks

Memory = np.ndarray[Any, np.dtype[np.uint8]]


@functools.cache
def _prepare_torch() -> None:
    """Imports what torch's C++ would import at the first operator on a lazy leaf: a fork would not wait for that."""
    with between_forks(), contextlib.suppress(ImportError):  # a torch without distributed
        importlib.import_module("torch.distributed.tensor")


def without_leaves(record: Record) -> Record:
    """The record without what each leaf knows of itself, so that a reference to one leaf of many is small."""
    return msgspec.structs.replace(
        record, description=b"", objects=b"", checksums=None, objects_checksum=None, boxes=None
    )


class Source:
    """A version of a key, pinned, and its data section in memory.

    Attributes:
        memory: the data section. Never written: nobody else may hold this mapping.
        is_on_disk: whether its bytes may have to come from a disk.
    """

    __slots__ = ("__weakref__", "is_on_disk", "mapping", "memory", "pin")

    def __init__(self, pin: Pin, memory: Memory) -> None:
        _prepare_torch()
        self.pin, self.memory = pin, memory
        self.mapping = None if pin.held is None else pin.held.mapping
        self.is_on_disk = self.mapping is not None and (not pin.root.on_tmpfs or pin.record.adopted is not None)

    @property
    def address(self) -> int:
        """Where its memory lies."""
        return int(self.memory.__array_interface__["data"][0])

    @property
    def key(self) -> str:
        return self.pin.key

    @property
    def version(self) -> int:
        return self.pin.record.version

    def damaged(self, detail: str, place: int = 0) -> CorruptionError:
        """`place`: where the damage is, in the data section."""
        return contents.damaged(self.pin.root, self.key, self.pin.record, detail, place)

    def __reduce__(self) -> tuple[Any, ...]:
        return receive, (self.pin,)


def receive(pin: Pin) -> Source:
    """Unpickles a source. Raises VersionGoneError if the version was replaced, and the lease is over."""
    held = pin.held or pin.map()
    if held is None:
        raise pin.gone()
    pin.held = held
    return Source(pin, contents.memory_of(held))
