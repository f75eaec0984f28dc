"""memstore for asyncio: every method of a Store, awaited and cancellable, many at once, and no thread for a wait.

    async with memstore.aio.open("/dev/shm/run1") as store:
        await store.put("policy", {"w": torch.ones(2, 2)})
        value = await store.get("policy")

The guide is docs/asyncio.md. For who works on it, the files:

calls        calls that block, made in threads: pools of them, for this host and for each other one
waits        one thread for all waits of a store; waits for keys that other hosts own
opened       a store that its first call opens, and its waits for newer versions
store        AsyncStore, references, datasets and puts of several ranks; open, iter_weights, read_rows
following    models that a task keeps at the newest version of a key
replay       replay buffers
"""

from __future__ import annotations

from memstore._wording import offered
from memstore.aio.following import AsyncFollower, follow
from memstore.aio.replay import ReplayBuffer
from memstore.aio.store import (
    AsyncDataset,
    AsyncPendingPut,
    AsyncPin,
    AsyncRef,
    AsyncStore,
    destroy,
    iter_weights,
    open,
    read_rows,
    stores,
)

__all__ = [
    "AsyncDataset",
    "AsyncFollower",
    "AsyncPendingPut",
    "AsyncPin",
    "AsyncRef",
    "AsyncStore",
    "ReplayBuffer",
    "destroy",
    "follow",
    "iter_weights",
    "open",
    "read_rows",
    "stores",
]
__dir__ = offered(__all__)
