"""StoredTensor: the lazy leaf. It has shape, dtype and strides; its bytes are read when an operator needs them.

Over the bytes of a stored leaf lie two storages. One may be read and not written: torch refuses a pointer to write by,
in C. A leaf is a subclass instance of `_shown`, a tensor over that one, so what looks for its memory past the operators
finds the values, or an error. To slice `_shown` reads nothing. The other storage is as any, and nobody else gets it: an
operator that needs values gets `_real`, the same elements over that, since many ask for a pointer to write by and then
read. So exactly the bytes that it looks at are read, from the page cache, and copied nowhere first. What it returns has
memory of its own.

A leaf whose values are on another device when they are read has no memory there: it is a wrapper without any.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from memstore.errors import ReadOnlyError
from memstore.structure import modes, over, traits
from memstore.view.pages import bring
from memstore.view.source import Span, count_read

_BASIC = frozenset({int, slice, type(None), type(...)})  # indices that make views
_make_subclass: Callable[..., Any] = torch.Tensor._make_subclass
_make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
guard: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
_tensor_getitem: Callable[[Any, Any], Any] = torch.Tensor.__getitem__
_dispatch_modes, _transform = modes.count_dispatch_modes, modes.current_transform
_grad_is_enabled, _in_inference_mode = torch.is_grad_enabled, torch.is_inference_mode_enabled


class NoPointerError(ReadOnlyError, RuntimeError):
    """A pointer into a lazy leaf is refused, for one could write by it. Torch's callers expect a RuntimeError."""


