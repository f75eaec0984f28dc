"""Entries whose rows are written in place: datasets and replay buffers, whose methods are awaited.

What looks at memory alone is called as it is: lengths, and rows that a slice shows where they lie.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from memstore.aio.calls import Awaits, awaited, call, called_as, refusing
from memstore.aio.opened import OpenedByCalls, check_opened
from memstore.datasets import Dataset, as_name
from memstore.engine import deadline_after
from memstore.errors import MemstoreError
from memstore.replay import (
    RateLimiter,
    Sampled,
    Sampler,
    SamplerOptions,
    copied_rows,
    parts_by_age,
    sample_rows,
    sample_slices,
)
from memstore.replay import ReplayBuffer as BlockingBuffer

if TYPE_CHECKING:
    from tensordict import TensorDict
    from typing_extensions import Self


class _NotOpenedError(MemstoreError, AttributeError):
    """Also one of attributes, for `hasattr` and what looks at all members."""


class AsyncDataset(Awaits[Dataset]):
    """A `memstore.Dataset`, whose methods are awaited. It is pickled by reference.

    Made by `AsyncStore.create_dataset`, `create_dataset_from` and `open_dataset`.

    Attributes:
        dataset: the `memstore.Dataset` itself, for code that doesn't await.
        root: the folder of the store.
        key: its key in the store.
        capacity: the most rows that it can have.
        spec: what a row is: nested dicts of `(shape, dtype)`, or one such pair.
    """

    def __init__(self, dataset: Dataset, root: str, timeout: float) -> None:
        self.dataset, self.root, self.timeout = dataset, root, timeout
        self.key, self.capacity, self.spec = dataset.key, dataset.capacity, dataset.spec

    def blocking(self) -> Dataset:
        return self.dataset

    def pool_of(self, key: object) -> Hashable:
        return "rows", self.root, self.key

    @property
    def batch_size(self) -> torch.Size:
        """The batch size of a slice of all rows that are there by now."""
        return self.dataset.batch_size

    def __len__(self) -> int:
        """The number of complete rows."""
        return len(self.dataset)

    def __getitem__(self, index: int | slice | str | tuple[str, ...]) -> Any:
        """Rows over the shared memory, at once, for an int or a slice, or a column, for the name of a leaf.

        For other indices await `read_rows`.
        """
        if isinstance(index, int | slice) or as_name(index) is not None:
            return self.dataset[index]
        raise TypeError(f"rows by {type(index).__qualname__} are copied: await read_rows(index)")

    read_rows = awaited(Dataset.read_rows)
    extend = awaited(Dataset.extend)
    flush = awaited(Dataset.flush)
    seal = awaited(Dataset.seal)

    async def write_rows(self, index: Any, batch: Any) -> None:
        """As `dataset[index] = batch`, awaited. A task that is cancelled goes on when nothing is written any more."""
        await call(self.pool_of(None), lambda _: self.dataset.__setitem__(index, batch), settles=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dataset, self.root, self.timeout)

    def __repr__(self) -> str:
        return f"<memstore.aio.AsyncDataset {self.key!r}: {len(self):,} of {self.capacity:,} rows>"


class ReplayBuffer(Awaits[BlockingBuffer]):
    """A `memstore.ReplayBuffer`, whose methods are awaited. It takes the same arguments, with an AsyncStore.

    The buffer is opened, or created, by `await buffer` or by its first call. A sample takes a thread while it waits for
    rows or for a rate limiter, and so does an insertion. In this process, samples of one key have 8 threads, and all
    other calls for this key have 8 others. A call that finds no free thread waits for one, within its timeout. It is
    pickled by reference.

    Args:
        store: an open `AsyncStore`.
        key: the buffer's key in it.
        spec: describes a row; None: as created.
        options: `capacity`, `sampler` and the other arguments of `memstore.ReplayBuffer`. As there, `alpha` belongs to
            the buffer: 0.6, the default, means as created; another value has to be the buffer's, with any sampler. It
            has no effect on a buffer without priorities.

    Attributes:
        key: the buffer's key in the store.

    Example:
        >>> import asyncio, memstore.aio, tempfile, torch
        >>> async def main():
        ...     async with memstore.aio.open(tempfile.mkdtemp()) as store:
        ...         buffer = memstore.aio.ReplayBuffer(store, "replay", {"x": ((2,), torch.float32)}, capacity=100)
        ...         await buffer.extend({"x": torch.ones(10, 2)})
        ...         return (await buffer.sample(4))["x"].shape
        >>> asyncio.run(main())
        torch.Size([4, 2])
    """

    def __init__(
        self,
        store: OpenedByCalls,
        key: str,
        spec: Any = None,
        *,
        capacity: int | None = None,
        sampler: Sampler = "uniform",
        replacement: bool = True,
        alpha: float = 0.6,
        beta: float = 0.4,
        rate_limiter: RateLimiter | None = None,
        seed: int | None = None,
        mode: Literal["a", "r+", "x"] = "a",
    ) -> None:
        check_opened(store, "ReplayBuffer")
        SamplerOptions(sampler, replacement, beta)  # raises for what is none, and not in the first call
        self._store = store
        self._options: dict[str, Any] = {
            "spec": spec,
            "capacity": capacity,
            "sampler": sampler,
            "replacement": replacement,
            "alpha": alpha,
            "beta": beta,
            "rate_limiter": rate_limiter,
            "seed": seed,
            "mode": mode,
        }
        self._set(key, store.root, store.timeout, None)

    def _set(self, key: str, root: str, timeout: float, buffer: BlockingBuffer | None) -> None:
        self.key, self.timeout, self._root, self._buffer = key, timeout, root, buffer
        self._opening = threading.Lock()

    def blocking(self) -> BlockingBuffer:
        if self._buffer is not None:
            return self._buffer
        with self._opening:
            if self._buffer is None:
                self._buffer = BlockingBuffer(self._store.blocking(), self.key, **self._options)
            return self._buffer

    def pool_of(self, key: object) -> Hashable:
        return "rows", self._root, self.key

    def pool_of_samples(self, _: object) -> Hashable:
        """Another one: who waits for rows must not keep out who adds them."""
        return "samples", self._root, self.key

    add = awaited(BlockingBuffer.add)
    extend = awaited(BlockingBuffer.extend)
    update_priority = awaited(BlockingBuffer.update_priority)
    flush = awaited(BlockingBuffer.flush)

    @called_as(BlockingBuffer.sample)
    async def sample(self, *arguments: Any, **options: Any) -> TensorDict:
        return await self._sampled(sample_rows, arguments, options)

    @called_as(BlockingBuffer.sample_slices)
    async def sample_slices(self, *arguments: Any, **options: Any) -> TensorDict:
        return await self._sampled(sample_slices, arguments, options)

    read_rows = awaited(BlockingBuffer.read_rows)

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Copies of the whole rows that are there now, from the oldest on, without those that are overwritten since."""
        pool = self.pool_of(None)
        for positions in await call(pool, lambda _: parts_by_age(self.blocking())):
            read = partial(copied_rows, self.blocking(), positions)
            for row in (await call(pool, lambda _, read=read: read(deadline_after(self.timeout)))).unbind(0):
                yield row

    async def _sampled(
        self, sample: Callable[..., Sampled], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Awaits a sample. If its task is cancelled, and doesn't get it, its rows are put back."""
        found = await self.made(
            sample,
            arguments,
            options,
            pool=self.pool_of_samples(None),
            is_timed=True,
            settles=options.get("out") is not None,
            undo=Sampled.put_back,
        )
        return found.value

    @property
    def capacity(self) -> int:
        """That of the ReplayBuffer. As the following, it is known once this one is opened: by `await buffer`."""
        return self._known().capacity

    @property
    def spec(self) -> Any:
        return self._known().spec

    @property
    def cursor(self) -> int:
        return self._known().cursor

    def __len__(self) -> int:
        """The number of rows, by now."""
        return len(self._known())

    def __bool__(self) -> bool:
        return True  # also before it is opened

    def _known(self) -> BlockingBuffer:
        if self._buffer is None:
            raise _NotOpenedError(f"{self.key!r} isn't opened yet: await the buffer first", key=self.key)
        return self._buffer

    async def opened(self) -> BlockingBuffer:
        """Returns the `memstore.ReplayBuffer`, for its length, cursor, capacity and spec, which need no await."""
        return await call(self.pool_of(None), lambda _: self.blocking())

    def __await__(self) -> Generator[Any, Any, Self]:
        yield from self.opened().__await__()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """By a reference, as a `memstore.ReplayBuffer`; before it is opened, by its arguments, without the seed."""
        buffer = self._buffer
        if buffer is not None:
            return _receive, (buffer, self._root, self.timeout)
        return _make, (self._store, self.key, {**self._options, "seed": None})

    def __repr__(self) -> str:
        rows = "not opened yet" if self._buffer is None else f"{len(self):,} of {self.capacity:,} rows"
        return f"<memstore.aio.ReplayBuffer {self.key!r}: {rows}, in {self._root}>"


for _name, (_what, _instead) in {
    "__getitem__": ("buffer[index]", "await buffer.read_rows(index)"),
    "__iter__": ("a loop over rows", "async for row in buffer"),
}.items():  # not in the class, where a type checker would take them for what a buffer has
    setattr(ReplayBuffer, _name, refusing(_what, _instead))


def _receive(buffer: BlockingBuffer, root: str, timeout: float) -> ReplayBuffer:
    """Unpickles a buffer that is open."""
    found = ReplayBuffer.__new__(ReplayBuffer)
    found._set(buffer.key, root, timeout, buffer)  # pyright: ignore[reportPrivateUsage]
    return found


def _make(store: OpenedByCalls, key: str, options: dict[str, Any]) -> ReplayBuffer:
    """Unpickles a buffer that was not opened yet."""
    return ReplayBuffer(store, key, **options)
