"""Memory of tensors: whether their bytes are there, how they are overwritten, copied, tied and sent.

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

import bisect
import ctypes
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing import reductions

from memstore import _compat
from memstore import _modes as modes
from memstore._compat import new_shared_storage
from memstore._wording import an
from memstore.engine import lies_in_mapping
from memstore.errors import ReadOnlyError, UnsupportedValueError
from memstore.structure import traits
from memstore.structure.traits import Packing, has_gaps, pack

# --- Reading ---------------------------------------------------------------------------------------------------------


Memory = np.ndarray[Any, np.dtype[np.uint8]]  # a data section, or the bytes of a tensor

FREED = "a tensor whose storage was freed or cut: its bytes aren't there: put it while it has them"
_FAKE = "a fake tensor: it has a shape, but no bytes: give a real one, which materialize_module makes of a deferred one"
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_WITH_NUMPY: dict[torch.dtype, torch.dtype | None] = {  # the dtype of the same size that numpy has, too; None: itself
    torch.bfloat16: torch.int16,
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)),
    **dict.fromkeys((torch.float16, torch.float32, torch.float64)),
}


def why_no_memory(tensor: torch.Tensor) -> str | None:
    """Says why a tensor has no bytes at its address, and what to do. None if it has all that its strides need.

    It may be on any device. Takes 1 µs for a contiguous plain tensor on the CPU, and 2 for others.
    """
    try:
        if type(tensor) in PLAIN_TYPES and _is_usual(tensor):
            return None
    except (RuntimeError, NotImplementedError):  # of a transform: the same is told below
        pass
    if type(tensor) not in PLAIN_TYPES and any(base.__name__ == "FakeTensor" for base in type(tensor).__mro__):
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
    is_plain = type(tensor) in PLAIN_TYPES
    if storage.nbytes() < start + elements * tensor.itemsize:
        return FREED if is_plain else f"{an(type(tensor))}, whose bytes aren't there: put its clone()"
    # A storage without memory has the address 0, to which torch adds the offset.
    if tensor.data_ptr() <= start:
        return f"{an(type(tensor))}, which has no memory of its own: put a plain tensor of its values"
    return None


def is_readable(tensor: torch.Tensor) -> bool:
    """Returns whether the bytes at its address are its values, in the order of its strides."""
    return tensor.is_cpu and why_no_memory(tensor) is None and not tensor.is_conj() and not tensor.is_neg()


def memory_of(tensor: torch.Tensor) -> Memory:
    """Returns the bytes of a tensor on the CPU that is contiguous. Raises UnsupportedValueError if it has none.

    Takes 4 µs for a plain tensor of a usual dtype, and 14 for others.
    """
    reason = why_no_memory(tensor)
    if reason is None and type(tensor) in PLAIN_TYPES and tensor.dtype in _WITH_NUMPY and not tensor.is_neg():
        like = _WITH_NUMPY[tensor.dtype]
        plain = tensor.detach()
        return (plain if like is None else plain.view(like)).numpy().reshape(-1).view(np.uint8)
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
    if type(tensor) not in PLAIN_TYPES:
        reason = _why_not_of_class(type(tensor)) or (_LAZY if _refuses_pointers(tensor) else None)
        if reason is None and _compat.has_own_operators(type(tensor)):
            reason = f"{an(type(tensor))}, whose class says what operators do with it: give a plain tensor"
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
            into, out_of = [targets[i] for i in chosen], [sources[i] for i in chosen]
            if not traits.WITHOUT_COPY.isdisjoint(map(_dtype, (*into, *out_of))):
                into, out_of = list(map(traits.copyable, into)), list(map(traits.copyable, out_of))
            if one_by_one:  # the other has no kernel for some of these
                for target, source in zip(into, out_of, strict=True):
                    target.copy_(source, non_blocking=non_blocking)
            else:
                _compat.copy_each(into, out_of, non_blocking=non_blocking)


# --- Footprints: the bytes that tensors reach over, and whether their storages still have them -----------------------


_dtype = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_storage = torch.Tensor.untyped_storage
_storage_size = torch.UntypedStorage.nbytes
_offset: Any = torch.Tensor.storage_offset  # an int, or in a trace a symbol


class Locations(NamedTuple):
    """Where tensors lie in memory."""

    addresses: list[int]
    sizes: list[int]  # of their storages, in bytes
    offsets: list[int]  # in these, in elements


def locate_tensors(tensors: Sequence[torch.Tensor], addresses: list[int]) -> Locations:
    """Returns the address, the storage's size and the offset in it of each tensor, in 0.12 µs a tensor."""
    return Locations(addresses, list(map(_storage_size, map(_storage, tensors))), list(map(_offset, tensors)))


