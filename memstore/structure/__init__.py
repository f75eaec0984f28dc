"""Nested values and flat lists of tensors: a value is taken apart for a put, and built again for a get.

The modules, from the top floor down; a module imports only those below it:

    transport        tensors of memstore's memory through multiprocessing queues
    target_filling   get with out= and like=
    target_matching  what a stored value and such a target have in common, and how they differ
    rebuilding       a stored value, built again
    descriptions     values in external files, and rows in place; what a stored value looks like
    shards           what one rank holds of a sharded value
    flattening       a value, taken apart: its plan, its tensors and its objects
    copying          tensors, copied into memory
    containers/      each kind of container: how it is flattened, and the node that builds it again
    walk             one walk over a value: its tree, its tensors, its other leaves
    plans            how the values of one structure are laid out in memory; the same as bytes
    objects          leaves that are no tensors, as bytes
    extensions       those of them that msgpack lacks: numpy's, torch's, the standard library's
    pickled          those that only pickle can store; the only module that imports pickle
    classes          classes by name, and attributes past their code
    tree             which containers a value has: trees, and nodes that are made of them
    ties             which tensors share bytes
    tensor_memory    whether a tensor's bytes are there, and how they are overwritten
    traits           dtypes, devices and strides
    refusals         bytes that no put wrote, and values that can't be stored
"""

from __future__ import annotations

from memstore import _modes as modes
from memstore.structure import traits
from memstore.structure.classes import class_name, shown_attributes
from memstore.structure.containers import (
    are_shards_of,
    check_wrapped_shards,
    clone_parts,
    fill_parts,
    flatten_wrapped_shards,
    has_wrapped_shards,
    is_made_of_several,
    is_wrapper,
    pair_parts,
    pair_shards,
    tensor_of_array,
    why_parts_not_filled,
)
from memstore.structure.copying import CopyPlan, GatheredCopy, PlainCopy, copy_tensors
from memstore.structure.descriptions import (
    ExternalValue,
    describe_external_tree,
    describe_external_value,
    iter_tensors,
    join_external,
    leaf_table,
    plan_at,
    plan_dense,
    raw_objects,
    stored_bytes,
    structure_text,
)
from memstore.structure.flattening import FlatValue, contents, fill, flatten
from memstore.structure.objects import PICKLED, decode_objects, show_objects, written_objects
from memstore.structure.pickled import read_known_pickle, read_pickle
from memstore.structure.plans import (
    Plan,
    capacity_of,
    check_extent,
    plan_of,
    plan_of_rows,
    read_leaf,
)
from memstore.structure.rebuilding import (
    assemble,
    bare_array,
    box_bytes,
    box_tensor,
    boxes_of_leaf,
    build,
    check_box,
    check_boxes,
    in_own_storage,
    leaf_tensor,
    lies_in_order,
    rebuild,
    rebuild_lazily,
)
from memstore.structure.refusals import (
    MalformedError,
    RefusedError,
    render_path,
    require,
)
from memstore.structure.shards import HeldLeaf, HeldValue, has_shards, held_in_memory, in_memory, take_shards_apart
from memstore.structure.target_filling import get_into, get_like
from memstore.structure.target_matching import can_cast
from memstore.structure.tensor_memory import (
    copy_into,
    is_readable,
    memory_of,
    over,
    takes_bytes,
    why_no_memory,
    why_not_filled,
)
from memstore.structure.traits import (
    DTYPE_NAMES,
    DTYPES,
    MOST_EXPANDED,
    NUMPY_DTYPES,
    Traits,
    contiguous_stride,
    count,
    expanded_bytes,
    has_gaps,
    need_device,
    own_device,
    pack,
    read_flags,
    repeats,
    to_device,
    to_flags,
)
from memstore.structure.transport import lend_by
from memstore.structure.transport import register as _register_transport
from memstore.structure.tree import (
    MAX_DEPTH,
    TENSOR,
    LeafNames,
    Tree,
    TreesDifferError,
    merge_trees,
    name_of,
    tree_names,
)
from memstore.structure.walk import Walk, check_nesting, flattens, take_apart

_register_transport()

__all__ = [
    "CopyPlan",
    "DTYPES",
    "DTYPE_NAMES",
    "ExternalValue",
    "FlatValue",
    "GatheredCopy",
    "HeldLeaf",
    "HeldValue",
    "LeafNames",
    "MAX_DEPTH",
    "MalformedError",
    "NUMPY_DTYPES",
    "PICKLED",
    "PlainCopy",
    "Plan",
    "RefusedError",
    "TENSOR",
    "Traits",
    "Tree",
    "TreesDifferError",
    "Walk",
    "are_shards_of",
    "assemble",
    "bare_array",
    "box_bytes",
    "box_tensor",
    "boxes_of_leaf",
    "build",
    "capacity_of",
    "can_cast",
    "check_box",
    "check_boxes",
    "check_extent",
    "check_wrapped_shards",
    "class_name",
    "clone_parts",
    "contents",
    "contiguous_stride",
    "copy_into",
    "copy_tensors",
    "count",
    "decode_objects",
    "describe_external_tree",
    "describe_external_value",
    "fill",
    "fill_parts",
    "flatten",
    "flatten_wrapped_shards",
    "flattens",
    "get_into",
    "get_like",
    "in_memory",
    "in_own_storage",
    "has_gaps",
    "has_shards",
    "has_wrapped_shards",
    "held_in_memory",
    "is_made_of_several",
    "is_readable",
    "is_wrapper",
    "iter_tensors",
    "join_external",
    "leaf_table",
    "leaf_tensor",
    "lend_by",
    "lies_in_order",
    "memory_of",
    "merge_trees",
    "modes",
    "name_of",
    "need_device",
    "own_device",
    "over",
    "pack",
    "pair_parts",
    "pair_shards",
    "plan_at",
    "plan_dense",
    "plan_of",
    "plan_of_rows",
    "read_flags",
    "read_leaf",
    "read_known_pickle",
    "read_pickle",
    "rebuild",
    "rebuild_lazily",
    "render_path",
    "check_nesting",
    "MOST_EXPANDED",
    "expanded_bytes",
    "repeats",
    "require",
    "show_objects",
    "shown_attributes",
    "stored_bytes",
    "structure_text",
    "take_apart",
    "take_shards_apart",
    "takes_bytes",
    "tensor_of_array",
    "to_device",
    "to_flags",
    "traits",
    "tree_names",
    "why_no_memory",
    "why_not_filled",
    "why_parts_not_filled",
    "written_objects",
    "raw_objects",
]
