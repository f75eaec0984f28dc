"""Store: what a user calls. Its methods glue values (contents, structure) to the engine, which has the protocols.

The class is put together of the methods for keys (`listing.Keyspace`), for values (`values.py`), for values that
several ranks hold in part, for entries whose rows are written in place, and of the names that a mapping has.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from memstore import contents, listing, structure
from memstore._arguments import (
    as_row_index,
    check_key,
    encode_key,
    encode_prefix,
    expected_version,
    flag,
    seconds_of,
    several,
)
from memstore._info import EntryInfo, LeafInfo, Progress, ShardInfo, VerifyReport
from memstore._threads import between_forks
from memstore._wording import ROWS, check_progress, names_its_methods, shown, table_html
from memstore.engine import (
    Creation,
    Record,
    Root,
    RootUse,
    deadline_after,
    files_of,
    index,
    open_root,
    plan_bytes,
    resource_errors,
    verify_store,
)
from memstore.errors import (
    ContentionError,
    CorruptionError,
    InvalidKeyError,
    KeyNotFoundError,
    MemstoreError,
    PartialCommitError,
    ReadOnlyError,
    VersionConflictError,
)
from memstore.listing import Keyspace, KeyTree, Mode, WhileRead, absent, key_tree
from memstore.store.values import NO_DEFAULT, ByFiles, Gets, Puts, as_items
from memstore.structure import modes

if TYPE_CHECKING:
    import torch

    from memstore.datasets import Dataset, Spec
    from memstore.engine import MappedEntry, Pin, Root
    from memstore.store.models import ModelLoad
    from memstore.store.sharded import PendingPut


# --- Values that several ranks hold in part --------------------------------------------------------------------------


class ByRanks(Puts, Gets):
    """What `Store` inherits."""

    @overload
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
        wait: Literal[True] = True,
        lease: float = 600.0,
        timeout: float | None = None,
    ) -> int: ...
    @overload
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
        wait: Literal[False],
        lease: float = 600.0,
        timeout: float | None = None,
    ) -> PendingPut: ...
    @overload
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
            UnsupportedValueError, VersionConflictError, StoreFullError, ReadOnlyError: as in `put`.
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
        root = self._writable(timeout)
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
            from memstore.store.model_fit import MODEL
            from memstore.store.models import take_model_apart, value_of
            from memstore.store.sharded import DistributedRank, meet, put_sharded

        root = self._writable(timeout)
        check_key("save_model", key, model)
        meeting = meet(process_group, "put", key, root)
        if meeting is None:
            return self._put_cast(key, value_of(model, optimizer), dtype, (MODEL,), timeout)
        version = put_sharded(
            root,
            key,
            partial(take_model_apart, model, optimizer, allow_pickle=self._allow_pickle),
            DistributedRank(meeting),
            dtype=dtype,
            expect=None,
            wait=True,
            lease=0.0,
            timeout=self._timeout if timeout is None else timeout,
        )
        assert isinstance(version, int), "it has waited"
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
            HomeUnavailableError: in a store on several hosts, the one that has the key, or its bytes, didn't answer.
        """
        check_key("load_model", key, model)
        seconds = self._timeout if timeout is None else timeout
        deadline = deadline_after(seconds)
        strict, cast = flag("strict", strict), flag("cast", cast)  # before other ranks wait for this one
        load = self._begin_load(key, process_group, seconds)
        wait = None if newer_than is None else partial(self.wait, key, newer_than=newer_than, timeout=seconds)
        return load.fill(model, optimizer, strict=strict, cast=cast, wait=wait, deadline=deadline, timeout=seconds)

    def _begin_load(self, key: str, process_group: Any, timeout: float) -> ModelLoad:
        """See `begin_load`."""
        with between_forks():
            from memstore.engine import unpack
            from memstore.store.models import ModelLoad
            from memstore.store.sharded import meet

        root = self._opened(timeout)
        encode_key(key)
        meeting = meet(process_group, "load", key, root)

        def count(pin: Pin) -> Pin:
            self._gets += 1
            return pin

        return ModelLoad(
            meeting,
            lambda lazily, deadline: count(self._pin(root, key, lazily=lazily, deadline=deadline)),
            lambda packed, lazily: count(unpack(root, key, packed, self._pin_options(timeout=timeout), lazily=lazily)),
        )

    def abort(self, key: str, attempt: str, *, timeout: float | None = None) -> bool:
        """Gives up a sharded put that waits for parts, for all its ranks. Returns whether there was one.

        Args:
            key: of the put.
            attempt: as `pending` names it.
            timeout: seconds; None: the store's.

        Raises:
            StoreTimeoutError: another process held the store's mutex; the message names it.
            HomeUnavailableError: in a store on several hosts, the key's home didn't answer; it is named.
            UnknownOutcomeError: that home was asked to give it up, and gave no answer.
        """
        with between_forks():
            from memstore.store.sharded import abort

        deadline = self._deadline(timeout)
        return abort(self._writable(timeout), encode_key(key), attempt, "Store.abort was called", deadline)