class Footprints:
    """The bytes that the tensors of one structure reach over.

    Attributes:
        spans: bytes from the first to the last element of each, gaps included.
        gaps: for each, whether some of its span is none of its elements.
    """

    __slots__ = ("_itemsizes", "_whole", "gaps", "spans")

    def __init__(
        self, dtypes: Sequence[torch.dtype], shapes: Sequence[torch.Size], strides: Sequence[tuple[int, ...]]
    ) -> None:
        reaches = list(map(traits.reach, shapes, strides))
        self._whole = [reach * dtype.itemsize for reach, dtype in zip(reaches, dtypes, strict=True)]
        self._itemsizes = np.array([dtype.itemsize for dtype in dtypes], np.int64)
        self.spans = np.array(self._whole, np.int64)
        self.gaps = list(map(has_gaps, shapes, strides))

    def missing(self, locations: Locations) -> list[int]:
        """Finds the tensors whose storages lack some of their bytes.

        A storage can be shrunk under its tensors: FSDP frees parameters by `resize_(0)`. Their shapes stay, and a copy
        would read whatever lies at the address that is left.
        """
        addresses, sizes, offsets = locations
        if sizes == self._whole and not any(offsets) and 0 not in addresses:
            return []
        starts = np.array(offsets, np.int64) * self._itemsizes
        short = starts + self.spans > np.array(sizes, np.int64)
        nowhere = np.array(addresses, np.int64) <= starts  # of a storage without memory: torch adds the offset to 0
        return np.flatnonzero((short | nowhere) & (self.spans > 0)).tolist()


# --- Ties: which tensors share bytes ---------------------------------------------------------------------------------
# Ties are stored once, and share one storage again when they are got.
#
# By address: tensors whose bytes overlap are tied, also when torch holds them in two storages (two `from_numpy` of one
# array). Tensors of one storage that don't overlap are not.
#
# Bytes that were never put are never stored, and ties never take more than the elements would. So a tensor with gaps,
# like a column of a matrix, is tied only to tensors without gaps that cover all of its span (the matrix), or to others
# of the very same elements. Else it is stored apart, without its gaps: a column, and that column and its neighbour,
# become two.
#
# A put that casts ties the leaves that it casts from one dtype with one another: element by element they lie to each
# other as before. With leaves of other dtypes, or that it leaves as they are, they have no bytes in common any more.


class Group(NamedTuple):
    """Leaves that share a span of bytes. Hashable: it is a part of the key that plans are cached by."""

    pad: int  # bytes before the first leaf, so that the span starts on a multiple of its widest element
    nbytes: int  # of the span, with the pad
    members: tuple[tuple[int, int], ...]  # (leaf, offset in the span)
    packed: bool  # all members are the same elements, with gaps between them: stored without the gaps


class Ties(NamedTuple):
    same: tuple[tuple[int, int], ...]  # (leaf, an earlier leaf that is the very same tensor)
    groups: tuple[Group, ...]


NO_TIES = Ties((), ())


