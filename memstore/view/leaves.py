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


def lazy_leaf(cls: type[Lazy], source: Source, leaf: Leaf, boxes: Sequence[StoredBox], kind: traits.Traits) -> Lazy:
    """A contiguous leaf on the CPU, of which the places were checked, without checksums.

    Args:
        source: what it is a part of; outside of inference mode and torch's other modes.
        boxes: where it lies in the source's memory, if not whole at `leaf.offset`.
        kind: Parameter, Buffer or neither, on no device of its own.
    """
    if boxes:
        stored = LeafBoxes(source, leaf, boxes, verify=False)
        made = wrap(cls, stored.shown, stored)
    else:
        stride = traits.contiguous_stride(leaf.shape)
        made = lazy_bytes(cls, source, DTYPES[leaf.dtype], leaf.offset, leaf.shape, stride)
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
