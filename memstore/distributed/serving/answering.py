"""What this host answers: requests go in, whichever door they came by, and answers come out.

There are two doors, the listener and the index actor. Both call `take`.

Reads take no mutex, and are answered in the thread that brought them. So are changes while nobody holds the store's
mutex, no disk is waited for, and they are small; else threads of their own make them, as long as their deadline lets
them, and hold up no read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from memstore.distributed.actors import Asked, FindActor, FoundActor
from memstore.distributed.catalog import CatalogTables, checked, look, run
from memstore.distributed.rules import (
    Answer,
    Commit,
    Done,
    Entry,
    GiveUp,
    Index,
    Later,
    List,
    Look,
    Lookup,
    Named,
    Prepare,
    Publish,
    Request,
    Resolve,
    Wait,
    answer_again,
    failed_of,
    keep_answer,
    session_of,
)
from memstore.distributed.serving.agent_lock import note_end
from memstore.distributed.serving.connections import Connections
from memstore.distributed.serving.ending import Ending
from memstore.distributed.serving.messages import Asking, Halt, Report, Reported, decode_request, encode
from memstore.distributed.serving.news import Kind
from memstore.distributed.serving.waiting import Waits
from memstore.engine import Root, retry_after_sweep
from memstore.errors import MemstoreError, NotAStoreError, StoreFullError, StoreTimeoutError

_CHANGERS = 4  # threads that wait for the mutex
_AT_ONCE = 0.05  # seconds that a thread which reads may wait for it
_LARGE = 1 << 16  # bytes of a change that others needn't wait for: a batch of 65,536 keys takes a second
_LONGEST = 30.0  # seconds, of a request that names no limit
_READS = (Lookup, Wait, List, Named, Look)

log = logging.getLogger("memstore")


class Answers:
    """Thread-safe.

    Args:
        report: how this host is.
        actor: where its index actor is.
        owes: called when other hosts are to be told of segments that nobody needs.
        connections: is told which sessions calls come for.
    """

    def __init__(
        self,
        root: Root,
        index: Index,
        waits: Waits,
        ending: Ending,
        *,
        report: Callable[[], Reported],
        actor: Callable[[], FoundActor],
        owes: Callable[[], None],
        connections: Connections,
    ) -> None:
        self._root, self._index, self._waits, self._ending = root, index, waits, ending
        self._report, self._actor, self._owes, self._connections = report, actor, owes, connections
        self._changers = ThreadPoolExecutor(_CHANGERS, thread_name_prefix="change")

    def take(self, asked: Asked) -> None:
        """In the thread of a door. Raises msgspec.DecodeError for what is no request."""
        request = decode_request(asked.message)
        try:
            session = None if isinstance(request, Report | Halt | FindActor) else session_of(request)
            if session is not None:
                self._connections.note(asked.connection, session)
            self._take(asked, request)
        except Exception as error:  # a bug, which must not end that thread
            self._apologize(asked, request, error)

    def _take(self, asked: Asked, request: Asking) -> None:
        if isinstance(request, Halt):
            note_end(self._root.path)  # before anybody hears of it, and starts the next one
            asked.reply(encode(Done()))
            if request.removes:
                self._ending.fail(Kind.REMOVED, "")
            else:
                self._ending.end()
        elif isinstance(request, Report):
            asked.reply(encode(self._report()))
        elif isinstance(request, FindActor):
            asked.reply(encode(self._actor()))
        elif isinstance(request, Wait | Look):
            self._take_wait(asked, request)
        elif isinstance(request, Lookup | List | Named):
            _reply(asked, self.answer(request, asked.deadline))
        elif self._must_wait(asked) or not self._change_at_once(asked, request):
            self._changers.submit(self._change, asked, request)

    def _must_wait(self, asked: Asked) -> bool:
        """For a thread of its own: for a disk, the mutex, or since it takes long."""
        return self._root.settings.durable or self._root.mutex.owner() != 0 or len(asked.message) > _LARGE

    def answer(self, request: Request, deadline: float, *, at_once: bool = False) -> Answer | None:
        """The answer; None: the time was over, or the process ends, and nothing was changed.

        Args:
            deadline: monotonic.
            at_once: None also where there is no room, which takes a sweep to be known.
        """
        deadline = min(deadline, time.monotonic() + _LONGEST)
        try:
            if isinstance(request, _READS):
                return look(self._root, lambda tables: self._index.answer(tables, request), deadline)
            answer, has_owed = self._run(request, deadline, at_once=at_once)
            self._waits.look_again()
            if has_owed:
                self._owes()
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
        """The answer, and whether something is owed then."""

        def action(tables: CatalogTables) -> tuple[Answer, bool]:
            return self._index.answer(tables, request), tables.has_owed

        make = partial(run, checked=checked(_entries_of(request), self._root.member_id()))
        if at_once:
            return make(self._root, action, deadline)
        return retry_after_sweep(make, self._root, action, deadline, None)

    def _take_wait(self, asked: Asked, request: Wait | Look) -> None:
        answer = self.answer(request, asked.deadline)
        if answer is not None and self._index.may_keep(request, answer):
            self._waits.keep(asked, request)
        else:
            _reply(asked, answer)

    def _change_at_once(self, asked: Asked, request: Request) -> bool:
        """False: somebody else has the mutex, or a sweep is to find room."""
        answer = self.answer(request, min(asked.deadline, time.monotonic() + _AT_ONCE), at_once=True)
        _reply(asked, answer)
        return answer is not None or self._ending.is_set

    def _change(self, asked: Asked, request: Request) -> None:
        try:
            if time.monotonic() < asked.deadline:  # else nobody waits for it any more
                answer = self.answer(request, asked.deadline)
                if answer is None and not isinstance(request, Resolve) and time.monotonic() < asked.deadline:
                    answer = Later()  # nothing was changed: who has more time than one wait takes asks again
                _reply(asked, answer)
        except Exception as error:
            self._apologize(asked, request, error)

    def _apologize(self, asked: Asked, request: Asking, error: Exception) -> None:
        log.exception("%s: a request could not be answered", self._root.path)
        text = f"the index process could not answer ({type(error).__name__}): see what its agent prints"
        deadline = min(asked.deadline, time.monotonic() + _AT_ONCE)
        _reply(asked, self._failed(request, MemstoreError(text), deadline))

    def _failed(self, request: Asking, error: Exception, deadline: float) -> Answer | None:
        """The answer; None: there is none, and who asked asks again.

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
    """What of a request is to become records. Those of `Give` come one by one: what is none stops no other."""
    if isinstance(request, Commit):
        return [
            Entry(0, one.body, one.places, one.is_mutable)
            for one in request.changes
            if one.body is not None and not one.renews
        ]
    if isinstance(request, Publish):
        return [Entry(0, request.body, tuple(place for place in request.parts if place.segment))]
    return []


def _reply(asked: Asked, answer: Answer | None) -> None:
    if answer is not None:
        asked.reply(encode(answer))
