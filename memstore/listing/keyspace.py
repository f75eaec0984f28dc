"""Keyspace: an opened store as keys and versions, all that needs neither torch nor a value. `Store` adds the values."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from memstore._arguments import (
    KEY_LIMIT,
    encode_key,
    encode_prefix,
    expected_version,
    flag,
    older_version,
    older_versions,
    several,
)
from memstore._info import PendingInfo, QuotaInfo, StoreStats
from memstore._telling import is_wanted, tell
from memstore._threads import between_forks
from memstore._wording import an_instance, parse_size, short
from memstore.engine import (
    Change,
    Creation,
    Elsewhere,
    Participant,
    PendingPart,
    Root,
    RootUse,
    absolute_path,
    at_each_owner,
    close_root,
    deadline_after,
    delete,
    ended,
    give_up,
    huge_page_bytes,
    index,
    is_served,
    measure,
    open_root,
    pending_parts,
    reopen_root,
    resource_errors,
    set_quota,
    sweep_all,
)
from memstore.errors import (
    CrossHostError,
    InvalidKeyError,
    KeyNotFoundError,
    MemstoreError,
    ReadOnlyError,
    StoreClosedError,
    StoreTimeoutError,
    UnknownOutcomeError,
)
from memstore.listing.absent import absent, absent_many, not_in_time

if TYPE_CHECKING:
    from typing_extensions import Self


# --- Keyspace --------------------------------------------------------------------------------------------------------


Mode = Literal["r", "r+", "a", "x", "w"]

log = logging.getLogger("memstore")
_CLEARED_AT_ONCE = 1024  # keys; at another host it takes 20 ms, and who puts there waits meanwhile


class Keyspace:
    """The part of Store that needs no values. `Store` documents what all methods have in common.

    Attributes:
        root: the folder, as an absolute path.
    """

    def __init__(self, use: RootUse, mode: Mode, *, timeout: float, asked: Mode | None = None) -> None:
        given: Any = use
        if not isinstance(given, RootUse):
            raise TypeError(f"memstore.open(path) opens a store, and not {type(self).__qualname__}({given!r:.100})")
        self.root = use.root.path
        use.root.connect = open_elsewhere
        self._use: RootUse | None = use
        self._root: Root | None = use.root
        self._mode: Mode = mode
        self._asked: Mode = mode if asked is None else asked  # of `open`; then "a" and "x" are as "r+"
        self._timeout = timeout
        self._puts: int = 0
        self._gets: int = 0
        self._tells = is_wanted()  # asked here: in each get it would take a hundredth of its time

    # --- delete -------------------------------------------------------------------------------------------------------

    def delete(
        self, key: str, *, missing_ok: bool = False, expect_version: int | None = None, timeout: float | None = None
    ) -> bool:
        """Deletes a key. Values that were got stay valid. Returns whether it was there.

        Raises:
            KeyNotFoundError: no such key, unless `missing_ok`.
            VersionConflictError: it is at another version than `expect_version`.
        """
        expect = None if expect_version is None else expected_version(expect_version)
        change = Change(encode_key(key), None, expect, flag("missing_ok", missing_ok))
        return bool(self._delete([change], timeout)[0])

    def delete_many(
        self, keys: Iterable[str], *, missing_ok: bool = False, atomic: bool = True, timeout: float | None = None
    ) -> int:
        """Deletes keys at one moment, all or none. Returns how many were there. Errors as `delete`.

        In a store on several hosts, keys of different owners raise a CrossHostError. With `atomic` False they are
        deleted one owner after the other; after an error, keys that were deleted at other owners stay deleted.
        """
        names = dict.fromkeys(encode_key(key) for key in several(keys))
        changes = [Change(name, None, None, flag("missing_ok", missing_ok)) for name in names]
        versions: list[int] = []

        def delete_part(part: list[Change]) -> None:
            versions.extend(self._delete(part, timeout))

        if flag("atomic", atomic):
            delete_part(changes)
        else:
            deadline = self._deadline(timeout)
            at_each_owner(self._opened(timeout), changes, lambda change: change.key, delete_part, deadline)
        return sum(map(bool, versions))

    def _delete(self, changes: list[Change], timeout: float | None) -> list[int]:
        deadline = self._deadline(timeout)
        root = self._opened(timeout, writes=True)
        if not changes:
            return []
        try:
            return delete(root, changes, deadline)
        except KeyNotFoundError as error:  # by who had the mutex, where nothing more is looked for
            raise self._not_deleted(root, changes, error) from None

    def _not_deleted(self, root: Root, changes: list[Change], error: KeyNotFoundError) -> KeyNotFoundError:
        with contextlib.suppress(MemstoreError, OSError):
            gone = [one.key for one in changes if index.known_version(root, one.key) == 0]
            if gone:  # else somebody has put them since
                advice = "nothing was deleted; missing_ok=True leaves out what isn't there"
                return absent_many(root, gone, len(changes), advice)
        return error

    def clear(self, prefix: str = "", *, timeout: float | None = None) -> int:
        """Deletes all keys that start with `prefix`, also those of datasets and replay buffers.

        Values that were got stay valid. Up to 1,024 keys go at one moment, more of them in such steps, sorted; in a
        store on several hosts, those of one owner after the other. Keys that are put meanwhile may stay. Sharded puts
        under such keys that wait for other ranks are given up. `open(root, "w")` begins a store anew as a whole.

        Args:
            prefix: as for `keys`; "" stands for all keys.
            timeout: seconds for each step; None: the store's.

        Returns:
            How many keys were deleted.

        Example:
            >>> import memstore, tempfile
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     versions = store.put_many({"runs/1": 1.0, "runs/2": 2.0, "seed": 7})
            ...     store.clear("runs/"), list(store)
            (2, ['seed'])
        """
        self._opened(timeout, writes=True)
        start = encode_prefix(prefix)
        seconds = self._timeout if timeout is None else timeout
        deadline_after(seconds)  # raises for what is no number of seconds
        for one in self.pending(timeout=timeout):
            if one.key.startswith(prefix):
                self.abort(one.key, one.attempt, timeout=timeout)
        names, deleted = index.keys_from(partial(self._opened, writes=True), start, seconds), 0
        while step := [name.decode() for name in itertools.islice(names, _CLEARED_AT_ONCE)]:
            deleted += self.delete_many(step, missing_ok=True, atomic=False, timeout=timeout)
        if not deleted and GLOB.intersection(prefix):
            warnings.warn(no_match(prefix, "clear"), UserWarning, stacklevel=2)
        return deleted

    # --- look ---------------------------------------------------------------------------------------------------------

    def keys(self, prefix: str = "", *, partial: bool = False) -> Iterator[str]:
        """Iterates over the keys that start with `prefix`, sorted by their UTF-8 bytes.

        They are read in pages of 1,024, each at one moment: keys that are put or deleted meanwhile may be missed. A
        prefix is plain text, not a pattern: if it looks like a pattern and no key starts with it, a warning says so.

        Args:
            partial: in a store on several hosts, go on without hosts that don't answer; a warning names them.

        Raises:
            HomeUnavailableError: a host that may own some doesn't answer, unless `partial`.
        """
        encoded = encode_prefix(prefix)
        self._opened()
        silent: dict[bytes, str] | None = {} if flag("partial", partial) else None
        found = map(bytes.decode, index.keys_from(self._opened, encoded, self._timeout, silent))
        if silent is not None:
            found = _warned_of(found, silent, prefix)
        warning = found if GLOB.isdisjoint(prefix) else warned_if_none(found, prefix)
        return WhileRead(warning, f"keys({short(prefix) if prefix else ''})", self.root)

    def version(self, key: str) -> int:
        """Returns the version of `key`.

        Raises:
            KeyNotFoundError: no such key.
        """
        name = encode_key(key)
        root = self._opened()
        found = index.version_of(root, name, self._timeout)
        if not found:
            raise absent(root, name)
        return found

    def versions(self, key: str) -> tuple[int, ...]:
        """Returns the versions of `key` that can be read by `get(key, version=v)`, sorted: the last is the current one.

        More than that one are there if a put of the key has asked for them (`put(history=)`), or if somebody has pinned
        them (`pin`); of a deleted key, the pinned ones.

        Raises:
            KeyNotFoundError: no such key.

        Example:
            >>> import memstore, tempfile
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     versions = [store.put("lr", rate, history=2) for rate in (0.3, 0.2, 0.1)]
            ...     [store.get("lr", version=version) for version in store.versions("lr")]
            [0.2, 0.1]
        """
        name = encode_key(key)
        root = self._opened()
        found = index.versions_of(root, name, self._timeout)
        if not found:
            raise absent(root, name)
        return found

    def wait(self, key: str, *, newer_than: int = 0, timeout: float | None = None) -> int:
        """Waits for a version of `key` that is newer than `newer_than`, and returns it.

        A put wakes it in about a tenth of a millisecond; a delete doesn't wake it.

        Args:
            key: the key; it need not exist yet.
            newer_than: a version, as `put` and `wait` return it.
            timeout: seconds; None: the store's; `float("inf")`: for ever.

        Raises:
            StoreTimeoutError: there was none in time. It is a TimeoutError too.
        """
        began = perf_counter() if self._tells else 0.0
        self._opened(timeout)
        seconds = self._timeout if timeout is None else timeout
        name = encode_key(key)
        try:
            version = index.wait_for(self._opened, name, older_version(newer_than), seconds)
        except StoreTimeoutError as error:
            raise not_in_time(self._opened(), name, error) from None
        if began:
            tell_of_wait(self.root, began, {key: version})
        return version

    def wait_any(
        self,
        keys: Iterable[str] | None = None,
        *,
        prefix: str | None = None,
        newer_than: Mapping[str, int] | int = 0,
        timeout: float | None = None,
    ) -> dict[str, int]:
        """Waits until one of several keys has a newer version, and returns all keys that do, with their versions.

        A put wakes it, as it wakes `wait`. Each time, the versions of all these keys are looked at. In a store on
        several hosts, the wait is kept by the owners of the keys; of more than 1,024 keys, those that other hosts own
        are asked for 20 times a second instead. A wait for a prefix is kept by all owners, or by one if there is a "/"
        in it.

        Args:
            keys: which; they need not exist yet.
            prefix: instead of `keys`, all keys that start with it, also those that are put later. Datasets and replay
                buffers are left out.
            newer_than: a version for each key, as this call has returned them before; 0 for keys that it doesn't have.
                Or one version for all keys.
            timeout: seconds; None: the store's; `float("inf")`: for ever.

        Returns:
            At least one key, with its version. Those of a prefix are sorted.

        Raises:
            StoreTimeoutError: there was none in time. It is a TimeoutError too.
            MutableEntryError: one of `keys` is that of a dataset or a replay buffer.
            TypeError, ValueError: neither `keys` nor `prefix` is given, or both; or there are no keys.

        Example:
            >>> import memstore, tempfile
            >>> store = memstore.open(tempfile.mkdtemp())
            >>> seen = {}
            >>> for step in range(2):
            ...     version = store.put(f"batch/{step}", step)
            ...     new = store.wait_any(prefix="batch/", newer_than=seen)
            ...     seen |= new
            ...     print(list(new))
            ['batch/0']
            ['batch/1']
        """
        began = perf_counter() if self._tells else 0.0
        self._opened(timeout)
        seconds = self._timeout if timeout is None else timeout
        found = index.wait_for_any(self._opened, wanted_of(keys, prefix, newer_than), seconds)
        versions = {name.decode(): version for name, version in found.items()}
        if began:
            tell_of_wait(self.root, began, versions)
        return versions

    def pending(self, key: str | None = None, *, timeout: float | None = None) -> tuple[PendingInfo, ...]:
        """Returns the sharded puts that wait for the parts of other ranks: those of one key, or all.

        Args:
            key: the key; None: all keys.
            timeout: seconds for other hosts; None: the store's.
        """
        name, deadline = None if key is None else encode_key(key), self._deadline(timeout)
        return pending(self._opened(timeout), name, deadline)

    def abort(self, key: str, attempt: str, *, timeout: float | None = None) -> bool:
        """Gives up a sharded put that waits for parts, for all its ranks. Returns whether there was one.

        Args:
            key: of the put.
            attempt: as `pending` names it.
            timeout: seconds; None: the store's.

        Raises:
            StoreTimeoutError: another process held the store's mutex; the message names it.
        """
        deadline = self._deadline(timeout)
        root, name = self._opened(timeout, writes=True), encode_key(key)
        parts = [part for part, _ in pending_parts(root, name, deadline) if part.attempt == attempt]
        if not parts:
            return False
        one = parts[0]
        member = Participant(name, attempt, one.rank, one.world_size, one.waits_ns / 1e9, one.number)
        return abort_attempt(root, member, "Store.abort was called", deadline)

    def stats(self) -> StoreStats:
        """Measures the store; takes milliseconds, and more where hundreds of processes run."""
        root = self._opened()
        with resource_errors(self.root, None, root):
            usage = asdict(measure(root))
        return StoreStats(**usage, huge_page_bytes=huge_page_bytes(root), puts=self._puts, gets=self._gets)

    def set_quota(self, prefix: str, quota: int | str | None, *, timeout: float | None = None) -> QuotaInfo | None:
        """Bounds the bytes that all keys with a prefix may take together; a put beyond that is a QuotaExceededError.

        Of each key count the files of its value, or what lies in the catalog; also those of versions that are kept
        after they were replaced (`put(history=)`), of which the oldest go before a put fails. It holds for puts of any
        number of processes together. Bytes that are there already stay, and a put that takes no more than it replaces
        is always made. A key may have several prefixes with quotas, and each of them holds.

        In a store of several hosts the owner of a group counts what its keys take, wherever their bytes lie. So the
        prefix has a ``/``: it lies within one group. The quota holds from when this returns; at a host that didn't
        answer, from when it hears of it.

        Args:
            prefix: as for `keys`; "" stands for all keys.
            quota: bytes, as a number or text ("8GiB"). None ends the quota.
            timeout: seconds; None: the store's.

        Returns:
            The quota, with the bytes that are taken; None if it was ended.

        Raises:
            CrossHostError: the store is one of several hosts, and the prefix has no ``/``: see above.
            HomeUnavailableError: of such a store, the seed doesn't answer.

        Example:
            >>> import memstore, tempfile, torch
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     quota = store.set_quota("team-a/", "1MiB")
            ...     try:
            ...         store.put("team-a/policy", torch.zeros(1 << 20))
            ...     except memstore.QuotaExceededError as error:
            ...         print(error.prefix, error.quota, error.used)
            team-a/ 1048576 0
        """
        root, start = self._opened(timeout, writes=True), encode_prefix(prefix)
        limit = None if quota is None else parse_size(quota)
        if len(start) > KEY_LIMIT:
            raise InvalidKeyError(f"no key starts with {len(start)} bytes: a quota's prefix has at most {KEY_LIMIT}")
        if is_served(root):
            self._set_quota_of_hosts(prefix, limit, self._timeout if timeout is None else timeout)
            return next((one for one in self.quotas() if one.prefix == prefix), None)
        with resource_errors(self.root, None, root):
            row = set_quota(root, start, limit, self._deadline(timeout))
        return None if row is None else QuotaInfo(prefix, row.limit, row.used)

    def _set_quota_of_hosts(self, prefix: str, limit: int | None, timeout: float) -> None:
        """Raises CrossHostError for a prefix of several groups: no host would see all that is put."""
        if "/" not in prefix:
            raise CrossHostError(
                f"keys that start with {prefix!r} may belong to several hosts of the store, and each of these counts "
                f"its own: set a quota for each group, such as {(prefix or 'runs') + '/'!r}, or bound the part of "
                "a host by capacity="
            )
        with between_forks():
            from memstore.distributed.serving import Cluster

        Cluster(self.root).set_quota(prefix, limit, timeout=timeout)

    def quotas(self) -> tuple[QuotaInfo, ...]:
        """Returns all quotas that `set_quota` has set, with the bytes that are taken, sorted by prefix."""
        found = index.quotas(self._opened(), self._timeout)
        return tuple(QuotaInfo(row.prefix.decode(), row.limit, row.used) for row in found)

    def gc(self, *, timeout: float | None = None) -> int:
        """Frees files that nobody holds: those of replaced versions, and of killed writers. Returns how many bytes."""
        deadline, began = self._deadline(timeout), perf_counter()
        root = self._opened(timeout, writes=True)
        with resource_errors(self.root, None, root):
            freed = sweep_all(root, deadline)
        log.debug("%s: gc: %d bytes were given back, %.3f ms", self.root, freed, (perf_counter() - began) * 1e3)
        return freed

    # --- the store ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the store for this object. Values and refs that were got stay valid. May be called again."""
        use, self._use, self._root = self._use, None, None
        if use is not None:
            close_root(use)

    def _opened(self, timeout: float | None = None, *, writes: bool = False) -> Root:
        """Returns the root.

        A forked child that has to open the catalog anew waits for that within `timeout`, which is the call's; None: the
        store's. A call that `writes` raises ReadOnlyError in mode "r".
        """
        if writes and self._mode == "r":
            raise ReadOnlyError(f"{self.root} was opened with mode 'r': open it with 'r+' or 'a' to write")
        root = self._root
        if root is None:
            raise StoreClosedError(f"the store {self.root} was closed: memstore.open it again")
        if time.monotonic() > root.look_again:  # as `Root.glance`: every call comes here
            root.check_in_place()
        if root.host_lease[0]:
            root.check_lease()
        if root.catalog.is_released:  # in a forked child
            root.check_in_place()  # it is opened by its path
            with resource_errors(self.root):
                reopen_root(root, self._deadline(timeout))
        return root

    def _deadline(self, timeout: float | None) -> float:
        return deadline_after(self._timeout if timeout is None else timeout)

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def _title(self) -> str:
        state = "closed" if self._root is None else f"mode {self._asked!r}"
        return f"memstore.{type(self).__name__} {self.root} ({state})"

    def __iter__(self) -> Iterator[str]:
        """Iterates over all keys, sorted by their UTF-8 bytes, as `keys()`."""
        return iter(self.keys())

    def __delitem__(self, key: str) -> None:
        """Deletes a key, as `delete(key)`."""
        self.delete(key)

    def __bool__(self) -> bool:
        return True  # `store or open(...)` isn't about its keys

    def __len__(self) -> int:
        """Returns how many keys there are."""
        return self._count(self._timeout)

    def _count(self, timeout: float) -> int:
        return index.count(self._opened(), timeout)

    def __contains__(self, key: object) -> bool:
        """Returns whether there is such a key."""
        return bool(index.version_of(self._opened(), encode_key(key), self._timeout))


