"""Messages as frames, and back, and the sending half of a connection. Decision 016 has the table of a frame."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

# --- Frames, without I/O ---------------------------------------------------------------------------------------------
# A frame: the length of what follows (4 bytes), the call that pairs an answer with its request (8), milliseconds left
# (4), flags (1), and a piece of a message. Messages of one frame may stand between the pieces of a longer one; of
# longer ones one at a time is under way.

HEADER = struct.Struct(">IQIB")
FRAME_LIMIT = 262_144  # of what a length says
PIECE_LIMIT = FRAME_LIMIT - (HEADER.size - 4)
MESSAGE_LIMIT = 128 << 20
NO_LIMIT = (1 << 32) - 1  # milliseconds
MORE, GIVEN_UP = 1, 2  # flags: more pieces follow; none follow, and those that came are to be forgotten

_LEAST = HEADER.size - 4
_TOO_LARGE = f"a message of more than {MESSAGE_LIMIT:,} bytes"


class FrameError(Exception):
    """Bytes that are no frames. Their connection can't go on."""


class Message(NamedTuple):
    """Attributes:
    call: of the request, and of its answer; 0: the greeting `Hello`, or, with no body, a ping.
    milliseconds: that the caller waits from now on, or NO_LIMIT.
    """

    call: int
    milliseconds: int
    body: bytes


def frame(call: int, milliseconds: int, body: bytes) -> bytes:
    """A message that fits into one frame."""
    return HEADER.pack(_LEAST + len(body), call, milliseconds, 0) + body


class Inbox:
    """Takes bytes in any portions, and gives the messages in them. Keeps one frame, and one longer message, at most."""

    def __init__(self, message_limit: int = MESSAGE_LIMIT) -> None:
        self._limit = message_limit
        self._rest = bytearray()  # of the last portion: a frame that isn't whole
        self._long: bytearray | None = None
        self._long_call = self._long_milliseconds = 0

    def feed(self, portion: memoryview) -> list[Message]:
        """Raises FrameError: the bytes are no frames. It must not be fed then any more."""
        if not self._rest:
            messages, used = self._parse(portion)
            if used < len(portion):
                self._rest += portion[used:]
            return messages
        self._rest += portion
        with memoryview(self._rest) as view:
            messages, used = self._parse(view)
        if used:
            del self._rest[:used]
        return messages

    def _parse(self, view: memoryview) -> tuple[list[Message], int]:
        messages: list[Message] = []
        start, end = 0, len(view)
        while end - start >= HEADER.size:
            length, call, milliseconds, flags = HEADER.unpack_from(view, start)
            if not _LEAST <= length <= FRAME_LIMIT:
                raise FrameError(f"a frame of {length} bytes: it must have {_LEAST} to {FRAME_LIMIT}")
            stop = start + 4 + length
            if stop > end:
                break
            piece = view[start + HEADER.size : stop]
            if flags == 0 and (self._long is None or call != self._long_call):
                if len(piece) > self._limit:
                    raise FrameError(_TOO_LARGE)
                messages.append(Message(call, milliseconds, bytes(piece)))
            else:
                self._take_piece(call, milliseconds, flags, piece, messages)
            start = stop
        if end - start >= 4 and not _LEAST <= int.from_bytes(view[start : start + 4], "big") <= FRAME_LIMIT:
            raise FrameError("a length that no frame has")  # at once, not when its header is whole
        return messages, start

    def _take_piece(self, call: int, milliseconds: int, flags: int, piece: memoryview, messages: list[Message]) -> None:
        if flags not in (0, MORE, GIVEN_UP) or (flags == GIVEN_UP and len(piece)) or (flags == MORE and not len(piece)):
            raise FrameError(f"flags {flags:#x} of a frame with a piece of {len(piece)} bytes")
        if self._long is None:
            if flags == GIVEN_UP:
                raise FrameError(f"call {call} is given up, of which no piece came")
            self._long, self._long_call, self._long_milliseconds = bytearray(), call, milliseconds
        elif call != self._long_call:
            raise FrameError(f"pieces of call {call} between those of call {self._long_call}")
        if len(self._long) + len(piece) > self._limit:
            raise FrameError(_TOO_LARGE)
        self._long += piece
        if flags == MORE:
            return
        if flags == 0:
            messages.append(Message(call, self._long_milliseconds, bytes(self._long)))
        self._long = None


class _Long:
    __slots__ = ("body", "call", "milliseconds", "start")

    def __init__(self, call: int, milliseconds: int, body: bytes) -> None:
        self.call, self.milliseconds, self.body, self.start = call, milliseconds, memoryview(body), 0


