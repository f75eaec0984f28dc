"""Held versions: one that stays readable as long as its HeldVersion lives, and on its way to another process.

1. In a process, the mapping that the pin refers to keeps the segment's lock, so nobody reuses or removes the file.
2. To pickle a pin of a segment takes a lease, which keeps the version until its receiver is there.
3. To unpickle it opens the store and maps the version at once, so that the lease may end. On another host of the
   store, the first one is asked to keep the version, and what is read of it comes from there.

A process that dies leaves nothing to clean up: its locks go with it, and leases end by themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from memstore.engine.format.records import Record, decode_record, encode_record
from memstore.engine.opening import Creation, open_root
from memstore.engine.protocols.elsewhere import MappedEntry, elsewhere_of, is_fellow
from memstore.engine.protocols.get import map_entry
from memstore.engine.protocols.reuse import DEFAULT_LEASE, lease_segments
from memstore.engine.protocols.sweep import make_room_and_retry
from memstore.engine.root.roots import Root, RootUse, close_root, use_root
from memstore.engine.sync.primitives import deadline_after
from memstore.errors import MemstoreError, NotAStoreError, ReadOnlyError, VersionGoneError


class PinOptions(msgspec.Struct, frozen=True, gc=False):
    """The way in which the store was opened that a pin comes from; its receiver opens and reads it in the same way."""

    mode: str
    timeout: float
    verify: bool
    allow_pickle: bool
    lease: float = DEFAULT_LEASE  # seconds for the receiver of a pickled pin to arrive


class HeldVersion:
    """A version of a key that stays readable.

    Attributes:
        record: of the version, as far as its holder needs it. With `hosts`: its bytes lie elsewhere.
        held: its bytes in memory; None if they couldn't be mapped when the pin arrived: `map` says why.
    """

    __slots__ = ("__weakref__", "_use", "held", "key", "options", "record", "root")

    def __init__(self, root: Root, key: str, record: Record, held: MappedEntry | None, options: PinOptions) -> None:
        self._use = use_root(root)
        self.root, self.key, self.record, self.held, self.options = root, key, record, held, options

    def map(self, *, lazily: bool = False) -> MappedEntry | None:
        """Maps the version anew; None if it is gone.

        Args:
            lazily: what lies on other hosts may be fetched when it is read.

        Raises HomeUnavailableError, CrossHostError of one that lies on other hosts.
        """
        name, record = self.key.encode(), self.record
        if record.hosts is not None:
            deadline = deadline_after(self.options.timeout)
            return elsewhere_of(self.root).hold_version(name, record, deadline, lazily=lazily or not record.description)
        with self.root.reading():
            return map_entry(self.root, name, record)

    def gone(self) -> VersionGoneError:
        """Makes the error for a version whose segment holds another put by now."""
        late = f"it was replaced, and this reference came after its lease of {self.options.lease:g} s"
        return self._gone(_why_not_in_place(self.root) or f"{late}: take a longer lease, or get the key")

    def _gone(self, why: str) -> VersionGoneError:
        text = f"version {self.record.version} of {self.key!r} in {self.root.path} is gone: {why}"
        return VersionGoneError(text, key=self.key)

    def _take_lease(self) -> None:
        """Keeps the version for its receiver. Raises VersionGoneError where that would not find the store."""
        root, options = self.root, self.options
        self.localize()
        if (why := _why_not_in_place(root)) is not None:
            raise self._gone(why)
        extents = root.storage.leased(self.record)
        if extents is None:
            raise self.gone()
        if not extents:
            return
        if options.mode == "r":
            text = f"{root.path} was opened with mode 'r', and sending a reference writes a lease: open it with 'r+'"
            raise ReadOnlyError(text, key=self.key)
        deadline = deadline_after(options.timeout)
        make_room_and_retry(partial(lease_segments, seconds=options.lease), root, extents, deadline, self.key)

    def localize(self) -> None:
        """Copies a version of other hosts to this one, before it is referred to: here others find it.

        Raises StoreFullError, CrossHostError, HomeUnavailableError, VersionGoneError.
        """
        if self.held is None or self.held.absent is None or self.record.hosts is None:
            return
        if self.root.storage.sees_all_hosts:
            return
        self.held = self.held.absent.localized()
        local = self.held.record
        self.record = msgspec.structs.replace(
            self.record,
            segment=local.segment,
            put_id=local.put_id,
            size=local.size,
            start=local.start,
            parts=None,
            hosts=None,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        self._take_lease()
        root, stored = self.root, encode_record(self.key.encode(), self.record)
        options = msgspec.structs.astuple(self.options)
        return receive, (root.path, root.settings.store, self.key, stored, root.connect, *options)


def receive(
    path: str, store: str, key: str, stored: bytes, connect: Callable[[Root | None], Any] | None, *options: Any
) -> HeldVersion:
    """Unpickles a pin. A version that can't be mapped is no error here: its holder says so where it can be handled.

    On another host than it was pickled on, `path` names that host's folder of the same store.

    Raises:
        NotAStoreError: there is no such store here.
        VersionGoneError: another store is there.
    """
    name, chosen = key.encode(), PinOptions(*options)
    record = decode_record(name, stored)
    use = _open(path, store, key, record.version, chosen)
    use.root.connect = use.root.connect or connect
    try:
        if use.root.settings.store != store:
            record = _seen_from_here(use.root, store, key, record)
        pin = HeldVersion(use.root, key, record, None, chosen)
        with contextlib.suppress(OSError, MemstoreError):
            pin.held = pin.map(lazily=True)
            if pin.held is not None and pin.held.record.hosts is None:
                pin.record = pin.held.record  # it has a copy here
        return pin
    finally:
        close_root(use)


def pack(pin: HeldVersion) -> bytes:
    """Encodes the version for processes that have the store open, on any of its hosts. Takes no lease.

    They `unpack` it while this pin lives. So nothing has to be copied to this host first.
    """
    return msgspec.msgpack.encode((pin.root.settings.store, encode_record(pin.key.encode(), pin.record)))


def unpack(root: Root, key: str, packed: bytes, options: PinOptions, *, lazily: bool = False) -> HeldVersion:
    """Decodes a version that `pack` has encoded.

    Raises VersionGoneError, or CorruptionError if this is no version of the key.

    Args:
        lazily: what lies on other hosts may be fetched when it is read.
    """
    store, stored = msgspec.msgpack.decode(packed, type=tuple[str, bytes])
    record = decode_record(key.encode(), stored)
    if root.settings.store != store:
        record = _seen_from_here(root, store, key, record)
    pin = HeldVersion(root, key, record, None, options)
    pin.held = pin.map(lazily=lazily)
    if pin.held is None:
        raise pin.gone()
    return pin


def _open(path: str, store: str, key: str, version: int, options: PinOptions) -> RootUse:
    """Opens the store that a pin comes from, until the use ends."""
    try:
        return open_root(path, options.mode, Creation(), options.timeout)
    except NotAStoreError as error:
        raise NotAStoreError(
            f"a reference to version {version} of {key!r} came where its store isn't: it looked for store {store} "
            f"at {path}: {error}",
            key=key,
        ) from error


def _seen_from_here(root: Root, store: str, key: str, record: Record) -> Record:
    """Returns the record of a pin that was pickled in another folder than this one."""
    if is_fellow(root, store):
        return elsewhere_of(root).seen_from_here(bytes.fromhex(store), record)
    text = f"version {record.version} of {key!r} is gone: {root.path} is another store now"
    raise VersionGoneError(text, key=key)


def _why_not_in_place(root: Root) -> str | None:
    try:
        root.check_in_place()
    except (MemstoreError, OSError) as error:
        return str(error)
    return None