def tell_of_wait(path: str, began: float, versions: Mapping[str, int]) -> None:
    """Tells of a wait that has found these versions, and began at this time of `perf_counter`."""
    took = (perf_counter() - began) * 1e3
    tell("wait", path, tuple(versions), 0, began)
    for key, version in versions.items():
        log.debug("%s: wait %r: version %d, %.3f ms", path, key, version, took)


def wanted_of(keys: Iterable[str] | None, prefix: str | None, newer_than: Mapping[str, int] | int) -> index.AwaitedKeys:
    """Checks the arguments of `wait_any`, and returns them as one."""
    if (keys is None) == (prefix is None):
        raise TypeError("wait_any waits for keys, or for all that start with prefix=: give one of them")
    older = older_versions(newer_than)
    than = older if isinstance(older, int) else {encode_key(key): version for key, version in older.items()}
    if prefix is not None:
        return index.AwaitedKeys(None, encode_prefix(prefix), than)
    names = tuple(dict.fromkeys(map(encode_key, several(() if keys is None else keys))))
    if not names:
        raise ValueError("there are no keys to wait for: give some, or a prefix= for those that come")
    return index.AwaitedKeys(names, b"", than)


def open_elsewhere(root: Root | None) -> Elsewhere | None:
    """Opens the way to other hosts for a root that is served: a store that stays on one host never imports it.

    Args:
        root: None: it is imported, and nothing opened.
    """
    with between_forks():
        from memstore.distributed import client

    return None if root is None else client.open_elsewhere(root)


