"""Tensor memory: whether the bytes of a tensor lie at its address, and whether and how they may be overwritten.

A tensor may have a shape and no memory: a meta or fake one, a lazy leaf, one whose storage was freed, one that wraps
others (its storage states a size, and has no address). Whoever takes such an address for memory reads or overwrites
what belongs to others. So every path that reads a tensor's bytes or writes to a caller's tensor asks here first:

    why_no_memory    why a tensor has no memory of its own; None where it has all of it
    is_readable      whether its values are the bytes that lie there: on the CPU, without a conjugation still to be done
    memory_of        these bytes, of a tensor that is contiguous
    over             a tensor over a storage, which is never enlarged for it
    why_not_filled   why values can't be written to a tensor; None if they can
    takes_bytes      whether bytes may go straight to its memory; `copy_into` writes all other tensors

A call looks at all of its targets before it writes to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from memstore import _compat
from memstore import _modes as modes
from memstore._wording import an
from memstore.errors import ReadOnlyError, UnsupportedValueError
from memstore.structure import traits

# --- Reading ---------------------------------------------------------------------------------------------------------


Bytes = np.ndarray[Any, np.dtype[np.uint8]]

FREED = "a tensor whose storage was freed or cut: its bytes aren't there: put it while it has them"
_FAKE = "a fake tensor: it has a shape, but no bytes: give a real one, which materialize_module makes of a deferred one"
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def why_no_memory(tensor: torch.Tensor) -> str | None:
    """Says why a tensor has no bytes at its address, and what to do. None if it has all that its strides need.

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
        with _compat.DisableTorchFunctionSubclass():
            return _why_not_there(tensor)
    except (RuntimeError, NotImplementedError):  # of a transform, or of a class that has no storage
        return f"{an(type(tensor))}, which has no memory of its own: put a plain tensor of its values"


def _is_usual(tensor: torch.Tensor) -> bool:
    """Returns whether it is as nearly all are, and has its memory."""
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
    """Returns whether the bytes at its address are its values, in the order of its strides."""
    return tensor.is_cpu and why_no_memory(tensor) is None and not tensor.is_conj() and not tensor.is_neg()


def memory_of(tensor: torch.Tensor) -> Bytes:
    """Returns the bytes of a tensor on the CPU that is contiguous. Raises UnsupportedValueError if it has none."""
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
    """Makes a tensor over a storage, which lies on this device; `offset` counts elements.

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
    """Returns the address of a storage, or 0 if it has none."""
    try:
        return storage.data_ptr()
    except RuntimeError as error:
        # Of a tensor that wraps others; else it is a lazy leaf's, which may be read and gives out no pointer.
        return 0 if "invalid python storage" in str(error) else 1


# --- Filling ---------------------------------------------------------------------------------------------------------


GONE = "a tensor whose storage was freed or cut: its bytes aren't there"
EXPANDED = "an expanded tensor, several of whose elements are one in memory: it can't be filled"
_LAZY = "a lazy leaf of a view, whose version never changes"
_META = "a meta tensor, without memory: give it some first, as module.to_empty(device=...) does"

_WITHOUT_MEMORY = {
    "FakeTensor": "a fake tensor, without memory: give a real one, which materialize_module makes of a deferred one",
    "FunctionalTensor": "a tensor inside a transform of torch.func, which has no memory of its own",
    "UninitializedTensorMixin": "a parameter or buffer that is not initialized yet, and has no memory",
}


def why_not_filled(tensor: torch.Tensor) -> str | None:
    """Says why values can't be written to a tensor; None if they can. It looks at neither shape nor dtype.

    Takes 1 µs for a contiguous tensor on the CPU. Of a DTensor give the local tensor.
    """
    if type(tensor) not in _PLAIN:
        reason = _why_not_of_class(type(tensor)) or (_LAZY if _refuses_pointers(tensor) else None)
        if reason is not None:
            return reason
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else tensor.layout
        return f"a {kind} tensor, which can't be filled in place: give a plain one"
    if tensor.is_meta:
        return _META
    reason = why_no_memory(tensor)
    if reason is not None:
        return GONE if reason == FREED else f"{an(type(tensor))} that has no memory of its own: give a plain one"
    if not tensor.is_contiguous() and traits.overlaps_itself(tensor.shape, tensor.stride()):
        return EXPANDED
    return None


def _why_not_of_class(kind: type) -> str | None:
    for base in kind.__mro__:
        reason = _WITHOUT_MEMORY.get(base.__name__)
        if reason is not None and base.__module__.startswith(("torch.", "memstore.fake.")):
            return reason
    if hasattr(kind, "__tensor_flatten__"):
        return f"a {kind.__qualname__}, which is made of other tensors: it can't be filled in place"
    return None


def _refuses_pointers(tensor: torch.Tensor) -> bool:
    try:
        tensor.data_ptr()
    except ReadOnlyError:
        return True
    except RuntimeError:
        return False
    return False


def takes_bytes(tensor: torch.Tensor) -> bool:
    """Returns whether the values of a tensor that may be filled are just bytes in memory, which this process writes."""
    return tensor.is_cpu and not tensor.is_neg() and not tensor.is_conj()


def copy_into(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Does `target.copy_(source)` for a target that may be filled, whatever its kind."""
    copy_all([target], [source], one_by_one=True, non_blocking=non_blocking)


def copy_all(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, one_by_one: bool, non_blocking: bool
) -> None:
    """Writes every target as torch lets it: inference tensors in inference mode, Parameters without autograd.

    Args:
        one_by_one: some have a conj or neg bit, or other dtypes or devices than their sources.
    """
    groups: dict[bool, list[int]] = {}
    for i, target in enumerate(targets):
        groups.setdefault(target.is_inference(), []).append(i)
    one_by_one = one_by_one or _compat.in_forward_ad()
    for is_inference, chosen in groups.items():
        aside = modes.put_aside(entirely=True) if is_inference else nullcontext()
        with aside, torch.inference_mode(is_inference), torch.no_grad():  # inference_mode(False) would turn autograd on
            into = [traits.copyable(targets[i]) for i in chosen]
            out_of = [traits.copyable(sources[i]) for i in chosen]
            if one_by_one:  # the other has no kernel for some of these
                for target, source in zip(into, out_of, strict=True):
                    target.copy_(source, non_blocking=non_blocking)
            else:
                _compat.copy_each(into, out_of, non_blocking=non_blocking)
