"""Lazy leaves, made where their bytes lie: in one place, or in boxes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memstore.contents import StoredBox
from memstore.engine import Leaf
from memstore.structure import DTYPES, over, traits
from memstore.view.lazy import Lazy, guard, with_kind, wrap
from memstore.view.leaf_boxes import LeafBoxes
from memstore.view.leaf_bytes import LeafBytes
from memstore.view.source import Source


def lazy_leaf(
    cls: type[Lazy], source: Source, leaf: Leaf, start: int, boxes: Sequence[StoredBox], kind: traits.Traits
) -> Lazy:
    """A contiguous leaf on the CPU, of which the places were checked, without checksums.

    Args:
        source: what it is a part of.
        leaf: its dtype, shape and size.
        start: where it lies whole in the source's memory, unless there are boxes.
        boxes: where its parts lie there.
        kind: Parameter, Buffer or neither, on no device of its own.
    """
    dtype, nbytes = DTYPES[leaf.dtype], leaf.nbytes
    if boxes:
        stored = LeafBoxes(source, leaf, boxes, verify=False)
        made = wrap(cls, stored.shown, stored)
    elif nbytes and not start % dtype.itemsize:
        count = nbytes // dtype.itemsize
        shown = torch.frombuffer(source.memory, dtype=dtype, count=count, offset=start).resize_(leaf.shape)
        guard(shown)
        made = wrap(cls, shown, LeafBytes(source, start, nbytes, None, start))
    else:
        made = lazy_bytes(cls, source, dtype, start, leaf.shape, traits.contiguous_stride(leaf.shape))
    return made if kind is traits.PLAIN else with_kind(made, kind)


def lazy_bytes(
    cls: type[Lazy],
    source: Source,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    checked: tuple[int, int, bytes] | None = None,
    place: torch.device | None = None,
) -> Lazy:
    """A lazy tensor of bytes in one place.

    Args:
        offset: of its first element in the source's memory, in bytes.
        checked: offset, size and checksum of the stored leaf that it is a part of, if that is to be compared.
        place: the device that its values go to.
    """
    nbytes = traits.reach(shape, stride) * dtype.itemsize
    memory, base = source.memory[offset : offset + nbytes], None
    if offset % dtype.itemsize:  # torch can't look at it there
        memory = memory.copy()
        base = over(torch.from_numpy(memory).untyped_storage(), dtype, 0, (0,), (1,))
    shown = over(torch.from_numpy(memory).untyped_storage(), dtype, 0, shape, stride)
    guard(shown)
    stored = LeafBytes(source, *(checked or (offset, nbytes, None)), offset, place)
    stored.base = base
    return wrap(cls, shown, stored)
