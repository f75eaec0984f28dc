"""Deferred initialisation: modules whose tensors are made later, with the same bits as without deferral.

The names are torchdistX's.

    model = deferred_init(torch.nn.Linear, 4096, 4096)  # without memory
    materialize_module(model, source="/checkpoints/step-7")  # or without a source, as its constructor makes it

The guide is docs/deferred-init.md. For who works on it, the files:

modules  deferred_init, materialize_module: a module's tensors, filled from a source or by replay; the recording
replay   what was done with the storages of deferred tensors, run again on real ones; its random numbers
tensors  deferred tensors, made real; those that wrap others (DTensors); what is in a module already
slots    the places of tensors in a module, and what is to be there: device, dtype, a rank's part
sources  weights by name: snapshots, views, state dicts, files; how a module's storages get them
"""

from __future__ import annotations

from memstore._wording import offered
from memstore.deferred_init.modules import (
    Materialized,
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)

__all__ = ["Materialized", "deferred_init", "is_deferred", "materialize_module", "materialize_tensor"]
__dir__ = offered(__all__)