def open_keyspace(root: str | os.PathLike[str], mode: Mode, *, timeout: float = 30.0) -> Keyspace:
    """Opens a store that exists, without its values. Arguments and errors as `memstore.open`."""
    path = absolute_path(root)
    with resource_errors(path):
        return Keyspace(open_root(path, mode, Creation(), timeout), mode, timeout=timeout)


def opened(store: Keyspace, timeout: float | None = None) -> Root:
    """Returns the root of an opened store, for parts of memstore that work with the engine. Raises StoreClosedError.

    Args:
        timeout: seconds for a forked child, which has to open the catalog anew; None: the store's.
    """
    return store._opened(timeout)  # pyright: ignore[reportPrivateUsage]


def timeout_of(store: Keyspace) -> float:
    """Returns the seconds that a call of the store waits which isn't given a timeout."""
    return store._timeout  # pyright: ignore[reportPrivateUsage]


def may_write(store: Keyspace) -> bool:
    """Returns whether the store was opened to be written too."""
    return store._mode != "r"  # pyright: ignore[reportPrivateUsage]


def check_store(store: object, key: object = "") -> None:
    """Raises TypeError unless `store` is one of `memstore.open`.

    Args:
        key: the argument that follows the store: the two may be swapped.
    """
    if isinstance(store, Keyspace):
        return
    if isinstance(key, Keyspace):
        raise TypeError("the store comes first, and then the key: here they are swapped")
    if type(store).__module__.startswith("memstore.aio."):
        raise TypeError(
            f"store is one of memstore.open, and not {an_instance(store)}: memstore.aio has ReplayBuffer, "
            "iter_weights and read_rows for that"
        )
    if isinstance(store, (str, os.PathLike)):
        raise TypeError(f"store is an open store, and not its path: write memstore.open({os.fspath(store)!r:.100})")
    raise TypeError(f"store is one of memstore.open, and not {an_instance(store)}")


