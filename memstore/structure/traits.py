"""Traits: what a tensor is beside its bytes: its dtype by name, Parameter or Buffer, requires_grad, device, strides.

DTYPES, Traits                 dtypes by name; the traits of a leaf, read from a tensor and given to one
contiguous_stride, reach ...   arithmetic of strides
has_gaps, pack                 tensors whose elements don't lie side by side, and how they are stored without the gaps
read_device, own_device ...    devices by the names that stored values have of them

A column of a matrix has gaps. So has a column that is expanded: its few elements stand for many indices, but what lies
between them in memory is still not the tensor's. So whether there are gaps doesn't follow from the number of elements.

A process may lack the backend of a device that another one had.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from memstore import _compat
from memstore.errors import UnsupportedValueError
from memstore.structure.refusals import MalformedError, require

# --- Dtypes, traits, and the arithmetic of strides -------------------------------------------------------------------


DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})

MOST_EXPANDED = 16 << 30  # bytes that are written of a tensor beyond those that it has in memory; seconds, not hours

_DTYPE_NAME = re.compile(r"(b?float|u?int|complex|bits)[0-9][0-9a-z_]*")


def may_be_dtype(name: str) -> bool:
    """Returns whether another version of torch may have a dtype of this name."""
    return _DTYPE_NAME.fullmatch(name) is not None


WITHOUT_COPY = frozenset(  # torch has no copy kernel for them
    dtype
    for name, dtype in DTYPES.items()
    if name in {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
)

# dtypes that numpy has and that torch takes from it. Through numpy a leaf costs a third of torch.frombuffer.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        *("float16", "float32", "float64", "complex64", "complex128", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
}

TENSOR, PARAMETER, BUFFER, UNSAVED_BUFFER = range(4)  # kinds: UNSAVED is a Buffer with persistent=False


class Traits(NamedTuple):
    kind: int
    requires_grad: bool
    device: str | None  # None: the CPU


_ON_CPU = tuple((Traits(kind, False, None), Traits(kind, True, None)) for kind in range(4))
PLAIN = _ON_CPU[TENSOR][False]


def traits_of(tensor: torch.Tensor) -> Traits:
    if type(tensor) is torch.nn.Parameter:
        kind = PARAMETER
    elif getattr(tensor, _compat.BUFFER_MARK, False):
        kind = BUFFER if getattr(tensor, "persistent", True) else UNSAVED_BUFFER
    else:
        kind = TENSOR
    if tensor.is_cpu:
        return _ON_CPU[kind][tensor.requires_grad]
    return Traits(kind, tensor.requires_grad, str(tensor.device))


def with_traits(tensor: torch.Tensor, traits: Traits) -> torch.Tensor:
    """Makes a tensor that no caller has yet the Parameter or Buffer that was put."""
    if traits.kind == PARAMETER:
        return _compat.make_subclass(torch.nn.Parameter, tensor, traits.requires_grad)
    if traits.requires_grad:
        tensor.requires_grad_()
    if traits.kind:
        setattr(tensor, _compat.BUFFER_MARK, True)
        tensor.persistent = traits.kind == BUFFER  # type: ignore[attr-defined]
    return tensor


def to_flags(kind: int, requires_grad: bool) -> int:
    """Writes a tensor's kind and requires_grad as one number, for descriptions."""
    return kind * 2 + requires_grad


def read_flags(flags: Any) -> tuple[int, bool]:
    """Reads kind and requires_grad. Raises MalformedError for what `to_flags` didn't make."""
    require(type(flags) is int and 0 <= flags < 8, "malformed flags of a tensor")
    return flags >> 1, bool(flags & 1)


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or for dtypes that can't be copied its bytes."""
    return tensor.view(torch.uint8) if tensor.dtype in WITHOUT_COPY else tensor


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [0] * len(shape), 1
    for i in range(len(shape) - 1, -1, -1):
        stride[i] = step
        step *= max(shape[i], 1)
    return tuple(stride)


