"""Duties of an index process, which it does again and again. Each has a thread: none waits for another.

| duty | how often |
|---|---|
| ask the seed for the roster | one question is open there, which it answers with a newer one, or after 10 s |
| found a cluster | 4 times a second, while there is none |
| settle what a change of members has begun | when the roster changes, or records of a group come; else once a second |
| hand groups over | when the roster changes, and once a second; 10 times a second, while any is on its way |
| tell deputies rows of the directory, as the seed | as soon as there are any, or a question waits; else once a second |
| appoint deputies, tell members of a new seed, hear what they own | 4 times a second, as the seed |
| look for a member that is silent, as the seed | once a second, if there is any |
| note: tell hosts what replaces that which they keep | when there is any; 10 times a second, if one gave no answer |
| ask the seed whether it is there, and renew this host's lease | 5 times in `promote_after`, 6 times in a lease |
| take over from a seed that a majority hasn't heard, as a deputy | 10 times in `promote_after` |
| remove members that are silent, as the seed | 12 times in `remove_after`, where there are leases |
| fill up: have other hosts keep what lacks a replica | 4 times a second while something does; else once a second |
| pay: tell other hosts which of their segments nobody needs | once a second; when something is owed, up to 100 times |
| drain this host | 4 times a second, while it is to leave |
| take over bytes that lie on a host that leaves | when that asks, and once a second, until all are taken |
| bring back what a removed root had that was set aside | once a second, until it is over |
| audit what other owners should name | every 5 seconds what is due |
| end the sessions of clients that are gone | every 30 seconds those without a connection for an hour |

Those of a seed have threads from when this host first is one; those of a drain from when a host first is to leave.

`Driver` runs the rules' steps: transactions by the catalog, messages by links. A client's steps have a deadline, and
are driven elsewhere (`client/`); these end with the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from memstore.distributed.catalog import CatalogTables, Copy, look_or_run, run
from memstore.distributed.links import Begun, Links
from memstore.distributed.rules import (
    BEATS,
    LONGEST_WAIT,
    NOT_SENT,
    ROWS_LIMIT,
    Announce,
    Answer,
    Ask,
    AskSilence,
    Done,
    Fetch,
    Gather,
    Heartbeat,
    Index,
    IsRoster,
    Meet,
    NotSent,
    Obey,
    Pause,
    Policy,
    Promise,
    Race,
    Refused,
    Send,
    Standing,
    Steps,
    Take,
    TakeOver,
    Transact,
)
from memstore.distributed.serving.questions import Reported, decode_answer, encode, standing_of
from memstore.distributed.serving.supervision import Kind, say
from memstore.engine import Root, SealedSegment
from memstore.errors import (
    CorruptionError,
    HomeUnavailableError,
    LinkRefusedError,
    MemstoreError,
    NotAStoreError,
    StoreClosedError,
)

Result = TypeVar("Result")

MUTEX_WITHIN = 5.0  # seconds that a transaction waits for the store's mutex
_ANSWER_WITHIN = 5.0  # seconds
_TELL_WITHIN = 2.0  # seconds: of what is said to many hosts, of which some may be dead
_AT_ONCE = 32  # hosts
_MEET_WITHIN = 1.0  # seconds, also to connect to the seed: who finds another root there tells it within ALONE
_TO_MANY = (Announce, AskSilence, Heartbeat, Obey, Promise, TakeOver)
_NOTHING_NEW = encode(Done())
SILENT = 2.0  # seconds: an index process that was killed is back long before
_HANDS = 0.1  # seconds
_AT_FIRST, _SOON, _IDLE, _PAY, _AUDIT, _SESSIONS = 0.05, 0.25, 1.0, 1.0, 5.0, 30.0  # seconds
_NOT_SEED = 60.0  # seconds, of duties of a seed: who becomes one sets their events
_PAY_APART = 0.01  # seconds between two payments: each takes the mutex of both hosts, and puts wait for it
_BEATS = 5  # questions to the seed in the time of silence that is long enough
_FENCED = (
    "this host has heard no majority for longer than remove_after, and may have been removed: its processes refuse all "
    "calls until it hears one"
)
_COPIES_AT_ONCE = 128  # of one transaction: puts of this host wait for it
_MIRRORS = 3  # deputies, and a member that is to be one

log = logging.getLogger("memstore")


# --- the end of the process -------------------------------------------------------------------------------------------


class ProcessEnded(Exception):
    """Raised in a thread that finds that the process is about to end."""


class Ending:
    """How an index process ends: whoever finds a reason says it here, the main thread does it, and the first counts.

    Attributes:
        reason: a text with its kind; None: the process was told to end, and it is no failure.
        removes: the root is to be removed then.
        is_drained: that is because all of it is elsewhere by now.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self.reason: tuple[Kind, str] | None = None
        self.removes = self.is_drained = False

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def end(self) -> None:
        """Ends the process. From a signal handler too: it takes no lock."""
        self._event.set()

    def fail(self, kind: Kind, text: str) -> None:
        with self._lock:
            if not self._event.is_set():
                self.reason = (kind, text)
                self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)