class Outbox:
    """Messages on their way out, as frames. Short ones pass longer ones, between their pieces.

    Attributes:
        nbytes: that wait to be sent, roughly.
    """

    def __init__(self) -> None:
        self._ready: deque[bytes | memoryview] = deque()  # whole frames; of the first, what is left of it
        self._long: deque[_Long] = deque()
        self.nbytes = 0

    def add(self, call: int, milliseconds: int, body: bytes) -> None:
        """Raises ValueError if no message may be so long."""
        if len(body) > MESSAGE_LIMIT:
            raise ValueError(f"a message of {len(body):,} bytes: it may have {MESSAGE_LIMIT:,}")
        if len(body) <= PIECE_LIMIT:
            self._push(call, milliseconds, 0, body)
        else:
            self._long.append(_Long(call, milliseconds, body))
            self.nbytes += len(body)

    def add_frames(self, frames: memoryview) -> None:
        """Adds whole frames; or the rest of some that were sent past this, while nothing waited."""
        self._ready.append(frames)
        self.nbytes += len(frames)

    def give_up(self, call: int) -> None:
        """Nobody waits for this message's answer any more: what was not sent of it need not be sent."""
        for long in self._long:
            if long.call == call:
                self._long.remove(long)
                self.nbytes -= len(long.body) - long.start
                if long.start:
                    self._push(call, 0, GIVEN_UP, b"")
                return

    def next_parts(self) -> list[bytes | memoryview]:
        """Returns what to send next, for one call of `sendmsg`. Empty: nothing is left."""
        if not self._ready and self._long:
            self._cut_piece()
        return [self._ready[number] for number in range(min(len(self._ready), 64))]

    def sent(self, count: int) -> None:
        """So many bytes of `next_parts` were sent."""
        self.nbytes -= count
        while count:
            first = self._ready[0]
            if len(first) > count:
                self._ready[0] = memoryview(first)[count:]
                return
            count -= len(first)
            self._ready.popleft()

    def _cut_piece(self) -> None:
        long = self._long[0]
        piece = long.body[long.start : long.start + PIECE_LIMIT]
        long.start += len(piece)
        self.nbytes -= len(piece)  # `_push` counts it again
        is_last = long.start == len(long.body)
        if is_last:
            self._long.popleft()
        self._push(long.call, long.milliseconds, 0 if is_last else MORE, piece)

    def _push(self, call: int, milliseconds: int, flags: int, piece: bytes | memoryview) -> None:
        self._ready.append(HEADER.pack(_LEAST + len(piece), call, milliseconds, flags))
        if len(piece):
            self._ready.append(piece)
        self.nbytes += HEADER.size + len(piece)


# --- The sending half of a connection --------------------------------------------------------------------------------
# Of clients and servers alike: any thread sends, and none waits.
#
# What the kernel doesn't take at once stays in the outbox, and the connection's epoll is asked to say when there is
# room again: whoever reads there calls `flush`.

FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL  # a program may have set SIGPIPE back to what kills
_COPIED = 1 << 14  # bytes of a message: a copy is cheaper than a list for sendmsg


class Outgoing:
    """After any exception of `send` or `flush` the stream may be torn, and the connection has to be given up.

    Attributes:
        lock: for whoever closes the socket: nothing is sent while it is held.
    """

    def __init__(self, sock: socket.socket, epoll: select.epoll) -> None:
        self._socket, self._epoll = sock, epoll
        self._outbox = Outbox()
        self._events = select.EPOLLIN
        self._reads = True
        self.lock = threading.RLock()  # a signal handler in the middle of `send` may close the connection

    @property
    def nbytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._outbox.nbytes

    def send(self, call: int, milliseconds: int, body: bytes) -> None:
        """Sends a message, or what of it there is room for. Raises OSError."""
        with self.lock:
            outbox = self._outbox
            if outbox.nbytes == 0 and len(body) <= _COPIED:
                whole = frame(call, milliseconds, body)
                try:
                    count = self._socket.send(whole, FLAGS)
                except BlockingIOError:
                    count = 0
                if count == len(whole):
                    return
                outbox.add_frames(memoryview(whole)[count:])
            else:
                outbox.add(call, milliseconds, body)
            self._flush()

    def send_short(self, messages: Iterable[tuple[int, bytes]]) -> None:
        """Sends messages of many calls that fit into a frame each: they go in one piece."""
        with self.lock:
            self._outbox.add_frames(memoryview(b"".join(frame(call, 0, body) for call, body in messages)))
            self._flush()

    def flush(self) -> int:
        """Sends what there is room for. Returns how many bytes that were. Raises OSError."""
        with self.lock:
            return self._flush()

    def give_up(self, call: int) -> None:
        """A message that nobody needs any more: what was not sent of it isn't sent."""
        with self.lock:
            self._outbox.give_up(call)

    def read_on(self, reads: bool) -> None:
        """Whether the epoll is to say that there is something to read."""
        with self.lock:
            self._reads = reads
            self._ask()

    def _flush(self) -> int:
        outbox, total = self._outbox, 0
        while outbox.nbytes:
            try:
                count = self._socket.sendmsg(outbox.next_parts(), (), FLAGS)
            except BlockingIOError:
                break
            outbox.sent(count)
            total += count
        self._ask()
        return total

    def _ask(self) -> None:
        events = (select.EPOLLIN if self._reads else 0) | (select.EPOLLOUT if self._outbox.nbytes else 0)
        if events != self._events:
            self._epoll.modify(self._socket.fileno(), events)
            self._events = events
