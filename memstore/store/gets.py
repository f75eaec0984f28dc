"""The methods of a Store that get values, view them and refer to them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from memstore import contents, listing, structure
from memstore.arguments import flag, seconds_of
from memstore.engine import (
    DEFAULT_LEASE,
    MISFIT,
    MappedEntry,
    Pin,
    PinOptions,
    Root,
    hold,
    hold_at_once,
    is_served,
    mutable_entry,
    resource_errors,
)
from memstore.errors import MutableEntryError
from memstore.keys import encode_key, several
from memstore.listing import Keyspace
from memstore.store.mistakes import check_default
from memstore.store.ref import Ref, tell_of_read
from memstore.view import view

if TYPE_CHECKING:
    import torch


class _NoDefault:
    """Stands for a default that nobody gave. `help` shows it as stubs write it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "..."


NO_DEFAULT: Any = _NoDefault()
NOT_NOW: Any = object()
_OF_TASKS = 5  # calls from `check_default` up to a task's get
_AT_ONCE = 1 << 16  # bytes of a description, or of objects, that are made into a value in some hundred microseconds


class Gets(Keyspace):
    """What `Store` inherits."""

    _verify: bool
    _allow_pickle: bool

    if TYPE_CHECKING:

        def _hold_rows(self, root: Root, key: str) -> MappedEntry: ...

    def get(
        self,
        key: str,
        default: Any = NO_DEFAULT,
        *,
        out: Any = None,
        like: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        strict: bool = True,
        cast: bool = False,
        max_age: float | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Returns the value of `key` as it was put: no copy, and copy-on-write.

        A value that you hold never changes, whatever others put or delete. If you write to it, nobody else sees that.

        Args:
            key: the key.
            default: returned unchanged if there is no such key; without it, a missing key is an error.
            out: a value of the same structure, which is filled in place and returned. It is checked before anything is
                written. For a DTensor or TensorShard only this rank's part is read; such a target may lack leaves that
                other ranks hold.
            like: a value of the same structure. The result is in new memory, and has its devices, dtypes, strides,
                meshes and placements.
            device: the device of the result, as in `torch.Tensor.to`; None: that from which the value was put.
            dtype: the dtype of its floating-point leaves; None: as they were put. Other leaves keep theirs.
            non_blocking: as in `torch.Tensor.to`.
            strict: False fills only the leaves that `out` or `like` and the stored value have in common.
            cast: True casts what is copied into `out` where it has another floating-point dtype. False: that is a
                mismatch. Integers are never cast to floating-point numbers, or these to integers.
            max_age: in a store on several hosts: return the version that this process has last seen if that was at
                most so many seconds ago, without asking its home. None, or 0: the home is asked each time. If the home
                is this host, a get always returns the current version.
            timeout: seconds; None: the store's.

        Raises:
            KeyNotFoundError: no such key, and no default.
            StructureMismatchError: `out` or `like` differs; all differences are listed, and nothing was written.
            CorruptionError: the stored bytes are damaged.
            ResourceLimitError: too many open files or mappings.
            HomeUnavailableError: in a store on several hosts, the one that has the key, or its bytes, didn't answer.
            ValueError: `max_age` isn't a number of seconds.
        """
        began = perf_counter() if self._tells else 0.0
        root = self._opened(timeout)
        name = encode_key(key)
        deadline = None if timeout is None else self._deadline(timeout)
        if max_age is not None and max_age != 0:
            max_age = seconds_of("max_age", max_age, otherwise=", or None")
        options = contents.PLAIN
        if out is not None or like is not None or device is not None or dtype is not None or cast:
            options = contents.Options(
                out, like, device, dtype, non_blocking, flag("strict", strict), flag("cast", cast)
            )
        lazily = (out is not None or like is not None) and is_served(root)
        lazily = lazily and (structure.has_shards(out) or structure.has_shards(like))
        held = self._hold(root, key, name, deadline, lazily=lazily, max_age=max_age)
        if held is None:
            if default is NO_DEFAULT or default is ...:
                raise listing.no_value(root, name)
            check_default(key, default)
            return default
        self._gets += 1
        if default is not NO_DEFAULT and held.record.nbytes:
            check_default(key, default, held.record.description)
        if options is contents.PLAIN and not self._verify:
            tensor = contents.read_bare(held)
            if tensor is not None:
                if began:
                    tell_of_read(root, "get", key, held, began)
                return tensor
        value = contents.read(root, key, held, options, verify=self._verify, allow_pickle=self._allow_pickle)
        if began:
            tell_of_read(root, "get", key, held, began)
        return value

    def _get_at_once(self, key: str, default: Any) -> Any:
        """See `get_at_once`."""
        began = perf_counter() if self._tells else 0.0
        root = self._root
        if root is None or self._verify or not root.on_tmpfs or root.catalog.is_released:
            return NOT_NOW
        name = encode_key(key)
        if not root.guard.acquire(False):  # held by a thread that commits, or opens a file
            return NOT_NOW
        try:
            root.glance()
            held = hold_at_once(root, name)
        except (OSError, MemoryError):  # `get` says of what
            return NOT_NOW
        finally:
            root.guard.release()
        if held is MISFIT:
            return NOT_NOW
        if held is None:
            if is_served(root) or default is NO_DEFAULT or default is ...:
                return NOT_NOW
            check_default(key, default, depth=_OF_TASKS)
            return default
        record = held.record
        if record.is_mutable or record.objects_checksum is not None:
            return NOT_NOW
        if len(record.description) > _AT_ONCE or len(record.objects) > _AT_ONCE:
            return NOT_NOW
        value = contents.read_bare(held)
        if value is None:
            if "tensordict" not in sys.modules:  # to import it takes a second
                return NOT_NOW
            value = contents.read(root, key, held, contents.PLAIN, verify=False, allow_pickle=self._allow_pickle)
        self._gets += 1
        if default is not NO_DEFAULT and record.nbytes:
            check_default(key, default, record.description, depth=_OF_TASKS)
        if began:
            tell_of_read(root, "get", key, held, began)
        return value

    def get_many(self, keys: Iterable[str], *, timeout: float | None = None) -> dict[str, Any]:
        """Returns the values of several keys as they were at one moment, in the order of `keys`.

        Raises:
            KeyNotFoundError: some of them don't exist.
            PartialCommitError: none is missing, but one waits for the parts of other ranks.
            MutableEntryError: one is a dataset or replay buffer.
            HomeUnavailableError: in a store on several hosts, one that has a key, or its bytes, didn't answer.
        """
        root = self._opened(timeout)
        names = {key: encode_key(key) for key in several(keys)}
        with resource_errors(self.root):
            held = hold(root, tuple(names.values()), self._deadline(timeout), may_lock=self._mode != "r")
        values: dict[str, Any] = {}
        gone = [name for name, found in zip(names.values(), held, strict=True) if found is None]
        if gone:
            raise listing.no_values(root, gone, len(names), "get(key, default) gets those that are there")
        for (key, name), found in zip(names.items(), held, strict=True):
            assert found is not None, "those that are gone have raised"
            if found.record.is_mutable:
                raise mutable_entry(name, found.record.mutable_kind)
            values[key] = self._load(root, key, found)
        return values

    def _load(self, root: Root, key: str, held: MappedEntry, options: Any = None) -> Any:
        began = perf_counter() if self._tells else 0.0
        self._gets += 1
        options = contents.PLAIN if options is None else options
        value = contents.read(root, key, held, options, verify=self._verify, allow_pickle=self._allow_pickle)
        if began:
            tell_of_read(root, "get", key, held, began)
        return value

    def ref(self, key: str, *, lease: float = DEFAULT_LEASE) -> Ref:
        """Returns a picklable reference to the current version of `key`, which keeps that version.

        Args:
            key: the key.
            lease: seconds for which the version stays readable after the ref was pickled, until a receiver gets it.

        Raises:
            KeyNotFoundError: no such key.
            MutableEntryError: the key is that of a dataset or replay buffer.
            HomeUnavailableError: in a store on several hosts, the one that has the key, or its bytes, didn't answer.
        """
        root = self._opened()
        try:
            seconds = seconds_of("lease", lease)
        except (TypeError, ValueError):
            encode_key(key)
            raise
        return Ref(self._pin(root, key, seconds))

    def _ref_lazily(self, key: str) -> Ref:
        """See `ref_lazily`."""
        root = self._opened()
        held = self._held(root, key, lazily=True)
        return Ref(Pin(root, key, held.record, held, self._pin_options()))

    def view(self, key: str, *, device: torch.device | str | None = None) -> Any:
        """Returns the current version of `key` with lazy leaves: slicing one reads nothing, using it reads that part.

        The view stays at this version, can't be written, and is pickled as a reference: see docs/views.md. A view of a
        dataset has the rows that exist now, and shows what others write into them.

        Args:
            key: the key.
            device: the device to which tensors that are read from the view move; None: that from which they were put.

        Returns:
            The stored containers (TensorDict, dict, list, ...) with a `StoredTensor` for each tensor. Those that a
            container looks into (jagged, nested, quantized, unbatched, numpy arrays) are loaded.

        Raises:
            KeyNotFoundError: no such key.
            MutableEntryError: the key is that of a replay buffer.
            CrossHostError: the key is that of a dataset, whose rows are on another host.
            HomeUnavailableError: in a store on several hosts, the one that has the key, or its bytes, didn't answer.

        Example:
            >>> import memstore, tempfile, torch
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     version = store.put("policy", {"w": torch.ones(512, 4)})
            ...     rows = store.view("policy")["w"][3:5]
            ...     rows.sum()
            tensor(8.)
        """
        began = perf_counter() if self._tells else 0.0
        root = self._opened()
        held = self._held_or_rows(root, key)
        self._gets += 1
        found = view(root, key, held, self._pin_options(), device)
        if began:
            tell_of_read(root, "view", key, held, began)
        return found

    def _held_or_rows(self, root: Root, key: str) -> MappedEntry:
        try:
            return self._held(root, key, lazily=True)
        except MutableEntryError:
            pass  # what comes of its rows is no consequence of it
        with contextlib.suppress(MutableEntryError):
            return self._hold_rows(root, key)
        return self._held(root, key, lazily=True)  # a buffer; or a dataset that was sealed just now

    def _pin(
        self,
        root: Root,
        key: str,
        lease: float = DEFAULT_LEASE,
        *,
        lazily: bool = False,
        deadline: float | None = None,
    ) -> Pin:
        held = self._held(root, key, lazily=lazily, deadline=deadline)
        return Pin(root, key, held.record, held, self._pin_options(lease))

    def _pin_options(self, lease: float = DEFAULT_LEASE, *, timeout: float | None = None) -> PinOptions:
        seconds = self._timeout if timeout is None else timeout
        return PinOptions(self._mode, seconds, self._verify, self._allow_pickle, lease)

    def _held(self, root: Root, key: str, *, lazily: bool = False, deadline: float | None = None) -> MappedEntry:
        name = encode_key(key)
        held = self._hold(root, key, name, deadline, lazily=lazily)
        if held is None:
            raise listing.no_value(root, name)
        return held

    def _hold(
        self,
        root: Root,
        key: str,
        name: bytes,
        deadline: float | None,
        *,
        lazily: bool = False,
        max_age: float | None = None,
    ) -> MappedEntry | None:
        try:
            held = hold_at_once(root, name)
            if held is MISFIT or (held is None and is_served(root)):
                deadline = self._deadline(None) if deadline is None else deadline
                may_lock = self._mode != "r"
                held = hold(root, (name,), deadline, may_lock=may_lock, lazily=lazily, max_age=max_age)[0]
        except (OSError, MemoryError):
            with resource_errors(self.root, key):
                raise
        if held is not None and held.record.is_mutable:
            raise mutable_entry(name, held.record.mutable_kind)
        return held


def ref_lazily(store: Gets, key: str) -> Ref:
    """Returns `store.ref(key)` for this process only: bytes of other hosts come when they are read."""
    return store._ref_lazily(key)  # pyright: ignore[reportPrivateUsage]


def get_at_once(store: Gets, key: str, default: Any) -> Any:
    """As `store.get(key, default)` of what is here, by a call that never waits: for threads that others wait for.

    NOT_NOW where it might: for a lock, a disk, or another host; or where much is to be copied or imported.
    """
    return store._get_at_once(key, default)  # pyright: ignore[reportPrivateUsage]
