"""memstore's functions that read, awaited."""

# Values of any shape: what they hold has no type before it is looked at.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import torch

from memstore.aio.lanes import call
from memstore.aio.opened import check_opened
from memstore.aio.store import AsyncStore
from memstore.rows import read_rows as read_rows_blocking
from memstore.store.weights import iter_weights as iter_weights_blocking
from memstore.view import StoredTensor

_ALL_TOLD: Any = object()


async def iter_weights(
    store: AsyncStore,
    key: str,
    *,
    newer_than: int | None = None,
    prefix: str = "",
    names: Callable[[str], str | None] | None = None,
    timeout: float | None = None,
) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Iterates over the tensors of one version of a nested value: `async for name, weight in iter_weights(...)`.

    Arguments and errors as `memstore.iter_weights`. With `newer_than`, the wait takes no thread.
    """
    check_opened(store, "iter_weights")
    if newer_than is not None:
        await store.wait(key, newer_than=newer_than, timeout=timeout)
    lane = store.lane_of(key, fetches=True)
    weights: Iterator[tuple[str, torch.Tensor]] = await call(
        lane, lambda _: iter_weights_blocking(store.blocking(), key, prefix=prefix, names=names)
    )
    while (found := await call(lane, lambda _: next(weights, _ALL_TOLD))) is not _ALL_TOLD:
        yield found


async def read_rows(
    source: Any, index: Any, *, out: Any = None, device: torch.device | str | None = None, cast: bool = False
) -> Any:
    """As `memstore.read_rows`: reads rows of every tensor of a view, into memory of its own, or `out`.

    The bytes may lie on another host, so the reads of each key have 8 threads of their own.
    """
    lane = "reading", _key_of(source)

    def read(_: float) -> Any:
        return read_rows_blocking(source, index, out=out, device=device, cast=cast)

    return await call(lane, read, settles=out is not None)


def _key_of(source: Any) -> str:
    """Of which a value is a view, or "", as far as a look at its first leaf tells."""
    while not isinstance(source, StoredTensor):
        inner: Any = source.values() if isinstance(source, dict) else source
        if not isinstance(source, dict | list | tuple) or not source:
            return ""
        source = next(iter(inner))
    return source.stored.source.key
