"""Followers: modules of a process that serves, which are kept at the newest version of a key.

A follower takes these steps, again and again (`Following.take` has 2 to 5):

1. Wait for a version that is newer than the one it has.
2. Pin it, and compare it with the module. Nothing is written, and requests go on.
3. Close the gate (`Gate.changing`). With one module: let no further request in, and wait for those that use it. With a
   spare one: wait for requests that still use the spare since it was the module in use; others go on.
4. Copy.
5. Open the gate, with the new version. With a spare one, requests that begin from now on use it.

So a request uses one version from its beginning to its end. A copy that fails in a single module leaves a mix of two
versions there: the gate lets nobody in until a load has gone well. A copy that fails in a spare one is never used.

A fork waits for a copy under way, so that the child's modules are whole. The child has no thread that follows.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Generic, NamedTuple, NoReturn, TypeVar, cast
from weakref import WeakSet

import torch

from memstore._arguments import encode_key, flag
from memstore._info import FollowerStatus
from memstore._telling import followers, tell
from memstore._threads import PATIENCE, AbandonedError, Hooks, around_forks
from memstore._wording import an, an_instance
from memstore.engine import deadline_after
from memstore.errors import (
    CorruptionError,
    KeyNotFoundError,
    MemstoreError,
    NotAStoreError,
    StoreClosedError,
    StoreTimeoutError,
    StructureMismatchError,
    UnsupportedValueError,
)
from memstore.listing import check_store, timeout_of
from memstore.store.model_fit import is_spread
from memstore.store.store import Store, begin_follow, reopen
from memstore.structure import modes

log = logging.getLogger("memstore")

M = TypeVar("M", bound=torch.nn.Module)
Lock = AbstractContextManager[object]

UNFIT = (CorruptionError, StructureMismatchError, UnsupportedValueError)  # of a version, which stays so
_LOOK = 0.5  # seconds after which the thread sees that it is to end
PAUSE = 1.0  # seconds before what has failed is tried again
_AT_EXIT = 2.0  # seconds that the interpreter's end waits for a copy: a thread should not end within one


class InUse(NamedTuple, Generic[M]):
    """The module that a request uses, and the version of all its tensors. 0: none was loaded yet."""

    model: M
    version: int


# --- The gate: requests that use modules, and the copy that changes one ----------------------------------------------


class Gate(Generic[M]):
    """A lock that many requests share, and a copy has alone; of two modules, requests go on with the other one.

    A copy that waits is not overtaken by requests that come after it, so a busy server can't keep it out for ever.

    Args:
        models: the module, and perhaps a spare one.
    """

    def __init__(self, models: list[M]) -> None:
        self._models = models
        self._versions, self._users = [0] * len(models), [0] * len(models)
        self._now = 0  # the module that is in use
        self._changed = threading.Condition()
        self._is_closed = self._is_writing = self._is_ended = False
        self._callbacks: list[Callable[[], object]] = []
        self.failure: Exception | None = None  # of a copy that has left a mix of versions in the only module

    @property
    def current(self) -> InUse[M]:
        """Returns the module that requests use which begin now."""
        now = self._now
        return InUse(self._models[now], self._versions[now])

    @property
    def target(self) -> M:
        """Returns the module that the next copy fills."""
        return self._models[self._next]

    @property
    def _next(self) -> int:
        return len(self._models) - 1 - self._now

    # --- requests -----------------------------------------------------------------------------------------------------

    def enter(self, timeout: float) -> int:
        """Lets a request in, and returns the number of its module. Raises StoreTimeoutError, and `failure`."""
        deadline = deadline_after(timeout)
        with self._changed:
            while self._is_closed:
                if not wait_until(self._changed, deadline):
                    raise too_long(timeout)
            return self._enter()

    def enter_or_call(self, callback: Callable[[], object]) -> int | None:
        """Lets a request in, if the gate is open. Else returns None, and calls the callback once it opens."""
        with self._changed:
            if not self._is_closed:
                return self._enter()
            self._callbacks.append(callback)
            return None

    def _enter(self) -> int:
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        self._users[self._now] += 1
        return self._now

    def in_use(self, number: int) -> InUse[M]:
        """Returns the module of a request that was let in."""
        return InUse(self._models[number], self._versions[number])

    def leave(self, number: int) -> None:
        with self._changed:
            self._users[number] -= 1
            self._changed.notify_all()

    # --- the copy -----------------------------------------------------------------------------------------------------

    def change(self, fill: Callable[[], int], timeout: float) -> int:
        """Closes the gate, waits until nobody uses the target, fills it, and opens the gate with its new version.

        Raises:
            StoreTimeoutError: requests used it for longer. They were not disturbed.
            StoreClosedError: it was stopped.
            What `fill` raises.
        """
        number, has_spare = self._next, len(self._models) > 1
        deadline = deadline_after(timeout)
        with self._changed:
            self._is_closed = not has_spare
            while self._users[number] and not self._is_ended:
                if not wait_until(self._changed, deadline):
                    self._open()
                    raise StoreTimeoutError(
                        f"{self._users[number]} requests have used the module for more than {timeout:g} s, so that a "
                        "newer version could not be copied into it: it is tried again"
                    )
            if self._is_ended:
                self._open()
                raise StoreClosedError("the follower was closed, so nothing is copied any more")
            self._is_writing = True
        try:
            version = fill()
        except BaseException as error:
            with self._changed:
                if not has_spare and not isinstance(error, AbandonedError):  # which comes before anything is written
                    self.failure = error if isinstance(error, Exception) else RuntimeError("a copy was interrupted")
                self._open()
            raise
        with self._changed:
            self._versions[number] = version
            self._now, self.failure = number, None
            self._open()
        return version

    def _open(self) -> None:
        self._is_closed = self._is_writing = False
        self._changed.notify_all()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    # --- forks, and the end -------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Waits for a copy under way, and lets none begin until `after_fork`."""
        self._changed.acquire()
        self._changed.wait_for(lambda: not self._is_writing, PATIENCE)

    def after_fork(self) -> None:
        self._changed.release()

    def in_child(self) -> None:
        """Begins anew: requests of the parent's threads are not the child's."""
        self._changed = threading.Condition()
        self._users = [0] * len(self._models)
        self._is_closed, self._callbacks = False, []

    def stop(self) -> None:
        """Lets no copy begin any more."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def end(self, timeout: float) -> None:
        """Lets no copy begin any more, and waits for one under way."""
        self.stop()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_writing, timeout)


def wait_until(condition: threading.Condition, deadline: float) -> bool:
    """Waits for a change. Returns False if the deadline has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        return False
    condition.wait(min(left, threading.TIMEOUT_MAX))
    return True


