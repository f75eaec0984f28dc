"""What is left of a closed store of several hosts."""

from __future__ import annotations

import gc
import time
import weakref

import torch

from memstore.distributed.client import open_elsewhere
from tests.distributed.client.hosts import Cluster
from tests.inside import root_of


def test_nothing_holds_the_root_of_a_closed_store(pair: Cluster) -> None:
    """A repair waits for each process that has the lock page mapped: it must go without a garbage collection."""
    here, there = pair.stores
    there.put("there", torch.ones(5000))
    elsewhere = open_elsewhere(root_of(here))
    deadline = time.monotonic() + 20
    gc.disable()
    try:
        assert elsewhere.keys(b"", b"", 10, deadline)
        (held,) = elsewhere.hold([b"there"], deadline, lazily=True)
        assert held is not None
        del held
        elsewhere.close()
        left = weakref.ref(elsewhere)
        del elsewhere
        assert left() is None
    finally:
        gc.enable()
