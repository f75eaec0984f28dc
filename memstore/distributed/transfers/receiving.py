"""The reader: asks a host for ranges of its segments, and receives them where they are to lie.

Large transfers go over two streams at once, which share the bytes; small ones over one. A stream that is found dead was
closed by its host while it was kept, or broke: the request is made again over a new one, since it changes nothing. Who
asks has all of it, or an error, or knows that the bytes are gone; what was received until then counts for nothing.

Where this host's index process brings large transfers (`relay`), it is asked for them, over one stream; if it doesn't
bring them, for whatever reason, they are asked for as all others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from memstore.distributed.rules import Member
from memstore.distributed.transfers.asking import (
    BrokenStreamError,
    CannotSendError,
    ElsewhereError,
    Part,
    ask,
    batches,
    receive,
)
from memstore.distributed.transfers.streams import Stream, Streams
from memstore.errors import CorruptionError, HomeUnavailableError, LinkRefusedError, MemstoreError

STREAMS = 2  # of a large transfer
LARGE = 4 << 20  # bytes
_TRY_AGAIN = 0.05  # seconds
_REACHED_WITHIN = 1.0  # seconds: this host's index process; it is there, or is being started again
_SILENCE = 15.0  # seconds in which it sends nothing: it gives up earlier than that what doesn't go on

log = logging.getLogger("memstore")


class Share(NamedTuple):
    """What is read over one stream.

    Attributes:
        member: the host where it lies.
        via: this host, if its index process is to bring it.
    """

    member: Member
    parts: Sequence[Part]
    via: Member | None = None


def ask_ahead(streams: Streams, member: Member, parts: Sequence[Part], deadline: float) -> list[Stream]:
    """Asks for what `read_ranges` will be called for, before it is known where it is to lie.

    Returns the streams that it is to be given, or that are to be closed. What fails here is asked for again there.
    """
    asked: list[Stream] = []
    with contextlib.suppress(OSError, MemstoreError):
        for share in _shares(streams, member, parts):
            stream = streams.take(share.via or member, deadline)
            try:
                ask(stream, batches(share.parts)[0], deadline, None if share.via is None else member.id)
            except BaseException:
                stream.close()
                raise
            asked.append(stream)
    return asked


def read_ranges(
    streams: Streams,
    wanted: Sequence[tuple[Member, Sequence[Part]]],
    deadline: float,
    asked: Sequence[Stream] = (),
) -> bool:
    """Receives all parts of each host. False: one of the segments holds another put by now, and the memory anything.

    Args:
        asked: what `ask_ahead` has returned for these parts.

    Raises:
        HomeUnavailableError: a host can't be reached, or doesn't answer, until the deadline (monotonic).
        CorruptionError: a host's file is damaged.
        CannotSendError: a host says that it can't.
        LinkRefusedError: a host is no member of this cluster, or has another secret.
    """
    transfer = _Transfer(streams, deadline)
    shares = [share for member, parts in wanted for share in _shares(streams, member, parts, asked)]
    ahead = dict(enumerate(asked))
    threads = [
        threading.Thread(target=transfer.note, args=(share, ahead.get(number)), daemon=True)
        for number, share in enumerate(shares[1:], 1)
    ]
    try:
        for thread in threads:
            thread.start()
        is_whole = not shares or transfer.read(shares[0], ahead.get(0))
        for thread in threads:
            thread.join()
    except BaseException:
        transfer.give_up()
        raise
    for error in transfer.errors:
        raise error
    return is_whole and not transfer.is_gone


class _Transfer:
    """What the threads of one transfer share.

    Attributes:
        errors: of the other threads than the caller's.
        is_gone: what one of these was told.
    """

    def __init__(self, streams: Streams, deadline: float) -> None:
        self._streams, self._deadline = streams, deadline
        self._changed = threading.Condition()
        self._reading: list[Stream] = []
        self._is_given_up = False
        self.errors: list[BaseException] = []
        self.is_gone = False

    def note(self, share: Share, asked: Stream | None) -> None:
        """As `read`, in a thread of its own."""
        try:
            if not self.read(share, asked):
                self.is_gone = True
        except BaseException as error:
            self.errors.append(error)

    def read(self, share: Share, asked: Stream | None) -> bool:
        """Receives the share, over one stream after the other until it has all. False: gone.

        Args:
            asked: a stream on which the first of its requests was made already.
        """
        if share.via is not None:
            is_whole = self._read_via(share, share.via, asked)
            if is_whole is not None:
                return is_whole
            asked = None
        member = share.member
        fresh = False
        while not self._is_given_up:
            try:
                stream = asked or self._streams.take(member, self._deadline, fresh=fresh)
            except HomeUnavailableError as error:
                why = str(error)
            else:
                is_asked, asked = asked is not None, None
                try:
                    return self._read_over(stream, share.parts, None, is_asked=is_asked)
                except (OSError, BrokenStreamError) as error:
                    why = str(error)
                    if stream.was_kept and not fresh:
                        fresh = True
                        continue
            left = self._deadline - time.monotonic()
            if left <= 0:
                name = f"{member.name or 'the host'} at {member.address}"
                raise HomeUnavailableError(f"{name} did not send what is stored there within the timeout: {why}")
            time.sleep(min(_TRY_AGAIN, left))
        if asked is not None:
            asked.close()
        return False

    def _read_via(self, share: Share, via: Member, asked: Stream | None) -> bool | None:
        """As `read`, of this host's index process. None: it can't bring them."""
        member, why, is_busy = share.member, "", False
        while not self._is_given_up:
            stream, is_asked, asked = asked, asked is not None, None
            try:
                if stream is None:
                    stream = self._streams.take(via, min(self._deadline, time.monotonic() + _REACHED_WITHIN))
                return self._read_over(stream, share.parts, member.id, is_asked=is_asked)
            except (OSError, BrokenStreamError) as error:
                why = str(error)
                if stream is not None and stream.was_kept:
                    continue
            except ElsewhereError as error:
                why, is_busy = str(error), error.is_busy
            except (HomeUnavailableError, LinkRefusedError) as error:
                why = str(error)
            log.info("bytes of %s at %s come over TCP: %s", member.name or "the host", member.address, why)
            if self._streams.relay is not None and not is_busy:
                self._streams.relay.leave(member)
            return None
        return False

    def _read_over(self, stream: Stream, share: Sequence[Part], of: bytes | None, *, is_asked: bool) -> bool:
        with self._changed:
            self._reading.append(stream)
            if self._is_given_up:
                stream.shut()
        is_answered = False
        try:
            is_whole = True
            for number, batch in enumerate(batches(share)):
                if is_asked and not number:
                    stream.set_patience(self._deadline - time.monotonic())
                else:
                    ask(stream, batch, self._deadline, of)
                if of is not None:
                    stream.set_patience(min((self._deadline - time.monotonic()) / 2, _SILENCE))
                is_whole = receive(stream, batch, self._deadline)
                if not is_whole:
                    break
            is_answered = True
            return is_whole
        except (CorruptionError, CannotSendError, ElsewhereError):
            is_answered = True
            raise
        finally:
            with self._changed:
                self._reading.remove(stream)
                self._changed.notify_all()
            if is_answered and not self._is_given_up:
                self._streams.give_back(stream)
            else:
                stream.close()

    def give_up(self) -> None:
        """When it returns, no thread writes into the memory of the parts any more."""
        with self._changed:
            self._is_given_up = True
            for stream in self._reading:
                stream.shut()
            self._changed.wait_for(lambda: not self._reading)


def _shares(streams: Streams, member: Member, parts: Sequence[Part], asked: Sequence[Stream] = ()) -> list[Share]:
    """As `_shared`; one, if this host's index process brings all, or was asked to."""
    via = None
    if asked:
        via = asked[0].member if asked[0].member.id != member.id else None
    elif streams.relay is not None:
        via = streams.relay.way_to(member, sum(part.ranges.nbytes for part in parts))
    if via is not None:
        return [Share(member, parts, via)]
    return [Share(member, share) for share in _shared(parts)]


def _shared(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts, split by their bytes over as many streams as pays."""
    parts = [part for part in parts if part.ranges]
    total = sum(part.ranges.nbytes for part in parts)
    count = STREAMS if total >= LARGE else 1
    shares: list[list[Part]] = []
    todo = list(reversed(parts))
    while todo:
        left = max(-(-total // count), 1) if len(shares) < count - 1 else total
        share: list[Part] = []
        while todo and left > 0:
            part = todo.pop()
            first, rest = part.split(left)
            if rest.ranges:
                todo.append(rest)
            share.append(first)
            left -= first.ranges.nbytes
        shares.append(share)
    return shares
