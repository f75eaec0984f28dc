"""The methods of a Store for values that several ranks hold in part. The steps are in `sharded.py`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from memstore.info import PendingInfo
from memstore.keys import encode_key
from memstore.late_imports import between_forks
from memstore.listing import Keyspace

if TYPE_CHECKING:
    import torch

    from memstore.store.sharded import PendingPut


class ByRanks(Keyspace):
    """What `Store` inherits."""

    _allow_pickle: bool

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

        Leaves may be DTensors, `TensorShard`s and ShardedTensors, of which each rank stores its own boxes; equal boxes
        are stored once, and must be equal. Plain tensors and objects are the lowest rank's; if others hold different
        ones, a warning says so. Ranks may hold different leaves: dicts merge by key, all else must agree.

        Args:
            key: as in `put`.
            value: what this rank holds of the value.
            attempt: a text that the ranks of this put share, and no other put has; with `rank` and `world_size`. A
                launcher that restarts ranks puts the restart's number into it. None: of `process_group`, whose rank 0
                chooses one.
            rank, world_size: this rank, from 0, and how many there are.
            process_group: of torch.distributed; None: the default one. No collective is called.
            dtype: floating leaves are cast to it, as in `put`.
            expect_version: as in `put`; it is looked at when all parts are there.
            wait: False returns at once, so that this process may exit, or do something else.
            lease: seconds that this part waits for the others, with wait=False.
            timeout: seconds to wait for the other ranks; None: the store's. When it is over, the put is given up for
                all ranks: what raised is never published later.

        Returns:
            The version, which all ranks get; with wait=False a `PendingPut`.

        Raises:
            ShardMismatchError: ranks hold a leaf in different shapes, dtypes or bytes; it names leaf and ranks.
            PartialCommitError: no rank holds some part of a leaf, or a rank failed.
            StoreTimeoutError: it names the ranks that put nothing.
            TypeError: nobody says which rank this is.
            UnsupportedValueError, VersionConflictError, StoreFullError, ReadOnlyError: as in `put`.
            UnknownOutcomeError: the put could not be given up in time, so that it may be published still.

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

        root = self._writable()
        encode_key(key)
        place = find_place(attempt, rank, world_size, process_group, key, root.settings.store)
        put = put_sharded(
            root,
            key,
            partial(take_shards_apart, value, allow_pickle=self._allow_pickle),
            place,
            dtype=dtype,
            expect=expect_version,
            wait=wait,
            lease=lease,
            timeout=self._timeout if timeout is None else timeout,
        )
        self._puts += 1
        return put

    def pending(self, key: str | None = None) -> tuple[PendingInfo, ...]:
        """Returns the sharded puts that wait for the parts of other ranks: those of one key, or all."""
        with between_forks():
            from memstore.store.sharded import pending

        return pending(self._opened(), None if key is None else encode_key(key))

    def abort(self, key: str, attempt: str) -> bool:
        """Gives up a sharded put that waits for parts, for all its ranks. Returns whether there was one."""
        with between_forks():
            from memstore.store.sharded import abort

        return abort(self._writable(), encode_key(key), attempt, "Store.abort was called", self._timeout)