# --- hosts that are silent --------------------------------------------------------------------------------------------


class Silences:
    """Hosts that give no answer for a while: the index process says so once, and once when they answer again.

    Thread-safe: a line may come twice, if two threads ask one host.

    Args:
        tell: is given lines for people.
        clock: seconds.
    """

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._since: dict[str, float] = {}  # by address
        self._told: set[str] = set()

    def begin(self, address: str, why: str) -> None:
        """Notes that it gave no answer. `why` may be empty."""
        since = self._since.setdefault(address, self._clock())
        if self._clock() - since >= SILENT and address not in self._told:
            self._told.add(address)
            self._tell(f"{address} does not answer ({why or 'no answer in time'}): it is asked again and again")

    def end(self, address: str) -> None:
        """Notes that it has answered, or said why it won't."""
        if self._since.pop(address, None) is not None and address in self._told:
            self._told.discard(address)
            self._tell(f"{address} answers again")


# --- steps ------------------------------------------------------------------------------------------------------------


class Driver:
    """Runs steps of the rules for this host. Thread-safe.

    Args:
        changed: called after each transaction that may have changed something.

    Attributes:
        refused: by address, why a listener there would not speak with this process, whoever it is.
    """

    def __init__(self, root: Root, links: Links, ending: Ending, changed: Callable[[], None]) -> None:
        self._root, self._links, self._ending, self._changed = root, links, ending, changed
        self.refused: dict[str, str] = {}
        self._warned: dict[str, str] = {}
        self._silences = Silences(log.warning)
        self._heard = threading.Event()  # what there is to hear of the question that is open at the seed
        self._is_given_up = False

    def run(self, steps: Steps[Result], *, sealed: Sequence[SealedSegment] = ()) -> Result:
        """Runs steps to their end.

        Args:
            sealed: segments that this process has filled, and still has open.

        Raises:
            ProcessEnded: the process ends.
            StoreTimeoutError, and what else a transaction raises: the steps are given up then.
        """
        try:
            action = next(steps)
            while True:
                if self._ending.is_set:
                    raise ProcessEnded
                match action:
                    case Send():
                        result: object = self._send(action)
                    case Transact():
                        result = self._transact(action, sealed)
                    case Pause():
                        result = None
                        if self._ending.wait(action.seconds):
                            raise ProcessEnded
                    case Gather():
                        result = self._gather(action)
                    case Race():
                        raise TypeError("only waits of clients race")
                action = steps.send(result)
        except StopIteration as end:
            return end.value
        finally:
            steps.close()

    def begin(self, begun: BegunSteps) -> bool:
        """Runs steps of reads and one message up to that, and sends it: no thread waits for its answer.

        Returns whether the message was sent. If it wasn't, `begun` says whether a connection is to be made for it.
        """
        try:
            action = next(begun.steps)
            while isinstance(action, Transact):
                assert action.is_read, "a change would wait for the mutex"
                found = look_or_run(self._root, action.action, time.monotonic() + MUTEX_WITHIN)
                action = begun.steps.send(found)
            assert isinstance(action, Send)
            begun.needs_connection = True
            if self._links.hello_of(action.address) is not None:
                message, now = encode(action.request), time.monotonic()
                sent = self._links.begin(action.address, action.member, message, _ANSWER_WITHIN, begun.told, now)
                begun.needs_connection = False
                begun.follow(sent, partial(self._answer_of, action.address))
        except StopIteration:  # there is nothing to send
            return False
        except (HomeUnavailableError, LinkRefusedError):
            pass
        if begun.needs_connection:
            begun.steps.close()
        return not begun.needs_connection

    def begin_asking(self) -> None:
        """Begins a question to the seed. From here on `give_up_asking` ends it."""
        self._heard.clear()
        self._is_given_up = False

    def give_up_asking(self) -> None:
        """Ends the question that is open at a seed, which is another one by now."""
        self._is_given_up = True
        self._heard.set()

    def _transact(self, action: Transact, sealed: Sequence[SealedSegment]) -> object:
        deadline = time.monotonic() + MUTEX_WITHIN
        if action.is_read:
            return look_or_run(self._root, action.action, deadline)
        result = run(self._root, action.action, deadline, sealed=sealed)
        self._changed()
        return result

    def _gather(self, action: Gather) -> list[Answer | NotSent | None]:
        """Asks at once: a dead host holds up no answer of another one for longer than its own time."""
        with ThreadPoolExecutor(min(len(action.sends), _AT_ONCE), thread_name_prefix="gather") as threads:
            answers = threads.map(self._send, action.sends)
            if action.meanwhile is not None:
                self.run(action.meanwhile)
            return list(answers)

    def _send(self, send: Send) -> Answer | NotSent | None:
        address = send.address
        try:
            is_kept = isinstance(send.request, Ask) and send.request.milliseconds > 0
            received = self._ask(send) if is_kept else self._received(send)
            self.refused.pop(address, None)
            return self._answer_of(address, received)
        except (LinkRefusedError, CorruptionError) as error:
            self._silences.end(address)
            if send.member is None:  # whoever named that host hears of it
                self.refused[address] = str(error)
            elif self._warned.get(address) != str(error):
                self._warned[address] = str(error)
                log.warning("%s", str(error) if address in str(error) else f"{address}: {error}")
            return None

    def _answer_of(self, address: str, received: bytes | NotSent | None) -> Answer | NotSent | None:
        if not isinstance(received, bytes):
            self._silences.begin(address, self._links.trouble_of(address))
            return received
        self._silences.end(address)
        answer = decode_answer(received)
        return None if isinstance(answer, Reported) else answer

    def _received(self, send: Send) -> bytes | NotSent | None:
        within = _TELL_WITHIN if isinstance(send.request, _TO_MANY) else send.within or _ANSWER_WITHIN
        if isinstance(send.request, Meet):
            within = _MEET_WITHIN
        try:
            return self._links.send(send.address, send.member, encode(send.request), time.monotonic() + within)
        except HomeUnavailableError:
            return NOT_SENT

    def _ask(self, send: Send) -> bytes | NotSent | None:
        """Asks what the seed may keep for LONGEST_WAIT. A question that is given up is as one that was answered."""
        seconds = LONGEST_WAIT / 1000 + _ANSWER_WITHIN
        connected = time.monotonic() + _MEET_WITHIN
        try:
            begun = self._links.begin(
                send.address, send.member, encode(send.request), seconds, self._heard.set, connected
            )
        except HomeUnavailableError:
            return NOT_SENT
        self._heard.wait(seconds)
        if begun.is_over:
            return begun.answer
        begun.give_up()
        return _NOTHING_NEW if self._is_given_up else None


