"""LeafBoxes: a stored leaf in boxes that lie apart, as one tensor. Of what is asked for, just that is read.

A box of the leaf is asked for by a strided tensor. Its `Region` is what that tensor looks at, as a product of ranges;
`Points` are what indices by lists, masks and tensors name. Both tell which part of them a stored box has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from math import gcd
from typing import NamedTuple

import torch
import xxhash

from memstore.contents import StoredBox, count_read
from memstore.engine import Leaf
from memstore.sharding import Box, BoxIndex, box_of
from memstore.structure import DTYPES, box_bytes, contiguous_stride, modes, over, to_device
from memstore.view.source import Source, StoredLeaf, nbytes_of

# --- Regions: which elements of a tensor a strided view of it looks at. Pure arithmetic ------------------------------
# A view that was made by slicing, selecting, transposing, expanding or unfolding looks at a range of each dimension.
# One that joins dimensions (`flatten`), or runs across them (`diagonal`), doesn't: then the region is the fewest rows
# that have all of it.


class Region(NamedTuple):
    """Product of ranges, none of them empty; and where the view lies in it.

    Attributes:
        ranges: one for each dimension of the tensor.
        dims: for each dimension of the view, the one of the tensor that it runs along, and how many steps of its range
            it takes at once; None where it doesn't move. None for rows: the view lies in them as they lie in memory.
        stride, offset: of the view, in a contiguous tensor that has just the region.
    """

    ranges: tuple[range, ...]
    dims: tuple[tuple[int, int] | None, ...] | None
    stride: tuple[int, ...]
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.ranges))

    @property
    def is_pickable(self) -> bool:
        """Returns whether no two dimensions of the view run along the same one of the tensor."""
        along = [found[0] for found in self.dims or () if found is not None]
        return self.dims is not None and len(set(along)) == len(along)


def region_of(whole: Sequence[int], shape: Sequence[int], stride: Sequence[int], offset: int) -> Region:
    """Returns the region of a view with these strides, in elements.

    The view is not empty, and lies in a contiguous tensor of shape `whole`.
    """
    steps = contiguous_stride(whole)
    starts = _coordinates(steps, offset)
    along: list[list[tuple[int, int, int]]] = [[] for _ in whole]  # for each dimension: view's, its size, its step
    for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
        if size == 1 or step == 0:
            continue
        on = next((d for d, unit in enumerate(steps) if whole[d] > 1 and unit <= step), len(whole) - 1)
        if step % steps[on]:
            return _rows(whole, steps, shape, stride, offset)
        along[on].append((dim, size, step // steps[on]))
    ranges: list[range] = []
    dims: list[tuple[int, int] | None] = [None] * len(shape)
    for on, (start, found) in enumerate(zip(starts, along, strict=True)):
        stop = start + sum((size - 1) * step for _, size, step in found) + 1
        if stop > whole[on]:
            return _rows(whole, steps, shape, stride, offset)
        unit = gcd(*(step for _, _, step in found)) or 1
        ranges.append(range(start, stop, unit))
        for dim, _, step in found:
            dims[dim] = on, step // unit
    inner = contiguous_stride([len(one) for one in ranges])
    moved = tuple(
        step if found is None else inner[found[0]] * found[1] for step, found in zip(stride, dims, strict=True)
    )
    return Region(tuple(ranges), tuple(dims), moved, 0)


def _rows(
    whole: Sequence[int], steps: Sequence[int], shape: Sequence[int], stride: Sequence[int], offset: int
) -> Region:
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    first_at, last_at = _coordinates(steps, offset), _coordinates(steps, last)
    ranges: list[range] = []
    differs = False
    start = 0
    for one, other, size, step in zip(first_at, last_at, whole, steps, strict=True):
        ranges.append(range(size) if differs else range(one, other + 1))
        start += 0 if differs else one * step
        differs = differs or one != other
    return Region(tuple(ranges), None, tuple(stride), offset - start)


def _coordinates(steps: Sequence[int], offset: int) -> list[int]:
    found: list[int] = []
    for step in steps:
        at, offset = divmod(offset, step)
        found.append(at)
    return found


def all_of(whole: Sequence[int], stride: Sequence[int], offset: int) -> Region:
    """Returns the region of a view that is read as a part of all."""
    return Region(tuple(map(range, whole)), None, tuple(stride), offset)


# --- Points ----------------------------------------------------------------------------------------------------------


class PickedPoints(NamedTuple):
    """Points that a box has: their places in the result (see `Points.shape`), and the values there."""

    places: tuple[torch.Tensor | slice, ...]
    values: torch.Tensor


class Points:
    """Indices of some dimensions of a tensor, as torch's `index` takes them; all are in range, and none negative.

    Attributes:
        dims: the dimensions that are indexed.
        count: how many points there are.
    """

    def __init__(self, indices: Sequence[torch.Tensor | None]) -> None:
        self.dims = [dim for dim, index in enumerate(indices) if index is not None]
        broadcast = torch.broadcast_tensors(*(index for index in indices if index is not None))
        self._shape = tuple(broadcast[0].shape)
        self._flat = [index.reshape(-1) for index in broadcast]
        self.count = self._flat[0].numel()

    @property
    def rows(self) -> torch.Tensor | None:
        """Returns the points, if they are rows: of the first dimension alone."""
        return self._flat[0] if self.dims == [0] else None

    def shape(self, of: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the result before it is `placed`: the points in front, then the other dimensions."""
        return (self.count, *(size for dim, size in enumerate(of) if dim not in self.dims))

    def placed(self, made: torch.Tensor) -> torch.Tensor:
        """Returns the result as torch has it: points where the indices stood side by side, else in front."""
        made = made.view(*self._shape, *made.shape[1:])
        first, count = self.dims[0], len(self._shape)
        if not first or self.dims != list(range(first, first + len(self.dims))):
            return made
        return made.movedim(tuple(range(count)), tuple(range(first, first + count)))

    def pick(self, region: Region, sizes: Sequence[int], box: Box, part: torch.Tensor) -> PickedPoints | None:
        """Returns the points of a view that a box has; None if it has none.

        Args:
            region, sizes: those of the view.
            box, part: the box, and the tensor that has it.
        """
        along = [None if found is None else found[0] for found in region.dims or ()]
        chosen = self._coordinates(region, along, box)
        inside = self._inside(chosen, box)
        if inside is not None and not len(inside):
            return None
        ranges = [
            range(box.offsets[on], box.offsets[on] + 1) if on in chosen else one for on, one in enumerate(region.ranges)
        ]
        meet = box.cut(ranges)
        if meet is None:
            return None
        places, at = meet
        taken = part[tuple(slice(None) if on in chosen else one for on, one in enumerate(at))]
        rest = [dim for dim in range(len(sizes)) if dim not in self.dims]
        taken = _in_order(taken, list(chosen), [along[dim] for dim in rest])
        if chosen:
            taken = taken[tuple(one if inside is None else one[inside] for one in chosen.values())]
        else:  # only along dimensions that are expanded
            taken = taken.unsqueeze(0)
        spread = [slice(None) if (on := along[dim]) is None else places[on] for dim in rest]
        count = self.count if inside is None else len(inside)
        shape = [
            sizes[dim] if along[dim] is None else one.stop - one.start for dim, one in zip(rest, spread, strict=True)
        ]
        return PickedPoints((slice(None) if inside is None else inside, *spread), taken.expand(count, *shape))

    def _coordinates(self, region: Region, along: Sequence[int | None], box: Box) -> dict[int, torch.Tensor]:
        """Returns, by dimension of the leaf, where the points lie in it, counted from the first element of the box."""
        found: dict[int, torch.Tensor] = {}
        for dim, index in zip(self.dims, self._flat, strict=True):
            on = along[dim]
            if on is not None:
                one = region.ranges[on]
                found[on] = index * one.step + (one.start - box.offsets[on])
        return found

    def _inside(self, coordinates: dict[int, torch.Tensor], box: Box) -> torch.Tensor | None:
        """Returns which points the box has; None for all."""
        inside: torch.Tensor | None = None
        for on, at in coordinates.items():
            is_in = (at >= 0) & (at < box.shape[on])
            inside = is_in if inside is None else inside & is_in
        return None if inside is None or bool(inside.all()) else inside.nonzero().squeeze(1)


