"""Deferred initialisation: modules whose tensors are made later, with the same bits as without deferral.

The names are torchdistX's.

    model = deferred_init(torch.nn.Linear, 4096, 4096)  # without memory
    materialize_module(model, source="/checkpoints/step-7")  # or without a source, as its constructor makes it

The guide is docs/deferred-init.md. For who works on it, the files:

events      what was done with the storages of deferred tensors, and which of it one depends on
constants   real tensors among the arguments of events
randomness  which random numbers each event gets
replay      events, run on real tensors
recording   what modes of `fake` tell of operators
tensors     deferred tensors, made real
wrappers    tensors that wrap deferred ones: DTensors
slots       the places of tensors in a module
sources     weights by name: snapshots, views, state dicts, files
wishes      what real tensors are to be: device, dtype, placements
taking      a source's tensors, as those of a module share their storages
placed      what is in a module already, and how all was before a call that fails
fitting     a module's tensors, filled from a source or by replay
shards      a rank's part of a tensor
modules     materialize_module
init        deferred_init, is_deferred, materialize_tensor
"""

from __future__ import annotations

from memstore.deferred_init.fitting import Materialized
from memstore.deferred_init.init import deferred_init, is_deferred, materialize_tensor
from memstore.deferred_init.modules import materialize_module

__all__ = ["Materialized", "deferred_init", "is_deferred", "materialize_module", "materialize_tensor"]


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})  # completion offers what users call
