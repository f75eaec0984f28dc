"""Hosts in one process, each with a real root: requests are answered at once, by the rules over the real catalogs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from memstore.distributed.catalog import CatalogTables, look, look_or_run, record_of, run
from memstore.distributed.rules import (
    Answer,
    Client,
    Entry,
    Gather,
    Index,
    Member,
    Pause,
    Send,
    Standing,
    Steps,
    Transact,
    group_of,
    page,
)
from memstore.distributed.rules.directory import BETWEEN
from memstore.distributed.rules.messages import BringGroups, ClaimGroups, FindOwners, List, Lookup, Request
from memstore.distributed.rules.nouns import Change
from memstore.distributed.rules.reading import read_all
from memstore.distributed.rules.roster import found
from memstore.engine.protocols.get import map_entry
from memstore.engine.root.roots import Root
from memstore.engine.sync.primitives import deadline_after
from tests.distributed.catalog.filling import Filled, asked, fill, given_up, published
from tests.distributed.catalog.operations import damage_of

CLUSTER = b"C" * 16
TASKS = ("ask", "settle", "hand_over", "note", "mirror 0", "mirror 1", "mirror 2", "appoint", "pay")
_MIRRORS = 20  # rounds until a claim is answered
_PATIENCE = 200  # pauses of one call


class Host:
    """A root with its index process and one client."""

    def __init__(self, root: Root, address: str, seed: str) -> None:
        self.root, self.address, self.seed = root, address, seed
        self.member = Member(root.member_id(), address, address)
        self.restart()
        self.client = Client()
        if address == seed:
            run(root, lambda tables: found(tables, self.member, CLUSTER), deadline_after(10))

    def restart(self) -> None:
        """Another index process: what it has in memory is lost."""
        self.index = Index(self.member, [self.seed], time.monotonic_ns, cluster=CLUSTER)

    def standing(self) -> Standing:
        standing = look(self.root, lambda tables: tables.standing(), deadline_after(10))
        assert standing is not None
        return standing

    def owns(self, key: bytes) -> bool:
        return look(self.root, lambda tables: tables.owned(group_of(key)), deadline_after(10)) is not None


def transact(host: Host, step: Transact, filled: Sequence[Filled]) -> Any:
    if step.is_read:
        return look_or_run(host.root, step.action, deadline_after(10))
    sealed = [segment for one in filled for segment in one.sealed]
    return run(host.root, step.action, deadline_after(10), sealed=sealed)


class Hosts:
    def __init__(self) -> None:
        self.all: dict[str, Host] = {}

    def add(self, root: Root, address: str) -> Host:
        seed = next(iter(self.all), address)
        host = self.all[address] = Host(root, address, seed)
        return host

    # --- steps --------------------------------------------------------------------------------------------------------

    def drive(self, host: Host, steps: Steps[Any], filled: Sequence[Filled] = (), *, alone: bool = False) -> Any:
        """Runs steps to their end. While they pause, index processes do what they do, unless `alone`."""
        answer: Any = None
        pauses = itertools.count()
        while True:
            try:
                action = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = None
            if isinstance(action, Transact):
                answer = transact(host, action, filled)
            elif isinstance(action, Send):
                answer = self.send(action)
            elif isinstance(action, Gather):
                answer = [self.send(one) for one in action.sends]
                if action.meanwhile is not None:
                    self.drive(host, action.meanwhile, filled, alone=alone)
            elif isinstance(action, Pause) and action.seconds <= BETWEEN:
                pass  # it lets others come to the mutex
            elif alone:
                return None  # it would be tried again when its time comes
            else:
                assert isinstance(action, Pause) and next(pauses) < _PATIENCE, "it goes no further"
                self.tick()

    def drive_until(self, host: Host, steps: Steps[Any], kind: type[Any], filled: Sequence[Filled] = ()) -> Send:
        """As if the process died right before it sends such a request, which is returned."""
        answer: Any = None
        while True:
            action = steps.send(answer)
            answer = None
            if isinstance(action, Send) and isinstance(action.request, kind):
                return action
            if isinstance(action, Transact):
                answer = transact(host, action, filled)
            elif isinstance(action, Send):
                answer = self.send(action)

    def send(self, send: Send) -> Any:
        to = self.all.get(send.address)
        if to is None or send.member not in (None, to.member.id):
            return None
        request: Request = send.request

        def action(tables: CatalogTables) -> Answer:
            return to.index.answer(tables, request)

        reads = isinstance(request, Lookup | List)
        answer = (look_or_run if reads else run)(to.root, action, deadline_after(10))
        if isinstance(request, BringGroups | ClaimGroups | FindOwners) and to.index.may_keep(request, answer):
            return self._keep(to, request)
        return answer

    def _keep(self, seed: Host, request: Request) -> Answer | None:
        """Keeps a question to the directory until the deputies have answered."""
        seed.index.keep(0, request)
        try:
            for _ in range(_MIRRORS):
                for slot in range(3):
                    self.drive(seed, seed.index.mirror(slot), alone=True)
                ended = run(seed.root, seed.index.ended_waits, deadline_after(10))
                if ended:
                    return ended[0][1]
            return None
        finally:
            seed.index.forget(0)

    def tick(self, tasks: Sequence[str] = TASKS) -> None:
        """Does once what every index process does by itself."""
        for host in self.all.values():
            for task in tasks:
                name, *slots = task.split()
                self.drive(host, getattr(host.index, name)(*map(int, slots)), alone=True)

    def settle(self, ticks: int = 20) -> None:
        for _ in range(ticks):
            self.tick()

    def audit(self) -> None:
        for host in self.all.values():
            self.drive(host, host.index.audit(), alone=True)

    # --- what users do ------------------------------------------------------------------------------------------------

    def put(self, host: Host, key: bytes, data: bytes, expect: int | None = None) -> int:
        filled = fill(host.root, key, data)
        return self.commit(host, [asked(host.root, filled)], [filled], expect)[0]

    def commit(
        self, host: Host, changes: Sequence[Change], filled: Sequence[Filled] = (), expect: int | None = None
    ) -> tuple[int, ...]:
        named = [Change(one.key, one.body, one.places, expect, one.missing_ok) for one in changes]
        try:
            versions = self.drive(host, host.client.commit(named, time.monotonic_ns()), filled)
        except BaseException:
            for one in filled:
                given_up(host.root, one)
            raise
        for one in filled:
            published(host.root, one)
        return versions

    def delete(self, host: Host, key: bytes) -> int:
        return self.commit(host, [Change(key, None)])[0]

    def get(self, host: Host, key: bytes) -> bytes | None:
        def fetch(entry: Entry) -> Steps[bytes | None]:
            yield Pause(0)
            return self.bytes_of(key, entry)

        (got,) = self.drive(host, read_all(host.client, [key], lambda _, entry: fetch(entry)))
        return None if got is None else got[1]

    def bytes_of(self, key: bytes, entry: Entry) -> bytes | None:
        """From the host where they lie; None: they are gone."""
        holder = self.where(entry)
        if holder is None:
            return record_of(entry, b"").inline
        with holder.root.guard:
            held = map_entry(holder.root, key, record_of(entry, holder.member.id))
        if held is None or held.mapping is None:
            return None
        start = held.record.start
        return np.asarray(held.mapping)[start : start + held.record.nbytes].tobytes()

    def where(self, entry: Entry) -> Host | None:
        ids = {place.host for place in entry.places}
        return next((host for host in self.all.values() if host.member.id in ids), None)

    def keys(self, host: Host) -> list[bytes]:
        found: list[bytes] = []
        while rows := self.drive(host, page(host.client, b"", found[-1] if found else b"", 3)):
            found += [key for key, _ in rows]
        return found

    # --- checks -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Each catalog fits together, and with its files."""
        for host in self.all.values():
            assert damage_of(host.root) == []

    def lent(self, host: Host) -> list[bytes]:
        rows = look(host.root, lambda tables: tables.all_lent(0, 1 << 20), deadline_after(10))
        return sorted(lent.key for _, lent in rows)

    def owed(self, host: Host) -> int:
        return len(look(host.root, lambda tables: tables.owed(1 << 20), deadline_after(10)))
