"""Store: what a user calls. A method checks its arguments, and calls one function or one protocol of the engine:

put, put_many            values.put_one, values.put_many
get, get_many            engine.hold_at_once or engine.hold, contents.read
view, ref                engine.hold, then view.view or a Ref
attach, export           values.attach_files, values.export
put_sharded, abort       sharded
save_model, load_model   models
create_dataset, ...      datasets
keys, wait, delete, ...  are inherited from `listing.Keyspace`, which needs no values
"""

# Functions of this file use what Store has.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

import msgspec

from memstore import contents, listing, structure
from memstore._arguments import (
    as_row_index,
    check_key,
    encode_key,
    expected_version,
    expected_versions,
    flag,
    history_of,
    refused_put,
    seconds_of,
    several,
    version_number,
)
from memstore._info import EntryInfo, Progress, VerifyReport
from memstore._threads import between_forks
from memstore._wording import ROWS, check_progress, names_its_methods, shown, table_html
from memstore.engine import (
    DEFAULT_LEASE,
    MISFIT,
    Creation,
    HeldVersion,
    MappedEntry,
    PinOptions,
    Root,
    RootUse,
    deadline_after,
    hold_at_once,
    index,
    is_served,
    open_root,
    resource_errors,
    take_pin,
    verify_store,
)
from memstore.errors import (
    ContentionError,
    InvalidKeyError,
    KeyNotFoundError,
    MemstoreError,
    MutableEntryError,
    PartialCommitError,
    ReadOnlyError,
    UnsupportedValueError,
    VersionConflictError,
    lacks_told,
)
from memstore.listing import Keyspace, KeyTree, Mode, WhileRead, absent, key_tree, opened
from memstore.store.values import (
    NO_DEFAULT,
    NOT_NOW,
    Pin,
    Ref,
    as_items,
    attach_files,
    check_early,
    checked,
    describe,
    doubtful_default,
    export,
    get_many,
    held_one_version,
    held_version,
    hold_one_version,
    hold_version,
    load_to_copy,
    log_read,
    pin,
    put_many,
    put_one,
    value_at_once,
)
from memstore.structure import modes
from memstore.view import view

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from memstore.datasets import Dataset, Spec
    from memstore.store.models import ModelLoad, PreparedLoad
    from memstore.store.sharded import PendingPut
    from memstore.store.values import GetOptions, ShardedPutOptions

T = TypeVar("T")
D = TypeVar("D")

_ABSENT: Any = object()
_COMPLETED = 1000  # keys that a notebook offers
_COMPLETED_WITHIN = 1.0  # seconds that it waits for other hosts
_SHOWN_WITHIN = 3.0  # seconds: a cell of a notebook doesn't wait longer for hosts that don't answer


