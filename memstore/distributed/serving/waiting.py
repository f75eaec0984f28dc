"""Waits for versions, and for what sharded puts become, of other hosts' processes: one thread looks at all of them.

1. It marks the store's watch word (`engine.Watch`), **then** looks which waits are due: those that are new, those of a
   key whose bell has another word than before, and those whose time is over. A change of one key so costs a look at
   the waits for it, and for the few keys that share its bell, and not at a thousand.
2. It looks at them in one transaction. Who can be answered is, many in one piece.
3. It sleeps on the watch word, until somebody publishes something in this store, a new wait comes, or a time is over.
   Who publishes much that nobody here waits for wakes it at most once in half a millisecond.

Each second it looks at all: a bell may not have been rung, by a writer that was killed (the mutex's next owner rings),
and a record may have been damaged. Who writes another view of the cluster rings all bells. While there is no wait it
doesn't watch, and publications cost nothing.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Collection, Sequence
from math import inf
from typing import NamedTuple

import msgspec

from memstore.distributed import links
from memstore.distributed.actors import Asked
from memstore.distributed.catalog import look
from memstore.distributed.rules import Answer, Index, Look, Wait, failed_of
from memstore.distributed.serving.ending import Ending
from memstore.distributed.serving.messages import encode
from memstore.distributed.serving.news import Kind
from memstore.engine import Root, Watch
from memstore.errors import MemstoreError

_LOOK_EVERY = 1.0  # seconds: at all, as all who sleep on a doorbell do
_BETWEEN_LOOKS = 0.0005  # seconds, where the last one was for nothing
_MUTEX_WITHIN = 5.0  # seconds; a look takes the mutex once a process at most

log = logging.getLogger("memstore")


class _Kept(NamedTuple):
    """Attributes:
    bell: of its key; None: it is for news of any key.
    until: monotonic.
    """

    asked: Asked
    wait: Wait | Look
    bell: int | None
    until: float


class Waits:
    """Start it once; any thread may call the rest."""

    def __init__(self, root: Root, index: Index, ending: Ending) -> None:
        self._root, self._index, self._ending = root, index, ending
        watch = root.doorbell.watch
        if watch is None:
            raise TypeError("who serves a root must be able to write it")
        self._watch: Watch = watch
        self._some = threading.Condition()  # its lock guards all that follows
        self._tickets = itertools.count(1)
        self._kept: dict[int, _Kept] = {}
        self._by_bell: dict[int | None, set[int]] = {}
        self._words: dict[int, int] = {}  # of those bells, at the last look
        self._new: set[int] = set()
        self._soonest = inf  # no wait's time is over before
        self._all_due = 0.0  # when all are looked at again

    def start(self) -> None:
        threading.Thread(target=self._run, name="waits", daemon=True).start()

    def keep(self, asked: Asked, wait: Wait | Look) -> None:
        """A request for news that aren't there yet. It is forgotten when its connection closes, or nobody wants them.

        So who asks again and again, each time for a moment, doesn't fill the home with waits that nobody waits for.
        """
        left = int(min(max(asked.deadline - time.monotonic(), 0.0) * 1000, wait.milliseconds))
        wait = msgspec.structs.replace(wait, milliseconds=left)
        ticket = next(self._tickets)
        with self._some:
            self._add(ticket, asked, wait)
            self._some.notify()
        asked.on_close(lambda: self._forget(ticket))
        self._watch.ring()  # what was published since its first look is seen by another one

    def look_again(self) -> None:
        """This process has changed something by itself: the view, for instance."""
        if self._kept:
            self._watch.ring()

    def _add(self, ticket: int, asked: Asked, wait: Wait | Look) -> None:
        doorbell = self._root.doorbell
        bell = None if wait.key is None else doorbell.bell(wait.key)
        self._index.keep(ticket, wait)
        until = time.monotonic() + wait.milliseconds / 1000  # the index, which decides, finds it over by then
        self._kept[ticket] = _Kept(asked, wait, bell, until)
        self._by_bell.setdefault(bell, set()).add(ticket)
        if bell is not None and bell not in self._words:
            self._words[bell] = doorbell.load(bell)  # before it is looked at as a new one
        self._new.add(ticket)
        self._soonest = min(self._soonest, until)

    def _forget(self, ticket: int) -> None:
        with self._some:
            if ticket in self._kept:
                self._index.forget(ticket)
                self._drop(ticket)

    def _drop(self, ticket: int) -> Asked:
        kept = self._kept.pop(ticket)
        self._new.discard(ticket)
        others = self._by_bell[kept.bell]
        others.discard(ticket)
        if not others:
            del self._by_bell[kept.bell]
            if kept.bell is not None:
                del self._words[kept.bell]
        return kept.asked

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_until = 0.0
        while not self._ending.is_set:
            with self._some:
                while not self._kept:
                    self._some.wait()
            if pause_until > (now := time.monotonic()):
                time.sleep(pause_until - now)
            self._watch.mark()  # before the look: see `Watch`
            try:
                pause_until = 0.0 if self._answer_ended() else time.monotonic() + _BETWEEN_LOOKS
            except Exception as error:  # a bug: another index process may do without
                log.exception("waits: the index process ends")
                self._ending.fail(Kind.REFUSED, f"waits: {error!r}")
            if self._kept:
                wakes = min(self._soonest, self._all_due)
                self._watch.sleep(min(max(wakes - time.monotonic(), 0.001), _LOOK_EVERY))

    def _answer_ended(self) -> bool:
        """False: nobody was answered, and none is new."""
        has_new = bool(self._new)
        try:
            with self._some:
                ended = self._look(self._due())
                answers = [(self._drop(ticket), answer) for ticket, answer in ended]
        except MemstoreError as error:
            answers = self._give_up(error)
        _reply(answers)
        return has_new or bool(answers)

    def _due(self) -> Collection[int]:
        """The tickets to look at."""
        now = time.monotonic()
        changed = self._root.doorbell.news(self._words)  # before the catalog
        due, self._new = self._new, set()
        if now >= self._all_due:
            self._all_due = now + _LOOK_EVERY
            return list(self._kept)
        due.update(self._by_bell.get(None, ()))
        for bell in changed:
            due |= self._by_bell[bell]
        if now >= self._soonest:
            due |= {ticket for ticket, kept in self._kept.items() if kept.until <= now}
            self._soonest = min((kept.until for kept in self._kept.values() if kept.until > now), default=inf)
        return due

    def _look(self, due: Collection[int]) -> list[tuple[int, Answer]]:
        if not due:
            return []
        within = time.monotonic() + _MUTEX_WITHIN
        return look(self._root, lambda tables: self._index.ended_waits(tables, due), within)

    def _give_up(self, error: MemstoreError) -> list[tuple[Asked, Answer]]:
        """A record is damaged, or the root is gone: those who wait for that key, or all, are told."""
        log.warning("%s: waits: %s", self._root.path, str(error))
        failed = failed_of(error)
        with self._some:
            tickets = [
                ticket
                for ticket, kept in self._kept.items()
                if error.key is None or error.key.encode() == kept.wait.key
            ]
            for ticket in tickets:
                self._index.forget(ticket)
            return [(self._drop(ticket), failed) for ticket in tickets]


def _reply(answers: Sequence[tuple[Asked, Answer]]) -> None:
    """Those of the listener together: a put of many keys may end as many waits of one process."""
    by_listener: list[tuple[links.Asked, bytes]] = []
    for asked, answer in answers:
        if isinstance(asked, links.Asked):
            by_listener.append((asked, encode(answer)))
        else:
            asked.reply(encode(answer))
    links.Asked.reply_to_all(by_listener)
