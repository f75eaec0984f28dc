"""Stores for tasks of asyncio, and those that are mistaken for them."""

from __future__ import annotations

from memstore.errors import (
    KeyNotFoundError,
    NotAStoreError,
    StoreClosedError,
)
from tests.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        'awaited(path, lambda store: store.get("plicy"))',
        KeyNotFoundError,
        "no key 'plicy': did you mean 'policy'?",
    ),
    Mistake(
        'awaited(path, lambda store: store.pop("polcy"))',
        KeyNotFoundError,
        "no key 'polcy': did you mean 'policy'?",
    ),
    Mistake(
        'awaited(path + "/nowhere", lambda store: store.get("policy"))',
        NotAStoreError,
        "PATH/nowhere/store: the parent folder PATH/nowhere doesn't exist: create it first",
    ),
    Mistake(
        'memstore.aio.open("")',
        TypeError,
        "root is the path of a folder, and not ''",
    ),
    Mistake(
        'with memstore.aio.open(path + "/store") as opened:\n    pass',
        TypeError,
        "with would block a loop of asyncio: write async with",
    ),
    Mistake(
        'memstore.aio.open(path + "/store")["policy"]',
        TypeError,
        "store[key] would block a loop of asyncio: write await store.get(key)",
    ),
    Mistake(
        'memstore.aio.open(path + "/store")["policy"] = 3',
        TypeError,
        "store[key] = value would block a loop of asyncio: write await store.put(key, value)",
    ),
    Mistake(
        'del memstore.aio.open(path + "/store")["policy"]',
        TypeError,
        "del store[key] would block a loop of asyncio: write await store.delete(key)",
    ),
    Mistake(
        '"policy" in memstore.aio.open(path + "/store")',
        TypeError,
        "key in store would block a loop of asyncio: write await store.contains(key)",
    ),
    Mistake(
        'for key in memstore.aio.open(path + "/store"):\n    pass',
        TypeError,
        "a loop over keys would block a loop of asyncio: write async for key in store.keys()",
    ),
    Mistake(
        'memstore.aio.open(path + "/store", "rw")',
        ValueError,
        "mode is 'r', 'r+', 'a', 'x' or 'w', and not 'rw'",
    ),
    Mistake(
        'memstore.aio.ReplayBuffer(store, "replay")',
        TypeError,
        "store is one of memstore.aio.open, and not a Store: memstore.ReplayBuffer takes that",
    ),
    Mistake(
        "async def load():\n    async for one in memstore.aio.iter_weights(store, 'policy'):\n        pass\n"
        "asyncio.run(load())",
        TypeError,
        "store is one of memstore.aio.open, and not a Store: memstore.iter_weights takes that",
    ),
    Mistake(
        'memstore.ReplayBuffer(memstore.aio.open(path + "/store"), "replay")',
        TypeError,
        "store is one of memstore.open, and not an AsyncStore: memstore.aio has ReplayBuffer, iter_weights and "
        "read_rows for that",
    ),
    Mistake(
        'list(memstore.iter_weights(memstore.aio.open(path + "/store"), "policy"))',
        TypeError,
        "store is one of memstore.open, and not an AsyncStore: memstore.aio has ReplayBuffer, iter_weights and "
        "read_rows for that",
    ),
    Mistake(
        'memstore.ReplayBuffer("replay", store)',
        TypeError,
        "the store comes first, and then the key: here they are swapped",
    ),
    Mistake(
        'list(memstore.iter_weights("policy", store))',
        TypeError,
        "the store comes first, and then the key: here they are swapped",
    ),
    Mistake(
        "async def closes():\n"
        '    opened = await memstore.aio.open(path + "/store")\n'
        "    await opened.close()\n"
        '    await opened.get("policy")\n'
        "asyncio.run(closes())",
        StoreClosedError,
        "the store PATH/store was closed: memstore.aio.open it again",
    ),
    Mistake(
        'memstore.aio.ReplayBuffer(memstore.aio.open(path + "/store"), "replay")[:]',
        TypeError,
        "buffer[index] would block a loop of asyncio: write await buffer.read_rows(index)",
    ),
    Mistake(
        'for row in memstore.aio.ReplayBuffer(memstore.aio.open(path + "/store"), "replay"):\n    pass',
        TypeError,
        "a loop over rows would block a loop of asyncio: write async for row in buffer",
    ),
    Mistake(
        'memstore.aio.ReplayBuffer(memstore.aio.open(path + "/store"), "replay", sampler="random")',
        ValueError,
        "sampler is 'uniform', 'fifo', 'lifo' or 'prioritized', and not 'random'",
    ),
    Mistake(
        'memstore.aio.ReplayBuffer(memstore.aio.open(path + "/store"), "replay", sampel="fifo")',
        TypeError,
        "ReplayBuffer.__init__() got an unexpected keyword argument 'sampel'",
    ),
]
