"""Fake tensors, which have a shape, dtype, strides and device, but no memory. The names are torchdistX's.

    with fake_mode():
        model = torch.nn.Linear(1 << 20, 1 << 20)

Users have what `__all__` names; the other names are for deferred_init, and may change.

session  which tensors are fake: their storages have a mark. What an operator does, by its schema, and what becomes of
         it; the interface to what remembers it
mode     fake_mode, is_fake, meta_like, fake_like; what no operator sees: text, copy.deepcopy; fakes outside of a mode
"""

# Names for deferred_init, which comes in by this door too:
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from memstore._wording import offered
from memstore.fake.mode import (
    become_fake,
    fake_like,
    fake_mode,
    in_session,
    is_fake,
    meta_like,
    original_class,
)
from memstore.fake.session import (
    History,
    Mark,
    Recorder,
    Session,
    TensorRef,
    kind_of,
    mark_of,
    over_storage,
    ref_of,
    requires_grad,
    tensors_in,
    unrecorded_writes,
)

__all__ = ["fake_like", "fake_mode", "is_fake", "meta_like"]
__dir__ = offered(__all__)
