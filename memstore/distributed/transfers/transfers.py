"""Transfers: how a process gets the bytes of values that lie on other hosts, all of them or those that it needs."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np

from memstore._telling import told
from memstore.distributed.rules import Member
from memstore.distributed.transfers.copies import (
    FetchRanges,
    GoneError,
    PartCopies,
    fetch_copy,
    find_copy,
    find_replica,
    is_worth_it,
    map_copy,
    one_fetcher,
    places_of,
    take_values,
)
from memstore.distributed.transfers.messages import NO_RANGES, SEGMENTS_LIMIT, Ranges, merged, one_range, together
from memstore.distributed.transfers.receiving import (
    Bringer,
    BrokenStreamError,
    CannotSendError,
    SegmentRanges,
    Stream,
    StreamLinks,
    Streams,
    ask_to_pin,
    read_ranges,
    unpin,
)
from memstore.engine import (
    MappedEntry,
    Record,
    Root,
    SealedSegment,
    SegmentExtent,
    fits,
    map_entry,
    map_file,
    mapped_size,
    open_stored,
    read_stored,
    segment_path,
    segments_of,
    storage_error,
)
from memstore.engine import Mapping as MappedRange
from memstore.errors import (
    CorruptionError,
    CrossHostError,
    HomeUnavailableError,
    LinkRefusedError,
    StorageError,
    StoreFullError,
    VersionGoneError,
)

# --- What other hosts keep for this process --------------------------------------------------------------------------
# The reader's side of lazy views: what a process has asked other hosts to keep, as long as it looks at it.
#
# A process has one stream a host for this. On it goes *keep*, which is answered, and *let go*, which isn't. When the
# stream breaks, its host lets go of all: who keeps or reads something next makes a new stream, and asks for all anew.
# What was replaced meanwhile may be gone then.
#
# *Let go* is said by finalizers, at any moment and in any thread. So they never wait: who finds the lock taken leaves
# it to who has it.

_PATIENCE = 1.0  # seconds to wait for a host: what is read of others needs it not
_ASKED_AGAIN_AFTER = 5.0  # seconds for which one that gave no answer isn't asked again

log = logging.getLogger("memstore")

Result = TypeVar("Result")


class Pins:
    """Segments that other hosts keep for this process. Thread-safe; a forked child asks for itself."""

    def __init__(self, links: StreamLinks) -> None:
        self._links = links
        self._hosts: dict[bytes, _PinningHost] = {}

    def pin(self, wanted: Sequence[tuple[Member, Sequence[SegmentExtent]]], deadline: float) -> Pinned | None:
        """Asks each host to keep these segments until what is returned is dropped. None: one of them is gone.

        A host that can't be reached is asked when something of it is read: others' bytes can be read without it.

        Raises CorruptionError: a host's file is damaged.
        """
        pinned = Pinned()
        for member, extents in wanted:
            host = self._hosts.get(member.id) or self._hosts.setdefault(member.id, _PinningHost(self._links, member))
            extents = [msgspec.structs.replace(one, base=0) for one in extents]  # wherever a view has them
            try:
                if not host.pin(extents, deadline):
                    return None  # the other hosts let go, as `pinned` is dropped
            except CannotSendError as error:  # it can't keep more: its bytes stay until they are replaced
                log.info("%s", str(error))
            else:
                pinned.add(host, extents)
        return pinned

    def close(self) -> None:
        for host in list(self._hosts.values()):
            host.close()


class Pinned:
    """Segments that other hosts keep, until nothing refers to this."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[tuple[_PinningHost, Sequence[SegmentExtent]]] = []

    def add(self, host: _PinningHost, extents: Sequence[SegmentExtent]) -> None:
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


class _PinningHost:
    """Segments that one host keeps for this process."""

    def __init__(self, links: StreamLinks, member: Member) -> None:
        self._links, self.member = links, member
        self._counts: Counter[SegmentExtent] = Counter()
        self._changes: deque[tuple[Sequence[SegmentExtent], int]] = deque()  # that are to be counted
        self._stream: Stream | None = None
        self._lock = threading.Lock()
        self._away_until = 0.0  # monotonic
        self._pid = os.getpid()

    def pin(self, extents: Sequence[SegmentExtent], deadline: float) -> bool:
        """Pins segments. Returns False where one of them is gone. Raises CannotSendError, CorruptionError."""
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
            self._away_until = time.monotonic() + _ASKED_AGAIN_AFTER
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
                unpin(self._stream, gone)
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
            return all(ask_to_pin(stream, extents[at : at + SEGMENTS_LIMIT], until) for at in starts)
        except (CannotSendError, CorruptionError):
            raise  # it was answered
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | BrokenStreamError):
                raise self._silent(str(error)) from error
            raise

    def _silent(self, why: str) -> HomeUnavailableError:
        return HomeUnavailableError(f"{self.member.label} did not say that it keeps what is looked at: {why}")