def too_long(timeout: float) -> StoreTimeoutError:
    """Makes the error of a request that waited for a copy, or for the requests before it, for too long."""
    return StoreTimeoutError(
        f"a newer version was not copied within {timeout:g} s, because of requests that still use the module: a spare "
        "module (spare=) lets requests go on meanwhile; one thread must not enter use() twice"
    )


# --- What both kinds of followers do ---------------------------------------------------------------------------------


class Following(Generic[M]):
    """The state of a follower, and the steps of a load, for a thread or for tasks.

    Attributes:
        seen: the newest version that was loaded, or found not to fit.
        error: why the newest version was not loaded; None: the last load went well.
    """

    def __init__(
        self, root: str, key: str, model: M, spare: M | None, has_lock: bool, strict: bool, casts: bool, timeout: float
    ) -> None:
        encode_key(key)
        _check_models(model, spare, has_lock)
        self.root, self.key, self.timeout = root, key, timeout
        self.options = {"strict": flag("strict", strict), "cast": flag("cast", casts)}
        self.gate = Gate([model] if spare is None else [model, spare])
        self.seen = self.loads = 0
        self.copied = 0.0
        self.error: Exception | None = None
        self.is_ended = False
        self.told = threading.Condition()
        _all.add(cast("Following[torch.nn.Module]", self))
        followers.add(self)

    @property
    def version(self) -> int:
        return self.gate.current.version

    def prepare(self, store: Store) -> Callable[[], int]:
        """Takes step 2, and returns step 4. Raises what `Store.load_model` raises."""
        return begin_follow(store, self.key, self.gate.target, timeout=self.timeout, **self.options).fill

    def copy(self, fill: Callable[[], int]) -> int:
        """Takes steps 3 to 5. Raises StoreTimeoutError of the gate, and what a copy raises."""

        def timed() -> int:
            began = time.perf_counter()
            version = fill()
            self.copied = time.perf_counter() - began
            return version

        version = self.gate.change(timed, self.timeout)
        with self.told:
            self.seen, self.error, self.loads = version, None, self.loads + 1
            self.told.notify_all()
        return version

    def fail(self, error: Exception, version: int) -> None:
        """Notes why `version` was not loaded, for who asks, and for the log."""
        forget_frames(error)
        if type(error) is not type(self.error) or str(error) != str(self.error):
            log.warning("%r: version %d is not followed: %s: %s", self.key, version, type(error).__name__, error)
        with self.told:
            self.error = error
            if isinstance(error, UNFIT):
                self.seen = max(version, self.seen)
            self.told.notify_all()

    def status(self, newest: int | None, created: float) -> FollowerStatus:
        """Returns the status, given what the store has now."""
        version = self.version
        is_behind = newest is not None and newest != version
        return FollowerStatus(
            version=version,
            newest=newest,
            lag=max(time.time() - created, 0.0) if is_behind else 0.0,
            loads=self.loads,
            copied=self.copied,
            error=self.error,
        )

    def end(self, error: Exception | None = None) -> None:
        with self.told:
            self.is_ended = True
            self.error = self.error if error is None else error
            self.told.notify_all()


