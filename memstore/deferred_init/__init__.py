"""Deferred initialisation: modules whose tensors are made later, bit for bit as they would have been.

The names are torchdistX's.

events      what was done with the storages of deferred tensors, and which of it one depends on
randomness  which random numbers each event gets
replay      events, run on real tensors
recording   what modes of `fake` tell of operators
tensors     the real tensors that become of deferred ones
modules     materialize_module
init        deferred_init, is_deferred, materialize_tensor
"""

from __future__ import annotations

from memstore.deferred_init.init import deferred_init, is_deferred, materialize_tensor
from memstore.deferred_init.modules import materialize_module

__all__ = ["deferred_init", "is_deferred", "materialize_module", "materialize_tensor"]
