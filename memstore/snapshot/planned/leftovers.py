"""What saves leave behind that die or fail, and whose it is.

Each rank that takes part in a save leaves a trace of it before it writes, if no other rank has, and keeps that open
under a shared lock until the save is over for it. So a trace that nobody keeps is that of a save whose processes have
died, or have given it up; or of an earlier snapshot, by the publication that was to replace it (see `publishing`). What
has the id of such a save in its name, and isn't named by the manifest, is a leftover. A kill in between leaves
leftovers with their trace, which goes last.
"""

from __future__ import annotations

import contextlib
import os
import time

from memstore.engine import OwnedFile
from memstore.errors import AlreadyExistsError, KeyNotFoundError, MemstoreError, StoreTimeoutError
from memstore.snapshot.format import LIMIT, MANIFEST, Manifest, id_of, read_manifest, save_name, trace_of
from memstore.snapshot.storage import FileStorage

_PATIENCE, _PAUSE = 60.0, 0.01  # seconds until somebody else has removed a trace, and between two looks


def begin(path: str, save: str, *, durable: bool) -> OwnedFile:
    """The first step of a rank: makes the folder, if it isn't there, and takes part in the save.

    Returns:
        The trace. Close it when the save is over: its files are leftovers then, unless it was published.
    """
    storage = FileStorage.create(path, durable=durable)
    deadline = time.monotonic() + _PATIENCE
    while True:
        leave_trace(storage, save)
        kept = storage.keep(save_name(save))
        if kept is not None:
            return kept
        if time.monotonic() > deadline:
            raise StoreTimeoutError(f"{path}: other processes hold {save_name(save)} for {_PATIENCE:g} s")
        time.sleep(_PAUSE)  # a sweep is just about to remove what this save has left, which is nothing


def leave_trace(storage: FileStorage, save: str) -> None:
    with contextlib.suppress(AlreadyExistsError):
        storage.publish(save_name(save), b"", durable=False)


def sweep(path: str) -> None:
    """Removes the leftovers in a folder. Saves that live, takes of snapshots, and files of others aren't touched.

    Best effort: what can't be removed stays, and harms nobody.
    """
    if not os.path.isdir(path):
        return
    with contextlib.suppress(MemstoreError, OSError):
        storage = FileStorage(path)
        if not _traced(storage):
            return
        with storage.alone():
            present = read_present(storage, path)
            if isinstance(present, MemstoreError):
                return  # it can't be read, so it isn't known which files it names
            named = {file.name for file in present.files} if present is not None else set[str]()
            for save in _traced(storage):
                with storage.unless_kept(save_name(save)) as is_free:
                    if is_free:
                        _remove_save(storage, save, named)


def _traced(storage: FileStorage) -> list[str]:
    found = [(trace_of(name), name) for name in storage.names()]
    return [save for save, name in found if save is not None and name == save_name(save)]


def _remove_save(storage: FileStorage, save: str, named: set[str]) -> None:
    for name in storage.names():
        if id_of(name) == save and name not in named:
            storage.remove(name)
    storage.remove(save_name(save))


def read_present(storage: FileStorage, path: str) -> Manifest | MemstoreError | None:
    """The manifest that is there; or why it can't be read."""
    try:
        return read_manifest(path, storage.read_bytes(MANIFEST, LIMIT))
    except KeyNotFoundError:
        return None
    except MemstoreError as error:
        return error
