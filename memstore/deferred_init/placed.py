"""Which deferred tensors are in a module as real ones already; and how all was, for a call that fails.

A module's deferred tensor becomes real as the same Python object: `Swaps` gives it what was made for it. So who has got
the object before (an optimizer, another module, a hook's handle, a weak reference) has the real tensor afterwards. The
object that was made gets what was deferred: views of C++'s and graphs that refer to that find it deferred, as before.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from memstore.deferred_init.events import Past
from memstore.deferred_init.tensors import HOOKS, MADE, REAL, made_of, plainly, ref_in, slot_names
from memstore.deferred_init.wrappers import is_wrapper, parts_of
from memstore.errors import UnsupportedValueError
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


# --- the same object, made real ---------------------------------------------------------------------------------------


class Swaps:
    """Deferred tensors that became real as the same objects. After an error in its context none has."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[_Content, _Content]] = {}

    def __enter__(self) -> Swaps:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        with plainly():
            for one, other in reversed(self._done.values()):
                if kind is None:
                    _end_hooks(one.tensor)
                    _refuse_backward(other.tensor)
                else:
                    _put_back(one, other)
        if kind is not None:
            self._done.clear()

    def swap(self, name: str, tensor: torch.Tensor, made: torch.Tensor) -> None:
        """Gives a deferred tensor the content of the real one that was made for it, and that one the deferred content.

        torch.utils.swap_tensors does the same, and refuses what has views or weak references, such as an LSTM's of its
        weights. But a weak reference is one of the object, which becomes real, and views are of what was deferred.

        Args:
            name: of the tensor, for the error.

        Raises:
            UnsupportedValueError: C++ has a weak reference of it.
        """
        pair = _content(tensor), _content(made)
        self._done[id(tensor)] = pair
        try:
            torch._C._swap_tensor_impl(tensor, made)
        except RuntimeError as error:
            raise UnsupportedValueError(
                f"{name} can't become real as the same object, since C++ code has a weak reference of it: let go of "
                f"that, or put a copy.deepcopy of it in its place ({error})"
            ) from error
        _set(tensor, pair[1])
        _set(made, pair[0])
        setattr(made, MADE, tensor)

    def deferred(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The object that has the deferred content by now; None: the tensor wasn't swapped."""
        pair = self._done.get(id(tensor))
        return None if pair is None else pair[1].tensor


class _Content(NamedTuple):
    """All that a tensor's object had before a swap."""

    tensor: torch.Tensor
    impl: int
    cls: Any
    attributes: dict[str, Any]
    slots: dict[str, Any]


def _content(tensor: Any) -> _Content:
    cls = type(tensor)
    slots = {name: getattr(tensor, name) for name in slot_names(cls) if hasattr(tensor, name)}
    return _Content(tensor, tensor._cdata, cls, tensor.__dict__, slots)


def _set(tensor: Any, content: _Content) -> None:
    tensor.__class__ = content.cls
    tensor.__dict__ = content.attributes
    for name in slot_names(content.cls):
        if name in content.slots:
            setattr(tensor, name, content.slots[name])
        elif hasattr(tensor, name):
            delattr(tensor, name)


def _put_back(one: _Content, other: _Content) -> None:
    if one.tensor._cdata != one.impl:
        torch._C._swap_tensor_impl(one.tensor, other.tensor)
    _set(one.tensor, one)
    _set(other.tensor, other)
    setattr(one.tensor, MADE, other.tensor)


@functools.cache
def have_same_slots(cls: type[Any], other: type[Any]) -> bool:
    """Whether objects of these classes can become of the other one's. A plain tensor's can't become a DTensor."""
    return set(slot_names(cls)) == set(slot_names(other))


def _end_hooks(tensor: torch.Tensor) -> None:
    """Takes hooks from what requires no gradients any more: autograd has not heard of them, and would of no others."""
    for name in () if tensor.requires_grad else HOOKS:
        if getattr(tensor, name):
            setattr(tensor, name, None)


def _refuse_backward(deferred: Any) -> None:
    """Makes backward raise for what was computed before: its gradients would be lost, and not those of what is real."""
    if deferred.requires_grad and deferred.is_leaf and deferred._use_count() > 1:
        torch.autograd.graph.get_gradient_edge(deferred).node.register_prehook(_refuse_gradients)


def _refuse_gradients(_: Any) -> None:
    raise UnsupportedValueError(
        "this was computed before materialize_module made the parameters real, so it has no gradients for them: call "
        "the module again, and backward of what that returns"
    )
