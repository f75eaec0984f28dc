"""Views: the containers of a held version with lazy leaves instead of its tensors; and its leaves loaded one by one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memstore import contents, structure
from memstore._compat import throw_on_mutable_data_ptr
from memstore.contents import CHECKSUM_SIZE, count_read
from memstore.engine import Absent, MappedEntry, Path, Pin, PinOptions, Root, lies_in_mapping
from memstore.errors import CorruptionError, MemstoreError
from memstore.structure import DTYPES, RefusedError, Walk, flattens, modes, need_device, over, traits
from memstore.view.lazy import LazyTensor, kind_of, read, with_kind, wrap
from memstore.view.leaf import StoredTensor, lazy_bytes
from memstore.view.leaf_boxes import LeafBoxes
from memstore.view.source import LeafBytes, PinnedSource, Source, without_leaves

# --- Views -----------------------------------------------------------------------------------------------------------


def view(root: Root, key: str, held: MappedEntry, options: PinOptions, device: torch.device | str | None = None) -> Any:
    """Returns the held version's containers with lazy leaves. References to them are pins with these options."""
    if modes.are_active():
        with modes.put_aside():
            return _view(root, key, held, options, device)
    return _view(root, key, held, options, device)


def _view(root: Root, key: str, held: MappedEntry, options: PinOptions, device: torch.device | str | None) -> Any:
    record, mapping = held.record, held.mapping
    wanted = None if device is None else torch.device(device)
    try:
        plan, objects, memory, boxes = contents.locate(root, key, held)
        source = PinnedSource(Pin(root, key, without_leaves(record), held, options), memory)
        place = None if wanted is None or wanted.type == "cpu" else wanted
        sums, loaded = record.checksums if options.verify else None, plan.loaded

        def make_leaf(i: int, tensor: torch.Tensor) -> torch.Tensor:
            stored, kind = plan.leaves[i], plan.traits[i]
            apart = structure.boxes_of_leaf(plan, boxes, i) if boxes else ()
            if apart and (options.verify or not structure.lies_in_order(stored, apart)):
                own = place if wanted is not None else need_device(kind.device)
                leaf_boxes = LeafBoxes(source, stored, apart, own, verify=options.verify)
                leaf = wrap(StoredTensor, leaf_boxes.shown, leaf_boxes)
                return leaf if kind is traits.PLAIN else with_kind(leaf, kind)
            checksum = None if sums is None else sums[i * CHECKSUM_SIZE : (i + 1) * CHECKSUM_SIZE]
            item = tensor.dtype.itemsize
            start = stored.offset - int(tensor.storage_offset()) * item
            own = place if wanted is not None or kind is traits.PLAIN else need_device(kind.device)
            leaf_bytes = LeafBytes(source, stored.offset, stored.nbytes, checksum, start, own)
            if stored.offset % item:  # it had to be copied
                leaf_bytes.base = tensor
            if loaded or leaf_bytes.base is not None:  # others may write into this storage
                tensor = _twin(tensor)
            throw_on_mutable_data_ptr(tensor)
            leaf = wrap(StoredTensor, tensor, leaf_bytes)
            return leaf if kind is traits.PLAIN else with_kind(leaf, kind)

        if held.absent is not None and loaded:
            _bring_loaded(held.absent, source, plan, boxes)
        for i in loaded:
            stored = plan.leaves[i]
            apart = structure.boxes_of_leaf(plan, boxes, i)
            if apart:
                leaf_boxes = LeafBoxes(source, stored, apart, verify=options.verify)
                leaf_boxes.copy_to(structure.leaf_tensor(stored, memory), leaf_boxes.shown)
            elif sums is not None:
                checksum = sums[i * CHECKSUM_SIZE : (i + 1) * CHECKSUM_SIZE]
                LeafBytes(source, stored.offset, stored.nbytes, checksum, stored.offset).check()
            count_read(stored.nbytes)
        return structure.rebuild_lazily(
            plan, objects, memory, mapping, make_leaf, allow_pickle=options.allow_pickle, device=wanted
        )
    except MemstoreError as error:
        if isinstance(error, CorruptionError) and error.key is None:
            raise contents.blame(root, key, record, error) from error
        error.key = key
        raise


