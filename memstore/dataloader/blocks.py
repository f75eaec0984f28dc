"""Blocks: shared memory for one batch after the other. A worker fills one, and gets it back when its batch is dropped.

The first page of a block says who has it: a random token, by which it is known; the *lap*, how many batches it has had;
and a byte for each tensor that was sent, its *ticket*. Whoever receives the tensor gives the ticket back when nothing
refers to the tensor's memory any more. A block without tickets out is filled again. All of it is stores of single
bytes: no lock that somebody could die with, and nothing that has to be sent back.

A fork makes a second holder, who can't be asked. So of what a process has in the moment of a fork, tickets come back as
*lost*, and such a block is never filled again.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from memstore import modes
from memstore.engine import Mapping, map_file, syscalls
from memstore.engine.syscalls import Cleanup
from memstore.late_imports import Hooks, around_forks
from memstore.structure import over

BACK, OUT, HELD, LOST = range(4)  # what a ticket is, and what a worker's own tensors are
LAP_AT, TICKETS_AT = 16, 64
START = syscalls.PAGE  # of the tensors
MOST_TICKETS = START - TICKETS_AT
# A ticket is given back by a plain store behind the last load: elsewhere the two may change places.
IS_IN_ORDER = platform.machine() in ("x86_64", "AMD64")

_when_dropped = [BACK]


def _before_fork() -> None:
    global _when_dropped
    _when_dropped[0] = LOST
    _when_dropped = [BACK]


around_forks(Hooks(_before_fork, lambda: None, lambda: None))


class Part(msgspec.Struct, gc=False):
    """Bytes of a block, for numpy. With its last reference they are given back, in C alone, and before the mapping.

    That order is the order of slots, and slots are in that of their names.
    """

    address: int
    size: int
    _cleanup: Cleanup
    _memory: Block

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.size,), "data": (self.address, False)}


class Block:
    """A block that this process has mapped.

    Args:
        fd: its file, which the caller closes.
        size: its bytes, with the first page.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._mapping: Mapping = map_file(fd, size, shared=True)
        head = self._mapping.view()[:START]
        self.token, self.tickets = head[:LAP_AT], head[TICKETS_AT:]
        self._lap = head[LAP_AT:TICKETS_AT].cast("Q")

    @property
    def lap(self) -> int:
        return self._lap[0]

    @lap.setter
    def lap(self, lap: int) -> None:
        self._lap[0] = lap

    @property
    def address(self) -> int:
        return self._mapping.address

    def populate(self) -> None:
        """Maps its pages at once, if it can, so that the first batch takes no longer than others."""
        syscalls.populate(self._mapping.address, self.size)

    def part(self, start: int, size: int, dropped: Callable[[int, int], None], place: int) -> Part:
        """The bytes from `start` on. When they are dropped, `dropped` is called with `place` and BACK or LOST."""
        return Part(self._mapping.address + start, size, Cleanup(dropped, (place,), _when_dropped), self)


@modes.uncompiled
def tensor_over(
    part: Part, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor that has the part, as has all that is made of it. `offset` counts elements."""
    memory = np.asarray(part)
    storage = torch.from_numpy(memory).untyped_storage()
    storage._memstore_mapping = memory  # type: ignore[attr-defined] - for aliases, after share_memory_
    return over(storage, dtype, offset, shape, stride)
