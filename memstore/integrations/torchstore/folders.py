"""Folders of the stores of a job: one folder a job, in it one store for each name, and a lock of who made it.

    /dev/shm/memstore-torchstore-UID/job-ID/NAME        the store's root; job-ID is what MEMSTORE_TORCHSTORE_ROOT names
    /dev/shm/memstore-torchstore-UID/job-ID/NAME.owner  locked by who called `initialize`, as long as it lives

1. The first `initialize` of a process makes the job's folder, unless MEMSTORE_TORCHSTORE_ROOT names one (the user's, or
   of the process that started this one), and names it there for the processes that this one will start.
2. It locks NAME.owner. Who finds it locked raises AlreadyInitializedError; who finds it free, and a store beside it,
   removes that: its owner was killed.
3. `shutdown`, or the owner's end, removes the store; the last one takes the job's folder with it.

On other hosts nobody is the owner: the store is served, and its agent's lock says that it is in use.

A kill leaves a folder whose owners' locks are free. The next `initialize` of the user on this host removes it: it looks
and makes its own under the lock of the folder above, so that none is seen before its lock is taken. An agent outlives
the ranks that started it; it ends when its root is removed, and that is waited for: the next one wants its port.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from urllib.parse import quote

import memstore
from memstore.engine import syscalls
from memstore.errors import MemstoreError, PermissionDeniedError, StoreTimeoutError

ROOT_VARIABLE = "MEMSTORE_TORCHSTORE_ROOT"
_SHARED_MEMORY = "/dev/shm"
_JOB, _OWNER, _AGENT = "job-", ".owner", "agent.lock"
_CLUSTER = "cluster"  # in a root, while its agent has it as a member of a cluster
_LONGEST = 200  # characters of a file name, of 255
_PATIENCE = 30.0  # seconds for the lock of the folder above, under which stale folders are removed
_AGENT_ENDS_WITHIN = 15.0  # seconds after its root was removed
_SERVED_WITHIN = 600.0  # seconds from the making of a folder on a host of a mesh to its agent's lock


class AlreadyInitializedError(MemstoreError, RuntimeError):
    """A store of this name exists, and the process that initialized it is alive."""


@dataclass(frozen=True, slots=True)
class OwnedStore:
    """A store that this process has made.

    Attributes:
        path: its root.
        owner: the file that says so, open and locked.
        pid: of this process; a forked child owns nothing.
    """

    path: str
    owner: int
    pid: int


_owned: dict[str, OwnedStore] = {}
_followed: set[str] = set()  # names of stores that the first rank of this host owns, and shuts down


def check_name(name: object) -> None:
    """Raises TypeError for what names no store."""
    if not isinstance(name, str):
        raise TypeError(f"store_name is a str, as 'torchstore', and not {name!r:.100}")


def make(name: str) -> str:
    """Makes the store of this name, for the processes of this job, and returns its root.

    Raises:
        AlreadyInitializedError: there is one, and its owner lives.
        PermissionDeniedError: the folder is somebody else's.
        StoreFullError, and what else `memstore.open` raises.
    """
    given = os.environ.get(ROOT_VARIABLE)
    if given:
        os.makedirs(given, mode=0o700, exist_ok=True)
        path = path_in(given, name)
        owner = _own(path, name)
    else:
        with _base_locked() as base:
            _sweep(base)
            job = f"{base}/{_JOB}{uuid.uuid4().hex[:16]}"
            os.mkdir(job, 0o700)
            path = path_in(job, name)
            owner = _own(path, name)
        os.environ[ROOT_VARIABLE] = job
    try:
        remove(path)
        memstore.open(path).close()
    except BaseException:
        _give_up(OwnedStore(path, owner, os.getpid()))
        raise
    _owned[name] = OwnedStore(path, owner, os.getpid())
    return path


def prepare(path: str) -> None:
    """Makes the job's folder on another host than that of who initializes the store."""
    job = os.path.dirname(path)
    with _base_locked() if _is_made_here(job) else contextlib.nullcontext():
        os.makedirs(job, mode=0o700, exist_ok=True)


def path_in(job: str, name: str) -> str:
    """Returns the folder of a name. Any text is one: it is quoted, and one that is too long goes by its hash."""
    quoted = quote(name, safe=" ").replace(".", "%2E") or "%"
    return f"{job}/{quoted if len(quoted) <= _LONGEST else hashlib.blake2b(name.encode(), digest_size=20).hexdigest()}"


def known_path(name: str) -> str | None:
    """Returns the root of this name, if the environment says where it is, and it is there."""
    job = os.environ.get(ROOT_VARIABLE)
    path = path_in(job, name) if job else ""
    is_there = path and os.path.exists(f"{path}/memstore.json")
    # A host that is about to join has the store, and no part in the others' keys.
    return path if is_there and (is_made_here(path) or os.path.exists(f"{path}/{_CLUSTER}")) else None