def begin_load(store: ByRanks, key: str, process_group: Any, timeout: float) -> ModelLoad:
    """The first step of a `load_model`, which waits for nothing: for who waits for a newer version in another way."""
    return store._begin_load(key, process_group, timeout)  # pyright: ignore[reportPrivateUsage]


# --- Entries whose rows are written in place -------------------------------------------------------------------------


class ByRows(Keyspace):
    """What `Store` inherits."""

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
            ReadOnlyError: the store was opened with mode "r".
            HomeUnavailableError, UnknownOutcomeError: as in `put`.

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
        return create_dataset(root, key, spec, capacity, length, self._seconds(timeout), deadline)

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
        return create_dataset_from(root, key, value, capacity, self._seconds(timeout), deadline)

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
            HomeUnavailableError: in a store on several hosts, the one that is the key's home didn't answer.
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

    def lend_root(self, key: str) -> tuple[Root, float, bool]:
        """For parts of memstore that stand above the store: its root, its timeout, and whether it may be written.

        Raises InvalidKeyError, StoreClosedError.
        """
        encode_key(key)
        return self._opened(), self._timeout, self._mode != "r"

    def _hold_rows(self, root: Root, key: str) -> MappedEntry:
        with between_forks():
            from memstore.datasets import hold_rows

        return hold_rows(root, key, self._timeout)

    def _before_a_creation(self, timeout: float | None) -> tuple[Root, float]:
        """The root, and the call's deadline.

        The first creation of a process imports tensordict, which takes a second: who can't have the store's mutex is to
        hear it in time, and not after that.
        """
        deadline = self._deadline(timeout)
        root = self._writable(timeout)
        if "tensordict" not in sys.modules:
            with resource_errors(self.root, None, root):
                root.mutex.run(lambda: None, deadline)
        return root, deadline

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout


# --- The names that a mapping has ------------------------------------------------------------------------------------


_ABSENT = object()
_COMPLETED = 1000  # keys that a notebook offers
_COMPLETED_WITHIN = 1.0  # seconds that it waits for other hosts