class StoredTensor(torch.Tensor):
    """A tensor of a stored value that is read when it is used, and just the part that is used.

    To slice, transpose or reshape it gives lazy leaves again, and reads nothing; any other operator reads what it
    needs. It never changes, and can't be written: take a copy with `clone()`. Sent to a process, it is a reference of
    some hundred bytes; `torch.save` writes a plain tensor. Get one from `Store.view`.
    """

    _shown: torch.Tensor
    _span: Span
    _place: torch.device | None  # where the values are when they are read; None: on the CPU
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, *_: Any, **__: Any) -> StoredTensor:
        raise TypeError("a StoredTensor is part of a stored value: get one from Store.view")

    # __torch_dispatch__ is in run.py, which makes leaves

    @property
    def _real(self) -> torch.Tensor:
        """Not to be written, nor to be given to a user."""
        return _real_of(self)

    # --- slices -------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        if _dispatch_modes() or _transform() is not None:
            with modes.put_aside():
                return self._indexed(index)
        kind = type(index)
        is_basic = kind in _BASIC or (kind is tuple and _BASIC.issuperset(map(type, index)))
        if not is_basic or self._place is not None or self.requires_grad:
            return self._indexed(index)
        shown = self._shown[index]
        leaf = _make_subclass(StoredTensor, shown)
        # what `wrap` does: a call less
        leaf._shown, leaf._span, leaf._place = shown, self._span, None
        return leaf

    def _indexed(self, index: Any) -> Any:
        if self.requires_grad and _grad_is_enabled():
            from memstore.view.run import plain_index

            return _tensor_getitem(self, plain_index(index))  # for its history
        kind = type(index)
        if kind in _BASIC or (kind is tuple and _BASIC.issuperset(map(type, index))):
            return wrap(self._shown[index], self._span, self._place)
        from memstore.view.run import index_leaf

        return index_leaf(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise refusal(self, "an assignment to its elements")

    # --- as memory ----------------------------------------------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        """A numpy array of a copy."""
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        return read(self).tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.clone().__dlpack__(**options)

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A copy without history."""
        return self.detach().clone()

    @data.setter
    def data(self, _: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise refusal(self, "an assignment to .data")

    def share_memory_(self) -> StoredTensor:
        """Nothing: processes share the file already."""
        return self

    def is_shared(self) -> bool:
        return True

    def data_ptr(self) -> int:
        raise _no_memory(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty one, whose `data_ptr()` says why."""
        storage = _NoStorage()
        storage.leaf = self
        return storage

    # --- copies and references ----------------------------------------------------------------------------------------

    def __copy__(self) -> StoredTensor:
        return with_kind(wrap(self._shown, self._span, self._place), kind_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        copied = memo[id(self)] = self.__copy__()
        if self.is_leaf and self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        from memstore.view.build import pickle_leaf

        return pickle_leaf(self, protocol)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        device = "" if self._place is None else f", device='{self.device}'"
        grad = ", requires_grad=True" if self.requires_grad else ""
        source = self._span.source
        dtype = f"dtype={self.dtype}{device}{grad}"
        return f"StoredTensor(key={source.key!r}, version={source.version}, shape={tuple(self.shape)}, {dtype})"

    def __format__(self, spec: str) -> str:
        return format(read(self), spec) if spec and not self.ndim else repr(self)


class _NoStorage(torch.UntypedStorage):
    """Empty, since many ask for the size, and then read what there is or take a copy; an error for who wants bytes."""

    leaf: StoredTensor

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise _no_memory(self.leaf)

    data_ptr = tolist = clone = copy_ = cpu = share_memory_ = _write_file = _refuse
    __getitem__ = __iter__ = __reduce__ = _refuse


def wrap(shown: torch.Tensor, span: Span, place: torch.device | None) -> StoredTensor:
    """The lazy leaf that shows `shown`, which lies in the guarded storage of its span."""
    if place is None:
        leaf = _make_subclass(StoredTensor, shown)  # in inference mode too it can be used in training
    else:
        with torch.inference_mode(False):
            shape, strides, offset = shown.shape, shown.stride(), shown.storage_offset()
            leaf = _make_wrapper(StoredTensor, shape, strides, offset, None, shown.dtype, torch.strided, place)
        guard(leaf)
    leaf._shown, leaf._span, leaf._place = shown, span, place
    return leaf


def _real_of(leaf: StoredTensor) -> torch.Tensor:
    shown, base = leaf._shown, leaf._span.base
    if base is not None and base.dtype is shown.dtype and not _dispatch_modes() and _transform() is None:
        return base.as_strided(shown.shape, shown.stride(), shown.storage_offset())
    if modes.are_active() or _in_inference_mode():
        with modes.put_aside(), torch.inference_mode(False):
            return _make_real(leaf)
    return _make_real(leaf)


def _make_real(leaf: StoredTensor) -> torch.Tensor:
    shown, span = leaf._shown, leaf._span
    dtype, shape, stride, offset = shown.dtype, shown.shape, shown.stride(), shown.storage_offset()
    base = span.base
    if base is None:
        memory = span.source.memory[span.start : span.start + shown.untyped_storage().nbytes()]
        base = torch.from_numpy(memory)
        if memory.nbytes % dtype.itemsize == 0 and dtype not in traits.WITHOUT_COPY:
            base = base.view(dtype)  # a tenth of what `over` takes
        span.base = base
    if base.dtype is dtype:
        return base.as_strided(shape, stride, offset)
    return over(base.untyped_storage(), dtype, offset, shape, stride)


def kind_of(leaf: StoredTensor) -> traits.Traits:
    kind = traits.traits_of(leaf)
    is_parameter = getattr(leaf, "_is_param", False)
    return kind._replace(
        kind=traits.PARAMETER if is_parameter else kind.kind, requires_grad=leaf.requires_grad and leaf.is_leaf
    )


def with_kind(leaf: StoredTensor, kind: traits.Traits) -> StoredTensor:
    """`leaf`, which nobody else has yet, as a Parameter (by the mark that isinstance looks at) or Buffer."""
    if kind.kind == traits.PARAMETER:
        leaf._is_param = True  # type: ignore[attr-defined]
        leaf.requires_grad_(kind.requires_grad)
    else:
        traits.with_traits(leaf, kind)
    return leaf


def geometry(leaf: StoredTensor) -> torch.Tensor:
    """The leaf's elements, on the CPU, where they are. Not to be written, nor to be given to a user."""
    return leaf._real


def shown_of(leaf: StoredTensor) -> torch.Tensor:
    """Its geometry in its storage, which starts where its span says."""
    return leaf._shown


def span_of(leaf: StoredTensor) -> Span:
    return leaf._span


def read(leaf: StoredTensor) -> torch.Tensor:
    """The leaf's values, on its device. On the CPU they lie in the mapping: as `geometry`."""
    real, span = _real_of(leaf), leaf._span
    if span.checksum is not None:
        span.check()
    count_read(real.nbytes if real.is_contiguous() else nbytes_of(real))
    if span.source.is_on_disk:
        bring(real)
    return real if leaf._place is None else real.to(leaf._place)


def count_of(leaf: StoredTensor, nbytes: int) -> None:
    span = leaf._span
    if span.checksum is not None:
        span.check()
    count_read(nbytes)


def nbytes_of(real: torch.Tensor) -> int:
    """Of the elements; those that several indices share count once."""
    return min(real.numel(), traits.reach(real.shape, real.stride())) * real.dtype.itemsize


def _name(leaf: StoredTensor) -> str:
    source = leaf._span.source
    return f"a lazy leaf of {source.key!r}"


def _no_memory(leaf: StoredTensor) -> NoPointerError:
    return NoPointerError(
        f"{_name(leaf)} has no memory of its own that could be pointed at: take a copy with clone(), or get the key "
        "instead of its view; to write a file of it, Store.export",
        key=leaf._span.source.key,
    )


def refusal(leaf: StoredTensor, what: str) -> ReadOnlyError:
    return ReadOnlyError(
        f"{what} would write into {_name(leaf)}, whose version never changes: take a copy with clone(), write into "
        "that, and put it as a new version",
        key=leaf._span.source.key,
    )
