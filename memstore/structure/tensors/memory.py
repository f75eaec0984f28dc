"""Whether the bytes of a tensor can be read and written at its address. Every path that does so asks here first.

A tensor may have a shape and no memory: a meta or fake one, a lazy leaf, one whose storage was freed, one that wraps
others (its storage states a size, and has no address). Whoever takes such an address for memory reads or overwrites
what belongs to others, so all of it is looked at in one place:

    why_no_memory   why a tensor has no memory of its own; None where it has all of it
    is_readable     whether its values are the bytes that lie there: on the CPU, without a conjugation still to be done
    memory_of       these bytes, of a tensor that is contiguous
    over            a tensor over a storage, which is never enlarged for it
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from memstore.errors import UnsupportedValueError
from memstore.structure.tensors import traits
from memstore.wording import an

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

FREED = "a tensor whose storage was freed or cut: its bytes aren't there: put it while it has them"
_FAKE = "a fake tensor: it has a shape, but no bytes: give a real one, which materialize_module makes of a deferred one"
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def why_no_memory(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no bytes at its address, as a noun and what to do; None if it has all that its strides need.

    It may be on any device. Takes 1 µs for a contiguous plain tensor on the CPU, and 2 for others.
    """
    try:
        if type(tensor) in _PLAIN and _is_usual(tensor):
            return None
    except (RuntimeError, NotImplementedError):  # of a transform: the same is told below
        pass
    if type(tensor) not in _PLAIN and any(base.__name__ == "FakeTensor" for base in type(tensor).__mro__):
        return _FAKE
    if tensor.is_meta:
        return "a meta tensor: it has a shape, but no bytes: put a real one"
    if tensor.is_nested:
        return "a nested tensor: put its unbind()"
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor: put its to_dense()"
    if tensor.is_quantized:
        return "a quantized tensor: put its dequantize()"
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return _why_not_there(tensor)
    except (RuntimeError, NotImplementedError):  # of a transform, or of a class that has no storage
        return f"{an(type(tensor))}, which has no memory of its own: put a plain tensor of its values"


def _is_usual(tensor: torch.Tensor) -> bool:
    """Whether it is what nearly all are, and has its memory."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and not tensor.storage_offset()
        and 0 < tensor.nbytes <= tensor.untyped_storage().nbytes()
        and tensor.data_ptr() != 0
    )


def _why_not_there(tensor: torch.Tensor) -> str | None:
    elements = tensor.numel()
    if not elements:
        return None
    if not tensor.is_contiguous():
        elements = traits.reach(tensor.shape, tensor.stride())
    storage, start = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize
    if storage.device != tensor.device:  # a fake one, whose class says what it stands for
        return _FAKE
    is_plain = type(tensor) in _PLAIN
    if storage.nbytes() < start + elements * tensor.itemsize:
        return FREED if is_plain else f"{an(type(tensor))}, whose bytes aren't there: put its clone()"
    # A storage without memory has the address 0, to which torch adds the offset.
    if tensor.data_ptr() <= start:
        return f"{an(type(tensor))}, which has no memory of its own: put a plain tensor of its values"
    return None


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether the bytes at its address are its values, in the order of its strides."""
    return tensor.is_cpu and why_no_memory(tensor) is None and not tensor.is_conj() and not tensor.is_neg()


def memory_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor on the CPU that is contiguous. Raises UnsupportedValueError if it has none."""
    reason = why_no_memory(tensor)
    if reason is not None:
        raise UnsupportedValueError(reason)
    nbytes = tensor.numel() * tensor.itemsize
    if not nbytes:
        return np.empty(0, np.uint8)
    flat = over(tensor.untyped_storage(), torch.uint8, int(tensor.storage_offset()) * tensor.itemsize, (nbytes,), (1,))
    return flat.numpy()


def over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int | torch.SymInt,
    shape: Sequence[int],
    stride: Sequence[int],
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A tensor over a storage, which lies on this device; `offset` counts elements.

    Raises UnsupportedValueError where the storage is too small (torch would enlarge it, by bytes of any content), or
    has no memory.
    """
    if type(offset) is int:  # in a trace it is a symbol
        needed = (offset + traits.reach(shape, stride)) * dtype.itemsize if 0 not in shape else 0
        if needed > storage.nbytes():
            raise UnsupportedValueError(
                f"a tensor of shape {list(shape)} needs {needed:,} bytes of a storage that has {storage.nbytes():,}: "
                "it was freed or cut"
            )
        if needed and storage.device.type != "meta" and not _address_of(storage):  # numpy would allocate memory for it
            raise UnsupportedValueError(f"a tensor of shape {list(shape)} over a storage without memory")
    # set_ takes every dtype that has bytes, and makes no view (so no version counter is shared)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)


def _address_of(storage: torch.UntypedStorage) -> int:
    """0 if it has none."""
    try:
        return storage.data_ptr()
    except RuntimeError as error:
        # Of a tensor that wraps others; else it is a lazy leaf's, which may be read and gives out no pointer.
        return 0 if "invalid python storage" in str(error) else 1