def _check_models(model: torch.nn.Module, spare: torch.nn.Module | None, has_lock: bool) -> None:
    for name, one in (("model", model), ("spare", spare)):
        if one is not None and not isinstance(one, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{name} is a torch.nn.Module, and not {an(type(one))}")
        if is_spread(one):
            raise ValueError(
                f"{name} has DTensors, of which other ranks hold the rest: their followers would have other versions "
                "at times. Call store.load_model(key, model, newer_than=version) on all ranks, which load the same one"
            )
    if spare is None:
        return
    if has_lock:
        raise ValueError("lock and spare exclude each other: with a spare module no request waits for a copy")
    own = {tensor.data_ptr() for tensor in model.parameters() if tensor.numel() and not tensor.is_meta}
    shared = [name for name, tensor in spare.named_parameters() if tensor.numel() and tensor.data_ptr() in own]
    if spare is model or shared:
        which = "it is model itself" if spare is model else f"it shares {shared[0]!r}"
        raise ValueError(
            f"spare has memory of its own, and not that of model ({which}): copy.deepcopy(model) makes one"
        )


def forget_frames(error: BaseException) -> None:
    """Removes the tracebacks of an error that is kept: they would keep the version that it is about."""
    kept: list[BaseException | None] = [error]
    seen: set[int] = set()
    while kept:
        found = kept.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            found.__traceback__ = None
            kept += [found.__cause__, found.__context__]


def check_every(every: float | None) -> float:
    """Returns the seconds between two loads. Raises ValueError, TypeError."""
    if every is None:
        return 0.0
    deadline_after(every)
    return float(every)


def newest_of(store: Store, key: str) -> tuple[int | None, float]:
    """Returns the newest version and when it was put; None and 0.0 where there is no such key, or no store."""
    try:
        info = store.info(key)
    except (KeyNotFoundError, NotAStoreError):
        return None, 0.0
    return info.version, info.created


_all: WeakSet[Following[torch.nn.Module]] = WeakSet()
_taken: list[Gate[torch.nn.Module]] = []


def _before_fork() -> None:
    _taken[:] = [following.gate for following in _all]
    for gate in _taken:
        gate.before_fork()


def _after_fork_in_parent() -> None:
    for gate in _taken:
        gate.after_fork()
    _taken.clear()


def _after_fork_in_child() -> None:
    _taken.clear()
    for following in _all:
        following.gate.in_child()
        following.told = threading.Condition()
        following.end(
            StoreClosedError(
                f"{following.key!r}: the follower stays with the process that was forked: follow the key anew"
            )
        )


around_forks(Hooks(_before_fork, _after_fork_in_parent, _after_fork_in_child))


# --- The follower that is a thread -----------------------------------------------------------------------------------


@modes.uncompiled_methods
class Follower(Generic[M]):
    """A module that a thread keeps at the newest version of a key: made by `memstore.follow`.

    Attributes:
        key: the key.
    """

    def __init__(
        self,
        store: Store,
        following: Following[M],
        every: float,
        on_version: Callable[[int], object] | None,
        lock: Lock | None,
    ) -> None:
        self.key = following.key
        self._given = self._store = store
        self._arguments = store.__reduce__()[1]  # of what opens it again
        self._following, self._every, self._on_version, self._lock = following, every, on_version, lock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name=f"memstore follows {self.key}", daemon=True
        )
        self._thread.start()

    @property
    def model(self) -> M:
        """Returns the module that is in use. Outside of `use` a load may change it at any time."""
        return self._following.gate.current.model

    @property
    def version(self) -> int:
        """Returns the version that the module has, or 0 before the first load."""
        return self._following.version

    @property
    def error(self) -> Exception | None:
        """Returns why the newest version was not loaded, or None after a load that went well."""
        return self._following.error

    def use(self, timeout: float | None = None) -> AbstractContextManager[InUse[M]]:
        """Keeps the module from being changed inside the `with`: `with follower.use() as (model, version)`.

        Any number of threads may be inside at once. With one module they wait while a newer version is copied; with a
        spare one they don't. Don't enter it twice in one thread.

        Args:
            timeout: seconds to wait for a copy; None: the follower's. With a lock of yours it waits for that.

        Raises:
            StoreTimeoutError: requests have kept a copy waiting for so long.
            CorruptionError: the last copy has failed, and left a mix of versions in the only module.
        """
        return _using(self._following, self._lock, timeout)

    def wait(self, *, newer_than: int = 0, timeout: float | None = None) -> int:
        """Waits until the module has a version that is newer than `newer_than`, and returns it.

        Args:
            newer_than: a version.
            timeout: seconds; None: the follower's.

        Raises:
            StoreTimeoutError: there was none in time.
            StructureMismatchError, CorruptionError: there is one, which doesn't fit the module, or is damaged.
            StoreClosedError: the follower was closed.
        """
        following = self._following
        seconds = following.timeout if timeout is None else timeout
        deadline = deadline_after(seconds)
        while True:
            error = following.error
            if isinstance(error, UNFIT) and (newest_of(self._store, self.key)[0] or 0) > following.seen:
                error = None  # of a version that was replaced since
            with following.told:
                version = self.version
                if version > newer_than:
                    return version
                if following.is_ended:
                    raise following.error or closed(self.key)
                if error is not None and error is following.error and isinstance(error, UNFIT):
                    raise error.with_traceback(None)
                if not wait_until(following.told, deadline):
                    raise not_followed(self.key, newer_than, version, seconds, following.error)

    def status(self) -> FollowerStatus:
        """Looks into the store, and returns which version the module has, and how far it is behind."""
        return self._following.status(*newest_of(self._store, self.key))

    def close(self, timeout: float | None = None) -> None:
        """Ends the thread, after a copy under way. The module stays as it is. May be called again.

        Raises:
            StoreTimeoutError: a load has not ended in time, for example because it waits for a lock of yours.
        """
        if timeout is not None:
            deadline_after(timeout)
        self._stop.set()
        self._following.gate.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and not self._following.is_ended:
            seconds = max(self._following.timeout, 4 * _LOOK) if timeout is None else timeout
            thread.join(min(seconds, threading.TIMEOUT_MAX))
            if thread.is_alive():
                raise StoreTimeoutError(f"the follower of {self.key!r} has not ended in {seconds:g} s: a load waits")
        self._thread = None

    def __enter__(self) -> Follower[M]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Follower can't be pickled: it belongs to its process; send the store and the key, and call "
            "memstore.follow there"
        )

    def __repr__(self) -> str:
        state = "ended" if self._following.is_ended else "follows"
        return f"<memstore.Follower of {self.key!r}: version {self.version}, {state}>"

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        following = self._following
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    self._follow_once()
                except StoreClosedError as error:  # by the user, who closes the store before the follower
                    following.end(None if self._stop.is_set() else error)
                    return
                self._stop.wait(max(began + self._every - time.monotonic(), 0.0))
        finally:
            following.end()
            if self._store is not self._given:
                self._store.close()

    def _follow_once(self) -> None:
        """Waits for a newer version, for a moment, and loads it. Raises StoreClosedError."""
        following = self._following
        version = following.seen
        try:
            # 1. Wait.
            try:
                version = self._store.wait(self.key, newer_than=following.seen, timeout=_LOOK)
            except StoreTimeoutError:
                return
            # 2. Compare. 3 to 5. Copy.
            began = time.perf_counter()
            fill = following.prepare(self._store)
            if self._lock is None:
                version = following.copy(fill)
            else:
                with self._lock:
                    version = following.copy(fill)
            del fill  # which holds the version
            tell("follow", self._store.root, (self.key,), 0, began)
        except StoreClosedError:
            raise
        except NotAStoreError as error:
            following.fail(error, version)
            self._reopen()
            return
        except Exception as error:  # whatever it is, the module keeps its version, and the next try may go well
            following.fail(error, version)
            if not isinstance(error, UNFIT):
                self._stop.wait(PAUSE)
            return
        if self._on_version is not None:
            try:
                self._on_version(version)
            except Exception:
                log.exception("%r: on_version(%d) has failed", self.key, version)

    def _reopen(self) -> None:
        """Waits for a store in the place of the one that is gone. Its versions begin anew."""
        while not self._stop.wait(PAUSE):
            with suppress(MemstoreError):
                path, _, *options = self._arguments
                store = reopen(path, "r", *options)
                if self._store is not self._given:
                    self._store.close()
                self._store, self._following.seen = store, 0
                return