def _in_order(taken: torch.Tensor, first: list[int], rest: Sequence[int | None]) -> torch.Tensor:
    """Returns the dimensions `first`, then the `rest`; those that are None get one element. All others have one."""
    order = [*first, *(on for on in rest if on is not None)]
    taken = taken.permute([*order, *(on for on in range(taken.ndim) if on not in order)])
    taken = taken.reshape(taken.shape[: len(order)]) if taken.ndim > len(order) else taken
    for position, on in enumerate(rest, len(first)):
        if on is None:
            taken = taken.unsqueeze(position)
    return taken


# --- LeafBoxes -------------------------------------------------------------------------------------------------------
# LeafBoxes: a stored leaf in boxes that lie apart, as one tensor. Of what is asked for, just that is read.
#
# What lies in one box is looked at where it lies; what lies in several is put together in new memory. The lazy tensors
# of such a leaf have no memory, and what they show has none either: where the leaf would lie if it were whole are
# zeros, which nobody may find.


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # not every dtype copies
_CPU = torch.device("cpu")
_dispatch_modes, _transform = modes.count_dispatch_modes, modes.current_transform
_in_inference_mode = torch.is_inference_mode_enabled


class _Found(NamedTuple):
    """Part of a region that lies in one box: its places in the region, and the tensor that has it."""

    places: tuple[slice, ...]
    tensor: torch.Tensor


