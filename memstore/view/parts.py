"""A stored value as its tensors and objects, by name: for who looks at it, and needs none of its containers.

No container is built, no class is looked up and no pickle is read; a tensor that a container would look into (the parts
of a nested or a sparse one) comes lazily too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memstore import contents, structure
from memstore.engine import MappedEntry, Path, Pin, PinOptions, Root
from memstore.errors import CorruptionError
from memstore.structure import DTYPES, modes, traits
from memstore.view.lazy import wrap
from memstore.view.leaf import StoredTensor
from memstore.view.leaf_boxes import LeafBoxes
from memstore.view.leaves import lazy_bytes
from memstore.view.source import PinnedSource, without_leaves


class Parts(NamedTuple):
    """What a value consists of.

    Attributes:
        structure: "TensorDict[3] of 12 leaves".
        tensors: each leaf, as it is stored.
        objects: all else; a Pickled stands for what was stored with pickle.
    """

    structure: str
    tensors: dict[Path, torch.Tensor]
    objects: dict[Path, Any]


@modes.put_aside()
def parts_of(root: Root, key: str, held: MappedEntry, options: PinOptions) -> Parts:
    """The parts of a held version: lazy leaves on the CPU. Raises CorruptionError."""
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
                tensors[leaf.name] = lazy_bytes(
                    StoredTensor, source, DTYPES[leaf.dtype], leaf.offset, leaf.shape, stride
                )
        objects = structure.show_objects(encoded, plan.object_count)
    except CorruptionError as error:
        raise error if error.key is not None else contents.blame(root, key, record, error) from error
    return Parts(structure.structure_text(plan), tensors, dict(zip(plan.object_names, objects, strict=True)))
