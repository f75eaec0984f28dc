"""The bytes of entries, mapped: they lie here, or are copied here, or lie on another host and are fetched."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from memstore.distributed import catalog
from memstore.distributed.rules import Entry, Member
from memstore.distributed.transfers import Streamer, Transfers
from memstore.engine import MappedEntry, Record, Root, damaged_entry, files_of, map_entry
from memstore.errors import CorruptionError, CrossHostError, StorageError

_A_LOOK = 0.1  # seconds that one more look may take


class Bytes:
    """Bytes of other hosts, for one root in one process. Thread-safe.

    Args:
        members: finds a member by its id; None: it is none any more.
    """

    def __init__(self, root: Root, links: Streamer, members: Callable[[bytes], Member | None]) -> None:
        self._root, self._members, self._transfers = root, members, Transfers(root, links, members)

    def reading(self, deadline: float, *, may_lock: bool, lazily: bool) -> Reading:
        """For one call. Arguments as of `Elsewhere.hold`."""
        return Reading(self._root, self._members, self._transfers, deadline, may_lock=may_lock, lazily=lazily)

    def hold_version(self, key: bytes, record: Record, deadline: float, *, lazily: bool) -> MappedEntry | None:
        """Holds a version: see `Elsewhere.hold_version`."""
        hold = self._transfers.hold_lazily if lazily else self._transfers.hold
        return hold(key, record, deadline, may_lock=self._root.lock is not None)

    def close(self) -> None:
        self._transfers.close()


class Reading:
    """One call that maps entries, and looks them up again where their bytes are gone."""

    def __init__(
        self,
        root: Root,
        members: Callable[[bytes], Member | None],
        transfers: Transfers,
        deadline: float,
        *,
        may_lock: bool,
        lazily: bool,
    ) -> None:
        self._root, self._members, self._transfers = root, members, transfers
        self._deadline, self._may_lock, self._lazily = deadline, may_lock, lazily
        self._misfits: set[tuple[bytes, Entry]] = set()

    def map(self, key: bytes, entry: Entry) -> MappedEntry | None:
        """Maps an entry. Returns None where its bytes aren't there: replaced since the lookup, at a first try.

        Raises:
            CrossHostError: its bytes lie in files of others, on another host.
            CorruptionError: the entry can't be one; or its bytes aren't what it says.
        """
        record = catalog.record_of(entry, self._root.member_id())
        reads_lazily = self._lazily and not self._root.storage.maps_at_once
        if record.hosts is None and not (reads_lazily and record.segments):
            with self._root.reading():
                held = map_entry(self._root, key, record, live=True)
            return held or self._missed(key, entry, record)
        if record.is_mutable:
            return MappedEntry(record)  # its reader refuses it, or opens it in place
        if record.adopted is not None and record.hosts is not None:
            raise self._of_another_host(key, record.hosts[0])
        hold = self._transfers.hold_lazily if self._lazily else self._transfers.hold
        held = hold(key, record, self._deadline, may_lock=self._may_lock)
        return held or self._missed(key, entry, record)

    def _missed(self, key: bytes, entry: Entry, record: Record) -> None:
        """Its bytes are not there. The first time they may have been replaced.

        Hosts are told to let go of a version after it was replaced. So one that is still the present version after its
        bytes were missed was the present one then, too.
        """
        if (key, entry) not in self._misfits:
            self._misfits.add((key, entry))
        elif record.hosts is None:
            raise damaged_entry(self._root, key, record)
        elif self._root.storage.sees_all_hosts:
            self._check_may_come(key, record)
        else:
            raise self._damaged_elsewhere(key, record.hosts)

    def _check_may_come(self, key: bytes, record: Record) -> None:
        """Files of other hosts come into sight when the storage likes. Raises StorageError when the time is over."""
        self._root.check_in_place()
        if time.monotonic() + _A_LOOK < self._deadline:
            return
        name, paths = key.decode(), files_of(self._root, record)
        raise StorageError(
            f"{name!r}: what another host has put can't be seen on host {os.uname().nodename} within the timeout, or "
            f"not whole: {' or '.join(paths)}: is the same storage mounted on both? Does it cache for longer than the "
            "timeout (NFS: actimeo)? memstore verify on that host tells whether the files are whole",
            key=name,
            path=paths[0],
            host=os.uname().nodename,
        )

    def _damaged_elsewhere(self, key: bytes, hosts: Sequence[bytes]) -> CorruptionError:
        name, where = key.decode(), " or ".join(name_of(self._members(host)) for host in dict.fromkeys(hosts))
        return CorruptionError(
            f"{name!r}: its bytes are missing, or another put's, on {where}, and no newer version has replaced it: run "
            "memstore verify there",
            key=name,
        )

    def _of_another_host(self, key: bytes, host: bytes) -> CrossHostError:
        name = key.decode()
        return CrossHostError(
            f"{name!r} lies in files that were attached on {name_of(self._members(host))}: get it there, or put it "
            "with attach(copy=True)",
            key=name,
        )


def name_of(member: Member | None) -> str:
    """A host, for errors."""
    return "a host that was removed" if member is None else f"{member.name or 'the host'} at {member.address}"
