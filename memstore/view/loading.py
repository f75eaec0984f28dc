"""Lazy leaves loaded one by one, for who wants all of them after each other and never all of them at once."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import torch

from memstore.engine import lies_in_mapping
from memstore.structure import modes, over, traits
from memstore.view.lazy import LazyTensor, kind_of, read
from memstore.view.leaf_bytes import LeafBytes
from memstore.view.source import Source


@modes.uncompiled
def load_leaf(leaf: LazyTensor) -> torch.Tensor:
    """The leaf as a get gives it: where it lies; or, if it is in boxes that lie apart, in memory of its own.

    Only for a view that nobody else has: what is written to the tensor, the view would show.
    """
    with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
        values, source = read(leaf), leaf.stored.source
        plain = over(values.untyped_storage(), values.dtype, values.storage_offset(), values.shape, values.stride())
        if plain.numel() and lies_in_mapping(plain.data_ptr()):  # the storage keeps it: see structure/get/storage.py
            keep = source.memory if source.mapping is None else source.mapping
            plain.untyped_storage()._memstore_mapping = keep  # type: ignore[attr-defined]
        return traits.with_traits(plain, kind_of(leaf))


def own_leaf(leaf: LazyTensor, sources: dict[Source, Source | None]) -> torch.Tensor:
    """The leaf in memory that nobody else sees: mapped once more, copy on write; copied where that can't be.

    Args:
        sources: those that were mapped for former leaves.
    """
    with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
        stored = leaf.stored
        if isinstance(stored, LeafBytes) and stored.place is None and not stored.start % leaf.dtype.itemsize:
            if stored.source not in sources:
                sources[stored.source] = stored.source.again()
            source = sources[stored.source]
            if source is not None:
                own = LeafBytes(source, stored.offset, stored.nbytes, stored.checksum, stored.start)
                values = own.tensor(leaf.shown)
                own.use(0)  # compares it with its checksum, if it has one
                values.untyped_storage()._memstore_mapping = source.mapping  # type: ignore[attr-defined]
                return values
        return read(leaf).clone()
