"""Deferred tensors, and the real ones that become of them: of the same class, sharing what they shared."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memstore.deferred_init.events import Past, now
from memstore.deferred_init.replay import Replay
from memstore.errors import UnsupportedValueError
from memstore.fake import Mark, mark_of, original_class, over_storage, ref_of, requires_grad
from memstore.structure import modes

_OURS = "_memstore_"
_MADE, _REAL = "_memstore_made", "_memstore_real"  # of a deferred tensor, and of its storage


def is_deferred_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made by `deferred_init`. One that was materialized before still is deferred."""
    with torch._C.DisableTorchFunction():
        mark = mark_of(tensor)
        return mark is not None and mark.history is not None


def materialize(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Real tensors for deferred ones, all by one replay. Those that are real are returned as they are."""
    given = list(tensors)
    with modes.put_aside(entirely=True), torch._C.DisableTorchFunction(), torch.no_grad():
        wanted: dict[Mark, torch.Tensor] = {}
        for one in given:
            mark = mark_of(one)
            if mark is None or made_of(one) is not None:
                continue
            if mark.history is None:
                raise UnsupportedValueError(
                    f"a fake tensor of shape {tuple(one.shape)} was made in fake_mode, and has no past: make it in "
                    "deferred_init"
                )
            if not hasattr(one.untyped_storage(), _REAL):
                wanted.setdefault(mark, one)
        moment = now()
        for mark, real in Replay().run([(mark, moment) for mark in wanted]).items():
            keep_real(wanted[mark], real)
        return [_as_real(one) for one in given]


def made_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What became of a deferred tensor."""
    return tensor.__dict__.get(_MADE)


def keep_real(tensor: torch.Tensor, real: torch.Tensor) -> None:
    """What shares a deferred tensor's storage will share this storage."""
    mark = mark_of(tensor)
    if mark is not None and isinstance(mark.history, Past):
        mark.history.is_over = True
    setattr(tensor.untyped_storage(), _REAL, real)


def become(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A tensor of the deferred one's class and with its attributes, over `data`; it is what becomes of it."""
    cls = original_class(type(tensor))
    needs_grad = requires_grad(tensor) and (data.is_floating_point() or data.is_complex())
    if cls is torch.Tensor:
        made = data.detach().requires_grad_(needs_grad and tensor.is_leaf)
    else:
        made = torch.Tensor._make_subclass(cls, data, needs_grad)
    for name, one in tensor.__dict__.items():
        if not name.startswith(_OURS):
            setattr(made, name, one)
    setattr(tensor, _MADE, made)
    return made


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    mark = mark_of(tensor)
    if mark is None:
        return tensor
    made = made_of(tensor)
    if made is not None:
        return made
    real: Any = getattr(tensor.untyped_storage(), _REAL)
    return become(tensor, over_storage(real, ref_of(tensor, mark)))
