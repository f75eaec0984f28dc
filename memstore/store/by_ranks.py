"""The methods of a Store for values that several ranks hold in part. The steps are in `sharded.py`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from memstore.arguments import expected_version, flag, seconds_of
from memstore.engine import deadline_after
from memstore.keys import check_key, encode_key
from memstore.late_imports import between_forks
from memstore.store.gets import Gets
from memstore.store.puts import Puts

if TYPE_CHECKING:
    import torch

    from memstore.engine import Pin
    from memstore.store.loads import ModelLoad
    from memstore.store.sharded import PendingPut


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
            from memstore.store.ranks import find_place
            from memstore.store.sharded import put_sharded
            from memstore.structure import take_shards_apart

        seconds = self._timeout if timeout is None else timeout
        deadline_after(seconds)  # raises for what is no number of seconds
        root = self._writable(timeout)
        encode_key(key)
        flag("wait", wait)
        if expect_version is not None:
            expect_version = expected_version(expect_version)
        lease = seconds_of("lease", lease)
        place = find_place(attempt, rank, world_size, process_group, key, root)
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
            from memstore.store.meeting import meet
            from memstore.store.models import MODEL, take_model_apart, value_of
            from memstore.store.ranks import DistributedPlace
            from memstore.store.sharded import put_sharded

        root = self._writable(timeout)
        check_key("save_model", key, model)
        meeting = meet(process_group, "put", key, root)
        if meeting is None:
            return self._put_cast(key, value_of(model, optimizer), dtype, (MODEL,), timeout)
        version = put_sharded(
            root,
            key,
            partial(take_model_apart, model, optimizer, allow_pickle=self._allow_pickle),
            DistributedPlace(meeting),
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
            from memstore.store.loads import ModelLoad
            from memstore.store.meeting import meet

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
