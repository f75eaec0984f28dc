"""memstore for asyncio: every method of a Store, awaited and cancellable, many at once, and no thread for a wait.

awaited      a method that blocks, as one that is awaited
torch_state  what torch keeps for a thread, taken along to the thread that makes a call
jobs         one call that a thread makes for a task, and how it is given up
lanes        those threads: a few for this host, and a few for each other one
waits        one thread for all waits of a store
opened       a store that its first call opens
store        AsyncStore; opening: open
"""

from __future__ import annotations

from memstore.aio.opening import open
from memstore.aio.store import AsyncStore

__all__ = ["AsyncStore", "open"]
