"""memstore for asyncio: every method of a Store, awaited and cancellable, many at once, and no thread for a wait.

    async with memstore.aio.open("/dev/shm/run1") as store:
        await store.put("policy", {"w": torch.ones(2, 2)})
        value = await store.get("policy")

The guide is docs/asyncio.md. For who works on it, the files:

awaited      a method that blocks, as one that is awaited
torch_state  what torch keeps for a thread, taken along to the thread that makes a call
jobs         one call that a thread makes for a task, and how it is given up
lanes        those threads: a few for this host, and a few for each other one
waits        one thread for all waits of a store; elsewhere: those for keys whose home is another host
opened       a store that its first call opens
results      references, and puts of several ranks; rows: datasets and replay buffers
news         the wait for a newer version; by_ranks: what several ranks do together
store        AsyncStore; opening: open; reading: iter_weights, read_rows
"""

from __future__ import annotations

from memstore.aio.opening import destroy, open, stores
from memstore.aio.reading import iter_weights, read_rows
from memstore.aio.results import AsyncPendingPut, AsyncRef
from memstore.aio.rows import AsyncDataset, ReplayBuffer
from memstore.aio.store import AsyncStore

__all__ = [
    "AsyncDataset",
    "AsyncPendingPut",
    "AsyncRef",
    "AsyncStore",
    "ReplayBuffer",
    "destroy",
    "iter_weights",
    "open",
    "read_rows",
    "stores",
]


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})  # completion offers what users call
