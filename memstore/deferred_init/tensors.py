"""Deferred tensors, and the real ones that become of them: of the same class, sharing what they shared.

`materialize` makes real tensors, `become` gives a deferred tensor its values. `is_wrapper` and `parts_of` know tensors
that wrap deferred ones. `note_placed` and `Swaps` put real tensors into a module; `as_before` undoes it after an error.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from memstore._compat import (
    HOOK_DICTS,
    PARAMETER_MARK,
    DisableTorchFunction,
    is_traceable_wrapper_subclass_type,
    make_subclass,
    slot_names,
    swap_tensor_impl,
    tensor_impl,
    use_count,
    version_of,
)
from memstore._wording import an
from memstore.deferred_init.replay import Past, Replay, now, one_at_a_time
from memstore.errors import UnsupportedValueError
from memstore.fake import (
    Mark,
    TensorRef,
    become_fake,
    mark_of,
    original_class,
    over_storage,
    ref_of,
    requires_grad,
    unrecorded_writes,
)
from memstore.structure import modes

# --- Wrappers --------------------------------------------------------------------------------------------------------
# Tensors that wrap deferred ones: DTensors, and other subclasses with `__tensor_flatten__`.
#
# Outside of `deferred_init` no mode is on, so nobody sees how a wrapper is made, nor what is done with it. But torch
# calls a hook for each parameter that a module gets. That is the moment at which its parts become of the class that
# says what is done with them, so that they can be distributed further. What is done with the wrapper itself stays
# unseen.


_VERSION = "_memstore_version"  # of a wrapper: how often it had been written when it was noted

_is_class_of_wrappers = functools.cache(is_traceable_wrapper_subclass_type)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is made of others, as a DTensor is."""
    return _is_class_of_wrappers(type(tensor))


def parts_of(tensor: Any) -> list[torch.Tensor]:
    """Returns the tensors that a wrapper is made of. Some of them may wrap others again."""
    found: list[torch.Tensor] = []
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # a DTensor names its mesh too
            found.extend(parts_of(part) if is_wrapper(part) else [part])
    return found


def all_within(tensor: Any) -> list[torch.Tensor]:
    """Returns the tensors that a wrapper is made of, and what these are made of, at all depths."""
    names = tensor.__tensor_flatten__()[0] if is_wrapper(tensor) else ()
    parts = [part for name in names if isinstance(part := getattr(tensor, name), torch.Tensor)]
    return [*parts, *(one for part in parts for one in all_within(part))]


def note_wrapper(tensor: torch.Tensor) -> None:
    """Notes that all that was done with a wrapper so far was seen. Does nothing if it wraps no deferred tensor."""
    if not is_wrapper(tensor):
        return
    with DisableTorchFunction():
        parts = [one for one in parts_of(tensor) if mark_of(one) is not None]
        for one in parts:
            become_fake(one)
        if parts:
            setattr(tensor, _VERSION, version_of(tensor))