def has_keys(store: Keyspace, prefix: str) -> bool:
    """Returns whether a key starts with `prefix`: without the warning of `keys`, and past damaged records too."""
    root, encoded = partial(opened, store), encode_prefix(prefix)
    return next(index.keys_from(root, encoded, timeout_of(store)), None) is not None


# --- Sharded puts that wait for the parts of other ranks -------------------------------------------------------------


def pending(root: Root, key: bytes | None, deadline: float) -> tuple[PendingInfo, ...]:
    """Returns the attempts that wait for parts: of one key, or all."""
    found: dict[tuple[bytes, str], list[tuple[PendingPart, float]]] = {}
    for part, left in pending_parts(root, key, deadline):
        found.setdefault((part.key, part.attempt), []).append((part, left))
    return tuple(
        PendingInfo(
            key=name.decode(),
            attempt=attempt,
            world_size=parts[0][0].world_size,
            ranks=tuple(part.rank for part, _ in parts),
            nbytes=sum(part.size for part, _ in parts),
            expires=time.time() + max(left for _, left in parts),
        )
        for (name, attempt), parts in found.items()
    )


def abort_attempt(root: Root, member: Participant, why: str, deadline: float) -> bool:
    """Gives an attempt up, and returns whether it was pending until now."""
    waiting = pending_parts(root, member.key, deadline)
    failure = ended(member, [part for part, _ in waiting if part.number == member.number], why)
    try:
        return give_up(root, member, failure, deadline).message == str(failure)
    except UnknownOutcomeError:
        if time.monotonic() >= deadline:  # its owner gave no answer
            raise
        return False  # it was over long ago


