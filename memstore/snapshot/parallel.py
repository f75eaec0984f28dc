"""Large reads, writes and copies, several at once: each is one long call into C, during which other threads run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_MOST_THREADS = 8  # fewer use up a memory's bandwidth
_BATCH = 16  # items that are handed to a thread at once: it takes as long as to read a page
_FEW = 32  # batches a thread, up to which they are smaller

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(function: Callable[[T], R], items: Sequence[T], each: Callable[[T], None]) -> list[R]:
    """`list(map(function, items))`, on all cores; `each` is called in this thread with those that are done, in order.

    When it returns, or raises, no call runs any more. A single item is worked on in the caller's thread.
    """
    results: list[R] = []
    count = min(len(os.sched_getaffinity(0)), len(items), _MOST_THREADS)
    if count <= 1:
        for item in items:
            results.append(function(item))
            each(item)
        return results
    with ThreadPoolExecutor(count, "memstore: snapshot") as pool:
        batch = min(-(-len(items) // (count * _FEW)), _BATCH)
        batches = [items[start : start + batch] for start in range(0, len(items), batch)]
        futures = [pool.submit(_all, function, some) for some in batches]
        try:
            for some, future in zip(batches, futures, strict=True):
                results += future.result()
                for item in some:
                    each(item)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def _all(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    return list(map(function, items))