# --- Values of which bytes are absent --------------------------------------------------------------------------------
# Values of other hosts in memory of this process: the bytes that are needed come, and no others.
#
# The value gets a range of addresses as if it were mapped. Segments of this host are mapped there; where those of
# others would lie is memory without a file, which is filled before somebody reads it. What has come stays as long as
# the value is held. Rows that are read into new memory come straight to it, the first time: most are read once, and to
# keep them takes as long as to receive them.

_LET_GO = (
    "its host has let go of it before all of it had come, since its index process was started again or the connection "
    "broke"
)
GAP = 16  # bytes between two ranges: to name both takes as many


class AbsentBytes:
    """The bytes of one value that lie elsewhere.

    Args:
        elsewhere: segments of other hosts, with the ids of these.
        mapping: the range of addresses of the whole value.
        read: brings parts of them.
        seconds: for each time that bytes are needed.
        localize: makes a copy of the value in this host's store.
        pinned: as long as it lives, the other hosts keep the bytes; None: they don't.
        why_gone: for the error where they have been replaced, and are there no more.
        copies: through which parts come once a host; None: they come for this process alone.
    """

    def __init__(
        self,
        key: bytes,
        record: Record,
        elsewhere: Sequence[tuple[bytes, SegmentExtent]],
        mapping: MappedRange,
        read: FetchRanges,
        seconds: float,
        localize: Callable[[float], MappedEntry | None],
        pinned: Pinned | None = None,
        why_gone: str = _LET_GO,
        copies: PartCopies | None = None,
    ) -> None:
        self._key, self._record, self._elsewhere = key, record, elsewhere
        self._address, self._size = mapping.address, mapping.size
        self._bring_parts, self._seconds, self._localize = read, seconds, localize
        self._why_gone, self._copies = why_gone, copies
        self._there, self._pinned = one_range(0, mapping.size).without(self._all()), pinned
        self._passed = NO_RANGES  # what has come, and lies elsewhere in this process

    def _all(self) -> Ranges:
        """Where the data sections of others' segments lie, in the range of addresses."""
        if self._record.start:  # one plain segment; what is behind its data is slack
            return one_range(self._record.start, self._record.start + self._record.nbytes)
        found = [one_range(one.base + one.start, one.base + one.size) for _, one in self._elsewhere]
        return together(found)

    def need(self, starts: Any, stops: Any) -> None:
        places, ends = np.asarray(starts, np.int64) - self._address, np.asarray(stops, np.int64) - self._address
        self._bring(merged(places, ends).cut(0, self._size), time.monotonic() + self._seconds)

    def receive(self, starts: Any, stops: Any, into: Any) -> bool:
        """See `engine.Absent`. What has come so once, and is asked for again, is kept from then on."""
        wanted = Ranges(np.asarray(starts, np.int64) - self._address, np.asarray(stops, np.int64) - self._address)
        if wanted.meets(self._there) or wanted.meets(self._passed):
            return False
        deadline = time.monotonic() + self._seconds
        if self._copies is not None and self._copies.has_or_wants(wanted, deadline):
            return False
        hosts: dict[bytes, list[SegmentRanges]] = {}
        for host, extent in self._elsewhere:
            inside = (wanted.starts >= extent.base) & (wanted.stops <= extent.base + extent.size)
            if inside.any():
                moved = Ranges(wanted.starts[inside] - extent.base, wanted.stops[inside] - extent.base)
                hosts.setdefault(host, []).append(SegmentRanges(extent, moved, into[inside] - moved.starts))
        if not self._fetch(hosts, deadline):
            raise self._gone()
        self._passed = together([self._passed, wanted])
        return True

    def need_all(self) -> None:
        self._bring(self._all(), time.monotonic() + self._seconds)

    def bring_all(self, deadline: float) -> bool:
        """Brings all bytes until a deadline (monotonic). Returns False where the version was replaced."""
        return self._read(self._all().without(self._there), deadline)

    def header(self, deadline: float) -> bool:
        """Brings the header of a plain segment. False where the version was replaced."""
        return self._read(one_range(0, self._record.start), deadline)

    def localized(self) -> MappedEntry:
        held = self._localize(time.monotonic() + self._seconds)
        if held is None:
            raise self._gone()
        return held

    def _bring(self, wanted: Ranges, deadline: float) -> None:
        lacking = wanted.without(self._there)
        if lacking and not self._read(lacking, deadline):
            raise self._gone()

    def _read(self, lacking: Ranges, deadline: float) -> bool:
        lacking = together([lacking], GAP)
        if self._copies is not None:
            shared = self._copies.fetch(lacking, self._fetch, deadline)
            if shared is None:
                return False
            self._there = together([self._there, shared])
            lacking = lacking.without(shared)
        hosts: dict[bytes, list[SegmentRanges]] = {}
        for host, extent in self._elsewhere:
            ranges = lacking.cut(extent.base, extent.base + extent.size)
            if ranges:
                moved = Ranges(ranges.starts - extent.base, ranges.stops - extent.base)
                hosts.setdefault(host, []).append(SegmentRanges(extent, moved, self._address + extent.base))
        if not self._fetch(hosts, deadline):
            return False
        # Another thread may have brought others meanwhile, and be forgotten here: then they come once more.
        self._there = together([self._there, lacking])
        return True

    def _fetch(self, hosts: Mapping[bytes, Sequence[SegmentRanges]], deadline: float) -> bool:
        if self._pinned is not None:
            self._pinned.renew(hosts, deadline)
        try:
            return self._bring_parts(hosts, deadline)
        except HomeUnavailableError as error:
            raise of_key(self._key, error) from error

    def _gone(self) -> VersionGoneError:
        key = self._key.decode()
        return VersionGoneError(
            f"version {self._record.version} of {key!r} was replaced, and {self._why_gone}: get the key anew; where a "
            "value must outlive that, get it whole instead of viewing it",
            key=key,
        )


