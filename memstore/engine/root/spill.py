"""The spill folder: where a store has the files of values that were moved to a disk. See `engine/protocols/spill.py`.

`open(root, spill=PATH)` writes PATH into the settings. The store's files lie in a folder of it whose name is the
store's id, so stores may share a PATH. A file there has its segment's name, and is what the segment was, byte for byte.
Beside the files lie `store`, which names the root, and `moving`, a file that is being copied.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from memstore._wording import of_no_place
from memstore.engine import syscalls
from memstore.engine.root import folder
from memstore.engine.root.filesystem import check_filesystem
from memstore.engine.root.folder import SETTINGS, Settings
from memstore.errors import NotAStoreError, PermissionDeniedError, StorageError

MOVING, _OWNER = "moving", "store"


def spill_folder(settings: Settings) -> str | None:
    """Returns the folder of a store's own files; None if it moves none."""
    return None if settings.spill is None else f"{settings.spill}/{settings.store}"


def prepare_spill(root: str, settings: Settings, path: str) -> str:
    """Makes the store's folder in the spill folder `path`, and takes it for this root. Returns the path, resolved.

    Raises NotAStoreError, PermissionDeniedError, UnsupportedFilesystemError.
    """
    path = os.path.realpath(path)
    if f"{path}/".startswith(f"{os.path.realpath(root)}/"):
        raise NotAStoreError(f"{path} lies in the store {root} itself: choose a folder on a disk for spill=")
    with contextlib.suppress(FileExistsError):
        try:
            syscalls.make_folder(path, 0o700)
        except FileNotFoundError:
            raise NotAStoreError(
                f"{path}: its parent folder doesn't exist{of_no_place(path)}: create it first"
            ) from None
        except PermissionError as error:
            raise PermissionDeniedError(f"{path} can't be created: {error.strerror}") from None
    if not os.path.isdir(path):
        raise NotAStoreError(f"{path} is not a folder, and values move into one: choose another path for spill=")
    check_filesystem(path, settings.durability)
    own = f"{path}/{settings.store}"
    try:
        folder.create_folder(own, settings)
    except PermissionError as error:
        raise PermissionDeniedError(f"{path} can't be written by this process: {error.strerror}") from None
    _take(root, settings, own)
    return path


def check_spill(root: str, settings: Settings, own: str, *, has_values: bool, writable: bool) -> None:
    """Looks whether the store's folder is there and its own, and makes it anew where nothing lies in it.

    Raises StorageError, PermissionDeniedError, NotAStoreError.
    """
    try:
        found = os.lstat(own)
    except OSError:
        if has_values:
            raise missing_spill(root, own) from None
        if writable and settings.spill is not None:
            prepare_spill(root, settings, settings.spill)
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), os.stat(root).st_uid):
        raise PermissionDeniedError(f"{own} is no folder of this store's user: put back what was there")
    if writable:
        _take(root, settings, own)


def missing_spill(root: str, path: str) -> StorageError:
    """Makes the error for a spill folder that isn't there, and has values."""
    text = (
        f"{root} has moved values to {path}, which isn't there: mount its disk; or, if the folder was moved, open the "
        "store with spill= and the path of the folder that has it now. If the disk is lost, so are the values on it: "
        "make an empty folder there, and run memstore.repair"
    )
    return StorageError(text, path=path, code=errno.ENOENT)


def _take(root: str, settings: Settings, own: str) -> None:
    """Notes that the files are this root's. Raises NotAStoreError if this is a copy of a store that has them."""
    marker, root = f"{own}/{_OWNER}", os.path.realpath(root)
    with contextlib.suppress(FileNotFoundError):
        with syscalls.file_open(marker, os.O_RDONLY) as fd:
            other = os.fsdecode(syscalls.read_at(fd, 1 << 16, 0))
        if other == root:
            return
        if _is_store(other, settings) and not os.path.samefile(other, root):
            raise NotAStoreError(
                f"{root} is a copy of the store {other}, and both would have the moved values in {own}, where each "
                "would remove what the other needs: get the values and put them into a new store instead"
            )
    folder.create_file(own, _OWNER, os.fsencode(root), settings)


def _is_store(path: str, settings: Settings) -> bool:
    try:
        found = folder.read_settings(path) if os.path.lexists(f"{path}/{SETTINGS}") else None
    except (OSError, NotAStoreError):
        return False
    return found is not None and found.store == settings.store