def is_c_ordered(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Returns whether the elements lie in order without gaps; a dimension of one element may have any stride."""
    expected = contiguous_stride(shape)
    return all(size == 1 or have == want for size, have, want in zip(shape, stride, expected, strict=True))


def count(shape: Sequence[int]) -> int:
    """Counts the elements."""
    product = 1
    for size in shape:
        product *= size
    return product


def overlaps_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Returns whether several indices are one element in memory."""
    extent, elements = 1, count(shape)
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step < extent and elements:
            break
        extent += (size - 1) * step
    else:
        return False
    if reach(shape, stride) < elements:
        return True
    marks = np.zeros(reach(shape, stride), np.bool_)  # dimensions may interleave without meeting
    np.lib.stride_tricks.as_strided(marks, shape, stride)[...] = True
    return int(marks.sum()) < elements


def reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Counts the elements from the first to the last one in memory, gaps included."""
    last = 0
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * step
    return last + 1


def repeats(tensor: torch.Tensor) -> bool:
    """Returns whether elements share bytes: then a few bytes can claim any number of elements."""
    return reach(tensor.shape, tensor.stride()) < tensor.numel()


def repeats_or_has_gaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    return reach(shape, stride) != count(shape) or has_gaps(shape, stride)


def expanded_bytes(tensor: torch.Tensor) -> int:
    """Counts the bytes that elements take when each is written by itself, beyond those that they have in memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    return max(tensor.numel() - reach(tensor.shape, tensor.stride()), 0) * tensor.itemsize


def why_too_expanded(tensor: torch.Tensor) -> str | None:
    """Says why a tensor isn't written element by element; None for most. `expand` makes any number of a few."""
    more = expanded_bytes(tensor)
    if more <= MOST_EXPANDED:
        return None
    nbytes = tensor.numel() * tensor.itemsize
    return (
        f"a tensor of shape {list(tensor.shape)}, whose elements are {nbytes:,} bytes, and lie in {nbytes - more:,} "
        f"(expanded); at most {MOST_EXPANDED:,} bytes more than there are in memory are written"
    )


# --- Gaps ------------------------------------------------------------------------------------------------------------


class Packing(NamedTuple):
    """The way in which a tensor is stored without gaps, each element once.

    Attributes:
        shape, stride: of a view that has each element of the tensor once; it is copied to contiguous memory.
        kept: the strides over this memory with which the tensor has its own shape again.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def elements(self) -> int:
        return count(self.shape)


def has_gaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Returns whether memory between the first and the last element is none of the tensor's.

    Dimensions taken by ascending strides, each copies what the ones before it cover, one stride further. So a stride
    beyond what they cover leaves a gap, which no larger stride can fill.
    """
    covered = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if step > covered:
                return 0 not in shape
            covered += (size - 1) * step
    return False


def pack(shape: Sequence[int], stride: Sequence[int]) -> Packing:
    """Packs a tensor that has elements. One that repeats none is packed to be contiguous."""
    runs = _runs(shape, stride)
    if runs is not None and count(runs.shape) < count(shape):
        return runs
    once = tuple(size if step else 1 for size, step in zip(shape, stride, strict=True))
    kept = zip(contiguous_stride(once), stride, shape, strict=True)
    return Packing(once, tuple(stride), tuple(new if old or size == 1 else 0 for new, old, size in kept))


def _runs(shape: Sequence[int], stride: Sequence[int]) -> Packing | None:
    """Takes the elements as runs of runs without overlaps: each repeats the one before, at a larger stride.

    None where dimensions overlap so that they are no such runs, as strides 4 and 6 over pairs do.
    """
    counts, steps = [1], [1]  # of the runs, the innermost first
    inner = 1  # the packed stride of the outermost run
    reach = 1  # elements from the first to the last one so far, gaps included
    kept = list(stride)
    for dim in sorted(range(len(shape)), key=lambda dim: stride[dim]):
        step, size = stride[dim], shape[dim]
        if size == 1 or not step:
            continue
        if step % steps[-1] == 0 and step // steps[-1] <= counts[-1]:  # it goes on with this run, or overlaps it
            counts[-1] += (size - 1) * (step // steps[-1])
            kept[dim] = step // steps[-1] * inner
        elif step >= reach:
            kept[dim] = inner = inner * counts[-1]
            counts.append(size)
            steps.append(step)
        else:
            return None
        reach += (size - 1) * step
    return Packing(tuple(counts[::-1]), tuple(steps[::-1]), tuple(kept))


# --- Devices ---------------------------------------------------------------------------------------------------------


_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}(:[0-9]{1,4})?")


def read_device(name: str) -> torch.device | str:
    """Returns the device, or its name where torch has none of it here. Raises MalformedError for any other name."""
    try:
        return torch.device(name)
    except RuntimeError:
        if _NAME.fullmatch(name):
            return name
        raise MalformedError(f"no device is called {name!r}") from None


def need_device(device: torch.device | str | None, instead: torch.device | None = None) -> torch.device | None:
    """Returns the device that `read_device` read, or the one that the caller asked for instead of it.

    Raises UnsupportedValueError.
    """
    if instead is not None:
        return instead
    if isinstance(device, str):
        try:
            return torch.device(device)
        except RuntimeError as error:
            raise lacks_own_device(device, error) from error
    return device


def lacks_own_device(device: str, error: Exception) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"the value was put from the device {device!r}, which this process can't use ({error}); pass device='cpu', or "
        "import what registers it"
    )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Does what `Tensor.to` does. Raises RuntimeError for a device that this process doesn't have."""
    try:
        return tensor.to(device)
    except NO_DEVICE as error:
        if has_device(device):
            raise
        raise lacks_device(device, error) from error


NO_DEVICE = (AssertionError, RuntimeError, ImportError)
"""What torch raises for a device that isn't there: it was built without, finds no driver, or lacks its module."""


def own_device(device: torch.device | str | None) -> torch.device | None:
    """Returns the device. Raises RuntimeError for one that isn't there, before anything is read for it."""
    found = None if device is None else torch.device(device)
    if has_device(found):
        return found
    raise RuntimeError(f"device='{found}': this process has no such device; without device= the tensors are on the CPU")


def has_device(device: torch.device | None) -> bool:
    """Returns whether this process has devices of this kind."""
    if device is None or device.type in ("cpu", "meta"):
        return True
    try:
        return bool(torch.get_device_module(device.type).is_available())
    except (RuntimeError, AttributeError):
        return False


def lacks_device(device: torch.device | None, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"device='{device}': this process has no such device ({error}); without device= the tensors are on the CPU"
    )
