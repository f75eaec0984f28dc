"""Answers requests of other hosts and processes.

Reads take no mutex, and are answered in the thread that brought them. So are changes while nobody holds the store's
mutex, no disk is waited for, and they are small; else threads of their own make them, as long as their deadline lets
them, and hold up no read. What can't be answered yet is kept (`waiting.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from memstore.distributed.catalog import CatalogTables, checked, look_or_run, run
from memstore.distributed.links import Asked
from memstore.distributed.rules import (
    Announce,
    Answer,
    Ask,
    BringGroups,
    ClaimGroups,
    Commit,
    Done,
    Entry,
    FindOwners,
    Finish,
    Give,
    GiveUp,
    HandOver,
    Index,
    Later,
    List,
    Look,
    Lookup,
    Meet,
    Named,
    Obey,
    Owners,
    Prepare,
    Promise,
    Publish,
    Remove,
    Request,
    Resolve,
    Serve,
    Wait,
    WaitAny,
    WatchGroup,
    answer_again,
    failed_of,
    keep_answer,
    session_of,
)
from memstore.distributed.serving.asking import Asking, Halt, Promote, Report, Reported, decode_request, encode
from memstore.distributed.serving.duties import Duties, Ending
from memstore.distributed.serving.supervision import Kind, note_end
from memstore.distributed.serving.waiting import KeyWaits, SeedWaits
from memstore.engine import Root, retry_after_sweep
from memstore.errors import MemstoreError, NotAStoreError, StoreFullError, StoreTimeoutError

_CHANGERS = 4  # threads that wait for the mutex
_AT_ONCE = 0.05  # seconds that a thread which reads may wait for it
_LARGE = 1 << 16  # bytes of a change that others needn't wait for: a batch of 65,536 keys takes a second
_LONGEST = 30.0  # seconds, of a request that names no limit
_READS = (Lookup, Wait, WaitAny, List, Named, Look, Meet, Announce)
_OF_ROSTER = (Ask, Remove, Finish, Promise, Obey)
_TO_SEED = (Ask, Remove, Finish, ClaimGroups, FindOwners, WatchGroup, HandOver, BringGroups)

log = logging.getLogger("memstore")


class Connections:
    """Which sessions have a connection to this host: by them it is known whose clients are gone.

    Thread-safe. Connections are numbers, of which none comes again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[int, set[int]] = {}  # by connection
        self._left: set[int] = set()  # of connections that have ended lately

    def note(self, connection: int, session: int) -> None:
        """Notes that a call of a session came. Not after the connection's end: by the thread that calls `end`."""
        with self._lock:
            self._sessions.setdefault(connection, set()).add(session)

    def end(self, connection: int) -> None:
        with self._lock:
            self._left |= self._sessions.pop(connection, set())

    def sessions(self) -> set[int]:
        """Returns those that have a connection, or had one since this was last called."""
        with self._lock:
            found, self._left = self._left.union(*self._sessions.values()), set()
        return found


