"""Requests to an index process, and their answers: at once, or kept until there is one."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from typing import NamedTuple

import msgspec

from memstore.distributed.catalog import CatalogTables, MustChange, checked, look, look_or_run, run
from memstore.distributed.links import Asked
from memstore.distributed.rules import (
    LONGEST_WAIT,
    Announce,
    Answer,
    Ask,
    AskSilence,
    BringGroups,
    ClaimGroups,
    Commit,
    Committed,
    Done,
    Drain,
    Dropped,
    Entry,
    FindBackups,
    FindOwners,
    FindVersions,
    Finish,
    Give,
    GiveUp,
    HandOver,
    Heartbeat,
    Index,
    Inherit,
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
    Recovered,
    Remove,
    Renew,
    Replicate,
    Request,
    Resolve,
    Serve,
    SetPolicy,
    SetQuota,
    Stay,
    TakeOver,
    Unnoted,
    Wait,
    WaitAny,
    WatchGroup,
    answer_again,
    failed_of,
    keep_answer,
    session_of,
)
from memstore.distributed.serving.duties import MUTEX_WITHIN, Duties, Ending
from memstore.distributed.serving.questions import Asking, Halt, Promote, Report, Reported, decode_request, encode
from memstore.distributed.serving.supervision import Kind, note_end
from memstore.engine import Root, Watch, make_room_and_retry
from memstore.errors import MemstoreError, NotAStoreError, StoreFullError, StoreTimeoutError

# --- Requests that are kept ------------------------------------------------------------------------------------------
# Requests that are kept until there is an answer, of two kinds.
#
# **For news of keys** (`KeyWaits`): waits for versions, and for what sharded puts become.
#
# 1. The thread marks the store's watch word (`engine.Watch`), **then** looks which waits are due: those that are new,
#       those of a key whose bell has another word than before, and those whose time is over. A change of one key so
#    costs a
#    look at the waits for it, and for the few keys that share its bell, and not at a thousand.
# 2. It looks at them in one transaction. Who can be answered is, many in one piece.
# 3. It sleeps on the watch word, until somebody publishes something in this store, a new wait comes, or a time is over.
#    Who publishes much that nobody here waits for wakes it at most once in half a millisecond.
#
# Each second it looks at all: a bell may not have been rung, by a writer that was killed (the mutex's next owner
# rings), and a record may have been damaged. Who writes another roster rings all bells. While there is no wait it
# doesn't watch, and publications cost nothing.
#
# **For the seed** (`SeedWaits`): claims, questions who owns a group, and for the roster. What they wait for is the
# answer of a deputy, or of members who hear of a roster. The thread that has heard a deputy answers what it can without
# the mutex (`look_at_once`); a thread of its own looks after all other messages that say such a thing, and once a
# second. A member's question for a newer roster is looked at when there is one: a thousand of them cost nothing.


_LOOK_EVERY = 1.0  # seconds: at all, as all who sleep on a doorbell do
_BETWEEN_LOOKS = 0.0005  # seconds, where the last one was for nothing

log = logging.getLogger("memstore")

_tickets = itertools.count(1)  # of both kinds: the index knows requests by them


class _KeyWait(NamedTuple):
    """Attributes:
    key: None: it is for news of any key.
    bell: of its key.
    until: monotonic.
    """

    asked: Asked
    key: bytes | None
    bell: int | None
    until: float


class KeyWaits:
    """Start it once; any thread may call the rest."""

    def __init__(self, root: Root, index: Index, ending: Ending) -> None:
        self._root, self._index, self._ending = root, index, ending
        watch = root.doorbell.watch
        if watch is None:
            raise TypeError("who serves a root must be able to write it")
        self._watch: Watch = watch
        self._some = threading.Condition()  # its lock guards all that follows
        self._kept: dict[int, _KeyWait] = {}
        self._by_bell: dict[int | None, set[int]] = {}
        self._words: dict[int, int] = {}  # of those bells, at the last look
        self._new: set[int] = set()
        self._soonest = inf  # no wait's time is over before
        self._all_due = 0.0  # when all are looked at again

    def start(self) -> None:
        threading.Thread(target=self._run, name="waits", daemon=True).start()

    def keep(self, asked: Asked, wait: Wait | WaitAny | Look) -> None:
        """Keeps a request for news that aren't there yet, until its connection closes, or nobody wants them.

        So who asks again and again, each time for a moment, doesn't fill the host with waits that nobody waits for.
        """
        left = int(min(max(asked.deadline - time.monotonic(), 0.0) * 1000, wait.milliseconds))
        wait = msgspec.structs.replace(wait, milliseconds=left)
        ticket = next(_tickets)
        with self._some:
            self._add(ticket, asked, wait)
            self._some.notify()
        asked.on_close(lambda: self._forget(ticket))
        self._watch.ring()  # what was published since its first look is seen by another one

    def look_again(self) -> None:
        """Notes that this process has changed something by itself: the roster, for instance."""
        if self._kept:
            self._watch.ring()

    def _add(self, ticket: int, asked: Asked, wait: Wait | WaitAny | Look) -> None:
        doorbell = self._root.doorbell
        key = None if isinstance(wait, WaitAny) else wait.key
        bell = None if key is None else doorbell.bell(key)
        self._index.keep(ticket, wait)
        until = time.monotonic() + wait.milliseconds / 1000  # the index, which decides, finds it over by then
        self._kept[ticket] = _KeyWait(asked, key, bell, until)
        self._by_bell.setdefault(bell, set()).add(ticket)
        if bell is not None and bell not in self._words:
            self._words[bell] = doorbell.load(bell)  # before it is looked at as a new one
        self._new.add(ticket)
        self._soonest = min(self._soonest, until)

    def _forget(self, ticket: int) -> None:
        with self._some:
            if ticket in self._kept:
                self._drop(ticket)

    def _drop(self, ticket: int) -> Asked:
        self._index.forget(ticket)
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
        """Answers who can be. Returns False if nobody was, and none is new."""
        has_new = bool(self._new)
        try:
            with self._some:
                due, ended = self._due(), list[tuple[int, Answer]]()
                if due:
                    within = time.monotonic() + MUTEX_WITHIN
                    ended = look_or_run(self._root, lambda tables: self._index.ended_waits(tables, due), within)
                answers = [(self._drop(ticket), answer) for ticket, answer in ended]
        except MemstoreError as error:
            answers = self._give_up(error)
        _reply(answers)
        return has_new or bool(answers)

    def _due(self) -> Collection[int]:
        """Returns the tickets to look at."""
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

    def _give_up(self, error: MemstoreError) -> list[tuple[Asked, Answer]]:
        """Tells those who wait for a key whose record is damaged; or all, since the root is gone."""
        log.warning("%s: waits: %s", self._root.path, str(error))
        failed = failed_of(error)
        with self._some:
            tickets = [
                ticket for ticket, kept in self._kept.items() if error.key is None or error.key.encode() == kept.key
            ]
            return [(self._drop(ticket), failed) for ticket in tickets]


class _SeedWait:
    """A request that a seed keeps.

    Attributes:
        until: monotonic.
        has_news: its sender has the roster, and waits for another one.
        is_new: it was not looked at since it is kept.
    """

    __slots__ = ("asked", "has_news", "is_new", "until")

    def __init__(self, asked: Asked, until: float, has_news: bool) -> None:
        self.asked, self.until, self.has_news, self.is_new = asked, until, has_news, True


class SeedWaits:
    """Start it once; any thread may call the rest.

    Args:
        is_asked: called when a request was kept for which deputies must be asked. False: there is none to be asked.
        changed: called when the roster was changed.
    """

    def __init__(
        self, root: Root, index: Index, ending: Ending, *, is_asked: Callable[[], bool], changed: Callable[[], None]
    ) -> None:
        self._root, self._index, self._ending = root, index, ending
        self._is_asked, self._changed = is_asked, changed
        self._lock = threading.Lock()
        self._kept: dict[int, _SeedWait] = {}
        self._unanswered: set[int] = set()  # those of them that aren't content with what they have
        self._looking = threading.Lock()
        self._due = threading.Event()
        self._position = (0, 0)  # of the roster, at the last look

    def start(self) -> None:
        threading.Thread(target=self._run, name="seed", daemon=True).start()

    def keep(self, asked: Asked, request: Request, answer: Answer) -> None:
        """Keeps a request that can't be answered yet, until its connection closes."""
        milliseconds = getattr(request, "milliseconds", LONGEST_WAIT)
        has_news = isinstance(request, Ask) and isinstance(answer, Done)
        ticket, until = next(_tickets), time.monotonic() + milliseconds / 1000
        with self._lock:
            self._index.keep(ticket, request)
            self._kept[ticket] = _SeedWait(asked, until, has_news)
            if not has_news:
                self._unanswered.add(ticket)
        asked.on_close(lambda: self._forget(ticket))
        if (
            isinstance(request, Ask | Commit | Publish) or not self._is_asked()
        ):  # else it is looked at after the deputies' answers
            self._due.set()  # what it waits for may have come since its first look

    def look_again(self) -> None:
        """Notes that something was heard of the roster."""
        if self._kept:
            self._due.set()

    def look_at_once(self) -> None:
        """Answers, in this thread, if that takes no mutex: a deputy has answered, or a group was claimed."""
        if not self._unanswered:
            return
        if not self._looking.acquire(blocking=False):
            self._due.set()
            return
        try:
            tickets = set(self._unanswered)
            self._reply(look(self._root, lambda tables: self._index.ended_waits(tables, tickets), 0.0))
        except (MustChange, MemstoreError, OSError):  # the thread that may wait looks
            self._due.set()
        finally:
            self._looking.release()

    def _forget(self, ticket: int) -> None:
        with self._lock:
            self._drop(ticket)

    def _drop(self, ticket: int) -> _SeedWait | None:
        self._index.forget(ticket)
        self._unanswered.discard(ticket)
        return self._kept.pop(ticket, None)

    def _run(self) -> None:
        while not self._ending.is_set:
            self._due.wait(_LOOK_EVERY)
            self._due.clear()
            try:
                with self._looking:
                    self._answer_ended()
            except MemstoreError as error:  # of the mutex, a disk: it is tried again
                log.warning("%s: requests to the seed: %s", self._root.path, str(error))
                self._ending.wait(_LOOK_EVERY)
            except Exception as error:  # a bug: another index process may do without
                log.exception("seed: the index process ends")
                self._ending.fail(Kind.REFUSED, f"seed: {error!r}")

    def _answer_ended(self) -> None:
        kept = dict(self._kept)
        if not kept:
            return
        now, position = time.monotonic(), self._position
        others = {one for one, wait in kept.items() if wait.is_new or not wait.has_news or wait.until <= now}

        def answered(tables: CatalogTables) -> tuple[tuple[int, int], list[tuple[int, Answer]], bool]:
            found = _position(tables)
            ended = self._index.ended_waits(tables, others if found == position else kept.keys())
            return found, ended, _position(tables) != found

        if not others and look(self._root, _position, now + MUTEX_WITHIN) == position:
            return
        self._position, ended, is_changed = run(self._root, answered, time.monotonic() + MUTEX_WITHIN)
        if is_changed:  # who is admitted, or removed
            self._due.set()
            self._changed()
        for ticket in others:
            kept[ticket].is_new = False
        self._reply(ended)

    def _reply(self, ended: Sequence[tuple[int, Answer]]) -> None:
        with self._lock:
            found = [(self._drop(ticket), answer) for ticket, answer in ended]
        _reply([(wait.asked, answer) for wait, answer in found if wait is not None])