@modes.uncompiled_methods
@names_its_methods
class Store(Keyspace):
    """A folder of nested tensors under keys, shared by every process that opens it. Made by `memstore.open`.

    Thread-safe; usable in forked children; pickled by its root, so that spawned children and queues may carry it.
    Every method raises StoreClosedError after `close`, InvalidKeyError for an invalid key, and StoreTimeoutError if it
    could not get a lock within `timeout` seconds (None: as given to `open`); one that changes something raises
    ReadOnlyError if the store was opened with mode "r".

    In a store on several hosts, methods also raise HomeUnavailableError: the host that has the key, or its bytes,
    didn't answer, and nothing was changed. If that host was asked to change something, and gave no answer, they raise
    UnknownOutcomeError.

    Attributes:
        root: the folder, as an absolute path.
    """

    def __init__(
        self,
        use: RootUse,
        mode: Mode = "r",
        *,
        verify: bool = False,
        allow_pickle: bool = False,
        timeout: float = 30.0,
        asked: Mode | None = None,
    ) -> None:
        super().__init__(use, mode, timeout=timeout, asked=asked)
        self._verify, self._allow_pickle = verify, allow_pickle
        self._as_opened = PinOptions(mode, timeout, verify, allow_pickle)

    # --- put and get --------------------------------------------------------------------------------------------------

    def put(
        self,
        key: str,
        value: Any,
        *,
        dtype: torch.dtype | None = None,
        expect_version: int | None = None,
        history: int | None = None,
        history_bytes: int | str | None = None,
        delta_of: int | bool | None = None,
        timeout: float | None = None,
    ) -> int:
        """Stores a value as the new version of `key`; readers see all of it, or nothing.

        Args:
            key: 1 to 500 bytes of UTF-8.
            value: a tensor, TensorDict, tensorclass, or dicts, lists and tuples of them and of plain objects. If it has
                DTensors or other shards, this is `put_sharded`, and every rank has to call it.
            dtype: a real floating-point dtype. Real floating-point leaves are cast to it while they are copied,
                rounded as by `torch.Tensor.to`. Leaves that share memory still share it if all of them are cast from
                one dtype; otherwise each dtype is stored separately. None: no cast.
            expect_version: the version that the key must have; 0: it must not exist.
            history: how many versions of the key stay readable from now on, this one among them, by
                `get(key, version=v)`; later puts of anybody go on with that. 1: this one alone. None: as the key has
                it, which is 1 at first.
            history_bytes: with `history`: how many bytes the replaced versions may take, as a number or text ("8GiB");
                the oldest go first. None: as many as the store has room for.
            delta_of: a version of the key, or True for the current one. Leaves that have its bytes are not stored
                again: both versions share them, and readers see no difference. That version may go at any time. Where
                it is gone, or the value shares less than half of it, the whole value is stored. In a store on several
                hosts the whole value is always stored; a host that has read that version fetches the other leaves only.
            timeout: seconds; None: the store's.

        Returns:
            The version. Versions of a key grow; they are not consecutive.

        Raises:
            UnsupportedValueError: a leaf can't be stored, or cast; the message names it. Nothing was written.
            TypeError: `dtype` isn't a real floating-point dtype.
            VersionConflictError: the key is at another version than `expect_version`.
            StoreFullError: no room, also without replaced versions, which go first. Nothing else was changed.
            CrossHostError: `history`, on storage that hosts share.
        """
        root = self._opened(timeout, writes=True)
        try:
            name = encode_key(key)
        except InvalidKeyError as error:
            raise refused_put(error, key, value) from None
        expect = None if expect_version is None else expected_version(expect_version)
        limits = None if history is None and history_bytes is None else history_of(history, history_bytes)
        base = 0 if delta_of is True else None
        if delta_of is not None and not isinstance(delta_of, bool):
            base = version_number(delta_of, "delta_of")
        deadline = deadline_after(self._timeout if timeout is None else timeout)
        allow_pickle = self._allow_pickle
        try:
            version = put_one(
                root,
                key,
                name,
                value,
                dtype=dtype,
                expect=expect,
                allow_pickle=allow_pickle,
                deadline=deadline,
                history=limits,
                delta_of=base,
            )
        except UnsupportedValueError:
            if limits is not None or not structure.has_shards(value):
                raise
            return self.put_sharded(key, value, dtype=dtype, expect_version=expect, timeout=timeout)
        self._puts += 1
        return version

    @overload
    def get(self, key: str, default: Any = ..., *, as_type: None = None, **options: Unpack[GetOptions]) -> Any: ...
    @overload
    def get(self, key: str, *, as_type: type[T], **options: Unpack[GetOptions]) -> T: ...
    @overload
    def get(self, key: str, default: D, *, as_type: type[T], **options: Unpack[GetOptions]) -> T | D: ...
    def get(
        self,
        key: str,
        default: Any = NO_DEFAULT,
        *,
        as_type: Any = None,
        out: Any = None,
        like: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        strict: bool = True,
        cast: bool = False,
        max_age: float | None = None,
        version: int | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Returns the value of `key` as it was put: no copy, and copy-on-write.

        A value that you hold never changes, whatever others put or delete. If you write to it, nobody else sees that.

        Args:
            default: returned unchanged if there is no such key; without it, a missing key is an error.
            as_type: the type of the value, for type checkers, and as a check: `get("policy", as_type=TensorDict)`.
                Of `dict[str, torch.Tensor]` only the class is checked, and of a TypedDict the keys that it requires.
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
                most so many seconds ago, without asking its owner. None, or 0: the owner is asked each time. If this
                host owns the key, a get always returns the current version.
            version: the version to be read: the current one, or one that was replaced and is kept (`put(history=)`,
                `versions`). None: the current one.
            timeout: seconds; None: the store's.

        Raises:
            KeyNotFoundError: no such key, and no default.
            VersionGoneError: it has no such `version` any more, or not yet, and no default was given.
            StructureMismatchError: `out` or `like` differs; all differences are listed, and nothing was written. Or the
                value isn't of type `as_type`.
            CorruptionError: the stored bytes are damaged.
            ResourceLimitError: too many open files or mappings.
            ValueError: `max_age` isn't a number of seconds.
        """
        began = perf_counter() if self._tells else 0.0
        root = self._opened(timeout)
        name = encode_key(key)
        deadline = None if timeout is None else self._deadline(timeout)
        if max_age is not None and max_age != 0:
            max_age = seconds_of("max_age", max_age, otherwise=", or None")
        options, lazily = contents.PLAIN_READ, False
        if out is not None or like is not None or device is not None or dtype is not None or cast:
            options = contents.ReadOptions(
                out, like, device, dtype, non_blocking, flag("strict", strict), flag("cast", cast)
            )
            lazily = is_served(root) and (structure.has_shards(out) or structure.has_shards(like))
        if version is not None:
            return self._get_version(key, version_number(version), default, as_type, options, deadline, began)
        try:
            held = hold_at_once(root, name)
        except (OSError, MemoryError):
            held = MISFIT  # `hold_version` tries once more, and says what is lacking
        if held is MISFIT or (held is None and is_served(root)):
            held = hold_version(root, key, name, self._as_opened, deadline, lazily=lazily, max_age=max_age)
        if default is not NO_DEFAULT and default is not ...:
            doubt = doubtful_default(key, default, held)
            if doubt is not None:
                warnings.warn(doubt, UserWarning, stacklevel=2)
            if held is None:
                return default
        if held is None:
            raise listing.no_value(root, name)
        self._gets += 1
        value = contents.read(root, key, held, options, verify=self._verify, allow_pickle=self._allow_pickle)
        if began:
            log_read(root, "get", key, held, began)
        return value if as_type is None else checked(key, value, as_type)

    def _get_version(
        self,
        key: str,
        version: int,
        default: Any,
        as_type: Any,
        options: contents.ReadOptions,
        deadline: float | None,
        began: float,
    ) -> Any:
        """Returns one version of a key, or the default if it has no such version. Errors as `get`."""
        root, until = self._opened(), self._deadline(None) if deadline is None else deadline
        if default is NO_DEFAULT or default is ...:
            held = held_one_version(root, key, version, self._as_opened, until)
        else:
            held = hold_one_version(root, key, version, self._as_opened, until)
        if held is None:
            return default
        self._gets += 1
        value = contents.read(root, key, held, options, verify=self._verify, allow_pickle=self._allow_pickle)
        if began:
            log_read(root, "get", key, held, began)
        return value if as_type is None else checked(key, value, as_type)

    # --- puts of several keys, and those of a mapping -----------------------------------------------------------------

    def put_many(
        self,
        items: Mapping[str, Any],
        *,
        dtype: torch.dtype | None = None,
        expect_versions: Mapping[str, int] | None = None,
        delta_of: bool = False,
        atomic: bool = True,
        timeout: float | None = None,
    ) -> dict[str, int]:
        """Stores several values, which become visible at one moment, or not at all. Arguments and errors as `put`.

        `expect_versions` has the versions that keys of `items` must have, by key; 0: the key must not exist. With
        `delta_of`, each value may share bytes with the current version of its key.

        In a store on several hosts, all keys of one call must have the same owner, as keys with the same text before
        the first "/" have; otherwise CrossHostError is raised, and nothing is put. With `atomic` False there is one
        moment for each owner, and after an error the values that were put at other owners stay.
        """
        root, items = self._opened(timeout, writes=True), as_items(items)
        flag("atomic", atomic)
        flag("delta_of", delta_of)
        expected, deadline = expected_versions(expect_versions), self._deadline(timeout)
        if not items:
            return {}
        allow_pickle = self._allow_pickle
        versions = put_many(
            root,
            items,
            dtype=dtype,
            expected=expected,
            atomic=atomic,
            allow_pickle=allow_pickle,
            deadline=deadline,
            is_delta=delta_of,
        )
        self._puts += len(versions)
        return versions

    def update(self, items: Mapping[str, Any]) -> dict[str, int]:
        """Stores several values, as `put_many`."""
        return self.put_many(as_items(items, "update"))

    def setdefault(self, key: str, value: Any) -> Any:
        """Returns the value of `key`. If there is no such key, puts `value` first; of several processes only one does.

        Args:
            value: as for `put`. The result is what a `get` of the key returns.

        Raises:
            ContentionError: others put and delete the key again and again, until the store's timeout.
            MemstoreError: those of `put` and `get`.

        Example:
            >>> import memstore, tempfile
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     store.setdefault("seed", 1), store.setdefault("seed", 2)
            (1, 1)
        """
        self._opened(writes=True)
        deadline = self._deadline(None)
        while True:
            found = self.get(key, _ABSENT)
            if found is not _ABSENT:
                return found
            try:
                self.put(key, value, expect_version=0)
            except VersionConflictError:
                if time.monotonic() > deadline:
                    _changed_too_fast(key)

    # --- gets of several keys, of references and views ----------------------------------------------------------------

    def get_many(self, keys: Iterable[str], *, timeout: float | None = None) -> dict[str, Any]:
        """Returns the values of several keys as they were at one moment, in the order of `keys`.

        Raises:
            KeyNotFoundError: some of them don't exist.
            PartialCommitError: none is missing, but one waits for the parts of other ranks.
            MutableEntryError: one is a dataset or replay buffer.
        """
        began = perf_counter() if self._tells else 0.0
        root = self._opened(timeout)
        values = get_many(root, several(keys), self._as_opened, self._deadline(timeout), began)
        self._gets += len(values)
        return values

    def pop(self, key: str, default: Any = NO_DEFAULT) -> Any:
        """Deletes a key, and returns its value. If several processes pop one version, only one of them gets it.

        Args:
            default: returned unchanged if there is no such key; without it, a missing key is an error.

        Raises:
            KeyNotFoundError: no such key, and no default.
            MutableEntryError: the key is that of a dataset or replay buffer, which `delete` frees.
            ContentionError: others replaced the key again and again, until the store's timeout.

        Example:
            >>> import memstore, tempfile
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     version = store.put("job", "train")
            ...     store.pop("job"), store.pop("job", None)
            ('train', None)
        """
        self._opened(writes=True)
        deadline = self._deadline(None)
        while True:
            try:
                ref = self.ref(key)
            except (KeyNotFoundError, PartialCommitError):
                if default is NO_DEFAULT or default is ...:
                    raise
                return default
            value = ref.get()
            try:
                self.delete(key, expect_version=ref.version)
            except VersionConflictError:
                if time.monotonic() > deadline:
                    _changed_too_fast(key)
            else:
                return value

    def ref(self, key: str, *, lease: float = DEFAULT_LEASE, version: int | None = None) -> Ref:
        """Returns a picklable reference to the current version of `key`, which keeps that version.

        Args:
            lease: seconds for which the version stays readable after the ref was pickled, until a receiver gets it.
            version: another version, as in `get`.

        Raises:
            KeyNotFoundError: no such key.
            VersionGoneError: it has no such `version` any more, or not yet.
            MutableEntryError: the key is that of a dataset or replay buffer.
        """
        root = self._opened()
        try:
            seconds = seconds_of("lease", lease)
        except (TypeError, ValueError):
            encode_key(key)
            raise
        options = msgspec.structs.replace(self._as_opened, lease=seconds)
        if version is None:
            return Ref(pin(root, key, options))
        held = self._held(root, key, version)
        return Ref(HeldVersion(root, key, held.record, held, options))

    def pin(self, key: str, *, version: int | None = None, timeout: float | None = None) -> Pin:
        """Pins a version of `key`: everybody can read it by `get(key, version=v)` as long as this process has the pin.

        Whatever others put, delete or clear, it stays, and doesn't go where the store is full. A pin ends when it is
        closed, when nothing refers to it any more, or with its process, however that ends.

        Args:
            key: the key.
            version: the version to be pinned, as in `get`; None: the current one.
            timeout: seconds; None: the store's.

        Returns:
            A `Pin`, which is a context manager.

        Raises:
            KeyNotFoundError: no such key.
            VersionGoneError: it has no such `version` any more, or not yet.
            MutableEntryError: the key is that of a dataset or replay buffer.
            CrossHostError: in a store on several hosts.

        Example:
            >>> import memstore, tempfile
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     version = store.put("policy", "first")
            ...     with store.pin("policy") as pin:
            ...         newer = store.put("policy", "second")
            ...         store.get("policy", version=pin.version)
            ...     store.versions("policy") == (newer,)
            'first'
            True
        """
        root, name = self._opened(timeout, writes=True), encode_key(key)
        wanted = None if version is None else version_number(version)
        with resource_errors(self.root, key, root):
            taken = take_pin(root, name, wanted, self._deadline(timeout))
        if taken is None:
            raise listing.no_value(root, name) if wanted is None else listing.version_gone(root, name, wanted)
        return Pin(root, taken, self._timeout)

    def _held(self, root: Root, key: str, version: int | None, *, lazily: bool = False) -> MappedEntry:
        """Returns a version of a key; None: the current one. Raises KeyNotFoundError, VersionGoneError."""
        if version is None:
            return held_version(root, key, self._as_opened, lazily=lazily)
        until = self._deadline(None)
        return held_one_version(root, key, version_number(version), self._as_opened, until, lazily=lazily)

    @overload
    def view(
        self, key: str, *, device: torch.device | str | None = None, version: int | None = None, as_type: None = None
    ) -> Any: ...
    @overload
    def view(
        self, key: str, *, device: torch.device | str | None = None, version: int | None = None, as_type: type[T]
    ) -> T: ...
    def view(
        self, key: str, *, device: torch.device | str | None = None, version: int | None = None, as_type: Any = None
    ) -> Any:
        """Returns the current version of `key` with lazy leaves: slicing one reads nothing, using it reads that part.

        The view stays at this version, can't be written, and is pickled as a reference: see docs/views.md. A view of a
        dataset has the rows that exist now, and shows what others write into them.

        Args:
            device: the device to which tensors that are read from the view move; None: that from which they were put.
            version: the version to be viewed, as in `get`; None: the current one.
            as_type: the type of the view, as in `get`: `dict[str, memstore.StoredTensor]`.

        Returns:
            The stored containers (TensorDict, dict, list, ...) with a `StoredTensor` for each tensor. Those that a
            container looks into (jagged, nested, quantized, unbatched, numpy arrays) are loaded.

        Raises:
            KeyNotFoundError: no such key.
            VersionGoneError: it has no such `version` any more, or not yet.
            StructureMismatchError: it isn't of type `as_type`.
            MutableEntryError: the key is that of a replay buffer.
            CrossHostError: the key is that of a dataset, whose rows are on another host.

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
        try:
            held = self._held(root, key, version, lazily=True)
        except MutableEntryError:
            held = None  # an error of the dataset's has another cause: it isn't chained to this one
        if held is None:
            with between_forks():
                from memstore.datasets import hold_rows
            with contextlib.suppress(MutableEntryError):
                held = hold_rows(root, key, self._timeout)
        if held is None:  # a buffer; or a dataset that was sealed just now
            held = held_version(root, key, self._as_opened, lazily=True)
        self._gets += 1
        found = view(root, key, held, self._as_opened, device)
        if began:
            log_read(root, "view", key, held, began)
        return found if as_type is None else checked(key, found, as_type)

    # --- the names that a mapping has ---------------------------------------------------------------------------------
    # It is no MutableMapping, whose `get` never raises, and which compares by contents.

    def __getitem__(self, key: str) -> Any:
        """Returns the value of a key, as `get(key)`."""
        try:
            return self.get(key)
        except InvalidKeyError as error:
            raise as_row_index(error, key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        """Stores a value, as `put(key, value)`."""
        self.put(key, value)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Iterates over keys and values; keys that are deleted meanwhile are left out. Errors as `keys` and `get`."""
        return WhileRead(self._items(), "items()", self.root, "dict")

    def _items(self) -> Iterator[tuple[str, Any]]:
        for key in self.keys():
            value = self.get(key, _ABSENT)
            if value is not _ABSENT:
                yield key, value

    def values(self) -> Iterator[Any]:
        """Iterates over the values, as `items`."""
        return WhileRead((value for _, value in self._items()), "values()", self.root)

    def tree(self, prefix: str = "") -> KeyTree:
        """Draws the keys that start with `prefix` as a tree, split at each "/"; print it, or show it in a notebook.

        Args:
            prefix: as for `keys`.

        Returns:
            A `KeyTree`. Its text is the drawing.

        Example:
            >>> import memstore, tempfile
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     versions = store.put_many({"runs/1": 1.0, "runs/2": 2.0, "seed": 7})
            ...     len(store.tree("runs/"))
            2
        """
        return key_tree(self, prefix)

    # --- values that several ranks hold in part -----------------------------------------------------------------------

    @overload
    def put_sharded(
        self, key: str, value: Any, *, wait: Literal[True] = True, **options: Unpack[ShardedPutOptions]
    ) -> int: ...
    @overload
    def put_sharded(
        self, key: str, value: Any, *, wait: Literal[False], **options: Unpack[ShardedPutOptions]
    ) -> PendingPut: ...
    @overload
    def put_sharded(
        self, key: str, value: Any, *, wait: bool, **options: Unpack[ShardedPutOptions]
    ) -> int | PendingPut: ...
    def put_sharded(
        self,
        key: str,
        value: Any,
        *,
        attempt: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: Any = None,
        dtype: torch.dtype | None = None,
        expect_version: int | None = None,
        wait: bool = True,
        lease: float = 600.0,
        timeout: float | None = None,
    ) -> int | PendingPut:
        """Stores a value of which each rank holds a part. Every rank calls it; all parts become visible at one moment.

        Leaves may be DTensors, TensorShards and ShardedTensors, of which each rank stores its own boxes; equal boxes
        are stored once, and must be equal. Plain tensors and objects are the lowest rank's; if others hold different
        ones, a warning says so. Ranks may hold different leaves: dicts merge by key, all else must agree.

        Args:
            key: as in `put`.
            value: the part of the value that this rank holds.
            attempt: with `rank` and `world_size`, a text that the ranks of this put share, and no other put has: a
                launcher that restarts ranks should include the number of the restart. Alone, with torch.distributed, a
                text such as "step 12", by which the ranks of `process_group` find each other, even if one has left out
                a put. None: the puts of this key are matched by their order.
            rank: this rank, from 0; None: its rank in `process_group`.
            world_size: how many ranks there are; None: as many as `process_group` has.
            process_group: of torch.distributed; None: the default one. No collective is called.
            dtype: floating leaves are cast to it, as in `put`.
            expect_version: as in `put`; it is compared when all parts are there.
            wait: False returns once rank 0 has begun, so that this process may exit, or do something else.
            lease: seconds for which this part waits for the others, with wait=False.
            timeout: seconds to wait for the other ranks; None: the store's. When it is over, the put is given up for
                all ranks: a put that raised is never published later.

        Returns:
            The version, which all ranks get; with wait=False a `PendingPut`.

        Raises:
            ShardMismatchError: ranks hold a leaf in different shapes, dtypes or bytes; it names leaf and ranks.
            PartialCommitError: no rank holds some part of a leaf, or a rank failed.
            StoreTimeoutError: it names the ranks that put nothing.
            TypeError: the rank of this process isn't known.
            UnsupportedValueError, VersionConflictError, StoreFullError: as in `put`.
            UnknownOutcomeError: the put could not be given up in time, so it may still be published.

        Example:
            >>> import memstore, tempfile, torch
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     for rank in range(2):  # as two processes would
            ...         shard = memstore.TensorShard(torch.full((1, 3), rank), global_shape=(2, 3), offsets=(rank, 0))
            ...         pending = store.put_sharded("w", shard, attempt="first", rank=rank, world_size=2, wait=False)
            ...     version = pending.wait()
            ...     store.get("w")
            tensor([[0, 0, 0],
                    [1, 1, 1]])
        """
        with between_forks():
            from memstore.store.sharded import find_rank, put_sharded
            from memstore.structure import take_shards_apart

        seconds = self._timeout if timeout is None else timeout
        deadline_after(seconds)  # raises for what is no number of seconds
        root = self._opened(timeout, writes=True)
        encode_key(key)
        flag("wait", wait)
        if expect_version is not None:
            expect_version = expected_version(expect_version)
        lease = seconds_of("lease", lease)
        place = find_rank(attempt, rank, world_size, process_group, key, root)
        put = put_sharded(
            root,
            key,
            partial(take_shards_apart, value, allow_pickle=self._allow_pickle),
            place,
            dtype=dtype,
            expect=expect_version,
            wait=wait,
            lease=lease,
            timeout=seconds,
        )
        self._puts += 1
        return put

    def save_model(
        self,
        key: str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        dtype: torch.dtype | None = None,
        process_group: Any = None,
        timeout: float | None = None,
    ) -> int:
        """Stores a module's state, and its optimizer's, as `{"model": ..., "optimizer": ...}`.

        With torch.distributed every rank calls it, and this is a `put_sharded`. If `fully_shard` or
        `parallelize_module` has sharded the module, or it is a pipeline stage, each rank stores its parts; for replicas
        rank 0 does. The names are those of the unwrapped module: without `module.` of DistributedDataParallel and
        `_orig_mod.` of torch.compile.

        Args:
            key: as in `put`.
            model: any module except FullyShardedDataParallel (use `fully_shard`).
            optimizer: of the model's parameters; its states are stored by their names.
            dtype: the module's floating tensors are cast to it, as in `put`; the optimizer's states never are.
            process_group: as in `put_sharded`.
            timeout: as in `put_sharded`.

        Returns:
            The version, which all ranks get.

        Raises:
            UnsupportedValueError: FullyShardedDataParallel, or a parameter of the optimizer that is not the model's.
            MemstoreError: with torch.distributed those of `put_sharded`, and without it those of `put`.

        Example:
            >>> import memstore, tempfile, torch
            >>> trained, fresh = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     version = store.save_model("policy", trained)
            ...     store.load_model("policy", fresh) == version
            True
            >>> torch.equal(trained.weight, fresh.weight)
            True
        """
        with between_forks():
            from memstore.store.models import save_model

        root = self._opened(timeout, writes=True)
        check_key("save_model", key, model)
        deadline = self._deadline(timeout)
        seconds = self._timeout if timeout is None else timeout
        allow_pickle = self._allow_pickle
        version = save_model(root, key, model, optimizer, process_group, dtype, allow_pickle, deadline, seconds)
        self._puts += 1
        return version

    def load_model(
        self,
        key: str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        strict: bool = True,
        cast: bool = False,
        newer_than: int | None = None,
        process_group: Any = None,
        timeout: float | None = None,
    ) -> int:
        """Fills a module, and its optimizer, in place with the values that `save_model` has stored, from any mesh.

        A state_dict that was put is read, too: `store.put(key, model.state_dict())`.

        With torch.distributed every rank calls it. All of them load the version that rank 0 finds, whatever others put
        meanwhile, or all raise. Each rank reads its own boxes (parts of tensors), directly into the module's tensors.

        If the value doesn't fit on one rank, all raise before any rank writes. If a copy fails, for example because of
        damaged bytes, all ranks raise, and their modules may be filled in part: load again before you use them.

        Args:
            key: as in `get`.
            model: a module with the same names, shapes and (without `cast`) dtypes, wrapped and sharded in any way.
            optimizer: one that has no states yet gets them. None: stored states of an optimizer are ignored.
            strict: names that are missing, or that no rank has a place for, are an error. False: they are ignored;
                differing shapes and dtypes are still an error.
            cast: True casts floating-point values to the module's dtypes. False: other dtypes are an error.
            newer_than: wait first for a version that is newer than this one.
            process_group: of torch.distributed; None: the default one. No collective is called.
            timeout: seconds until this rank's copy begins, and again for the other ranks once it is done; None: the
                store's.

        Returns:
            The version.

        Raises:
            KeyNotFoundError: no such key.
            StructureMismatchError: it doesn't fit, or what is stored lacks an option that an optimizer of torch needs,
                as another one's does; all differences are listed, and no rank has loaded anything.
            StoreTimeoutError: there was no newer version in time, or a rank did not come, which is named.
            CorruptionError: the stored bytes are damaged. The other ranks raise what one rank does, and name it.
        """
        check_key("load_model", key, model)
        seconds = self._timeout if timeout is None else timeout
        deadline = deadline_after(seconds)
        strict, cast = flag("strict", strict), flag("cast", cast)  # before other ranks wait for this one
        load = begin_load(self, key, process_group, seconds)
        wait = None if newer_than is None else partial(self.wait, key, newer_than=newer_than, timeout=seconds)
        return load.fill(model, optimizer, strict=strict, cast=cast, wait=wait, deadline=deadline, timeout=seconds)

    # --- entries whose rows are written in place ----------------------------------------------------------------------

    def create_dataset(
        self, key: str, spec: Spec, *, capacity: int, length: int = 0, timeout: float | None = None
    ) -> Dataset:
        """Makes a dataset: rows of tensors that every process of the host writes and reads in place.

        All of its space is reserved now.

        Args:
            key: a key that doesn't exist.
            spec: describes a row: `{"x": ((84, 84, 4), torch.uint8), "y": ((), torch.int64), "more": {...}}`; one
                `(shape, dtype)`; or an example of a row: a TensorDict, a tensorclass, a tensor, a dict of tensors.
            capacity: the most rows that it can ever have.
            length: how many rows of zeros it has from the start, to be written by `dataset[i:j] = batch`.
            timeout: seconds; None: the store's.

        Returns:
            The dataset, open to read and write.

        Raises:
            AlreadyExistsError: the key exists already.
            StoreFullError: no room for all of its rows. Nothing was changed.
            TypeError, ValueError: `spec`, `capacity` or `length` is invalid.
            UnsupportedValueError: a leaf that can't be written in place.

        Example:
            >>> import memstore, tempfile, torch
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     data = store.create_dataset("frames", {"x": ((2,), torch.float32)}, capacity=1000)
            ...     data.extend({"x": torch.ones(3, 2)})
            ...     data[1:3]["x"].sum()
            range(0, 3)
            tensor(4.)
        """
        root, deadline = self._before_a_creation(timeout)
        with between_forks():
            from memstore.datasets import create_dataset

        check_key("create_dataset", key, spec, "the spec")
        seconds = self._timeout if timeout is None else timeout
        return create_dataset(root, key, spec, capacity, length, seconds, deadline)

    def create_dataset_from(
        self, key: str, value: Any, *, capacity: int | None = None, timeout: float | None = None
    ) -> Dataset:
        """Makes a dataset from a batch; it has the rows of the batch from the start.

        Args:
            key: a key that doesn't exist.
            value: a batch of rows: a TensorDict, a tensorclass, a tensor or a dict of tensors whose first dimension
                counts the rows; a view too.
            capacity: the most rows that it can ever have; None: the number of rows of `value`.
            timeout: seconds; None: the store's.

        Returns:
            The dataset, open to read and write.

        Raises:
            MemstoreError, TypeError, ValueError: as `create_dataset`.
        """
        root, deadline = self._before_a_creation(timeout)
        with between_forks():
            from memstore.datasets import create_dataset_from

        check_key("create_dataset_from", key, value, "the rows")
        seconds = self._timeout if timeout is None else timeout
        return create_dataset_from(root, key, value, capacity, seconds, deadline)

    def _before_a_creation(self, timeout: float | None) -> tuple[Root, float]:
        """Returns the root, and the call's deadline.

        The first creation of a process imports tensordict, which takes a second. Whoever can't have the store's mutex
        is told so in time, and not after that second.
        """
        deadline = self._deadline(timeout)
        root = self._opened(timeout, writes=True)
        if "tensordict" not in sys.modules:
            with resource_errors(self.root, None, root):
                root.mutex.run(lambda: None, deadline)
        return root, deadline

    def open_dataset(self, key: str, mode: Literal["r", "r+"] = "r+", *, wait: float | None = None) -> Dataset:
        """Opens a dataset that some process of the host has made.

        Args:
            key: its key.
            mode: "r+" reads and writes. "r" only reads: if you write to its tensors nevertheless, the change stays in
                this process, which no longer sees what others write to those pages.
            wait: seconds to wait until somebody has made it; None: it must exist.

        Returns:
            The dataset, open to read, and with "r+" to write.

        Raises:
            KeyNotFoundError: no such key, and no `wait`.
            StoreTimeoutError: nobody has made it within `wait` seconds.
            MutableEntryError: the key is that of another kind of entry.
            ReadOnlyError: mode "r+", and the store was opened with mode "r".
            CorruptionError: the file is damaged.
            CrossHostError: its rows are on another host.
        """
        with between_forks():
            from memstore.datasets import open_dataset
            from memstore.engine import index

        if mode not in ("r", "r+"):
            raise ValueError(f"mode is 'r' or 'r+', and not {mode!r}")
        if mode == "r+" and self._mode == "r":
            raise ReadOnlyError(
                f"{self.root} was opened with mode 'r', and a dataset is opened with mode 'r+' unless you say "
                f"otherwise: open_dataset({key!r}, 'r') reads its rows",
                key=key,
            )
        root, name = self._opened(), encode_key(key)
        if wait is not None:
            index.wait_for(self._opened, name, 0, wait, mutable=True)
        try:
            return open_dataset(root, key, self._timeout, writable=mode != "r")
        except KeyNotFoundError:
            raise absent(root, name) from None

    # --- files of other programs --------------------------------------------------------------------------------------

    def attach(
        self,
        key: str,
        path: str | os.PathLike[str],
        *,
        format: Literal["safetensors", "memmap", "torch", "npy"] | None = None,
        copy: bool = False,
        expect_version: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Makes existing files the new version of `key`, without a copy: gets map them in place.

        The files keep their place and their owner. If one is replaced or deleted, the next get raises an error. But if
        it is changed in place, values that were got before change too, which never happens to values that were put.

        Args:
            path: a safetensors file, the index of a checkpoint of several, a folder that has either, a folder that
                `TensorDict.memmap` wrote, a file of `torch.save`, or a `.npy`; or the folder of a `Snapshot`, whose
                value is a dict of rank 0's state dicts.
            format: which of these it must be; None: memstore recognizes it.
            copy: put a copy of the value instead; the entry then no longer depends on the files. This also takes
                values that can't be served in place.
            expect_version: as in `put`.
            timeout: as in `put`.

        Returns:
            The version.

        Raises:
            CorruptionError: a file is truncated, or is not what its format says.
            UnsupportedValueError: it has values that can't be served in place, or that only pickle can read; or
                `format` is another one than the files have.
            PermissionDeniedError: the folder has a link that leads out of it.
            FileNotFoundError: there is nothing at `path`.
            VersionConflictError, StoreFullError: as in `put`.
        """
        root, allow_pickle = self._opened(timeout, writes=True), self._allow_pickle
        encode_key(key)
        deadline = self._deadline(timeout)
        if expect_version is not None:
            expect_version = expected_version(expect_version)
            check_early(root, {key: expect_version})
        if flag("copy", copy):
            with resource_errors(self.root, key, root):
                value = load_to_copy(key, path, format, allow_pickle=allow_pickle)
            return self.put(key, value, expect_version=expect_version, timeout=timeout)
        version = attach_files(
            root, key, path, format, expect=expect_version, allow_pickle=allow_pickle, deadline=deadline
        )
        self._puts += 1
        return version

    def export(
        self,
        key: str,
        path: str | os.PathLike[str],
        *,
        format: Literal["safetensors", "memmap", "torch"] = "safetensors",
        max_shard_size: int | str | None = None,
        version: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Writes the value of `key` to files for other programs. They appear at `path` completely, or not at all.

        Args:
            path: a file, which is replaced if it exists; or a folder, which must be missing or empty. It is a folder
                for memmap, and for safetensors with `max_shard_size` or if `path` is a folder or ends with "/".
            format: "safetensors": the tensors by their names joined with ".", in C order, tied ones stored separately.
                "memmap": for `TensorDict.load_memmap`; dicts become TensorDicts. "torch": for `torch.load`, which needs
                `weights_only=False` if the value has numpy arrays or instances of classes.
            max_shard_size: bytes, or text ("5GB"): safetensors are written as a Hugging Face checkpoint, in several
                files with an index if need be.
            version: the version to be written, as in `get`; None: the current one.
            progress: called with the bytes done and those in all.

        Raises:
            KeyNotFoundError: no such key.
            VersionGoneError: it has no such `version` any more, or not yet.
            UnsupportedValueError: the format can't represent a leaf, which is named. Nothing was written.
            AlreadyExistsError: the folder isn't empty.
            StoreFullError, ResourceLimitError: there is no room, or a file may be no larger. Nothing is left.
            ValueError: `path` ends in the suffix of another format (.pt, .pth, .ckpt, .bin, .npy, .npz, .safetensors).
        """
        with between_forks():
            from memstore.formats import check_export

        check_progress(progress)
        target, limit = check_export(path, format, max_shard_size)
        root = self._opened()
        held = self._held(root, key, version)
        self._gets += 1
        export(
            root,
            key,
            held,
            target,
            format,
            limit=limit,
            progress=progress,
            verify=self._verify,
            allow_pickle=self._allow_pickle,
        )

    def export_hf(
        self,
        key: str,
        path: str | os.PathLike[str],
        *,
        config: Any = None,
        max_shard_size: int | str = "5GB",
        dtype: torch.dtype | None = None,
        prefix: str = "",
        link: bool = False,
        version: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Writes the weights of `key` to a folder that `from_pretrained` and other readers of Hugging Face's load.

        Of what `save_model` has stored these are the module's tensors. The folder appears completely, or not at all.
        Of an entry that was attached, the files themselves are copied if they have just these tensors: by the kernel,
        and without a copy on btrfs and xfs, which let both files share their blocks.

        Args:
            path: a folder, which must be missing or empty.
            config: what becomes `config.json`: a model's configuration, a dict, or the path of a `config.json`. Or a
                folder that has one, such as that of the model before it was trained: what else lies there, such as a
                tokenizer, is copied too, except for weights and folders.
            max_shard_size: bytes, or text: larger models are written as several files with an index.
            dtype: floating-point tensors are cast to it, and `config.json` says so.
            prefix: removed from the front of the names; tensors without it are left out.
            link: the files of an attached entry become hard links, if both are on one file system. Then nobody may
                write to files in the folder: that would change the attached ones.
            version: the version to be written, as in `get`; None: the current one.
            progress: called with the bytes done and those in all.

        Raises:
            KeyNotFoundError: no such key.
            VersionGoneError: it has no such `version` any more, or not yet.
            UnsupportedValueError: a leaf can't be written, which is named.
            AlreadyExistsError: the folder isn't empty.
            FileNotFoundError: there is no `config`, or it is a folder without a `config.json`.
            StoreFullError, ResourceLimitError: there is no room. Nothing is left.
            CorruptionError: an attached file isn't what it was, or `config` is no JSON.
            ValueError: no name starts with `prefix`, or two tensors have one name when names are joined by dots.

        Example:
            >>> import memstore, os, tempfile, torch
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     version = store.save_model("policy", torch.nn.Linear(2, 1))
            ...     store.export_hf("policy", store.root + "-policy", config={"model_type": "my-model"})
            >>> sorted(os.listdir(store.root + "-policy"))
            ['config.json', 'model.safetensors']
        """
        with between_forks():
            from memstore.formats import check_export
            from memstore.store.named_weights import export_hf

        check_progress(progress)
        target, limit = check_export(path, "safetensors", max_shard_size)
        if target.endswith(".safetensors"):
            raise ValueError(f"{target}: export_hf writes a folder: choose another name, or Store.export writes a file")
        if dtype is not None:
            structure.check_dtype(dtype)
        link = flag("link", link)
        root = self._opened()
        held = self._held(root, key, version, lazily=True)
        self._gets += 1
        with lacks_told(target):
            export_hf(
                key,
                held.record,
                view(root, key, held, self._as_opened, "cpu"),
                os.path.abspath(target),
                config=config,
                limit=limit,
                dtype=dtype,
                prefix=prefix,
                link=link,
                progress=progress,
                durable=root.settings.durable,
            )

    # --- the store ----------------------------------------------------------------------------------------------------

    def info(self, key: str) -> EntryInfo:
        """Describes the current version of `key`, without reading its tensors.

        Raises:
            KeyNotFoundError: no such key.
            CorruptionError: its description is damaged.
        """
        return describe(self._opened(), key, self._timeout)

    def set_policy(
        self,
        prefix: str = "",
        *,
        replicas: int | Literal["async"] | None = None,
        on_missing: Literal["fail", "warn"] = "fail",
        timeout: float | None = None,
    ) -> None:
        """States on how many hosts of a cluster values are to lie. It holds on all hosts, and after they are restarted.

        With 2, a put returns when its value lies on the host that owns its key and on another one: the death of one
        host takes nothing that was put. What is there already gets its replica in the background. Sharded puts return
        without waiting for theirs; datasets and replay buffers have none before they are sealed.

        Args:
            prefix: a group: the text of keys before their first ``/``, which may end in it. Empty: all groups that have
                no policy of their own.
            replicas: 2; "async": the second host gets a value after its put has returned; 1: none does; None: the
                prefix has no policy of its own any more.
            on_missing: of a put that finds no second host: "fail" raises NotReplicatedError, and "warn" says so in the
                log of ``memstore``. The value was put in both cases, and gets its replica when a host can have it.
            timeout: seconds; None: the store's.

        Raises:
            NotServedError: the store isn't served.
            HomeUnavailableError: the seed doesn't answer.
            ValueError: another number, or a prefix with more after a ``/``.

        Example:
            >>> store.set_policy("policy", replicas=2, on_missing="warn")  # doctest: +SKIP
        """
        with between_forks():
            from memstore.distributed.serving import Cluster

        self._opened()
        seconds = self._timeout if timeout is None else timeout
        deadline_after(seconds)  # or ValueError
        Cluster(self.root).set_policy(prefix, replicas=replicas, on_missing=on_missing, timeout=seconds)

    def verify(self, keys: Iterable[str] | None = None, *, progress: Progress | None = None) -> VerifyReport:
        """Looks for damage: in the catalog, and in the records, files and bytes of `keys`, or of all.

        Others may go on reading and writing; if they replace a key meanwhile, its new version is checked.

        Args:
            keys: the keys to check; one that doesn't exist is reported among the damaged ones. None: all.
            progress: called with the bytes done, and the bytes in all.

        Returns:
            A report. Damage is listed in it, and raises nothing.

        Raises:
            ResourceLimitError: this process lacks files, memory or processes to look.

        Example:
            >>> import memstore, tempfile, torch
            >>> with memstore.open(tempfile.mkdtemp(), checksum=True) as store:
            ...     version = store.put("policy", torch.ones(1000))
            ...     store.verify()
            memstore.VerifyReport: nothing is damaged; 1 checked, 0 without checksums
        """
        root = self._opened()
        check_progress(progress)
        names = None if keys is None else [encode_key(key) for key in several(keys)]
        with resource_errors(self.root, None, root):
            return verify_store(root, names, contents.verify, progress, self._timeout, may_lock=self._mode != "r")

    def __reduce__(self) -> tuple[Any, ...]:
        self._opened()
        return reopen, (self.root, self._mode, self._verify, self._allow_pickle, self._timeout)

    def _repr_html_(self) -> str:
        if self._root is None:
            return table_html((), (), repr(self))
        try:
            seconds = min(self._timeout, _SHOWN_WITHIN)
            rows = list(itertools.islice(map(listing.cells, listing.entries(self, timeout=seconds)), ROWS))
            keys = shown(self._count(seconds), "key", "keys")
        except MemstoreError as error:  # other hosts don't answer, or the catalog is damaged
            return table_html((), (), f"{self._title()}: {error}")
        return table_html(listing.COLUMNS, rows, f"{self._title()}: {keys}")

    def _ipython_key_completions_(self) -> list[str]:
        """Lists what notebooks offer behind `store["`: the first keys, or none of a store that can't be read now."""
        try:
            keys = index.keys_from(self._opened, b"", _COMPLETED_WITHIN)
            return [key.decode() for key in itertools.islice(keys, _COMPLETED)]
        except (MemstoreError, OSError):
            return []


def reopen(path: str, mode: Mode, verify: bool, allow_pickle: bool, timeout: float) -> Store:
    """Unpickles a Store: opens the one that is there by now. Errors as `memstore.open`."""
    with resource_errors(path):
        use = open_root(path, mode, Creation(), timeout)
    return Store(use, mode, verify=verify, allow_pickle=allow_pickle, timeout=timeout)


def _changed_too_fast(key: str) -> NoReturn:
    raise ContentionError(
        f"{key!r}: others change it faster than this call could follow, for as long as the store's timeout: "
        "let one process at a time change it",
        key=key,
    )


# --- For memstore's own parts above the store ------------------------------------------------------------------------


def get_at_once(store: Store, root: Root, key: str, default: Any, began: float) -> Any:
    """Returns what `store.get(key, default)` returns, by a call that never waits: for threads that others wait for.

    Returns NOT_NOW where it might wait: for a lock, a disk, or another host; or where much is to be copied or imported.
    A warning of its default names the line that called its caller.

    Args:
        began: the time of `perf_counter` at which the call began, for the log; 0: it is silent.
    """
    value = NOT_NOW if store._verify else value_at_once(root, key, default, store._as_opened, began)
    if value is not NOT_NOW and value is not default:
        store._gets += 1
    return value


def ref_lazily(store: Store, key: str) -> Ref:
    """Returns `store.ref(key)` for this process only: bytes of other hosts come when they are read."""
    return Ref(pin(opened(store), key, store._as_opened, lazily=True))


def begin_load(store: Store, key: str, process_group: Any, timeout: float) -> ModelLoad:
    """Takes the first step of a `load_model`, which waits for nothing.

    It is for a caller who waits for a newer version in another way.
    """
    with between_forks():
        from memstore.store.models import ModelLoad
        from memstore.store.sharded import meet

    root = opened(store, timeout)
    encode_key(key)
    load = ModelLoad(root, key, store._as_opened, meet(process_group, "load", key, root), timeout)
    store._gets += 1
    return load


def begin_follow(
    store: Store, key: str, model: torch.nn.Module, *, strict: bool, cast: bool, timeout: float
) -> PreparedLoad:
    """Takes all steps of a `load_model` of this process alone, up to the copy. Errors as `load_model`."""
    with between_forks():
        from memstore.store.models import LoadTarget, prepare_load

    root = opened(store, timeout)
    target = LoadTarget(model, None, strict, cast, False)
    load = prepare_load(root, key, store._as_opened, target, deadline_after(timeout))
    store._gets += 1
    return load