class Answers:
    """Answers requests. Thread-safe.

    Args:
        duties: what a change makes due.
        report: how this host is.
        promote: makes this host the seed; it may take long.
        connections: is told which sessions calls come for.
    """

    def __init__(
        self,
        root: Root,
        index: Index,
        ending: Ending,
        *,
        waits: KeyWaits,
        at_seed: SeedWaits,
        duties: Duties,
        report: Callable[[], Reported],
        promote: Callable[[Promote], Answer],
        connections: Connections,
    ) -> None:
        self._root, self._index, self._ending = root, index, ending
        self._waits, self._at_seed, self._duties = waits, at_seed, duties
        self._report, self._promote, self._connections = report, promote, connections
        self._changers = ThreadPoolExecutor(_CHANGERS, thread_name_prefix="change")

    def take(self, asked: Asked) -> None:
        """Takes a request, in the listener's thread. Raises msgspec.DecodeError for what is none."""
        request = decode_request(asked.message)
        try:
            session = None if isinstance(request, Report | Halt | Promote) else session_of(request)
            if session is not None:
                self._connections.note(asked.connection, session)
            self._take(asked, request)
        except Exception as error:  # a bug, which must not end that thread
            self._apologize(asked, request, error)

    def _take(self, asked: Asked, request: Asking) -> None:
        if isinstance(request, Halt):
            note_end(self._root.path)  # before anybody hears of it, and starts the next one
            self._ending.removes = request.removes
            asked.reply(encode(Done()))
            self._ending.end()
        elif isinstance(request, Report):
            asked.reply(encode(self._report()))
        elif isinstance(request, Promote):
            threading.Thread(target=lambda: asked.reply(encode(self._promote(request))), daemon=True).start()
        elif isinstance(request, _READS):
            self._reply(asked, request, self.answer(request, asked.deadline))
        elif self._must_wait(asked) or not self._change_at_once(asked, request):
            self._changers.submit(self._change, asked, request)

    def _must_wait(self, asked: Asked) -> bool:
        """Returns whether it is for a thread of its own: for a disk, the mutex, or since it takes long."""
        return self._root.settings.durable or self._root.mutex.owner() != 0 or len(asked.message) > _LARGE

    def answer(self, request: Request, deadline: float, *, at_once: bool = False) -> Answer | None:
        """Returns the answer; None: the time was over, or the process ends, and nothing was changed.

        Args:
            deadline: monotonic.
            at_once: None also where there is no room, which takes a sweep to be known.
        """
        deadline = min(deadline, time.monotonic() + _LONGEST)
        try:
            if isinstance(request, _READS):
                return look_or_run(self._root, lambda tables: self._index.answer(tables, request), deadline)
            answer, has_owed = self._run(request, deadline, at_once=at_once)
            self._waits.look_again()
            if has_owed:
                self._duties.pay_soon()
            if isinstance(request, _OF_ROSTER):
                self._at_seed.look_again()
            if isinstance(request, (*_OF_ROSTER, Give, Serve)):
                self._duties.look_again()
            elif isinstance(request, ClaimGroups | HandOver) and isinstance(answer, Owners):
                self._at_seed.look_at_once()  # they may be watched
            return answer
        except StoreTimeoutError as error:
            log.info("%s: %s", self._root.path, str(error))
            return None
        except NotAStoreError as error:
            self._ending.fail(Kind.LOST, str(error))
            return None
        except (MemstoreError, OSError) as error:
            if at_once and isinstance(error, StoreFullError):
                return None
            log.warning("%s: %s: %s", self._root.path, type(request).__name__, str(error))
            return self._failed(request, error, deadline)

    def _run(self, request: Request, deadline: float, *, at_once: bool) -> tuple[Answer, bool]:
        """Returns the answer, and whether something is owed then."""

        def action(tables: CatalogTables) -> tuple[Answer, bool]:
            return self._index.answer(tables, request), tables.has_owed

        make = partial(run, checked=checked(_entries_of(request), self._root.member_id()))
        if at_once:
            return make(self._root, action, deadline)
        return retry_after_sweep(make, self._root, action, deadline, None)

    def _reply(self, asked: Asked, request: Request, answer: Answer | None) -> None:
        """Answers a request, or keeps it."""
        if answer is None:
            return
        if not self._index.may_keep(request, answer):
            asked.reply(encode(answer))
        elif isinstance(request, Wait | WaitAny | Look):
            self._waits.keep(asked, request)
        else:
            self._at_seed.keep(asked, request, answer)

    def _change_at_once(self, asked: Asked, request: Request) -> bool:
        """Returns False if somebody else has the mutex, or a sweep is to find room."""
        answer = self.answer(request, min(asked.deadline, time.monotonic() + _AT_ONCE), at_once=True)
        self._reply(asked, request, answer)
        return answer is not None or self._ending.is_set

    def _change(self, asked: Asked, request: Request) -> None:
        try:
            if time.monotonic() < asked.deadline:  # else nobody waits for it any more
                answer = self.answer(request, asked.deadline)
                asks_again = isinstance(request, (Resolve, *_TO_SEED))  # who hears nothing
                if answer is None and not asks_again and time.monotonic() < asked.deadline:
                    asked.reply(encode(Later()))  # nothing was changed: who has more time asks again
                    return
                self._reply(asked, request, answer)
        except Exception as error:
            self._apologize(asked, request, error)

    def _apologize(self, asked: Asked, request: Asking, error: Exception) -> None:
        log.exception("%s: a request could not be answered", self._root.path)
        text = f"the index process could not answer ({type(error).__name__}): see what its agent prints"
        answer = self._failed(request, MemstoreError(text), min(asked.deadline, time.monotonic() + _AT_ONCE))
        if answer is not None:
            asked.reply(encode(answer))

    def _failed(self, request: Asking, error: Exception, deadline: float) -> Answer | None:
        """Returns the answer; None: there is none, and who asked asks again.

        Of a call it is noted, unless that was made before the failure: it must not be made later, when there is room
        again for instance. To a question what became of a call it would be that call's answer, and there is none.
        """
        if isinstance(request, Resolve):
            return None
        failed = failed_of(error)
        call = request.call if isinstance(request, Commit | Prepare | GiveUp) else None
        if call is None:
            return failed

        def note(tables: CatalogTables) -> Answer:
            return answer_again(tables, call) or keep_answer(tables, call, failed)

        try:
            return run(self._root, note, deadline)
        except (MemstoreError, OSError):
            return None  # it will be sent again


def _entries_of(request: Request) -> list[Entry]:
    """Returns what of a request is to become records. What `Give` brings comes one by one: one that is none stops no
    other."""
    if isinstance(request, Commit):
        return [
            Entry(0, one.body, one.places, one.is_mutable)
            for one in request.changes
            if one.body is not None and not one.renews
        ]
    if isinstance(request, Publish):
        return [Entry(0, request.body, tuple(place for place in request.parts if place.segment))]
    return []