def of_key(key: bytes, error: HomeUnavailableError) -> HomeUnavailableError:
    """The error of a host that doesn't send bytes, told of the key that they belong to."""
    return HomeUnavailableError(f"{key.decode()!r}: {error}", key=key.decode())


# --- On storage that hosts share -------------------------------------------------------------------------------------
# Bytes of values on storage that hosts share: a process reads the files itself, and no host sends anything.
#
# What a host has written lies in its own folder there (`engine.segments_of`). Readers lock nothing: see
# `engine/files/segments.py` for what they compare instead, and for how long a file stays.

_A_LOOK = 64 << 20  # bytes between two looks at the clock


class StoredFiles:
    """The files of all hosts, seen from one root. Thread-safe."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def read(self, hosts: Mapping[bytes, Sequence[SegmentRanges]], deadline: float) -> bool:
        """Reads parts of each host's segments. False: one of them isn't there, and the memory may hold anything.

        Raises StorageError: the storage fails, or isn't mounted; or it takes longer than the deadline (monotonic).
        """
        return all(self._read(host.hex(), part, deadline) for host, parts in hosts.items() for part in parts)

    def are_there(self, record: Record) -> bool:
        """Whether all segments of a value can be seen from here, whole."""
        return all(self._is_there(*place) for place in self._root.storage.placed(record))

    def _is_there(self, host: str, path: str, extent: SegmentExtent) -> bool:
        try:
            return open_stored(path, extent, host) is not None
        except OSError as error:
            raise storage_error(path, error) from error

    def _read(self, host: str, part: SegmentRanges, deadline: float) -> bool:
        path = segment_path(segments_of(self._root.path, host), part.extent.segment)
        try:
            file = open_stored(path, part.extent, host)
            if file is None:
                return False
            for pieces in _pieces(part):
                if not read_stored(file, pieces):
                    return False
                if time.monotonic() > deadline:
                    raise StorageError(f"{path}: to read it takes longer than the timeout", path=path)
            return fits(file, part.extent, host)
        except StorageError:
            raise
        except OSError as error:
            raise storage_error(path, error) from error


def _pieces(part: SegmentRanges) -> Iterator[list[tuple[int, int, int]]]:
    """(offset, size, address) of each range, as many as are read between two looks at the clock."""
    pieces, nbytes = list[tuple[int, int, int]](), 0
    addresses = (part.ranges.starts + part.origin).tolist()
    for start, size, address in zip(part.ranges.starts.tolist(), part.ranges.sizes.tolist(), addresses, strict=True):
        for at in range(0, size, _A_LOOK):
            count = min(_A_LOOK, size - at)
            pieces.append((start + at, count, address + at))
            nbytes += count
            if nbytes >= _A_LOOK:
                yield pieces
                pieces, nbytes = [], 0
    if pieces:
        yield pieces


# --- Transfers -------------------------------------------------------------------------------------------------------


class Transfers:
    """One a process and root; thread-safe. A forked child makes streams of its own.

    Args:
        root: of this host's store.
        links: what makes streams to other hosts.
        members: finds a member of the cluster by its id; None: there is none any more.
    """

    def __init__(self, root: Root, links: StreamLinks, members: Callable[[bytes], Member | None]) -> None:
        self._root, self._find = root, members
        self._streams, self._pins = Streams(links, Bringer(root, members), members), Pins(links)
        self._files = StoredFiles(root) if root.storage.sees_all_hosts else None

    def hold(
        self, key: bytes, record: Record, deadline: float, *, may_lock: bool = True, lazily: bool = False
    ) -> MappedEntry | None:
        """Maps a value some of whose segments lie on other hosts. None: some are gone, look it up again.

        A plain value is copied to this host once: by one of the processes that ask for it meanwhile, and the others
        wait. One in several segments, or for which this store has no room, is read into memory of this process.

        Args:
            record: with `hosts`.
            deadline: monotonic.
            may_lock: whether the store may be changed; else nothing is copied.
            lazily: if there is no copy, bytes come when they are asked for, which may take as long each time as this
                call may: see `MappedEntry.absent`. Until the value is dropped, the other hosts keep its bytes, as they
                do for who has got it there.

        Raises:
            HomeUnavailableError: a host with these bytes can't be reached.
            CrossHostError: it lies in files of another host that don't belong to the store.
            CorruptionError, ResourceLimitError, StoreTimeoutError.
        """
        seconds = max(deadline - time.monotonic(), 0.0)
        self._check_not_attached(key, record)
        if self._files is not None:
            return self._hold_stored(self._files, key, record, seconds, deadline, lazily=lazily)
        held = self._copied(key, record, deadline)
        if held is not None:
            return held
        if lazily:
            pinned = self._pin(key, record, deadline)
            return None if pinned is None else self._absent(key, record, pinned, seconds, deadline, may_lock=may_lock)
        if may_lock and is_worth_it(self._root, record):
            try:
                held = self._copy(key, record, deadline)
            except (StoreFullError, StorageError):  # there is no room, or the disk to which values move is gone
                held = None
            except GoneError:
                return None
            if held is not None:
                return held
        held = self._absent(key, record, None, seconds, deadline, may_lock=may_lock)
        if held is not None and isinstance(held.absent, AbsentBytes) and not held.absent.bring_all(deadline):
            return None
        return held

    def take(
        self,
        key: bytes,
        record: Record,
        host: bytes,
        publish: Callable[[Record, Sequence[SealedSegment]], Result],
        deadline: float,
    ) -> Result:
        """Copies the segments of a value that lie on a host to files of this one: see `take_values`."""

        def publish_one(records: Sequence[Record], sealed: Sequence[SealedSegment]) -> Result:
            return publish(records[0], sealed)

        return take_values(self._root, [(key, record)], host, self._fetch, publish_one, deadline)

    def take_all(
        self,
        values: Sequence[tuple[bytes, Record]],
        publish: Callable[[Sequence[Record], Sequence[SealedSegment]], Result],
        deadline: float,
    ) -> Result:
        """Copies all of values that lies on other hosts to files of this one: see `take_values`."""
        return take_values(self._root, values, None, self._fetch, publish, deadline)

    def _pin(self, key: bytes, record: Record, deadline: float) -> Pinned | None:
        elsewhere: dict[bytes, list[SegmentExtent]] = {}
        for host, extent in record.elsewhere(self._root.member_id()):
            elsewhere.setdefault(host, []).append(extent)
        try:
            hosts = [(self._member(host), extents) for host, extents in elsewhere.items()]
        except HomeUnavailableError as error:
            raise of_key(key, error) from error
        return self._pins.pin(hosts, deadline)

    def _check_not_attached(self, key: bytes, record: Record) -> None:
        if record.adopted is not None:
            name, member = key.decode(), self._find(record.hosts[0]) if record.hosts else None
            where = "another host" if member is None else member.label
            raise CrossHostError(
                f"{name!r} lies in files that were attached on {where}: get it there, or put it with attach(copy=True)",
                key=name,
            )

    def _absent(
        self, key: bytes, record: Record, pinned: Pinned | None, seconds: float, deadline: float, *, may_lock: bool
    ) -> MappedEntry | None:
        root = self._root
        size = mapped_size(record, record.segments)
        with root.guard:
            mapping = root.storage.map_beside(record.here(root.member_id()), size)
        if mapping is None:
            return None
        absent = AbsentBytes(
            key,
            record,
            record.elsewhere(root.member_id()),
            mapping,
            self._receive,
            seconds,
            lambda until: self._localized(key, record, until),
            pinned,
            copies=self._part_copies(key, record, mapping) if may_lock else None,
        )
        if record.objects_checksum is not None and not absent.header(deadline):
            return None
        return MappedEntry(record, mapping, absent)

    def _part_copies(self, key: bytes, record: Record, mapping: MappedRange) -> PartCopies | None:
        if record.start or self._root.lock is None:
            return None
        return PartCopies(self._root, key, record.elsewhere(self._root.member_id()), mapping)

    def _fetch(self, hosts: Mapping[bytes, Sequence[SegmentRanges]], deadline: float) -> bool:
        """Reads ranges of files, on storage that hosts share; else it receives them."""
        return self._receive(hosts, deadline) if self._files is None else self._files.read(hosts, deadline)

    def _receive(self, hosts: Mapping[bytes, Sequence[SegmentRanges]], deadline: float) -> bool:
        nbytes = sum([part.ranges.nbytes for parts in hosts.values() for part in parts])
        with told("fetch", self._root.path, nbytes=nbytes):
            return read_ranges(self._streams, [(self._member(host), parts) for host, parts in hosts.items()], deadline)

    def _hold_stored(
        self, files: StoredFiles, key: bytes, record: Record, seconds: float, deadline: float, *, lazily: bool = False
    ) -> MappedEntry | None:
        """On storage that hosts share: nothing is sent or copied, and files of this host are as those of others."""
        root, shared = self._root, self._root.settings.shared
        assert shared is not None, "files are stored there alone"
        if shared.maps or not lazily:
            return map_entry(root, key, record)
        if not files.are_there(record):
            return None
        why_gone = f"its file was kept for the grace time of the store, {shared.grace:g} s, and no longer"
        mapping = map_file(None, mapped_size(record, record.segments))
        placed = [(bytes.fromhex(host), extent) for host, _, extent in root.storage.placed(record)]
        absent = AbsentBytes(key, record, placed, mapping, files.read, seconds, lambda until: None, None, why_gone)
        if record.objects_checksum is not None and not absent.header(deadline):
            return None
        return MappedEntry(record, mapping, absent)

    def close(self) -> None:
        self._pins.close()
        self._streams.close()

    def _copied(self, key: bytes, record: Record, deadline: float) -> MappedEntry | None:
        replica = find_replica(self._root, key, record.version, deadline)
        if replica is not None:
            with self._root.guard:
                held = map_entry(self._root, key, replica)
            if held is not None:
                return held
        copy = find_copy(self._root, key, deadline)
        if copy is None:
            return None
        if copy.places == places_of(record):
            return map_copy(self._root, key, copy, record.version)
        return None

    def _copy(self, key: bytes, record: Record, deadline: float) -> MappedEntry | None:
        """None, and errors, as of `fetch_copy`."""
        name = key + msgspec.msgpack.encode(places_of(record))
        with one_fetcher(self._root, name, f"fetches {key.decode()!r} from another host", deadline):
            held = self._copied(key, record, deadline)
            if held is not None:
                return held
            assert record.hosts is not None, "it lies on another host"
            try:
                return fetch_copy(self._root, key, record, self._streams, self._member(record.hosts[0]), deadline)
            except HomeUnavailableError as error:
                raise of_key(key, error) from error

    def _localized(self, key: bytes, record: Record, deadline: float) -> MappedEntry | None:
        name = key.decode()
        if not record.description:
            raise CrossHostError(
                f"a view of {name!r} came from another host, and is not sent on: send store.ref({name!r}), or what it "
                "shows as a tensor (clone())",
                key=name,
            )
        if not is_worth_it(self._root, record):
            raise CrossHostError(
                f"{name!r} lies on other hosts, and this one can't keep a copy of it to be referred to: get the key "
                "where its value is needed",
                key=name,
            )
        with contextlib.suppress(GoneError):
            return self._copy(key, record, deadline)
        return None

    def _member(self, member: bytes) -> Member:
        found = self._find(member)
        if found is None:
            raise HomeUnavailableError(f"the host {member.hex()} has left the cluster, and the bytes are there")
        return found
