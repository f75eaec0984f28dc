"""Relays: copies that are passed on to other hosts, complete or still being filled. Decision 038 has the reasons."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Generator
from typing import Any

import msgspec
import numpy as np
import xxhash

from memstore.distributed.rules import Place, Trees
from memstore.distributed.transfers.messages import CHUNK, DIGEST, Pieces, Ranges, Referral
from memstore.engine import LockFile, Mapping, Root, create_file, fence, map_file, syscalls

# --- Copies that are being filled ------------------------------------------------------------------------------------
# A process that fills a copy says in ROOT/relays how far it is, so that its host's index process can pass on what has
# arrived. The file has a slot for each of `SLOTS` fillings. A filling has locked the byte of its slot's number, so the
# kernel frees the slot when the process dies. Without a free slot nobody is told, and the copy is passed on when it is
# complete.
#
# A slot has numbers of 64 bits: two for the name of what is filled, which are written last; the segment that is filled,
# and its size; by how much the data lies elsewhere there than in the other host's segment; until when the process is
# known to live (monotonic ns); where all that is fetched begins and ends; and of each stream, where its range begins,
# how far it has come, where it ends, and the depth by which this host waits for it.

FILE = "relays"
PART_COPY_MARK = b"\xc1copy"  # the description of a part's copy: no msgpack starts so
SLOTS, _WORDS = 64, 32
_SIZE = SLOTS * _WORDS * 8
_SEGMENT, _BYTES, _SHIFT, _ALIVE, _WHOLE, _WAYS, _OF_WAY = 2, 3, 4, 5, 6, 8, 4
MOST_WAYS = 6  # streams of one filling that are told of
LEAST = 2 << 20  # bytes: less comes from where it was put; the file of less isn't mapped while it is filled
_ALIVE_FOR = 2.0  # seconds after its last sign
_PREPARES_FOR = 10.0  # seconds for a process to begin
_BYTES_A_SECOND = 1e9  # of a file whose room is allocated before that

_Words = np.ndarray[Any, np.dtype[np.uint64]]


def _map_slots(file: LockFile) -> tuple[Mapping, _Words]:
    """Maps the file. The mapping must outlive the numbers."""
    mapping = map_file(file.fd, _SIZE, shared=True)
    return mapping, np.frombuffer(mapping.view(), np.uint64)


def _slot(numbers: _Words, slot: int) -> _Words:
    return numbers[slot * _WORDS : (slot + 1) * _WORDS]


def _name_of(place: Place) -> tuple[int, int]:
    return divmod(xxhash.xxh3_128_intdigest(msgspec.msgpack.encode(place)) | 1, 1 << 64)


class Filling:
    """A copy that this process fills, and that its host passes on meanwhile.

    Attributes:
        reader: the id of this host.
        key: of the copy.
    """

    def __init__(self, reader: bytes, key: bytes, words: _Words, mapping: Mapping, wanted: Ranges) -> None:
        self.reader, self.key = reader, key
        self._words, self._mapping = words, mapping
        self._lock, self._ways = threading.Lock(), list[tuple[int, int]]()
        self._words[:] = 0
        self._words[_ALIVE] = time.monotonic_ns() + int((_PREPARES_FOR + wanted.nbytes / _BYTES_A_SECOND) * 1e9)
        self._words[_WHOLE : _WHOLE + 2] = int(wanted.starts[0]), int(wanted.stops[-1])

    def name(self, place: Place) -> None:
        fence()
        self._words[1::-1] = _name_of(place)

    def fills(self, segment: int, size: int, shift: int) -> None:
        """Says in which file of this host the bytes arrive.

        Args:
            shift: how much farther behind they lie in it than in the file where they come from.
        """
        words = self._words
        words[_BYTES], words[_SHIFT] = size, shift % (1 << 64)
        fence()
        words[_SEGMENT] = segment
        self.give_sign()

    def begin(self, ranges: Ranges, depth: int) -> Way | None:
        """Begins to receive a range. Returns what is to be told how far it is; None where nobody is told.

        Args:
            depth: of this host, as it waits for these bytes: see `rules/relays.py`.
        """
        first, end = way = int(ranges.starts[0]), int(ranges.stops[-1])
        with self._lock:
            is_new = way not in self._ways  # else it is received once more, over another stream
            if is_new and len(self._ways) == MOST_WAYS:
                return None
            if is_new:
                self._ways.append(way)
            at = _WAYS + _OF_WAY * self._ways.index(way)
        words = self._words[at : at + _OF_WAY]
        words[3] = depth
        is_one = len(ranges.starts) == 1
        if is_new:
            words[:2] = first
            fence()
            words[2] = end if is_one else first  # of several ranges it isn't told which bytes are among them
        self.give_sign()
        return Way(self, words, first, is_one=is_one)

    def give_sign(self) -> None:
        self._words[_ALIVE] = time.monotonic_ns() + int(_ALIVE_FOR * 1e9)

    def end(self) -> None:
        self._words[:] = 0


class Way:
    """The range that one stream fills, from its first byte on. Of several ranges it isn't told how far they are."""

    def __init__(self, filling: Filling, words: _Words, first: int, *, is_one: bool) -> None:
        self.filling, self._words, self._first, self._is_one = filling, words, first, is_one
        self._there = 0

    def receive(self, nbytes: int) -> None:
        """Says that the next bytes are there; 0: that this process waits for them."""
        self._there += nbytes
        if self._is_one:
            fence()
            self._words[1] = max(int(self._words[1]), self._first + self._there)
        self.filling.give_sign()

    def change_depth(self, depth: int) -> None:
        """Says by which depth this host waits for the rest."""
        self._words[3] = depth


