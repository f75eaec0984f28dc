"""memstore between hosts: one store, opened by a process on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch

import memstore
from tests.benchmarks.on_hosts import OWNER, READER
from tests.benchmarks.peers import Value
from tests.benchmarks.peers.far import Far, Taken, Work, take_each, value_of
from tests.benchmarks.report import Role
from tests.distributed.hosts.clusters import ROOT


class Asked(NamedTuple):
    """What one call costs.

    Attributes:
        messages: to owners, of the reader's process.
        requests: for bytes, on its streams.
        sent: bytes that leave the owner's host.
    """

    messages: int
    requests: int
    sent: int


class FarStore(Far):
    id: ClassVar[str] = "memstore"
    name: ClassVar[str] = "memstore"
    settings: ClassVar[str] = "get of a version that this host has never had; rows: read_rows of a view"
    role: ClassVar[Role] = "memstore"

    def setup(self) -> None:
        self.owner, self.reader = self.hosts.process_on(OWNER), self.hosts.process_on(READER)
        for process in (self.owner, self.reader):
            process.run(open_store)

    def offer(self, work: Work, numbers: Sequence[int]) -> None:
        self.owner.run(put_all, work, numbers)

    def take(self, work: Work, numbers: Sequence[int], *, check: bool) -> list[Taken]:
        taken = self.reader.run(take, work, numbers, check)
        if check and work.is_put:
            self.owner.run(check_put, work, numbers)
        return taken

    def asked(self, work: Work, number: int) -> Asked:
        """Counts one call. Not timed."""
        self.offer(work, [number])
        before = self.owner.sent_bytes()
        messages, requests = self.reader.run(count_asked, work, number)
        return Asked(messages, requests, self.owner.sent_bytes() - before)

    def close(self) -> None:
        for name in ("owner", "reader"):
            if hasattr(self, name):
                getattr(self, name).close()


# --- on the hosts -----------------------------------------------------------------------------------------------------

_here: list[memstore.Store] = []


def open_store() -> None:
    _here[:] = [memstore.open(ROOT, "r+")]


def key_of(work: Work, number: int) -> str:
    """A key of its own for each value that is offered at once; later ones overwrite them."""
    return f"{work.id}/{number % 64 if work.moved < 1 << 20 else 0}"


def put_all(work: Work, numbers: Sequence[int]) -> None:
    for number in numbers:
        _here[0].put(key_of(work, number), value_of(work, number))


def take(work: Work, numbers: Sequence[int], check: bool) -> list[Taken]:
    return take_each(_put if work.is_put else _rows if work.picks else _get, work, numbers, check)


def check_put(work: Work, numbers: Sequence[int]) -> None:
    for number in numbers:
        found: Any = _here[0].get(key_of(work, number))
        if not found.equal(value_of(work, number)):
            raise ValueError(f"{work.id}: what was put is not value {number}")


def count_asked(work: Work, number: int) -> tuple[int, int]:
    from memstore.distributed.links import Links
    from memstore.distributed.transfers.receiving import Stream

    with (
        patch.object(Links, "send", autospec=True, side_effect=Links.send) as messages,
        patch.object(Stream, "send", autospec=True, side_effect=Stream.send) as requests,
    ):
        take(work, [number], True)
    return messages.call_count, requests.call_count


def _put(work: Work, number: int, value: Value) -> None:
    _here[0].put(key_of(work, number), value)


def _get(work: Work, number: int, _: None) -> Value:
    return _here[0].get(key_of(work, number))


def _rows(work: Work, number: int, picks: torch.Tensor) -> Value:
    return memstore.read_rows(_here[0].view(key_of(work, number)), picks)
