"""Deferred tensors, and the real ones that become of them: of the same class, sharing what they shared."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copyreg
import functools
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memstore.deferred_init.events import Past, now
from memstore.deferred_init.replay import Replay, one_at_a_time
from memstore.deferred_init.wrappers import check_wrapper, is_wrapper, parts_of
from memstore.errors import UnsupportedValueError
from memstore.fake import Mark, Ref, mark_of, original_class, over_storage, ref_of, requires_grad, unrecorded_writes
from memstore.structure import modes

_OURS = "_memstore_"
_IS_PARAMETER = "_is_param"
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # by these dicts their handles remove them
MADE, REAL = "_memstore_made", "_memstore_real"  # of a deferred tensor, and of its storage


@contextmanager
def plainly() -> Generator[None]:
    """What is made is a plain tensor, also inside of modes and of inference mode."""
    no_functions = torch._C.DisableTorchFunction()
    with modes.put_aside(entirely=True), no_functions, torch.inference_mode(False), torch.no_grad():
        yield


def is_deferred_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made by `deferred_init`. One that was materialized before still is deferred."""
    with torch._C.DisableTorchFunction():
        if is_wrapper(tensor):
            return any(is_deferred_tensor(one) for one in parts_of(tensor))
        mark = mark_of(tensor)
        return mark is not None and mark.history is not None


def has_no_past(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made by `fake_mode`: it is fake, and can't be replayed."""
    with torch._C.DisableTorchFunction():
        if is_wrapper(tensor):
            return any(has_no_past(one) for one in parts_of(tensor))
        mark = mark_of(tensor)
        return mark is not None and mark.history is None


def materialize(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Real tensors for deferred ones, all by one replay. Those that are real are returned as they are."""
    given = list(tensors)
    with one_at_a_time():
        wrappers = [one for one in given if is_wrapper(one) and made_of(one) is None and is_deferred_tensor(one)]
        for one in wrappers:
            check_wrapper(one)
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
    """The real tensor, for one who takes a part of it: the deferred one doesn't keep its memory."""
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()
        is_kept = hasattr(storage, REAL)
        made = materialize([tensor])[0]
        if not is_kept:
            delattr(storage, REAL)
        return made


def made_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What became of a deferred tensor."""
    return tensor.__dict__.get(MADE)


def keep_real(tensor: torch.Tensor, real: torch.Tensor, shown: Ref | None = None) -> None:
    """What shares a deferred tensor's storage will share this storage.

    Args:
        shown: what of the deferred storage `real` has; None: it lies over a storage that is laid out as that one.
    """
    ref = ref_in(tensor)
    _end(ref.mark)
    shift = 0 if shown is None else (real.storage_offset() - shown.offset) * real.itemsize
    with torch._C.DisableTorchFunction():
        setattr(tensor.untyped_storage(), REAL, (real, shift))


def share(tensor: torch.Tensor) -> bool:
    """Makes a deferred tensor real, if its storage was made for another one."""
    with torch._C.DisableTorchFunction():
        kept = getattr(tensor.untyped_storage(), REAL, None)
        if kept is None:
            return False
        real, shift = kept
        ref = ref_in(tensor)
        become(tensor, over_storage(real, ref._replace(offset=ref.offset + shift // ref.dtype.itemsize)))
        return True


def ref_in(tensor: torch.Tensor) -> Ref:
    """The ref of a deferred tensor."""
    with torch._C.DisableTorchFunction():
        mark = mark_of(tensor)
        assert mark is not None, "it is deferred"
        return ref_of(tensor, mark)


def shows_all(tensor: torch.Tensor) -> bool:
    """Whether a deferred tensor is its whole storage, in order."""
    with torch._C.DisableTorchFunction():
        nbytes = tensor.untyped_storage().nbytes()
        return tensor.is_contiguous() and not tensor.storage_offset() and tensor.numel() * tensor.itemsize == nbytes


def become(tensor: torch.Tensor, data: torch.Tensor, cls: Any = None) -> torch.Tensor:
    """A tensor of the deferred one's class and with its attributes, over `data`; it is what becomes of it.

    Args:
        cls: another class: that of a lazy tensor which gets values.
    """
    with plainly():
        made = _become(tensor, data, original_class(type(tensor)) if cls is None else cls)
        for one in parts_of(tensor) if is_wrapper(tensor) else [tensor]:
            _end(mark_of(one))
        return made


def _end(mark: Mark | None) -> None:
    """What it marks is real from now on: a deferred tensor that is written later would not change it."""
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
        made = torch.Tensor._make_subclass(cls, data, needs_grad)
    _keep_attributes(tensor, made)
    setattr(tensor, MADE, made)
    return made


@functools.cache
def slot_names(cls: type[Any]) -> tuple[str, ...]:
    """The names that a class and its bases have in `__slots__`."""
    return tuple(copyreg._slotnames(cls))  # type: ignore[attr-defined]


def _keep_attributes(tensor: torch.Tensor, made: torch.Tensor) -> None:
    for name in slot_names(type(made)):
        if hasattr(tensor, name) and not hasattr(made, name):
            setattr(made, name, getattr(tensor, name))
    for name, one in tensor.__dict__.items():
        if not name.startswith(_OURS) and name not in made.__dict__ and name != _IS_PARAMETER:
            setattr(made, name, one)
    for name in HOOKS if made.requires_grad else ():
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
    """A wrapper of the real parts."""
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    parts = {name: _as_real(one) if isinstance(one, torch.Tensor) else one for name, one in parts.items()}
    made = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, tensor.requires_grad)
    _keep_attributes(tensor, made)
    setattr(tensor, MADE, made)
    return made
