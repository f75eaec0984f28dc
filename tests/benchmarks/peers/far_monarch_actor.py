"""The actor of `far_monarch`: it holds values, and lets others read their memory. Imported on the hosts only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from monarch.actor import Actor, endpoint  # pyright: ignore[reportMissingTypeStubs]
from monarch.rdma import RDMABuffer  # pyright: ignore[reportMissingTypeStubs]

from tests.benchmarks.peers.far import ROW, Work, value_of


class Holder(Actor):
    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor] = {}
        self._readable = torch.zeros(0)

    @endpoint
    def hold(self, work: Work, numbers: Sequence[int]) -> None:
        self._values.clear()
        for number in numbers:
            value = value_of(work, number)
            self._values[number] = torch.cat(list(value.values())) if isinstance(value, dict) else value

    @endpoint
    def keep(self, value: torch.Tensor) -> None:
        self._values[0] = value

    @endpoint
    def where(self, number: int) -> int:
        """As a store's controller is asked, who has a value."""
        return number

    @endpoint
    def value(self, number: int) -> torch.Tensor:
        return self._values[number]

    @endpoint
    def readable(self, picks: torch.Tensor | None) -> RDMABuffer:
        """The last value, or rows of it, as memory that others may read."""
        last = list(self._values.values())[-1]
        memory = last if picks is None else last.reshape(-1, ROW // last.element_size())[picks]
        self._readable = memory.reshape(-1).view(torch.uint8)
        return RDMABuffer(self._readable)
