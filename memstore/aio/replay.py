"""Replay buffers, whose methods are awaited. Lengths and positions, which lie in memory, need no await."""

# A buffer opens the store that it is given.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from memstore.aio.calls import Awaits, awaited, call, called_as, refusing
from memstore.aio.store import AsyncStore, check_opened
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
    """An error that is one of attributes too, for `hasattr` and what looks at all members."""


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
        store: AsyncStore,
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

    def _blocking(self) -> BlockingBuffer:
        if self._buffer is not None:
            return self._buffer
        with self._opening:
            if self._buffer is None:
                self._buffer = BlockingBuffer(self._store._blocking(), self.key, **self._options)
            return self._buffer

    def _pool_of(self, key: object) -> Hashable:
        return "rows", self._root, self.key

    def _pool_of_samples(self) -> Hashable:
        """Returns the pool of samples alone: a call that waits for rows must not keep out one that adds them."""
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
        pool = self._pool_of(None)
        for positions in await call(pool, lambda _: parts_by_age(self._blocking())):
            read = partial(copied_rows, self._blocking(), positions)
            for row in (await call(pool, lambda _, read=read: read(deadline_after(self.timeout)))).unbind(0):
                yield row

    async def _sampled(
        self, sample: Callable[..., Sampled], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Awaits a sample. If its task is cancelled, and doesn't get it, its rows are put back."""
        pool = self._pool_of_samples()
        settles, undo = options.get("out") is not None, Sampled.put_back
        found = await self._made(sample, arguments, options, pool=pool, is_timed=True, settles=settles, undo=undo)
        return found.value

    @property
    def capacity(self) -> int:
        """Returns the capacity of the ReplayBuffer. It is known once this one is opened: by `await buffer`."""
        return self._known().capacity

    @property
    def spec(self) -> Any:
        return self._known().spec

    @property
    def cursor(self) -> int:
        return self._known().cursor

    def __len__(self) -> int:
        """Returns the number of rows, by now."""
        return len(self._known())

    def __bool__(self) -> bool:
        return True  # also before it is opened

    def _known(self) -> BlockingBuffer:
        if self._buffer is None:
            raise _NotOpenedError(f"{self.key!r} isn't opened yet: await the buffer first", key=self.key)
        return self._buffer

    async def opened(self) -> BlockingBuffer:
        """Returns the `memstore.ReplayBuffer`, for its length, cursor, capacity and spec, which need no await."""
        return await call(self._pool_of(None), lambda _: self._blocking())

    def __await__(self) -> Generator[Any, Any, Self]:
        yield from self.opened().__await__()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles a reference, as `memstore.ReplayBuffer` does; not opened yet, its arguments without the seed."""
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
    found._set(buffer.key, root, timeout, buffer)
    return found


def _make(store: AsyncStore, key: str, options: dict[str, Any]) -> ReplayBuffer:
    """Unpickles a buffer that was not opened yet."""
    return ReplayBuffer(store, key, **options)
