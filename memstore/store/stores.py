"""The stores of this machine as a whole: which there are, and the end of one."""

from __future__ import annotations

import os

from memstore.engine import absolute_path, destroy_root, resource_errors, stores_of_machine
from memstore.info import StoreSummary


def destroy(root: str | os.PathLike[str], *, timeout: float = 30.0) -> None:
    """Removes a store with all its values, and its folder.

    Processes may have it open: values that they got stay valid, and every later call of their stores raises a
    NotAStoreError. If this process is killed meanwhile, the store is there as before, or is none any more; call this
    again, or open the folder with mode "w", for the rest of its files. Files that `attach` serves stay where they are.

    Args:
        root: the folder. If it is a mount point or a link, it stays, and is empty.
        timeout: seconds to wait for a process that is opening the store.

    Raises:
        NotAStoreError: there is no store; or the folder has something else beside it. Nothing was removed.
        NotServedError: it is served to other hosts now, or is on storage that hosts share.
        PermissionDeniedError: it belongs to another user.
        StoreTimeoutError: another process took too long to open it.

    Example:
        >>> import memstore, os, tempfile
        >>> root = tempfile.mkdtemp()
        >>> memstore.open(root).close()
        >>> memstore.destroy(root)
        >>> os.path.exists(root)
        False
    """
    path = absolute_path(root)
    with resource_errors(path):
        destroy_root(path, timeout)


def stores() -> tuple[StoreSummary, ...]:
    """Lists the stores of this machine: those on `/dev/shm`, up to three folders deep, and those that are open.

    Stores on disks that nobody has open aren't found. Nothing is opened or changed.

    Returns:
        A summary of each with its size, its age and the processes that have it open, sorted by their folders.

    Example:
        >>> import memstore
        >>> abandoned = [one.root for one in memstore.stores() if not one.pids and not one.is_member]
    """
    return stores_of_machine()