@functools.cache
def note_new_parameters() -> None:
    """Arranges that parameters that wrap deferred tensors are noted when a module gets them."""

    def note(module: torch.nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None:
            note_wrapper(parameter)

    register_module_parameter_registration_hook(note)


# --- Deferred tensors, made real -------------------------------------------------------------------------------------


_OURS = "_memstore_"
MADE, REAL = "_memstore_made", "_memstore_real"  # of a deferred tensor, and of its storage


@contextmanager
def plainly() -> Generator[None]:
    """Lets plain tensors be made, also inside of modes and of inference mode."""
    no_functions = DisableTorchFunction()
    with modes.put_aside(entirely=True), no_functions, torch.inference_mode(False), torch.no_grad():
        yield


def _marks_of(tensor: torch.Tensor) -> list[Mark]:
    """Returns the marks of a fake tensor, or of those that a wrapper is made of."""
    with DisableTorchFunction():
        parts = parts_of(tensor) if is_wrapper(tensor) else [tensor]
        return [mark for one in parts if (mark := mark_of(one)) is not None]


def is_deferred_tensor(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor was made by `deferred_init`. One that was materialized before still is deferred."""
    return any(mark.history is not None for mark in _marks_of(tensor))


def has_no_past(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor was made by `fake_mode`: it is fake, and can't be replayed."""
    return any(mark.history is None for mark in _marks_of(tensor))


def is_empty(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor wraps meta tensors of which nothing is known."""
    with DisableTorchFunction():
        return is_wrapper(tensor) and any(one.is_meta and mark_of(one) is None for one in parts_of(tensor))


def materialize(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Makes real tensors for deferred ones, all by one replay. Tensors that are real are returned as they are."""
    given = list(tensors)
    with one_at_a_time():
        wrappers = [one for one in given if is_wrapper(one) and made_of(one) is None and is_deferred_tensor(one)]
        for one in wrappers:
            with DisableTorchFunction():
                writes = version_of(one) - getattr(one, _VERSION, 0)
                if writes > 0:
                    times = "once" if writes == 1 else f"{writes} times"
                    raise UnsupportedValueError(
                        f"{an(type(one))} of shape {tuple(one.shape)} was written {times} while it was "
                        "deferred, which isn't recorded: write before it is distributed, or materialize it first"
                    )
        _materialize_parts([part for one in wrappers for part in parts_of(one)])
        return _materialize_parts(given)


def _materialize_parts(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with plainly():
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
            _check_writes(one, mark)
            if not hasattr(one.untyped_storage(), REAL):
                wanted.setdefault(mark, one)
        moment = now()
        for mark, real in Replay().run([(mark, moment) for mark in wanted]).items():
            keep_real(wanted[mark], real)
        return [_as_real(one) for one in given]


def made_for_now(tensor: torch.Tensor) -> torch.Tensor:
    """Makes the real tensor, for a caller that takes a part of it: the deferred one doesn't keep its memory."""
    with DisableTorchFunction():
        storage = tensor.untyped_storage()
        is_kept = hasattr(storage, REAL)
        made = materialize([tensor])[0]
        if not is_kept:
            delattr(storage, REAL)
        return made


def made_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns what became of a deferred tensor."""
    return tensor.__dict__.get(MADE)


def keep_real(tensor: torch.Tensor, real: torch.Tensor, shown: TensorRef | None = None) -> None:
    """Arranges that what shares a deferred tensor's storage will share this storage.

    Args:
        shown: what of the deferred storage `real` has; None: it lies over a storage that is laid out as that one.
    """
    ref = ref_in(tensor)
    _end(ref.mark)
    shift = 0 if shown is None else (real.storage_offset() - shown.offset) * real.itemsize
    with DisableTorchFunction():
        setattr(tensor.untyped_storage(), REAL, (real, shift))


def share(tensor: torch.Tensor) -> bool:
    """Makes a deferred tensor real, if its storage was made for another one."""
    with DisableTorchFunction():
        kept = getattr(tensor.untyped_storage(), REAL, None)
        if kept is None:
            return False
        real, shift = kept
        ref = ref_in(tensor)
        become(tensor, over_storage(real, ref._replace(offset=ref.offset + shift // ref.dtype.itemsize)))
        return True


def ref_in(tensor: torch.Tensor) -> TensorRef:
    """Returns the ref of a deferred tensor."""
    with DisableTorchFunction():
        mark = mark_of(tensor)
        assert mark is not None, "it is deferred"
        return ref_of(tensor, mark)


def shows_all(tensor: torch.Tensor) -> bool:
    """Returns whether a deferred tensor is its whole storage, in order."""
    with DisableTorchFunction():
        nbytes = tensor.untyped_storage().nbytes()
        return tensor.is_contiguous() and not tensor.storage_offset() and tensor.numel() * tensor.itemsize == nbytes


def become(tensor: torch.Tensor, data: torch.Tensor, cls: Any = None) -> torch.Tensor:
    """Makes what becomes of a deferred tensor: a tensor of its class and with its attributes, over `data`.

    Args:
        cls: another class: that of a lazy tensor which gets values.
    """
    with plainly():
        made = _become(tensor, data, original_class(type(tensor)) if cls is None else cls)
        for one in parts_of(tensor) if is_wrapper(tensor) else [tensor]:
            _end(mark_of(one))
        return made


def _end(mark: Mark | None) -> None:
    """Ends a mark, whose storage is real now: a deferred tensor that is written later would not change it."""
    if mark is not None and isinstance(mark.history, Past):
        mark.history.is_over = True


def _become(tensor: torch.Tensor, data: torch.Tensor, cls: Any) -> torch.Tensor:
    if cls is torch.Tensor and isinstance(tensor, torch.nn.Parameter):
        cls = torch.nn.Parameter  # of a deferred tensor, outside of the mode, it makes one by a mark
    needs_grad = requires_grad(tensor) and (data.is_floating_point() or data.is_complex())
    if type(data) is not torch.Tensor and not is_wrapper(data):
        data = data.as_subclass(torch.Tensor)  # a source's class is none of the module's
    if cls is torch.Tensor or (is_wrapper(data) and not isinstance(tensor, torch.nn.Parameter)):
        made = data.detach().requires_grad_(needs_grad and tensor.is_leaf)
    elif type(data) is not torch.Tensor:  # a DTensor, which says by a mark that it is a parameter
        made = torch.nn.Parameter(data, needs_grad)
    else:
        made = make_subclass(cls, data, needs_grad)
    _keep_attributes(tensor, made)
    setattr(tensor, MADE, made)
    return made


def _keep_attributes(tensor: torch.Tensor, made: torch.Tensor) -> None:
    for name in slot_names(type(made)):
        if hasattr(tensor, name) and not hasattr(made, name):
            setattr(made, name, getattr(tensor, name))
    for name, one in tensor.__dict__.items():
        if not name.startswith(_OURS) and name not in made.__dict__ and name != PARAMETER_MARK:
            setattr(made, name, one)
    for name in HOOK_DICTS if made.requires_grad else ():
        hooks = getattr(tensor, name)
        if hooks:
            setattr(made, name, hooks)


def _check_writes(tensor: torch.Tensor, mark: Mark) -> None:
    """Raises UnsupportedValueError if a tensor was written where no mode has seen it: torch counts all writes."""
    past = mark.history
    if mark.is_lent or not isinstance(past, Past):
        return
    count = unrecorded_writes(tensor, mark, past.writes)
    if count > 0:
        raise UnsupportedValueError(
            f"a deferred tensor of shape {tuple(tensor.shape)} was written {count + past.writes} times, of which "
            f"{past.writes} were recorded: another thread has written it. Write it in the thread that makes it"
        )


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    if is_wrapper(tensor) and made_of(tensor) is None and is_deferred_tensor(tensor):
        return _wrap_again(tensor)
    mark = mark_of(tensor)
    if mark is None:
        made = made_of(tensor)
        return tensor if made is None else made
    if made_of(tensor) is None:
        share(tensor)
    made = made_of(tensor)
    assert made is not None, "its storage was made"
    return made


def _wrap_again(tensor: Any) -> torch.Tensor:
    """Wraps the real parts."""
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    parts = {name: _as_real(one) if isinstance(one, torch.Tensor) else one for name, one in parts.items()}
    made = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, tensor.requires_grad)
    _keep_attributes(tensor, made)
    setattr(tensor, MADE, made)
    return made


# --- Real tensors in a module ----------------------------------------------------------------------------------------
# Which deferred tensors are in a module as real ones already; and how all was, for a call that fails.
#
# A module's deferred tensor becomes real as the same Python object: `Swaps` gives it what was made for it. So who has
# got the object before (an optimizer, another module, a hook's handle, a weak reference) has the real tensor
# afterwards. The object that was made gets what was deferred: views of C++'s and graphs that refer to that find it
# deferred, as before.


_PLACED = "_memstore_placed"  # of a deferred tensor; and, of its storage, what shows it


def note_placed(tensor: torch.Tensor) -> None:
    """Notes that what became of it is in a module. No later call changes that: somebody may have trained it."""
    with DisableTorchFunction():
        setattr(tensor, _PLACED, True)
        made = made_of(tensor)
        if made is None or is_wrapper(tensor) or is_wrapper(made):
            return
        storage = tensor.untyped_storage()
        real = getattr(storage, REAL, None)
        if real is not None and real[0].untyped_storage() is made.untyped_storage():
            setattr(storage, _PLACED, {*getattr(storage, _PLACED, ()), _shown(tensor)})


def is_placed(tensor: torch.Tensor) -> bool:
    """Returns whether a deferred tensor, or one that shows the same of its storage, is in a module as a real one."""
    with DisableTorchFunction():
        if _PLACED in tensor.__dict__:
            return True
        if is_wrapper(tensor):
            return False
        storage = tensor.untyped_storage()
        return hasattr(storage, REAL) and _shown(tensor) in getattr(storage, _PLACED, ())


def is_real(tensor: torch.Tensor) -> bool:
    """Returns whether a deferred tensor, or its storage, was made before."""
    with DisableTorchFunction():
        return made_of(tensor) is not None or hasattr(tensor.untyped_storage(), REAL)


def _shown(tensor: torch.Tensor) -> tuple[Any, ...]:
    return ref_in(tensor)[1:]


@contextmanager
def as_before(tensors: Iterable[torch.Tensor]) -> Generator[None]:
    """Undoes, after an error, what has become of deferred tensors since."""
    with DisableTorchFunction():
        notes = [_Note(part) for one in tensors for part in (one, *(parts_of(one) if is_wrapper(one) else ()))]
    try:
        yield
    except BaseException:
        for note in notes:
            note.restore()
        raise


class _Note:
    """Notes on a tensor and its storage, from before a call."""

    def __init__(self, tensor: torch.Tensor) -> None:
        mark = None if is_wrapper(tensor) else mark_of(tensor)
        self.tensor, self.made = tensor, made_of(tensor)
        self.storage = None if is_wrapper(tensor) else tensor.untyped_storage()
        self.real = getattr(self.storage, REAL, None)
        self.past = mark.history if mark is not None and isinstance(mark.history, Past) else None
        self.is_over = self.past is not None and self.past.is_over

    def restore(self) -> None:
        homes: tuple[tuple[Any, str, Any], ...] = ((self.tensor, MADE, self.made), (self.storage, REAL, self.real))
        for home, name, value in homes:
            if value is not None:
                setattr(home, name, value)
            elif hasattr(home, name):
                delattr(home, name)
        if self.past is not None:
            self.past.is_over = self.is_over


# --- The same object, made real --------------------------------------------------------------------------------------


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
                    # Autograd hasn't heard of the hooks of what requires no gradients any more, and would of no others.
                    for name in () if one.tensor.requires_grad else HOOK_DICTS:
                        if getattr(one.tensor, name):
                            setattr(one.tensor, name, None)
                    # Backward raises for what was computed before: its gradients would be lost.
                    deferred: Any = other.tensor
                    if deferred.requires_grad and deferred.is_leaf and use_count(deferred) > 1:
                        torch.autograd.graph.get_gradient_edge(deferred).node.register_prehook(_refuse_gradients)
                else:
                    if tensor_impl(one.tensor) != one.impl:
                        swap_tensor_impl(one.tensor, other.tensor)
                    one.give_to(one.tensor)
                    other.give_to(other.tensor)
                    setattr(one.tensor, MADE, other.tensor)
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
        pair = _Content(tensor), _Content(made)
        self._done[id(tensor)] = pair
        try:
            swap_tensor_impl(tensor, made)
        except RuntimeError as error:
            raise UnsupportedValueError(
                f"{name} can't become real as the same object, since C++ code has a weak reference of it: let go of "
                f"that, or put a copy.deepcopy of it in its place ({error})"
            ) from error
        pair[1].give_to(tensor)
        pair[0].give_to(made)
        setattr(made, MADE, tensor)

    def deferred(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the object that has the deferred content by now; None if the tensor wasn't swapped."""
        pair = self._done.get(id(tensor))
        return None if pair is None else pair[1].tensor


class _Content:
    """Content of a tensor's object before a swap."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.cls, self.impl, self.attributes = tensor, type(tensor), tensor_impl(tensor), tensor.__dict__
        self.slots = {name: getattr(tensor, name) for name in slot_names(self.cls) if hasattr(tensor, name)}

    def give_to(self, tensor: Any) -> None:
        """Gives another object this class and these attributes."""
        tensor.__class__ = self.cls
        tensor.__dict__ = self.attributes
        for name in slot_names(self.cls):
            if name in self.slots:
                setattr(tensor, name, self.slots[name])
            elif hasattr(tensor, name):
                delattr(tensor, name)


@functools.cache
def have_same_slots(cls: type[Any], other: type[Any]) -> bool:
    """Returns whether objects of these classes can become of the other one's: a plain tensor can't become a DTensor."""
    return set(slot_names(cls)) == set(slot_names(other))


def _refuse_gradients(_: Any) -> None:
    raise UnsupportedValueError(
        "this was computed before materialize_module made the parameters real, so it has no gradients for them: call "
        "the module again, and backward of what that returns"
    )