class AsMapping(Puts, Gets):
    """What `Store` inherits. No MutableMapping: its `get` never raises, and it compares by contents."""

    def __iter__(self) -> Iterator[str]:
        """As `keys()`: iterates over all keys, sorted by their UTF-8 bytes."""
        return iter(self.keys())

    def __getitem__(self, key: str) -> Any:
        """As `get(key)`."""
        try:
            return self.get(key)
        except InvalidKeyError as error:
            raise as_row_index(error, key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        """As `put(key, value)`."""
        self.put(key, value)

    def __delitem__(self, key: str) -> None:
        """As `delete(key)`."""
        self.delete(key)

    def _ipython_key_completions_(self) -> list[str]:
        """Lists what notebooks offer behind `store["`: the first keys, or none of a store that can't be read now."""
        try:
            keys = index.keys_from(self._opened, b"", _COMPLETED_WITHIN)
            return [key.decode() for key in itertools.islice(keys, _COMPLETED)]
        except (MemstoreError, OSError):
            return []

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

    def update(self, items: Mapping[str, Any]) -> dict[str, int]:
        """As `put_many`."""
        return self.put_many(as_items(items, "update"))

    def pop(self, key: str, default: Any = NO_DEFAULT) -> Any:
        """Deletes a key, and returns its value. If several processes pop one version, only one of them gets it.

        Args:
            key: the key.
            default: returned unchanged if there is no such key; without it, a missing key is an error.

        Raises:
            KeyNotFoundError: no such key, and no default.
            MutableEntryError: the key is that of a dataset or replay buffer, which `delete` frees.
            ContentionError: others replaced the key again and again, until the store's timeout.
            ReadOnlyError: the store was opened with mode "r".
            HomeUnavailableError, UnknownOutcomeError: as in `get` and `delete`.

        Example:
            >>> import memstore, tempfile
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     version = store.put("job", "train")
            ...     store.pop("job"), store.pop("job", None)
            ('train', None)
        """
        self._writable()
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

    def setdefault(self, key: str, value: Any) -> Any:
        """Returns the value of `key`. If there is no such key, puts `value` first; of several processes only one does.

        Args:
            key: the key.
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
        self._writable()
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

    def tree(self, prefix: str = "") -> KeyTree:
        """Draws the keys that start with `prefix` as a tree, split at each "/"; print it, or show it in a notebook.

        Args:
            prefix: as for `keys`.

        Returns:
            A `KeyTree`. Its text is the drawing.

        Raises:
            HomeUnavailableError: in a store on several hosts, one didn't answer.

        Example:
            >>> import memstore, tempfile
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     versions = store.put_many({"runs/1": 1.0, "runs/2": 2.0, "seed": 7})
            ...     len(store.tree("runs/"))
            2
        """
        return key_tree(self, prefix)


def _changed_too_fast(key: str) -> NoReturn:
    raise ContentionError(
        f"{key!r}: others change it faster than this call could follow, for as long as the store's timeout: "
        "let one process at a time change it",
        key=key,
    )


# --- Store -----------------------------------------------------------------------------------------------------------


_CLEARED_AT_ONCE = 4096  # keys; it takes 40 ms, and others wait for the mutex meanwhile
_SHOWN_WITHIN = 3.0  # seconds: a cell of a notebook doesn't wait longer for hosts that don't answer


@modes.uncompiled_methods
@names_its_methods
class Store(ByRanks, ByRows, ByFiles, AsMapping):
    """A folder of nested tensors under keys, shared by every process that opens it. Made by `memstore.open`.

    Thread-safe; usable in forked children; pickled by its root, so that spawned children and queues may carry it.
    Every method raises StoreClosedError after `close`, InvalidKeyError for an invalid key, and StoreTimeoutError if it
    could not get a lock within `timeout` seconds (None: as given to `open`).

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

    def clear(self, prefix: str = "", *, timeout: float | None = None) -> int:
        """Deletes all keys that start with `prefix`, also those of datasets and replay buffers.

        Values that were got stay valid. Up to 4,096 keys go at one moment, more of them in such steps, sorted; in a
        store on several hosts, those of one home after the other. Keys that are put meanwhile may stay. Sharded puts
        under such keys that wait for other ranks are given up. `open(root, "w")` begins a store anew as a whole.

        Args:
            prefix: as for `keys`; "" stands for all keys.
            timeout: seconds for each step; None: the store's.

        Returns:
            How many keys were deleted.

        Raises:
            ReadOnlyError: the store was opened with mode "r".
            HomeUnavailableError, UnknownOutcomeError: as in `delete`. What was deleted before stays so.

        Example:
            >>> import memstore, tempfile
            >>> with memstore.open(tempfile.mkdtemp()) as store:
            ...     versions = store.put_many({"runs/1": 1.0, "runs/2": 2.0, "seed": 7})
            ...     store.clear("runs/"), list(store)
            (2, ['seed'])
        """
        self._writable(timeout)
        start = encode_prefix(prefix)
        seconds = self._timeout if timeout is None else timeout
        deadline_after(seconds)  # raises for what is no number of seconds
        for one in self.pending(timeout=timeout):
            if one.key.startswith(prefix):
                self.abort(one.key, one.attempt, timeout=timeout)
        names, deleted = index.keys_from(self._writable, start, seconds), 0
        while step := [name.decode() for name in itertools.islice(names, _CLEARED_AT_ONCE)]:
            deleted += self.delete_many(step, missing_ok=True, atomic=False, timeout=timeout)
        if not deleted and listing.GLOB.intersection(prefix):
            warnings.warn(listing.no_match(prefix, "clear"), UserWarning, stacklevel=2)
        return deleted

    def info(self, key: str) -> EntryInfo:
        """Describes the current version of `key`, without reading its tensors.

        Raises:
            KeyNotFoundError: no such key.
            CorruptionError: its description is damaged.
            HomeUnavailableError: in a store on several hosts, the one that is the key's home didn't answer.
        """
        return describe(self._opened(), key, self._timeout)

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

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name != "lend_root"]  # which is for other parts of memstore

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