def overlapping(addresses: Sequence[int], spans: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
    """Finds the tensors whose byte ranges overlap those of others. Takes 20 µs for 300."""
    if len(addresses) < 2:
        return []
    starts = np.array(addresses, np.int64)
    order = starts.argsort()
    starts = starts[order]
    ends = starts + spans[order]
    if not (ends[:-1] > starts[1:]).any():
        return []
    inside = np.maximum.accumulate(ends)[:-1] > starts[1:]
    return np.sort(order[np.append(inside, False) | np.append(False, inside)]).tolist()


class ByteRange(NamedTuple):
    """The bytes of a leaf, by its number."""

    start: int
    stop: int
    leaf: int


def clusters_of(ranges: Iterable[ByteRange]) -> list[list[ByteRange]]:
    """Groups ranges, none of them empty: each with all that overlap it, and all that overlap those."""
    clusters: list[list[ByteRange]] = []
    end = 0
    for part in sorted(ranges):
        if clusters and part.start < end:
            clusters[-1].append(part)
            end = max(end, part.stop)
        else:
            clusters.append([part])
            end = part.stop
    return clusters


def find_ties(
    tensors: Sequence[torch.Tensor],
    addresses: Sequence[int],
    footprints: Footprints,
    alone: Sequence[bool],
    candidates: Sequence[int],
    kinds: Sequence[object],
) -> Ties:
    """Finds which of the tensors are to be stored as one.

    Args:
        alone: leaves whose bytes in memory aren't their values (conj).
        candidates: as `overlapping` found them.
        kinds: only leaves of one kind are tied, as those that are cast from one dtype.
    """
    same: list[tuple[int, int]] = []
    groups: list[Group] = []
    firsts: dict[tuple[int, object], int] = {}
    ranges: dict[tuple[torch.device, object], list[ByteRange]] = {}
    for i in candidates:
        tensor, span = tensors[i], int(footprints.spans[i])
        if not span:
            continue
        first = firsts.setdefault((id(tensor), kinds[i]), i)
        if first != i:
            same.append((i, first))
        elif not alone[i]:
            ranges.setdefault((tensor.device, kinds[i]), []).append(ByteRange(addresses[i], addresses[i] + span, i))
    for found in ranges.values():
        clusters = clusters_of([part for part in found if not footprints.gaps[part.leaf]])
        starts = [cluster[0].start for cluster in clusters]
        ends = [max(part.stop for part in cluster) for cluster in clusters]
        looks: dict[Any, list[int]] = {}
        for part in found:
            if footprints.gaps[part.leaf]:
                cover = bisect.bisect_right(starts, part.start) - 1
                if cover >= 0 and part.stop <= ends[cover]:
                    clusters[cover].append(part)
                else:
                    tensor = tensors[part.leaf]
                    look = (part.start, tensor.dtype, tensor.shape, tensor.stride())
                    looks.setdefault(look, []).append(part.leaf)
        groups += [group for group in (_group(cluster, tensors) for cluster in clusters) if group is not None]
        for leaves in looks.values():
            if len(leaves) > 1:
                tensor = tensors[leaves[0]]
                nbytes = pack(tensor.shape, tensor.stride()).elements * tensor.dtype.itemsize
                groups.append(Group(0, nbytes, tuple((i, 0) for i in leaves), packed=True))
    return Ties(tuple(same), tuple(groups))


def _group(cluster: list[ByteRange], tensors: Sequence[torch.Tensor]) -> Group | None:
    if len(cluster) < 2:
        return None
    sizes = {part.leaf: tensors[part.leaf].dtype.itemsize for part in cluster}
    if any(part.start % sizes[part.leaf] for part in cluster):
        return None  # no common storage could hold them at whole elements: stored apart
    first = cluster[0].start
    start = first - first % max(sizes.values())
    end = max(part.stop for part in cluster)
    members = sorted((part.leaf, part.start - start) for part in cluster)
    return Group(first - start, end - start, tuple(members), packed=False)


_WIDEST = 16  # bytes of an element


def which_would_stay(places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[bool]:
    """Tells which values would still be there, once all were written, in order, to memory that lies as these places do.

    Of values on the CPU, and places of their shapes that overlap one another. None would, as far as anybody looks, if
    a place has a conj or neg bit, or lies at no whole element of that memory.
    """
    starts = [place.data_ptr() for place in places]
    sizes = [traits.reach(place.shape, place.stride()) * place.itemsize for place in places]
    base, end = min(starts, default=0) // _WIDEST * _WIDEST, max(map(operator.add, starts, sizes), default=0)
    storage = torch.empty(end - base, dtype=torch.uint8, device="cpu").untyped_storage()
    doubles: list[torch.Tensor] = []
    for start, place, value in zip(starts, places, values, strict=True):
        offset, rest = divmod(start - base, place.itemsize)
        if rest or place.is_conj() or place.is_neg():
            return [False] * len(places)
        doubles.append(over(storage, place.dtype, offset, place.shape, place.stride()))
        traits.copyable(doubles[-1]).copy_(traits.copyable(value))
    pairs = zip(doubles, values, strict=True)
    return [torch.equal(_bits(double), _bits(value.to(double.dtype))) for double, value in pairs]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return traits.copyable(tensor).contiguous().reshape(-1).view(torch.uint8)


# --- Copies into a data section: one pass over the bytes -------------------------------------------------------------
# Leaves go by memmove, which costs 0.35 µs where `copy_` takes 0.9. Many of one dtype and shape go by a `torch.stack`,
# which costs 10 µs and 0.1 µs each: 300 of 64x64 take 165 µs instead of 280. Large ones go by `copy_`, on all cores. It
# waits for all of them: where another process keeps one busy, 1 MiB takes 10 ms in two threads and 24 µs in one. Leaves
# of other devices are copied asynchronously, with one wait for each device at the end.
#
# Leaves that are cast go by torch's kernel straight into their places, also in one pass. Their targets are cut out of
# one tensor, and filled by one call: 1.6 µs a leaf of 64x64, where a call each into tensors of their own takes 3.8.
# Those of less than 16 MiB go in pieces that torch leaves to one core, for the reason above. What lies on another
# device is cast there, and then copied.


_LARGE = 16 << 20  # bytes
_SMALL = 1 << 18  # bytes: up to here no other thread of Python runs meanwhile
ONE_CORE = (1 << 15) - 16  # elements that torch's kernels leave to one core
_STACKED = 64  # leaves in a row; of fewer, memmove takes less
_STACKED_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8}
)
_WORD = torch.int32  # what large leaves are copied as: by bytes, torch takes an eighth longer