def _position(tables: CatalogTables) -> tuple[int, int]:
    standing = tables.standing()
    return (0, 0) if standing is None else standing.roster.position


def _reply(answers: Sequence[tuple[Asked, Answer]]) -> None:
    """Answers together: a put of many keys may end as many waits of one process."""
    Asked.reply_to_all((asked, encode(answer)) for asked, answer in answers)


# --- Requests --------------------------------------------------------------------------------------------------------
# Answers requests of other hosts and processes.
#
# Reads take no mutex, and are answered in the thread that brought them. So are changes while nobody holds the store's
# mutex, no disk is waited for, and they are small; else threads of their own make them, as long as their deadline lets
# them, and hold up no read. What can't be answered yet is kept.


_CHANGERS = 4  # threads that wait for the mutex
_COPIERS = 4  # threads that copy bytes of other hosts
_AT_ONCE = 0.05  # seconds that a thread which reads may wait for it
_LARGE = 1 << 16  # bytes of a change that others needn't wait for: a batch of 65,536 keys takes a second
_LONGEST = 30.0  # seconds, of a request that names no limit
_READS = (
    *(Lookup, FindVersions, Wait, WaitAny, List, Named, Look, Meet, Announce, TakeOver, FindBackups),
    *(Heartbeat, AskSilence),
)
_OF_ROSTER = (Ask, Remove, Drain, Finish, Promise, Obey, Recovered, SetPolicy, SetQuota)
_OF_OWNER = (Commit, Prepare, Renew, Publish, GiveUp, Resolve)
_TO_SEED = (
    *(Ask, Remove, Drain, Finish, ClaimGroups, FindOwners, WatchGroup, HandOver, Dropped, BringGroups),
    *(Inherit, Recovered, SetPolicy, SetQuota),
)


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
        copy: answers what takes copies of other hosts' bytes.
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
        copy: Callable[[Replicate | Commit], Answer | None],
        connections: Connections,
    ) -> None:
        self._root, self._index, self._ending = root, index, ending
        self._waits, self._at_seed, self._duties = waits, at_seed, duties
        self._report, self._promote, self._connections = report, promote, connections
        self._copy = copy
        self._copiers = ThreadPoolExecutor(_COPIERS, thread_name_prefix="copy")
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
        elif isinstance(request, Replicate) or (isinstance(request, Commit) and self._is_copied_first(request)):
            self._copiers.submit(self._answer_by_copies, asked, request)
        elif isinstance(request, _READS):
            self._reply(asked, request, self.answer(request, asked.deadline))
            if isinstance(request, TakeOver):
                self._duties.take_over_soon()
        elif self._must_wait(asked) or not self._change_at_once(asked, request):
            self._changers.submit(self._change, asked, request)

    def _is_copied_first(self, request: Commit) -> bool:
        if not any(change.places for change in request.changes):
            return False
        within = time.monotonic() + MUTEX_WITHIN
        return look(self._root, lambda tables: self._index.is_copied_first(tables, request), within)

    def _answer_by_copies(self, asked: Asked, request: Replicate | Commit) -> None:
        try:
            if time.monotonic() < asked.deadline:
                self._reply(asked, request, self._copy(request))
        except Exception as error:
            self._apologize(asked, request, error)

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
            if isinstance(request, _OF_OWNER) and self._index.is_fenced:
                return None  # it came too late, perhaps: who asked finds out when this host hears the others again
            self._waits.look_again()
            if isinstance(answer, Unnoted):
                self._duties.note_soon()
            elif isinstance(answer, Committed) and answer.replaced and has_owed:
                self._duties.note_soon()  # it has dropped what it keeps by itself, but its bytes stay until it is told
            if has_owed:
                self._duties.pay_soon()
            if isinstance(request, _OF_ROSTER):
                self._at_seed.look_again()
            if isinstance(request, (*_OF_ROSTER, Give, Serve, Stay)):
                self._duties.look_again()
            elif isinstance(request, ClaimGroups | HandOver | Dropped) and isinstance(answer, Owners):
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
        return make_room_and_retry(make, self._root, action, deadline, None)

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
