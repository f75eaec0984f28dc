"""Transfers: how a process gets the bytes of values that lie on other hosts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from memstore.distributed.rules import Member
from memstore.distributed.transfers.absent import AbsentBytes, of_key
from memstore.distributed.transfers.asking import Part
from memstore.distributed.transfers.copies import (
    GoneError,
    fetch_copy,
    find_copy,
    is_worth_it,
    map_copy,
    places_of,
)
from memstore.distributed.transfers.kept import Keeper, Kept
from memstore.distributed.transfers.receiving import read_ranges
from memstore.distributed.transfers.relay import Relay
from memstore.distributed.transfers.stored import StoredFiles
from memstore.distributed.transfers.streams import Links, Streams
from memstore.distributed.transfers.turn import turn
from memstore.engine import (
    MappedEntry,
    Record,
    Root,
    SegmentExtent,
    map_entry,
    map_file,
    mapped_size,
)
from memstore.errors import CrossHostError, HomeUnavailableError, StoreFullError


class Transfers:
    """One a process and root; thread-safe. A forked child makes streams of its own.

    Args:
        root: of this host's store.
        links: what makes streams to other hosts.
        members: finds a member of the cluster by its id; None: there is none any more.
    """

    def __init__(self, root: Root, links: Links, members: Callable[[bytes], Member | None]) -> None:
        self._root, self._find = root, members
        self._streams, self._keeper = Streams(links, Relay(root, members)), Keeper(links)
        self._files = StoredFiles(root) if root.storage.sees_all_hosts else None

    def hold(self, key: bytes, record: Record, deadline: float, *, may_lock: bool = True) -> MappedEntry | None:
        """Maps a value some of whose segments lie on other hosts. None: some are gone, look it up again.

        A plain value is copied to this host once: by one of the processes that ask for it meanwhile, and the others
        wait. One in several segments, or for which this store has no room, is read into memory of this process.

        Args:
            record: with `hosts`.
            deadline: monotonic.
            may_lock: whether the store may be changed; else nothing is copied.

        Raises:
            HomeUnavailableError: a host with these bytes can't be reached.
            CrossHostError: it lies in files of another host that don't belong to the store.
            CorruptionError, ResourceLimitError, StoreTimeoutError.
        """
        seconds = max(deadline - time.monotonic(), 0.0)
        self._check_not_attached(key, record)
        if self._files is not None:
            return self._hold_stored(self._files, key, record, seconds, deadline)
        held = self._copied(key, record, deadline)
        if held is not None:
            return held
        if may_lock and is_worth_it(self._root, record):
            try:
                held = self._copy(key, record, deadline)
            except StoreFullError:
                held = None
            except GoneError:
                return None
            if held is not None:
                return held
        held = self._absent(key, record, None, seconds, deadline)
        if held is not None and isinstance(held.absent, AbsentBytes) and not held.absent.bring_all(deadline):
            return None
        return held

    def hold_lazily(self, key: bytes, record: Record, deadline: float) -> MappedEntry | None:
        """As `hold`, for who needs some of the bytes: if there is no copy, they come when they are asked for.

        See `MappedEntry.absent`. Each time may take as long as this call may. Until the value is dropped, the other
        hosts keep its bytes, as they do for who has got it there.
        """
        seconds = max(deadline - time.monotonic(), 0.0)
        self._check_not_attached(key, record)
        if self._files is not None:
            return self._hold_stored(self._files, key, record, seconds, deadline, lazily=True)
        held = self._copied(key, record, deadline)
        if held is not None:
            return held
        elsewhere: dict[bytes, list[SegmentExtent]] = {}
        for host, extent in record.elsewhere(self._root.member_id()):
            elsewhere.setdefault(host, []).append(extent)
        try:
            hosts = [(self._member(host), extents) for host, extents in elsewhere.items()]
        except HomeUnavailableError as error:
            raise of_key(key, error) from error
        kept = self._keeper.keep(hosts, deadline)
        return None if kept is None else self._absent(key, record, kept, seconds, deadline)

    def _check_not_attached(self, key: bytes, record: Record) -> None:
        if record.adopted is not None:
            name = key.decode()
            where = self._name(record.hosts[0]) if record.hosts else "another host"
            raise CrossHostError(f"{name!r} was attached: its files are on {where}, and can be read there", key=name)

    def _absent(
        self, key: bytes, record: Record, kept: Kept | None, seconds: float, deadline: float
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
            kept,
        )
        if record.objects_checksum is not None and not absent.header(deadline):
            return None
        return MappedEntry(record, mapping, absent)

    def _receive(self, hosts: Mapping[bytes, Sequence[Part]], deadline: float) -> bool:
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
        self._keeper.close()
        self._streams.close()

    def _copied(self, key: bytes, record: Record, deadline: float) -> MappedEntry | None:
        copy = find_copy(self._root, key, deadline)
        if copy is None:
            return None
        if copy.places == places_of(record):
            return map_copy(self._root, key, copy, record.version)
        return None

    def _copy(self, key: bytes, record: Record, deadline: float) -> MappedEntry | None:
        """None, and errors, as of `fetch_copy`."""
        name = key + msgspec.msgpack.encode(places_of(record))
        with turn(self._root, name, f"fetches {key.decode()!r} from another host", deadline):
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

    def _name(self, member: bytes) -> str:
        found = self._find(member)
        return member.hex() if found is None else f"{found.name or 'the host'} at {found.address}"
