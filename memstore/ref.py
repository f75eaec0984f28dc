"""Ref: one version of a key, pinned; small enough to send instead of the value."""

from __future__ import annotations

from typing import Any

from memstore.engine.limits import resource_errors
from memstore.engine.lookup import Held, map_record
from memstore.engine.mapping import Mapping
from memstore.engine.pages import deadline_after
from memstore.engine.publish import lease
from memstore.engine.record import Record, decode_record, encode_record
from memstore.engine.root import Creation, Root, abandon_root, close_root, open_root, reopen_root, retain_root
from memstore.errors import MemstoreError, ReadOnlyError, VersionGoneError


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
        from memstore import contents

        root = self._root
        if root.catalog.is_released:
            reopen_root(root, deadline_after(self._options["timeout"]))
        record = self._record
        held: Held | None = (record, None, 0)
        with resource_errors(self.root, self.key):
            if record.has_files:
                with root.guard:
                    mapped = map_record(root, self.key.encode(), record)
                held = (record, *mapped) if mapped else None
        default = options.pop("default", ...)
        if held is None and default is not ...:
            return default
        if held is None:
            why = f"it was replaced, and this ref came after its lease of {self._lease:g} s: take a longer lease"
            if not root.is_in_place():
                why = "the store's folder was removed or replaced: open it again"
            raise VersionGoneError(
                f"version {self.version} of {self.key!r} in {self.root} is gone: {why}, or get the key", key=self.key
            )
        options.pop("timeout", None)  # of the store's locks, and none is waited for here
        chosen = contents.Options(**options) if options else contents.PLAIN
        verify, allow_pickle = self._options["verify"], self._options["allow_pickle"]
        return contents.read(root, self.key, held, chosen, verify=verify, allow_pickle=allow_pickle)

    def __del__(self) -> None:
        root = getattr(self, "_root", None)
        if root is not None:
            abandon_root(root)

    def __reduce__(self) -> tuple[Any, ...]:
        root = self._root
        if self._record.segment:
            if self._options["mode"] == "r":
                raise ReadOnlyError(
                    f"{self.root} was opened with mode 'r', and sending a ref writes a lease: open it with 'r+'",
                    key=self.key,
                )
            deadline = deadline_after(self._options["timeout"])
            with resource_errors(self.root, self.key):
                lease(root, self._record.segment, self._record.put_id, self._lease, deadline)
        name, store = self.key.encode(), root.settings.store
        return _receive, (self.root, self.key, encode_record(name, self._record), self._lease, self._options, store)

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
    root = open_root(path, options["mode"], Creation(), options["timeout"])
    try:
        if root.settings.store != store:
            raise VersionGoneError(f"version {record.version} of {key!r} is gone: {path} is another store now", key=key)
        pin = None
        if record.has_files:
            try:
                with root.guard:
                    mapped = map_record(root, name, record)
                pin = mapped[0] if mapped else None
            except (OSError, MemstoreError):  # get will say it, where it can be handled
                pass
        return Ref(root, key, record, pin, lease, options)
    finally:
        close_root(root)