@contextlib.contextmanager
def passed_on(
    root: Root, key: bytes, place: Place, wanted: Ranges, nbytes: int | None = None
) -> Generator[Filling | None]:
    """Fills a copy that is passed on meanwhile. None: nobody is told of it, since it is small, or there is no slot.

    Args:
        key: of the copy.
        place: of the segment that it is a copy of.
        wanted: what the copy will have of that segment.
        nbytes: how much of this is fetched; None: all.
    """
    if (wanted.nbytes if nbytes is None else nbytes) < LEAST:
        yield None
        return
    try:
        with root.guard:
            file = LockFile(f"{root.state}/{FILE}", os.O_RDWR)
    except OSError:  # no index process has passed anything on; or the file is another user's
        yield None
        return
    with file:
        if syscalls.size_of(file.fd) != _SIZE:
            yield None
            return
        first = os.getpid() % SLOTS
        for slot in (*range(first, SLOTS), *range(first)):
            if syscalls.lock_byte(file.fd, slot):
                break
        else:
            yield None
            return
        mapping, words = _map_slots(file)
        filling = Filling(root.member_id(), key, _slot(words, slot), mapping, wanted)
        filling.name(place)
        try:
            yield filling
        finally:
            filling.end()
            syscalls.unlock_byte(file.fd, slot)


class Slots:
    """The slots of a root, as its index process reads them. Thread-safe."""

    def __init__(self, root: Root) -> None:
        self._path = path = f"{root.state}/{FILE}"
        try:
            with root.guard:
                self._file = LockFile(path, os.O_RDWR)
            is_whole = syscalls.size_of(self._file.fd) == _SIZE
        except FileNotFoundError:
            is_whole = False
        if not is_whole:  # who has an older one mapped goes on with it, and is not passed on
            try:
                create_file(root.state, FILE, bytes(_SIZE), root.settings)
                with root.guard:
                    self._file = LockFile(path, os.O_RDWR)
            except FileNotFoundError:
                root.check_in_place()  # it was removed just now
                raise
        self._mapping, self._words = _map_slots(self._file)

    def find(self, place: Place) -> SlotRead | None:
        """Returns the slot of who fills a copy of this segment."""
        high, low = _name_of(place)
        names = (self._words[::_WORDS] == low) & (self._words[1::_WORDS] == high)
        for slot in np.flatnonzero(names).tolist():
            if syscalls.lock_byte(self._file.fd, slot):  # its process was killed
                _slot(self._words, slot)[:] = 0
                syscalls.unlock_byte(self._file.fd, slot)
            else:
                return SlotRead(_slot(self._words, slot))
        return None

    def close(self) -> None:
        """Removes the file. Who fills a copy goes on, and is not passed on until the next one."""
        self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)