# With PYFUNCTYPE the GIL stays held: giving it up and taking it back costs more than the copy of a small leaf.
_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)

bytes_at = ctypes.string_at  # of an address: so many bytes

# A copy by bits, where the dtype has no copy kernel (uint4) or one that could change a NaN.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class PlainCopy(NamedTuple):
    """A leaf whose bytes are stored as they lie in memory."""

    leaf: int
    offset: int
    nbytes: int


class StackedCopies(NamedTuple):
    """Leaves of one dtype and shape whose bytes are stored one behind the other: they are the rows of one tensor."""

    leaves: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]  # with the number of leaves in front
    offset: int


class GatheredCopy(NamedTuple):
    """A leaf that is stored without its gaps, or whose values aren't its bytes (`resolve`: conj, neg)."""

    leaf: int
    offset: int
    resolve: bool
    packing: Packing | None = None  # None: it is stored as large as its shape says


class CastCopy(NamedTuple):
    """A leaf that is stored as another dtype than it has: `shape` and `source_stride` are what is cast of it."""

    leaf: int
    dtype: torch.dtype
    place: int  # in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    source_stride: tuple[int, ...] | None  # None: the leaf has this shape, and is cast as it is


class CopyPlan:
    """The copies that fill a data section, for one plan and one kind of tensors."""

    __slots__ = (
        "alone",
        "cast",
        "cast_in_pieces",
        "gathered",
        "large",
        "medium",
        "remote",
        "small_leaves",
        "small_offsets",
        "small_sizes",
        "small_whole",
        "stacked",
    )

    def __init__(
        self,
        raw: list[PlainCopy],
        gathered: list[GatheredCopy],
        cast: list[CastCopy],
        on_cpu: Sequence[bool],
        stacked: Sequence[StackedCopies] = (),
    ) -> None:
        count = len(on_cpu)
        self.stacked = stacked
        self.large = [copy for copy in raw if copy.nbytes >= _LARGE or not on_cpu[copy.leaf]]
        self.gathered = gathered
        self.cast_in_pieces = [
            copy
            for copy in cast
            if copy.source_stride == copy.stride == (1,)
            and on_cpu[copy.leaf]
            and ONE_CORE < copy.shape[0] < _LARGE // copy.dtype.itemsize
        ]
        in_pieces = {copy.leaf for copy in self.cast_in_pieces}
        self.cast = [copy for copy in cast if copy.leaf not in in_pieces]
        self.remote = [leaf for leaf, here in enumerate(on_cpu) if not here]
        self.medium = [copy for copy in raw if _SMALL <= copy.nbytes < _LARGE and on_cpu[copy.leaf]]
        small = [copy for copy in raw if copy.nbytes < _SMALL and on_cpu[copy.leaf]]
        self.small_leaves = [copy.leaf for copy in small]
        self.small_offsets = [copy.offset for copy in small]
        self.small_sizes = [copy.nbytes for copy in small]
        self.small_whole = self.small_leaves == list(range(count))  # all tensors, in order
        self.alone = raw[0].nbytes if count == len(small) == 1 and not raw[0].offset else 0  # one tensor is all


def are_stacked(count: int, dtype: torch.dtype, nbytes: int) -> bool:
    """Returns whether so many leaves of this size are copied fastest as the rows of one tensor."""
    return count >= _STACKED and dtype in _STACKED_DTYPES and nbytes < min(_SMALL, ONE_CORE * dtype.itemsize)


