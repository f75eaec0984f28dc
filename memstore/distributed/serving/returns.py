"""A host that was removed comes back: its folder is set aside, and what it has is put anew, from a new folder.

1. The agent finds that its root was removed (`was_removed`), and sets it aside (`set_aside`): ROOT becomes
   ROOT.removed-1, and an empty store with the same options takes its place. Processes that have the old one open are
   told that it was moved, as of any store.
2. The index process of the new root joins the cluster, and brings back what may come back (`rules/returning.py`):
   values are copied from the folder that was set aside, and go there once they are back.
3. If nothing is left there, the folder is removed. Else it becomes ROOT.left-1, which can be opened and exported.

A kill leaves one of the folders' names, and what hasn't come back yet in the old one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Collection, Mapping, Sequence

from memstore._threads import between_forks
from memstore.distributed.catalog import CatalogTables, entry_of, look, record_of, run
from memstore.distributed.links import Links
from memstore.distributed.rules import (
    Backup,
    Change,
    Client,
    Entry,
    FormerEntry,
    FormerRoot,
    Member,
    Returning,
    Standing,
    Steps,
)
from memstore.distributed.serving.questions import standing_of
from memstore.engine import (
    Creation,
    Record,
    Root,
    SealedSegment,
    boot_clock,
    close_root,
    destroy_root,
    open_root,
    segment_path,
    sweep_all,
)
from memstore.errors import CorruptionError, MemstoreError, NotServedError

_WITHIN = 30.0  # seconds for a transaction, or an opening
_PUT_WITHIN = 600.0  # seconds for a portion
_GROUPS = 1000  # that are told to be lost no more
_PORTION = 128  # keys of one transaction
_SECRET, _LOG = "secret", "agent.log"
_MOST = 1 << 10  # folders that were set aside

log = logging.getLogger("memstore")


# --- the agent --------------------------------------------------------------------------------------------------------


def was_removed(path: str) -> Standing | None:
    """Returns what a root knows of the cluster that has removed it; None: it is none, or it was drained."""
    use = open_root(path, "r", Creation(), _WITHIN)
    try:
        standing = standing_of(use.root)
        is_so = standing is not None and standing.is_removed and not standing.is_sealed
        return standing if is_so and use.root.settings.shared is None else None
    finally:
        close_root(use)


def set_aside(path: str) -> str:
    """Sets a root aside, and makes another one like it in its place. Returns where it is by then.

    Raises:
        NotServedError: the folder can't be renamed.
    """
    use = open_root(path, "r", Creation(), _WITHIN)
    try:
        settings = use.root.settings
        capacity = use.root.catalog.view(lambda transaction: transaction.counters().capacity)
    finally:
        close_root(use)
    aside = _free_name(path, "removed")
    try:
        os.rename(path, aside)
    except OSError as error:
        raise NotServedError(
            f"{path} was removed from its cluster, and can't be set aside as {aside} to come back: {error.strerror}; "
            "serve an empty folder, or rename this one"
        ) from None
    creation = Creation(
        settings.durability, settings.checksum, settings.inline_limit, settings.unix_group, settings.file_mode,
        capacity or None, settings.spill,
    )  # fmt: skip
    close_root(open_root(path, "x", creation, _WITHIN))
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(f"{aside}/{_SECRET}", f"{path}/{_SECRET}")
    with contextlib.suppress(OSError):  # an agent that was started by others goes on with it
        os.link(f"{aside}/{_LOG}", f"{path}/{_LOG}")
    return aside


def _free_name(path: str, what: str) -> str:
    names = (f"{path}.{what}-{number}" for number in range(1, _MOST))
    return next((name for name in names if not os.path.lexists(name)), f"{path}.{what}-{_MOST}")


def set_aside_before(path: str) -> list[str]:
    """Returns the roots that were set aside for this one, and have not all come back."""
    names = [f"{path}.removed-{number}" for number in range(1, _MOST)]
    return [name for name in names if os.path.isdir(name)]


def members_before(path: str) -> list[str]:
    """Returns the addresses of the members that roots know which were set aside for this one."""
    found: list[str] = []
    for aside in set_aside_before(path):
        with contextlib.suppress(MemstoreError):  # its index process says so
            standing = was_removed(aside)
            found += [] if standing is None else [member.address for member in standing.roster.members]
    return list(dict.fromkeys(found))


# --- the index process ------------------------------------------------------------------------------------------------


class RootSetAside:
    """A removed root that was set aside: a `FormerRoot`.

    Args:
        own: the member that brings back what it has.
    """

    def __init__(self, path: str, own: Member) -> None:
        self.path = path
        self._use = open_root(path, "r+", Creation(), _WITHIN)
        self.root = self._use.root
        self.member = self.root.member_id()
        standing = standing_of(self.root)
        known = None if standing is None else standing.roster.member(self.member)
        self.who = (known or own).label
        self._damaged: set[bytes] = set()

    def page(self, after: bytes, limit: int) -> Sequence[FormerEntry]:
        def read(tables: CatalogTables) -> list[FormerEntry]:
            found: dict[bytes, FormerEntry] = {}
            for key, backup in tables.all_backups(after, limit):
                entry = Entry(backup.version, backup.body, backup.places, backup.is_mutable)
                found[key] = self._entry(tables, key, entry, is_own=False)
            for key, entry in tables.page(after, limit):
                damaged = FormerEntry(key, 0, is_own=True, is_whole=False)
                found[key] = damaged if entry is None else self._entry(tables, key, entry, is_own=True)
            return [found[key] for key in sorted(found)[:limit]]

        return look(self.root, read, time.monotonic() + _WITHIN)

    def _entry(self, tables: CatalogTables, key: bytes, entry: Entry, *, is_own: bool) -> FormerEntry:
        is_whole = not entry.is_mutable and key not in self._damaged
        for place in entry.places:
            is_whole = is_whole and place.host == self.member and place.segment > 0 and tables.is_there(place)
        nbytes = 0
        if is_whole:
            try:
                nbytes = record_of(entry, self.member).nbytes
            except CorruptionError:
                is_whole = False
        return FormerEntry(key, entry.version, is_own, is_whole, nbytes)

    def groups(self) -> Sequence[bytes]:
        owned = look(self.root, lambda tables: tables.all_owned(None, _GROUPS), time.monotonic() + _WITHIN)
        return [group for group, _ in owned if group]

    def record(self, key: bytes, member: bytes) -> Record:
        """Returns the record of a key as another host has it. Raises CorruptionError."""

        def read(tables: CatalogTables) -> Entry | Backup | None:
            return tables.record(key) or tables.backup(key)

        found = look(self.root, read, time.monotonic() + _WITHIN)
        if found is None:
            raise CorruptionError("it was there a moment ago", key=key.decode())
        return record_of(Entry(found.version, found.body, found.places, found.is_mutable), member)

    def leave_out(self, key: bytes) -> None:
        """Notes that a value is damaged."""
        self._damaged.add(key)

    def drop(self, keys: Collection[bytes]) -> None:
        names = list(keys)
        for first in range(0, len(names), _PORTION):
            some = names[first : first + _PORTION]
            run(self.root, lambda tables, some=some: self._drop(tables, some), time.monotonic() + _WITHIN)
        if names:
            sweep_all(self.root, time.monotonic() + _WITHIN)

    def _drop(self, tables: CatalogTables, keys: Sequence[bytes]) -> None:
        for key in keys:
            record, backup = tables.record(key), tables.backup(key)
            for one in (record, backup):
                for place in () if one is None else one.places:
                    tables.retire(place)
            if record is not None:
                tables.delete_record(key)
            tables.drop_backup(key)

    def fetch(self, hosts: Mapping[bytes, Sequence[object]], deadline: float) -> bool:
        """Copies ranges of segments into memory: a `FetchRanges`. False: a file is gone, or is shorter."""
        with between_forks():  # late: it imports numpy
            from memstore.distributed.transfers import read_file

        folders = [self.root.segments, *filter(None, [self.root.storage.spill_folder()])]
        return all(
            any(read_file(segment_path(folder, one.extent.segment), one) for folder in folders)  # pyright: ignore
            for ranges in hosts.values()
            for one in ranges
        )

    def end(self) -> str:
        """Removes the folder if nothing is left there. Returns where it is by then; empty: it is gone."""
        is_empty = not self.page(b"", 1)
        close_root(self._use)
        if is_empty:
            destroy_root(self.path, _WITHIN)
            return ""
        left = _free_name(self.path.rpartition(".removed-")[0], "left")
        os.rename(self.path, left)
        return left


class PutAnew:
    """Puts anew what a root that was set aside has: a `rules.Take`."""

    def __init__(self, root: Root, links: Links) -> None:
        self._root, self._links = root, links
        self._client = Client()

    def __call__(self, former: FormerRoot, some: Sequence[tuple[FormerEntry, Returning]]) -> Steps[bool]:
        with between_forks():  # late: they import numpy
            from memstore.distributed.client import drive
            from memstore.distributed.transfers import GoneError, take_values

        assert isinstance(former, RootSetAside)
        member, deadline = self._root.member_id(), time.monotonic() + _PUT_WITHIN
        keys = [one.key for one, _ in some]

        def publish(records: Sequence[Record], sealed: Sequence[SealedSegment]) -> None:
            entries = [entry_of(record, member) for record in records]
            changes = [
                Change(key, entry.body, entry.places, returns=returning)
                for key, entry, (_, returning) in zip(keys, entries, some, strict=True)
            ]
            until = boot_clock() + int(_PUT_WITHIN * 1e9)
            drive(self._client.commit(changes, until), self._root, self._links, deadline, sealed=sealed)

        try:
            values = [(key, former.record(key, member)) for key in keys]
            take_values(self._root, values, former.member, former.fetch, publish, deadline)
        except GoneError:
            return False
        except CorruptionError as error:
            log.warning("%s: a value stays there: %s", former.path, str(error))
            for key in keys if error.key is None else [error.key.encode()]:
                former.leave_out(key)
            return False
        except (MemstoreError, OSError) as error:
            log.warning("%s: it is tried again: %s", former.path, str(error))
            return False
        return True
        yield  # steps, as the rules want it, and none of them
