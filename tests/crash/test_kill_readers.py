"""A reader is killed: it owes nothing, and what it held is given back. (Its steps: get-many in test_kill_at_steps.)"""

from __future__ import annotations

import memstore
from tests.crash import workers
from tests.crash.leftovers import left_after_gc, leftovers
from tests.crash.test_kill_at_steps import KILLED
from tests.crash.values import INLINE, LARGE, stamped
from tests.support.fork_server import ForkServer


def test_what_a_killed_reader_held_is_given_back(store: memstore.Store, server: ForkServer) -> None:
    store.put("k", stamped(1, LARGE))
    with server.start(workers.hold, store.root, "k") as reader:
        assert reader.recv() == 1
        store.put("k", stamped(2, LARGE))
        store.gc()
        assert len(leftovers(store)) == 3, "its file, its place among the retired, and its row"
        assert store.stats().pinned_by == (reader.pid,)
        reader.kill()
        assert reader.wait() == KILLED
    assert left_after_gc(store) == []


def test_readers_that_died_reading_make_the_catalog_no_larger(store: memstore.Store, server: ForkServer) -> None:
    """LMDB keeps the pages that a reader saw, until somebody notices that it is dead."""
    size = store.stats().catalog_bytes
    for _ in range(2):
        with server.start(workers.die_reading, store.root) as reader:
            assert reader.wait() == KILLED
        for number in range(4000):  # each takes fresh pages as long as the old ones are kept
            store.put(str(number % 50), stamped(number, 8 * INLINE))
    assert store.stats().catalog_bytes == size
