"""Views of held versions, and lazy leaves as references.

A reference to a leaf is its source (pickled once, however many leaves of it go along) and a msgpack of

    [dtype, offset of its first element, shape, strides or nil, flags, device or nil, checked or nil]

with flags = kind * 2 + requires_grad, and checked = [offset, size, checksum] of the stored leaf where its checksum is
still to be looked at. So it is self-contained: what else the value has doesn't matter.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from memstore import contents, structure
from memstore.contents.checksums import CHECKSUM_SIZE
from memstore.engine import MappedEntry, Pin, PinOptions, Root
from memstore.errors import CorruptionError, MemstoreError
from memstore.structure import RefusedError, Walk, flattens, modes, need_device, over, traits
from memstore.view.leaf import StoredTensor, guard, kind_of, read, shown_of, span_of, with_kind, wrap
from memstore.view.saving import goes_to_a_file, plain_tensor
from memstore.view.source import Source, Span, count_read, without_leaves

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(
    tuple[str, int, tuple[int, ...], tuple[int, ...] | None, int, str | None, tuple[int, int, bytes] | None]
).decode


def view(root: Root, key: str, held: MappedEntry, options: PinOptions, device: torch.device | str | None = None) -> Any:
    """The held version's containers with lazy leaves. References to them are pins with these options."""
    if modes.are_active():
        with modes.put_aside():
            return _view(root, key, held, options, device)
    return _view(root, key, held, options, device)


def _view(root: Root, key: str, held: MappedEntry, options: PinOptions, device: torch.device | str | None) -> Any:
    record, mapping = held.record, held.mapping
    wanted = None if device is None else torch.device(device)
    try:
        plan, objects, memory = contents.locate(root, key, held)
        source = Source(Pin(root, key, without_leaves(record), held, options), memory)
        place = None if wanted is None or wanted.type == "cpu" else wanted
        sums = record.checksums if options.verify else None

        def make_leaf(i: int, tensor: torch.Tensor) -> torch.Tensor:
            stored, kind = plan.leaves[i], plan.traits[i]
            checksum = None if sums is None else sums[i * CHECKSUM_SIZE : (i + 1) * CHECKSUM_SIZE]
            item = tensor.dtype.itemsize
            start = stored.offset - int(tensor.storage_offset()) * item
            span = Span(source, stored.offset, stored.nbytes, checksum, start)
            if stored.offset % item:  # it had to be copied
                span.base = tensor
            if plan.loaded or span.base is not None:  # others may write into this storage
                tensor = _twin(tensor)
            guard(tensor)
            if kind is traits.PLAIN:
                return wrap(tensor, span, place)
            return with_kind(wrap(tensor, span, place if wanted is not None else need_device(kind.device)), kind)

        for i in plan.loaded:
            stored = plan.leaves[i]
            if sums is not None:
                checksum = sums[i * CHECKSUM_SIZE : (i + 1) * CHECKSUM_SIZE]
                Span(source, stored.offset, stored.nbytes, checksum, stored.offset).check()
            count_read(stored.nbytes)
        return structure.rebuild_lazily(
            plan, objects, memory, mapping, make_leaf, allow_pickle=options.allow_pickle, device=wanted
        )
    except MemstoreError as error:
        if isinstance(error, CorruptionError) and error.key is None:
            raise contents.damaged(root, key, record, error.detail) from error
        error.key = key
        raise


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor over a second storage of the same bytes."""
    whole = over(tensor.untyped_storage(), torch.uint8, 0, (tensor.untyped_storage().nbytes(),), (1,))
    storage = torch.from_numpy(whole.numpy()).untyped_storage()
    return over(storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())


def pickle_leaf(leaf: StoredTensor, protocol: Any) -> Any:
    """For pickle: a plain tensor where a file is written, else a reference."""
    if modes.are_active():
        with modes.put_aside(entirely=True):
            return pickle_leaf(leaf, protocol)
    return plain_tensor(leaf).__reduce_ex__(protocol) if goes_to_a_file() else reduce_leaf(leaf)


def reduce_leaf(leaf: StoredTensor) -> tuple[Any, ...]:
    """The reference."""
    shown, span, kind = shown_of(leaf), span_of(leaf), kind_of(leaf)
    offset = span.start + shown.storage_offset() * shown.dtype.itemsize if shown.numel() else 0
    stride = None if shown.is_contiguous() else shown.stride()
    checked = None if span.checksum is None else (span.offset, span.nbytes, span.checksum)
    dtype, flags = traits.DTYPE_NAMES[shown.dtype], kind.kind * 2 + kind.requires_grad
    packed = _encode((dtype, offset, tuple(shown.shape), stride, flags, kind.device, checked))
    return restore_leaf, (span.source, packed)


def restore_leaf(source: Source, packed: bytes) -> StoredTensor:
    """Unpickles a leaf. Raises CorruptionError if it isn't in the bytes of its source."""
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
        span = Span(source, *(checked or (offset, nbytes, None)), start=offset)
        span.base = base
        leaf = wrap(shown, span, need_device(device))
        return with_kind(leaf, traits.Traits(kind, bool(requires_grad), device))


@flattens(StoredTensor)
def _flatten_leaf(value: StoredTensor, walk: Walk) -> Any:
    """A put of a view stores what it shows."""
    if walk.in_place:
        raise RefusedError("a lazy leaf of a view, whose version never changes")
    return walk.visit(traits.with_traits(read(value).detach(), kind_of(value)._replace(device=None)))
