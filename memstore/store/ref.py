"""Ref: one version of a key, pinned; small enough to send instead of the value."""

from __future__ import annotations

from typing import Any

from memstore import contents
from memstore.engine import (
    MappedEntry,
    Mapping,
    Record,
    Root,
    abandon_root,
    arrive,
    close_root,
    decode_record,
    encode_record,
    gone,
    map_entry,
    resource_errors,
    retain_root,
    take_lease,
)
from memstore.errors import MemstoreError, VersionGoneError
from memstore.view import view


class Ref:
    """A version of a key, which stays readable as long as a Ref of it lives. Get one from `Store.ref`.

    It is pickled as a reference: some hundred bytes and 30 a leaf, never the tensors. Pickling it takes a lease (60 s
    unless `Store.ref` was told otherwise), so that the version survives until the receiver has unpickled it.

    Attributes:
        key, version: what it refers to.
        root: the folder of the store, as a path.
    """

    __slots__ = ("__weakref__", "_lease", "_options", "_pin", "_record", "_root", "key", "root", "version")

    def __init__(
        self, root: Root, key: str, record: Record, pin: Mapping | None, lease: float, options: dict[str, Any]
    ) -> None:
        retain_root(root)
        self._root = root
        self.key, self.version, self.root = key, record.version, root.path
        self._record, self._pin, self._lease, self._options = record, pin, lease, options

    def get(self, **options: Any) -> Any:
        """Returns the value of this very version. Options as in `Store.get`.

        Raises:
            VersionGoneError: the ref arrived after its lease, and the version was overwritten or deleted.
        """
        held = self._hold()
        default = options.pop("default", ...)
        if held is None and default is not ...:
            return default
        if held is None:
            raise self._gone()
        options.pop("timeout", None)  # of the store's locks, and none is waited for here
        chosen = contents.Options(**options) if options else contents.PLAIN
        verify, allow_pickle = self._options["verify"], self._options["allow_pickle"]
        return contents.read(self._root, self.key, held, chosen, verify=verify, allow_pickle=allow_pickle)

    def view(self, **options: Any) -> Any:
        """Returns this version with lazy leaves. Options as in `Store.view`, errors as in `get`."""
        held = self._hold()
        if held is None:
            raise self._gone()
        return view(self._root, self.key, held, {**self._options, "lease": self._lease}, **options)

    def _hold(self) -> MappedEntry | None:
        """The version, mapped anew; None if it is gone."""
        root = self._root
        with resource_errors(self.root, self.key), root.guard:
            return map_entry(root, self.key.encode(), self._record)

    def _gone(self) -> VersionGoneError:
        return gone(self._root, self.key, self.version, self._lease)

    def __del__(self) -> None:
        root = getattr(self, "_root", None)
        if root is not None:
            abandon_root(root)

    def __reduce__(self) -> tuple[Any, ...]:
        root, record = self._root, self._record
        take_lease(root, self.key, record, self._lease, self._options)
        stored = encode_record(self.key.encode(), record)
        return _receive, (self.root, self.key, stored, self._lease, self._options, root.settings.store)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and (self.root, self.key, self.version) == (other.root, other.key, other.version)

    def __hash__(self) -> int:
        return hash((self.root, self.key, self.version))

    def __repr__(self) -> str:
        return f"<memstore.Ref {self.key!r} version {self.version} in {self.root}>"


def _receive(path: str, key: str, stored: bytes, lease: float, options: dict[str, Any], store: str) -> Ref:
    """Unpickles a ref, and pins its version at once, while the lease holds."""
    name = key.encode()
    record = decode_record(name, stored)
    root = arrive(path, store, key, record.version, options)
    try:
        pin = None
        try:
            with root.guard:
                held = map_entry(root, name, record)
            pin = held.mapping if held else None
        except (OSError, MemstoreError):  # get will say it, where it can be handled
            pass
        return Ref(root, key, record, pin, lease, options)
    finally:
        close_root(root)
