"""ReplayBuffer: rows that many processes write round and round, and sample. What a user calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tensordict import TensorDict

from memstore.datasets import Spec, spec_of, take_batch
from memstore.engine import Creation, MutableEntry, close_root, deadline_after, open_mutable, open_root, resource_errors
from memstore.errors import ReadOnlyError, VersionGoneError
from memstore.replay.layout import RingOptions, capacity_of
from memstore.replay.limits import RateLimiter
from memstore.replay.opening import BufferMode, open_or_create
from memstore.replay.reading import Slots, Uniform, new_targets, read_picked
from memstore.replay.recovery import keep_whole
from memstore.replay.ring import Ring
from memstore.replay.waiting import wait_for
from memstore.replay.writing import Writer
from memstore.structure import DTYPES, modes

if TYPE_CHECKING:
    from memstore.store.store import Store

Sampler = Literal["uniform", "fifo", "lifo", "prioritized"]


class ReplayBuffer:
    """A ring of rows that any number of processes fill and sample at the same time.

    A sample takes no lock, and never shows a row that is being written. A batch that was added is there as a whole, or,
    if its writer died, not at all. All of it lives in the store: it survives the death of all processes, and whoever
    opens the key goes on with it. Thread-safe; usable in forked children; pickled by reference.

    Args:
        store: the store.
        key: the buffer's key in it.
        spec: what a row is, as for `Store.create_dataset`; None: as it is.
        capacity: how many rows the buffer holds; then the oldest are written over. None: as it is.
        sampler: what this opener's `sample` gives. "uniform": any rows; "prioritized": by their priorities; "fifo" and
            "lifo": each row once to all openers together, the oldest or the newest first.
        replacement: whether "uniform" may give a row again before all others.
        alpha: the exponent of priorities. It belongs to the buffer, as capacity, spec and rate limiter do.
        beta: the exponent of this opener's weights.
        rate_limiter: lets samplers and writers wait for each other; None: as it is.
        seed: of this opener's random numbers; None: another one each time. Forked children and unpickled copies have
            others.
        mode: "a" opens the buffer, and makes it if there is none; "r+": it has to be there; "x": it must not.

    Raises:
        KeyNotFoundError: there is no such key, and no `spec` and `capacity` to make it of.
        AlreadyExistsError: mode "x", and the key is there.
        StructureMismatchError: it was made with another spec, capacity, alpha or rate limiter. The message shows both.
        MutableEntryError: the key is that of another kind of entry.
        StoreFullError: no room for all of its rows.

    Example:
        >>> import memstore, tempfile, torch
        >>> store = memstore.open(tempfile.mkdtemp())
        >>> spec = {"state": ((4,), torch.float32), "reward": ((), torch.float32)}
        >>> buffer = memstore.ReplayBuffer(store, "replay", spec, capacity=1000)
        >>> buffer.extend({"state": torch.rand(64, 4), "reward": torch.ones(64)}).shape
        torch.Size([64])
        >>> batch = buffer.sample(32)
        >>> batch["state"].shape, batch["reward"].sum(), batch["index"].max() < 64
        (torch.Size([32, 4]), tensor(32.), tensor(True))
    """

    def __init__(
        self,
        store: Store,
        key: str,
        spec: Spec = None,
        *,
        capacity: int | None = None,
        sampler: Sampler = "uniform",
        replacement: bool = True,
        alpha: float = 0.6,
        beta: float = 0.4,
        rate_limiter: RateLimiter | None = None,
        seed: int | None = None,
        mode: BufferMode = "a",
    ) -> None:
        root, timeout, writable = store.lend_root(key)
        limiter = rate_limiter
        options = RingOptions(
            alpha if sampler == "prioritized" else None,
            None if limiter is None else (limiter.samples_per_insert, limiter.min_size, limiter.tolerance),
            not root.on_tmpfs,
        )
        entry = open_or_create(root, key, spec, capacity, options, mode, timeout, writable=writable)
        self._set(entry, timeout, seed)

    def _set(self, entry: MutableEntry, timeout: float, seed: int | None) -> None:
        self._ring = ring = Ring(entry, capacity_of(entry.record))
        self._timeout = timeout
        self._writer = Writer(ring)
        self._picker = Uniform(ring, np.random.default_rng(seed))
        self.key, self.capacity = entry.key, ring.capacity
        self.spec: Any = spec_of(ring.plan)
        if entry.writable:
            keep_whole(ring, deadline_after(timeout))

    def __len__(self) -> int:
        """The rows that are there."""
        return self._ring.numbers.rows

    @property
    def cursor(self) -> int:
        """How many positions were given to rows: the next row gets this one as its index."""
        return self._ring.numbers.head

    # --- write --------------------------------------------------------------------------------------------------------

    def add(self, row: Any, *, priority: float | None = None, timeout: float | None = None) -> int:
        """Adds one row, and returns its index. As `extend`, of which the leaves have no dimension that counts rows."""
        return self._write(row, priority, timeout, single=True)[0]

    def extend(self, batch: Any, *, priority: Any = None, timeout: float | None = None) -> torch.Tensor:
        """Adds rows. They are sampled when all of their bytes are there.

        Args:
            batch: rows, in the structure of the spec: TensorDicts, dicts, tensors and numpy arrays.
            priority: a number for each row, or one for all; None: the largest ever given.
            timeout: seconds to wait for room, where a rate limiter or stopped writers hold it; None: the store's.

        Returns:
            int64 [n]: the index of each row. It grows for ever: it says which row was meant, also when its slot has
            another one by now.

        Raises:
            StructureMismatchError: other leaves, shapes or dtypes. Nothing was written.
            StoreFullError: more rows than the capacity.
            MutableEntryError: the buffer was deleted.
            StoreTimeoutError: no room in time; the message names who holds it.
            ReadOnlyError: the store was opened with mode "r".
        """
        positions = self._write(batch, priority, timeout, single=False)
        with modes.put_aside():
            if isinstance(positions, range):
                return torch.arange(positions.start, positions.stop)
            return torch.as_tensor(positions)

    def _write(self, value: Any, priority: Any, timeout: float | None, *, single: bool) -> Any:
        ring = self._ring
        if not ring.entry.writable:
            raise ReadOnlyError(f"{self.key!r}: the store was opened with mode 'r': it can't be written", key=self.key)
        with modes.put_aside():
            batch = take_batch(self.key, ring.plan, value, single=single)
        if not batch.count:
            return range(0)
        return self._writer.write(batch, deadline_after(self._timeout if timeout is None else timeout))

    # --- sample -------------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int, *, out: Any = None, device: Any = None, timeout: float | None = None) -> Any:
        """Gives rows, in memory of their own.

        Args:
            batch_size: how many.
            timeout: seconds to wait for rows; None: the store's.

        Returns:
            A TensorDict [batch_size]: the leaves of the spec (that of one tensor is called "data"), and "index", int64.

        Raises:
            StoreTimeoutError: there are no rows.
        """
        with modes.put_aside():
            deadline = deadline_after(self._timeout if timeout is None else timeout)
            slots, words = self._picked(batch_size, deadline)
            targets = new_targets(self._ring, batch_size)
            index = read_picked(self._ring, slots, words, targets, self._picker.pick, deadline)
            return self._built(targets, torch.as_tensor(index))

    def _picked(self, rows: int, deadline: float) -> tuple[Slots, Slots]:
        picked = self._picker.pick(rows)
        if picked is None:
            picked = wait_for(self._ring, lambda: self._picker.pick(rows), deadline, lambda: "it has no rows to sample")
        return picked

    def _built(self, targets: list[torch.Tensor], index: torch.Tensor) -> TensorDict:
        found = TensorDict({"index": index}, batch_size=[len(index)])
        for leaf, target in zip(self._ring.plan.leaves, targets, strict=True):
            found.set(tuple(map(str, leaf.name)) or "data", target.view(DTYPES[leaf.dtype]))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        entry = self._ring.entry
        root, mode = entry.root, "r+" if entry.writable else "r"
        return receive, (root.path, root.settings.store, self.key, entry.record.put_id, mode, self._timeout)

    def __repr__(self) -> str:
        return f"<memstore.ReplayBuffer {self.key!r}: {len(self):,} of {self.capacity:,} rows of {self.spec}>"


def receive(path: str, store: str, key: str, put_id: int, mode: str, timeout: float) -> ReplayBuffer:
    """Unpickles a buffer.

    Raises:
        NotAStoreError: there is no such store here.
        VersionGoneError: it was deleted, or another store is there.
    """
    with resource_errors(path):
        root = open_root(path, mode, Creation(), timeout)
    try:
        if root.settings.store != store:
            raise VersionGoneError(f"the replay buffer {key!r} is gone: {path} is another store now", key=key)
        entry = open_mutable(
            root, key, "buffer", capacity_of, deadline_after(timeout), writable=mode != "r", put_id=put_id
        )
        buffer = ReplayBuffer.__new__(ReplayBuffer)
        buffer._set(entry, timeout, None)  # pyright: ignore[reportPrivateUsage]
        return buffer
    finally:
        close_root(root)
