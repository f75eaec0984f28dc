"""Lazy leaves as references, for pickles that are sent.

A reference to a leaf is its source (pickled once, however many leaves of it go along) and a msgpack of

    [dtype, offset of its first element, shape, strides or nil, flags, device or nil, checked or nil, boxes or nil]

with flags = kind * 2 + requires_grad, and checked = [offset, size, checksum] of the stored leaf where its checksum is
still to be compared. So it is self-contained: what else the value has doesn't matter.

Of a leaf in boxes the offset counts from its first element, in bytes, and boxes = [dtype, shape, [[offsets, shape,
place, rank, checksum or nil], ...]]: the stored leaf, and those of its boxes that have some of what is sent.
"""

from __future__ import annotations

import msgspec
import torch

from memstore.contents import StoredBox
from memstore.engine import Leaf
from memstore.sharding import Box
from memstore.structure import MalformedError, check_box, check_extent, modes, need_device, over, traits
from memstore.view.lazy import Lazy, LazyTensor, kind_of, with_kind, wrap
from memstore.view.leaf_boxes import LeafBoxes
from memstore.view.leaf_bytes import LeafBytes
from memstore.view.leaves import lazy_bytes
from memstore.view.source import Source

_encode = msgspec.msgpack.Encoder().encode
_Sizes = tuple[int, ...]
_Boxes = tuple[str, _Sizes, list[tuple[tuple[_Sizes, _Sizes], int, int, bytes | None]]]
_decode = msgspec.msgpack.Decoder(
    tuple[str, int, _Sizes, _Sizes | None, int, str | None, tuple[int, int, bytes] | None, _Boxes | None]
).decode


def pack(leaf: LazyTensor) -> bytes:
    """Where the leaf lies in its source."""
    shown, stored, kind = leaf.shown, leaf.stored, kind_of(leaf)
    offset = shown.storage_offset() * shown.dtype.itemsize if shown.numel() else 0
    stride = None if shown.is_contiguous() else shown.stride()
    dtype, flags = traits.DTYPE_NAMES[shown.dtype], kind.kind * 2 + kind.requires_grad
    checked = boxes = None
    if isinstance(stored, LeafBoxes):
        boxes = (stored.leaf.dtype, stored.leaf.shape, stored.needed(shown))
        device = None if stored.place is None else kind.device
        return _encode((dtype, offset, tuple(shown.shape), stride, flags, device, checked, boxes))
    if isinstance(stored, LeafBytes):
        offset += stored.start if shown.numel() else 0
        checked = None if stored.checksum is None else (stored.offset, stored.nbytes, stored.checksum)
    return _encode((dtype, offset, tuple(shown.shape), stride, flags, kind.device, checked, boxes))


def unpack(cls: type[Lazy], source: Source, packed: bytes) -> Lazy:
    """The leaf that was packed. Raises CorruptionError if it isn't in the bytes of its source."""
    try:
        dtype_name, offset, shape, stride, flags, device, checked, boxes = _decode(packed)
        dtype = traits.DTYPES[dtype_name]
        stride = traits.contiguous_stride(shape) if stride is None else stride
        nbytes = traits.reach(shape, stride) * dtype.itemsize
        if len(stride) != len(shape) or not 0 <= flags < 8:
            raise ValueError("it is none")
        end = max((offset + nbytes, *((checked[0] + checked[1],) if checked else ())))
        limit = source.memory.nbytes
        if boxes is not None:
            leaf, apart = _read_boxes(boxes)
            for one in apart:
                check_box(leaf, one, limit)
            limit = leaf.nbytes
        if min((0, offset, *shape, *stride, *(checked or ())[:2])) < 0 or end > limit:
            raise ValueError("it lies outside of the value")
    except (msgspec.MsgspecError, KeyError, ValueError, MalformedError) as error:
        raise source.damaged(f"a reference to a leaf is damaged: {error}") from None
    kind, requires_grad = divmod(flags, 2)
    found = traits.Traits(kind, bool(requires_grad), device)
    with modes.put_aside(), torch.inference_mode(False):
        if boxes is not None:
            leaf, apart = _read_boxes(boxes)
            stored = LeafBoxes(source, leaf, apart, need_device(device))
            shown = over(stored.shown.untyped_storage(), dtype, offset // dtype.itemsize, shape, stride, "meta")
            return with_kind(wrap(cls, shown, stored), found)
        place = need_device(device)
        return with_kind(lazy_bytes(cls, source, dtype, offset, shape, stride, checked, place), found)


def _read_boxes(boxes: _Boxes) -> tuple[Leaf, list[StoredBox]]:
    """The stored leaf, by no name, and its boxes. Raises MalformedError."""
    dtype, shape, found = boxes
    size = check_extent(shape, None, traits.DTYPES[dtype]) * traits.DTYPES[dtype].itemsize
    leaf = Leaf((), dtype, shape, None, 0, size)
    return leaf, [StoredBox(Box(*box), place, rank, checksum) for box, place, rank, checksum in found]