def is_made_here(path: str) -> bool:
    """Returns whether a process of this host has made this store, rather than joined one of other hosts."""
    return os.path.exists(path + _OWNER)


def is_owned_here(name: str) -> bool:
    """Returns whether this process has made the store of this name."""
    return name in _owned and _owned[name].pid == os.getpid()


def follow(name: str, path: str) -> None:
    """Makes this rank use what the first rank of its host has made."""
    os.environ[ROOT_VARIABLE] = os.path.dirname(path)
    _followed.add(name)


def leave(name: str) -> bool:
    """Ends what this process has to do with a store that it owns, or follows. False: it does neither."""
    if name in _followed:
        _followed.remove(name)
        return True
    owned = _owned.get(name)
    if owned is None or owned.pid != os.getpid():
        return False
    del _owned[name]
    _give_up(owned)
    return True


def remove(path: str) -> None:
    """Removes a store that another process has made, and waits for the end of its agent.

    Values that were got from it stay as they are.
    """
    with contextlib.ExitStack() as stack:
        try:
            agent = syscalls.open_file(f"{path}/{_AGENT}", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # nobody serves it
            agent = -1
        else:
            stack.callback(syscalls.close, agent)
        shutil.rmtree(path, ignore_errors=True)
        until = time.monotonic() + _AGENT_ENDS_WITHIN
        while agent >= 0 and not syscalls.lock_exclusive(agent) and time.monotonic() < until:
            time.sleep(0.02)
            shutil.rmtree(path, ignore_errors=True)  # what the agent made meanwhile


def _give_up(owned: OwnedStore) -> None:
    shutil.rmtree(owned.path, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(owned.path + _OWNER)
    syscalls.unlock(owned.owner)  # a forked child has the file open too
    syscalls.close(owned.owner)
    job = os.path.dirname(owned.path)
    if not _is_made_here(job):
        return
    with contextlib.suppress(OSError):  # another store of the job is there
        os.rmdir(job)
        if os.environ.get(ROOT_VARIABLE) == job:
            del os.environ[ROOT_VARIABLE]


def _own(path: str, name: str) -> int:
    fd = syscalls.open_file(path + _OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    if not syscalls.lock_exclusive(fd):
        syscalls.close(fd)
        raise AlreadyInitializedError(
            f"the store {name!r} of this job is at {path}, and the process that initialized it lives: use it, or call "
            "shutdown() first"
        )
    return fd


# --- the folder above -------------------------------------------------------------------------------------------------


def _base() -> str:
    return f"{_SHARED_MEMORY}/memstore-torchstore-{os.geteuid()}"


def _is_made_here(job: str) -> bool:
    return os.path.dirname(job) == _base() and os.path.basename(job).startswith(_JOB)


@contextlib.contextmanager
def _base_locked() -> Generator[str]:
    """Locks this user's folder: nobody makes a job's folder, or looks for stale ones, meanwhile."""
    base = _base()
    with contextlib.suppress(FileExistsError):
        os.mkdir(base, 0o700)
    found = os.lstat(base)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionDeniedError(
            f"{base} is no folder of yours that only you may write: remove it, or name another in {ROOT_VARIABLE}"
        )
    with syscalls.file_open(f"{base}/lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as fd:
        deadline = time.monotonic() + _PATIENCE
        while not syscalls.lock_exclusive(fd):
            if time.monotonic() > deadline:
                raise StoreTimeoutError(f"{base}/lock was held by another process for {_PATIENCE:g} s")
            time.sleep(0.01)
        yield base


def _sweep(base: str) -> None:
    """Removes the folders of jobs none of whose owners lives."""
    for job in os.scandir(base):
        if not job.name.startswith(_JOB) or not job.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(FileNotFoundError):  # a job that ends removes its folder itself
            if not _has_owner(job.path):
                for store in os.scandir(job.path):
                    if store.is_dir(follow_symlinks=False):
                        remove(store.path)
                shutil.rmtree(job.path, ignore_errors=True)


def _has_owner(job: str) -> bool:
    """Returns whether a store has an owner. On other hosts than the first its agent is that, once it runs."""
    names = os.listdir(job)
    if not names:
        return time.time() - os.stat(job).st_mtime < _SERVED_WITHIN
    owners = [f"{job}/{name}" for name in names if name.endswith(_OWNER)]
    agents = [f"{job}/{name}/{_AGENT}" for name in names]
    return any(map(_lock_is_held, owners or filter(os.path.exists, agents)))


def is_served(path: str) -> bool:
    """Returns whether the agent of this root lives."""
    return os.path.exists(f"{path}/{_AGENT}") and _lock_is_held(f"{path}/{_AGENT}")


def _lock_is_held(path: str) -> bool:
    with syscalls.file_open(path, os.O_RDWR | os.O_NOFOLLOW) as fd:
        return not syscalls.lock_exclusive(fd)


@atexit.register
def _at_exit() -> None:
    for owned in list(_owned.values()):
        if owned.pid == os.getpid():
            _give_up(owned)
