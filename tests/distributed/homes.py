"""Hosts for tests of what asks them: each a root with a listener, and the rules' index over its catalog, in threads.

No agent and no index process, and nobody asks to be admitted: the roster is written into every root, without deputies.
The first host is the seed. So a test has its hosts in milliseconds, in one process or in several.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import msgspec

from memstore.distributed import catalog
from memstore.distributed.catalog import CatalogTables
from memstore.distributed.client.driving import drive
from memstore.distributed.links import INDEX, Asked, Links, Listener, hello_of_this_process
from memstore.distributed.rules import (
    Answer,
    DeadlinePassed,
    Index,
    Member,
    Request,
    Roster,
    Standing,
    Steps,
    failed_of,
)
from memstore.distributed.rules.directory import give
from memstore.distributed.rules.messages import FindVersions, List, Look, Lookup, Named, Wait, WaitAny
from memstore.distributed.rules.nouns import TERM_BITS
from memstore.distributed.rules.roster import adopt
from memstore.distributed.transfers import Senders
from memstore.engine import Creation, boot_clock, close_root, deadline_after, open_root
from memstore.errors import MemstoreError

Result = TypeVar("Result")

CLUSTER = b"C" * 16
_LOOK_EVERY = 0.02  # seconds
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Request).decode


class Home:
    """A host that answers: use it in a `with`.

    Args:
        path: of its root, which is made if it isn't there.
        address: where it listens; the port may be 0.
        duties: what it does by itself, again and again: names of `Index`.

    Attributes:
        silent: it answers nothing, as one whose network is cut off.
        asked: the requests that came.
        spoil: what becomes of its answers.
        delays: which requests come later: when `deliver` is called.
        delayed: those that did.
        failed: what was raised where an answer was to be found.
    """

    def __init__(
        self,
        path: str,
        address: str = "tcp://127.0.0.1:0",
        *,
        is_owner: bool = True,
        secret: bytes | None = None,
        duties: Sequence[str] = ("note", "pay", "settle", "hand_over", "audit"),
    ) -> None:
        self._use = open_root(path, "a", Creation(), 10.0)
        self.root = self._use.root
        hello = hello_of_this_process()
        member = self.root.member_id()
        self._senders = Senders(self.root)
        self._listener = Listener(
            address, secret=secret, member=member, hello=hello, serve=self._serve, stream=self._senders.serve
        )
        self.member = Member(member, self._listener.address, os.path.basename(path), is_owner)
        self._links = Links(secret=secret, kind=INDEX, hello=hello)
        self._index = Index(self.member, [], boot_clock, cluster=CLUSTER)
        self._duties = duties
        self._pool = ThreadPoolExecutor(4)
        self._waiting: dict[int, Asked] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._duty = threading.Thread(target=self._do_duties, daemon=True)
        self.silent = False
        self.asked: list[Request] = []
        self.failed: list[Exception] = []
        self.spoil: Callable[[Answer], Answer] = lambda answer: answer
        self.delays: Callable[[Request], bool] = lambda request: False
        self.delayed: list[Asked] = []

    def adopt(self, roster: Roster) -> None:
        def action(tables: CatalogTables) -> None:
            if not adopt(tables, roster):
                standing = tables.standing() or Standing(self.member.id, roster, roster.term << TERM_BITS, roster.term)
                tables.put_standing(msgspec.structs.replace(standing, roster=roster))

        self.run(action)

    def hear(self, member: Home) -> None:
        """Tells a seed which roster a member has, as its questions would."""
        directory, standing = self._index.seed, member.standing()
        directory.begin(self.standing())
        directory.hear(member.member.id, standing.roster.position)

    def standing(self) -> Standing:
        standing = self.look(lambda tables: tables.standing())
        assert standing is not None
        return standing

    def look(self, action: Callable[[CatalogTables], Result]) -> Result:
        return catalog.look(self.root, action, deadline_after(10))

    def run(self, action: Callable[[CatalogTables], Result]) -> Result:
        return catalog.run(self.root, action, deadline_after(10))

    # --- what it answers ----------------------------------------------------------------------------------------------

    def _serve(self, asked: Asked) -> None:
        if not self.silent:
            self._pool.submit(self._answer, asked)

    def _answer(self, asked: Asked) -> None:
        try:
            self._answer_it(asked)
        except Exception as error:
            self.failed.append(error)

    def _answer_it(self, asked: Asked) -> None:
        request = _decode(asked.message)
        if self.delays(request):
            self.delayed.append(asked)
            return
        self.asked.append(request)

        def action(tables: CatalogTables) -> Answer:
            return self._index.answer(tables, request)

        reads = isinstance(request, Lookup | FindVersions | List | Named | Wait | WaitAny | Look)
        with self._lock:
            try:
                look = catalog.look_or_run if reads else catalog.run
                answer = look(self.root, action, deadline_after(10))
            except MemstoreError as error:
                answer = failed_of(error)
            if self._index.may_keep(request, answer):
                ticket = id(asked)
                self._waiting[ticket] = asked
                self._index.keep(ticket, request)
                return
        if not self.silent:
            asked.reply(_encode(self.spoil(answer)))

    def deliver(self) -> None:
        """What was delayed comes now. It has been answered when this returns, though maybe nobody listens any more."""
        self.delays = lambda request: False
        while self.delayed:
            self._answer(self.delayed.pop(0))

    def _do_duties(self) -> None:
        while not self._is_over.wait(_LOOK_EVERY):
            with self._lock:
                for ticket, answer in catalog.run(self.root, self._index.ended_waits, deadline_after(10)):
                    self._index.forget(ticket)
                    self._waiting.pop(ticket).reply(_encode(answer))
            for duty in self._duties:
                steps: Steps[None] = getattr(self._index, duty)()
                try:
                    drive(steps, self.root, self._links, deadline_after(1))
                except (MemstoreError, OSError, DeadlinePassed):
                    continue  # it is tried again

    # --- its life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._listener.start()
        self._duty.start()

    def close(self) -> None:
        self._is_over.set()
        self._duty.join()
        self._listener.close()
        self._pool.shutdown()
        self._senders.close()
        self._links.close()
        close_root(self._use)

    def __enter__(self) -> Home:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def join(homes: Sequence[Home], epoch: int = 1) -> Roster:
    """Makes them a cluster, of which the first is the seed."""
    members = tuple(home.member for home in homes)
    roster = Roster(CLUSTER, 1, epoch, members, members[0].id)
    for home in homes:
        home.adopt(roster)
    return roster


def claim(seed: Home, owner: Home, group: bytes) -> None:
    """Has the directory say that a host owns a group. It records that when it is first asked to change something."""
    seed.run(lambda tables: give(tables, seed.standing().roster, group, owner.member.id))
