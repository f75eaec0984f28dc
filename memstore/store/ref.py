"""Ref: one version of a key, pinned; small enough to send instead of the value."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from memstore import contents, structure
from memstore.engine import MappedEntry, Pin, resource_errors
from memstore.structure import modes
from memstore.view import view

_OF_ANY_VERSION = ("timeout", "max_age")  # no lock is waited for here, and nobody asked which version is the last
_OPTIONS = tuple(one.name for one in fields(contents.Options))


@modes.uncompiled_methods
class Ref:
    """A version of a key, which stays readable as long as a Ref of it lives. Made by `Store.ref`.

    It is pickled as a reference: some hundred bytes and 30 for each leaf, never the tensors. Pickling it takes a lease
    (60 s, or the `lease` of `Store.ref`), so that the version survives until the receiver has unpickled it.

    Attributes:
        key: the key.
        version: the version of the key that it refers to.
        root: the folder of the store, as a path.
    """

    __slots__ = ("__weakref__", "_pin", "key", "root", "version")

    def __init__(self, pin: Pin) -> None:
        self._pin = pin
        self.key, self.version, self.root = pin.key, pin.record.version, pin.root.path

    def get(self, **options: Any) -> Any:
        """Returns the value of exactly this version. Options as in `Store.get`.

        Raises:
            VersionGoneError: the ref arrived after its lease, and the version was overwritten or deleted.
        """
        pin = self._pin
        is_elsewhere = pin.record.hosts is not None
        is_sharded = is_elsewhere and any(structure.has_shards(options.get(name)) for name in ("out", "like"))
        held = self._map(lazily=is_sharded)  # then only the boxes that are read are fetched
        default = options.pop("default", ...)
        if held is None and default is not ...:
            return default
        if held is None:
            raise pin.gone()
        for name in _OF_ANY_VERSION:
            options.pop(name, None)
        try:
            chosen = contents.Options(**options) if options else contents.PLAIN
        except TypeError as error:
            raise _unknown_option(options) or error from None
        verify, allow_pickle = pin.options.verify, pin.options.allow_pickle
        return contents.read(pin.root, self.key, held, chosen, verify=verify, allow_pickle=allow_pickle)

    def view(self, **options: Any) -> Any:
        """Returns this version with lazy leaves. Options as in `Store.view`, errors as in `get`."""
        held, pin = self._map(lazily=True), self._pin
        if held is None:
            raise pin.gone()
        return view(pin.root, self.key, held, pin.options, **options)

    def _map(self, *, lazily: bool = False) -> MappedEntry | None:
        """The version, mapped anew: what a get returns may be written. None if the version is gone."""
        with resource_errors(self.root, self.key):
            return self._pin.map(lazily=lazily)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ref, (self._pin,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and (self.root, self.key, self.version) == (other.root, other.key, other.version)

    def __hash__(self) -> int:
        return hash((self.root, self.key, self.version))

    def __repr__(self) -> str:
        return f"<memstore.Ref {self.key!r} version {self.version} in {self.root}>"


def _unknown_option(options: dict[str, Any]) -> TypeError | None:
    unknown = [name for name in options if name not in _OPTIONS]
    if not unknown:
        return None
    takes = ", ".join(("default", *_OPTIONS, *_OF_ANY_VERSION))
    return TypeError(f"Ref.get() got an unexpected keyword argument {unknown[0]!r}: it takes {takes}")
