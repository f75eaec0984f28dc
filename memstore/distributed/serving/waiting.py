"""Waits for versions, and for what sharded puts become, of other hosts' processes: one thread looks at all of them.

It sleeps on one word, which is changed by whoever publishes something in this store (`engine.Watch`); while there is no
wait it doesn't watch, and publications cost nothing.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time

import msgspec

from memstore.distributed.actors import Asked
from memstore.distributed.catalog import look
from memstore.distributed.rules import Answer, Index, Look, Wait, failed_of
from memstore.distributed.serving.ending import Ending
from memstore.distributed.serving.messages import encode
from memstore.distributed.serving.news import Kind
from memstore.engine import Root, Watch
from memstore.errors import MemstoreError

_LOOK_EVERY = 1.0  # seconds: as all who sleep on a doorbell do, should a wake get lost
_MUTEX_WITHIN = 5.0  # seconds; a look takes the mutex once a process at most

log = logging.getLogger("memstore")


class Waits:
    """Start it once; any thread may call the rest."""

    def __init__(self, root: Root, index: Index, ending: Ending) -> None:
        self._root, self._index, self._ending = root, index, ending
        watch = root.doorbell.watch
        if watch is None:
            raise TypeError("who serves a root must be able to write it")
        self._watch: Watch = watch
        self._some = threading.Condition()
        self._kept: dict[int, tuple[Asked, Wait | Look, float]] = {}
        self._tickets = itertools.count(1)

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
            self._kept[ticket] = (asked, wait, time.monotonic() + wait.milliseconds / 1000)
            self._index.keep(ticket, wait)
            self._some.notify()
        asked.on_close(lambda: self._forget(ticket))
        self._watch.ring()  # what was published since its first look is seen by another one

    def look_again(self) -> None:
        """This process has changed something by itself: the view, for instance."""
        if self._kept:
            self._watch.ring()

    def _forget(self, ticket: int) -> None:
        with self._some:
            if self._kept.pop(ticket, None) is not None:
                self._index.forget(ticket)

    def _run(self) -> None:
        while not self._ending.is_set:
            with self._some:
                while not self._kept:
                    self._some.wait()
                soonest = min(until for _, _, until in self._kept.values())
            self._watch.mark()  # before the look: see `Watch`
            try:
                self._answer_ended()
            except Exception as error:  # a bug: another index process may do without
                log.exception("waits: the index process ends")
                self._ending.fail(Kind.REFUSED, f"waits: {error!r}")
            if self._kept:
                self._watch.sleep(min(max(soonest - time.monotonic(), 0.001), _LOOK_EVERY))

    def _answer_ended(self) -> None:
        try:
            with self._some:
                ended = look(self._root, self._index.ended_waits, time.monotonic() + _MUTEX_WITHIN)
                answers = [(self._kept.pop(ticket)[0], answer) for ticket, answer in ended]
        except MemstoreError as error:
            answers = self._give_up(error)
        for asked, answer in answers:
            asked.reply(encode(answer))

    def _give_up(self, error: MemstoreError) -> list[tuple[Asked, Answer]]:
        """A record is damaged, or the root is gone: those who wait for that key, or all, are told."""
        log.warning("%s: waits: %s", self._root.path, str(error))
        failed = failed_of(error)
        with self._some:
            tickets = [
                ticket
                for ticket, (_, wait, _) in self._kept.items()
                if error.key is None or error.key.encode() == wait.key
            ]
            for ticket in tickets:
                self._index.forget(ticket)
            return [(self._kept.pop(ticket)[0], failed) for ticket in tickets]