@contextmanager
def _using(following: Following[M], lock: Lock | None, timeout: float | None) -> Generator[InUse[M]]:
    """Lets a request in, and out at the end. Errors as `Follower.use`."""
    gate = following.gate
    if lock is not None:
        with lock:
            if gate.failure is not None:
                raise gate.failure.with_traceback(None)
            yield gate.current
        return
    number = gate.enter(following.timeout if timeout is None else timeout)
    try:
        yield gate.in_use(number)
    finally:
        gate.leave(number)


def closed(key: str) -> StoreClosedError:
    """Makes the error of a wait for a follower that was closed."""
    return StoreClosedError(f"the follower of {key!r} was closed: memstore.follow makes another")


def not_followed(key: str, newer_than: int, version: int, seconds: float, error: Exception | None) -> StoreTimeoutError:
    """Makes the error of a wait for a follower."""
    why = "" if error is None else f"; the last try: {type(error).__name__}: {error}"
    return StoreTimeoutError(
        f"{key!r}: no version newer than {newer_than} was loaded within {seconds:g} s: the module has version {version}"
        f"{why}"
    )


@modes.uncompiled
def follow(
    store: Store,
    key: str,
    model: M,
    *,
    every: float | None = None,
    on_version: Callable[[int], object] | None = None,
    lock: Lock | None = None,
    spare: M | None = None,
    strict: bool = True,
    cast: bool = False,
    timeout: float | None = None,
) -> Follower[M]:
    """Keeps a module at the newest version of a key, by a thread, in a process that serves it.

    Requests use the module inside `with follower.use() as (model, version)`: all its tensors are of that version. With
    one module, a request waits while a newer version is copied; what is compared, read from a disk or fetched before
    doesn't make it wait. With a `spare` module of the same kind, nothing waits: the spare one is filled, and then used.

    A version that doesn't fit, or is damaged, is left out: the module keeps what it has, `error` says why, and the next
    version is loaded as usual. While the store is gone, or begun anew, the module stays, too; the store that comes in
    its place is followed. A deleted key changes nothing. After a fork, the child follows nothing.

    Args:
        store: the store.
        key: of a value of `save_model`, or of a state_dict that was put.
        model: a module with the same names, shapes and (without `cast`) dtypes. It is filled in place.
        every: at most one load in so many seconds; None: each newer version, as soon as it can be loaded.
        on_version: called in the thread, with the version, after each load. What it raises is logged.
        lock: one that your requests take (`with lock:`) in place of `use`. It is taken for each copy.
        spare: a second module with memory of its own, such as `copy.deepcopy(model)`.
        strict: as of `load_model`.
        cast: as of `load_model`.
        timeout: seconds for which a load waits for requests, and a request for a load; None: the store's.

    Returns:
        The follower; `wait` waits for the first version. Close it, or use it in a `with`.

    Raises:
        TypeError, ValueError: an argument is of another kind; the spare module shares memory with the first one; or
            the module has DTensors.

    Example:
        >>> import memstore, tempfile, torch
        >>> store, model = memstore.open(tempfile.mkdtemp()), torch.nn.Linear(2, 1)
        >>> version = store.put("policy", torch.nn.Linear(2, 1).state_dict())
        >>> with memstore.follow(store, "policy", model) as follower:
        ...     version = follower.wait(timeout=10.0)
        ...     with follower.use() as (current, version):
        ...         print(version, current(torch.ones(1, 2)).shape)
        1 torch.Size([1, 1])
    """
    check_store(store, key)
    seconds = timeout_of(store) if timeout is None else timeout
    deadline_after(seconds)
    if lock is not None and not isinstance(lock, AbstractContextManager):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"lock is one that `with` takes, as threading.Lock(), and not {an_instance(lock)}")
    following = Following(store.root, key, model, spare, lock is not None, strict, cast, seconds)
    return Follower(store, following, check_every(every), on_version, lock)


def _end_all() -> None:
    for following in list(_all):
        following.gate.end(_AT_EXIT)


atexit.register(_end_all)