class LeafBoxes(StoredLeaf):
    """Boxes of one stored leaf, and their checksums until somebody has compared them.

    Attributes:
        leaf: as it would be if it were whole.
        stored: its boxes, or those that a reference to a part of it needs.
        shown: the whole leaf, without memory.
    """

    __slots__ = ("_checksums", "_index", "_item", "_parts", "leaf", "shown", "stored")

    _index: BoxIndex  # these two are made by the first read
    _parts: list[torch.Tensor]

    def __init__(
        self,
        source: Source,
        leaf: Leaf,
        stored: Sequence[StoredBox],
        place: torch.device | None = None,
        *,
        verify: bool = True,
    ) -> None:
        self.source, self.place, self.wrapped = source, place, _CPU if place is None else place
        self.leaf, self.stored, dtype = leaf, stored, DTYPES[leaf.dtype]
        self._item = dtype.itemsize
        self._parts = []
        self._checksums = [one.checksum if verify else None for one in stored]
        if _dispatch_modes() or _transform() is not None or _in_inference_mode():
            with modes.put_aside(), torch.inference_mode(False):
                self.shown = torch.empty(leaf.shape, dtype=dtype, device="meta")
        else:
            self.shown = torch.empty(leaf.shape, dtype=dtype, device="meta")

    def _meeting(self, region: Region) -> list[int]:
        """Returns which boxes may have some of a region."""
        if not self._parts:
            with modes.put_aside(), torch.inference_mode(False):
                self._index = BoxIndex([one.box for one in self.stored])
                self._parts = [self._bits(one) for one in self.stored]
        ranges = region.ranges[: len(self.leaf.shape)]
        hull = box_of([(one.start, one[-1] + 1) for one in ranges])
        return [number for number, _ in self._index.meeting(hull)]

    def _bits(self, stored: StoredBox) -> torch.Tensor:
        data = self.source.memory[stored.place : stored.place + box_bytes(self.leaf, stored)]
        return torch.from_numpy(data).view(_BITS[self._item]).view(stored.box.shape)

    # --- a box --------------------------------------------------------------------------------------------------------

    def read(self, box: torch.Tensor) -> torch.Tensor:
        with modes.put_aside() if modes.are_active() else nullcontext(), torch.inference_mode(False), torch.no_grad():
            if box.numel():
                values = self._read(box)
            else:
                values = torch.empty_strided(box.shape, box.stride(), dtype=box.dtype, device="cpu")
        return values if self.place is None else to_device(values, self.place)

    def _read(self, box: torch.Tensor) -> torch.Tensor:
        if box.dtype.itemsize != self._item:
            return self._read_bytes(box)
        region = self._region(box)
        found = list(self._parts_of(region))
        if len(found) == 1 and found[0].tensor.shape == region.shape:
            whole = found[0].tensor
            if region.dims is not None or whole.is_contiguous():
                values = _view(whole, box, region)
                count_read(nbytes_of(values))
                return values
        return _view(self._put_together(region, found), box, region)

    def _read_bytes(self, box: torch.Tensor) -> torch.Tensor:
        """Reads a box of another dtype than the leaf's, whose elements are of another size."""
        item, size = box.dtype.itemsize, self._item
        whole = (*self.leaf.shape, size)
        stride, offset = (*(step * item for step in box.stride()), 1), int(box.storage_offset()) * item
        region = region_of(whole, (*box.shape, item), stride, offset)
        if region.offset % item or any(step % item for step in region.stride[:-1]) or region.stride[-1] > 1:
            region = all_of(whole, stride, offset)
        buffer = self._put_together(region, list(self._parts_of(region, in_bytes=True)))
        shown = [step // item for step in region.stride[:-1]]
        return over(buffer.untyped_storage(), box.dtype, region.offset // item, box.shape, shown)

    def copy_to(self, target: torch.Tensor, box: torch.Tensor) -> None:
        if not box.numel():
            return
        region = self._region(box)
        is_plain = region.dims is not None and all(
            found is None or found == (i, 1) for i, found in enumerate(region.dims)
        )
        if not is_plain or region.shape != tuple(box.shape) or box.dtype != DTYPES[self.leaf.dtype]:
            target.copy_(self.read(box))
            return
        self._put_together(region, list(self._parts_of(region)), self._as_bits(target))

    def needed(self, box: torch.Tensor) -> list[StoredBox]:
        """Returns the stored boxes that have some of it, without the checksums that were compared already."""
        if not box.numel():
            return []
        region = self._region(box) if box.dtype.itemsize == self._item else all_of(self.leaf.shape, (), 0)
        return [self.stored[number]._replace(checksum=self._checksums[number]) for number in self._meeting(region)]

    def _region(self, box: torch.Tensor) -> Region:
        return region_of(self.leaf.shape, box.shape, box.stride(), int(box.storage_offset()))

    def _parts_of(self, region: Region, *, in_bytes: bool = False) -> Iterator[_Found]:
        """Returns what each box has of a region, checked, and on a disk asked for all at once."""
        for number in self._meeting(region):
            box, part = self.stored[number].box, self._parts[number]
            if in_bytes:
                box = Box((*box.offsets, 0), (*box.shape, self._item))
                part = part.reshape(-1).view(torch.uint8).view(box.shape)
            meet = box.cut(region.ranges)
            if meet is None:
                continue
            self._check(number)
            tensor = part[meet.inside]
            if self.source.is_on_disk:
                self.source.bring(tensor)
            yield _Found(meet.places, tensor)

    def _put_together(self, region: Region, found: Sequence[_Found], into: torch.Tensor | None = None) -> torch.Tensor:
        if into is None:
            into = torch.empty(region.shape, dtype=found[0].tensor.dtype if found else torch.uint8)
        copied = 0
        for places, tensor in found:
            into[places].copy_(tensor)
            copied += tensor.numel()
        if copied < into.numel():
            raise self._lacking()
        count_read(into.nbytes)
        return into

    def _check(self, number: int) -> None:
        checksum, stored = self._checksums[number], self.stored[number]
        if checksum is None:
            return
        nbytes = box_bytes(self.leaf, stored)
        self.source.bring_bytes(stored.place, nbytes)
        data = self.source.memory[stored.place : stored.place + nbytes]
        count_read(data.nbytes)
        if xxhash.xxh3_64_digest(data.data) != checksum:
            offsets, shape = stored.box
            where = f"at {list(offsets)}, of shape {list(shape)}, put by rank {stored.rank}"
            detail = f"the bytes of a leaf's box {where}, don't fit their checksum"
            raise self.source.damaged(detail, stored.place)
        self._checksums[number] = None

    def _lacking(self) -> Exception:
        return IndexError(
            f"a lazy leaf of {self.source.key!r} that was sent as a part has no more than that part: as_strided can't "
            "look past it"
        )

    # --- rows and points ----------------------------------------------------------------------------------------------

    def pick(self, box: torch.Tensor, points: Points, into: torch.Tensor | None = None) -> torch.Tensor | None:
        """Returns the points of a box, to be `placed`, in a new tensor or one on the CPU, of `points.shape(box.shape)`.

        They are read each by itself. Returns None where that can't be: the box is to be read then.
        """
        shape = points.shape(box.shape)
        if 0 in shape:
            return torch.empty(shape, dtype=box.dtype) if into is None else into
        region = self._region(box)
        if box.dtype.itemsize != self._item or not region.is_pickable:
            return None
        with modes.put_aside() if modes.are_active() else nullcontext(), torch.no_grad():
            made = torch.empty(shape, dtype=box.dtype) if into is None else into
            self._pick(box, region, points, self._as_bits(made))
        return made

    def _pick(self, box: torch.Tensor, region: Region, points: Points, target: torch.Tensor) -> None:
        if self.source.absent is not None:
            self._bring_points(box, region, points)
        copied = 0
        for number in self._meeting(region):
            picked = points.pick(region, box.shape, self.stored[number].box, self._parts[number])
            if picked is not None:
                self._check(number)
                target[picked.places] = picked.values
                copied += picked.values.numel()
        if copied < target.numel():
            raise self._lacking()
        count_read(target.nbytes)

    def _bring_points(self, box: torch.Tensor, region: Region, points: Points) -> None:
        """Brings points that may lie on other hosts: their rows, or if they aren't rows, the region."""
        rows = points.rows
        if rows is not None:
            for part, chosen in self._rows(box, rows):
                self.source.ask_for(part, chosen)
            return
        for number in self._meeting(region):
            meet = self.stored[number].box.cut(region.ranges)
            if meet is not None:
                self.source.bring(self._parts[number][meet.inside])

    def _as_bits(self, target: torch.Tensor) -> torch.Tensor:
        """Returns the tensor as one of a dtype that can be copied, whatever its own is."""
        offset, stride, bits = target.storage_offset(), target.stride(), _BITS[self._item]
        return over(target.untyped_storage(), bits, offset, target.shape, stride, target.device)

    def prefetch(self, box: torch.Tensor, rows: torch.Tensor) -> None:
        if self.source.is_on_disk:
            for part, chosen in self._rows(box, rows):
                self.source.ask_for(part, chosen)

    def is_cold(self, box: torch.Tensor, rows: torch.Tensor) -> bool:
        return self.source.is_on_disk and any(
            self.source.are_cold(part, chosen) for part, chosen in self._rows(box, rows)
        )

    def _rows(self, box: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Returns, for each box that has some of these rows, the rows of it, and which they are."""
        if not box.numel() or box.dtype.itemsize != self._item:
            return
        region = self._region(box)
        along = None if region.dims is None else region.dims[0]
        if along is None or along[1] != 1 or not region.is_pickable:
            return
        dim = along[0]
        for number in self._meeting(region):
            stored, part = self.stored[number].box, self._parts[number]
            meet = stored.cut(region.ranges)
            if meet is None:
                continue
            at = meet.inside
            start, step = region.ranges[dim].start, region.ranges[dim].step
            found = rows * step + (start - stored.offsets[dim])
            inside = found[(found >= 0) & (found < stored.shape[dim])]
            if len(inside):
                yield part[(*at[:dim], slice(None), *at[dim + 1 :])].movedim(dim, 0), inside


def _view(made: torch.Tensor, box: torch.Tensor, region: Region) -> torch.Tensor:
    """Returns the box in a tensor that has just its region: with the strides of that."""
    stride = region.stride
    if region.dims is not None:
        stride = [
            box.stride(dim) if found is None else made.stride(found[0]) * found[1]
            for dim, found in enumerate(region.dims)
        ]
    return over(made.untyped_storage(), box.dtype, made.storage_offset() + region.offset, box.shape, stride)
