"""Fake tensors: the marks by which they are known, their class outside of a mode, and fake_like.

A fake tensor is a meta tensor whose *storage* has a mark. So whatever shares the storage is fake too, and no table has
to be kept: a view, a Parameter, what `.data` gives; and what a tensor shows of its storage says all about it
(`TensorRef`). At the end of a mode `become_fake` gives a tensor a class that says by itself what it is, and where.

The functions of the first chapter look at tensors in C, past properties of subclasses. Callers have torch functions
disabled.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memstore import structure
from memstore._compat import DisableTorchFunction, TensorBase, neg_view, version_of
from memstore.errors import UnsupportedValueError
from memstore.structure import RefusedError, modes

# --- Marks -----------------------------------------------------------------------------------------------------------


is_meta: Callable[[torch.Tensor], bool] = TensorBase.is_meta.__get__
requires_grad: Callable[[torch.Tensor], bool] = TensorBase.requires_grad.__get__
is_leaf: Callable[[torch.Tensor], bool] = TensorBase.is_leaf.__get__
storage_of: Callable[[torch.Tensor], Any] = TensorBase.untyped_storage
is_inference: Callable[[torch.Tensor], bool] = TensorBase.is_inference
_device, _dtype, _layout = TensorBase.device.__get__, TensorBase.dtype.__get__, TensorBase.layout.__get__
_size, _stride, _offset = TensorBase.size, TensorBase.stride, TensorBase.storage_offset
_is_conj, _is_neg = TensorBase.is_conj, TensorBase.is_neg
_NAME = "_memstore_fake"
META = torch.device("meta")
APART = 1 << 30  # the first version of what `.data` gives; torch counts its writes by themselves
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


class Mark:
    """Facts about a fake tensor's storage.

    Attributes:
        device: where it would be. "cuda" without an index is the device that is current whenever somebody asks.
        history: what was done with it, a `History` of session.py; None: nobody knows, so it has no values.
        is_lent: a tensor was moved to it, or from it, by `.data =` or `set_`; versions count writes of both storages.
        writes_apart: how often it was written through what `.data` gave.
    """

    __slots__ = ("device", "history", "is_lent", "writes_apart")

    def __init__(self, device: torch.device, history: Any) -> None:
        self.device, self.history, self.is_lent, self.writes_apart = device, history, False, 0


class TensorRef(NamedTuple):
    """Fake tensor, as what it shows of its storage. It keeps the mark, and no tensor."""

    mark: Mark
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


def mark_of(tensor: torch.Tensor) -> Mark | None:
    """Returns the mark of a fake tensor; None for any other."""
    if not is_meta(tensor):
        return None
    try:
        return getattr(storage_of(tensor), _NAME, None)
    except NotImplementedError:  # a sparse one: it has none
        return None


def set_mark(tensor: torch.Tensor, mark: Mark) -> None:
    setattr(storage_of(tensor), _NAME, mark)


def unrecorded_writes(tensor: torch.Tensor, mark: Mark, recorded: int) -> int:
    """Returns how many writes of a tensor torch has counted that no recorder has heard of.

    Args:
        recorded: how many writes of its storage one has heard of.
    """
    if is_apart(tensor):
        return version_of(tensor) - APART - mark.writes_apart
    return 0 if is_inference(tensor) else version_of(tensor) - recorded + mark.writes_apart


def is_apart(tensor: torch.Tensor) -> bool:
    """Returns whether its writes are counted apart from those of the tensor that it is the data of."""
    return not is_inference(tensor) and version_of(tensor) >= APART


def ref_of(tensor: torch.Tensor, mark: Mark) -> TensorRef:
    return TensorRef(
        mark,
        _dtype(tensor),
        tuple(_size(tensor)),
        tuple(_stride(tensor)),
        _offset(tensor),
        _is_conj(tensor),
        _is_neg(tensor),
    )


def storage_bytes(tensor: torch.Tensor) -> int:
    return int(storage_of(tensor).nbytes())


def over_storage(tensor: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """Makes a tensor over the storage of another one, of which it shows what the ref shows of its own."""
    made = torch.empty(0, dtype=ref.dtype, device=_device(tensor))
    made.set_(storage_of(tensor), ref.offset, ref.size, ref.stride)
    made = made.conj() if ref.conj else made
    return neg_view(made) if ref.neg else made


def meta_twin(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a meta tensor with the shape and strides of a real one, and nothing else of it."""
    return torch.empty_strided(_size(tensor), _stride(tensor), dtype=_dtype(tensor), device=META)


