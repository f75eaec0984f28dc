"""What an index process does by itself, again and again. Each duty has a thread: none waits for another.

| duty | how often |
|---|---|
| ask the seed who is a member | 4 times a second; 20 times, until this host is one and has settled |
| settle: give what is at home elsewhere | in each epoch, and 4 times a second until it has |
| register what the root had before it was served | 10 times a second, until it has |
| pay: tell other hosts which of their segments nobody needs | once a second; when something is owed, up to 100 times |
| audit what other homes should name | every 5 seconds what is due |
| end the sessions of clients that are gone | every 30 seconds those without a connection for an hour |
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from memstore.distributed.rules import Index, Steps
from memstore.distributed.serving.driving import Driver
from memstore.distributed.serving.ending import Ended, Ending
from memstore.distributed.serving.news import Kind
from memstore.errors import MemstoreError, NotAStoreError, StoreClosedError

_ASK, _ASK_SOON, _SETTLE, _REGISTER, _PAY, _AUDIT, _SESSIONS = 0.25, 0.05, 0.25, 0.1, 1.0, 5.0, 30.0  # seconds
_PAY_APART = 0.01  # seconds between two payments: each takes the mutex of both hosts, and puts wait for it

log = logging.getLogger("memstore")


class Duties:
    """Args:
    has_asked: called after each question to the seed. It returns the epoch that this host is at; 0: it is no member.
    connected: sessions that have a connection, or had one since it was last called.

    Attributes:
        owed: set it when there is something to pay.
    """

    def __init__(
        self,
        index: Index,
        driver: Driver,
        ending: Ending,
        has_asked: Callable[[], int],
        connected: Callable[[], Collection[int]],
    ) -> None:
        self._index, self._driver, self._ending, self._has_asked = index, driver, ending, has_asked
        self._connected = connected
        self._epoch = 0
        self._asks, self._settles, self.owed = (threading.Event() for _ in range(3))

    def start(self) -> None:
        index = self._index
        self._begin("ask", self._ask, self._asks)
        self._begin("settle", self._settle, self._settles)
        self._begin("register", lambda: self._do(index.register(), _REGISTER))
        self._begin("pay", self._pay, self.owed)
        self._begin("audit", lambda: self._do(index.audit(), _AUDIT))
        self._begin("sessions", lambda: self._do(index.end_sessions(self._connected), _SESSIONS))

    def _ask(self) -> float:
        self._driver.run(self._index.ask_the_seed())
        epoch = self._has_asked()
        if epoch != self._epoch:
            self._epoch = epoch
            self._settles.set()
        return _ASK if epoch and epoch == self._index.settled else _ASK_SOON

    def _settle(self) -> float:
        before = self._index.settled
        self._driver.run(self._index.settle())
        if self._index.settled != before:
            self._asks.set()  # the seed is to know
        return _SETTLE

    def _pay(self) -> float:
        self._driver.run(self._index.pay())
        self._ending.wait(_PAY_APART)
        return _PAY

    def _do(self, steps: Steps[None], pause: float) -> float:
        self._driver.run(steps)
        return pause

    def _begin(self, name: str, work: Callable[[], float], sooner: threading.Event | None = None) -> None:
        threading.Thread(target=self._repeat, args=(name, work, sooner), name=name, daemon=True).start()

    def _repeat(self, name: str, work: Callable[[], float], sooner: threading.Event | None) -> None:
        """`work` returns after how many seconds it is due again; it is earlier when `sooner` is set."""
        trouble, pause = "", _ASK
        while not self._ending.is_set:
            try:
                pause = work()
                trouble = ""
            except (Ended, StoreClosedError):
                return
            except NotAStoreError as error:
                self._ending.fail(Kind.LOST, str(error))
            except (MemstoreError, OSError) as error:  # of the mutex, a disk: it is tried again
                if str(error) != trouble:
                    trouble = str(error)
                    log.warning("%s: %s", name, trouble)
            except Exception as error:  # a bug: another index process may do without
                log.exception("%s: the index process ends", name)
                self._ending.fail(Kind.REFUSED, f"{name}: {error!r}")
            if sooner is None:
                self._ending.wait(pause)
            elif sooner.wait(pause):
                sooner.clear()