class BegunSteps:
    """Steps of reads and one message, for whose answer no thread waits.

    Args:
        ended: called when they have ended after the message, by a thread that must not wait.

    Attributes:
        needs_connection: the message wasn't sent, for there is no connection.
        goes_on: there is more to do than the one message, for a thread that waits.
        since: when they were begun, monotonic.
    """

    def __init__(self, steps: Steps[None], ended: Callable[[], None]) -> None:
        self.steps, self._ended = steps, ended
        self.needs_connection = self.goes_on = False
        self.since = time.monotonic()
        self._sent: Begun | None = None
        self._answer_of: Callable[[bytes | None], Answer | NotSent | None] | None = None
        self._once = threading.Lock()

    def follow(self, sent: Begun, answer_of: Callable[[bytes | None], Answer | NotSent | None]) -> None:
        """Notes that their message was sent."""
        self._answer_of = answer_of
        self._sent = sent
        self.told()  # it may have been over before

    def told(self) -> None:
        """Goes on if the answer is there, or none will come."""
        sent = self._sent
        if sent is not None and sent.is_over and self._once.acquire(blocking=False):
            self._end(sent.answer)

    def give_up(self) -> None:
        """Goes on without an answer."""
        if self._sent is not None and self._once.acquire(blocking=False):
            self._sent.give_up()
            self._end(None)

    def _end(self, received: bytes | None) -> None:
        assert self._answer_of is not None
        try:
            self.steps.send(self._answer_of(received))
            self.goes_on = True
            self.steps.close()
        except StopIteration:
            pass
        finally:
            self._ended()