def form_of(tensor: torch.Tensor) -> str:
    """Names the form in which a tensor has its values, if it can't be fake; else ""."""
    if _dtype(tensor) in _QUANTIZED:
        return "quantized"
    return "" if _layout(tensor) is torch.strided else "sparse"


def tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)  # pyright: ignore[reportUnknownArgumentType]


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Returns the same arguments or results, with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is list or type(value) is tuple:
        return type(value)(map_tensors(change, one) for one in value)
    return value


# --- The class of a fake tensor --------------------------------------------------------------------------------------
# The class of a fake tensor outside of its mode: it says by itself what it is, and where.
#
# It is a class of its own for each class of tensors: an instance of that one, under the same name. A tensor becomes of
# it at the end of its mode, as lazy parameters become others: by assignment to `__class__`.


Run = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


class FakeTensor:
    """Base of the classes of fake tensors. A torch function on an instance runs in a mode of its own.

    Attributes:
        run: by which; `mode.py` sets it.
        original: the class that the tensor had.
    """

    __slots__ = ()
    run: Run
    original: type[torch.Tensor]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeTensor.run(function, types, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        text = FakeTensor.run(torch.Tensor.__repr__, (type(self),), (self,), {})
        return f"Parameter containing:\n{text}" if isinstance(self, torch.nn.Parameter) else text

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return FakeTensor.run(self.original.__deepcopy__, (type(self),), (self, memo), {})

    def set_(self, *args: Any, **options: Any) -> Any:
        return FakeTensor.run(torch.Tensor.set_, (type(self),), (self, *args), options)  # torch asks nobody

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FakeTensor.run(torch.Tensor.__reduce_ex__, (type(self),), (self, protocol), {})


def become_fake(tensor: torch.Tensor) -> None:
    """Gives the tensor the class that says that it is fake."""
    cls = type(tensor)
    if not issubclass(cls, FakeTensor):
        tensor.__class__ = _fake_class(cls)


def original_class(cls: type[Any]) -> type[torch.Tensor]:
    return cls.original if issubclass(cls, FakeTensor) else cls


@functools.cache
def _fake_class(cls: Any) -> Any:
    def new(_: Any, *args: Any, **options: Any) -> Any:
        return cls(*args, **options)  # `type(parameter)(values)`, as loaders of weights do, makes what isn't fake

    names = {"original": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    names["__new__"] = new
    if hasattr(cls, "cls_to_become"):  # of a lazy one that gets its shape outside of the mode
        names["cls_to_become"] = _fake_class(cls.cls_to_become)
    return type(cls)(cls.__name__, (FakeTensor, cls), names)


# --- fake_like -------------------------------------------------------------------------------------------------------


@modes.uncompiled
def fake_like(value: Any) -> Any:
    """Returns the same containers with fake tensors, of the same shapes, dtypes and devices. No bytes are read.

    Args:
        value: a view, a tensor, a TensorDict, or dicts, lists and tuples of these, of any depth. Other objects stay.

    Returns:
        New containers. A tensor that occurs twice in `value` is one fake tensor.

    Example:
        >>> import torch
        >>> from memstore.fake import fake_like
        >>> fake_like({"w": torch.zeros(2, 3)})
        {'w': tensor(..., size=(2, 3), fake=True)}
    """
    try:
        structure.check_nesting(value)
    except RefusedError as error:
        raise UnsupportedValueError(error.message()) from None
    with modes.put_aside():
        return _like(value, {})


def _like(value: Any, seen: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen[id(value)] = _fake(value)
        return seen[id(value)]
    if hasattr(value, "apply") and hasattr(value, "batch_size"):  # a TensorDict, or a tensorclass
        return value.apply(lambda one: _like(one, seen), inplace=False)
    if isinstance(value, Mapping):
        names: list[Any] = list(value)
        found = {name: _like(value[name], seen) for name in names}
        if type(value) is dict:
            return found
        if not isinstance(value, dict):
            return type(value)(found)  # type: ignore[call-arg]
        made: Any = copy.copy(value)  # with what else it has: a defaultdict its factory
        made.update(found)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_like(one, seen) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_like(one, seen) for one in value)
    return value


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    with DisableTorchFunction(), torch.no_grad():
        made: torch.Tensor = meta_twin(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            made.requires_grad_()
        mark = mark_of(tensor)
        set_mark(made, Mark(tensor.device if mark is None else mark.device, None))
        become_fake(made)
    return made
