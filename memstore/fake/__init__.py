"""Fake tensors, which have a shape, dtype, strides and device, but no memory. The names are torchdistX's.

    with fake_mode():
        model = torch.nn.Linear(1 << 20, 1 << 20)

Users have what `__all__` names; the other names are for deferred_init, and may change.

marks       which tensors are fake: their storages have a mark
arguments   of operators, as refs and as meta tensors
recorder    the interface to what remembers what was done with them
operators   what an operator does, by its schema
storages    which of them a tensor shows
living      the fake tensors that there are at the end of a session
session     what becomes of an operator on them
tensors     their classes, outside of a mode
printing    them as text
copying     copy.deepcopy
functions   torch functions and attributes that no operator sees
mode        fake_mode, is_fake, meta_like
like        fake_like
"""

# Names for deferred_init, which comes in by this door too:
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from memstore.fake.like import fake_like
from memstore.fake.marks import (
    Mark,
    Ref,
    map_tensors,
    mark_of,
    over_storage,
    ref_of,
    requires_grad,
    tensors_in,
    unrecorded_writes,
)
from memstore.fake.mode import fake_mode, in_session, is_fake, meta_like
from memstore.fake.operators import kind_of
from memstore.fake.recorder import History, Recorder
from memstore.fake.session import Session
from memstore.fake.tensors import become_fake, original_class

__all__ = ["fake_like", "fake_mode", "is_fake", "meta_like"]


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})  # completion offers what users call
