"""The host's side of lazy views elsewhere: segments that readers of other hosts look at stay as long as they do.

A reader says on a stream of its own which segments it looks at. They are mapped under a shared lock, as by a process of
this host that has got them: so nobody uses their files again, whatever is put. The mappings go when the reader says so,
or its stream ends, which is when it dies, and with the index process. Nothing is written anywhere.
"""

from __future__ import annotations

import socket
import threading

from memstore.distributed.transfers.messages import FOLLOWS, GONE, HEAD, Keep, LetGo
from memstore.distributed.transfers.sending import map_segments, send_failure
from memstore.engine import Mapping, Root
from memstore.errors import CorruptionError, ResourceLimitError

MOST_STREAMS = 512
MOST_SEGMENTS = 16_384  # each is a mapping, of which the kernel allows a process some 65,000


class Keeping:
    """Of all streams of an index process. Thread-safe."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._kept: dict[socket.socket, dict[tuple[int, int], Mapping]] = {}
        self._count = 0

    def __len__(self) -> int:
        """How many streams keep something."""
        return len(self._kept)

    def keeps(self, stream: socket.socket) -> bool:
        return stream in self._kept

    def answer(self, stream: socket.socket, request: Keep) -> None:
        """Raises OSError, which ends the stream."""
        try:
            is_there = self._keep(stream, request)
        except (CorruptionError, OSError) as error:
            send_failure(stream, error)
        else:
            stream.sendall(HEAD.pack(FOLLOWS if is_there else GONE, 0))

    def _keep(self, stream: socket.socket, request: Keep) -> bool:
        """Keeps all of the segments, or none. False: one of them holds another put by now.

        Raises ResourceLimitError, CorruptionError, OSError.
        """
        mappings = map_segments(self._root, request.segments)
        if mappings is None:
            return False
        found = {(one.segment, one.put_id): mapping for one, mapping in zip(request.segments, mappings, strict=True)}
        with self._lock:
            if stream not in self._kept and len(self._kept) >= MOST_STREAMS:
                raise ResourceLimitError(f"{MOST_STREAMS:,} processes of other hosts look at lazy views of this one")
            own = self._kept.get(stream, {})
            fresh = [name for name in found if name not in own]
            if self._count + len(fresh) > MOST_SEGMENTS:
                raise ResourceLimitError(f"other hosts look at lazy views of {self._count:,} values of this one")
            self._kept[stream] = {**own, **found}
            self._count += len(fresh)
        return True

    def let_go(self, stream: socket.socket, request: LetGo) -> None:
        with self._lock:
            own = self._kept.get(stream, {})
            gone = [own.pop(name, None) for name in request.segments]
            self._count -= len(gone) - gone.count(None)
            if not own:
                self._kept.pop(stream, None)

    def forget(self, stream: socket.socket) -> None:
        """It has ended."""
        with self._lock:
            self._count -= len(self._kept.pop(stream, {}))