def _bring_loaded(absent: Absent, source: PinnedSource, plan: structure.Plan, boxes: contents.Boxes) -> None:
    """Brings all leaves that a view loads, by one request a host."""
    leaves = [plan.leaves[i] for i in plan.loaded]
    found = [
        structure.box_tensor(leaf, one, source.memory)
        for i, leaf in zip(plan.loaded, leaves, strict=True)
        for one in structure.boxes_of_leaf(plan, boxes, i)
    ]
    whole = [torch.from_numpy(source.memory[leaf.offset : leaf.offset + leaf.nbytes]) for leaf in leaves]
    contents.bring(absent, [*found, *whole])


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor over a second storage of the same bytes."""
    whole = over(tensor.untyped_storage(), torch.uint8, 0, (tensor.untyped_storage().nbytes(),), (1,))
    storage = torch.from_numpy(whole.numpy()).untyped_storage()
    return over(storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())


@flattens(StoredTensor)
def _flatten_leaf(value: StoredTensor, walk: Walk) -> Any:
    """Flattens a lazy leaf: a put of a view stores what it shows."""
    if walk.in_place:
        raise RefusedError("a lazy leaf of a view, whose version never changes")
    return walk.visit(traits.with_traits(read(value).detach(), kind_of(value)._replace(device=None)))


# --- Lazy leaves, loaded one by one ----------------------------------------------------------------------------------


@modes.uncompiled
def load_leaf(leaf: LazyTensor) -> torch.Tensor:
    """Returns the leaf as a get gives it: where it lies; or, if it is in boxes that lie apart, in memory of its own.

    Only for a view that nobody else has: what is written to the tensor, the view would show.
    """
    with modes.put_aside(), torch.inference_mode(False), torch.no_grad():
        values, source = read(leaf), leaf.stored.source
        plain = over(values.untyped_storage(), values.dtype, values.storage_offset(), values.shape, values.stride())
        if plain.numel() and lies_in_mapping(plain.data_ptr()):  # the storage keeps it: see structure/rebuilding.py
            keep = source.memory if source.mapping is None else source.mapping
            plain.untyped_storage()._memstore_mapping = keep  # type: ignore[attr-defined]
        return traits.with_traits(plain, kind_of(leaf))


def own_leaf(leaf: LazyTensor, sources: dict[Source, Source | None]) -> torch.Tensor:
    """Returns the leaf in memory that nobody else sees: mapped once more, copy on write; copied where that can't be.

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


# --- The tensors and objects of a value, without its containers ------------------------------------------------------
# A stored value as its tensors and objects, by name: for who looks at it, and needs none of its containers.
#
# No container is built, no class is looked up and no pickle is read; a tensor that a container would look into (the
# parts of a nested or a sparse one) comes lazily too.


class ValueParts(NamedTuple):
    """Parts that a value consists of.

    Attributes:
        structure: "TensorDict[3] of 12 leaves".
        tensors: each leaf, as it is stored.
        objects: all else; a Pickled stands for what was stored with pickle.
    """

    structure: str
    tensors: dict[Path, torch.Tensor]
    objects: dict[Path, Any]


@modes.put_aside()
def parts_of(root: Root, key: str, held: MappedEntry, options: PinOptions) -> ValueParts:
    """Returns the parts of a held version: lazy leaves on the CPU. Raises CorruptionError."""
    record = held.record
    try:
        plan, encoded, memory, boxes = contents.locate(root, key, held)
        source = PinnedSource(Pin(root, key, without_leaves(record), held, options), memory)
        tensors: dict[Path, torch.Tensor] = {}
        for i, leaf in enumerate(plan.leaves):
            apart = structure.boxes_of_leaf(plan, boxes, i)
            if apart:
                stored = LeafBoxes(source, leaf, apart, verify=options.verify)
                tensors[leaf.name] = wrap(StoredTensor, stored.shown, stored)
            else:
                stride = traits.contiguous_stride(leaf.shape) if leaf.stride is None else leaf.stride
                tensors[leaf.name] = lazy_bytes(source, DTYPES[leaf.dtype], leaf.offset, leaf.shape, stride)
        objects = structure.show_objects(encoded, plan.object_count)
    except CorruptionError as error:
        raise error if error.key is not None else contents.blame(root, key, record, error) from error
    return ValueParts(structure.structure_text(plan), tensors, dict(zip(plan.object_names, objects, strict=True)))
