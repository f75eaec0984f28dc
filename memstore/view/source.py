"""Source: mapped bytes that lazy leaves read, and what they belong to. Here: a pinned version of a store.

A pinned version is pickled as its pin is: see `engine/pin.py`. Whoever unpickles it has the version mapped at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

import msgspec
import numpy as np
import torch

from memstore import contents
from memstore.engine import Absent, Pin, Record
from memstore.errors import CorruptionError
from memstore.late_imports import between_forks
from memstore.view import pages

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
    """What lazy leaves are parts of, and its bytes in memory.

    Attributes:
        memory: the bytes. Never written: nobody else may hold this mapping.
        mapping: what keeps them in memory; None for those of a record.
        is_on_disk: whether they may have to come from a disk, or another host.
        absent: what brings bytes of other hosts, which have to be asked for; None: all are mapped.
        key: what errors call it.
    """

    __slots__ = ("__weakref__", "absent", "is_on_disk", "key", "mapping", "memory")

    def __init__(
        self, memory: Memory, mapping: object | None, key: str, *, is_on_disk: bool, absent: Absent | None = None
    ) -> None:
        _prepare_torch()
        self.memory, self.mapping, self.key, self.is_on_disk = memory, mapping, key, is_on_disk
        self.absent = absent

    @property
    def title(self) -> str:
        """What its leaves say of it when they are printed."""
        raise NotImplementedError

    @property
    def address(self) -> int:
        """Where its memory lies."""
        return int(self.memory.__array_interface__["data"][0])

    # What is on a disk is asked for all at once, and read whether it has come or not. What is absent is there then.

    def bring(self, values: torch.Tensor) -> None:
        """Asks for elements over the memory that will be read, unless they are there."""
        if self.absent is None:
            pages.bring(values)
        else:
            contents.bring(self.absent, [values])

    def bring_bytes(self, start: int, nbytes: int) -> None:
        if self.absent is not None:
            first = self.address + start
            self.absent.need([first], [first + nbytes])

    def ask_for(self, values: torch.Tensor, rows: torch.Tensor) -> None:
        """As `bring`, of some rows."""
        if self.absent is None:
            pages.ask_for(values, rows)
        else:
            contents.bring_rows(self.absent, values, rows)

    def are_cold(self, values: torch.Tensor, rows: torch.Tensor) -> bool:
        """Whether some of the rows are to be asked for."""
        return self.absent is not None or pages.are_cold(values, rows)

    def damaged(self, detail: str, place: int = 0) -> CorruptionError:
        """`place`: where the damage is, in the memory."""
        raise NotImplementedError

    def again(self) -> Source | None:
        """The same bytes, mapped once more, for who may write them; None if there is no file to map, or it is gone."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        """As a reference: whoever unpickles it maps the bytes."""
        raise NotImplementedError


class PinnedSource(Source):
    """A version of a key, pinned; its memory is the data section."""

    __slots__ = ("pin",)

    def __init__(self, pin: Pin, memory: Memory) -> None:
        mapping = None if pin.held is None else pin.held.mapping
        absent = None if pin.held is None else pin.held.absent
        is_on_disk = mapping is not None and (
            not pin.root.on_tmpfs or pin.record.adopted is not None or absent is not None
        )
        super().__init__(memory, mapping, pin.key, is_on_disk=is_on_disk, absent=absent)
        self.pin = pin

    @property
    def title(self) -> str:
        return f"key={self.key!r}, version={self.pin.record.version}"

    def damaged(self, detail: str, place: int = 0) -> CorruptionError:
        return contents.damaged(self.pin.root, self.key, self.pin.record, detail, place)

    def again(self) -> PinnedSource | None:
        pin = self.pin
        held = None if self.mapping is None or self.absent is not None else pin.map()
        if held is None or held.mapping is None:
            return None
        return PinnedSource(Pin(pin.root, pin.key, pin.record, held, pin.options), contents.memory_of(held))

    def __reduce__(self) -> tuple[Any, ...]:
        return receive, (self.pin,)


def receive(pin: Pin) -> PinnedSource:
    """Unpickles a source. Raises VersionGoneError if the version was replaced, and the lease is over."""
    held = pin.held or pin.map()
    if held is None:
        raise pin.gone()
    pin.held = held
    return PinnedSource(pin, contents.memory_of(held))