def reopen(path: str, mode: Mode, verify: bool, allow_pickle: bool, timeout: float) -> Store:
    """Unpickles a Store: opens the one that is there by now. Errors as `memstore.open`."""
    with resource_errors(path):
        use = open_root(path, mode, Creation(), timeout)
    return Store(use, mode, verify=verify, allow_pickle=allow_pickle, timeout=timeout)


# --- The description of an entry, as Store.info gives it -------------------------------------------------------------


def describe(root: Root, key: str, timeout: float) -> EntryInfo:
    """Raises KeyNotFoundError, and CorruptionError. `timeout` is for other hosts."""
    name = encode_key(key)
    record = index.find(root, name, timeout)
    if record is None:
        raise absent(root, name)
    plan = structure.plan_of(plan_bytes(record.description))
    shards = _shards(root, key, record, plan)
    leaves = tuple(
        LeafInfo(*leaf, shards.get(plan.same.get(i, i), ())) for i, leaf in enumerate(structure.leaf_table(plan))
    )
    has_more = record.kind in ("adopted", "sharded")  # its data section has the headers of the files too
    return EntryInfo(
        key=key,
        version=record.version,
        kind=record.kind,
        nbytes=structure.stored_bytes(plan) if has_more else record.nbytes,
        created=record.created,
        structure=structure.structure_text(plan),
        leaves=leaves,
        files=files_of(root, record),
    )


def _shards(root: Root, key: str, record: Record, plan: structure.Plan) -> dict[int, tuple[ShardInfo, ...]]:
    """By leaf, the parts that ranks have put. Raises CorruptionError."""
    files, bases = files_of(root, record), [extent.base for extent in record.extents]

    def file_at(place: int) -> str:
        number = bisect_right(bases, place) - 1
        if number < 0:
            raise CorruptionError(f"{key!r}: a part of it lies in none of its {len(files)} files", key=key)
        return files[number]

    found = {
        leaf: tuple(ShardInfo(*one.box, one.rank, file_at(one.place)) for one in sorted(boxes))
        for leaf, boxes in contents.boxes_of(record).items()
    }
    for leaf, rank in contents.box_table(record).ranks.items():
        if 0 <= leaf < len(plan.leaves):
            at = plan.leaves[leaf]
            found[leaf] = (ShardInfo((0,) * len(at.shape), at.shape, rank, file_at(at.offset)),)
    return found