class Mirroring:
    """Messages to one deputy, of which one is under way at a time.

    A claim waits for each of them. So the thread that has written a claim sends the message, and the one that reads its
    answer answers the claim: threads between them would cost as much as the message. Only connections are made by a
    thread of its own.

    Args:
        told: called after each message.
        failed: called with a bug.

    Attributes:
        due: that thread is wanted.
    """

    def __init__(
        self, slot: int, index: Index, driver: Driver, told: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        self._slot, self._index, self._driver, self._told, self._failed = slot, index, driver, told, failed
        self.due = threading.Event()
        self._using = threading.Lock()  # held while a message is under way
        self._is_wanted = False  # another message
        self._begun: BegunSteps | None = None

    def begin(self) -> None:
        """Sends what the deputy doesn't have, at once if it is connected. It doesn't wait."""
        self._is_wanted = True  # before the lock is tried: who has it looks here when he has given it back
        if not self._using.acquire(blocking=False):
            return
        self._is_wanted = False
        self._begun = begun = BegunSteps(self._index.mirror(self._slot), self._end)
        is_sent = False
        try:
            is_sent = self._driver.begin(begun)
        except (MemstoreError, OSError):  # that thread meets it too, if it is still so, and says so
            self.due.set()
        except Exception as error:
            self._failed(error)
        if not is_sent:
            self._using.release()
            if begun.needs_connection or self._is_wanted:
                self.due.set()

    def run(self) -> None:
        """Does the same in the thread that waits; and gives up what has had no answer for too long."""
        if not self._using.acquire(blocking=False):
            begun = self._begun
            if begun is not None and time.monotonic() - begun.since > _ANSWER_WITHIN:
                begun.give_up()
            return
        self._is_wanted, self._begun = False, None
        try:
            self._driver.run(self._index.mirror(self._slot))
        finally:
            self._using.release()
        self._told()
        if self._is_wanted:
            self.due.set()

    def _end(self) -> None:
        goes_on = self._begun is not None and self._begun.goes_on
        self._using.release()
        try:
            self._told()
        except Exception as error:
            self._failed(error)
        if goes_on:
            self.due.set()
        elif self._is_wanted:
            self.begin()


# --- duties -----------------------------------------------------------------------------------------------------------


class Duties:
    """The threads of an index process that do what nobody asked for.

    Args:
        has_changed: called with the standing when it may be another one, by one thread.
        has_asked: called after each question to the seed, with the standing.
        connected: sessions that have a connection, or had one since it was last called.
        mirrored: called after each message to a deputy.
        noted: called when hosts were told what replaces that which they keep.
        take: copies bytes of a host that leaves.
        fetch: copies bytes for a record here.
        policy: on how many hosts values are to lie, as this host was told; None: it was told nothing.
        promote_after: seconds of the seed's silence after which this host takes over, as a deputy; 0: never by itself.
    """

    def __init__(
        self,
        root: Root,
        index: Index,
        driver: Driver,
        ending: Ending,
        *,
        has_changed: Callable[[Standing | None], None],
        has_asked: Callable[[Standing | None], None],
        connected: Callable[[], Collection[int]],
        mirrored: Callable[[], None],
        noted: Callable[[], None],
        take: Take,
        fetch: Fetch,
        policy: Policy | None = None,
        promote_after: float = 0.0,
    ) -> None:
        self._promote_after = promote_after
        self._root, self._index, self._driver, self._ending = root, index, driver, ending
        self._has_changed, self._has_asked = has_changed, has_asked
        self._connected, self._take, self._noted = connected, take, noted
        self._fetch, self._policy = fetch, policy
        self._standing: Standing | None = None
        self._seed = b""
        self._asked = ""  # the seed that a root without a cluster asks
        self._looking = threading.Lock()
        self._roster, self._hands, self._owes = (threading.Event() for _ in range(3))
        self._appoints, self._looks = threading.Event(), threading.Event()
        self._drains, self._takes, self._notes = threading.Event(), threading.Event(), threading.Event()
        self._beats, self._removes, self._fills = threading.Event(), threading.Event(), threading.Event()
        self._is_fenced = False
        self._dropped: int | None = None  # `losses` when it last dropped copies of hosts that are gone
        self._has_been_seed = self._has_leavers = False
        self._mirrors = [Mirroring(slot, index, driver, mirrored, self._fail) for slot in range(_MIRRORS)]

    def start(self) -> None:
        index = self._index
        self._look()
        self._begin("roster", self._settle, self._roster)
        self._begin("ask", self._ask, threading.Event())
        self._begin("found", self._found, threading.Event())
        self._begin("hand over", self._hand_over, self._hands)
        self._begin("note", self._note, self._notes)
        self._begin("pay", self._pay, self._owes)
        if self._policy is not None:
            self._begin("policy", self._state_policy, threading.Event())
        if self._root.storage.sees_all_hosts:  # of removed hosts, too
            self._begin("take over", self._take_over, self._takes)
        self._begin("fill up", self._fill_up, self._fills)
        self._begin("audit", lambda: self._do(index.audit(), _AUDIT), threading.Event())
        self._begin("heartbeat", self._beat, self._beats)
        if self._promote_after:
            self._begin("stand in", self._stand_in, threading.Event())
        self._begin("sessions", lambda: self._do(index.end_sessions(self._connected), _SESSIONS), threading.Event())

    def look_again(self) -> None:
        """Notes that the roster may have changed, or what is handed over."""
        self._roster.set()

    def take_over_soon(self) -> None:
        """Notes that a host that leaves has asked for it."""
        self._takes.set()

    def note_soon(self) -> None:
        """Notes that hosts are to be told what replaces that which they keep."""
        self._notes.set()

    def pay_soon(self) -> None:
        """Notes that there is something to pay."""
        self._owes.set()

    def mirror_soon(self) -> bool:
        """Asks deputies, and tells them, since somebody waits for it. False: there is none."""
        standing = self._standing
        if standing is None or not standing.is_seed:
            return False
        mirrors = self._mirrors[: len(self._index.seed.told(standing.roster))]
        for mirroring in mirrors:
            mirroring.begin()
        return bool(mirrors)

    def bring_back(self, ended: Callable[[], None]) -> None:
        """Begins to bring back what a removed root had that was served here before."""

        def work() -> float | None:
            if self._driver.run(self._index.return_all()):
                return _IDLE
            ended()
            return None

        self._begin("return", work, threading.Event())

    def clear(self, former: bytes, cleared: Callable[[], None]) -> None:
        """Has all take over what a removed host has left on storage that hosts share.

        Then it calls `cleared`, once the grace time is over of what was replaced until then.
        """
        shared, done_at = self._root.settings.shared, 0.0
        assert shared is not None, "only there files stay"

        def work() -> float | None:
            nonlocal done_at
            if not self._driver.run(self._index.clear(former)):
                done_at = 0.0
                return _IDLE
            done_at = done_at or time.monotonic()
            left = done_at + shared.grace - time.monotonic()
            if left > 0:
                return left
            cleared()
            return None

        self._begin(f"clear {former.hex()}", work, threading.Event())

    def _look(self) -> None:
        """Looks at the standing, for all duties."""
        with self._looking:
            standing = standing_of(self._root)
            if standing == self._standing:
                return
            self._standing = standing
            seed = b"" if standing is None else standing.roster.seed
            if seed != self._seed:
                self._seed = seed
                self._driver.give_up_asking()
            self._has_changed(standing)
            if standing is not None and standing.is_seed and not self._has_been_seed:
                self._has_been_seed = True
                self._begin_as_seed()
            if standing is not None and not self._has_leavers and (standing.roster.leavers or standing.stays):
                self._has_leavers = True
                self._begin("drain", self._drain, self._drains)
                if not self._root.storage.sees_all_hosts:
                    self._begin("take over", self._take_over, self._takes)
        self.mirror_soon()
        appoints, looks, hands, drains = self._appoints, self._looks, self._hands, self._drains
        for event in (appoints, looks, hands, drains, self._beats, self._removes, self._fills):
            event.set()

    def _begin_as_seed(self) -> None:
        for slot, mirroring in enumerate(self._mirrors):
            self._begin(f"mirror {slot}", partial(self._mirror, mirroring), mirroring.due)
        self._begin("appoint", self._appoint, self._appoints)
        self._begin("look for", self._look_for, self._looks)
        self._begin("remove", self._remove_silent, self._removes)

    def _settle(self) -> float:
        self._look()
        is_under_way = self._driver.run(self._index.settle())
        self._look()
        standing = self._standing
        if standing is not None and standing.losses != self._dropped:
            self._drop_copies(standing)
            self._dropped = standing.losses
        return _SOON if is_under_way else _IDLE

    def _drop_copies(self, standing: Standing) -> None:
        """Drops copies of values of hosts that are no members: no record names their bytes any more."""
        after, ids = b"", standing.roster.ids
        while page := look_or_run(
            self._root, lambda tables, start=after: tables.copies(start, ROWS_LIMIT), time.monotonic() + MUTEX_WITHIN
        ):
            after = page[-1][0]
            stale = [(key, copy) for key, copy in page if not ids.issuperset(place.host for place in copy.places)]
            for first in range(0, len(stale), _COPIES_AT_ONCE):
                some = dict(stale[first : first + _COPIES_AT_ONCE])

                def drop(tables: CatalogTables, some: dict[bytes, Copy] = some) -> None:
                    for key, copy in some.items():
                        if tables.copy(key) == copy:
                            tables.delete_copy(key)

                run(self._root, drop, time.monotonic() + MUTEX_WITHIN)

    def _hand_over(self) -> float:
        return _HANDS if self._driver.run(self._index.hand_over()) else _IDLE

    def _drain(self) -> float:
        if not self._driver.run(self._index.drain()):
            return _IDLE
        if self._index.leaver.has_marked:
            self._hands.set()
        return _SOON  # between two portions of groups there is time for who lists keys

    def _take_over(self) -> float:
        return _SOON if self._driver.run(self._index.take_over(self._take)) else _IDLE

    def _state_policy(self) -> float | None:
        """States, once, what this host was served with."""
        assert self._policy is not None, "else there is nothing to state"
        answer = self._driver.run(self._index.state_policy(self._policy))
        if isinstance(answer, Refused):
            say(f"replicas={self._policy.replicas} is not stated: {answer.why}")
        return None if isinstance(answer, IsRoster | Refused) else _SOON

    def _fill_up(self) -> float:
        return _SOON if self._driver.run(self._index.fill_up(self._fetch)) else _IDLE

    def _ask(self) -> float:
        """Asks once. Where that brought nothing, and took no time, it waits a moment: nothing answers there."""
        began, before = time.monotonic(), self._standing
        self._driver.begin_asking()
        self._driver.run(self._index.ask())
        self._look_at_asked()
        is_new = self._standing is None or self._standing != before
        if time.monotonic() - began > _SOON:
            return 0.0
        return _AT_FIRST if is_new else _SOON

    def _look_at_asked(self) -> None:
        self._look()
        self._has_asked(self._standing)

    def _found(self) -> float | None:
        if self._standing is not None:
            return None
        self._driver.run(self._index.found())
        if self._index.asked != self._asked:  # by now it is known whom to ask
            self._asked = self._index.asked
            self._driver.give_up_asking()
        return _SOON

    def _mirror(self, mirroring: Mirroring) -> float:
        if self._standing is None or not self._standing.is_seed:
            return _NOT_SEED
        mirroring.run()
        return _SOON

    def _appoint(self) -> float:
        if self._standing is None or not self._standing.is_seed:
            return _NOT_SEED
        return self._do(self._index.appoint(), _SOON)

    def _look_for(self) -> float:
        if self._standing is None or not self._standing.is_seed:
            return _NOT_SEED
        began = time.monotonic()
        self._driver.run(self._index.look_for())
        return max(0.0, began + _IDLE - time.monotonic())  # where nobody answers it has taken that long

    def _note(self) -> float:
        is_left = self._driver.run(self._index.note())
        self._owes.set()  # bytes of a host that was to be told first
        self._noted()
        return _HANDS if is_left else _IDLE

    def _beat(self) -> float:
        standing = self._standing
        lease = 0.0 if standing is None else standing.roster.lease / 1e9
        if not (self._promote_after or lease or self._root.host_lease[0]):
            return _IDLE
        began = time.monotonic()
        self._driver.run(self._index.beat())
        if self._index.is_fenced != self._is_fenced:
            self._is_fenced = not self._is_fenced
            say(_FENCED if self._is_fenced else "this host hears the others again, and goes on")
        times = [self._promote_after / _BEATS, lease / BEATS]
        every = min((seconds for seconds in times if seconds), default=_IDLE)
        return max(0.0, began + every - time.monotonic())  # where nobody answers it has taken that long

    def _stand_in(self) -> float:
        if self._driver.run(self._index.stand_in()):
            say(f"a majority has not heard the seed for {self._promote_after:g} s: this host is the seed now")
        return self._promote_after / (2 * _BEATS)

    def _remove_silent(self) -> float:
        standing = self._standing
        if standing is None or not standing.is_seed:
            return _NOT_SEED
        for removed in self._driver.run(self._index.remove_silent()):
            member = standing.roster.member(removed)
            name = "a host" if member is None else member.label
            say(f"{name} has been silent for longer than remove_after: it is removed, with what it has put")
        lease = standing.roster.lease / 1e9
        return min(_IDLE, lease / (2 * BEATS)) if lease else _IDLE

    def _pay(self) -> float:
        self._driver.run(self._index.pay())
        self._ending.wait(_PAY_APART)
        return _PAY

    def _do(self, steps: Steps[None], pause: float) -> float:
        self._driver.run(steps)
        return pause

    def _begin(self, name: str, work: Callable[[], float | None], sooner: threading.Event) -> None:
        threading.Thread(target=self._repeat, args=(name, work, sooner), name=name, daemon=True).start()

    def _repeat(self, name: str, work: Callable[[], float | None], sooner: threading.Event) -> None:
        """Works again and again. `work` returns after how many seconds it is due; or it is when `sooner` is set.

        It is done for good where it returns None.
        """
        trouble, pause = "", _SOON
        while not self._ending.is_set:
            sooner.clear()
            try:
                pause, trouble = work(), ""
                if pause is None:
                    return
            except (ProcessEnded, StoreClosedError):
                return
            except NotAStoreError as error:
                self._ending.fail(Kind.LOST, str(error))
            except (MemstoreError, OSError) as error:  # of the mutex, a disk: it is tried again
                pause = _SOON
                if str(error) != trouble:
                    trouble = str(error)
                    log.warning("%s: %s", name, trouble)
            except Exception as error:
                self._fail(error, name)
            sooner.wait(pause)

    def _fail(self, error: Exception, name: str = "mirror") -> None:
        """Ends the index process for a bug: another one may do without."""
        log.error("%s: the index process ends", name, exc_info=error)
        self._ending.fail(Kind.REFUSED, f"{name}: {error!r}")