# --- What keys(), items() and values() return ------------------------------------------------------------------------


_T = TypeVar("_T")


class WhileRead(Iterator[_T]):
    """An iterator over a store, which is read while it is iterated over. A loop takes it from `found`, at its speed.

    Args:
        found: the keys, values, or both.
        call: how it was asked for: "keys('a/')".
        root: the store's folder.
        kind: what has all of them at once: "list", "dict".
    """

    __slots__ = ("_call", "_found", "_kind", "_root")

    def __init__(self, found: Iterator[_T], call: str, root: str, kind: str = "list") -> None:
        self._found, self._call, self._root, self._kind = found, call, root, kind

    def __iter__(self) -> Iterator[_T]:
        return self._found

    def __next__(self) -> _T:
        return next(self._found)

    def __repr__(self) -> str:
        return f"<{self._call} of {self._root}, read while they are iterated over: {self._all()} has them>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self._call} is read while it is iterated over: send the store, or {self._all()}")

    def _all(self) -> str:
        return f"{self._kind}(store.{self._call})"


# --- Prefixes that look like patterns --------------------------------------------------------------------------------


GLOB = frozenset("*?[")
_UP_TO = re.compile(r"[^*?\[]*")


def warned_if_none(keys: Iterator[str], prefix: str) -> Iterator[str]:
    """Iterates over the keys that start with `prefix`. If there are none, it warns."""
    one = None
    for one in keys:
        yield one
    if one is None:
        warnings.warn(no_match(prefix), UserWarning, stacklevel=2)


def _warned_of(keys: Iterator[str], silent: Mapping[bytes, str], prefix: str) -> Iterator[str]:
    """Iterates over keys, and then warns of the hosts that were left out."""
    yield from keys
    if silent:
        hosts = ", ".join(sorted(silent.values()))
        text = f"keys({prefix!r}, partial=True) has none of the keys of {hosts}: no answer came from there"
        warnings.warn(text, UserWarning, stacklevel=2)


def no_match(prefix: str, call: str = "keys") -> str:
    """Says, for a warning, what is wrong with a prefix that looks like a pattern, and that no key starts with."""
    plain = re.match(_UP_TO, prefix)
    start = plain[0] if plain else ""
    return (
        f"{call}({prefix!r}): no key starts with this text, in which a wildcard has no meaning; "
        f"keys({start!r}) gives all that start with {start!r}, and fnmatch.filter(store.keys(), {prefix!r}) matches"
    )
