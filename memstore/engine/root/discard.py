"""A store is given up: by one rename there is none any more, and then its files are removed.

The caller holds the lock on the folder (`folder.locked`), so nobody opens or creates a store there meanwhile. Who has
the store open keeps what it has mapped, and hears from its next call that the store is gone: see `Root.check_in_place`.

1. `segments` is renamed to `segments.discarded`. **This is the moment**: a put that commits later isn't acknowledged,
   since it looks for `segments` before it returns; and a folder with `segments.discarded` is no store, whatever else it
   has.
2. `memstore.json` is removed, then all else, `segments.discarded` last.

A kill after step 1 leaves no store, and files that the next creator, or `discard` again, removes first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator

from memstore.engine import syscalls
from memstore.engine.files import LockFile
from memstore.engine.root import folder
from memstore.engine.root.holders import lock_holders
from memstore.engine.root.settings import CLUSTER, Settings
from memstore.engine.sync import describe_thread
from memstore.errors import NotAStoreError, NotServedError

AGENT_LOCK = "agent.lock"  # held by who serves the store: `distributed/serving/agent_lock.py`
AGENT_LOG = "agent.log"  # held by who starts an agent: `turn` in `distributed/serving/ranks.py`
_TRIES = 1000  # processes that may be in the middle of a put
_OF_CLUSTERS = {AGENT_LOCK, AGENT_LOG, "cluster", "secret", "transport"}  # what serving a store leaves in its folder


def _check_discardable(root: str) -> None:
    """Raises NotAStoreError if the folder has anything that isn't memstore's: nobody else's files are removed."""
    ours = {*folder.OWN, *_OF_CLUSTERS, folder.SETTINGS, folder.DISCARDED}
    foreign = sorted(name for name in os.listdir(root) if name not in ours and not folder.is_unfinished(name))
    if foreign:
        raise NotAStoreError(
            f"{root} has {foreign[0]!r} beside its store, which isn't memstore's: move it elsewhere first; nothing was "
            "removed"
        )


def check_alone(root: str, settings: Settings) -> None:
    """Raises NotServedError for the store of a host that is a member of a cluster: its keys are those of all hosts."""
    if settings.shared is not None or CLUSTER in settings.features:
        raise NotServedError(
            f"{root} is, or was, one host's part of a store on several hosts, and isn't begun anew by one of them: "
            "store.clear() deletes the keys of all hosts; or choose another folder"
        )


@contextlib.contextmanager
def unserved(root: str) -> Generator[None]:
    """Keeps everybody from serving the store meanwhile. Raises NotServedError if somebody serves it now."""
    with contextlib.ExitStack() as locks:
        for name, does in ((AGENT_LOCK, "is served"), (AGENT_LOG, "is about to be served")):
            if not os.path.lexists(f"{root}/{name}"):
                continue
            file = LockFile(f"{root}/{name}", os.O_RDWR)
            locks.callback(file.close)
            if not syscalls.lock_exclusive(file.fd):
                status = syscalls.status(file.fd)
                pids = sorted(lock_holders().get((status.st_dev, status.st_ino), ()))
                who = ", ".join(map(describe_thread, pids)) or "a process that can't be seen from here"
                raise NotServedError(f"{root} {does} to other hosts by {who}: end that agent first (SIGTERM)")
        yield


def discard(root: str, settings: Settings | None) -> None:
    """Gives up the store in the folder, and empties the folder. `settings`: of the store; None: it was given up before.

    Raises NotAStoreError, before anything is changed.
    """
    _check_discardable(root)
    moved, segments = f"{root}/{folder.DISCARDED}", f"{root}/{folder.SEGMENTS}"
    if settings is not None:
        try:
            syscalls.rename(segments, moved)
        except FileNotFoundError:  # of a damaged store
            syscalls.make_folder(moved, 0o700)
    is_durable = settings is None or settings.durable
    if is_durable:
        syscalls.sync_folder(root)
    with contextlib.suppress(FileNotFoundError):
        syscalls.unlink(f"{root}/{folder.SETTINGS}")
    for name in os.listdir(root):
        if name != folder.DISCARDED:
            _remove(f"{root}/{name}")
    _empty(moved)
    if is_durable:  # a crash of the host must not bring the settings back without their mark
        syscalls.sync_folder(root)
    _remove_folder(moved)


def remove_root(root: str) -> None:
    """Removes the emptied folder. It stays where it can't go: a mount point, or in a folder of somebody else."""
    try:
        syscalls.remove_folder(root)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTEMPTY, errno.ENOENT):
            raise


def remove_begun(root: str) -> None:
    """Removes what a creation that failed has made in a folder that was empty before. Best effort: its error counts."""
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if name in folder.OWN or folder.is_unfinished(name):
                _remove(f"{root}/{name}")


def _remove(path: str) -> None:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        _remove_folder(path)
    else:
        syscalls.unlink(path)


def _remove_folder(path: str) -> None:
    """Removes it again and again: a put under way may make one more file in it before it finds out."""
    for left in reversed(range(_TRIES)):
        _empty(path)
        try:
            syscalls.remove_folder(path)
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not left:
                raise


def _empty(path: str) -> None:
    """Links are removed, and not followed."""
    with os.scandir(path) as found:
        entries = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_folder in entries:
        if is_folder:
            _remove_folder(name)
        else:
            with contextlib.suppress(FileNotFoundError):
                syscalls.unlink(name)
