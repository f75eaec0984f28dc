"""Two hosts for tests of transfers, in one process: what is put on the one is read on the other."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import memstore
from memstore import contents
from memstore.distributed.catalog import entry_of, look, record_of
from memstore.distributed.rules import Member
from memstore.distributed.transfers import Transfers
from memstore.engine import MappedEntry, Record, need_cluster
from tests.distributed.transfers.wires import PlainLinks, Serving, serving
from tests.inside import root_of


@dataclass
class Hosts:
    """Two: what is put on the one is read on the other."""

    here: memstore.Store
    there: memstore.Store
    served: Serving
    transfers: Transfers

    def record(self, key: str) -> Record:
        """As it is looked up here."""
        found = root_of(self.there).catalog.read(key.encode())
        assert found is not None
        there, here = root_of(self.there).member_id(), root_of(self.here).member_id()
        return record_of(entry_of(found, there), here)

    def hold(self, key: str, seconds: float = 20) -> MappedEntry | None:
        return self.transfers.hold(key.encode(), self.record(key), time.monotonic() + seconds)

    def get(self, key: str, *, verify: bool = False) -> Any:
        held = self.hold(key)
        assert held is not None
        return self.value(key, held, verify=verify)

    def value(self, key: str, held: MappedEntry, *, verify: bool = False) -> Any:
        return contents.read(root_of(self.here), key, held, contents.PLAIN_READ, verify=verify, allow_pickle=False)

    def copies(self) -> list[str]:
        found = look(root_of(self.here), lambda tables: tables.copies(b"", 100), time.monotonic() + 20)
        return [key.decode() for key, _ in found]


@contextmanager
def two_hosts(root: str, capacity: int | None = None) -> Generator[Hosts]:
    with (
        memstore.open(f"{root}-there", checksum=True) as there,
        memstore.open(root, timeout=10.0, capacity=capacity) as here,
        serving(there) as served,
    ):
        need_cluster(root_of(here), time.monotonic() + 20)

        def find(member: bytes) -> Member | None:
            return served.member if member == served.member.id else None

        made = Hosts(here, there, served, Transfers(root_of(here), PlainLinks(), find))
        yield made
        made.transfers.close()
        del made.transfers  # a test's arguments live longer than its store
