"""StoredTensor: the lazy leaf. It has shape, dtype and strides; its bytes are read when an operator needs them."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from memstore.errors import ReadOnlyError
from memstore.structure import modes
from memstore.view.distribute import distribute
from memstore.view.lazy import LazyTensor, kind_of, make_subclass, name_of, read, refusal, with_kind, wrap
from memstore.view.references import pack, unpack
from memstore.view.run import index_leaf, plain_index, run
from memstore.view.saving import goes_to_a_file, plain_tensor
from memstore.view.source import Source
from memstore.wording import size

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_BASIC = frozenset({int, slice, type(None), type(...)})  # indices that make views
_tensor_getitem: Callable[[Any, Any], Any] = torch.Tensor.__getitem__
_dispatch_modes, _transform = modes.count_dispatch_modes, modes.current_transform
_grad_is_enabled = torch.is_grad_enabled


class NoPointerError(ReadOnlyError, RuntimeError):
    """A pointer into a lazy leaf is refused, since it could be written by. Torch's callers expect a RuntimeError."""


@modes.uncompiled_methods
class StoredTensor(LazyTensor):
    """A tensor of a stored value that is read when it is used, and just the part that is used.

    Slicing, transposing or reshaping it returns another lazy leaf, and reads nothing; any other operator reads what it
    needs. It never changes, and can't be written: take a copy with `clone()`. If it is sent to a process, it is a
    reference of some hundred bytes; `torch.save` writes a plain tensor. Get one from `Store.view` or
    `Snapshot.view`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __torch_dispatch__ = classmethod(run)  # type: ignore[assignment]

    def __new__(cls, *_: Any, **__: Any) -> StoredTensor:
        raise TypeError("a StoredTensor is part of a stored value: get one from Store.view or Snapshot.view")

    # --- slices -------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> torch.Tensor:
        if _dispatch_modes() or _transform() is not None:
            with modes.put_aside():
                return self._indexed(index)
        kind = type(index)
        is_basic = kind in _BASIC or (kind is tuple and _BASIC.issuperset(map(type, index)))
        stored = self.stored
        if not is_basic or stored.wrapped is not None or self.requires_grad:
            return self._indexed(index)
        shown = self.shown[index]
        leaf = make_subclass(StoredTensor, shown)
        leaf.shown, leaf.stored = shown, stored  # what `wrap` does: a call less
        return leaf

    def _indexed(self, index: Any) -> torch.Tensor:
        if self.requires_grad and _grad_is_enabled():
            return _tensor_getitem(self, plain_index(index))  # for its history
        kind = type(index)
        if kind in _BASIC or (kind is tuple and _BASIC.issuperset(map(type, index))):
            return wrap(StoredTensor, self.shown[index], self.stored)
        return index_leaf(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise refusal(self, "an assignment to its elements")

    def distribute(self, mesh: Any, placements: Sequence[Any]) -> DTensor:
        """Reads this rank's part into a DTensor. No rank waits for another: there is no collective.

        Args:
            mesh: a `torch.distributed.device_mesh.DeviceMesh`. The part goes to its kind of device.
            placements: one of torch's placements for each of its dimensions: `Shard(dim)`, `Replicate()`.

        Returns:
            A `torch.distributed.tensor.DTensor`, which requires a gradient if this tensor does.

        Raises:
            UnsupportedValueError: there is no such dimension, or a placement is Partial or unknown.
        """
        return distribute(self, mesh, placements)

    # --- as memory ----------------------------------------------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        """Reads it into a numpy array, which is a copy."""
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        """Reads it into nested lists of numbers, or one number."""
        return read(self).tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.clone().__dlpack__(**options)

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A copy as a plain tensor, without autograd's history. It can't be assigned."""
        return self.detach().clone()

    @data.setter
    def data(self, _: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise refusal(self, "an assignment to .data")

    def new(self, *args: Any, **options: Any) -> torch.Tensor:
        """As `Tensor.new`: a plain tensor of the same dtype, on the same device."""
        return self._plain().new(*args, **options)  # torch's own goes past the operators, and may find no memory

    def new_tensor(self, *args: Any, **options: Any) -> torch.Tensor:
        """As `Tensor.new_tensor`: a plain tensor of the same dtype, on the same device, with the given data."""
        return self._plain().new_tensor(*args, **options)

    def _plain(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def share_memory_(self) -> StoredTensor:
        """Does nothing: processes share the file already. Returns the tensor."""
        return self

    def is_shared(self) -> bool:
        """Always True: processes share the file."""
        return True

    def data_ptr(self) -> int:
        """Raises ReadOnlyError: a lazy leaf has no memory that could be pointed at. Take a copy with `clone()`."""
        raise _no_memory(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns a storage of no bytes. Its methods that would read bytes raise ReadOnlyError, as `data_ptr` does."""
        storage = _NoStorage()
        storage.leaf = self
        return storage

    # --- copies and references ----------------------------------------------------------------------------------------

    def __copy__(self) -> StoredTensor:
        return with_kind(wrap(StoredTensor, self.shown, self.stored), kind_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        copied = memo[id(self)] = self.__copy__()
        if self.is_leaf and self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain tensor where a file is written, else a reference."""
        if modes.are_active():
            with modes.put_aside(entirely=True):
                return self.__reduce_ex__(protocol)
        if goes_to_a_file():
            return plain_tensor(self).__reduce_ex__(protocol)
        return restore_leaf, (self.stored.source, pack(self))

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in ("shown", "stored")]  # of memstore's own

    def __repr__(self, *, tensor_contents: object = None) -> str:
        device = "" if self.stored.place is None else f", device='{self.device}'"
        grad = ", requires_grad=True" if self.requires_grad else ""
        dtype = f"dtype={self.dtype}{device}{grad}"
        lazy = f"lazy, {size(self.numel() * self.itemsize)}"
        return f"StoredTensor({self.stored.source.title}, shape={tuple(self.shape)}, {dtype}, {lazy})"

    def __format__(self, spec: str) -> str:
        return format(read(self), spec) if spec and not self.ndim else repr(self)


class _NoStorage(torch.UntypedStorage):
    """An empty storage: many ask for its size, and then read what there is or take a copy. Its bytes are an error."""

    leaf: StoredTensor

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise _no_memory(self.leaf)

    data_ptr = tolist = clone = copy_ = cpu = share_memory_ = _write_file = _refuse
    __getitem__ = __iter__ = __reduce__ = _refuse


def _no_memory(leaf: StoredTensor) -> NoPointerError:
    return NoPointerError(
        f"{name_of(leaf)} has no memory of its own that could be pointed at: take a copy with clone(), or get the key "
        "instead of its view; to write a file of it, Store.export",
        key=leaf.stored.source.key,
    )


def restore_leaf(source: Source, packed: bytes) -> StoredTensor:
    """Unpickles a leaf."""
    return unpack(StoredTensor, source, packed)
