"""Lazy leaves as references, for pickles that are sent.

A reference to a leaf is its source (pickled once, however many leaves of it go along) and a msgpack of

    [dtype, offset of its first element, shape, strides or nil, flags, device or nil, checked or nil]

with flags = kind * 2 + requires_grad, and checked = [offset, size, checksum] of the stored leaf where its checksum is
still to be compared. So it is self-contained: what else the value has doesn't matter.
"""

from __future__ import annotations

import msgspec
import torch

from memstore.structure import modes, need_device, over, traits
from memstore.view.lazy import Lazy, LazyTensor, guard, kind_of, with_kind, wrap
from memstore.view.leaf_bytes import LeafBytes
from memstore.view.source import Source

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(
    tuple[str, int, tuple[int, ...], tuple[int, ...] | None, int, str | None, tuple[int, int, bytes] | None]
).decode


def pack(leaf: LazyTensor) -> bytes:
    """Where the leaf lies in its source."""
    shown, stored, kind = leaf.shown, leaf.stored, kind_of(leaf)
    offset = stored.start + shown.storage_offset() * shown.dtype.itemsize if shown.numel() else 0
    stride = None if shown.is_contiguous() else shown.stride()
    checked = None if stored.checksum is None else (stored.offset, stored.nbytes, stored.checksum)
    dtype, flags = traits.DTYPE_NAMES[shown.dtype], kind.kind * 2 + kind.requires_grad
    return _encode((dtype, offset, tuple(shown.shape), stride, flags, kind.device, checked))


def unpack(cls: type[Lazy], source: Source, packed: bytes) -> Lazy:
    """The leaf that was packed. Raises CorruptionError if it isn't in the bytes of its source."""
    try:
        dtype_name, offset, shape, stride, flags, device, checked = _decode(packed)
        dtype = traits.DTYPES[dtype_name]
        stride = traits.contiguous_stride(shape) if stride is None else stride
        nbytes = traits.reach(shape, stride) * dtype.itemsize
        end = max((offset + nbytes, *((checked[0] + checked[1],) if checked else ())))
        if min((0, offset, *shape, *stride, *(checked or ())[:2])) < 0 or end > source.memory.nbytes:
            raise ValueError("it lies outside of the value")
        if len(stride) != len(shape) or not 0 <= flags < 8:
            raise ValueError("it is none")
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise source.damaged(f"a reference to a leaf is damaged: {error}") from None
    with modes.put_aside(), torch.inference_mode(False):
        memory, base = source.memory[offset : offset + nbytes], None
        if offset % dtype.itemsize:
            memory = memory.copy()
            base = over(torch.from_numpy(memory).untyped_storage(), dtype, 0, (0,), (1,))
        shown = over(torch.from_numpy(memory).untyped_storage(), dtype, 0, shape, stride)
        guard(shown)
        kind, requires_grad = divmod(flags, 2)
        stored = LeafBytes(source, *(checked or (offset, nbytes, None)), offset, need_device(device))
        stored.base = base
        leaf = wrap(cls, shown, stored)
        return with_kind(leaf, traits.Traits(kind, bool(requires_grad), device))
