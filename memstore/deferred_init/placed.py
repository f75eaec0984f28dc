"""Which deferred tensors are in a module as real ones already; and how all was, for a call that fails."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from memstore.deferred_init.events import Past
from memstore.deferred_init.tensors import MADE, REAL, made_of, ref_in
from memstore.deferred_init.wrappers import is_wrapper, parts_of
from memstore.fake import mark_of

_PLACED = "_memstore_placed"  # of a deferred tensor; and, of its storage, what shows it


def note_placed(tensor: torch.Tensor) -> None:
    """What became of it is in a module. No later call changes that: somebody may have trained it."""
    with torch._C.DisableTorchFunction():
        setattr(tensor, _PLACED, True)
        made = made_of(tensor)
        if made is None or is_wrapper(tensor) or is_wrapper(made):
            return
        storage = tensor.untyped_storage()
        real = getattr(storage, REAL, None)
        if real is not None and real[0].untyped_storage()._cdata == made.untyped_storage()._cdata:
            setattr(storage, _PLACED, {*getattr(storage, _PLACED, ()), _shown(tensor)})


def is_placed(tensor: torch.Tensor) -> bool:
    """Whether a deferred tensor, or one that shows the same of its storage, is in a module as a real one."""
    with torch._C.DisableTorchFunction():
        if _PLACED in tensor.__dict__:
            return True
        if is_wrapper(tensor):
            return False
        storage = tensor.untyped_storage()
        return hasattr(storage, REAL) and _shown(tensor) in getattr(storage, _PLACED, ())


def is_real(tensor: torch.Tensor) -> bool:
    """Whether a deferred tensor, or its storage, was made before."""
    with torch._C.DisableTorchFunction():
        return made_of(tensor) is not None or hasattr(tensor.untyped_storage(), REAL)


def _shown(tensor: torch.Tensor) -> tuple[Any, ...]:
    return ref_in(tensor)[1:]


@contextmanager
def as_before(tensors: Iterable[torch.Tensor]) -> Generator[None]:
    """After an error nothing has become of these deferred tensors that had not before."""
    with torch._C.DisableTorchFunction():
        notes = [_noted(part) for one in tensors for part in (one, *(parts_of(one) if is_wrapper(one) else ()))]
    try:
        yield
    except BaseException:
        for note in notes:
            note.restore()
        raise


class _Note(NamedTuple):
    """What was noted of a tensor, and of its storage."""

    tensor: torch.Tensor
    made: Any
    storage: Any
    real: Any
    past: Past | None
    is_over: bool

    def restore(self) -> None:
        _put(self.tensor, MADE, self.made)
        if self.storage is not None:
            _put(self.storage, REAL, self.real)
        if self.past is not None:
            self.past.is_over = self.is_over


def _noted(tensor: torch.Tensor) -> _Note:
    storage = None if is_wrapper(tensor) else tensor.untyped_storage()
    mark = None if storage is None else mark_of(tensor)
    past = mark.history if mark is not None and isinstance(mark.history, Past) else None
    real = getattr(storage, REAL, None)
    return _Note(tensor, made_of(tensor), storage, real, past, past is not None and past.is_over)


def _put(home: Any, name: str, value: Any) -> None:
    if value is not None:
        setattr(home, name, value)
    elif hasattr(home, name):
        delattr(home, name)
