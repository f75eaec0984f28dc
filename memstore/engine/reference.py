"""References to a version on their way to another process: a lease when they are pickled, a check when they arrive."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from memstore.engine.format import Record
from memstore.engine.opening import Creation, open_root
from memstore.engine.protocols import lease, retry_after_sweep
from memstore.engine.root import Root, close_root
from memstore.engine.sync import deadline_after
from memstore.errors import MemstoreError, NotAStoreError, ReadOnlyError, VersionGoneError


def take_lease(root: Root, key: str, record: Record, seconds: float, options: Mapping[str, Any]) -> None:
    """Keeps the version for its receiver. `options`: the sender's mode and timeout.

    Raises VersionGoneError where the receiver would look for the store in vain.
    """
    if (why := _why_not_in_place(root)) is not None:
        raise _gone(root, key, record.version, why)
    if not record.segment:
        return
    if options["mode"] == "r":
        raise ReadOnlyError(
            f"{root.path} was opened with mode 'r', and sending a reference writes a lease: open it with 'r+'", key=key
        )
    deadline = deadline_after(options["timeout"])
    retry_after_sweep(partial(lease, put_id=record.put_id, seconds=seconds), root, record.segment, deadline, key)


def arrive(path: str, store: str, key: str, version: int, options: Mapping[str, Any]) -> Root:
    """Opens the store that a reference names; answer it by one `close_root`."""
    try:
        root = open_root(path, options["mode"], Creation(), options["timeout"])
    except NotAStoreError as error:
        raise NotAStoreError(
            f"a reference to version {version} of {key!r} came where its store isn't: it looked for store {store} "
            f"at {path}: {error}",
            key=key,
        ) from error
    if root.settings.store != store:
        close_root(root)
        raise VersionGoneError(f"version {version} of {key!r} is gone: {path} is another store now", key=key)
    return root


def gone(root: Root, key: str, version: int, seconds: float) -> VersionGoneError:
    """The error for a version whose segment holds another put by now."""
    late = f"it was replaced, and this reference came after its lease of {seconds:g} s"
    return _gone(root, key, version, _why_not_in_place(root) or f"{late}: take a longer lease, or get the key")


def _gone(root: Root, key: str, version: int, why: str) -> VersionGoneError:
    return VersionGoneError(f"version {version} of {key!r} in {root.path} is gone: {why}", key=key)


def _why_not_in_place(root: Root) -> str | None:
    try:
        root.check_in_place()
    except (MemstoreError, OSError) as error:
        return str(error)
    return None