class SlotRead:
    """The words of a slot at one moment."""

    def __init__(self, words: _Words) -> None:
        found = words.tolist()
        self.segment, self.size = found[_SEGMENT], found[_BYTES]
        self.shift = found[_SHIFT] - (1 << 64 if found[_SHIFT] >> 63 else 0)
        self.is_alive = time.monotonic_ns() < found[_ALIVE]
        self._first, self._end = found[_WHOLE : _WHOLE + 2]
        ways = found[_WAYS : _WAYS + _OF_WAY * MOST_WAYS]
        self._ways = [way for way in zip(*(ways[at::_OF_WAY] for at in range(_OF_WAY)), strict=True) if way[2]]

    def arrived(self, first: int) -> int:
        """Returns up to where the bytes have arrived, from this one on."""
        return max((reached for start, reached, _, _ in self._ways if start <= first <= reached), default=first)

    def is_coming(self, first: int, depth: int) -> bool:
        """Whether this byte is under way, and a host of that depth may wait for it."""
        if not self.is_alive or not self._first <= first < self._end:
            return False
        depths = [own for start, _, end, own in self._ways if start <= first < end]
        if depths:
            return min(depths) < depth
        # Its stream hasn't begun; or it is there, or will be, once all streams have ended.
        return all(own < depth for _, _, _, own in self._ways)


# --- Whom the readers are sent to ------------------------------------------------------------------------------------


_MOST_SUMMED = 64  # ranges whose checksums are kept


class Origin:
    """The readers of a host's segments, as its index process knows them, and what it tells them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trees = Trees()
        self._sums: OrderedDict[tuple[int, int, bytes], _Sums] = OrderedDict()

    def referral(self, segment: int, put_id: int, reader: bytes, lost: bytes) -> Referral | None:
        """Returns whom a reader is to fetch from: see `rules/relays.py`. None: this host sends the bytes."""
        with self._lock:
            parent, depth = self._trees.of(segment, put_id).source_of(reader, lost or None)
        return None if parent is None else Referral(parent, depth)

    def checksums(self, segment: int, put_id: int, named: bytes, pieces: Pieces) -> Generator[bytes]:
        """Returns the checksums of ranges, chunk by chunk. They are computed once, for all readers of these ranges.

        Args:
            named: the ranges, as the request names them.
            pieces: where they are mapped.
        """
        name = segment, put_id, named
        with self._lock:
            sums = self._sums.setdefault(name, _Sums())
            self._sums.move_to_end(name)
            if len(self._sums) > _MOST_SUMMED:
                self._sums.popitem(last=False)
        return sums.of(pieces)


class _Sums:
    def __init__(self) -> None:
        self._lock, self._found = threading.Lock(), list[bytes]()

    def of(self, pieces: Pieces) -> Generator[bytes]:
        number = 0
        while len(pieces.sizes):
            chunk, pieces = pieces.split(CHUNK)
            with self._lock:
                if len(self._found) == number:
                    self._found.append(checksum_of(chunk))
            yield self._found[number]
            number += 1


def checksum_of(pieces: Pieces) -> bytes:
    hasher = xxhash.xxh3_64()
    for group, is_packed in pieces.groups():
        for part in [group.gather()] if is_packed else group.parts():
            hasher.update(part)
    return hasher.digest()


def count_of(nbytes: int) -> int:
    """Returns how many checksums so many bytes have."""
    return -(-nbytes // CHUNK)


def is_sound(pieces: Pieces, said: bytes) -> bool:
    """Whether bytes that came from a relay are those of their origin."""
    return len(said) == DIGEST and checksum_of(pieces) == said
