"""The reader's side of lazy views: what a process has asked other hosts to keep, as long as it looks at it.

A process has one stream a host for this. On it goes *keep*, which is answered, and *let go*, which isn't. When the
stream breaks, its host lets go of all: who keeps or reads something next makes a new stream, and asks for all anew.
What was replaced meanwhile may be gone then.

*Let go* is said by finalizers, at any moment and in any thread. So they never wait: who finds the lock taken leaves it
to who has it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Sequence
from typing import NoReturn

import msgspec

from memstore.distributed.rules import Member
from memstore.distributed.transfers.asking import BrokenStreamError, CannotSendError, ask_to_keep, let_go
from memstore.distributed.transfers.messages import SEGMENTS_LIMIT
from memstore.distributed.transfers.streams import Links, Stream
from memstore.engine import SegmentExtent
from memstore.errors import CorruptionError, HomeUnavailableError, LinkRefusedError

_PATIENCE = 1.0  # seconds to wait for a host: what is read of others needs it not
_AWAY = 5.0  # seconds for which one that gave no answer isn't asked again

log = logging.getLogger("memstore")


class Keeper:
    """What this process has asked other hosts to keep. Thread-safe; a forked child asks for itself."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._hosts: dict[bytes, _Host] = {}

    def keep(self, wanted: Sequence[tuple[Member, Sequence[SegmentExtent]]], deadline: float) -> Kept | None:
        """Asks each host to keep these segments until what is returned is dropped. None: one of them is gone.

        A host that can't be reached is asked when something of it is read: others' bytes can be read without it.

        Raises CorruptionError: a host's file is damaged.
        """
        kept = Kept()
        for member, extents in wanted:
            host = self._hosts.get(member.id) or self._hosts.setdefault(member.id, _Host(self._links, member))
            extents = [msgspec.structs.replace(one, base=0) for one in extents]  # wherever a view has them
            try:
                if not host.keep(extents, deadline):
                    return None  # the other hosts let go, as `kept` is dropped
            except CannotSendError as error:  # it can't keep more: its bytes stay until they are replaced
                log.info("%s", str(error))
            else:
                kept.add(host, extents)
        return kept

    def close(self) -> None:
        for host in list(self._hosts.values()):
            host.close()


class Kept:
    """Segments that other hosts keep, until nothing refers to this."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[tuple[_Host, Sequence[SegmentExtent]]] = []

    def add(self, host: _Host, extents: Sequence[SegmentExtent]) -> None:
        self._parts.append((host, extents))

    def renew(self, hosts: Container[bytes], deadline: float) -> None:
        """Before bytes of these hosts are read: if a stream has broken, asks for all anew, as far as that is possible.

        Who reads what is gone is told so.
        """
        for host, _ in self._parts:
            if host.member.id in hosts:
                host.renew(deadline)

    def __reduce__(self) -> NoReturn:
        raise TypeError("what other hosts keep can't be pickled or copied: send the reference or view that needs it")

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_ending() or not hasattr(self, "_parts"):  # the stream ends anyway; an interrupt has left it half-made
            return
        for host, extents in self._parts:
            host.note(extents, -1)


class _Host:
    """What one host keeps for this process."""

    def __init__(self, links: Links, member: Member) -> None:
        self._links, self.member = links, member
        self._counts: Counter[SegmentExtent] = Counter()
        self._changes: deque[tuple[Sequence[SegmentExtent], int]] = deque()  # that are to be counted
        self._stream: Stream | None = None
        self._lock = threading.Lock()
        self._away_until = 0.0  # monotonic
        self._pid = os.getpid()

    def keep(self, extents: Sequence[SegmentExtent], deadline: float) -> bool:
        """False: one of them is gone. Raises CannotSendError, CorruptionError."""
        try:
            with self._held(deadline) as until:
                self._connect(until)
                fresh = [one for one in extents if not self._counts[one]]
                if fresh and not self._ask(fresh, until):
                    return False
                self._counts.update(extents)
        except HomeUnavailableError:
            self.note(extents, 1)  # to be asked for when it can be reached
        return True

    def renew(self, deadline: float) -> None:
        if self._pid != os.getpid() or not self._is_connected():
            with contextlib.suppress(HomeUnavailableError), self._held(deadline) as until:
                self._connect(until)

    def note(self, extents: Sequence[SegmentExtent], count: int) -> None:
        self._changes.append((extents, count))
        self._count_if_free()

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    # --- under the lock -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _held(self, deadline: float) -> Generator[float]:
        """Takes the lock, until when the host may be waited for. Raises HomeUnavailableError."""
        if self._pid != os.getpid():  # the lock and the stream are the parent's, which this child has closed
            self._lock, self._stream, self._pid = threading.Lock(), None, os.getpid()
        now = time.monotonic()
        if now < self._away_until:
            raise self._silent("it was away a moment ago")
        until = min(deadline, now + _PATIENCE)
        held: list[bool] = []
        try:
            # In one C call: an interrupt comes before or after it, and no lock is taken unknown to us.
            held.extend(map(self._lock.acquire, (True,), (max(until - now, 0.0),)))
            if not held[0]:
                raise self._silent("others ask it, and it doesn't answer")
            self._count()
            yield until
        except HomeUnavailableError:
            self._away_until = time.monotonic() + _AWAY
            raise
        finally:
            if any(held):
                self._lock.release()
            self._count_if_free()

    def _count_if_free(self) -> None:
        while self._changes and self._pid == os.getpid():
            held: list[bool] = []
            try:
                held.extend(map(self._lock.acquire, (False,)))
                if not held[0]:
                    return  # who has it does this
                self._count()
            finally:
                if any(held):
                    self._lock.release()

    def _count(self) -> None:
        gone: list[SegmentExtent] = []
        while self._changes:
            extents, count = self._changes.popleft()
            for one in extents:
                self._counts[one] += count
                if self._counts[one] <= 0:
                    del self._counts[one]
                    gone.append(one)
        gone = [one for one in gone if one not in self._counts]
        if gone and self._stream is not None:
            try:
                let_go(self._stream, gone)
            except OSError:  # it is broken, or so full that its host does nothing: it lets go of all
                self.close()

    def _is_connected(self) -> bool:
        """Nothing comes on the stream but answers: what can be read now is its end."""
        stream = self._stream
        if stream is None:
            return False
        try:
            stream.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _connect(self, until: float) -> None:
        """Unless it is. What was kept before is asked for anew. Raises HomeUnavailableError."""
        if self._is_connected():
            return
        self.close()
        try:
            made = self._links.stream(self.member.address, self.member.id, until)
        except LinkRefusedError as error:
            raise self._silent(str(error)) from error
        self._stream = Stream(made, self.member)
        for one in list(self._counts):  # one by one: those that are gone don't matter here
            with contextlib.suppress(CannotSendError, CorruptionError):
                self._ask([one], until)

    def _ask(self, extents: Sequence[SegmentExtent], until: float) -> bool:
        stream = self._stream
        if stream is None:
            raise self._silent("it was closed")
        try:
            starts = range(0, len(extents), SEGMENTS_LIMIT)
            return all(ask_to_keep(stream, extents[at : at + SEGMENTS_LIMIT], until) for at in starts)
        except (CannotSendError, CorruptionError):
            raise  # it was answered
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | BrokenStreamError):
                raise self._silent(str(error)) from error
            raise

    def _silent(self, why: str) -> HomeUnavailableError:
        name = f"{self.member.name or 'the host'} at {self.member.address}"
        return HomeUnavailableError(f"{name} did not say that it keeps what is looked at: {why}")
