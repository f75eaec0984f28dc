"""What processes share beside files and catalog: the mutex and the doorbell."""

from __future__ import annotations

from memstore.engine.sync.clocks import boot_clock, deadline_after
from memstore.engine.sync.pages import Doorbell, LockPage, noted_batch, noted_ring

__all__ = [
    "boot_clock",
    "Doorbell",
    "LockPage",
    "deadline_after",
    "noted_batch",
    "noted_ring",
]