def copy_tensors(copies: CopyPlan, tensors: Sequence[torch.Tensor], memory: Memory) -> None:
    """Copies tensors to their places in `memory`."""
    small = tensors if copies.small_whole else [tensors[i] for i in copies.small_leaves]
    if small:
        targets = map(memory.ctypes.data.__add__, copies.small_offsets)
        sources = map(torch.Tensor.data_ptr, small)
        deque(map(_memmove, targets, sources, copies.small_sizes), maxlen=0)
    for leaf, offset, nbytes in copies.medium:
        ctypes.memmove(memory.ctypes.data + offset, tensors[leaf].data_ptr(), nbytes)
    has_casts = bool(copies.cast or copies.cast_in_pieces)
    if copies.large or copies.gathered or copies.stacked or has_casts:
        with modes.put_aside(), torch.no_grad():
            _fill_with_torch(copies, tensors, memory)
            if has_casts:
                _cast(copies, tensors, memory)
            for device in {tensors[leaf].device for leaf in copies.remote}:
                torch.get_device_module(device).current_stream(device).synchronize()


def _fill_with_torch(copies: CopyPlan, tensors: Sequence[torch.Tensor], memory: Memory) -> None:
    for leaves, dtype, shape, offset in copies.stacked:
        stop = offset + traits.count(shape) * dtype.itemsize
        rows = torch.from_numpy(memory[offset:stop]).view(dtype).view(shape)
        sources = [tensors[i] for i in leaves]
        if not _compat.in_forward_ad():
            torch.stack(sources, out=rows)
        else:  # it has no kernel there
            for row, source in zip(rows, sources, strict=True):
                row.copy_(source)
    for leaf, offset, nbytes in copies.large:
        source = tensors[leaf]
        start = source.storage_offset() * source.dtype.itemsize
        dtype = _WORD if (start | offset | nbytes) % _WORD.itemsize == 0 else torch.uint8
        shape = (nbytes // dtype.itemsize,)
        flat = over(source.untyped_storage(), dtype, start // dtype.itemsize, shape, (1,), source.device)
        target = torch.from_numpy(memory[offset : offset + nbytes]).view(dtype)
        target.copy_(flat, non_blocking=True)
    for leaf, offset, resolve, packing in copies.gathered:
        source = tensors[leaf]
        shape, stride = (source.shape, source.stride()) if packing is None else packing[:2]
        dtype = source.dtype if resolve else _BITS[source.dtype.itemsize]
        start = source.storage_offset()
        if resolve:
            source = source.as_strided(shape, stride, start)
        else:
            source = over(source.untyped_storage(), dtype, start, shape, stride, source.device)
        storage = torch.from_numpy(memory[offset : offset + source.numel() * dtype.itemsize]).untyped_storage()
        target = over(storage, dtype, 0, source.shape, traits.contiguous_stride(source.shape))
        target.copy_(source, non_blocking=True)


def _cast(copies: CopyPlan, tensors: Sequence[torch.Tensor], memory: Memory) -> None:
    dtype = (copies.cast or copies.cast_in_pieces)[0].dtype  # of all: a put casts to one
    base = torch.from_numpy(memory[: memory.nbytes // dtype.itemsize * dtype.itemsize]).view(dtype)
    targets, sources = _cut_out(copies.cast, base), _sources_of(copies.cast, tensors)
    for whole in _cut_out(copies.cast_in_pieces, base):
        targets += whole.split(ONE_CORE)
    for whole in _sources_of(copies.cast_in_pieces, tensors):
        sources += whole.split(ONE_CORE)
    # non_blocking: else torch would send what another device has, and cast it here in a second pass
    if not _compat.in_forward_ad():
        _compat.copy_each(targets, sources, non_blocking=True)
    else:  # it has no kernel there
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)


def _cut_out(copies: Sequence[CastCopy], base: torch.Tensor) -> list[torch.Tensor]:
    return [base.as_strided(copy.shape, copy.stride, copy.place) for copy in copies]


def _sources_of(copies: Sequence[CastCopy], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        tensors[copy.leaf]
        if copy.source_stride is None
        else tensors[copy.leaf].as_strided(copy.shape, copy.source_stride)
        for copy in copies
    ]


# --- Sending, through multiprocessing --------------------------------------------------------------------------------
# What lies in a mapping is copied into fresh shared memory before torch sends it: torch sends a tensor by moving its
# storage to shared memory that the receiver may write, and swaps it under the sender. A held value would change, and
# memory of its numpy aliases would go. So a sent leaf is copied once, just its own bytes, or those of the view that is
# sent, anew at each send. Tensors elsewhere go torch's way, unchanged.
#
# A copy is shared by its file descriptor, which must live until the receiver has one. A queue duplicates it at once.
# For the arguments of a process that is being started (spawn, forkserver) multiprocessing only notes its number, and
# passes it on when all of them are pickled; torch's own tensors keep it open all the while. So the copies that such a
# process gets belong to its Popen: until the same thread starts another process, and no longer than the Popen lives.
# 300 leaves and 8 workers would else hold 2400 descriptors.
#
# What a DataLoader's worker has read lies in memory that it lends: there a reference is sent, and nothing is copied.


def register() -> None:
    """Takes the places of torch's reducers. The last to register is asked, so this runs after torch is imported."""
    ForkingPickler.register(torch.Tensor, _reduce_tensor)
    ForkingPickler.register(torch.nn.Parameter, _reduce_tensor)
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)


Lend = Callable[[torch.Tensor], "tuple[Any, ...] | None"]
_lend: Lend | None = None


def lend_by(lend: Lend) -> None:
    """Asks `lend` first how a tensor that is nothing but elements is sent; None: its memory is not lent."""
    global _lend
    _lend = lend


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    if _must_be_copied(tensor):
        if _lend is not None and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg()):
            lent = _lend(tensor)
            if lent is not None:
                return lent
        tensor = _copy_to_shared_memory(tensor)
    return reductions.reduce_tensor(tensor)


def _must_be_copied(tensor: torch.Tensor) -> bool:
    # torch's own reducer takes the rest: tensors without a storage, and non-leaves, which it refuses
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    if tensor.requires_grad and not tensor.is_leaf:
        return False
    return tensor.numel() > 0 and _lies_in_our_mapping(tensor)


def _lies_in_our_mapping(memory: torch.Tensor | torch.UntypedStorage) -> bool:
    try:
        return lies_in_mapping(memory.data_ptr())
    except RuntimeError:  # a view's memory, which may be read and not written, after `tensor.data = view[...]`
        return True


@modes.put_aside()
def _copy_to_shared_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor to shared memory of its own: the span of its bytes, or where that has gaps its elements."""
    shape, stride, itemsize = tensor.shape, tensor.stride(), tensor.dtype.itemsize
    source = tensor.detach()
    reach = traits.reach(shape, stride)
    packing = pack(shape, stride) if has_gaps(shape, stride) or tensor.is_conj() or tensor.is_neg() else None
    if packing is not None:
        reach, stride = packing.elements, packing.kept
    storage = new_shared_storage(reach * itemsize)
    _keep_for_child(storage)
    copy = over(storage, tensor.dtype, 0, shape, stride)
    if packing is None:
        start = source.storage_offset() * itemsize
        nbytes = (reach * itemsize,)
        span = over(source.untyped_storage(), torch.uint8, start, nbytes, (1,))
        over(storage, torch.uint8, 0, nbytes, (1,)).copy_(span)
    else:
        once = over(storage, tensor.dtype, 0, packing.shape, traits.contiguous_stride(packing.shape))
        each = source.as_strided(packing.shape, packing.stride, source.storage_offset())
        traits.copyable(once).copy_(traits.copyable(each))
    return traits.with_traits(copy, traits.traits_of(tensor))


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    """Reduces what reaches the pickler as a bare storage: parts of sparse, nested and quantized tensors."""
    if storage.device.type == "cpu" and storage.nbytes() and _lies_in_our_mapping(storage):
        copy = new_shared_storage(storage.nbytes())
        _keep_for_child(copy)
        copy.copy_(storage, non_blocking=False)
        storage = copy
    return reductions.reduce_storage(storage)


class _Started(threading.local):
    """The process that this thread started last: a thread starts one after the other."""

    popen: weakref.ref[Any] | None = None


_started = _Started()


def _keep_for_child(storage: torch.UntypedStorage) -> None:
    popen: Any = get_spawning_popen()
    if popen is None:
        return
    former = _started.popen and _started.popen()
    if former is not popen:
        if former is not None:
            former._memstore_copies.clear()
        popen._memstore_copies = []
        _started.popen = weakref.ref(popen)
    popen._memstore_copies.append(storage)
